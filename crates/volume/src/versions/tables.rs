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
use crate::database::tables;
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

    pub(crate) async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, VolumeError> {
        Ok(self.reader.get(key).await?)
    }

    pub(crate) async fn inode(&self, ino: Ino) -> Result<Option<InodeRowMessage>, VolumeError> {
        let row = self.get(&tables::inode(ino)).await?;
        row.map(|row| database::decode(row, "inode")).transpose()
    }

    /// All rows whose keys begin so.
    pub(crate) async fn scan(&self, prefix: &[u8]) -> Result<DbIterator, VolumeError> {
        let options = ScanOptions::new().with_read_ahead_bytes(1 << 20);
        Ok(self.reader.scan_prefix_with_options(prefix, .., &options).await?)
    }
}
