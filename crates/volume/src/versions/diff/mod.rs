//! What differs between two versions of a family's trees.
//!
//! Both are read at checkpoints. Table files that both have are the same in both, so only rows of the others can differ:
//! their keys are looked up in both versions. When most of the tables are not shared, all rows are read side by side instead.

mod names;
mod tables;

use std::sync::Arc;

use hayloft_wire::{Difference, Version};

use crate::database::family::{self, Snapshot};
use crate::database::registry;
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::diff::names::Names;
use crate::versions::diff::tables::Tables;
use crate::versions::snapshot::{self, Wanted};

/// What was found, and how many rows were read for it.
pub(crate) struct Found {
    pub(crate) differences: Vec<Difference>,
    pub(crate) rows_read: u64,
}

/// A version that is read, and whether its snapshot was made for that.
struct Side {
    snapshot: Snapshot,
    is_made: bool,
}

async fn side(shared: &Arc<Shared>, of: &Version, by: &str) -> Result<Side, VolumeError> {
    if of.snapshot.is_empty() {
        let volume = shared.volume(&of.volume).await?;
        let name = format!("diff-{}", registry::random_id());
        let wanted = Wanted { name: &name, note: "", by, as_stored: false };
        return Ok(Side { snapshot: snapshot::create(shared, &volume, &wanted).await?, is_made: true });
    }
    let entry = registry::read(&shared.store, &of.volume).await?;
    Ok(Side { snapshot: snapshot::find(shared, &entry, &of.volume, &of.snapshot).await?, is_made: false })
}

/// Compares two versions; of what is not below a folder nothing is told.
///
/// # Errors
/// They are not of one family, or one of them does not exist; the store fails.
pub(crate) async fn diff(
    shared: &Arc<Shared>,
    (from, to): (&Version, &Version),
    below: &[u8],
    by: &str,
) -> Result<Found, VolumeError> {
    let families = [
        registry::read(&shared.store, &from.volume).await?.family().to_owned(),
        registry::read(&shared.store, &to.volume).await?.family().to_owned(),
    ];
    if families[0] != families[1] {
        return Err(VolumeError::Invalid(
            "the two are no versions of one tree: neither was forked from the other, or both from a third",
        ));
    }
    let old = side(shared, from, by).await?;
    let new = side(shared, to, by).await;
    let compared = async {
        let new = new.as_ref().map_err(|_| VolumeError::ShuttingDown)?;
        compare(shared, (&old.snapshot, &new.snapshot), below).await
    };
    let compared = compared.await;
    for side in [Some(&old), new.as_ref().ok()].into_iter().flatten().filter(|side| side.is_made) {
        let entry = registry::read(&shared.store, &side.snapshot.volume).await?;
        snapshot::delete(shared, &entry, &side.snapshot.volume, &side.snapshot.name).await?;
    }
    new?;
    compared
}

async fn compare(
    shared: &Arc<Shared>,
    (old, new): (&Snapshot, &Snapshot),
    below: &[u8],
) -> Result<Found, VolumeError> {
    let (old, new) = (open(shared, old).await?, open(shared, new).await?);
    let found = async {
        let changed = tables::changed(&old, &new).await?;
        let rows_read = changed.rows_read;
        let differences = Names::new(&old, &new).differences(changed).await?;
        Ok(Found { differences: names::below(differences, below), rows_read })
    };
    let found = found.await;
    old.close().await;
    new.close().await;
    found
}

async fn open(shared: &Arc<Shared>, snapshot: &Snapshot) -> Result<Tables, VolumeError> {
    let checkpoint = snapshot.checkpoint.ok_or_else(|| VolumeError::SnapshotUnfinished(snapshot.shown()))?;
    let mode = slatedb::DbReaderMode::Checkpoint(checkpoint);
    let reader = family::reader(&shared.store, &snapshot.database, mode).await?;
    Ok(Tables::new(reader, shared.store.clone(), &snapshot.database))
}
