//! Snapshots that are mounted: a database that began as one is opened like a volume's, and nobody changes anything in it.

use std::sync::Arc;

use crate::database::family::{self, Snapshot};
use crate::database::registry::{self, Registered};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::{clone, snapshot, split, volume_of};
use crate::volume::Volume;

/// What the registry would say of a volume or of a snapshot: the rights are those of the volume.
pub(crate) async fn registered(shared: &Shared, name: &str) -> Result<Registered, VolumeError> {
    registry::read(&shared.store, volume_of(name)).await
}

/// Opens a snapshot to be mounted. The caller holds its place.
pub(crate) async fn open(shared: &Arc<Shared>, name: &str) -> Result<Arc<Volume>, VolumeError> {
    let (volume, of) = split(name).ok_or(VolumeError::Invalid("no name of a snapshot"))?;
    registry::check_name(volume)?;
    let entry = registry::read(&shared.store, volume).await?;
    let found = snapshot::find(shared, &entry, volume, of).await?;
    let family = entry.family();
    let view = match &found.view {
        Some(view) => view.clone(),
        None => registry::random_id(),
    };
    let checkpoint = found.checkpoint.ok_or_else(|| VolumeError::SnapshotUnfinished(name.to_owned()))?;
    if found.view.is_none() {
        // Entered first: who is killed here leaves nothing that nobody knows of.
        let marked = Snapshot { view: Some(view.clone()), ..found.clone() };
        family::update(&shared.store, family, &marked).await?;
    }
    // Again if it was not finished.
    clone::make(&shared.store, family, (&found.database, checkpoint), &view).await?;
    let registered = Registered { quota_bytes: 0, quota_inodes: 0, ..entry.with_id(view) };
    Volume::open(Arc::clone(shared), name, registered, false).await
}

/// How often a snapshot is mounted.
pub(crate) async fn mounts(shared: &Shared, snapshot: &Snapshot) -> u64 {
    match shared.opened(&snapshot.shown()).await {
        Some(view) => view.clients().len() as u64,
        None => 0,
    }
}
