//! The keeper: a small process beside each client that outlives the client's stalls and its end.
//!
//! A client that is stopped, starved or swapped out does not notice that its lease runs out, and its kernel goes on serving
//! what nobody keeps true any more. The keeper does notice: it has a descriptor of the same connection, and memory in
//! common with the client, where that says until when its lease runs and which inodes the kernel knows. When the time
//! has passed, it takes attributes and pages of all of them from the kernel. A name is found by way of its directory's
//! attributes (the kernel checks rights by them), so names are not answered either; calls wait for the client from
//! then on. When the client has died, the keeper ends the connection, whatever threads of the client still wait for in
//! the kernel: nobody hangs. `docs/adr/0013-keeper.md` says why it is a process, and what else was looked at.

mod client;
mod known;
mod look;
mod process;
mod shared;
mod sweep;
mod teach;

pub(crate) use client::start;
pub(crate) use known::KnownInodes;
pub(crate) use look::Looker;
pub use process::run;
pub(crate) use shared::Shared;
pub(crate) use teach::{sync, teach};

/// The first argument of a program that is to be a keeper, or to do something at a mount point.
pub const ARGUMENT: &str = "mount-keeper";
