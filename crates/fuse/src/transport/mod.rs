//! How messages travel: read and written on /dev/fuse, through io_uring, and notifications to the kernel.

pub(crate) mod control;
pub(crate) mod device;
pub(crate) mod notify;
pub(crate) mod ring;
