//! Chunks: named by hash, compressed where it pays.

use std::cell::RefCell;

use bytes::Bytes;
use hayloft_model::{BLOCK_SIZE, ContentHash};
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

use crate::lanes::hash_all;

/// How a chunk's payload is encoded. The numbers are for ever: they are stored and sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Codec {
    /// The bytes as they are.
    Raw = 0,
    /// One LZ4 block, without a length in front.
    Lz4 = 1,
}

impl TryFrom<u32> for Codec {
    type Error = ChunkError;

    fn try_from(code: u32) -> Result<Codec, ChunkError> {
        match code {
            0 => Ok(Codec::Raw),
            1 => Ok(Codec::Lz4),
            other => Err(ChunkError::Codec(other)),
        }
    }
}

/// A chunk as it is stored and sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EncodedChunk {
    /// BLAKE3 of the bytes before encoding.
    pub hash: ContentHash,
    /// Number of bytes before encoding.
    pub len: u32,
    /// How `payload` is encoded.
    pub codec: Codec,
    /// The encoded bytes; never longer than `len`.
    pub payload: Bytes,
}

/// Why a chunk cannot be decoded: its payload is damaged, or is not what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ChunkError {
    /// A codec that this version does not know.
    #[error("unknown codec {0}: written by a newer version?")]
    Codec(u32),
    /// The stated length is over a block's, or the payload has another one.
    #[error("a chunk of {found} bytes where {expected} were announced")]
    Length {
        /// What was announced.
        expected: u32,
        /// What the payload has.
        found: usize,
    },
    /// The LZ4 block is damaged.
    #[error("a damaged LZ4 block")]
    Lz4(#[from] lz4_flex::block::DecompressError),
    /// The bytes are not those that the name stands for.
    #[error("the content of {expected} is damaged: it has the hash {found}")]
    Hash {
        /// The name.
        expected: ContentHash,
        /// What the bytes hash to.
        found: ContentHash,
    },
}

/// Bytes of a chunk that are compressed first, to see whether it is worth doing at all.
const SAMPLE: usize = 4096;

struct Scratch {
    table: CompressTable,
    output: Vec<u8>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        table: CompressTable::large(),
        output: vec![0; get_maximum_output_size(BLOCK_SIZE as usize)],
    });
}

/// Names and encodes at most a block of content. LZ4 is used where it saves a tenth or more.
///
/// # Panics
/// When `raw` is longer than [`BLOCK_SIZE`]: callers cut at blocks.
pub fn encode_chunk(raw: &[u8]) -> EncodedChunk {
    assert!(raw.len() as u64 <= BLOCK_SIZE, "content is cut at blocks");
    let hash = ContentHash(*blake3::hash(raw).as_bytes());
    let len = raw.len() as u32;
    match compress(raw) {
        Some(payload) => EncodedChunk { hash, len, codec: Codec::Lz4, payload },
        None => EncodedChunk { hash, len, codec: Codec::Raw, payload: Bytes::copy_from_slice(raw) },
    }
}

/// Names contents of at most a block each, and leaves them as they are.
pub fn name_chunks(raw: Vec<Bytes>) -> impl Iterator<Item = EncodedChunk> {
    let hashes = hash_all(&raw);
    let named = |(raw, hash): (Bytes, _)| EncodedChunk {
        hash,
        len: raw.len() as u32,
        codec: Codec::Raw,
        payload: raw,
    };
    raw.into_iter().zip(hashes).map(named)
}

fn compress(raw: &[u8]) -> Option<Bytes> {
    SCRATCH.with_borrow_mut(|Scratch { table, output }| {
        if raw.len() > 4 * SAMPLE {
            // From the middle: the beginning is often a header unlike the rest.
            let middle = (raw.len() - SAMPLE) / 2;
            let sample = &raw[middle..middle + SAMPLE];
            let size = compress_into_with_table(sample, output, table).ok()?;
            if size > SAMPLE - SAMPLE / 16 {
                return None;
            }
        }
        let size = compress_into_with_table(raw, output, table).ok()?;
        (size <= raw.len() - raw.len().div_ceil(10)).then(|| Bytes::copy_from_slice(&output[..size]))
    })
}

/// The content of a chunk, verified: it has the length `len` and the name `hash`.
///
/// # Errors
/// When the payload is damaged or is something else.
pub fn decode_chunk(hash: ContentHash, len: u32, codec: Codec, payload: Bytes) -> Result<Bytes, ChunkError> {
    let wrong = |found| ChunkError::Length { expected: len, found };
    if u64::from(len) > BLOCK_SIZE {
        return Err(wrong(payload.len()));
    }
    let raw = match codec {
        Codec::Raw => payload,
        Codec::Lz4 => {
            let mut raw = vec![0; len as usize];
            let size = decompress_into(&payload, &mut raw)?;
            raw.truncate(size);
            raw.into()
        }
    };
    if raw.len() != len as usize {
        return Err(wrong(raw.len()));
    }
    let found = ContentHash(*blake3::hash(&raw).as_bytes());
    if found == hash { Ok(raw) } else { Err(ChunkError::Hash { expected: hash, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        blake3::Hasher::new().finalize_xof().fill(&mut out);
        out
    }

    #[test]
    fn chunks_come_back_as_they_went_in() {
        let text: Vec<u8> = b"static int frobnicate(struct hay *bale)\n".repeat(1639);
        for (raw, codec) in [
            (&b""[..], Codec::Raw),
            (b"x", Codec::Raw),
            (&text[..65536], Codec::Lz4),
            (&text[..6000], Codec::Lz4),
            (&noise(65536), Codec::Raw),
            (&noise(5000), Codec::Raw),
            (&[0; 65536], Codec::Lz4),
        ] {
            let chunk = encode_chunk(raw);
            assert_eq!(chunk.codec, codec, "{} bytes", raw.len());
            assert!(chunk.payload.len() <= raw.len());
            let back = decode_chunk(chunk.hash, chunk.len, chunk.codec, chunk.payload).unwrap();
            assert_eq!(back, raw);
        }
    }

    #[test]
    fn damage_is_noticed_at_every_byte() {
        for raw in [noise(1000), b"all work and no play ".repeat(60)] {
            let chunk = encode_chunk(&raw);
            for at in 0..chunk.payload.len() {
                let mut payload = chunk.payload.to_vec();
                payload[at] ^= 0x40;
                assert!(decode_chunk(chunk.hash, chunk.len, chunk.codec, payload.into()).is_err());
            }
            let cut = chunk.payload.slice(1..);
            assert!(decode_chunk(chunk.hash, chunk.len, chunk.codec, cut).is_err());
            assert!(decode_chunk(chunk.hash, chunk.len - 1, chunk.codec, chunk.payload.clone()).is_err());
            assert!(decode_chunk(chunk.hash, u32::MAX, chunk.codec, chunk.payload).is_err());
        }
    }
}
