//! The processes inside: the holder, which builds the root and ends it, and the command.

pub(crate) mod holder;
pub mod program;
pub(crate) mod seccomp;
pub(crate) mod task;
