//! What POSIX asks of a file system.

pub(crate) mod dirs;
pub(crate) mod files;
pub(crate) mod rights;
pub(crate) mod xattr;
