//! The registry: which volumes a store has. One object per volume, named after it, and a second one like it in another
//! folder: without them nothing says under which name a volume is to be found.

use std::time::{SystemTime, UNIX_EPOCH};

use hayloft_store::{Store, StoreError};
use serde::{Deserialize, Serialize};

use crate::database::ledger::Damage;
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
    /// Of all else; an entry of an older version has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) checksum: Option<String>,
}

const FIRST: &str = "registry";
const SECOND: &str = "registry-copy";

fn path(folder: &str, name: &str) -> String {
    format!("{folder}/{name}")
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
            checksum: None,
        }
    }

    fn json(&self) -> Vec<u8> {
        let sealed = Registered { checksum: Some(self.sum()), ..self.clone() };
        serde_json::to_vec_pretty(&sealed).expect("plain data")
    }

    /// What the checksum has to be.
    fn sum(&self) -> String {
        let plain = Registered { checksum: None, ..self.clone() };
        blake3::hash(&serde_json::to_vec(&plain).expect("plain data")).to_hex()[..16].to_owned()
    }

    fn parse(json: &[u8]) -> Option<Registered> {
        let found: Registered = serde_json::from_slice(json).ok()?;
        let is_whole = found.checksum.as_ref().is_none_or(|sum| *sum == found.sum());
        is_whole.then_some(Registered { checksum: None, ..found })
    }
}

/// Enters a new volume; of two servers doing so at a time one succeeds.
pub(crate) async fn create(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    // One whose first entry is lost is there all the same.
    match read(store, name).await {
        Err(VolumeError::NoVolume(_)) => {}
        Ok(_) => return Err(VolumeError::VolumeExists(name.to_owned())),
        Err(error) => return Err(error),
    }
    match store.create(&path(FIRST, name), entry.json()).await {
        Err(StoreError::Exists { .. }) => return Err(VolumeError::VolumeExists(name.to_owned())),
        done => done?,
    }
    Ok(store.put(&path(SECOND, name), entry.json()).await?)
}

pub(crate) async fn read(store: &Store, name: &str) -> Result<Registered, VolumeError> {
    check_name(name)?;
    // In this order: of a volume that is being made or removed the second entry is never there alone.
    let first = read_one(store, FIRST, name).await?;
    let second = read_one(store, SECOND, name).await?;
    let (entry, bad) = match (first, second) {
        (Read::Entry(first), Read::Entry(second)) if first == second => return Ok(first),
        (Read::Nothing, Read::Nothing) => return Err(VolumeError::NoVolume(name.to_owned())),
        // An update reaches the first one first.
        (Read::Entry(first), _) => (first, SECOND),
        (_, Read::Entry(second)) => (second, FIRST),
        _ => {
            let what = format!("is damaged, and {} gives no help", path(SECOND, name));
            return Err(VolumeError::AtRest(Damage { object: path(FIRST, name), what }));
        }
    };
    let object = path(bad, name);
    match store.put(&object, entry.json()).await {
        Ok(()) => tracing::warn!(
            volume = name,
            object,
            "an entry of the registry was not as it should be, and is mended"
        ),
        Err(error) => {
            tracing::error!(volume = name, object, %error, "an entry of the registry is damaged, and cannot be mended")
        }
    }
    Ok(entry)
}

enum Read {
    Entry(Registered),
    Nothing,
    Damaged,
}

async fn read_one(store: &Store, folder: &str, name: &str) -> Result<Read, VolumeError> {
    match store.get(&path(folder, name)).await {
        Err(StoreError::NotFound { .. }) => Ok(Read::Nothing),
        read => Ok(Registered::parse(&read?).map_or(Read::Damaged, Read::Entry)),
    }
}

pub(crate) async fn update(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    store.put(&path(FIRST, name), entry.json()).await?;
    Ok(store.put(&path(SECOND, name), entry.json()).await?)
}

pub(crate) async fn remove(store: &Store, name: &str) -> Result<(), VolumeError> {
    store.delete(&path(SECOND, name)).await?;
    Ok(store.delete(&path(FIRST, name)).await?)
}

/// The names of all volumes, sorted.
pub(crate) async fn names(store: &Store) -> Result<Vec<String>, VolumeError> {
    let mut objects = store.list(FIRST).await?;
    objects.extend(store.list(SECOND).await?);
    let mut names: Vec<String> =
        objects.iter().filter_map(|object| object.location.filename().map(str::to_owned)).collect();
    names.sort();
    names.dedup();
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
