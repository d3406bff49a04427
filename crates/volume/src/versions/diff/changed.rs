//! Which rows differ between two versions of a database.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::Ino;
use hayloft_wire::{DentryRow, InodeRowMessage};
use slatedb::{DbIterator, SstReader};

use crate::database;
use crate::database::journal::Position;
use crate::database::tables;
use crate::error::VolumeError;
use crate::versions::tables::Tables;

/// Rows that are looked up at a time.
const LOOKUPS: usize = 16;

/// To look a row up costs as much as to read about so many in their order.
const LOOKUP_COST: u64 = 4;

/// So many are looked up in any tree.
const KEYS_MIN: u64 = 1000;

/// A row before and after.
pub(in crate::versions) type Pair<T> = (Option<T>, Option<T>);

/// Rows that differ.
#[derive(Default)]
pub(in crate::versions) struct Changed {
    pub(in crate::versions) inodes: BTreeMap<Ino, Pair<InodeRowMessage>>,
    /// By directory and name: where it leads.
    pub(in crate::versions) names: BTreeMap<(Ino, Bytes), Pair<Ino>>,
    /// Files of which blocks beyond the first page differ.
    pub(in crate::versions) pages: BTreeSet<Ino>,
    pub(in crate::versions) rows_read: u64,
    /// Whether the second version came of the first one; `None`: nobody knows.
    pub(in crate::versions) descends: Option<bool>,
}

impl Changed {
    fn note(&mut self, key: &Bytes, rows: Pair<Bytes>) -> Result<(), VolumeError> {
        if rows.0 == rows.1 {
            return Ok(());
        }
        let number = tables::number_in(key).map(Ino).ok_or(VolumeError::Damaged("key"))?;
        match key[0] {
            tables::INODES => {
                let inode = |row: Option<Bytes>| row.map(|row| database::decode(row, "inode")).transpose();
                self.inodes.insert(number, (inode(rows.0)?, inode(rows.1)?));
            }
            tables::DENTRIES => {
                let ino = |row: Option<Bytes>| {
                    row.map(|row| database::decode::<DentryRow>(row, "name"))
                        .transpose()
                        .map(|row| row.map(|row| Ino(row.ino)))
                };
                self.names.insert((number, tables::rest_of(key)), (ino(rows.0)?, ino(rows.1)?));
            }
            _ => drop(self.pages.insert(number)),
        }
        Ok(())
    }
}

/// Takes the key of a row that may differ, if it is one of files or names.
fn add(key: Bytes, keys: &mut BTreeSet<Bytes>) {
    if tables::is_of_tree(&key) {
        keys.insert(key);
    }
}

/// What journals tell of the rows that differ.
enum Told {
    Rows(Changed),
    /// There are more than it is worth looking up.
    Many,
    Nothing,
}

/// Finds the rows that differ: those that journals tell of, or that are in tables which are not shared, are looked up; when that would be
/// too many, or nothing is known of them, all are read.
pub(in crate::versions) async fn changed(old: &Tables, new: &Tables) -> Result<Changed, VolumeError> {
    let (told, descends) = told(old, new).await?;
    let changed = match told {
        Told::Rows(changed) => changed,
        Told::Many | Told::Nothing => by_tables(old, new).await?,
    };
    Ok(Changed { descends, ..changed })
}

/// As [`changed`], for who can do without; `None` if journals tell that so many differ that all would be read, of both.
pub(in crate::versions) async fn changed_if_few(
    old: &Tables,
    new: &Tables,
) -> Result<Option<Changed>, VolumeError> {
    match told(old, new).await? {
        (Told::Rows(changed), _) => Ok(Some(changed)),
        (Told::Many, _) => Ok(None),
        (Told::Nothing, _) => by_tables(old, new).await.map(Some),
    }
}

/// What journals tell, and whether the second one came of the first one, if that is known.
async fn told(old: &Tables, new: &Tables) -> Result<(Told, Option<bool>), VolumeError> {
    let positions = tokio::try_join!(old.position(), new.position())?;
    let Some((before, after)) = positions.0.zip(positions.1) else { return Ok((Told::Nothing, None)) };
    let descends = before.is_before(&after);
    Ok((journaled((old, new), (before, after)).await?, descends))
}

/// The rows that differ where no journal tells: those in tables that are not shared, or all.
async fn by_tables(old: &Tables, new: &Tables) -> Result<Changed, VolumeError> {
    let (before, after) = (old.files(), new.files());
    let alone = |files: &BTreeMap<ulid::Ulid, (String, u64)>,
                 others: &BTreeMap<ulid::Ulid, (String, u64)>| {
        let alone = files.iter().filter(|(id, _)| !others.contains_key(id));
        alone.map(|(id, (path, bytes))| (*id, path.clone(), *bytes)).collect::<Vec<_>>()
    };
    let mut differ = alone(&before, &after);
    differ.extend(alone(&after, &before));
    let bytes = |files: &BTreeMap<_, (String, u64)>| files.values().map(|(_, bytes)| bytes).sum::<u64>();
    let (all, own) = (bytes(&before) + bytes(&after), differ.iter().map(|(.., bytes)| bytes).sum::<u64>());
    if own * LOOKUP_COST > all {
        return side_by_side(old, new).await;
    }
    let mut changed = Changed::default();
    let mut keys = BTreeSet::new();
    for (id, path, _) in differ {
        let file = SstReader::new(path, old.store().objects(), None, None).open(id).await?;
        for block in 0..file.index().await?.len() {
            let rows = file.read_block(block).await?;
            changed.rows_read += rows.len() as u64;
            rows.into_iter().for_each(|row| add(row.key, &mut keys));
        }
    }
    for side in [old, new] {
        let mut logged = BTreeSet::new();
        changed.rows_read += side.log_keys(&mut logged).await?;
        logged.into_iter().for_each(|key| add(key, &mut keys));
    }
    looked_up(old, new, keys, &mut changed).await?;
    Ok(changed)
}

/// The same by the journals of both.
async fn journaled(
    (old, new): (&Tables, &Tables),
    (before, after): (Position, Position),
) -> Result<Told, VolumeError> {
    let Some(parted) = before.parts_from(&after) else { return Ok(Told::Nothing) };
    // A file is an inode and a name, and all are read in both.
    let keys_max = KEYS_MIN.max(new.inodes().await? / LOOKUP_COST * 2);
    let (mut changed, mut keys) = (Changed::default(), BTreeSet::new());
    for (side, position) in [(old, before), (new, after)] {
        if position.mark <= parted {
            continue;
        }
        match side.journaled(parted, &mut keys, keys_max).await? {
            Some(read) => changed.rows_read += read,
            None => return Ok(Told::Many),
        }
    }
    looked_up(old, new, keys, &mut changed).await?;
    Ok(Told::Rows(changed))
}

/// So many keys that lie beside each other are read in their order, as long as no more than so many rows lie there for each.
const RUN: usize = 32;
const ROWS_A_KEY: u64 = 4;

/// Whether two keys, one after the other, may be of rows that lie beside each other: files that were made one after the other, and
/// names in one directory.
fn are_near(one: &Bytes, other: &Bytes) -> bool {
    let numbers = tables::number_in(one).zip(tables::number_in(other));
    one[0] == other[0]
        && numbers.is_some_and(|(one_number, number)| {
            let reach = if one[0] == tables::INODES { ROWS_A_KEY } else { 0 };
            number - one_number <= reach
        })
}

/// Looks rows up in both.
async fn looked_up(
    old: &Tables,
    new: &Tables,
    keys: BTreeSet<Bytes>,
    changed: &mut Changed,
) -> Result<(), VolumeError> {
    let keys: Vec<Bytes> = keys.into_iter().collect();
    let mut alone = Vec::new();
    for run in keys.chunk_by(are_near) {
        let (first, last) = (&run[0], &run[run.len() - 1]);
        if run.len() < RUN {
            alone.extend_from_slice(run);
            continue;
        }
        let scans = (old.scan_range(first, last).await?, new.scan_range(first, last).await?);
        if let Some(stopped) = in_order(scans, run.len() as u64 * ROWS_A_KEY, changed).await? {
            alone.extend(run.iter().filter(|key| **key >= stopped).cloned());
        }
    }
    let keys = alone;
    let looked_up = stream::iter(keys).map(|key| async move {
        let rows = tokio::try_join!(old.get(&key), new.get(&key))?;
        Ok::<_, VolumeError>((key, rows))
    });
    let mut looked_up = looked_up.buffered(LOOKUPS);
    while let Some((key, rows)) = looked_up.try_next().await? {
        changed.rows_read += 2;
        changed.note(&key, rows)?;
    }
    Ok(())
}

/// The same by reading all rows of both.
async fn side_by_side(old: &Tables, new: &Tables) -> Result<Changed, VolumeError> {
    let mut changed = Changed::default();
    for table in tables::OF_TREE {
        let scans = (old.scan(&[table]).await?, new.scan(&[table]).await?);
        in_order(scans, u64::MAX, &mut changed).await?;
    }
    Ok(changed)
}

/// Compares rows as they come, up to so many. Gives the key of the first one that was not looked at, if there are more.
async fn in_order(
    (mut olds, mut news): (DbIterator, DbIterator),
    rows_max: u64,
    changed: &mut Changed,
) -> Result<Option<Bytes>, VolumeError> {
    let (mut before, mut after) = (olds.next().await?, news.next().await?);
    let mut rows = 0;
    while before.is_some() || after.is_some() {
        let order = match (&before, &after) {
            (Some(before), Some(after)) => before.key.cmp(&after.key),
            (Some(_), None) => std::cmp::Ordering::Less,
            _ => std::cmp::Ordering::Greater,
        };
        let first = if order.is_le() { &before } else { &after };
        let key = first.as_ref().map(|row| row.key.clone()).unwrap_or_default();
        if rows == rows_max {
            return Ok(Some(key));
        }
        (rows, changed.rows_read) = (rows + 1, changed.rows_read + 1);
        let (mut one, mut other) = (None, None);
        if order.is_le() {
            one = before.take();
            before = olds.next().await?;
        }
        if order.is_ge() {
            other = after.take();
            after = news.next().await?;
        }
        changed.note(&key, (one.map(|row| row.value), other.map(|row| row.value)))?;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_together_is_read_together() {
        let runs = |keys: &[Bytes]| keys.chunk_by(are_near).map(<[_]>::len).collect::<Vec<_>>();
        let inodes: Vec<Bytes> = [1, 2, 5, 10, 11].map(|number| tables::inode(Ino(number))).into();
        assert_eq!(runs(&inodes), [3, 2]);
        let names =
            [tables::dentry(Ino(7), b"a"), tables::dentry(Ino(7), b"z"), tables::dentry(Ino(8), b"a")];
        assert_eq!(runs(&names), [2, 1]);
        assert_eq!(runs(&[names[2].clone(), tables::inode(Ino(8))]), [1, 1], "of two tables");
    }
}
