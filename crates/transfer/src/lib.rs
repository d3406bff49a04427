//! Trees from one server to another one, and by way of mirrors: folders of a few large files that never change, behind any web
//! server. Only chunks that the receiver lacks travel. Receives paths; mounts nothing.

mod apply;
mod cache;
mod changes;
#[cfg(test)]
mod changes_tests;
pub mod chunk;
mod contents;
mod error;
mod fetch;
pub mod leftovers;
mod manifest;
mod merge;
mod mirror;
mod pack;
mod receive;
mod seed;
mod send;
#[cfg(test)]
mod tests;

pub use cache::{Cache, Packed};
pub use changes::Change;
pub use error::TransferError;
pub use fetch::Packs;
pub use manifest::Manifest;
pub use merge::{Conflict, merge};
pub use mirror::{Folder, LATEST, PackRef, Record, Sink, Source, Tar};
pub use receive::{Received, Tree, fetch, make, manifest, useful};
pub use send::{Sent, Version, send};
