//! The data of one file in memory: blocks that were read, and blocks that were written and are not shipped.

mod aside;
mod base;
mod change;
mod cut;

use std::collections::BTreeSet;
use std::io::{self, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use hayloft_model::{BLOCK_SIZE, BlockRef, Content, INLINE_MAX, PAGE_BLOCKS, Sequence, blocks_of, pages_of};
use parking_lot::Mutex;

pub(crate) use aside::Blocks;
pub(crate) use base::{Base, PAGE};

/// A file that is read or written: shared between the requests on it and the committer.
///
/// Lock order: after the core's lock, or alone; never the core's while this is held.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) data: Mutex<FileData>,
    /// Where the last read ended: a read from there on is a sequential one.
    read_end: AtomicU64,
    /// Writes that have been admitted and are not in the tree yet: they belong to what is owned.
    pub(crate) writes: AtomicU64,
}

/// Blocks fetched ahead of a sequential reader.
const READ_AHEAD: u64 = 32;

impl File {
    pub(crate) fn new(data: FileData) -> File {
        File { data: Mutex::new(data), read_end: AtomicU64::new(0), writes: AtomicU64::new(0) }
    }

    /// How many blocks to fetch ahead when `[offset, offset + len)` is read.
    pub(crate) fn ahead(&self, offset: u64, len: u64) -> u64 {
        let expected = self.read_end.swap(offset + len, Ordering::Relaxed);
        if offset == expected || offset == 0 { READ_AHEAD } else { 0 }
    }
}

/// One block: what is known of it. A hole has no block at all.
#[derive(Clone, Debug)]
struct Block {
    /// Its bytes up to the last one that is not a zero fill.
    data: Option<Arc<Vec<u8>>>,
    /// The content that the server has for it, or will have when `cut` is durable.
    stored: Option<BlockRef>,
    /// Changed since the last cut.
    dirty: bool,
    /// The last cut that took its data.
    cut: Sequence,
    /// Read since the cache looked last.
    used: bool,
    /// Counted in `cached_bytes`: clean, and may leave memory.
    cached: bool,
    /// Counted in `held_bytes`: what its buffer takes. What has come with its row is the row's.
    held: u32,
}

/// What has to be fetched before an operation can go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lacking {
    /// These pieces of content, in file order.
    Content(Vec<(u64, BlockRef)>),
    /// The file's page rows.
    Pages,
    /// The file has left memory: others have changed it, or may.
    Gone,
}

/// The data of a file. Sizes and offsets are in bytes.
#[derive(Debug, Default)]
pub(crate) struct FileData {
    /// In order of their index.
    blocks: Vec<(u64, Block)>,
    size: u64,
    /// Page rows 1 and later are not in memory.
    pages_lacking: bool,
    /// Pages, page 0 included, that the server has rows of, at most.
    pages_stored: u64,
    pages_dirty: BTreeSet<u64>,
    dirty_bytes: u64,
    /// Sum of the lengths of all blocks.
    allocated: u64,
    /// Bytes of clean blocks in memory that the cache accounts for.
    cached_bytes: u64,
    /// Bytes of all buffers, also of what they have to spare.
    held_bytes: u64,
    /// The last cut that took anything of the file; the row is what it says only when that is durable.
    last_cut: Sequence,
    /// A cut of the log that the committer has still to collect here.
    due: Option<Due>,
    /// It has left memory; whoever still holds it finds nothing.
    gone: bool,
}

/// What a cut takes of a file: the inode row's content and page rows, with gaps where content has to be
/// named first.
#[derive(Debug)]
pub(crate) struct DataCut {
    pub(crate) inline: Option<Bytes>,
    /// Pages to put, page 0 first.
    pub(crate) pages: Vec<(u64, Vec<Option<BlockRef>>)>,
    /// No page row at or beyond this number exists any more.
    pub(crate) pages_end: Option<u64>,
    /// Blocks of which the content has to be shipped.
    pub(crate) blocks: Vec<(u64, Arc<Vec<u8>>)>,
    /// Pages that the server had rows of before.
    pages_stored: u64,
    /// What these blocks were stored as before.
    before: Vec<(u64, Option<BlockRef>)>,
}

/// What belongs to a cut of the log, from the moment of the cut until the committer collects it.
#[derive(Debug)]
pub(super) enum Due {
    /// All that has changed, as it is: whoever comes to the data first takes it.
    Untaken(Sequence),
    Taken(Box<DataCut>),
}

fn range_of(index: u64) -> (u64, u64) {
    (index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
}

impl Block {
    fn new() -> Block {
        Block { data: None, stored: None, dirty: false, cut: Sequence(0), used: true, cached: false, held: 0 }
    }

    fn len(&self) -> u64 {
        match (&self.data, &self.stored) {
            (Some(data), _) => data.len() as u64,
            (None, Some(stored)) => u64::from(stored.len),
            (None, None) => 0,
        }
    }

    /// Counts what its buffer takes from now on.
    fn count_buffer(&mut self) -> u64 {
        self.held = self.data.as_ref().map_or(0, |data| data.capacity() as u32);
        u64::from(self.held)
    }

    /// Bytes that a budget for unshipped data has to count.
    fn dirty_len(&self) -> u64 {
        if self.dirty { self.len() } else { 0 }
    }
}

impl FileData {
    /// What is left when a file has left memory.
    pub(crate) fn gone() -> FileData {
        FileData { gone: true, ..FileData::default() }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }

    /// A file as its row has it.
    ///
    /// `allocated` is what the row says; it stands as long as the page rows are not in memory.
    pub(crate) fn from_row(size: u64, allocated: u64, content: &Content) -> FileData {
        let mut file = FileData { size, pages_stored: pages_of(size), ..FileData::default() };
        match content {
            Content::Inline(bytes) if !bytes.is_empty() && size > 0 => {
                let bytes = &bytes[..bytes.len().min(size as usize)];
                file.blocks.push((0, Block { data: Some(Arc::new(bytes.to_vec())), ..Block::new() }));
            }
            Content::Blocks(blocks) => {
                file.add_page(0, blocks);
                file.pages_lacking = pages_of(size) > 1;
            }
            _ => {}
        }
        file.allocated = if file.pages_lacking { allocated } else { file.sum_of_blocks() };
        file
    }

    fn sum_of_blocks(&self) -> u64 {
        self.blocks.iter().map(|(_, block)| block.len()).sum()
    }

    fn add_page(&mut self, page: u64, blocks: &[Option<BlockRef>]) {
        for (index, stored) in blocks.iter().enumerate() {
            let index = page * PAGE_BLOCKS + index as u64;
            // A client that was killed between writing and growing the file may have shipped more than its size says.
            let room = self.size.saturating_sub(index * BLOCK_SIZE).min(BLOCK_SIZE) as u32;
            if let Some(stored) = stored.filter(|_| room > 0) {
                let stored = BlockRef { len: stored.len.min(room), ..stored };
                self.blocks.push((index, Block { stored: Some(stored), ..Block::new() }));
            }
        }
    }

    /// The page rows 1 and later have come.
    pub(crate) fn add_pages(&mut self, pages: &[(u64, Vec<Option<BlockRef>>)]) {
        if !std::mem::take(&mut self.pages_lacking) {
            return;
        }
        for (page, blocks) in pages {
            self.add_page(*page, blocks);
        }
        self.blocks.sort_by_key(|(index, _)| *index);
        self.allocated = self.sum_of_blocks();
    }

    pub(crate) fn allocated(&self) -> u64 {
        self.allocated
    }

    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes
    }

    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cached_bytes
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    fn find(&self, index: u64) -> Result<usize, usize> {
        match self.blocks.last() {
            Some((last, _)) if *last < index => Err(self.blocks.len()),
            Some((last, _)) if *last == index => Ok(self.blocks.len() - 1),
            _ => self.blocks.binary_search_by_key(&index, |(index, _)| *index),
        }
    }

    fn block(&self, index: u64) -> Option<&Block> {
        self.find(index).ok().map(|at| &self.blocks[at].1)
    }

    fn block_mut(&mut self, index: u64) -> Option<&mut Block> {
        self.find(index).ok().map(|at| &mut self.blocks[at].1)
    }

    /// What of `[from, to)` is not in memory, and `ahead` blocks after it once something is not.
    fn lacking(&self, from: u64, to: u64, ahead: u64) -> Result<(), Lacking> {
        let to = to.min(self.size);
        if from >= to {
            return Ok(());
        }
        if self.pages_lacking && blocks_of(to) > PAGE_BLOCKS {
            return Err(Lacking::Pages);
        }
        let absent = |(index, block): &(u64, Block)| match (&block.data, block.stored) {
            (None, Some(stored)) => Some((*index, stored)),
            _ => None,
        };
        let (first, last) = (from / BLOCK_SIZE, blocks_of(to));
        let at = self.find(first).unwrap_or_else(|at| at);
        let within = |last: u64| {
            self.blocks[at..].iter().take_while(move |(index, _)| *index < last).filter_map(absent)
        };
        if within(last).next().is_none() {
            return Ok(());
        }
        Err(Lacking::Content(within(last + ahead).collect()))
    }

    /// Writes what is in memory to a file, at its place; `false` when some of the content is not.
    pub(crate) fn copy_to(&self, out: &mut (impl Write + Seek)) -> io::Result<bool> {
        for (index, block) in &self.blocks {
            if let Some(data) = &block.data {
                out.seek(SeekFrom::Start(index * BLOCK_SIZE))?;
                out.write_all(data)?;
            }
        }
        Ok(self.lacking(0, self.size, 0).is_ok())
    }

    /// All blocks whose content is not in memory; none when that is not known.
    pub(crate) fn absent(&self) -> Vec<(u64, BlockRef)> {
        match self.lacking(0, self.size, 0) {
            Err(Lacking::Content(blocks)) => blocks,
            Ok(()) | Err(Lacking::Pages | Lacking::Gone) => Vec::new(),
        }
    }

    /// Reads from `offset` into `out`; returns how many bytes there were before the end of the file.
    pub(crate) fn read(&mut self, offset: u64, out: &mut [u8], ahead: u64) -> Result<usize, Lacking> {
        let end = self.size.min(offset.saturating_add(out.len() as u64));
        if offset >= end {
            return Ok(0);
        }
        self.lacking(offset, end, ahead)?;
        let out = &mut out[..(end - offset) as usize];
        out.fill(0);
        let mut at = self.find(offset / BLOCK_SIZE).unwrap_or_else(|at| at);
        while let Some((index, block)) = self.blocks.get_mut(at) {
            let (start, _) = range_of(*index);
            if start >= end {
                break;
            }
            block.used = true;
            if let Some(data) = &block.data {
                let from = offset.max(start);
                let to = end.min(start + data.len() as u64);
                if from < to {
                    out[(from - offset) as usize..(to - offset) as usize]
                        .copy_from_slice(&data[(from - start) as usize..(to - start) as usize]);
                }
            }
            at += 1;
        }
        Ok(out.len())
    }

    /// Fetched content for a block, unless the block has changed meanwhile. Returns the bytes it adds to the cache.
    pub(crate) fn fill(&mut self, index: u64, stored: BlockRef, data: &Arc<Vec<u8>>) -> u64 {
        let Some(block) = self.block_mut(index) else { return 0 };
        if block.data.is_some() || block.stored != Some(stored) {
            return 0;
        }
        block.data = Some(if data.len() == stored.len as usize {
            Arc::clone(data)
        } else {
            Arc::new(data[..data.len().min(stored.len as usize)].to_vec())
        });
        (block.used, block.cached) = (true, true);
        let (len, held) = (block.len(), block.count_buffer());
        self.cached_bytes += len;
        self.held_bytes += held;
        len
    }

    /// A block's data may leave memory if the server has it. Returns the bytes freed, or `None` when the block was
    /// used since the last look, or cannot leave, and `Some(0)` when there is nothing (more) to free.
    pub(crate) fn drop_clean(&mut self, index: u64, durable: Sequence) -> Option<u64> {
        let Some(block) = self.block_mut(index) else { return Some(0) };
        if !block.cached {
            return Some(0);
        }
        if std::mem::take(&mut block.used) || block.cut > durable {
            return None;
        }
        let (len, held) = (block.len(), std::mem::take(&mut block.held));
        (block.data, block.cached) = (None, false);
        self.cached_bytes -= len;
        self.held_bytes -= u64::from(held);
        Some(len)
    }

    /// The next offset at or after `offset` that is data (`true`) or a hole; `None` when there is none before the end.
    pub(crate) fn seek(&self, offset: u64, data: bool) -> Result<Option<u64>, Lacking> {
        if offset >= self.size {
            return Ok(None);
        }
        if self.pages_lacking {
            return Err(Lacking::Pages);
        }
        let mut position = offset;
        while position < self.size {
            let (start, stop) = range_of(position / BLOCK_SIZE);
            let data_end = start + self.block(position / BLOCK_SIZE).map_or(0, Block::len);
            if (position < data_end) == data {
                return Ok(Some(position));
            }
            if position < data_end {
                position = data_end.min(self.size);
                if data_end < stop && position < self.size {
                    return Ok(Some(position));
                }
                continue;
            }
            // In a hole, looking for data: the next block that there is.
            match self.blocks.get(self.find(position / BLOCK_SIZE + 1).unwrap_or_else(|at| at)) {
                Some((index, _)) => position = range_of(*index).0,
                None => return Ok(None),
            }
        }
        // Every file ends in a hole.
        Ok((!data).then_some(self.size))
    }

    /// Whether everything is at the server, so that the file can be dropped from memory and fetched again.
    pub(crate) fn is_clean(&self, durable: Sequence) -> bool {
        self.pages_dirty.is_empty()
            && self.last_cut <= durable
            && self.blocks.iter().all(|(_, block)| !block.dirty && block.cut <= durable)
    }

    /// Whether no data is in memory and everything is at the server.
    pub(crate) fn is_all_stored(&self, durable: Sequence) -> bool {
        self.is_clean(durable) && self.blocks.iter().all(|(_, block)| block.data.is_none())
    }

    /// Whether all its data is in the inode's row.
    pub(crate) fn is_inline(&self) -> bool {
        self.size <= INLINE_MAX && self.blocks.iter().all(|(_, block)| block.stored.is_none())
    }
}

#[cfg(test)]
mod tests;
