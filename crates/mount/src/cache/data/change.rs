//! Writing to a file's data, making it shorter, and punching holes into it.

use std::sync::Arc;

use hayloft_model::{BLOCK_SIZE, PAGE_BLOCKS, blocks_of, pages_of};

use super::{Block, FileData, Lacking, range_of};

impl FileData {
    /// The bytes that writing `[offset, offset + len)` adds to what takes room.
    pub(crate) fn growth(&self, offset: u64, len: u64) -> Result<u64, Lacking> {
        let end = offset + len;
        if self.pages_lacking && blocks_of(end) > PAGE_BLOCKS {
            return Err(Lacking::Pages);
        }
        let last = blocks_of(end);
        let at = self.find(offset / BLOCK_SIZE).unwrap_or_else(|at| at);
        let present =
            self.blocks[at..].iter().take_while(|(index, _)| *index < last).map(|(index, block)| {
                let (start, stop) = range_of(*index);
                (end.min(stop) - start).min(block.len()).saturating_sub(offset.saturating_sub(start))
            });
        Ok(len.saturating_sub(present.sum()))
    }

    /// Writes `bytes` at `offset`. Returns by how much the unshipped bytes grew.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<u64, Lacking> {
        let end = offset + bytes.len() as u64;
        // Blocks that are only partly covered have to be here; the two at the ends are the only ones.
        for edge in [offset, end] {
            let (start, stop) = range_of(edge / BLOCK_SIZE);
            let covered = offset <= start && end >= stop.min(self.size);
            if edge != start && !covered {
                self.lacking(edge, edge + 1, 0)?;
                self.lacking(start, start + 1, 0)?;
            }
        }
        if self.pages_lacking && blocks_of(end) > PAGE_BLOCKS {
            return Err(Lacking::Pages);
        }
        let before = self.dirty_bytes;
        let mut at = offset;
        while at < end {
            let index = at / BLOCK_SIZE;
            let (start, stop) = range_of(index);
            let part = &bytes[(at - offset) as usize..(end.min(stop) - offset) as usize];
            self.write_block(index, (at - start) as usize, part);
            at = stop;
        }
        self.size = self.size.max(end);
        Ok(self.dirty_bytes.saturating_sub(before))
    }

    /// Makes room in the list for a block and returns it.
    fn block_or_new(&mut self, index: u64) -> &mut Block {
        let at = match self.find(index) {
            Ok(at) => at,
            Err(at) => {
                self.blocks.insert(at, (index, Block::new()));
                at
            }
        };
        &mut self.blocks[at].1
    }

    fn write_block(&mut self, index: u64, from: usize, part: &[u8]) {
        self.change_block(index, |data| {
            let to = from + part.len();
            if data.len() == from {
                // Sequential writing: grow without filling first.
                reserve(data, to);
                data.extend_from_slice(part);
                return;
            }
            if data.len() < to {
                reserve(data, to);
                data.resize(to, 0);
            }
            data[from..to].copy_from_slice(part);
        });
    }

    /// Changes a block's data in place, keeping the books. Data shared with a cut that is being shipped is copied
    /// first. A block that is only stored is begun anew: the caller has made sure that all of it is covered.
    pub(super) fn change_block(&mut self, index: u64, change: impl FnOnce(&mut Vec<u8>)) {
        let block = self.block_or_new(index);
        let (len, dirty_len) = (block.len(), block.dirty_len());
        let was_cached = std::mem::take(&mut block.cached);
        let mut data = block.data.take().unwrap_or_default();
        change(Arc::make_mut(&mut data));
        block.data = Some(data);
        block.dirty = true;
        block.used = true;
        let (now, held_before) = (block.len(), u64::from(block.held));
        let held = block.count_buffer();
        self.held_bytes = self.held_bytes + held - held_before;
        self.allocated = self.allocated + now - len;
        self.dirty_bytes = self.dirty_bytes + now - dirty_len;
        if was_cached {
            self.cached_bytes -= len;
        }
        self.pages_dirty.insert(index / PAGE_BLOCKS);
    }

    pub(super) fn remove_block(&mut self, at: usize) {
        let (index, block) = self.blocks.remove(at);
        self.count_out(index, &block);
    }

    /// The block is no longer in the list.
    fn count_out(&mut self, index: u64, block: &Block) {
        self.allocated -= block.len();
        self.held_bytes -= u64::from(block.held);
        self.dirty_bytes -= block.dirty_len();
        if block.cached {
            self.cached_bytes -= block.len();
        }
        self.pages_dirty.insert(index / PAGE_BLOCKS);
    }

    /// Cuts the file off, or extends it with a hole.
    pub(crate) fn truncate(&mut self, size: u64) -> Result<(), Lacking> {
        if size < self.size {
            if self.pages_lacking {
                if blocks_of(size) > PAGE_BLOCKS {
                    return Err(Lacking::Pages);
                }
                // All that is not in memory goes, also when the file grows again before the next cut.
                self.pages_lacking = false;
                self.pages_dirty.extend(pages_of(size).max(1)..self.pages_stored);
            }
            let keep = blocks_of(size);
            while self.blocks.last().is_some_and(|(index, _)| *index >= keep) {
                self.remove_block(self.blocks.len() - 1);
            }
            self.allocated = self.sum_of_blocks();
            if !size.is_multiple_of(BLOCK_SIZE) {
                self.shorten_block(size / BLOCK_SIZE, (size % BLOCK_SIZE) as usize);
            }
        }
        self.size = size;
        Ok(())
    }

    fn shorten_block(&mut self, index: u64, len: usize) {
        let Some(block) = self.block_mut(index) else { return };
        if block.len() <= len as u64 {
            return;
        }
        match (&block.data, &mut block.stored) {
            (Some(_), _) => self.change_block(index, |data| data.truncate(len)),
            (None, Some(stored)) => {
                // The content stays, only less of it is the file's.
                let before = stored.len;
                stored.len = len as u32;
                self.allocated -= u64::from(before) - len as u64;
                self.pages_dirty.insert(index / PAGE_BLOCKS);
            }
            (None, None) => {}
        }
    }

    /// Makes `[from, to)` read as zeros, as holes where whole blocks are concerned.
    pub(crate) fn punch(&mut self, from: u64, to: u64) -> Result<(), Lacking> {
        let to = to.min(self.size);
        if from >= to {
            return Ok(());
        }
        if self.pages_lacking && blocks_of(to) > PAGE_BLOCKS {
            return Err(Lacking::Pages);
        }
        let whole = |index: u64| {
            let (start, stop) = range_of(index);
            from <= start && to >= stop.min(self.size)
        };
        let partial: Vec<u64> =
            [from / BLOCK_SIZE, (to - 1) / BLOCK_SIZE].into_iter().filter(|index| !whole(*index)).collect();
        for index in &partial {
            let (start, _) = range_of(*index);
            self.lacking(start, start + 1, 0)?;
        }
        for index in &partial {
            let (start, stop) = range_of(*index);
            let (from, to) = ((from.max(start) - start) as usize, (to.min(stop) - start) as usize);
            if self.block(*index).is_some() {
                self.change_block(*index, |data| {
                    let to = to.min(data.len());
                    if from < to {
                        data[from..to].fill(0);
                    }
                });
            }
        }
        let at = |index: u64| self.find(index).unwrap_or_else(|at| at);
        let (first, last) = (at(from / BLOCK_SIZE), at(blocks_of(to)));
        let removed: Vec<(u64, Block)> = {
            let mut kept = Vec::new();
            let mut removed = Vec::new();
            for (index, block) in self.blocks.drain(first..last) {
                if partial.contains(&index) {
                    kept.push((index, block))
                } else {
                    removed.push((index, block))
                }
            }
            self.blocks.splice(first..first, kept);
            removed
        };
        removed.into_iter().for_each(|(index, block)| self.count_out(index, &block));
        Ok(())
    }
}

/// Grows a block's buffer in few steps and never beyond the block.
fn reserve(data: &mut Vec<u8>, to: usize) {
    if to > data.capacity() {
        let room = if data.is_empty() { to } else { to.next_power_of_two() }.min(BLOCK_SIZE as usize).max(to);
        data.reserve_exact(room - data.len());
        crate::host::populate(data.spare_capacity_mut());
    }
}
