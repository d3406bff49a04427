//! Folders and files, reached from descriptors: nothing goes by path in what a task has left.

pub(crate) mod copy;
pub(crate) mod folder;
pub(crate) mod mounts;
mod removal;
