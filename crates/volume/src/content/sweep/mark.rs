//! Marking: which content rows name.

use std::collections::HashMap;

use bytes::Bytes;
use hayloft_model::ContentHash;
use hayloft_wire::decode_blocks;
use hayloft_wire::listing::Row;
use slatedb::DbIterator;

use crate::database::small::SmallPlace;
use crate::database::tables::{self, PackId};
use crate::database::{self, DbSnapshot};
use crate::error::VolumeError;

/// What a snapshot's rows name.
pub(super) struct Marks {
    /// The first eight bytes of each hash, sorted: enough, since taking a dead chunk for a live one does
    /// no harm, and a quarter of the memory.
    live: Vec<u64>,
    /// Bytes of small files in each pack.
    pub(super) small: HashMap<PackId, u64>,
    /// Keys of page rows of inodes that are gone.
    pub(super) stale_pages: Vec<Bytes>,
}

fn prefix_of(hash: ContentHash) -> u64 {
    u64::from_be_bytes(*hash.0.first_chunk().expect("hashes have 32 bytes"))
}

impl Marks {
    pub(super) fn is_live(&self, hash: ContentHash) -> bool {
        self.live.binary_search(&prefix_of(hash)).is_ok()
    }

    fn name(&mut self, blocks: &[u8]) -> Result<(), VolumeError> {
        let blocks = decode_blocks(blocks)?;
        self.live.extend(blocks.iter().flatten().map(|block| prefix_of(block.hash)));
        Ok(())
    }
}

/// Reads all inode and page rows, side by side in the order of their inodes.
pub(super) async fn mark(snapshot: &DbSnapshot) -> Result<Marks, VolumeError> {
    let mut marks = Marks { live: Vec::new(), small: HashMap::new(), stale_pages: Vec::new() };
    let mut inodes = database::scan(snapshot, &[tables::INODES]).await?;
    let mut pages = database::scan(snapshot, &[tables::PAGES]).await?;
    let mut inode = next_inode(&mut inodes, &mut marks).await?;
    while let Some(page) = pages.next().await? {
        let owner = tables::number_in(&page.key).ok_or(VolumeError::Damaged("key of a page"))?;
        while inode.is_some_and(|inode| inode < owner) {
            inode = next_inode(&mut inodes, &mut marks).await?;
        }
        if inode == Some(owner) {
            marks.name(&page.value)?;
        } else {
            marks.stale_pages.push(page.key);
        }
    }
    while inode.is_some() {
        inode = next_inode(&mut inodes, &mut marks).await?;
    }
    marks.live.sort_unstable();
    marks.live.dedup();
    Ok(marks)
}

async fn next_inode(inodes: &mut DbIterator, marks: &mut Marks) -> Result<Option<u64>, VolumeError> {
    let Some(found) = inodes.next().await? else { return Ok(None) };
    let row = Row::of(&found.value).map_err(|_| VolumeError::Damaged("inode"))?;
    if let Some(blocks) = row.blocks {
        marks.name(blocks)?;
    }
    if let Some(place) = SmallPlace::of_bytes(row.placed)? {
        *marks.small.entry(place.pack).or_default() += u64::from(place.len);
    }
    tables::number_in(&found.key).map(Some).ok_or(VolumeError::Damaged("key of an inode"))
}
