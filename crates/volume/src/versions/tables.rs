//! The rows of a snapshot, read from its table files without opening its database.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use hayloft_model::Ino;
use hayloft_store::Store;
use hayloft_wire::InodeRowMessage;
use slatedb::config::ScanOptions;
use slatedb::{DbIterator, DbReader, WalReader};

use crate::database;
use crate::database::family::{self, Snapshot};
use crate::database::journal::{JournalRow, Lineage, Position};
use crate::database::tables::{self, MarkRow, VolumeRow};
use crate::error::VolumeError;
use crate::server::Shared;

/// One version of a database.
pub(crate) struct Tables {
    reader: DbReader,
    store: Store,
    id: String,
}

impl Tables {
    /// Those of a snapshot.
    pub(crate) async fn open(shared: &Arc<Shared>, snapshot: &Snapshot) -> Result<Tables, VolumeError> {
        let checkpoint =
            snapshot.checkpoint.ok_or_else(|| VolumeError::SnapshotUnfinished(snapshot.shown()))?;
        let mode = slatedb::DbReaderMode::Checkpoint(checkpoint);
        let reader = family::reader(&shared.store, &snapshot.database, mode).await?;
        Ok(Tables { reader, store: shared.store.clone(), id: snapshot.database.clone() })
    }

    pub(crate) async fn close(self) {
        let _ = self.reader.close().await;
    }

    /// The store that it is in.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The table files, with where each is, and their bytes.
    pub(crate) fn files(&self) -> BTreeMap<ulid::Ulid, (String, u64)> {
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

    /// The keys of rows that may be in the log only, of all tables.
    pub(crate) async fn log_keys(&self, keys: &mut BTreeSet<Bytes>) -> Result<u64, VolumeError> {
        let manifest = self.reader.manifest();
        let reader = WalReader::new(database::path(&self.id), self.store.objects());
        let mut read = 0;
        for number in manifest.replay_after_wal_id() + 1..manifest.next_wal_sst_id() {
            let mut rows = reader.get(number).iterator().await?;
            while let Some(row) = rows.next().await? {
                read += 1;
                keys.insert(row.key);
            }
        }
        Ok(read)
    }

    /// Where it is in the history of its family, if its journal tells.
    pub(crate) async fn position(&self) -> Result<Option<Position>, VolumeError> {
        let (mark, lineage) = tokio::try_join!(self.get(tables::MARK), self.get(tables::LINEAGE))?;
        let (Some(mark), Some(lineage)) = (mark, lineage) else { return Ok(None) };
        let MarkRow { mark, journal_from, .. } = database::decode(mark, "mark")?;
        let lineage = database::decode::<Lineage>(lineage, "lineage")?;
        let from = journal_from.filter(|_| lineage.is_of(&self.id));
        Ok(from.map(|from| Position { lineage, mark, from }))
    }

    /// How many inodes it has.
    pub(crate) async fn inodes(&self) -> Result<u64, VolumeError> {
        let row = self.get(tables::VOLUME).await?.ok_or(VolumeError::Damaged("volume row"))?;
        Ok(database::decode::<VolumeRow>(row, "volume")?.inodes)
    }

    /// Adds the keys of rows that were written after a mark, up to so many. How many rows were read for it; `None`: there are more.
    pub(crate) async fn journaled(
        &self,
        after: u64,
        keys: &mut BTreeSet<Bytes>,
        keys_max: u64,
    ) -> Result<Option<u64>, VolumeError> {
        let (from, to) = (tables::journal(after.saturating_add(1)), tables::journal(u64::MAX));
        let mut rows = self.scan_range(&from, &to).await?;
        let mut read = 0;
        while let Some(row) = rows.next().await? {
            read += 1;
            keys.extend(database::decode::<JournalRow>(row.value, "journal")?.keys());
            if keys.len() as u64 > keys_max {
                return Ok(None);
            }
        }
        Ok(Some(read))
    }

    pub(crate) async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, VolumeError> {
        Ok(self.reader.get(key).await?)
    }

    pub(crate) async fn inode(&self, ino: Ino) -> Result<Option<InodeRowMessage>, VolumeError> {
        let row = self.get(&tables::inode(ino)).await?;
        row.map(|row| database::decode(row, "inode")).transpose()
    }

    /// All rows from one key up to and with another.
    pub(crate) async fn scan_range(&self, from: &Bytes, to: &Bytes) -> Result<DbIterator, VolumeError> {
        let options = scan_options();
        Ok(self.reader.scan_with_options(from.clone()..=to.clone(), &options).await?)
    }

    /// All rows whose keys begin so.
    pub(crate) async fn scan(&self, prefix: &[u8]) -> Result<DbIterator, VolumeError> {
        let options = scan_options();
        Ok(self.reader.scan_prefix_with_options(prefix, .., &options).await?)
    }
}

/// Scans end where their range does, so what is read ahead is needed.
fn scan_options() -> ScanOptions {
    ScanOptions::new().with_read_ahead_bytes(1 << 20)
}
