//! Versions of a volume's tree: snapshots, where they are mounted, forks, the way back, differences. What they are in the
//! store: [`crate::database::family`].

mod blocks;
pub(crate) mod clone;
pub(crate) mod cutting;
pub(crate) mod diff;
pub(crate) mod fork;
pub(crate) mod leftovers;
pub(crate) mod naming;
mod point;
pub(crate) mod replace;
pub(crate) mod snapshot;
mod tables;
pub(crate) mod view;

use crate::error::VolumeError;

/// Whether a name is that of a snapshot, `VOLUME@NAME`, rather than of a volume.
pub(crate) fn is_version(name: &str) -> bool {
    name.contains('@')
}

/// The volume and the snapshot in a name.
pub(crate) fn split(name: &str) -> Option<(&str, &str)> {
    name.split_once('@')
}

/// The volume in the name of a volume or a snapshot.
pub(crate) fn volume_of(name: &str) -> &str {
    split(name).map_or(name, |(volume, _)| volume)
}

/// Whether `name` may be a snapshot's.
///
/// # Errors
/// It may not.
pub(crate) fn check_name(name: &str) -> Result<(), VolumeError> {
    let fine = (1..=64).contains(&name.len())
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte));
    if fine { Ok(()) } else { Err(VolumeError::SnapshotName(name.to_owned())) }
}
