//! The contents of files, put together of chunks: of trees that are here, and of frames that have come.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use hayloft_tree::{PIECE, Pieces};
use parking_lot::Mutex;
use rustix::fs::{Advice, fadvise};

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::fetch::{Fetched, FrameReader};
use crate::manifest::Entry;
use crate::receive::Tree;
use crate::seed::{Seed, threads};

/// Files from this size on are made by all threads, bytes.
pub(crate) const LARGE: u64 = 8 << 20;
/// So many bytes of a file are put together before they are written: whole pieces, of which the hash of a content is made.
const WINDOW: usize = 16 * PIECE as usize;

/// Where a chunk is in trees that are here: which tree, which file, where in it.
pub(crate) type Places<'a> = HashMap<ChunkId, (usize, &'a Entry, u64)>;

pub(crate) fn places(seeds: &[Tree]) -> Places<'_> {
    let mut places = HashMap::new();
    for (at, seed) in seeds.iter().enumerate() {
        for entry in &seed.manifest.entries {
            for (id, offset, _) in entry.pieces() {
                places.entry(id).or_insert((at, entry, offset));
            }
        }
    }
    places
}

/// What of a file is put together at a time: all but its holes.
fn windows(entry: &Entry) -> impl Iterator<Item = Range<u64>> + '_ {
    entry.extents().flat_map(|extent| {
        let begins = extent.clone().step_by(WINDOW);
        begins.map(move |begin| begin..extent.end.min(begin + WINDOW as u64))
    })
}

/// The hash of a file's content, by those of the pieces that are not in its holes.
fn content_of<'h>(entry: &Entry, mut hashes: impl Iterator<Item = &'h [u8; 32]>) -> [u8; 32] {
    let (mut pieces, mut at) = (Pieces::default(), 0);
    for hole in entry.holes().chain(std::iter::once(entry.size..entry.size)) {
        for hash in hashes.by_ref().take((hole.start - at).div_ceil(PIECE) as usize) {
            pieces.push(hash);
        }
        pieces.push_zeros(hole.end - hole.start);
        at = hole.end;
    }
    pieces.finish()
}

/// Where the chunks are.
pub(crate) struct Contents<'a> {
    pub(crate) fetched: &'a Fetched,
    pub(crate) seeded: Places<'a>,
    pub(crate) seeds: &'a [Seed],
}

/// A chunk of a file: its name, where it begins, its length.
type Chunk = (ChunkId, u64, u32);

/// Bytes of a seed's file that are wanted one after the other.
struct Run<'a> {
    seed: usize,
    entry: &'a Entry,
    offset: u64,
    /// Where in the window they begin, and end.
    begin: usize,
    end: usize,
}

/// Puts contents together, for one thread.
pub(crate) struct Reader<'a> {
    contents: &'a Contents<'a>,
    frames: FrameReader<'a>,
    /// The file of a seed that was read last.
    open: Option<(usize, &'a Entry, File)>,
    window: Vec<u8>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(contents: &'a Contents<'a>) -> Reader<'a> {
        Reader { contents, frames: FrameReader::new(contents.fetched), open: None, window: Vec::new() }
    }

    fn read_run(&mut self, run: &Run<'a>) -> Result<(), TransferError> {
        let seed = &self.contents.seeds[run.seed];
        let is_open = |open: &(usize, &Entry, File)| open.0 == run.seed && open.1.path == run.entry.path;
        if !self.open.as_ref().is_some_and(is_open) {
            self.open = Some((run.seed, run.entry, seed.file(&run.entry.path)?));
        }
        if let Some((_, _, file)) = &self.open {
            let failed = TransferError::io(format!("cannot read {}", seed.shown(&run.entry.path).display()));
            file.read_exact_at(&mut self.window[run.begin..run.end], run.offset).map_err(failed)?;
        }
        Ok(())
    }

    /// Puts together what a file has from `begin` on, as much as the window holds. Chunks that lie together in a seed's file are
    /// read together.
    fn put_together(&mut self, chunks: &[Chunk], begin: u64, len: usize) -> Result<(), TransferError> {
        self.window.resize(len, 0);
        let end = begin + len as u64;
        let first = chunks.partition_point(|(_, at, len)| at + u64::from(*len) <= begin);
        let mut pending: Option<Run<'a>> = None;
        for (id, at, chunk_len) in chunks[first..].iter().take_while(|(_, at, _)| *at < end) {
            let skipped = begin.saturating_sub(*at);
            let from = (at + skipped - begin) as usize;
            let to = (at + u64::from(*chunk_len)).min(end) - begin;
            let to = to as usize;
            match self.contents.seeded.get(id) {
                Some(&(seed, entry, offset)) => {
                    let offset = offset + skipped;
                    match &mut pending {
                        Some(run)
                            if run.seed == seed
                                && run.entry.path == entry.path
                                && run.offset + (run.end - run.begin) as u64 == offset =>
                        {
                            run.end = to;
                        }
                        _ => {
                            let next = Run { seed, entry, offset, begin: from, end: to };
                            if let Some(run) = pending.replace(next) {
                                self.read_run(&run)?;
                            }
                        }
                    }
                }
                None => {
                    if let Some(run) = pending.take() {
                        self.read_run(&run)?;
                    }
                    let chunk = self.frames.read(id)?;
                    let chunk =
                        chunk.and_then(|chunk| chunk.get(skipped as usize..skipped as usize + to - from));
                    let chunk =
                        chunk.ok_or_else(|| TransferError::Lacking(format!("chunk {id} did not come")))?;
                    self.window[from..to].copy_from_slice(chunk);
                }
            }
        }
        match pending {
            Some(run) => self.read_run(&run),
            None => Ok(()),
        }
    }

    /// Writes what the window holds, but for pieces of zeros: holes stay holes. Returns the pieces' hashes.
    fn write(&self, to: &File, begin: u64) -> io::Result<Vec<[u8; 32]>> {
        let mut hashes = Vec::with_capacity(self.window.len().div_ceil(PIECE as usize));
        let mut written = 0;
        let write = |from: usize, to_write: usize| match from < to_write {
            true => to.write_all_at(&self.window[from..to_write], begin + from as u64),
            false => Ok(()),
        };
        let mut at = 0;
        for piece in self.window.chunks(PIECE as usize) {
            hashes.push(*blake3::hash(piece).as_bytes());
            if piece.iter().all(|byte| *byte == 0) {
                write(written, at)?;
                written = at + piece.len();
            }
            at += piece.len();
        }
        write(written, at)?;
        Ok(hashes)
    }

    /// Writes a file of which nothing is there yet. Returns the hash of its content.
    pub(crate) fn fill(
        &mut self,
        file: &File,
        entry: &'a Entry,
        failed: &dyn Fn(io::Error) -> TransferError,
    ) -> Result<[u8; 32], TransferError> {
        let chunks: Vec<Chunk> = entry.pieces().collect();
        let (mut hashes, mut end) = (Vec::new(), 0);
        for window in windows(entry) {
            self.put_together(&chunks, window.start, (window.end - window.start) as usize)?;
            hashes.push(self.write(file, window.start).map_err(failed)?);
            end = if self.ends_in_hole() { 0 } else { window.end };
        }
        if end != entry.size {
            file.set_len(entry.size).map_err(failed)?;
        }
        Ok(content_of(entry, hashes.iter().flatten()))
    }

    /// Whether nothing was written at the end of what was just put together.
    fn ends_in_hole(&self) -> bool {
        let last = self.window.chunks(PIECE as usize).next_back();
        last.is_some_and(|piece| piece.iter().all(|byte| *byte == 0))
    }

    /// Compares each chunk of a file with its name.
    ///
    /// # Errors
    /// The first that is something else.
    pub(crate) fn verify(&mut self, entry: &'a Entry) -> Result<(), TransferError> {
        for (id, _, len) in entry.pieces() {
            self.put_together(&[(id, 0, len)], 0, len as usize)?;
            if ChunkId::of(&self.window) != id {
                return Err(match self.contents.seeded.get(&id) {
                    Some((seed, entry, _)) => {
                        let path = self.contents.seeds[*seed].shown(&entry.path);
                        TransferError::Lacking(format!("{} has changed meanwhile", path.display()))
                    }
                    None => TransferError::Damaged("a frame of a pack".to_owned()),
                });
            }
        }
        Ok(())
    }
}

/// As [`Reader::fill`], by all threads.
pub(crate) fn fill_by_all(
    contents: &Contents<'_>,
    file: &File,
    entry: &Entry,
    failed: &(dyn Fn(io::Error) -> TransferError + Sync),
) -> Result<[u8; 32], TransferError> {
    file.set_len(entry.size).map_err(failed)?;
    let chunks: Vec<Chunk> = entry.pieces().collect();
    let windows: Vec<_> = windows(entry).map(|window| (window, OnceLock::new())).collect();
    let (next, result) = (AtomicUsize::new(0), Mutex::new(Ok::<(), TransferError>(())));
    let work = |reader: &mut Reader<'_>| {
        loop {
            let Some((window, hashes)) = windows.get(next.fetch_add(1, Relaxed)) else { return Ok(()) };
            reader.put_together(&chunks, window.start, (window.end - window.start) as usize)?;
            let _ = hashes.set(reader.write(file, window.start).map_err(failed)?);
            // The disk begins with it while more is made; what is being written stays in memory.
            let len = NonZeroU64::new(window.end - window.start);
            let _ = fadvise(file, window.start, len, Advice::DontNeed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads() {
            scope.spawn(|| {
                if let Err(error) = work(&mut Reader::new(contents)) {
                    next.store(windows.len(), Relaxed);
                    *result.lock() = Err(error);
                }
            });
        }
    });
    result.into_inner()?;
    Ok(content_of(entry, windows.iter().filter_map(|(_, hashes)| hashes.get()).flatten()))
}
