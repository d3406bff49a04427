//! Files of snapshots, for who has most of them already: where they are cut by content, and parts of them. Who asks finds out what
//! is lacking without reading a file over the link.

use std::io::{self, Read};
use std::sync::Arc;

use bytes::{Buf, Bytes};
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::{BLOCK_SIZE, BlockRef, ContentHash, Ino, PAGE_BLOCKS, blocks_of};
use hayloft_store::decode_chunk;
use hayloft_tree::chunk::{self, Chunk};
use hayloft_tree::name::{self, Kind};
use hayloft_wire::{
    CutFile, CutGroup, Cuts, DentryRow, FileParts, FrameOf, InodeRowMessage, ReadParts, Version,
};
use moka::future::Cache;
use tokio::sync::{Semaphore, mpsc};

use crate::database::{self, Db, tables};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::blocks::{self, Blocks, Content};
use crate::volume::Volume;

/// A file is cut so much at a time, bytes: no answer takes long.
const PART: u64 = 256 << 20;

/// So many files are cut at a time: others wait, so that enough of the host is left for those who work.
const AT_A_TIME: usize = 2;

/// What is remembered of cuts, bytes: all hosts that bring the same snapshot ask for the same ones.
const REMEMBERED: u64 = 16 << 20;

/// Blocks that are read at a time, and read ahead of what is cut.
const WINDOW: u64 = 64;
const AHEAD: usize = 2;

/// How well parts are compressed: as in packs of mirrors.
const LEVEL: i32 = 3;

/// Most bytes of parts in one answer, and most parts.
const PARTS_BYTES: u64 = 2 << 20;
const PARTS_MAX: usize = 4096;

/// Of which content, and where in it the part begins.
type Key = ([u8; 32], u64);

/// A part of a file: its chunks, and where it ends.
type Part = (Arc<[Chunk]>, u64);

/// What the server has for cutting.
pub(crate) struct Cutting {
    turns: Semaphore,
    remembered: Cache<Key, Part>,
}

impl Default for Cutting {
    fn default() -> Cutting {
        let weigh = |_: &Key, (chunks, _): &Part| (chunks.len() * size_of::<Chunk>() + 64) as u32;
        let remembered = Cache::builder().weigher(weigh).max_capacity(REMEMBERED).build();
        Cutting { turns: Semaphore::new(AT_A_TIME), remembered }
    }
}

/// A file of a snapshot.
struct File {
    volume: Arc<Volume>,
    db: Db,
    row: InodeRowMessage,
}

impl File {
    async fn open(shared: &Arc<Shared>, of: Option<Version>, path: &[u8]) -> Result<File, VolumeError> {
        let of = of.filter(|of| !of.snapshot.is_empty());
        let of = of.ok_or(VolumeError::Invalid("only of a snapshot"))?;
        let volume = shared.volume(&format!("{}@{}", of.volume, of.snapshot)).await?;
        let db = volume.db()?;
        let mut ino = Ino::ROOT;
        for name in path.split(|byte| *byte == b'/') {
            let entry = db.get(tables::dentry(ino, name)).await?;
            let entry = entry.ok_or(VolumeError::Invalid("there is no such file in the snapshot"))?;
            ino = Ino(database::decode::<DentryRow>(entry, "name")?.ino);
        }
        let row = db.get(tables::inode(ino)).await?.ok_or(VolumeError::NoInode(ino))?;
        let row = database::decode::<InodeRowMessage>(row, "inode")?;
        match Kind::of(row.mode) {
            Kind::File => Ok(File { volume, db, row }),
            _ => Err(VolumeError::Invalid("that is no file")),
        }
    }

    /// The blocks in a page of it; those at the end may be missing, and are holes.
    async fn page(&self, page: u64) -> Result<Vec<Option<BlockRef>>, VolumeError> {
        match page {
            0 => blocks::in_page(self.row.blocks.as_ref()),
            page => blocks::in_page(self.db.get(tables::page(Ino(self.row.ino), page)).await?.as_ref()),
        }
    }

    /// The content of some blocks that follow each other.
    async fn read(&self, from: u64, to: u64) -> Result<Vec<Bytes>, VolumeError> {
        let to = to.min(blocks_of(self.row.size));
        if let Some(inline) = &self.row.inline {
            return Ok((from..to).map(|at| blocks::of_inline(inline, self.row.size, at)).collect());
        }
        let (mut page, mut refs) = (u64::MAX, Vec::new());
        let mut found: Vec<Option<BlockRef>> = Vec::new();
        for at in from..to {
            if at / PAGE_BLOCKS != page {
                page = at / PAGE_BLOCKS;
                refs = self.page(page).await?;
            }
            found.push(refs.get((at % PAGE_BLOCKS) as usize).copied().flatten());
        }
        let hashes: Vec<ContentHash> = found.iter().flatten().map(|block| block.hash).collect();
        let mut chunks = self.volume.read_chunks(&hashes).await?.into_iter();
        let spans: Vec<usize> = (from..to).map(|at| blocks::span(self.row.size, at) as usize).collect();
        let decode = move || {
            let content = |(block, span): (Option<BlockRef>, usize)| {
                let Some(chunk) = block.and_then(|_| chunks.next()) else { return Ok(vec![0; span].into()) };
                let hash = chunk.hash;
                let content = decode_chunk(hash, chunk.len, chunk.codec, chunk.payload)
                    .map_err(|_| VolumeError::NoContent(hash))?;
                if content.len() >= span {
                    return Ok(content.slice(..span));
                }
                let mut content = content.to_vec();
                content.resize(span, 0);
                Ok(content.into())
            };
            found.into_iter().zip(spans).map(content).collect()
        };
        tokio::task::spawn_blocking(decode).await.map_err(|_| VolumeError::ShuttingDown)?
    }

    /// The hash of its content, by the names of its blocks.
    async fn content(&self) -> Result<[u8; 32], VolumeError> {
        if let Some(inline) = &self.row.inline {
            return Ok(blocks::content_of(inline, self.row.size));
        }
        let (ino, mut rows) = (Ino(self.row.ino), None);
        if Blocks::has_pages(&self.row) {
            let snapshot = self.db.snapshot()?;
            rows = Some(database::scan(&snapshot, &tables::pages(ino)).await?);
        }
        let (mut content, mut found) = (Content::new(self.row.size), Blocks::new(&self.row, rows)?);
        while let Some((at, block)) = found.next().await? {
            match u64::from(block.len) == blocks::span(self.row.size, at) {
                true => content.push(at, &block.hash.0),
                // Something was cut off, or follows.
                false => content.push(at, &name::hash(&self.read(at, at + 1).await?.concat())),
            }
        }
        Ok(content.finish())
    }

    /// Where a part of it is cut that begins where a chunk does.
    async fn cut(self: &Arc<File>, begin: u64) -> Result<Part, VolumeError> {
        let size = self.row.size;
        // Of what follows only so much that the last chunk is seen to its end.
        let until = size.min(begin + PART + chunk::LONGEST as u64);
        let (sender, blocks) = mpsc::channel::<Bytes>(AHEAD * WINDOW as usize);
        let cut = tokio::task::spawn_blocking(move || {
            let mut arriving = Arriving { blocks, block: Bytes::new(), left: until - begin };
            let (mut chunks, mut end): (Vec<Chunk>, u64) = (Vec::new(), begin);
            let cut = chunk::cut(&mut arriving, |chunk| {
                if end < begin + PART {
                    chunks.push((*blake3::hash(chunk).as_bytes(), chunk.len() as u32));
                    end += chunk.len() as u64;
                }
            });
            cut.map(|()| {
                if end < size {
                    let rest = chunks.split_off(chunk::in_whole_groups(&chunks));
                    end -= rest.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
                }
                (chunks.into(), end)
            })
        });
        let mut at = begin / BLOCK_SIZE;
        let mut skipped = (begin % BLOCK_SIZE) as usize;
        'all: while at * BLOCK_SIZE < until {
            for mut block in self.read(at, at + WINDOW).await? {
                block.advance(std::mem::take(&mut skipped));
                // Whoever cuts has enough.
                if sender.send(block).await.is_err() {
                    break 'all;
                }
            }
            at += WINDOW;
        }
        drop(sender);
        let part = cut.await.map_err(|_| VolumeError::ShuttingDown)?;
        part.map_err(|_| VolumeError::Invalid("the file cannot be cut"))
    }
}

/// Blocks as they come, as one file.
struct Arriving {
    blocks: mpsc::Receiver<Bytes>,
    block: Bytes,
    left: u64,
}

impl Read for Arriving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.block.is_empty() && self.left > 0 {
            match self.blocks.blocking_recv() {
                Some(block) => self.block = block,
                // It could not be read: what was cut is not used.
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX)).min(self.block.len());
        self.block.copy_to_slice(&mut buffer[..most]);
        self.left -= most as u64;
        Ok(most)
    }
}

/// Tells where a part of a file is cut.
///
/// # Errors
/// There is no such file in a snapshot; content of it is damaged; the store fails.
pub(crate) async fn cut(shared: &Arc<Shared>, asked: CutFile) -> Result<Cuts, VolumeError> {
    let file = Arc::new(File::open(shared, asked.of, &asked.path).await?);
    let size = file.row.size;
    if asked.begin > size {
        return Err(VolumeError::Invalid("the file ends before that"));
    }
    let content = file.content().await?;
    let cutting = &shared.cutting;
    // A later part is of the same content from the same place on, so it is the same for all files that have it.
    let part = cutting.remembered.try_get_with((content, asked.begin), async {
        let _turn = cutting.turns.acquire().await.map_err(|_| VolumeError::ShuttingDown)?;
        file.cut(asked.begin).await
    });
    let (chunks, end) = part.await.map_err(|error: Arc<VolumeError>| {
        // Others may have waited for the same.
        Arc::try_unwrap(error).unwrap_or(VolumeError::Invalid("the file cannot be cut now"))
    })?;
    let known: std::collections::HashSet<&[u8]> = asked.known.chunks_exact(8).collect();
    let groups = chunk::groups(&chunks).map(|group| {
        let group = &chunks[group];
        let tag = chunk::tag(group);
        if known.contains(tag.as_slice()) {
            return CutGroup { tag: Bytes::copy_from_slice(&tag), ..CutGroup::default() };
        }
        let names = group.iter().flat_map(|(name, _)| *name).collect();
        CutGroup { names, lengths: group.iter().map(|(_, len)| *len).collect(), ..CutGroup::default() }
    });
    Ok(Cuts { groups: groups.collect(), end, size, content: Bytes::copy_from_slice(&content) })
}

/// The parts of a frame; those that follow each other in the file together.
fn runs(frame: &FrameOf) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (offset, len) in frame.offsets.iter().zip(&frame.lengths) {
        let end = offset.saturating_add(u64::from(*len));
        match runs.last_mut() {
            Some((_, last)) if last == offset => *last = end,
            _ => runs.push((*offset, end)),
        }
    }
    runs
}

/// Reads parts of a file.
///
/// # Errors
/// As [`cut`]; it has no such parts; they are too many.
pub(crate) async fn read(shared: &Arc<Shared>, asked: ReadParts) -> Result<FileParts, VolumeError> {
    let lengths = || asked.frames.iter().flat_map(|frame| &frame.lengths);
    let even = asked.frames.iter().all(|frame| frame.offsets.len() == frame.lengths.len());
    if !even
        || lengths().count() > PARTS_MAX
        || lengths().map(|len| u64::from(*len)).sum::<u64>() > PARTS_BYTES
    {
        return Err(VolumeError::Invalid("parts without a length, or too many of them"));
    }
    let file = File::open(shared, asked.of, &asked.path).await?;
    let file = &file;
    let frames = stream::iter(asked.frames).map(|frame| async move {
        let mut bytes = Vec::new();
        for (begin, end) in runs(&frame) {
            if end > file.row.size {
                return Err(VolumeError::Invalid("the file ends before that"));
            }
            let blocks = file.read(begin / BLOCK_SIZE, end.div_ceil(BLOCK_SIZE)).await?.concat();
            let from = (begin % BLOCK_SIZE) as usize;
            bytes.extend_from_slice(&blocks[from..from + (end - begin) as usize]);
        }
        let compress = move || zstd::bulk::compress(&bytes, LEVEL);
        let frame = tokio::task::spawn_blocking(compress).await.map_err(|_| VolumeError::ShuttingDown)?;
        let frame = frame.map_err(|_| VolumeError::Invalid("parts cannot be compressed"))?;
        Ok::<Bytes, VolumeError>(frame.into())
    });
    Ok(FileParts { frames: frames.buffered(AHEAD).try_collect().await? })
}
