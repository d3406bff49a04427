//! Content: encoded in chunks named by their hash, gathered in packs, kept in an object store.
//!
//! A *chunk* is at most one block of a file ([`hayloft_model::BLOCK_SIZE`]), named by the BLAKE3 hash
//! of its bytes and carried LZ4-compressed where that pays ([`encode_chunk`], [`decode_chunk`]; clients
//! use the same code). A *pack* is an object of several MiB with many chunks one after the other and an
//! index at its end ([`PackWriter`], [`PackIndex`]). A [`Store`] is where objects are kept: one
//! object-store URL, encrypted where it has a key ([`StoreKey`]).

mod codec;
mod counting;
mod error;
#[cfg(feature = "faults")]
pub mod faults;
mod gather;
mod histogram;
mod lanes;
mod near;
mod open;
mod pack;
mod sealed;
mod store;
mod trail;
mod unfinished;

pub use codec::{ChunkError, Codec, EncodedChunk, decode_chunk, encode_chunk, name_chunks};
pub use counting::{Operation, OperationStats, Watcher};
pub use error::StoreError;
pub use histogram::Histogram;
pub use lanes::hash_all;
pub use open::open;
pub use pack::{PackEntry, PackError, PackIndex, PackWriter, SealedPack};
pub use sealed::{KeyError, StoreKey};
pub use store::{Space, Store};
pub use trail::Trail;
