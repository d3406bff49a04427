//! Chunks by their names.

use std::fmt;

pub(crate) use hayloft_tree::chunk::{LONGEST, cut, first};
use serde::{Deserialize, Serialize};

/// The name of a chunk: the BLAKE3 hash of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ChunkId(pub [u8; 32]);

impl ChunkId {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> ChunkId {
        ChunkId(*blake3::hash(bytes).as_bytes())
    }

    /// Of bytes that hold nothing else than ids, one after the other.
    pub(crate) fn all(bytes: &[u8]) -> impl Iterator<Item = ChunkId> + '_ {
        bytes.as_chunks::<32>().0.iter().map(|id| ChunkId(*id))
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl From<ChunkId> for String {
    fn from(id: ChunkId) -> String {
        id.to_string()
    }
}

impl TryFrom<String> for ChunkId {
    type Error = blake3::HexError;

    fn try_from(text: String) -> Result<ChunkId, blake3::HexError> {
        blake3::Hash::from_hex(text).map(|hash| ChunkId(*hash.as_bytes()))
    }
}
