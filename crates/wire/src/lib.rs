//! What client and server say to each other: Protocol Buffers messages, their framing, and checked
//! conversions to the types of `hayloft-model`.
//!
//! A connection carries frames both ways: a length, checks ([`frame`]), and the bytes of one
//! encoded [`ClientMessage`] or [`ServerMessage`]. Order matters and is kept: what is sent first takes
//! effect first. The rows in a volume's tables have the same encoding as in messages.

mod check;
mod convert;
pub mod frame;
pub mod listing;
mod locks;
mod messages;
mod versions;
pub mod weight;
pub mod words;

pub use check::BatchCheck;
pub use convert::{InvalidMessage, decode_blocks, encode_blocks, error_code, error_of};
pub use locks::LockKind;
pub use messages::admin::*;
pub use messages::batches::*;
pub use messages::clients::*;
pub use messages::locks::*;
pub use messages::reading::*;
pub use messages::rows::{DentryRow, InodeRowMessage, NotedRow, WrittenEntry, Xattr};
pub use messages::session::*;
pub use messages::sharing::*;
pub use messages::snapshots::*;
pub use messages::*;
pub use versions::{Agreed, FEATURES, LETS_GO, MANY_SLOTS, Mismatch, PROTOCOL_OLDEST, SHIPS, Spoken, agree};

/// The newest version of the protocol that this crate speaks; see [`agree`].
pub const PROTOCOL: u32 = 8;

/// Largest frame that a peer accepts, bytes. Larger answers are sent in parts.
pub const FRAME_MAX: usize = 64 << 20;
