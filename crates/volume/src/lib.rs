//! The server: volumes in SlateDB databases, sessions, commits, content, and the protocol's server side.
//!
//! [`Server::start`] opens a store and listens; each volume is opened when it is first asked for. The
//! layout of a volume's tables is described in `database/tables.rs`, that of its content in `hayloft-store`.
//!
//! An open `volume::Volume` holds what all rooms work on; what they do is in `impl Volume` there. A room uses only those
//! above it (`crates/cli/tests/layers.rs` checks that):
//!
//! | room | what is there |
//! |---|---|
//! | `database` | the rows of a volume, and of the volumes of a store |
//! | `content` | content on its way into packs, the room that is kept free, dead content |
//! | `order` | the order of all changes, and how they become durable |
//! | `sharing` | who holds what, who is told, changes that are executed here |
//! | `session` | clients: their beginning, their end, their locks |
//! | `commit` | batches |
//! | `versions` | snapshots, forks, the way back |
//! | `admin` | what administrators ask for |
//! | `connection` | messages, and who handles them |

mod admin;
mod audit;
mod commit;
mod config;
mod connection;
mod content;
mod database;
mod error;
mod kin;
mod listen;
mod lost;
mod order;
mod peers;
mod replies;
mod rights;
mod room;
mod server;
mod session;
mod sharing;
mod versions;
mod volume;
mod words;

pub use config::Config;
pub use error::ServerError;
pub use listen::Socket;
pub use server::Server;
