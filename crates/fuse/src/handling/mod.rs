//! What both transports share: from a message to an answer of the file system, on the thread that has read it or on a pool.

mod caller;
pub(crate) mod config;
pub(crate) mod counters;
pub(crate) mod engine;
pub(crate) mod error;
pub(crate) mod filesystem;
pub(crate) mod init;
pub(crate) mod interrupt;
pub(crate) mod pool;
pub(crate) mod settle;
