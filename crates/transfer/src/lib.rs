//! Trees from one server to another one, and by way of mirrors: folders of a few large files that never change, behind any web
//! server. Only chunks that the receiver lacks travel. Receives paths; mounts nothing.

mod apply;
mod cache;
mod changes;
#[cfg(test)]
mod changes_tests;
pub mod chunk;
mod contents;
mod cutter;
mod error;
mod far;
mod fetch;
mod large;
pub mod leftovers;
mod manifest;
mod merge;
mod mirror;
mod pack;
mod receive;
mod seed;
mod send;
mod sink;
mod source;
#[cfg(test)]
mod tests;
mod web;

pub use cache::{Cache, Packed};
pub use changes::Change;
pub use error::TransferError;
pub use far::{Far, Group, Part, Tag};
pub use fetch::Packs;
pub use manifest::Manifest;
pub use merge::{Conflict, merge};
pub use mirror::{LATEST, PackRef, Record};
pub use receive::{Received, Tree, fetch, make, manifest, useful};
pub use send::{Sent, Version, send};
pub use sink::{Folder, Sink, Tar};
pub use source::Source;
