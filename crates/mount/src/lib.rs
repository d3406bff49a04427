//! The client of a volume: a FUSE file system that answers from its own tables, keeps a log of what
//! changed, and ships it to the server.
//!
//! The way of a change: the kernel's request ([`hayloft_fuse`]) -> the tree ([`hayloft_model::tree`]) and the
//! file's data in memory, answered at once -> a cut of the log every few seconds, or when something has to
//! be durable -> content and one batch of records on the session stream -> acknowledged when durable.

mod abandoned;
mod appends;
mod aside;
mod births;
mod clock;
mod committer;
pub mod control;
mod core;
mod data;
mod error;
mod fault;
mod foreword;
mod fs;
mod holders;
mod host;
mod keeper;
mod kernel;
mod link;
mod locks;
mod memory;
mod moment;
mod mount;
mod moved;
mod nodes;
mod options;
mod pages;
mod reader;
mod rejoin;
mod rescue;
mod sharing;
mod stats;
mod thread;
mod words;

pub use error::MountError;
pub use keeper::{ARGUMENT as KEEPER_ARGUMENT, run as keep};
pub use mount::{Mount, MountConfig, Stopper};
pub use options::{LocksOption, MountOptions, OptionError, TransportOption, parse_size};
