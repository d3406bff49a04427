//! What differs between two versions of a family's trees.
//!
//! Both are read at checkpoints. Table files that both have are the same in both, so only rows of the others can differ:
//! their keys are looked up in both versions. When most of the tables are not shared, all rows are read side by side instead.

pub(super) mod changed;
mod names;

use std::sync::Arc;

use hayloft_wire::{Difference, Version};

use crate::database::family::Snapshot;
use crate::database::registry;
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::diff::names::Names;
use crate::versions::point::{self, Point};
use crate::versions::tables::Tables;

/// What was found, and how many rows were read for it.
pub(crate) struct Found {
    pub(crate) differences: Vec<Difference>,
    pub(crate) rows_read: u64,
    /// Whether the second one came of the first one; `None`: nobody knows.
    pub(crate) descends: Option<bool>,
}

/// What is asked for.
pub(crate) struct Asked<'a> {
    /// Of what is not below this folder nothing is told.
    pub(crate) below: &'a [u8],
    /// Times of modification count.
    pub(crate) times: bool,
    /// Who asks.
    pub(crate) by: &'a str,
}

/// Compares two versions.
///
/// # Errors
/// They are not of one family, or one of them does not exist; the store fails.
pub(crate) async fn diff(
    shared: &Arc<Shared>,
    (from, to): (&Version, &Version),
    asked: &Asked<'_>,
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
    if let Some(old) = point::tree(shared, from).await?
        && point::tree(shared, to).await? == Some(old)
    {
        return Ok(Found { differences: Vec::new(), rows_read: 0, descends: None });
    }
    let old = Point::of(shared, from, asked.by).await?;
    let new = match Point::of(shared, to, asked.by).await {
        Ok(new) => new,
        Err(error) => {
            old.done(shared).await?;
            return Err(error);
        }
    };
    let compared = compare(shared, (&old.snapshot, &new.snapshot), asked).await;
    for point in [old, new] {
        point.done(shared).await?;
    }
    compared
}

async fn compare(
    shared: &Arc<Shared>,
    (old, new): (&Snapshot, &Snapshot),
    asked: &Asked<'_>,
) -> Result<Found, VolumeError> {
    let (old, new) = (Tables::open(shared, old).await?, Tables::open(shared, new).await?);
    let found = async {
        let changed = changed::changed(&old, &new).await?;
        let (rows_read, descends) = (changed.rows_read, changed.descends);
        let differences = Names::new(&old, &new, asked.times).differences(changed).await?;
        Ok(Found { differences: names::below(differences, asked.below), rows_read, descends })
    };
    let found = found.await;
    old.close().await;
    new.close().await;
    found
}
