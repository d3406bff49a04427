//! One process that submits for all tasks of a user's build on this host.
//!
//! A task's own process hands what is to be run to it, with its standard streams, over a socket, passes signals on, and waits. It has
//! no connection to the broker and no threads for streams: starting it is most of what it costs. The relay is started by the first
//! task and ends some seconds after the last one. When a task's process ends, its task does.

pub mod again;
mod client;
mod key;
mod serve;
pub(crate) mod wire;

pub use client::{Handed, run};
pub use key::{ARGUMENT, Key};
pub use serve::serve;
