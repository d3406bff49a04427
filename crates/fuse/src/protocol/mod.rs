//! The messages: numbers and layouts of the kernel's header, requests as they are parsed, replies as they are filled in.

pub(crate) mod abi;
pub(crate) mod errno;
pub(crate) mod reply;
pub(crate) mod request;
