//! The server: volumes in SlateDB databases, sessions, commits, content, and the protocol's server side.
//!
//! [`Server::start`] opens a store and listens; each volume is opened when it is first asked for. The
//! layout of a volume's tables is described in `tables.rs`, that of its content in `hayloft-store`.

mod admin;
mod change;
mod check;
mod commit;
mod compaction;
mod config;
mod connection;
mod content;
mod database;
mod ended;
mod enter;
mod error;
mod history;
mod intake;
mod listing;
mod locks;
mod objects;
mod order;
mod registry;
mod replies;
mod reserve;
mod restore;
mod server;
mod session;
mod sharing;
mod stats;
mod sweep;
mod tables;
mod uses;
mod volume;

pub use config::Config;
pub use error::ServerError;
pub use server::Server;
