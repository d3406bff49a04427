//! Commands for mounts.

pub(crate) mod args;
pub(crate) mod helper;
pub(crate) mod mount;
pub(crate) mod remount;
pub(crate) mod sync;
pub(crate) mod umount;
