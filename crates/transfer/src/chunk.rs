//! Files are cut by content (FastCDC): an inserted byte changes the chunk that it is in and none of those behind.

use std::fmt;
use std::io::{self, Read};

use fastcdc::v2020::{Error, StreamCDC};
use serde::{Deserialize, Serialize};

/// Bytes of the shortest chunk, but for the last one of a file.
const SHORTEST: usize = 4 * 1024;
/// Bytes of a chunk on average. A change costs about one of them.
const AVERAGE: usize = 16 * 1024;
/// Bytes of the longest chunk.
pub const LONGEST: usize = 64 * 1024;

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

/// Cuts what it reads and gives each chunk to `take`.
///
/// # Errors
/// What cannot be read.
pub fn cut(read: &mut dyn Read, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    for chunk in StreamCDC::new(read, SHORTEST, AVERAGE, LONGEST) {
        match chunk {
            Ok(chunk) => take(&chunk.data),
            Err(Error::Empty) => break,
            Err(Error::IoError(error)) => return Err(error),
            Err(error) => return Err(io::Error::other(error.to_string())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(bytes: &[u8]) -> Vec<ChunkId> {
        let mut ids = Vec::new();
        cut(&mut &*bytes, |chunk| ids.push(ChunkId::of(chunk))).unwrap();
        ids
    }

    /// Numbers that look random, the same each time.
    fn noise(len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        blake3::Hasher::new().finalize_xof().fill(&mut out);
        out
    }

    #[test]
    fn an_inserted_byte_changes_only_the_chunks_around_it() {
        let bytes = noise(2_000_000);
        let mut changed = bytes.clone();
        changed.insert(1_000_000, 7);
        let (before, after) = (ids(&bytes), ids(&changed));
        assert!(before.len() > 60, "{}", before.len());
        let new = after.iter().filter(|id| !before.contains(id)).count();
        assert!((1..=2).contains(&new), "{new} of {} are new", after.len());
    }

    #[test]
    fn chunks_together_are_what_was_cut() {
        for len in [0, 1, SHORTEST, AVERAGE, 300_000] {
            let (bytes, mut together) = (noise(len), Vec::new());
            cut(&mut bytes.as_slice(), |chunk| together.extend_from_slice(chunk)).unwrap();
            assert_eq!(together, bytes);
        }
    }

    /// A mirror is read for years: the cuts of a version must find those of older ones.
    #[test]
    fn cuts_stay_where_they_are() {
        let mut lengths = Vec::new();
        cut(&mut noise(120_000).as_slice(), |chunk| lengths.push(chunk.len())).unwrap();
        assert_eq!(lengths, LENGTHS);
    }

    const LENGTHS: &[usize] = &[25_574, 7_224, 26_313, 21_921, 38_316, 652];
}
