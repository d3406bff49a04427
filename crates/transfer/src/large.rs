//! A large file is cut by all threads: each begins in another place, and soon cuts where it would have if it had begun at the file's begin.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use hayloft_tree::{PIECE, Pieces};

use crate::chunk::{self, ChunkId, LONGEST};
use crate::seed::threads;

/// Bytes that a thread reads at a time.
const READ: usize = 1 << 20;

/// A chunk: where it begins, its name, its length.
type Chunk = (u64, ChunkId, u32);

/// What one thread has found from where it began.
#[derive(Default)]
struct Found {
    /// Hashes of the pieces that begin in its part.
    pieces: Vec<[u8; 32]>,
    /// Those that begin in its part.
    chunks: Vec<Chunk>,
    /// How far there was something to read, if not as far as it should.
    ended: Option<u64>,
}

/// A file's chunks, and the hash of its content.
#[derive(Default)]
pub(crate) struct Whole {
    pub(crate) chunks: Vec<u8>,
    pub(crate) lengths: Vec<u32>,
    pub(crate) content: [u8; 32],
    /// How much there was of it.
    pub(crate) read: u64,
}

/// Bytes of a file from `begin` on, as many as there are.
fn read_at(file: &File, begin: u64, bytes: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < bytes.len() {
        match file.read_at(&mut bytes[read..], begin + read as u64) {
            Ok(0) => break,
            Ok(some) => read += some,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// Cuts from `begin` on, where a piece begins, until a chunk begins at `end` or behind.
fn cut_part(file: &File, size: u64, begin: u64, end: u64) -> io::Result<Found> {
    let (mut found, mut bytes) = (Found::default(), Vec::new());
    // Of the file: where `bytes` begin, what is hashed, and what is cut.
    let (mut base, mut hashed, mut cut) = (begin, begin, begin);
    while cut < end {
        if base + (bytes.len() as u64) < size && base + (bytes.len() as u64) - cut < LONGEST as u64 {
            let done = hashed.min(cut) - base;
            bytes.drain(..done as usize);
            base += done;
            let (at, there) = (base + bytes.len() as u64, bytes.len());
            bytes.resize(there + READ.min((size - at) as usize), 0);
            let read = read_at(file, at, &mut bytes[there..])?;
            if there + read < bytes.len() {
                found.ended = Some(at + read as u64);
                return Ok(found);
            }
            let come = base + bytes.len() as u64;
            while hashed < end && (hashed + PIECE <= come || come == size) {
                let piece = &bytes[(hashed - base) as usize..(size.min(hashed + PIECE) - base) as usize];
                found.pieces.push(*blake3::hash(piece).as_bytes());
                hashed = size.min(hashed + PIECE);
            }
        }
        let rest = &bytes[(cut - base) as usize..];
        let chunk = &rest[..chunk::first(rest)];
        found.chunks.push((cut, ChunkId::of(chunk), chunk.len() as u32));
        cut += chunk.len() as u64;
    }
    Ok(found)
}

/// Cuts a file as [`chunk::cut`] does.
pub(crate) fn cut(file: &File, size: u64) -> io::Result<Whole> {
    let parts = threads() as u64;
    let begins: Vec<u64> =
        (0..=parts).map(|at| if at == parts { size } else { size / PIECE * at / parts * PIECE }).collect();
    let found: io::Result<Vec<Found>> = std::thread::scope(|scope| {
        let cutting: Vec<_> = begins
            .windows(2)
            .map(|part| (part[0], part[1]))
            .map(|(begin, end)| scope.spawn(move || cut_part(file, size, begin, end)))
            .collect();
        let ended = |_| Err(io::Error::other("a thread that cuts a file has ended"));
        cutting.into_iter().map(|cutting| cutting.join().unwrap_or_else(ended)).collect()
    });
    let found = found?;
    let mut whole = Whole { read: size, ..Whole::default() };
    if let Some(ended) = found.iter().filter_map(|found| found.ended).min() {
        return Ok(Whole { read: ended, ..Whole::default() });
    }
    let (mut pieces, mut at) = (Pieces::default(), 0);
    let mut push = |(begin, id, len): &Chunk| {
        whole.chunks.extend_from_slice(&id.0);
        whole.lengths.push(*len);
        begin + u64::from(*len)
    };
    for (found, end) in found.iter().zip(&begins[1..]) {
        found.pieces.iter().for_each(|piece| pieces.push(piece));
        // What was cut before ends somewhere in this part: until the two agree on where a chunk begins.
        while at < *end {
            if let Ok(known) = found.chunks.binary_search_by_key(&at, |(begin, _, _)| *begin) {
                at = found.chunks[known..].iter().map(&mut push).last().unwrap_or(at);
                break;
            }
            let mut bytes = vec![0; LONGEST.min((size - at) as usize)];
            let read = read_at(file, at, &mut bytes)?;
            if read < bytes.len() {
                return Ok(Whole { read: at + read as u64, ..Whole::default() });
            }
            let chunk = &bytes[..chunk::first(&bytes)];
            at = push(&(at, ChunkId::of(chunk), chunk.len() as u32));
        }
    }
    whole.content = pieces.finish();
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn noise(seed: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    }

    /// In whatever way it is cut, it is cut in the same places, and has the same hash.
    #[test]
    fn all_threads_cut_as_one_does() {
        let repeated = noise(3, 5000).repeat(300);
        let mixed = [noise(4, 700_000), vec![0; 900_001], noise(5, 1_000_000), vec![7; 123_456]].concat();
        let lens =
            [0, 1, PIECE as usize - 1, PIECE as usize, 3 * PIECE as usize + 1, READ * 2, READ * 5 + 77];
        let all = lens.map(|len| noise(len as u64, len)).into_iter();
        for bytes in all.chain([vec![0; 3_000_000], repeated, mixed]) {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            let (mut chunks, mut lengths, mut pieces) = (Vec::new(), Vec::new(), Pieces::default());
            chunk::cut(&mut bytes.as_slice(), |chunk| {
                chunks.extend_from_slice(&ChunkId::of(chunk).0);
                lengths.push(chunk.len() as u32);
            })
            .unwrap();
            bytes.chunks(PIECE as usize).for_each(|piece| pieces.push(blake3::hash(piece).as_bytes()));
            let size = bytes.len() as u64;
            let whole = cut(&file, size).unwrap();
            assert_eq!(whole.lengths, lengths, "{size} bytes");
            assert_eq!((whole.chunks, whole.content, whole.read), (chunks, pieces.finish(), size));
            // What has become shorter meanwhile has not all that it should.
            assert!(cut(&file, size + 1).unwrap().read < size + 1);
        }
    }
}
