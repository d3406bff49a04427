//! Which rows differ between two versions of a database.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::Ino;
use hayloft_store::Store;
use hayloft_wire::{DentryRow, InodeRowMessage};
use slatedb::config::ScanOptions;
use slatedb::{DbIterator, DbReader, SstReader, WalReader};

use crate::database;
use crate::database::tables;
use crate::error::VolumeError;

/// Rows that are looked up at a time.
const LOOKUPS: usize = 16;

/// Tables with rows of files and names.
const TABLES: [u8; 3] = [tables::INODES, tables::DENTRIES, tables::PAGES];

/// To look a row up costs as much as to read about so many in their order.
const LOOKUP_COST: u64 = 4;

/// One version of a database.
pub(super) struct Tables {
    reader: DbReader,
    store: Store,
    id: String,
}

impl Tables {
    pub(super) fn new(reader: DbReader, store: Store, id: &str) -> Tables {
        Tables { reader, store, id: id.to_owned() }
    }

    pub(super) async fn close(self) {
        let _ = self.reader.close().await;
    }

    /// The table files, with where each is, and their bytes.
    fn files(&self) -> BTreeMap<ulid::Ulid, (String, u64)> {
        let manifest = self.reader.manifest();
        let mut elsewhere = BTreeMap::new();
        for other in manifest.external_dbs() {
            elsewhere.extend(other.sst_ids.iter().map(|id| (id.value(), other.path.clone())));
        }
        let own = database::path(&self.id);
        let views = manifest.all_sst_views();
        let file = |id: ulid::Ulid, bytes: u64| {
            let path = elsewhere.get(&id).unwrap_or(&own).clone();
            (id, (path, bytes))
        };
        views.map(|view| file(view.sst.id.value(), view.estimate_size())).collect()
    }

    /// The keys of rows that may be in the log only.
    async fn log_keys(&self, keys: &mut BTreeSet<Bytes>) -> Result<u64, VolumeError> {
        let manifest = self.reader.manifest();
        let reader = WalReader::new(database::path(&self.id), self.store.objects());
        let mut read = 0;
        for number in manifest.replay_after_wal_id() + 1..manifest.next_wal_sst_id() {
            let mut rows = reader.get(number).iterator().await?;
            while let Some(row) = rows.next().await? {
                read += 1;
                add(row.key, keys);
            }
        }
        Ok(read)
    }

    pub(super) async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, VolumeError> {
        Ok(self.reader.get(key).await?)
    }

    pub(super) async fn inode(&self, ino: Ino) -> Result<Option<InodeRowMessage>, VolumeError> {
        let row = self.get(&tables::inode(ino)).await?;
        row.map(|row| database::decode(row, "inode")).transpose()
    }

    /// All rows whose keys begin so.
    pub(super) async fn scan(&self, prefix: &[u8]) -> Result<DbIterator, VolumeError> {
        let options = ScanOptions::new().with_read_ahead_bytes(1 << 20);
        Ok(self.reader.scan_prefix_with_options(prefix, .., &options).await?)
    }
}

/// A row before and after.
pub(super) type Pair<T> = (Option<T>, Option<T>);

/// Rows that differ.
#[derive(Default)]
pub(super) struct Changed {
    pub(super) inodes: BTreeMap<Ino, Pair<InodeRowMessage>>,
    /// By directory and name: where it leads.
    pub(super) names: BTreeMap<(Ino, Bytes), Pair<Ino>>,
    /// Files of which blocks beyond the first page differ.
    pub(super) pages: BTreeSet<Ino>,
    pub(super) rows_read: u64,
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
pub(super) async fn changed(old: &Tables, new: &Tables) -> Result<Changed, VolumeError> {
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
        let file = SstReader::new(path, old.store.objects(), None, None).open(id).await?;
        for block in 0..file.index().await?.len() {
            let rows = file.read_block(block).await?;
            changed.rows_read += rows.len() as u64;
            rows.into_iter().for_each(|row| add(row.key, &mut keys));
        }
    }
    for side in [old, new] {
        changed.rows_read += side.log_keys(&mut keys).await?;
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
