//! The registry: which volumes a store has. One object per volume, named after it.

use std::time::{SystemTime, UNIX_EPOCH};

use hayloft_store::{Store, StoreError};
use serde::{Deserialize, Serialize};

use crate::error::VolumeError;
use crate::rights::Grant;

/// What the registry says of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Registered {
    /// Random, never used twice: a volume made anew under an old name is another one.
    pub(crate) id: String,
    pub(crate) created_secs: i64,
    /// 0 for no quota, as everywhere.
    pub(crate) quota_bytes: u64,
    pub(crate) quota_inodes: u64,
    /// Permission bits, owner and group that the root directory begins with.
    pub(crate) root: (u32, u32, u32),
    /// It is being deleted: nobody may open it, and the deletion can be finished by asking again.
    #[serde(default)]
    pub(crate) deleting: bool,
    /// Who may do what, beside its owner and the masters of the server.
    #[serde(default)]
    pub(crate) rights: Vec<Grant>,
    /// Device and setuid files may count.
    #[serde(default)]
    pub(crate) trusted: bool,
}

fn path(name: &str) -> String {
    format!("registry/{name}")
}

/// Whether `name` may be a volume's.
pub(crate) fn check_name(name: &str) -> Result<(), VolumeError> {
    let fine = (1..=64).contains(&name.len())
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if fine { Ok(()) } else { Err(VolumeError::VolumeName(name.to_owned())) }
}

/// A random number from the system.
pub(crate) fn random() -> u64 {
    getrandom::u64().expect("the system has random numbers")
}

impl Registered {
    pub(crate) fn new(quota_bytes: u64, quota_inodes: u64, root: (u32, u32, u32)) -> Registered {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Registered {
            id: format!("{:016x}{:016x}", random(), random()),
            created_secs: since.as_secs() as i64,
            quota_bytes,
            quota_inodes,
            root,
            deleting: false,
            rights: Vec::new(),
            trusted: false,
        }
    }

    fn json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("plain data")
    }
}

/// Enters a new volume; of two servers doing so at a time one succeeds.
pub(crate) async fn create(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    match store.create(&path(name), entry.json()).await {
        Err(StoreError::Exists { .. }) => Err(VolumeError::VolumeExists(name.to_owned())),
        done => Ok(done?),
    }
}

pub(crate) async fn read(store: &Store, name: &str) -> Result<Registered, VolumeError> {
    check_name(name)?;
    let json = match store.get(&path(name)).await {
        Err(StoreError::NotFound { .. }) => return Err(VolumeError::NoVolume(name.to_owned())),
        read => read?,
    };
    serde_json::from_slice(&json).map_err(|_| VolumeError::Damaged("entry in the registry"))
}

pub(crate) async fn update(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    Ok(store.put(&path(name), entry.json()).await?)
}

pub(crate) async fn remove(store: &Store, name: &str) -> Result<(), VolumeError> {
    Ok(store.delete(&path(name)).await?)
}

/// The names of all volumes, sorted.
pub(crate) async fn names(store: &Store) -> Result<Vec<String>, VolumeError> {
    let objects = store.list("registry").await?;
    let mut names: Vec<String> =
        objects.iter().filter_map(|object| object.location.filename().map(str::to_owned)).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_volumes() {
        for name in ["a", "build-7", "x.y_z", &"n".repeat(64)] {
            check_name(name).unwrap();
        }
        for name in ["", ".hidden", "-v", "a/b", "a b", "ä", "..", &"n".repeat(65)] {
            check_name(name).unwrap_err();
        }
    }
}
