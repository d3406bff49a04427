//! Snapshots: made at a point of the volume's order, listed, deleted.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use hayloft_wire::{SnapshotInfo, Version};
use slatedb::admin::AdminBuilder;
use slatedb::config::{CheckpointOptions, CheckpointScope};
use tokio::sync::MutexGuard;

use crate::database::family::{self, Snapshot};
use crate::database::format::FAMILIES;
use crate::database::registry::{self, Registered};
use crate::database::tables;
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::{check_name, leftovers, naming, view};
use crate::volume::Volume;

/// What is asked for.
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    pub(crate) note: &'a str,
    /// Who asks.
    pub(crate) by: &'a str,
    /// Of what the server has.
    pub(crate) as_stored: bool,
    /// It goes when the request is over.
    pub(crate) passing: bool,
}

/// A snapshot that is entered, and not made yet: nothing that it may need goes.
pub(crate) struct Begun {
    family: String,
    pub(crate) snapshot: Snapshot,
}

/// Makes a snapshot: everything whose call had returned when this was called is in it.
pub(crate) async fn create(
    shared: &Arc<Shared>,
    volume: &Arc<Volume>,
    wanted: &Wanted<'_>,
) -> Result<Snapshot, VolumeError> {
    check_name(wanted.name)?;
    let begun = begin(shared, volume, wanted, None).await?;
    let made = async {
        if !wanted.as_stored {
            volume.all_shipped().await?;
        }
        let turn = volume.turn.lock().await;
        let db = volume.db()?;
        at_point(shared, volume, &db, &begun, Some(turn)).await
    };
    match made.await {
        Ok(snapshot) => Ok(snapshot),
        Err(error) => {
            give_up(shared, &begun).await;
            Err(error)
        }
    }
}

/// Enters a snapshot of a tree that is replaced. Hosts that have files of it open find it by the database that it will have
/// where it is mounted: its name may be another one's by then.
pub(crate) async fn begin_to_keep(
    shared: &Arc<Shared>,
    volume: &Arc<Volume>,
    wanted: &Wanted<'_>,
) -> Result<Begun, VolumeError> {
    begin(shared, volume, wanted, Some(registry::random_id())).await
}

/// Enters a snapshot.
async fn begin(
    shared: &Arc<Shared>,
    volume: &Arc<Volume>,
    wanted: &Wanted<'_>,
    view: Option<String>,
) -> Result<Begun, VolumeError> {
    if volume.is_view() {
        return Err(VolumeError::Invalid("a snapshot has no snapshots: make one of its volume, or fork it"));
    }
    shared.reserve.admit(1 << 20)?;
    found_family(shared, volume).await?;
    let snapshot = Snapshot {
        volume: volume.name.clone(),
        name: wanted.name.to_owned(),
        database: volume.id.clone(),
        created_nanos: shared.now().as_nanos() as i64,
        note: wanted.note.to_owned(),
        by: wanted.by.to_owned(),
        passing: wanted.passing,
        view,
        ..Snapshot::default()
    };
    let family = volume.homes.first().to_owned();
    family::create(&shared.store, &family, &snapshot).await?;
    hayloft_crash::point("snapshot.entered");
    Ok(Begun { family, snapshot })
}

/// The snapshot is not made.
pub(crate) async fn give_up(shared: &Shared, begun: &Begun) {
    if let Err(error) = family::remove(&shared.store, &begun.family, &begun.snapshot).await {
        tracing::warn!(snapshot = begun.snapshot.shown(), %error, "what was begun of a snapshot stays until it is deleted");
    }
}

/// The volume is the first of a family, or one of it, from now on: servers that know of none do not open it any more.
async fn found_family(shared: &Arc<Shared>, volume: &Arc<Volume>) -> Result<(), VolumeError> {
    if volume.registered.lock().format >= FAMILIES {
        return Ok(());
    }
    family::enter(&shared.store, volume.homes.first(), &volume.id).await?;
    shared.change_entry(volume, |entry| entry.format = entry.format.max(FAMILIES)).await.map(drop)
}

/// The point: what has its place in the order by now is in the snapshot, what comes later is not. Who holds the turn gives it
/// up as soon as later changes do not matter, unless it is theirs for longer.
pub(crate) async fn at_point(
    shared: &Arc<Shared>,
    volume: &Arc<Volume>,
    db: &Db,
    begun: &Begun,
    turn: Option<MutexGuard<'_, ()>>,
) -> Result<Snapshot, VolumeError> {
    // Before it: a sweep that has deleted a row looks here whether the pack may be in the snapshot still.
    volume.points.fetch_add(1, AcqRel);
    volume.journal_point(db).await?;
    let usage = volume.state.lock().usage;
    let tree_mark = volume.order.tree_mark();
    let options = CheckpointOptions { name: Some(begun.snapshot.shown()), ..CheckpointOptions::default() };
    let newest = volume.newest_point.load(Relaxed);
    let created_nanos = (shared.now().as_nanos() as i64).max(newest.saturating_add(1));
    volume.newest_point.store(created_nanos, Relaxed);
    let checkpoint = db.begin_checkpoint(CheckpointScope::All, &options).await?;
    let rows = db.snapshot()?;
    drop(turn);
    let packs = family::packs(database::scan(&rows, &[tables::PACKS]).await?).await?;
    let id = checkpoint.wait().await?.id;
    shared.remembered.remember(&volume.id, id, packs.into_keys().collect());
    shared.remembered.remember_tree(&volume.id, id, tree_mark);
    hayloft_crash::point("snapshot.checkpoint");
    let snapshot = Snapshot {
        checkpoint: Some(id),
        created_nanos,
        bytes: usage.bytes,
        inodes: usage.inodes,
        tree: shared.lately_named.of(&volume.id, tree_mark).map(|name| name.to_string()),
        ..begun.snapshot.clone()
    };
    family::update(&shared.store, &begun.family, &snapshot).await?;
    if snapshot.tree.is_some() && !snapshot.passing {
        naming::keep_later(shared, &snapshot, tree_mark);
    }
    tracing::info!(snapshot = snapshot.shown(), bytes = usage.bytes, inodes = usage.inodes, "snapshot made");
    Ok(snapshot)
}

/// A snapshot of a volume.
pub(crate) async fn find(
    shared: &Shared,
    entry: &Registered,
    volume: &str,
    name: &str,
) -> Result<Snapshot, VolumeError> {
    let shown = || format!("{volume}@{name}");
    match family::read(&shared.store, entry.family(), volume, name).await? {
        Some(found) if found.deleting => Err(VolumeError::NoSnapshot(shown())),
        Some(found) if found.checkpoint.is_none() => Err(VolumeError::SnapshotUnfinished(shown())),
        Some(found) => Ok(found),
        None => Err(VolumeError::NoSnapshot(shown())),
    }
}

/// The snapshots of a volume, the oldest first.
pub(crate) async fn list(
    shared: &Shared,
    entry: &Registered,
    volume: &str,
) -> Result<Vec<Snapshot>, VolumeError> {
    let mut found = family::snapshots(&shared.store, entry.family()).await?;
    found.retain(|snapshot| snapshot.volume == volume && !snapshot.deleting && snapshot.checkpoint.is_some());
    Ok(found)
}

/// Deletes a snapshot; what only it has had goes soon after. Refused while it is mounted.
pub(crate) async fn delete(
    shared: &Arc<Shared>,
    entry: &Registered,
    volume: &str,
    name: &str,
) -> Result<(), VolumeError> {
    let _structure = shared.structure.lock().await;
    let family = entry.family();
    let found = family::read(&shared.store, family, volume, name).await?;
    let found = found.ok_or_else(|| VolumeError::NoSnapshot(format!("{volume}@{name}")))?;
    let mut place = shared.hold(&found.shown()).await;
    if let Some(view) = &*place {
        view.refuse_when_mounted()?;
    }
    let marked = Snapshot { deleting: true, ..found };
    family::update(&shared.store, family, &marked).await?;
    if let Some(view) = place.take()
        && let Err(error) = view.close().await
    {
        tracing::warn!(snapshot = marked.shown(), %error, "the database of a snapshot does not close");
    }
    hayloft_crash::point("snapshot.marked");
    if let Some(view) = &marked.view {
        leftovers::delete_database(&shared.store, view).await?;
        family::leave(&shared.store, family, view).await?;
    }
    if let Some(checkpoint) = marked.checkpoint {
        let admin = AdminBuilder::new(database::path(&marked.database), shared.store.objects()).build();
        admin.delete_checkpoint(checkpoint).await?;
        shared.remembered.forget(&marked.database, checkpoint);
    }
    hayloft_crash::point("snapshot.checkpoint-deleted");
    family::remove(&shared.store, family, &marked).await?;
    shared.leftovers.look_at(family);
    tracing::info!(snapshot = marked.shown(), "snapshot deleted");
    Ok(())
}

/// What people are told of a snapshot.
pub(crate) async fn info(shared: &Shared, snapshot: &Snapshot) -> SnapshotInfo {
    SnapshotInfo {
        of: Some(Version { volume: snapshot.volume.clone(), snapshot: snapshot.name.clone() }),
        created_nanos: snapshot.created_nanos,
        note: snapshot.note.clone(),
        by: snapshot.by.clone(),
        bytes: snapshot.bytes,
        inodes: snapshot.inodes,
        mounts: view::mounts(shared, snapshot).await,
        tree: snapshot.tree.clone().unwrap_or_default(),
        signatures: snapshot.signatures.clone(),
    }
}

/// Deletes what a server that was killed has begun of snapshots of a volume, and those of requests that were under way. Nobody else can be making one.
pub(crate) async fn forget_begun(shared: &Arc<Shared>, volume: &Volume) -> Result<(), VolumeError> {
    if volume.registered.lock().format < FAMILIES || volume.points.load(Relaxed) > 0 {
        return Ok(());
    }
    family::mend(&shared.store, volume.homes.first(), &volume.name).await?;
    for snapshot in family::snapshots(&shared.store, volume.homes.first()).await? {
        if snapshot.volume == volume.name {
            volume.newest_point.fetch_max(snapshot.created_nanos, Relaxed);
        }
        let is_own = snapshot.database == volume.id && snapshot.volume == volume.name;
        if is_own && snapshot.checkpoint.is_none() {
            tracing::info!(snapshot = snapshot.shown(), "a snapshot that was not finished is forgotten");
            family::remove(&shared.store, volume.homes.first(), &snapshot).await?;
        } else if is_own && snapshot.passing {
            // Whoever deletes it may need what is being opened here.
            let (shared, entry) = (Arc::clone(shared), volume.registered.lock().clone());
            tokio::spawn(async move {
                if let Err(error) = delete(&shared, &entry, &snapshot.volume, &snapshot.name).await {
                    tracing::warn!(snapshot = snapshot.shown(), %error, "a snapshot that was made for a request stays");
                }
            });
        }
    }
    Ok(())
}
