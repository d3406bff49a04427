//! The blocks of a file, in their order. Of holes there is nothing to walk over, however large they are.

use std::vec::IntoIter;

use bytes::Bytes;
use hayloft_model::{BLOCK_SIZE, BlockRef, PAGE_BLOCKS, blocks_of};
use hayloft_tree::name::{self, Pieces};
use hayloft_wire::{InodeRowMessage, decode_blocks};
use slatedb::DbIterator;

use crate::database::tables;
use crate::error::VolumeError;

/// The blocks in a page of a file; none: holes. Those at the end may be missing, and are holes.
pub(super) fn in_page(packed: Option<&Bytes>) -> Result<Vec<Option<BlockRef>>, VolumeError> {
    let blocks = packed.map(|packed| decode_blocks(packed)).transpose();
    Ok(blocks.map_err(|_| VolumeError::Damaged("list of blocks"))?.unwrap_or_default())
}

/// Bytes of a block as a file of that size has it.
pub(super) fn span(size: u64, block: u64) -> u64 {
    (size - block * BLOCK_SIZE).min(BLOCK_SIZE)
}

/// A walk over the blocks of a file that are no holes.
pub(super) struct Blocks {
    /// Of the page that is walked over now, with the number of the next one.
    page: IntoIter<Option<BlockRef>>,
    at: u64,
    /// Blocks from here on are not the file's any more.
    end: u64,
    /// The pages behind it.
    rows: Option<DbIterator>,
}

impl Blocks {
    /// Those of a file, of which `rows` are the pages behind the first one, see [`tables::pages`].
    pub(super) fn new(row: &InodeRowMessage, rows: Option<DbIterator>) -> Result<Blocks, VolumeError> {
        let page = in_page(row.blocks.as_ref())?.into_iter();
        Ok(Blocks { page, at: 0, end: blocks_of(row.size), rows })
    }

    /// Whether a file has pages behind the first one.
    pub(super) fn has_pages(row: &InodeRowMessage) -> bool {
        blocks_of(row.size) > PAGE_BLOCKS
    }

    /// The next one, with its number.
    pub(super) async fn next(&mut self) -> Result<Option<(u64, BlockRef)>, VolumeError> {
        loop {
            for block in self.page.by_ref() {
                let at = self.at;
                self.at += 1;
                match block {
                    _ if at >= self.end => return Ok(None),
                    Some(block) => return Ok(Some((at, block))),
                    None => {}
                }
            }
            let Some(rows) = &mut self.rows else { return Ok(None) };
            let Some(found) = rows.next().await? else { return Ok(None) };
            let page = tables::second_number_in(&found.key).ok_or(VolumeError::Damaged("key of blocks"))?;
            self.at = page.saturating_mul(PAGE_BLOCKS);
            self.page = in_page(Some(&found.value))?.into_iter();
        }
    }
}

/// What the hash of a content consists of, block by block.
pub(super) struct Content {
    pieces: Pieces,
    size: u64,
    /// Blocks before it are in.
    at: u64,
}

impl Content {
    pub(super) fn new(size: u64) -> Content {
        Content { pieces: Pieces::default(), size, at: 0 }
    }

    /// A block that is no hole, by the hash of its content.
    pub(super) fn push(&mut self, at: u64, hash: &[u8; 32]) {
        self.pieces.push_zeros((at - self.at) * BLOCK_SIZE);
        self.pieces.push(hash);
        self.at = at + 1;
    }

    /// The hash of the content of a file of which nothing follows.
    pub(super) fn finish(mut self) -> [u8; 32] {
        self.pieces.push_zeros(self.size.saturating_sub(self.at.saturating_mul(BLOCK_SIZE)));
        self.pieces.finish()
    }
}

/// A block of a content that is in its row, of which only the beginning may be there: the rest is a hole.
pub(super) fn of_inline(inline: &Bytes, size: u64, block: u64) -> Bytes {
    let mut content = if block == 0 { inline.to_vec() } else { Vec::new() };
    content.resize(span(size, block) as usize, 0);
    content.into()
}

/// The hash of a content that is in its row.
pub(super) fn content_of(inline: &Bytes, size: u64) -> [u8; 32] {
    let mut content = Content::new(size);
    if size > 0 {
        content.push(0, &name::hash(&of_inline(inline, size, 0)));
    }
    content.finish()
}
