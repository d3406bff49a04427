//! Packs: files of some MiB that never change. Chunks lie in frames, each compressed as a whole, and the index at the end is found
//! by its length.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use prost::Message;
use tempfile::NamedTempFile;

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::leftovers;
use crate::mirror::PackRef;

/// A frame is full at so many bytes: what was new together is compressed together, and read together.
pub(crate) const FRAME: usize = 128 * 1024;
/// A pack is full at so many bytes.
pub(crate) const PACK: u64 = 8 << 20;
/// How well frames are compressed.
const LEVEL: i32 = 3;
/// No index is larger, unpacked.
const INDEX_MOST: usize = 128 << 20;
/// The names of packs that are being written begin so.
pub(crate) const UNFINISHED: &str = ".pack-";
/// More than a frame can have.
const FRAME_MOST: usize = FRAME + 2 * crate::chunk::LONGEST;
/// What a pack begins with.
const BEGIN: &[u8; 16] = b"hayloft-pack-1\0\0";

/// What the index says of a frame, in the order of the frames.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct FrameInfo {
    /// Bytes of it, compressed.
    #[prost(uint32, tag = "1")]
    pub length: u32,
    /// The names of its chunks.
    #[prost(bytes = "vec", tag = "2")]
    pub chunks: Vec<u8>,
    /// Their lengths.
    #[prost(uint32, repeated, tag = "3")]
    pub lengths: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct Index {
    #[prost(message, repeated, tag = "1")]
    frames: Vec<FrameInfo>,
}

impl FrameInfo {
    pub(crate) fn ids(&self) -> impl Iterator<Item = ChunkId> + '_ {
        ChunkId::all(&self.chunks)
    }
}

/// Chunks that are compressed together.
#[derive(Default)]
pub(crate) struct Frame {
    bytes: Vec<u8>,
    info: FrameInfo,
}

impl Frame {
    pub(crate) fn push(&mut self, id: ChunkId, chunk: &[u8]) {
        self.bytes.extend_from_slice(chunk);
        self.info.chunks.extend_from_slice(&id.0);
        self.info.lengths.push(chunk.len() as u32);
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= FRAME
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Compressed, with what the index says of it.
    pub(crate) fn finish(self) -> io::Result<(FrameInfo, Vec<u8>)> {
        let bytes = zstd::bulk::compress(&self.bytes, LEVEL)?;
        Ok((FrameInfo { length: bytes.len() as u32, ..self.info }, bytes))
    }
}

fn damaged_frame() -> TransferError {
    TransferError::Damaged("a frame of a pack".to_owned())
}

/// The chunks of a frame, as they are.
///
/// # Errors
/// It is damaged.
pub(crate) fn unpack_frame(info: &FrameInfo, bytes: &[u8]) -> Result<Vec<u8>, TransferError> {
    let len = info.lengths.iter().map(|len| *len as usize).sum::<usize>();
    zstd::bulk::decompress(bytes, len.min(FRAME_MOST)).map_err(|_| damaged_frame())
}

/// Takes a frame apart, and checks each chunk against its name.
///
/// # Errors
/// It is damaged.
pub(crate) fn open_frame(info: &FrameInfo, bytes: &[u8]) -> Result<Vec<u8>, TransferError> {
    let damaged = damaged_frame;
    let whole = unpack_frame(info, bytes)?;
    let mut rest = whole.as_slice();
    for (id, len) in info.ids().zip(&info.lengths) {
        let (chunk, later) = rest.split_at_checked(*len as usize).ok_or_else(damaged)?;
        if ChunkId::of(chunk) != id {
            return Err(damaged());
        }
        rest = later;
    }
    Ok(whole)
}

/// A pack that is being written.
pub(crate) struct PackWriter {
    file: NamedTempFile,
    hasher: blake3::Hasher,
    len: u64,
    index: Index,
    index_len: u64,
}

impl PackWriter {
    /// In a folder, under a name of its own until it is finished.
    pub(crate) fn new(folder: &Path) -> io::Result<PackWriter> {
        let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(folder)?;
        leftovers::hold(file.as_file());
        let hasher = blake3::Hasher::new();
        let mut writer =
            PackWriter { file, hasher, len: 0, index: Index { frames: Vec::new() }, index_len: 0 };
        writer.write(BEGIN)?;
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn push(&mut self, info: FrameInfo, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes)?;
        self.index_len += info.encoded_len() as u64;
        self.index.frames.push(info);
        Ok(())
    }

    /// Of many tiny files the index is larger than the files.
    pub(crate) fn is_full(&self) -> bool {
        self.len + self.index_len >= PACK
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.index.frames.is_empty()
    }

    /// Writes the index; the file is in the disk's hands then, and has no other name yet.
    pub(crate) fn finish(mut self) -> io::Result<(PackRef, NamedTempFile)> {
        let index = zstd::bulk::compress(&self.index.encode_to_vec(), LEVEL)?;
        self.write(&index)?;
        self.write(&(index.len() as u32).to_le_bytes())?;
        self.file.as_file().sync_all()?;
        let name = ChunkId(*self.hasher.finalize().as_bytes());
        Ok((PackRef { name, size: self.len, index: index.len() as u64 + 4 }, self.file))
    }
}

/// Reads an index: the end of a pack, of [`PackRef::index`] bytes.
///
/// # Errors
/// It is damaged.
pub(crate) fn open_index(pack: &PackRef, bytes: &[u8]) -> Result<Vec<(u64, FrameInfo)>, TransferError> {
    let damaged = || TransferError::Damaged(format!("the index of pack {}", pack.name));
    let (index, _) = bytes.split_last_chunk::<4>().ok_or_else(damaged)?;
    // Names do not compress.
    let most = (index.len().saturating_mul(64) + 4096).min(INDEX_MOST);
    let index = zstd::bulk::decompress(index, most).map_err(|_| damaged())?;
    let index = Index::decode(index.as_slice()).map_err(|_| damaged())?;
    let mut at = BEGIN.len() as u64;
    let mut frames = Vec::with_capacity(index.frames.len());
    for frame in index.frames {
        let begin = at;
        at += u64::from(frame.length);
        let is_fine = frame.length as usize <= 2 * FRAME_MOST
            && !frame.lengths.is_empty()
            && frame.lengths.iter().all(|len| *len as usize <= crate::chunk::LONGEST)
            && frame.chunks.len() == frame.lengths.len() * 32;
        if !is_fine {
            return Err(damaged());
        }
        frames.push((begin, frame));
    }
    match at + pack.index == pack.size {
        true => Ok(frames),
        false => Err(damaged()),
    }
}

/// What a pack in a folder says of itself, and the chunks that it has.
///
/// # Errors
/// It cannot be read, or is damaged.
pub(crate) fn describe(name: ChunkId, path: &Path) -> Result<(PackRef, Vec<ChunkId>), TransferError> {
    use std::os::unix::fs::FileExt;
    let failed = || TransferError::io(format!("cannot read {}", path.display()));
    let damaged = || TransferError::Damaged(path.display().to_string());
    let file = File::open(path).map_err(failed())?;
    let size = file.metadata().map_err(failed())?.len();
    let mut len = [0; 4];
    if size < BEGIN.len() as u64 + 4 {
        return Err(damaged());
    }
    file.read_exact_at(&mut len, size - 4).map_err(failed())?;
    let index = u64::from(u32::from_le_bytes(len)) + 4;
    if index + BEGIN.len() as u64 > size {
        return Err(damaged());
    }
    let pack = PackRef { name, size, index };
    let mut bytes = vec![0; usize::try_from(index).map_err(|_| damaged())?];
    file.read_exact_at(&mut bytes, size - index).map_err(failed())?;
    let frames = open_index(&pack, &bytes)?;
    Ok((pack, frames.iter().flat_map(|(_, frame)| frame.ids()).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Receivers refuse what is larger than a pack can be.
    #[test]
    fn packs_of_tiny_files_are_no_larger_than_others() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = PackWriter::new(folder.path()).unwrap();
        let mut number = 0_u64;
        while !writer.is_full() {
            assert!(number < 1_000_000, "a pack of a million files is not full");
            let mut frame = Frame::default();
            for _ in 0..1000 {
                number += 1;
                let content = format!("file {number}");
                frame.push(ChunkId::of(content.as_bytes()), content.as_bytes());
            }
            let (info, bytes) = frame.finish().unwrap();
            writer.push(info, &bytes).unwrap();
        }
        let (pack, _file) = writer.finish().unwrap();
        assert!(pack.size < 2 * PACK, "{pack:?}");
    }
}
