//! What a family does not need any more: packs that no member and no snapshot has, and databases whose volumes are deleted or
//! have got others. It is looked for when something was deleted or replaced, and when the server starts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hayloft_store::Store;
use parking_lot::Mutex;
use slatedb::admin::{Admin, AdminBuilder};
use slatedb::{Checkpoint, VersionedManifest};
use tokio::sync::Notify;

use crate::database::family::{self, Held, Snapshot};
use crate::database::tables::PackId;
use crate::database::{self, Db, homes, registry};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::naming;

/// How long to wait before a family is looked at again of which not all could be found out: at first, and at most.
const AGAIN_MIN: Duration = Duration::from_millis(500);
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// What comes within this time is looked at together.
const GATHER: Duration = Duration::from_millis(200);

/// Families to look at.
#[derive(Default)]
pub(crate) struct Leftovers {
    /// A leaf.
    families: Mutex<HashSet<String>>,
    added: Notify,
}

impl Leftovers {
    /// Something of the family may not be needed any more.
    pub(crate) fn look_at(&self, family: &str) {
        self.families.lock().insert(family.to_owned());
        self.added.notify_one();
    }
}

/// Looks at families, as long as the server runs.
pub(crate) async fn in_background(shared: Arc<Shared>) {
    match family::all(&shared.store).await {
        Ok(families) => families.iter().for_each(|family| shared.leftovers.look_at(family)),
        Err(error) => tracing::warn!(%error, "what earlier servers have left is not looked for"),
    }
    let mut pauses: HashMap<String, Duration> = HashMap::new();
    loop {
        shared.leftovers.added.notified().await;
        tokio::time::sleep(GATHER).await;
        let families: Vec<String> = shared.leftovers.families.lock().drain().collect();
        for family in families {
            let is_done = reclaim(&shared, &family).await.unwrap_or_else(|error| {
                tracing::warn!(family, %error, "what is not needed any more is looked for again later");
                false
            });
            if is_done {
                pauses.remove(&family);
                continue;
            }
            let pause = pauses.entry(family.clone()).or_insert(AGAIN_MIN);
            let (shared, wait) = (Arc::clone(&shared), *pause);
            *pause = (wait * 2).min(AGAIN_MAX);
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                shared.leftovers.look_at(&family);
            });
        }
    }
}

/// Deletes what nobody of a family needs. `false`: of some it could not be found out whether they need something.
async fn reclaim(shared: &Arc<Shared>, family: &str) -> Result<bool, VolumeError> {
    let is_done;
    let living = {
        // Nobody is being made or deleted while it is found out who lives.
        let _structure = shared.structure.lock().await;
        // Before it is found out who is needed: whoever becomes a member is known of before.
        let mut members = family::members(&shared.store, family).await?;
        let living = shared.living(family).await?;
        let snapshots = family::snapshots(&shared.store, family).await?;
        if snapshots.is_empty() {
            naming::forget(shared, family).await?;
        }
        let views: HashSet<&String> =
            snapshots.iter().filter_map(|snapshot| snapshot.view.as_ref()).collect();
        members.retain(|id| !views.contains(id));
        for id in &members {
            drop_checkpoints(&shared.store, family, id).await?;
        }
        members.retain(|id| !living.contains(id));
        // What a member has begun as may be kept for it alone: it is looked at again when one has gone.
        is_done = loop {
            let (mut left, mut needed) = (Left::Nothing, Vec::new());
            for id in &members {
                let of_it = reclaim_retired(shared, family, id, &snapshots).await?;
                left = left.max(of_it);
                if of_it != Left::Nothing {
                    needed.push(id.clone());
                }
            }
            if needed.len() == members.len() {
                break left != Left::Unknown;
            }
            members = needed;
        };
        living
    };
    for volume in shared.open_volumes().await {
        if !living.contains(&volume.id) {
            continue;
        }
        match volume.sweep_orphans().await {
            // It is being closed.
            Ok(()) | Err(VolumeError::ShuttingDown) => {}
            Err(error) => {
                volume.note(&error);
                return Err(error);
            }
        }
    }
    Ok(is_done)
}

/// The checkpoints of snapshots and clones. Others are of whoever had the database open, and end by themselves.
fn lasting(manifest: &VersionedManifest) -> impl Iterator<Item = &Checkpoint> {
    manifest.checkpoints().iter().filter(|checkpoint| checkpoint.expire_time.is_none())
}

fn admin_of(store: &Store, id: &str) -> Admin {
    AdminBuilder::new(database::path(id), store.objects()).build()
}

/// Deletes checkpoints of snapshots that are not there any more: of servers that were killed.
async fn drop_checkpoints(store: &Store, family: &str, id: &str) -> Result<(), VolumeError> {
    let admin = admin_of(store, id);
    let Some(manifest) = admin.read_manifest(None).await? else { return Ok(()) };
    // Those of clones have no name.
    let is_ours = |checkpoint: &&Checkpoint| checkpoint.name.is_some();
    if !lasting(&manifest).any(|checkpoint| is_ours(&checkpoint)) {
        return Ok(());
    }
    // After the manifest: whoever makes a snapshot has entered it before its checkpoint is there.
    let snapshots = family::snapshots(store, family).await?;
    if snapshots.iter().any(|snapshot| snapshot.database == id && snapshot.checkpoint.is_none()) {
        return Ok(());
    }
    for checkpoint in lasting(&manifest).filter(is_ours) {
        if !snapshots.iter().any(|snapshot| snapshot.checkpoint == Some(checkpoint.id)) {
            tracing::info!(id, name = checkpoint.name, "a checkpoint that nobody knows is deleted");
            admin.delete_checkpoint(checkpoint.id).await?;
        }
    }
    Ok(())
}

/// What is left of a member.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Left {
    Nothing,
    /// What others need.
    Needed,
    /// Perhaps more than others need.
    Unknown,
}

/// Deletes of a member that no name leads to what nobody needs, and all of it when nothing is needed.
async fn reclaim_retired(
    shared: &Arc<Shared>,
    family: &str,
    id: &str,
    snapshots: &[Snapshot],
) -> Result<Left, VolumeError> {
    let store = &shared.store;
    let held = shared.held(family, id).await?;
    let mut is_empty = true;
    for object in store.list(&homes::folder(id)).await? {
        let pack = object.location.filename().and_then(PackId::from_name);
        if pack.is_none_or(|pack| held.has(pack)) {
            is_empty = false;
            continue;
        }
        store.delete(object.location.as_ref()).await?;
        hayloft_crash::point("leftovers.pack-deleted");
    }
    let admin = admin_of(store, id);
    let manifest = admin.read_manifest(None).await?;
    let has_snapshots = snapshots.iter().any(|snapshot| snapshot.database == id);
    match manifest.filter(|manifest| has_snapshots || lasting(manifest).next().is_some()) {
        Some(manifest) => prune(store, id, &admin, &manifest).await?,
        None => {
            delete_database(store, id).await?;
            if is_empty {
                registry::erase_objects(store, id).await?;
                family::leave(store, family, id).await?;
                tracing::info!(id, "nothing is left of a database that nobody needs");
                return Ok(Left::Nothing);
            }
        }
    }
    Ok(if matches!(held, Held::All) { Left::Unknown } else { Left::Needed })
}

/// The bytes of each table file of an open database, and whether snapshots or forks have it as well, or it is that of another
/// one.
pub(crate) async fn table_files(store: &Store, id: &str, db: &Db) -> Result<Vec<(bool, u64)>, VolumeError> {
    let (now, admin) = (db.manifest(), admin_of(store, id));
    let mut shared: HashSet<_> = now.external_dbs().iter().flat_map(|other| other.sst_ids.clone()).collect();
    let manifests: HashSet<u64> = lasting(&now).map(|checkpoint| checkpoint.manifest_id).collect();
    for manifest in manifests {
        let then = admin.read_manifest(Some(manifest)).await?;
        then.iter().for_each(|then| shared.extend(then.all_sst_views().map(|view| view.sst.id)));
    }
    Ok(now.all_sst_views().map(|view| (shared.contains(&view.sst.id), view.estimate_size())).collect())
}

/// Deletes table files that no checkpoint has. Nobody writes the database any more.
async fn prune(
    store: &Store,
    id: &str,
    admin: &Admin,
    newest: &VersionedManifest,
) -> Result<(), VolumeError> {
    let mut needed = HashSet::new();
    for checkpoint in lasting(newest) {
        let Some(manifest) = admin.read_manifest(Some(checkpoint.manifest_id)).await? else {
            tracing::warn!(id, checkpoint = %checkpoint.id, "the manifest of a checkpoint is gone: no table files are deleted");
            return Ok(());
        };
        needed.extend(manifest.all_sst_views().map(|view| format!("{}.sst", view.sst.id.value())));
    }
    for object in store.list(&format!("{}/compacted", database::path(id))).await? {
        if object.location.filename().is_some_and(|name| !needed.contains(name)) {
            store.delete(object.location.as_ref()).await?;
            hayloft_crash::point("leftovers.table-deleted");
        }
    }
    Ok(())
}

/// Deletes a database that nobody opens any more; those that it began as need not keep anything for it.
pub(crate) async fn delete_database(store: &Store, id: &str) -> Result<(), VolumeError> {
    let admin = admin_of(store, id);
    if admin.read_manifest(None).await?.is_some() {
        admin.delete_db(true).await?;
    }
    hayloft_crash::point("leftovers.database-deleted");
    Ok(store.delete_below(&format!("volumes/{id}")).await?)
}
