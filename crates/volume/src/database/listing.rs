//! Reading directories and inodes from a snapshot of a volume's rows.

use std::collections::HashMap;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::{Dentry, FileKind, Ino, slot};
use hayloft_wire::{InodeRowMessage, PageRow};
use prost::Message;
use rustc_hash::FxBuildHasher;

use crate::database;
use crate::database::DbSnapshot;
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

/// By numbers of inodes.
pub(crate) type Map<V> = HashMap<u64, V, FxBuildHasher>;

/// A name and where it leads.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: Bytes,
    pub(crate) dentry: Dentry,
    /// The same as it is stored.
    pub(crate) row: Bytes,
    /// The inode's row, if it came along in a packed listing; else empty.
    pub(crate) inode: Bytes,
}

impl Entry {
    fn of(key: &Bytes, row: Bytes) -> Result<Entry, VolumeError> {
        let dentry = hayloft_wire::listing::dentry_from(&row).map_err(|_| VolumeError::Damaged("dentry"))?;
        Ok(Entry { name: tables::rest_of(key), dentry, row, inode: Bytes::new() })
    }

    /// Of a packed listing.
    pub(crate) fn packed(name: Bytes, row: Bytes, inode: Bytes) -> Result<Entry, VolumeError> {
        let dentry = hayloft_wire::listing::dentry_from(&row).map_err(|_| VolumeError::Damaged("dentry"))?;
        Ok(Entry { name, dentry, row, inode })
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.dentry.kind == FileKind::Directory
    }
}

/// The entries of a directory in the order of their cookies; `None` when there are more than `limit`.
pub(crate) async fn entries(
    snapshot: &DbSnapshot,
    dir: Ino,
    limit: usize,
) -> Result<Option<Vec<Entry>>, VolumeError> {
    Ok(directories(snapshot, &[dir], limit).await?.remove(&dir.0))
}

/// The entries of several directories, read with one scan; for a walk, in which they mostly lie close together. Those that
/// come after the first `limit` entries are left out.
pub(crate) async fn directories(
    snapshot: &DbSnapshot,
    dirs: &[Ino],
    limit: usize,
) -> Result<Map<Vec<Entry>>, VolumeError> {
    let mut numbers: Vec<u64> = dirs.iter().map(|dir| dir.0).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut found: Map<Vec<Entry>> = numbers.iter().map(|dir| (*dir, Vec::new())).collect();
    let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else { return Ok(found) };
    let (from, to) = (tables::dentries(Ino(*first)), tables::dentries(Ino(last.saturating_add(1))));
    let mut scan = database::scan_range(snapshot, from, to).await?;
    let (mut wanted, mut count) = (numbers.iter().copied().peekable(), 0);
    let mut here = Vec::new();
    while let Some(row) = scan.next().await? {
        let dir = tables::number_in(&row.key).ok_or(VolumeError::Damaged("key of a dentry"))?;
        while let Some(passed) = wanted.next_if(|wanted| *wanted < dir) {
            found.insert(passed, std::mem::take(&mut here));
        }
        match wanted.peek() {
            Some(wanted) if *wanted == dir => here.push(Entry::of(&row.key, row.value)?),
            Some(wanted) => scan.seek(tables::dentries(Ino(*wanted))).await?,
            None => break,
        }
        count += 1;
        if count > limit {
            wanted.by_ref().for_each(|left_out| drop(found.remove(&left_out)));
            break;
        }
    }
    if let Some(last) = wanted.next() {
        found.insert(last, here);
    }
    found.values_mut().for_each(|entries| entries.sort_by_key(|entry| entry.dentry.cookie));
    Ok(found)
}

/// The entries of a directory whose names have this stem.
pub(crate) async fn names_of(
    snapshot: &DbSnapshot,
    dir: Ino,
    stem: &[u8],
) -> Result<Vec<Entry>, VolumeError> {
    let mut entries = Vec::new();
    let key = tables::dentry(dir, stem);
    if let Some(row) = snapshot.get(&key).await? {
        entries.push(Entry::of(&key, row)?);
    }
    let mut scan = database::scan(snapshot, &tables::dentry(dir, &[stem, b"."].concat())).await?;
    while let Some(found) = scan.next().await? {
        entries.push(Entry::of(&found.key, found.value)?);
    }
    entries.retain(|entry| slot::stem(&entry.name) == stem);
    Ok(entries)
}

/// One inode's row.
pub(crate) async fn inode(snapshot: &DbSnapshot, ino: Ino) -> Result<InodeRowMessage, VolumeError> {
    let row = snapshot.get(tables::inode(ino)).await?.ok_or(VolumeError::NoInode(ino))?;
    database::decode(row, "inode")
}

/// The rows of these inodes, as they are stored, or with the content of small files in them. Numbers that lie close together, as those of one directory's files mostly
/// do, are read with one scan.
pub(crate) async fn inodes(
    snapshot: &DbSnapshot,
    wanted: impl Iterator<Item = u64>,
    with_contents: bool,
) -> Result<Map<Bytes>, VolumeError> {
    let mut numbers: Vec<u64> = wanted.collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut rows = Map::with_capacity_and_hasher(numbers.len(), FxBuildHasher);
    let mut single = Vec::new();
    for run in numbers.chunk_by(|one, next| next - one <= RUN_GAP) {
        if run.len() < RUN_MIN {
            single.extend_from_slice(run);
            continue;
        }
        let (from, to) = (run[0], run[run.len() - 1]);
        let mut scan =
            database::scan_range(snapshot, tables::inode(Ino(from)), tables::inode(Ino(to))).await?;
        let mut wanted = run.iter().copied().peekable();
        while let Some(found) = scan.next().await? {
            let Some(ino) = tables::number_in(&found.key) else { continue };
            while wanted.next_if(|wanted| *wanted < ino).is_some() {}
            if wanted.next_if_eq(&ino).is_some() {
                rows.insert(ino, found.value);
            }
        }
    }
    let found: Vec<(u64, Option<Bytes>)> = stream::iter(single)
        .map(|ino| async move {
            let row = (**snapshot).get(tables::inode(Ino(ino))).await?;
            Ok::<_, VolumeError>((ino, row))
        })
        .buffer_unordered(READS)
        .try_collect()
        .await?;
    rows.extend(found.into_iter().filter_map(|(ino, row)| Some((ino, row?))));
    if with_contents {
        fill(snapshot, &mut rows).await?;
    }
    Ok(rows)
}

/// Puts the content of small files into their rows.
pub(crate) async fn fill(snapshot: &DbSnapshot, rows: &mut Map<Bytes>) -> Result<(), VolumeError> {
    let mut placed = Vec::new();
    for row in rows.values() {
        if hayloft_wire::listing::Row::of(row).is_ok_and(|found| found.is_placed()) {
            placed.push(database::decode::<InodeRowMessage>(row.clone(), "inode")?);
        }
    }
    snapshot.fill(placed.iter_mut()).await?;
    rows.extend(placed.into_iter().map(|row| (row.ino, Bytes::from(row.encode_to_vec()))));
    Ok(())
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
