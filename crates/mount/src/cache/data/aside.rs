//! What a file gives up when there is no room for it.

use std::sync::Arc;

use hayloft_model::{BLOCK_SIZE, INLINE_MAX};

use super::{Block, FileData};

/// Blocks with their data.
pub(crate) type Blocks = Vec<(u64, Arc<Vec<u8>>)>;

impl FileData {
    /// Blocks whose content has to go to the server by itself, and is not there.
    pub(crate) fn homeless(&self) -> Blocks {
        if self.fits_row() {
            return Vec::new();
        }
        let of_block = |(index, block): &(u64, Block)| {
            let data = block.data.as_ref().filter(|_| block.dirty || block.stored.is_none())?;
            Some((*index, Arc::clone(data)))
        };
        self.blocks.iter().filter_map(of_block).collect()
    }

    /// Gives these blocks up, if they are still what there is to give up: each is what the server has of it, or a hole. A
    /// file that loses its end ends where the last of its data does; one of which nothing is left keeps what fits its row.
    /// Returns its size, and what it takes.
    pub(crate) fn give_up(&mut self, blocks: &Blocks) -> Option<(u64, u64)> {
        let now = self.homeless();
        let mut pairs = now.iter().zip(blocks);
        if now.len() != blocks.len() || !pairs.all(|((a, one), (b, other))| a == b && Arc::ptr_eq(one, other))
        {
            return None;
        }
        for (index, _) in blocks {
            let Ok(at) = self.find(*index) else { continue };
            let stored = self.blocks[at].1.stored;
            self.remove_block(at);
            if let Some(stored) = stored {
                self.allocated += u64::from(stored.len);
                self.blocks.insert(at, (*index, Block { stored: Some(stored), ..Block::new() }));
            }
        }
        let lost_end = blocks.last().is_some_and(|(lost, _)| {
            self.blocks.last().is_none_or(|(index, _)| index <= lost) && !self.pages_lacking
        });
        if lost_end {
            self.size = self.blocks.last().map_or(0, |(index, block)| index * BLOCK_SIZE + block.len());
        }
        if let (true, [(0, first), ..]) = (self.blocks.is_empty() && !self.pages_lacking, &blocks[..]) {
            let kept = &first[..first.len().min(INLINE_MAX as usize)];
            self.change_block(0, |data| data.extend_from_slice(kept));
            self.size = kept.len() as u64;
        }
        Some((self.size, self.allocated))
    }
}
