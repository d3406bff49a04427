//! Packs: many chunks in one object, which describes itself.
//!
//! ```text
//! magic (8) | payload | payload | ... | index | count u32 | BLAKE3 of index and count (32) | magic (8)
//! index entry: hash (32) | offset u32 | payload length u32 | length u32 | codec u8
//! ```
//! Integers are little endian. The hash at the end guards the index; each chunk is guarded by its name.

use bytes::{BufMut, Bytes, BytesMut};
use hayloft_model::ContentHash;
use object_store::PutPayload;

use crate::{ChunkError, Codec, EncodedChunk, decode_chunk};

const MAGIC: &[u8; 8] = b"HAYPACK1";
const ENTRY: usize = 32 + 4 + 4 + 4 + 1;
const TAIL: usize = 4 + 32 + 8;

/// Where a chunk lies in its pack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackEntry {
    /// The chunk's name.
    pub hash: ContentHash,
    /// First byte of its payload in the pack.
    pub offset: u32,
    /// Bytes of its payload.
    pub payload_len: u32,
    /// Bytes of its content.
    pub len: u32,
    /// How the payload is encoded.
    pub codec: Codec,
}

/// Why an object is no whole pack.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// It is cut short, or is something else.
    #[error("the object is no whole pack")]
    NotAPack,
    /// The index does not have the hash that stands behind it.
    #[error("the pack's index is damaged")]
    Index,
    /// A chunk is damaged.
    #[error("a chunk of the pack is damaged")]
    Chunk(#[from] ChunkError),
}

/// A pack in the making, in memory.
#[derive(Default)]
pub struct PackWriter {
    payloads: Vec<Bytes>,
    entries: Vec<PackEntry>,
    size: usize,
    /// How many chunks at the end were named here.
    named: usize,
}

/// A finished pack: put its payload, then remember where its chunks are.
pub struct SealedPack {
    /// The object's bytes.
    pub payload: PutPayload,
    /// Size of the object.
    pub size: u64,
    /// Its chunks.
    pub entries: Vec<PackEntry>,
}

impl PackWriter {
    /// Adds a chunk that somebody else has named.
    ///
    /// # Panics
    /// Behind one that was named here.
    pub fn push(&mut self, chunk: EncodedChunk) {
        assert_eq!(self.named, 0, "what is to be verified comes first");
        self.add(chunk);
    }

    /// Adds a chunk that was named here: it needs no verifying.
    pub fn push_named(&mut self, chunk: EncodedChunk) {
        self.named += 1;
        self.add(chunk);
    }

    fn add(&mut self, chunk: EncodedChunk) {
        self.entries.push(PackEntry {
            hash: chunk.hash,
            offset: (MAGIC.len() + self.size) as u32,
            payload_len: chunk.payload.len() as u32,
            len: chunk.len,
            codec: chunk.codec,
        });
        self.size += chunk.payload.len();
        self.payloads.push(chunk.payload);
    }

    /// Bytes of payload so far.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Size of the object that it would be now.
    pub fn sealed_size(&self) -> u64 {
        (MAGIC.len() + self.size + self.entries.len() * ENTRY + TAIL) as u64
    }

    /// What was added so far.
    pub fn entries(&self) -> &[PackEntry] {
        &self.entries
    }

    /// Decodes all chunks, except those that were named here.
    ///
    /// # Errors
    /// When one is not what its name says.
    pub fn verify(&self) -> Result<(), ChunkError> {
        let others = self.entries.len() - self.named;
        self.entries.iter().zip(&self.payloads).take(others).try_for_each(|(entry, payload)| {
            decode_chunk(entry.hash, entry.len, entry.codec, payload.clone()).map(drop)
        })
    }

    /// Whether all of it was named here.
    pub fn is_named(&self) -> bool {
        self.named == self.entries.len()
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes the chunks out again, in the order in which they came.
    pub fn into_chunks(self) -> impl Iterator<Item = EncodedChunk> {
        self.entries.into_iter().zip(self.payloads).map(|(entry, payload)| EncodedChunk {
            hash: entry.hash,
            len: entry.len,
            codec: entry.codec,
            payload,
        })
    }

    /// Adds the index.
    pub fn seal(self) -> SealedPack {
        let mut tail = BytesMut::with_capacity(self.entries.len() * ENTRY + TAIL);
        for entry in &self.entries {
            tail.put_slice(&entry.hash.0);
            tail.put_u32_le(entry.offset);
            tail.put_u32_le(entry.payload_len);
            tail.put_u32_le(entry.len);
            tail.put_u8(entry.codec as u8);
        }
        tail.put_u32_le(self.entries.len() as u32);
        let hash = blake3::hash(&tail);
        tail.put_slice(hash.as_bytes());
        tail.put_slice(MAGIC);
        let size = self.sealed_size();
        let payload = std::iter::once(Bytes::from_static(MAGIC))
            .chain(self.payloads)
            .chain(std::iter::once(tail.freeze()))
            .collect();
        SealedPack { payload, size, entries: self.entries }
    }
}

/// The index of a pack, read back from the object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackIndex {
    /// The chunks, in the order of their offsets.
    pub entries: Vec<PackEntry>,
}

impl PackIndex {
    /// Reads the index from all bytes of a pack.
    ///
    /// # Errors
    /// When the bytes are no whole pack, or the index is damaged.
    pub fn of_pack(pack: &[u8]) -> Result<PackIndex, PackError> {
        if pack.len() < MAGIC.len() + TAIL || !pack.starts_with(MAGIC) || !pack.ends_with(MAGIC) {
            return Err(PackError::NotAPack);
        }
        let (body, tail) = pack.split_at(pack.len() - TAIL);
        let count = u32::from_le_bytes(tail[..4].try_into().expect("four bytes")) as usize;
        let start =
            (body.len() - MAGIC.len()).checked_sub(count.saturating_mul(ENTRY)).ok_or(PackError::Index)?
                + MAGIC.len();
        if blake3::hash(&pack[start..body.len() + 4]).as_bytes() != &tail[4..36] {
            return Err(PackError::Index);
        }
        let entries = body[start..].chunks_exact(ENTRY).map(entry_from).collect::<Result<_, _>>()?;
        Ok(PackIndex { entries })
    }

    /// Decodes all chunks of a pack.
    ///
    /// # Errors
    /// At the first thing that is damaged.
    pub fn verify(pack: &Bytes) -> Result<PackIndex, PackError> {
        let index = PackIndex::of_pack(pack)?;
        for entry in &index.entries {
            let (from, to) = (entry.offset as usize, entry.offset as usize + entry.payload_len as usize);
            if to > pack.len() {
                return Err(PackError::Index);
            }
            decode_chunk(entry.hash, entry.len, entry.codec, pack.slice(from..to))?;
        }
        Ok(index)
    }
}

fn entry_from(bytes: &[u8]) -> Result<PackEntry, PackError> {
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    Ok(PackEntry {
        hash: ContentHash(bytes[..32].try_into().expect("32 bytes")),
        offset: number(32),
        payload_len: number(36),
        len: number(40),
        codec: Codec::try_from(u32::from(bytes[44]))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode_chunk;

    fn pack_of(count: usize) -> (Bytes, Vec<PackEntry>) {
        let mut writer = PackWriter::default();
        for n in 0..count {
            // Nothing that LZ4 would shrink: in a compressed block some damage changes no content.
            let mut raw = vec![0; n * 100];
            blake3::Hasher::new().update(&[n as u8]).finalize_xof().fill(&mut raw);
            writer.push(encode_chunk(&raw));
        }
        let sealed = writer.seal();
        let bytes: BytesMut = sealed.payload.iter().flat_map(|part| part.iter().copied()).collect();
        assert_eq!(bytes.len() as u64, sealed.size);
        (bytes.freeze(), sealed.entries)
    }

    #[test]
    fn a_pack_describes_itself() {
        for count in [0, 1, 50] {
            let (pack, entries) = pack_of(count);
            assert_eq!(PackIndex::verify(&pack).unwrap().entries, entries);
        }
    }

    #[test]
    fn damage_anywhere_is_noticed() {
        let (pack, _) = pack_of(5);
        for at in 0..pack.len() {
            let mut damaged = pack.to_vec();
            damaged[at] ^= 1;
            assert!(PackIndex::verify(&damaged.into()).is_err(), "byte {at}");
        }
        for len in 0..pack.len() {
            assert!(PackIndex::verify(&pack.slice(..len)).is_err());
        }
    }
}
