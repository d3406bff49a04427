//! Reading directories and inodes from a snapshot of a volume's rows.

use std::collections::HashMap;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::{FileKind, Ino};
use hayloft_wire::{DentryRow, InodeRowMessage, PageRow};
use slatedb::DbSnapshot;

use crate::database;
use crate::database::tables;
use crate::error::VolumeError;

/// Rows that are read at a time.
const READS: usize = 16;

/// Numbers this far apart or less are read with one scan.
const RUN_GAP: u64 = 8;

/// Fewer numbers than this are not worth a scan.
const RUN_MIN: usize = 4;

/// Most bytes of page rows in one answer: less than a frame.
const PAGES_MAX: usize = 48 << 20;

/// Bytes of an encoded page row besides its blocks, at most.
const PAGE_HEAD: usize = 24;

/// A name and where it leads.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: Bytes,
    pub(crate) dentry: DentryRow,
}

impl Entry {
    pub(crate) fn is_directory(&self) -> bool {
        self.dentry.kind == FileKind::Directory.bits()
    }
}

/// The entries of a directory in the order of their cookies; `None` when there are more than `limit`.
pub(crate) async fn entries(
    snapshot: &DbSnapshot,
    dir: Ino,
    limit: usize,
) -> Result<Option<Vec<Entry>>, VolumeError> {
    let mut entries = Vec::new();
    let mut scan = database::scan(snapshot, &tables::dentries(dir)).await?;
    while let Some(found) = scan.next().await? {
        if entries.len() == limit {
            return Ok(None);
        }
        let dentry = database::decode::<DentryRow>(found.value, "dentry")?;
        entries.push(Entry { name: tables::rest_of(&found.key), dentry });
    }
    entries.sort_by_key(|entry| entry.dentry.cookie);
    Ok(Some(entries))
}

/// One inode's row.
pub(crate) async fn inode(snapshot: &DbSnapshot, ino: Ino) -> Result<InodeRowMessage, VolumeError> {
    let row = snapshot.get(tables::inode(ino)).await?.ok_or(VolumeError::NoInode(ino))?;
    database::decode(row, "inode")
}

/// The rows of these inodes. Numbers that lie close together, as those of one directory's files mostly
/// do, are read with one scan.
pub(crate) async fn inodes(
    snapshot: &DbSnapshot,
    wanted: impl Iterator<Item = u64>,
) -> Result<HashMap<u64, InodeRowMessage>, VolumeError> {
    let mut numbers: Vec<u64> = wanted.collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut rows = HashMap::with_capacity(numbers.len());
    let mut single = Vec::new();
    for run in numbers.chunk_by(|one, next| next - one <= RUN_GAP) {
        if run.len() < RUN_MIN {
            single.extend_from_slice(run);
            continue;
        }
        let (from, to) = (run[0], run[run.len() - 1]);
        let mut scan =
            database::scan_range(snapshot, tables::inode(Ino(from)), tables::inode(Ino(to))).await?;
        while let Some(found) = scan.next().await? {
            if tables::number_in(&found.key).is_some_and(|ino| run.binary_search(&ino).is_ok()) {
                let row = database::decode::<InodeRowMessage>(found.value, "inode")?;
                rows.insert(row.ino, row);
            }
        }
    }
    let found: Vec<Option<InodeRowMessage>> = stream::iter(single)
        .map(|ino| async move {
            match snapshot.get(tables::inode(Ino(ino))).await? {
                Some(row) => database::decode::<InodeRowMessage>(row, "inode").map(Some),
                None => Ok(None),
            }
        })
        .buffer_unordered(READS)
        .try_collect()
        .await?;
    rows.extend(found.into_iter().flatten().map(|row| (row.ino, row)));
    Ok(rows)
}

/// The page rows of a file; refused when they would not fit into one answer.
pub(crate) async fn pages(snapshot: &DbSnapshot, ino: Ino) -> Result<Vec<PageRow>, VolumeError> {
    let mut pages = Vec::new();
    let mut bytes = 0;
    let mut scan = database::scan(snapshot, &tables::pages(ino)).await?;
    while let Some(found) = scan.next().await? {
        let page = tables::second_number_in(&found.key).ok_or(VolumeError::Damaged("key of a page"))?;
        bytes += found.value.len() + PAGE_HEAD;
        if bytes > PAGES_MAX {
            return Err(VolumeError::Invalid("the file has more pages than fit into one answer"));
        }
        pages.push(PageRow { page, blocks: found.value });
    }
    Ok(pages)
}
