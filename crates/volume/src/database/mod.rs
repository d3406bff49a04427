//! The SlateDB database of a volume: how it is opened, and helpers to read it.

mod cache;
pub(crate) mod compaction;
pub(crate) mod family;
pub(crate) mod format;
mod handle;
pub(crate) mod homes;
pub(crate) mod journal;
pub(crate) mod ledger;
pub(crate) mod listing;
pub(crate) mod named;
pub(crate) mod numbers;
pub(crate) mod ownership;
pub(crate) mod packed;
pub(crate) mod registry;
pub(crate) mod rows;
pub(crate) mod small;
pub(crate) mod tables;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hayloft_store::Store;
use slatedb::config::{
    CompactionWorkerOptions, CompactorOptions, GarbageCollectorDirectoryOptions, GarbageCollectorOptions,
    GarbageCollectorScheduleOptions, ScanOptions, SizeTieredCompactionSchedulerOptions,
};
use slatedb::db_cache::DbCache;
use slatedb::{CompactorBuilder, DbIterator, Settings};

use crate::database::compaction::Wish;
use crate::database::homes::Homes;
use crate::database::ledger::Ledger;
use crate::database::ownership::Ownership;
use crate::database::rows::Rows;
use crate::database::small::Contents;
use crate::error::VolumeError;

pub(crate) use crate::database::cache::TableCache;
pub(crate) use crate::database::handle::{Db, DbSnapshot};

/// A table file written from memory holds about this much; also the most that a start replays.
pub(crate) const TABLE_FILE: usize = 32 << 20;

pub(crate) fn path(volume_id: &str) -> String {
    format!("volumes/{volume_id}/db")
}

fn settings(unflushed_bytes: usize) -> Settings {
    let every = |interval: u64, min_age: u64| {
        Some(GarbageCollectorDirectoryOptions {
            interval: Some(Duration::from_secs(interval)),
            min_age: Duration::from_secs(min_age),
            dry_run: false,
        })
    };
    Settings {
        // Each commit flushes by itself; this is for writes that nobody waits for.
        flush_interval: Some(Duration::from_millis(100)),
        l0_sst_size_bytes: TABLE_FILE,
        l0_max_ssts: 16,
        l0_max_ssts_per_key: 16,
        l0_flush_parallelism: 2,
        // Whose the volume is [`ownership`] looks after.
        manifest_poll_interval: Duration::from_secs(5),
        max_unflushed_bytes: unflushed_bytes,
        // Two seconds of patience with a store that fails; after that the volume is opened again.
        object_store_max_retries: Some(4),
        // Built by itself, with our scheduler.
        compactor_options: None,
        garbage_collector_options: Some(GarbageCollectorOptions {
            // A process that sleeps longer than this in the middle of an update must not be able to
            // bring a deleted manifest back: hence the age. The files are tiny.
            manifest_options: every(60, 3600),
            compactions_options: every(60, 3600),
            wal_options: every(20, 60),
            compacted_options: every(20, 60),
            wal_fence_options: None,
            // A fork that has rewritten all that it had of its origin needs it no more.
            detach_options: Some(GarbageCollectorScheduleOptions { interval: Some(Duration::from_secs(60)) }),
            // A local folder lacks conditional overwrites.
            boundary_files_enabled: false,
            ..GarbageCollectorOptions::default()
        }),
        ..Settings::default()
    }
}

fn compactor() -> CompactorOptions {
    CompactorOptions {
        poll_interval: Duration::from_secs(2),
        max_concurrent_compactions: 1,
        checkpoint_lifetime: Duration::from_secs(120),
        scheduler_options: HashMap::from(SizeTieredCompactionSchedulerOptions {
            min_compaction_sources: 4,
            ..SizeTieredCompactionSchedulerOptions::default()
        }),
        worker: Some(CompactionWorkerOptions {
            max_concurrent_compactions: 1,
            compactions_poll_interval: Duration::from_secs(2),
            max_sst_size: 64 << 20,
            max_fetch_tasks: 2,
            max_subcompactions: 1,
            ..CompactionWorkerOptions::default()
        }),
        ..CompactorOptions::default()
    }
}

/// Opens, or makes (`is_new`), the database of a volume. From now on an earlier opener can make nothing durable. What is known to
/// have been written has to be there.
pub(crate) async fn open(
    ownership: &Arc<Ownership>,
    (cache, cache_id): (Arc<dyn DbCache>, u64),
    unflushed_bytes: usize,
    whole: &Wish,
    homes: &Arc<Homes>,
    is_new: bool,
) -> Result<Db, VolumeError> {
    let (store, volume_id) = (&ownership.store, &*ownership.volume_id);
    if !is_new && let Some(damage) = ledger::compare(store, volume_id).await? {
        return Err(VolumeError::AtRest(damage));
    }
    let ledger = Ledger::new(store, volume_id);
    let (noting, owning) = (Arc::clone(&ledger), Arc::clone(ownership));
    let objects = store.objects_watched(Arc::new(move |path, payload| {
        noting.note(path, payload);
        if let Some(manifest) = ledger::manifest_at(&owning.volume_id, path) {
            owning.wrote(manifest);
        }
    }));
    let compactor = CompactorBuilder::new(path(volume_id), Arc::clone(&objects))
        .with_options(compactor())
        .with_scheduler_supplier(Arc::new(whole.clone()));
    let db = slatedb::Db::builder(path(volume_id), objects)
        .with_compactor_builder(compactor)
        .with_settings(settings(unflushed_bytes))
        .with_db_cache(cache, cache_id)
        .build()
        .await;
    let db = match db {
        Ok(db) => db,
        Err(error) => return Err(named_damage(store, volume_id, error).await),
    };
    // A full store can be opened, so that something can be deleted.
    if let Err(error) = ledger.begin(db.manifest().replay_after_wal_id()).await {
        tracing::warn!(%error, volume_id, "the loss of the log's end would go unnoticed");
    }
    Ok(Db::new(db, Contents { store: store.clone(), homes: Arc::clone(homes) }, ledger))
}

/// Why a database does not open, with the object that it is about, where one is not what was written.
async fn named_damage(store: &Store, volume_id: &str, error: slatedb::Error) -> VolumeError {
    if error.kind() != slatedb::ErrorKind::Data {
        return error.into();
    }
    match ledger::differences(store, volume_id, true).await {
        Ok(damages) => damages.into_iter().next().map_or_else(|| error.into(), VolumeError::AtRest),
        Err(_) => error.into(),
    }
}

/// Applies a batch while nobody is served; it is durable when this returns. Listings stay as they are: it changes nothing that they tell.
pub(crate) async fn write_durably(db: &Db, batch: Rows) -> Result<(), slatedb::Error> {
    let handle = db.write(batch.into_parts().batch).await?;
    db.flush().await?;
    // Only this fails when another server has opened the database meanwhile.
    handle.await_durable().await
}

/// Scans end where their range does, so what is read ahead is needed; each piece costs a task.
const READ_AHEAD: usize = 1 << 20;

fn scan_options() -> ScanOptions {
    ScanOptions::new().with_read_ahead_bytes(READ_AHEAD).with_cache_blocks(true)
}

/// All rows whose key begins with `prefix`, in order.
pub(crate) async fn scan(snapshot: &DbSnapshot, prefix: &[u8]) -> Result<DbIterator, slatedb::Error> {
    snapshot.scan_prefix_with_options(prefix, .., &scan_options()).await
}

/// All rows from one key up to and with another.
pub(crate) async fn scan_range(
    snapshot: &DbSnapshot,
    from: Bytes,
    to: Bytes,
) -> Result<DbIterator, slatedb::Error> {
    snapshot.scan_with_options(from..=to, &scan_options()).await
}

/// A row as a message.
pub(crate) fn decode<M: prost::Message + Default>(row: Bytes, what: &'static str) -> Result<M, VolumeError> {
    M::decode(row).map_err(|_| VolumeError::Damaged(what))
}

/// The row of a key as a message, if it is there.
pub(crate) async fn row<M: prost::Message + Default>(
    db: &Db,
    key: &[u8],
    what: &'static str,
) -> Result<Option<M>, VolumeError> {
    db.get(key).await?.map(|row| decode(row, what)).transpose()
}
