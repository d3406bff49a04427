//! The client of a volume: a FUSE file system that answers from its own tables, keeps a log of what
//! changed, and ships it to the server.
//!
//! The way of a change: the kernel's request ([`hayloft_fuse`]) -> the tree ([`hayloft_model::tree`]) and the
//! file's data in memory, answered at once -> a cut of the log every few seconds, or when something has to
//! be durable -> content and one batch of records on the session stream -> acknowledged when durable.
//!
//! `core` has what all rooms work on: the client, and the tables under its lock. A room uses only those above it
//! (`crates/cli/tests/layers.rs` checks that):
//!
//! | room | what is there |
//! |---|---|
//! | `host` | what is asked of this machine: clock, threads, memory |
//! | `keeper` | the second process, which takes from the kernel what it holds when this one is still |
//! | `cache` | file data and rows in memory, and how much of them |
//! | `kernel` | what the kernel knows, by which numbers, and what it is told |
//! | `session` | the connection with the server, and what arrives on it |
//! | `log` | what has changed here, its way to the server, and what becomes of it when the session ends before |
//! | `sharing` | what the server is asked for, recalls, locks |
//! | `fs` | the kernel's requests |
//! | `control` | what `hayloft sync`, `stats` and `umount` ask a mount |

mod cache;
pub mod control;
mod core;
mod error;
mod fs;
mod host;
mod keeper;
mod kernel;
mod log;
mod mount;
mod options;
mod session;
mod sharing;
mod stats;

pub use error::MountError;
pub use fs::VOLUME_XATTR;
pub use keeper::{ARGUMENT as KEEPER_ARGUMENT, run as keep};
pub use mount::{Mount, MountConfig, Stopper};
pub use options::{LocksOption, MountOptions, OptionError, TransportOption, parse_size};
