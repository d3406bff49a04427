//! Which rows differ between two versions of a database.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::Ino;
use hayloft_wire::{DentryRow, InodeRowMessage};
use slatedb::SstReader;

use crate::database;
use crate::database::tables;
use crate::error::VolumeError;
use crate::versions::tables::Tables;

/// Rows that are looked up at a time.
const LOOKUPS: usize = 16;

/// Tables with rows of files and names.
const TABLES: [u8; 3] = [tables::INODES, tables::DENTRIES, tables::PAGES];

/// To look a row up costs as much as to read about so many in their order.
const LOOKUP_COST: u64 = 4;

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
    if key.first().is_some_and(|table| TABLES.contains(table)) {
        keys.insert(key);
    }
}

/// Finds the rows that differ.
pub(in crate::versions) async fn changed(old: &Tables, new: &Tables) -> Result<Changed, VolumeError> {
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
    let looked_up = stream::iter(keys).map(|key| async move {
        let rows = tokio::try_join!(old.get(&key), new.get(&key))?;
        Ok::<_, VolumeError>((key, rows))
    });
    let mut looked_up = looked_up.buffered(LOOKUPS);
    while let Some((key, rows)) = looked_up.try_next().await? {
        changed.rows_read += 2;
        changed.note(&key, rows)?;
    }
    Ok(changed)
}

/// The same by reading all rows of both.
async fn side_by_side(old: &Tables, new: &Tables) -> Result<Changed, VolumeError> {
    let mut changed = Changed::default();
    for table in TABLES {
        let (mut olds, mut news) = (old.scan(&[table]).await?, new.scan(&[table]).await?);
        let (mut before, mut after) = (olds.next().await?, news.next().await?);
        while before.is_some() || after.is_some() {
            changed.rows_read += 1;
            let order = match (&before, &after) {
                (Some(before), Some(after)) => before.key.cmp(&after.key),
                (Some(_), None) => std::cmp::Ordering::Less,
                _ => std::cmp::Ordering::Greater,
            };
            let (mut one, mut other) = (None, None);
            if order.is_le() {
                one = before.take();
                before = olds.next().await?;
            }
            if order.is_ge() {
                other = after.take();
                after = news.next().await?;
            }
            let key = one.as_ref().or(other.as_ref()).map(|row| row.key.clone()).unwrap_or_default();
            changed.note(&key, (one.map(|row| row.value), other.map(|row| row.value)))?;
        }
    }
    Ok(changed)
}
