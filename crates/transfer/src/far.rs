//! Files that another server has, and cuts there: of those that are large only what is lacking here comes over the link.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use hayloft_tree::Kind;
use hayloft_tree::chunk::{self, Chunk};
use parking_lot::Mutex;

use crate::cache::Cache;
use crate::chunk::ChunkId;
use crate::contents::places;
use crate::error::TransferError;
use crate::fetch::{Fetched, Spool, spool_path};
use crate::manifest::{Entry, Manifest};
use crate::pack::{self, FRAME, FrameInfo};
use crate::receive::{Received, Tree};

/// Smaller files are read as they are, bytes: to ask would take as long.
pub(crate) const CUT_FROM: u64 = 128 << 10;

/// So many frames come with one answer, at most.
const FRAMES: usize = 8;

/// So many requests are under way at once.
const REQUESTS: usize = 4;

/// Most groups that are named in a request: servers take 64 KiB of who has no session. A file of 1.5 GB has so many.
const TAGS_MOST: usize = 6_000;

/// By what a group of chunks is called, see [`chunk::tag`].
pub type Tag = [u8; 8];

/// Chunks that lie together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Group {
    /// Who asks knows it.
    Known(Tag),
    /// Who asks does not.
    New(Vec<Chunk>),
}

/// How a part of a file is cut.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// In the order of the file.
    pub groups: Vec<Group>,
    /// Where it ends.
    pub end: u64,
    /// Bytes of the whole file.
    pub size: u64,
    /// The hash of the whole content.
    pub content: [u8; 32],
}

/// Whoever has the files of a tree, and cuts them there.
pub trait Far: Sync {
    /// How a file is cut from `begin` on; of groups with the tags `known` nothing else is wanted. `None`: it cannot tell.
    ///
    /// # Errors
    /// The link has broken, or the file is damaged.
    fn cut(&self, path: &[u8], begin: u64, known: &[Tag]) -> io::Result<Option<Part>>;

    /// Parts of a file, by where they begin and their lengths: for each frame its parts, one after the other, compressed by zstd. `None`: as
    /// [`Far::cut`].
    ///
    /// # Errors
    /// As [`Far::cut`].
    fn read(&self, path: &[u8], frames: &[Vec<(u64, u32)>]) -> io::Result<Option<Vec<Vec<u8>>>>;
}

/// How a file of so many bytes is cut, and the hash of its content. What `known` has of it need not be told. `None`: that cannot be
/// told, or does not fit together.
pub(crate) fn cut(
    far: &dyn Far,
    path: &[u8],
    size: u64,
    known: Option<&Entry>,
) -> io::Result<Option<(Vec<Chunk>, [u8; 32])>> {
    let old: Vec<Chunk> =
        known.map(|entry| entry.pieces().map(|(id, _, len)| (id.0, len)).collect()).unwrap_or_default();
    let groups: Vec<Range<usize>> = chunk::groups(&old).collect();
    let tags: Vec<Tag> = groups.iter().map(|group| chunk::tag(&old[group.clone()])).collect();
    let at: HashMap<Tag, usize> = tags.iter().copied().zip(0..).collect();
    let mut chunks: Vec<Chunk> = Vec::new();
    let (mut end, mut content, mut last) = (0, None, 0_usize);
    while end < size {
        // Of a very large file those around what was found last.
        let from = last.saturating_sub(TAGS_MOST / 4).min(tags.len().saturating_sub(TAGS_MOST));
        let near = &tags[from..tags.len().min(from + TAGS_MOST)];
        let Some(part) = far.cut(path, end, near)? else { return Ok(None) };
        let begin = end;
        for group in &part.groups {
            let of = match group {
                Group::New(chunks) => chunks,
                Group::Known(tag) => match at.get(tag) {
                    Some(group) => {
                        last = *group;
                        &old[groups[last].clone()]
                    }
                    None => return Ok(None),
                },
            };
            end += of.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
            chunks.extend_from_slice(of);
        }
        let is_fine = end == part.end && end > begin && part.size == size;
        if !is_fine || content.is_some_and(|content| content != part.content) {
            return Ok(None);
        }
        content = Some(part.content);
    }
    Ok(content.map(|content| (chunks, content)))
}

fn is_cut(entry: &Entry) -> bool {
    // What has long holes is read through the mount: that knows of them.
    entry.kind() == Kind::File && entry.size >= CUT_FROM && entry.holes.is_empty()
}

impl Manifest {
    /// Of what is read as it is from who has it, because it is small.
    pub fn without_large(&self) -> Manifest {
        let small = self.entries.iter().filter(|entry| !is_cut(entry)).cloned();
        Manifest { entries: small.collect(), tree: self.tree }
    }
}

/// A request: a file, and for each frame its chunks.
type Request<'a> = (&'a Entry, Vec<Vec<(ChunkId, u64, u32)>>);

/// What is to be asked for, of what is neither in `has` nor in a request before.
fn requests<'a>(manifest: &'a Manifest, mut has: impl FnMut(&ChunkId) -> bool) -> Vec<Request<'a>> {
    let mut asked: HashSet<ChunkId> = HashSet::new();
    let mut requests: Vec<Request<'a>> = Vec::new();
    for entry in manifest.entries.iter().filter(|entry| is_cut(entry) && entry.same_as.is_empty()) {
        let (mut frames, mut bytes): (Vec<Vec<_>>, usize) = (Vec::new(), FRAME);
        for (id, at, len) in
            entry.pieces().filter(|(id, _, _)| !has(id) && asked.insert(*id)).collect::<Vec<_>>()
        {
            if bytes >= FRAME {
                frames.push(Vec::new());
                bytes = 0;
            }
            bytes += len as usize;
            if let Some(frame) = frames.last_mut() {
                frame.push((id, at, len));
            }
        }
        requests.extend(frames.chunks(FRAMES).map(|frames| (entry, frames.to_vec())));
    }
    requests
}

impl Received {
    /// Brings what none of `seeds` has of the large files of a tree that another server has; what is in small ones is read where it is, when it
    /// is wanted. What has come before a cut does not come again. `None`: the server cannot be asked for parts of files.
    ///
    /// # Errors
    /// The link has broken; what came is something else; there is no room.
    pub fn from_far(
        far: &dyn Far,
        manifest: &Manifest,
        seeds: &[Tree],
        cache: &Cache,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Option<Received>, TransferError> {
        let spool_path = spool_path(cache.folder(), &manifest.tree.to_string());
        let failed = || TransferError::io(format!("cannot write {}", spool_path.display()));
        let mut received = Received::here(manifest.clone(), seeds);
        let mut fetched = Fetched::default();
        let spool = Spool::open(&spool_path, &mut fetched).map_err(failed())?;
        let requests = {
            let seeded = places(seeds);
            requests(manifest, |id| seeded.contains_key(id) || fetched.has(id))
        };
        let len = |(_, frames): &Request<'_>| -> u64 {
            frames.iter().flatten().map(|(_, _, len)| u64::from(*len)).sum()
        };
        let total = requests.iter().map(len).sum();
        let next = AtomicUsize::new(0);
        let state = Mutex::new((spool, fetched, Ok(true), 0));
        let one = |request: &Request<'_>| -> Result<bool, TransferError> {
            let (entry, chunks) = request;
            let parts: Vec<Vec<(u64, u32)>> =
                chunks.iter().map(|frame| frame.iter().map(|(_, at, len)| (*at, *len)).collect()).collect();
            let failed_to_read =
                || TransferError::io(format!("cannot read {}", String::from_utf8_lossy(&entry.path)));
            let read = far.read(&entry.path, &parts).map_err(failed_to_read())?;
            let Some(frames) = read.filter(|frames| frames.len() == chunks.len()) else { return Ok(false) };
            for (frame, chunks) in frames.iter().zip(chunks) {
                let info = FrameInfo {
                    length: frame.len() as u32,
                    chunks: chunks.iter().flat_map(|(id, _, _)| id.0).collect(),
                    lengths: chunks.iter().map(|(_, _, len)| *len).collect(),
                };
                let open = pack::open_frame(&info, frame)?;
                let (spool, fetched, _, _) = &mut *state.lock();
                spool.add(info, (frame, open), fetched).map_err(failed())?;
            }
            let done = &mut state.lock().3;
            *done += len(request);
            progress(*done, total);
            Ok(true)
        };
        std::thread::scope(|scope| {
            for _ in 0..REQUESTS.min(requests.len()) {
                scope.spawn(|| {
                    while let Some(request) = requests.get(next.fetch_add(1, Relaxed)) {
                        let done = one(request);
                        if !matches!(done, Ok(true)) {
                            state.lock().2 = done;
                            next.store(requests.len(), Relaxed);
                        }
                    }
                });
            }
        });
        let (_, fetched, done, _) = state.into_inner();
        if !done? {
            return Ok(None);
        }
        (received.fetched, received.spool) = (fetched, spool_path);
        Ok(Some(received))
    }
}
