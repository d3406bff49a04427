//! What of a file's data goes into a batch, and what becomes of it there.

use std::sync::Arc;

use bytes::Bytes;
use hayloft_model::{BlockRef, INLINE_MAX, PAGE_BLOCKS, Sequence, pages_of};

use super::{Block, DataCut, Due, FileData};

impl FileData {
    /// Whether the row holds all of it.
    pub(super) fn fits_row(&self) -> bool {
        match &self.blocks[..] {
            [] => !self.pages_lacking,
            [(0, Block { data: Some(_), .. })] => self.size <= INLINE_MAX,
            _ => false,
        }
    }

    /// The log is cut: what has changed belongs to the batch `sequence`. To take it is for who comes next ([`FileData::take_due`]),
    /// since all calls wait while the log is cut.
    pub(crate) fn cut_later(&mut self, sequence: Sequence) {
        self.take_due();
        self.due = Some(Due::Untaken(sequence));
    }

    /// Before anything is changed: takes what belongs to a cut that was made.
    pub(crate) fn take_due(&mut self) {
        if let Some(Due::Untaken(sequence)) = self.due {
            self.due = Some(Due::Taken(Box::new(self.cut(sequence))));
        }
    }

    /// Gives what the cut has taken, or takes it.
    pub(crate) fn collect_cut(&mut self, sequence: Sequence) -> DataCut {
        match self.due.take() {
            Some(Due::Taken(cut)) => *cut,
            _ => self.cut(sequence),
        }
    }

    /// What the committer has still to collect goes on in what takes the data's place.
    pub(crate) fn leave(&mut self) -> FileData {
        self.take_due();
        let due = self.due.take();
        std::mem::replace(self, FileData { due, ..FileData::gone() })
    }

    /// Takes what changed, for the batch `sequence`. The caller names the content of [`DataCut::blocks`], fills the
    /// gaps in the pages, and calls [`FileData::named`] for each block.
    pub(crate) fn cut(&mut self, sequence: Sequence) -> DataCut {
        self.last_cut = sequence;
        let whole = self.fits_row().then(|| match &self.blocks[..] {
            [(_, Block { data: Some(data), .. })] => Bytes::copy_from_slice(data),
            _ => Bytes::new(),
        });
        let pages_now = pages_of(self.size).max(1);
        let pages_stored = std::mem::replace(&mut self.pages_stored, pages_now);
        let pages_end = (pages_stored > pages_now).then_some(pages_now);
        let (mut blocks, mut before) = (Vec::new(), Vec::new());
        if let Some(inline) = &whole {
            for (_, block) in &mut self.blocks {
                // What the row holds needs no content of its own.
                (block.stored, block.dirty, block.cached, block.cut) = (None, false, false, sequence);
            }
            self.cached_bytes = 0;
            self.dirty_bytes = 0;
            self.pages_dirty.retain(|page| *page > 0);
            let pages = self.take_pages(pages_now);
            return DataCut { inline: Some(inline.clone()), pages, pages_end, blocks, pages_stored, before };
        }
        for (index, block) in &mut self.blocks {
            // Data that was part of its row until now has no content of its own yet.
            let unnamed = block.dirty || block.stored.is_none();
            if let (true, Some(data)) = (unnamed, &block.data) {
                blocks.push((*index, Arc::clone(data)));
                before.push((*index, block.stored));
                (block.dirty, block.cut) = (false, sequence);
                self.pages_dirty.insert(*index / PAGE_BLOCKS);
            }
        }
        self.dirty_bytes = 0;
        self.pages_dirty.insert(0);
        let pages = self.take_pages(pages_now);
        DataCut { inline: None, pages, pages_end, blocks, pages_stored, before }
    }

    fn take_pages(&mut self, pages_now: u64) -> Vec<(u64, Vec<Option<BlockRef>>)> {
        let dirty = std::mem::take(&mut self.pages_dirty);
        dirty
            .into_iter()
            .filter(|page| *page < pages_now)
            .map(|page| {
                let first = page * PAGE_BLOCKS;
                let at = self.find(first).unwrap_or_else(|at| at);
                let mut refs = Vec::new();
                for (index, block) in
                    self.blocks[at..].iter().take_while(|(index, _)| *index < first + PAGE_BLOCKS)
                {
                    refs.resize((index - first) as usize, None);
                    refs.push(block.stored);
                }
                (page, refs)
            })
            .collect()
    }

    /// The content of a block that was cut with `sequence` is shipped under this name. Its buffer has grown in large steps;
    /// `fitting` is one without anything to spare.
    pub(crate) fn named(
        &mut self,
        index: u64,
        stored: BlockRef,
        sequence: Sequence,
        fitting: Option<&Arc<Vec<u8>>>,
    ) {
        let Some(block) = self.block_mut(index).filter(|block| !block.dirty && block.cut == sequence) else {
            return;
        };
        block.stored = Some(stored);
        if let Some(fitting) = fitting.filter(|_| block.data.is_some()) {
            let before = u64::from(block.held);
            block.data = Some(Arc::clone(fitting));
            let held = block.count_buffer();
            self.held_bytes = self.held_bytes + held - before;
        }
    }

    /// The batch `sequence` is durable: returns the bytes that the cache accounts for from now on, and which blocks.
    pub(crate) fn durable(&mut self, indexes: &[u64], sequence: Sequence) -> Vec<(u64, u64)> {
        let mut added = Vec::new();
        for index in indexes {
            let Some(block) = self.block_mut(*index) else { continue };
            let clean =
                !block.dirty && block.cut == sequence && block.stored.is_some() && block.data.is_some();
            if clean && !block.cached {
                block.cached = true;
                added.push((*index, block.len()));
            }
        }
        self.cached_bytes += added.iter().map(|(_, len)| len).sum::<u64>();
        added
    }

    /// The batch `sequence` was refused: its blocks are unshipped again. Returns by how much the unshipped bytes grew.
    pub(crate) fn undo_cut(&mut self, cut: &DataCut, sequence: Sequence) -> u64 {
        let before = self.dirty_bytes;
        for (index, stored) in &cut.before {
            // The name that it got stands for nothing at the server.
            if let Some(block) = self.block_mut(*index).filter(|block| block.cut == sequence) {
                block.stored = *stored;
            }
        }
        for (_, block) in &mut self.blocks {
            if block.cut == sequence && !block.dirty && block.data.is_some() {
                block.dirty = true;
                self.dirty_bytes += block.len();
            }
        }
        self.pages_dirty.extend(cut.pages.iter().map(|(page, _)| *page));
        self.pages_dirty.extend(cut.pages_end.unwrap_or(cut.pages_stored)..cut.pages_stored);
        self.pages_stored = self.pages_stored.max(cut.pages_stored);
        self.dirty_bytes - before
    }
}
