//! Sends a tree: its manifest, and the chunks that the other side lacks, in packs.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::chunk::{self, ChunkId};
use crate::error::TransferError;
use crate::manifest::{Entry, Manifest};
use crate::mirror::{LATEST, PackRef, Record, check_name};
use crate::pack::{Frame, FrameInfo, PackWriter};
use crate::seed::{Seed, threads};
use crate::sink::Sink;

/// What is sent.
pub struct Version<'a> {
    /// The volume, as the mirror names it.
    pub volume: &'a str,
    /// The version.
    pub snapshot: &'a str,
    /// When it was made, nanoseconds since 1970.
    pub created_nanos: i64,
    /// For people.
    pub note: &'a str,
    /// Signatures of its name.
    pub signatures: &'a [String],
    /// What it is.
    pub manifest: &'a Manifest,
    /// Where it can be read.
    pub folder: &'a Path,
}

/// What was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sent {
    /// New packs.
    pub packs: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Chunks that the tree has.
    pub chunks: u64,
    /// Those that were not there yet.
    pub new_chunks: u64,
}

struct Packing<'a> {
    sink: &'a mut dyn Sink,
    writer: Option<PackWriter>,
    new: Vec<PackRef>,
}

impl Packing<'_> {
    fn push(&mut self, frame: (FrameInfo, Vec<u8>)) -> Result<(), TransferError> {
        let failed = || TransferError::io("cannot write a pack");
        let mut writer = match self.writer.take() {
            Some(writer) => writer,
            None => PackWriter::new(self.sink.folder()).map_err(failed())?,
        };
        writer.push(frame.0, &frame.1).map_err(failed())?;
        self.writer = Some(writer);
        if self.writer.as_ref().is_some_and(PackWriter::is_full) { self.end() } else { Ok(()) }
    }

    fn end(&mut self) -> Result<(), TransferError> {
        let Some(writer) = self.writer.take().filter(|writer| !writer.is_empty()) else { return Ok(()) };
        let (pack, file) = writer.finish().map_err(TransferError::io("cannot write a pack"))?;
        self.sink.take(&pack, file)?;
        self.new.push(pack);
        Ok(())
    }
}

/// Sends a version. What is in packs of the sink, or in `since`, is not sent.
///
/// # Errors
/// The tree cannot be read, or is not what the manifest says; the sink cannot be written.
pub fn send(
    version: &Version<'_>,
    since: Option<&Manifest>,
    sink: &mut dyn Sink,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Sent, TransferError> {
    check_name(version.volume)?;
    check_name(version.snapshot)?;
    if version.snapshot == LATEST {
        let said =
            format!("'{LATEST}' is where a mirror says which version is the newest: choose another name");
        return Err(TransferError::Exists(said));
    }
    let there = sink.packs()?;
    let mut pack_of: HashMap<ChunkId, usize> = HashMap::new();
    for (at, (_, chunks)) in there.iter().enumerate() {
        for id in chunks {
            pack_of.entry(*id).or_insert(at);
        }
    }
    let since: HashSet<ChunkId> = since.map(chunks_of).unwrap_or_default();
    let mut known: HashSet<ChunkId> = since.iter().copied().chain(pack_of.keys().copied()).collect();

    let mut manifest_ids = Vec::new();
    let mut manifest_frames = vec![Frame::default()];
    let there_already = &known;
    chunk::cut(&mut version.manifest.to_bytes().as_slice(), |bytes| {
        let id = ChunkId::of(bytes);
        manifest_ids.push(id);
        if there_already.contains(&id) {
            return;
        }
        if manifest_frames.last().is_some_and(Frame::is_full) {
            manifest_frames.push(Frame::default());
        }
        if let Some(frame) = manifest_frames.last_mut() {
            frame.push(id, bytes);
        }
    })
    .map_err(TransferError::io("cannot cut the manifest"))?;
    let mut packing = Packing { sink, writer: None, new: Vec::new() };
    for frame in manifest_frames.into_iter().filter(|frame| !frame.is_empty()) {
        packing.push(frame.finish().map_err(TransferError::io("cannot compress"))?)?;
    }
    let all = chunks_of(version.manifest);
    let mut sent = Sent { chunks: all.len() as u64, ..Sent::default() };
    let mut jobs: Vec<Job<'_>> = Vec::new();
    for entry in version.manifest.entries.iter().filter(|entry| entry.same_as.is_empty()) {
        let new: Vec<_> = entry.pieces().filter(|(id, _, _)| known.insert(*id)).collect();
        sent.new_chunks += new.len() as u64;
        if !new.is_empty() {
            jobs.push((entry, new));
        }
    }
    let total = jobs.iter().flat_map(|(_, new)| new).map(|(_, _, len)| u64::from(*len)).sum();
    pack_files(version.folder, &jobs, total, &mut packing, progress)?;
    packing.end()?;
    let new = std::mem::take(&mut packing.new);
    sent.packs = new.len() as u64;
    sent.bytes = new.iter().map(|pack| pack.size).sum();
    let needed: HashSet<usize> =
        all.iter().chain(&manifest_ids).filter_map(|id| pack_of.get(id).copied()).collect();
    let mut old: Vec<usize> = needed.into_iter().collect();
    old.sort_unstable();
    let packs = new.into_iter().chain(old.into_iter().map(|at| there[at].0.clone())).collect();
    let of = version;
    let record = Record::of(of.volume, of.snapshot, of.manifest, of.created_nanos, of.note, of.signatures);
    sink.finish(&Record { manifest: manifest_ids, packs, ..record })?;
    Ok(sent)
}

fn chunks_of(manifest: &Manifest) -> HashSet<ChunkId> {
    manifest.entries.iter().flat_map(|entry| ChunkId::all(&entry.chunks)).collect()
}

/// Files that a thread takes at a time: their chunks lie together.
const FILES_AT_A_TIME: usize = 64;

/// A file with those of its chunks that are to be sent: name, where in the file, length.
type Job<'a> = (&'a Entry, Vec<(ChunkId, u64, u32)>);

fn pack_files(
    folder: &Path,
    jobs: &[Job<'_>],
    total: u64,
    packing: &mut Packing<'_>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), TransferError> {
    let seed = Seed::open(folder)?;
    let (frames, received) = std::sync::mpsc::sync_channel::<Result<(FrameInfo, Vec<u8>), TransferError>>(16);
    let parts: Vec<&[Job<'_>]> = jobs.chunks(FILES_AT_A_TIME).collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads() {
            let frames = frames.clone();
            let (parts, next, done, seed) = (&parts, &next, &done, &seed);
            scope.spawn(move || {
                let mut frame = Frame::default();
                let mut work = || -> Result<(), TransferError> {
                    while let Some(part) = parts.get(next.fetch_add(1, Relaxed)) {
                        for (entry, new) in *part {
                            let read = read_chunks(seed, entry, new, &mut |id, chunk| {
                                frame.push(id, chunk);
                                match frame.is_full() {
                                    true => frames.send(compress(std::mem::take(&mut frame))).is_ok(),
                                    false => true,
                                }
                            })?;
                            let mut done = done.lock();
                            *done += read;
                            progress(*done, total);
                        }
                    }
                    Ok(())
                };
                let end = work();
                if !frame.is_empty() {
                    let _ = frames.send(compress(frame));
                }
                if let Err(error) = end {
                    let _ = frames.send(Err(error));
                }
            });
        }
        drop(frames);
        for frame in received {
            packing.push(frame?)?;
        }
        Ok(())
    })
}

fn compress(frame: Frame) -> Result<(FrameInfo, Vec<u8>), TransferError> {
    frame.finish().map_err(TransferError::io("cannot compress"))
}

/// Gives the chunks of a file to `take`, until that says no.
fn read_chunks(
    seed: &Seed,
    entry: &Entry,
    chunks: &[(ChunkId, u64, u32)],
    take: &mut dyn FnMut(ChunkId, &[u8]) -> bool,
) -> Result<u64, TransferError> {
    let shown = seed.shown(&entry.path);
    let failed = || TransferError::io(format!("cannot read {}", shown.display()));
    let file = seed.file(&entry.path)?;
    let mut buffer = Vec::new();
    let mut read = 0;
    for (id, offset, len) in chunks {
        buffer.resize(*len as usize, 0);
        file.read_exact_at(&mut buffer, *offset).map_err(failed())?;
        if ChunkId::of(&buffer) != *id {
            let said = format!("{} has changed while it was sent: send a snapshot", shown.display());
            return Err(TransferError::Lacking(said));
        }
        read += u64::from(*len);
        if !take(*id, &buffer) {
            break;
        }
    }
    Ok(read)
}
