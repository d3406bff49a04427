//! Brings chunks that a host lacks, frame by frame. What a web server has sent is kept in a file, so that nothing is sent twice
//! after a cut.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;
use prost::Message;
use rustix::fs::{FlockOperation, flock};

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::mirror::{PackRef, Record};
use crate::pack::{self, FrameInfo};
use crate::source::Source;

/// A web server is asked for so many bytes at once, at most.
const RANGE: u64 = 1 << 20;
/// So many requests are under way at once.
pub(crate) const REQUESTS: usize = 4;

/// Where the bytes of a frame are.
#[derive(Debug)]
struct Place {
    file: Arc<File>,
    offset: u64,
    info: FrameInfo,
}

/// Frames that were taken apart lately stay so, up to so many bytes: several threads want their chunks, and again and again.
const KEPT: usize = 32 << 20;

/// Frames that were taken apart lately, by their number.
#[derive(Default, Debug)]
struct Kept {
    frames: HashMap<usize, Arc<Vec<u8>>>,
    /// In the order in which they came.
    order: VecDeque<usize>,
    bytes: usize,
}

impl Kept {
    fn put(&mut self, frame: usize, bytes: Arc<Vec<u8>>) {
        let len = bytes.len();
        if self.frames.insert(frame, bytes).is_none() {
            self.bytes += len;
            self.order.push_back(frame);
        }
        while self.bytes > KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.bytes -= self.frames.remove(&oldest).map_or(0, |bytes| bytes.len());
        }
    }
}

/// Frames that are here.
#[derive(Default, Debug)]
pub(crate) struct Fetched {
    frames: Vec<Place>,
    /// The frame, where the chunk begins in it, and its length.
    chunks: HashMap<ChunkId, (usize, u32, u32)>,
    kept: Mutex<Kept>,
}

impl Fetched {
    fn add(&mut self, file: &Arc<File>, offset: u64, info: FrameInfo) {
        let mut at = 0;
        for (id, len) in info.ids().zip(&info.lengths) {
            self.chunks.entry(id).or_insert((self.frames.len(), at, *len));
            at += len;
        }
        self.frames.push(Place { file: Arc::clone(file), offset, info });
    }

    /// As [`Fetched::add`], of one that was taken apart just now.
    fn add_open(&mut self, file: &Arc<File>, offset: u64, info: FrameInfo, bytes: Vec<u8>) {
        self.kept.get_mut().put(self.frames.len(), Arc::new(bytes));
        self.add(file, offset, info);
    }

    pub(crate) fn has(&self, id: &ChunkId) -> bool {
        self.chunks.contains_key(id)
    }

    /// The chunks of a frame, one after the other.
    fn open(&self, frame: usize) -> Result<Arc<Vec<u8>>, TransferError> {
        if let Some(bytes) = self.kept.lock().frames.get(&frame) {
            return Ok(Arc::clone(bytes));
        }
        let place = &self.frames[frame];
        let mut bytes = vec![0; place.info.length as usize];
        place
            .file
            .read_exact_at(&mut bytes, place.offset)
            .map_err(TransferError::io("cannot read a frame of a pack"))?;
        let bytes = Arc::new(pack::unpack_frame(&place.info, &bytes)?);
        self.kept.lock().put(frame, Arc::clone(&bytes));
        Ok(bytes)
    }
}

/// Reads chunks of frames; the last frame is at hand, since its chunks are mostly wanted one after the other.
pub(crate) struct FrameReader<'a> {
    fetched: &'a Fetched,
    open: Option<(usize, Arc<Vec<u8>>)>,
}

impl<'a> FrameReader<'a> {
    pub(crate) fn new(fetched: &'a Fetched) -> FrameReader<'a> {
        FrameReader { fetched, open: None }
    }

    /// The bytes of a chunk; `None` if it is not here. They are not compared with its name: what has come from a web server was when it
    /// came, and whoever makes something of them knows the hash of that.
    ///
    /// # Errors
    /// The frame cannot be read, or is damaged.
    pub(crate) fn read(&mut self, id: &ChunkId) -> Result<Option<&[u8]>, TransferError> {
        let Some(&(frame, at, len)) = self.fetched.chunks.get(id) else { return Ok(None) };
        if self.open.as_ref().is_none_or(|(open, _)| *open != frame) {
            self.open = Some((frame, self.fetched.open(frame)?));
        }
        let chunk = self.open.as_ref().and_then(|(_, bytes)| bytes.get(at as usize..(at + len) as usize));
        Ok(chunk)
    }
}

/// A file of frames that have come, one after the other, each with what is in it before it.
pub(crate) struct Spool {
    file: Arc<File>,
    len: u64,
}

impl Spool {
    /// Opens it with what is there already; what was cut off goes.
    pub(crate) fn open(path: &Path, fetched: &mut Fetched) -> std::io::Result<Spool> {
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            // Another command receives the same.
            file = tempfile::tempfile_in(path.parent().unwrap_or(Path::new(".")))?;
        }
        let mut bytes = std::io::BufReader::new(file.try_clone()?);
        let file = Arc::new(file);
        let size = file.metadata()?.len();
        let mut at = 0;
        loop {
            let mut len = [0; 4];
            if at + 4 > size || bytes.read_exact(&mut len).is_err() {
                break;
            }
            let len = u32::from_le_bytes(len);
            let mut info = vec![0; len.min(1 << 20) as usize];
            if bytes.read_exact(&mut info).is_err() {
                break;
            }
            let Ok(info) = FrameInfo::decode(info.as_slice()) else { break };
            let (offset, frame) = (at + 4 + u64::from(len), info.length);
            let mut frame = vec![0; frame.min(1 << 20) as usize];
            if bytes.read_exact(&mut frame).is_err() {
                break;
            }
            let Ok(open) = pack::open_frame(&info, &frame) else { break };
            at = offset + frame.len() as u64;
            fetched.add_open(&file, offset, info, open);
        }
        file.set_len(at)?;
        Ok(Spool { file, len: at })
    }

    pub(crate) fn add(
        &mut self,
        info: FrameInfo,
        (frame, open): (&[u8], Vec<u8>),
        fetched: &mut Fetched,
    ) -> std::io::Result<()> {
        let encoded = info.encode_to_vec();
        let mut bytes = (encoded.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&encoded);
        let offset = self.len + bytes.len() as u64;
        bytes.extend_from_slice(frame);
        let mut file = &*self.file;
        file.seek(SeekFrom::Start(self.len))?;
        file.write_all(&bytes)?;
        self.len += bytes.len() as u64;
        fetched.add_open(&self.file, offset, info, open);
        Ok(())
    }
}

/// The packs of a version, of which indexes are asked for as they are needed, and once.
pub struct Packs<'a> {
    source: &'a Source,
    packs: &'a [PackRef],
    /// As many as were read, in the order of the packs.
    read: Vec<Vec<(u64, FrameInfo)>>,
}

impl<'a> Packs<'a> {
    /// Those of a version.
    pub fn new(source: &'a Source, record: &'a Record) -> Packs<'a> {
        Packs { source, packs: &record.packs, read: Vec::new() }
    }

    /// Reads the next indexes: one, and more at once when these were not enough, since a web server may be far.
    fn read_indexes(&mut self) -> Result<(), TransferError> {
        let read = |pack: &PackRef| {
            if pack.index > pack.size {
                return Err(TransferError::Damaged("the record of a version".to_owned()));
            }
            let index = self.source.read(pack, pack.size - pack.index, pack.index)?;
            pack::open_index(pack, &index)
        };
        let next = self.packs.iter().skip(self.read.len()).take(self.read.len().clamp(1, REQUESTS));
        let indexes: Vec<_> = std::thread::scope(|scope| {
            let reading: Vec<_> = next.map(|pack| scope.spawn(move || read(pack))).collect();
            let ended = |_| Err(TransferError::Lacking("a thread that reads indexes has ended".to_owned()));
            reading.into_iter().map(|reading| reading.join().unwrap_or_else(ended)).collect()
        });
        for (at, index) in indexes.into_iter().enumerate() {
            match index {
                Ok(index) => self.read.push(index),
                // It may not be needed.
                Err(_) if at > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// For each pack the frames that have something of what is wanted.
    fn find(&mut self, mut wanted: HashSet<ChunkId>) -> Result<Vec<(usize, u64, FrameInfo)>, TransferError> {
        let mut found = Vec::new();
        for at in 0..self.packs.len() {
            if wanted.is_empty() {
                break;
            }
            if self.read.len() == at {
                self.read_indexes()?;
            }
            for (offset, info) in &self.read[at] {
                let mut has = false;
                for id in info.ids() {
                    has |= wanted.remove(&id);
                }
                if has {
                    found.push((at, *offset, info.clone()));
                }
            }
        }
        match wanted.iter().next() {
            None => Ok(found),
            Some(id) => Err(TransferError::Lacking(format!(
                "{} chunks are neither in the packs of this version nor here (chunk {id}): if it was sent with --since, \
                 receive that version first",
                wanted.len()
            ))),
        }
    }

    /// Brings what is wanted and not here yet. From a web server it goes into `spool`.
    ///
    /// # Errors
    /// A chunk is nowhere; the source cannot be read; there is no room.
    pub(crate) fn fetch(
        &mut self,
        wanted: impl Iterator<Item = ChunkId>,
        fetched: &mut Fetched,
        spool: &Path,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), TransferError> {
        let failed = || TransferError::io(format!("cannot write {}", spool.display()));
        let mut file = None;
        if !self.source.is_folder() {
            file = Some(Spool::open(spool, fetched).map_err(failed())?);
        }
        let wanted: HashSet<ChunkId> = wanted.filter(|id| !fetched.has(id)).collect();
        let frames = self.find(wanted)?;
        let Some(file) = file else {
            let Source::Folder(folder) = self.source else { return Ok(()) };
            let mut open: HashMap<usize, Arc<File>> = HashMap::new();
            for (at, offset, info) in frames {
                let file = match open.get(&at) {
                    Some(file) => Arc::clone(file),
                    None => {
                        let path = folder.join("packs").join(self.packs[at].name.to_string());
                        let file = File::open(&path)
                            .map_err(TransferError::io(format!("cannot read {}", path.display())))?;
                        let file = Arc::new(file);
                        open.insert(at, Arc::clone(&file));
                        file
                    }
                };
                fetched.add(&file, offset, info);
            }
            return Ok(());
        };
        // Frames that lie together come with one request.
        let mut ranges: Vec<(usize, u64, u64, Vec<FrameInfo>)> = Vec::new();
        for (at, offset, info) in frames {
            let len = u64::from(info.length);
            match ranges.last_mut() {
                Some((last, begin, size, infos))
                    if *last == at && *begin + *size == offset && *size + len <= RANGE =>
                {
                    *size += len;
                    infos.push(info);
                }
                _ => ranges.push((at, offset, len, vec![info])),
            }
        }
        let total = ranges.iter().map(|(_, _, len, _)| len).sum();
        let (next, come) = (AtomicUsize::new(0), AtomicU64::new(0));
        let state = Mutex::new((file, fetched, Ok(())));
        let one = |(at, begin, len, infos): &(usize, u64, u64, Vec<FrameInfo>)| {
            let (mut infos, mut used, mut told) = (infos.iter().peekable(), 0, 0);
            // Each frame is kept when it is there, and not only when all are.
            let take = &mut |bytes: &[u8]| {
                let more = (bytes.len() as u64).saturating_sub(told);
                told += more;
                progress(come.fetch_add(more, Relaxed) + more, total);
                while let Some(info) = infos.next_if(|info| bytes.len() >= used + info.length as usize) {
                    let frame = &bytes[used..used + info.length as usize];
                    let open = pack::open_frame(info, frame)?;
                    let (file, fetched, _) = &mut *state.lock();
                    file.add(info.clone(), (frame, open), fetched).map_err(failed())?;
                    used += frame.len();
                }
                Ok(())
            };
            self.source.read_as_it_comes(&self.packs[*at], *begin, *len, take).map(drop)
        };
        std::thread::scope(|scope| {
            for _ in 0..REQUESTS.min(ranges.len()) {
                scope.spawn(|| {
                    while let Some(range) = ranges.get(next.fetch_add(1, Relaxed)) {
                        if let Err(error) = one(range) {
                            state.lock().2 = Err(error);
                            next.store(ranges.len(), Relaxed);
                        }
                    }
                });
            }
        });
        state.into_inner().2
    }
}

/// Where what has come of a tree is kept until it is there as a whole.
pub(crate) fn spool_path(cache: &Path, tree: &str) -> PathBuf {
    cache.join(format!("incoming-{tree}"))
}
