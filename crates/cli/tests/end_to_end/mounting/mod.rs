//! A mount by itself: how it begins and ends, what it keeps, what programs may do there.

pub(crate) mod keeper;
pub(crate) mod leaving;
pub(crate) mod lifecycle;
pub(crate) mod listings;
pub(crate) mod locks;
pub(crate) mod memory;
pub(crate) mod signals;
pub(crate) mod sockets;
pub(crate) mod space;
pub(crate) mod syncfs;
pub(crate) mod trial;
pub(crate) mod users;
