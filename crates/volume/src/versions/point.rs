//! A version that is read: a snapshot, or a volume as it is now, of which one is made for that.

use std::sync::Arc;

use hayloft_wire::Version;

use crate::database::family::Snapshot;
use crate::database::registry;
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::snapshot::{self, Wanted};

/// The tree of a version as this server knows it: the database, and its mark; of a volume as it is now when everything has come that hosts have
/// changed. Trees with the same are the same.
pub(super) async fn tree(shared: &Arc<Shared>, of: &Version) -> Result<Option<(String, u64)>, VolumeError> {
    if of.snapshot.is_empty() {
        let volume = shared.volume(&of.volume).await?;
        volume.all_shipped().await?;
        let _turn = volume.turn.lock().await;
        volume.db()?;
        return Ok(Some((volume.id.clone(), volume.order.tree_mark())));
    }
    let entry = registry::read(&shared.store, &of.volume).await?;
    Ok(shared.remembered.tree(&snapshot::find(shared, &entry, &of.volume, &of.snapshot).await?))
}

/// A snapshot to read.
pub(super) struct Point {
    pub(super) snapshot: Snapshot,
    /// It was made to be read, and goes afterwards.
    pub(super) is_made: bool,
}

impl Point {
    /// The one of this name, or one of now.
    pub(super) async fn of(shared: &Arc<Shared>, of: &Version, by: &str) -> Result<Point, VolumeError> {
        if of.snapshot.is_empty() {
            let volume = shared.volume(&of.volume).await?;
            let name = format!("now-{}", registry::random_id());
            let wanted = Wanted { name: &name, note: "", by, as_stored: false, passing: true };
            let snapshot = snapshot::create(shared, &volume, &wanted).await?;
            return Ok(Point { snapshot, is_made: true });
        }
        let entry = registry::read(&shared.store, &of.volume).await?;
        let snapshot = snapshot::find(shared, &entry, &of.volume, &of.snapshot).await?;
        Ok(Point { snapshot, is_made: false })
    }

    /// It was read.
    pub(super) async fn done(self, shared: &Arc<Shared>) -> Result<(), VolumeError> {
        if self.is_made {
            let entry = registry::read(&shared.store, &self.snapshot.volume).await?;
            snapshot::delete(shared, &entry, &self.snapshot.volume, &self.snapshot.name).await?;
        }
        Ok(())
    }
}
