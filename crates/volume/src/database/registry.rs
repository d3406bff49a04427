//! The registry: which volumes a store has. One object per volume, named after it, and a second one like it in another
//! folder. What brings both back is in the folder of the volume's database ([`named`]).

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use hayloft_store::{Store, StoreError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::database::format::{FAMILIES, FORMAT, KNOWN};
use crate::database::homes;
use crate::database::ledger::Damage;
use crate::database::named;
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
    /// The id of the first of its family, if its tree began as that of another volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) family: Option<String>,
    /// What it began as, for people: `VOLUME@SNAPSHOT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) origin: Option<String>,
    /// Its database is to become that of this volume, and may be so already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) promoted_to: Option<String>,
    /// Its window of inode numbers begins here: no other member has the same. That of a fork which has taken another one's place is free
    /// again, unless it has given numbers of it.
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) numbers_from: u64,
    /// Of a fork: from where to where it was given numbers of its origin's, which it gives first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) run: Option<(u64, u64)>,
    /// The highest window of forks that have taken its place and given numbers of it.
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) numbers_past: u64,
    /// Which version of everything that the store has of it: see [`format`](super::format).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) format: u32,
    /// Of all else; an entry of an older version has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) checksum: Option<String>,
}

/// Entries without a number have to have the checksums that they had.
fn is_zero(format: &u32) -> bool {
    *format == 0
}

fn is_none(number: &u64) -> bool {
    *number == 0
}

fn sum(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_owned()
}

/// The checksum of an entry from format 1 on. It is of all fields, in the order of their names, whether they are known or not:
/// what a later version has written can be told from damage.
pub(super) fn sum_of(entry: Value) -> String {
    fn sorted(value: Value) -> Value {
        match value {
            Value::Object(fields) => {
                let fields: BTreeMap<String, Value> = fields.into_iter().collect();
                Value::Object(fields.into_iter().map(|(name, value)| (name, sorted(value))).collect())
            }
            Value::Array(items) => items.into_iter().map(sorted).collect(),
            other => other,
        }
    }
    sum(&serde_json::to_vec(&sorted(entry)).expect("plain data"))
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

/// An id that was never given before.
pub(crate) fn random_id() -> String {
    format!("{:016x}{:016x}", random(), random())
}

/// A random number from the system.
pub(crate) fn random() -> u64 {
    getrandom::u64().expect("the system has random numbers")
}

impl Registered {
    pub(crate) fn new(quota_bytes: u64, quota_inodes: u64, root: (u32, u32, u32)) -> Registered {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Registered {
            id: random_id(),
            created_secs: since.as_secs() as i64,
            quota_bytes,
            quota_inodes,
            root,
            deleting: false,
            rights: Vec::new(),
            trusted: false,
            family: None,
            origin: None,
            promoted_to: None,
            numbers_from: 0,
            run: None,
            numbers_past: 0,
            format: FORMAT,
            checksum: None,
        }
    }

    /// The id of the first of its family: its own, if its tree began empty.
    pub(crate) fn family(&self) -> &str {
        self.family.as_deref().unwrap_or(&self.id)
    }

    /// Another database takes the place of its own, or is made for a volume like it.
    pub(crate) fn with_id(&self, id: String) -> Registered {
        let family = Some(self.family().to_owned()).filter(|first| *first != id);
        Registered { id, family, run: None, format: self.format.max(FAMILIES), ..self.clone() }
    }

    fn json(&self) -> Vec<u8> {
        let sealed = Registered { checksum: Some(self.sum()), ..self.clone() };
        serde_json::to_vec_pretty(&sealed).expect("plain data")
    }

    /// What the checksum has to be.
    fn sum(&self) -> String {
        let plain = Registered { checksum: None, ..self.clone() };
        match self.format {
            0 => sum(&serde_json::to_vec(&plain).expect("plain data")),
            _ => sum_of(serde_json::to_value(&plain).expect("plain data")),
        }
    }

    fn parse(json: &[u8]) -> Read {
        let Ok(Value::Object(mut fields)) = serde_json::from_slice(json) else { return Read::Damaged };
        let checksum = fields.remove("checksum");
        let format = fields.get("format").and_then(Value::as_u64).unwrap_or(0);
        // Before anything else is believed of it, the number included.
        if format > 0 && checksum.and_then(|sum| Some(sum.as_str()? == sum_of(fields.into()))) != Some(true) {
            return Read::Damaged;
        }
        if format > KNOWN.into() {
            return Read::Newer(format);
        }
        let Ok(found) = serde_json::from_slice::<Registered>(json) else { return Read::Damaged };
        match found.checksum.as_ref().is_none_or(|sum| *sum == found.sum()) {
            true => Read::Entry(Box::new(Registered { checksum: None, ..found })),
            false => Read::Damaged,
        }
    }
}

/// Entries are written, removed and mended by one at a time: who mends what he has seen half removed would bring it back.
static WRITING: Mutex<()> = Mutex::const_new(());

/// Enters a new volume; of two servers doing so at a time one succeeds.
pub(crate) async fn create(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    // One whose first entry is lost is there all the same.
    match read(store, name).await {
        Err(VolumeError::NoVolume(_)) => {}
        Ok(_) => return Err(VolumeError::VolumeExists(name.to_owned())),
        Err(error) => return Err(error),
    }
    let _one = WRITING.lock().await;
    match store.create(&path(FIRST, name), entry.json()).await {
        Err(StoreError::Exists { .. }) => return Err(VolumeError::VolumeExists(name.to_owned())),
        done => done?,
    }
    hayloft_crash::point("registry.created-first");
    Ok(store.put(&path(SECOND, name), entry.json()).await?)
}

pub(crate) async fn read(store: &Store, name: &str) -> Result<Registered, VolumeError> {
    check_name(name)?;
    let mut both = read_both(store, name).await?;
    let _one;
    if both.0 != both.1 {
        // Somebody may be writing them.
        _one = WRITING.lock().await;
        both = read_both(store, name).await?;
    }
    let (entry, bad) = match both {
        // What this version does not know it does not mend either.
        (Read::Newer(format), _) | (_, Read::Newer(format)) => {
            return Err(VolumeError::Newer { volume: name.to_owned(), format });
        }
        (Read::Entry(first), Read::Entry(second)) if first == second => return Ok(*first),
        (Read::Nothing, Read::Nothing) => return Err(VolumeError::NoVolume(name.to_owned())),
        // An update reaches the first one first.
        (Read::Entry(first), _) => (*first, SECOND),
        (_, Read::Entry(second)) => (*second, FIRST),
        _ => {
            let what = format!("is damaged, and {} gives no help", path(SECOND, name));
            return Err(VolumeError::AtRest(Damage { object: path(FIRST, name), what }));
        }
    };
    if entry.deleting || entry.promoted_to.is_some() {
        // What is being deleted, made, or put in another one's place may be another server's work at this moment: it would be put back.
        return Ok(entry);
    }
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

#[derive(Debug, PartialEq, Eq)]
enum Read {
    Entry(Box<Registered>),
    Nothing,
    Damaged,
    /// Of a format that is not known yet.
    Newer(u64),
}

/// In this order: of a volume that is being made or removed the second entry is never there alone.
async fn read_both(store: &Store, name: &str) -> Result<(Read, Read), VolumeError> {
    Ok((read_one(store, FIRST, name).await?, read_one(store, SECOND, name).await?))
}

async fn read_one(store: &Store, folder: &str, name: &str) -> Result<Read, VolumeError> {
    match store.get(&path(folder, name)).await {
        Err(StoreError::NotFound { .. }) => Ok(Read::Nothing),
        Err(StoreError::Damaged { .. }) => Ok(Read::Damaged),
        read => Ok(Registered::parse(&read?)),
    }
}

pub(crate) async fn update(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    let _one = WRITING.lock().await;
    store.put(&path(FIRST, name), entry.json()).await?;
    hayloft_crash::point("registry.updated-first");
    let second = async { Ok(store.put(&path(SECOND, name), entry.json()).await?) };
    futures::try_join!(second, named::write(store, name, entry)).map(drop)
}

/// Takes the name away from a database.
pub(crate) async fn remove(store: &Store, name: &str, id: &str) -> Result<(), VolumeError> {
    let _one = WRITING.lock().await;
    named::remove(store, name, id).await?;
    store.delete(&path(SECOND, name)).await?;
    hayloft_crash::point("registry.removed-second");
    Ok(store.delete(&path(FIRST, name)).await?)
}

/// Deletes what a volume consists of, and its name at last. It is marked as one that is being deleted.
pub(crate) async fn erase(store: &Store, name: &str, marked: &Registered) -> Result<(), VolumeError> {
    // What others of a family may use goes when none of them does any more.
    if marked.format < FAMILIES {
        erase_objects(store, &marked.id).await?;
    }
    remove(store, name, &marked.id).await
}

/// Deletes what a database consists of, its packs too.
pub(crate) async fn erase_objects(store: &Store, id: &str) -> Result<(), VolumeError> {
    store.delete_below(&homes::folder(id)).await?;
    hayloft_crash::point("delete.packs-gone");
    store.delete_below(&format!("volumes/{id}")).await?;
    hayloft_crash::point("delete.tables-gone");
    Ok(())
}

/// The names of all volumes, sorted. What others leave in these folders, as editors and NFS do, is none.
pub(crate) async fn names(store: &Store) -> Result<Vec<String>, VolumeError> {
    let mut objects = store.list(FIRST).await?;
    objects.extend(store.list(SECOND).await?);
    let mut names: Vec<String> = objects
        .iter()
        .filter_map(|object| object.location.filename().map(str::to_owned))
        .filter(|name| check_name(name).is_ok())
        .collect();
    names.sort();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    /// An entry as servers wrote it before there were formats, with its checksum.
    const FIRST_FORMAT: &str = r#"{
  "id": "326f124e412b92f00385d1420f7dcbdf",
  "created_secs": 1795558828,
  "quota_bytes": 0,
  "quota_inodes": 7,
  "root": [
    493,
    0,
    0
  ],
  "deleting": false,
  "rights": [],
  "trusted": true,
  "checksum": "2c20ce9089994fee"
}"#;

    #[test]
    fn entries_of_the_first_format_are_read_and_damage_of_them_is_noticed() {
        let Read::Entry(entry) = Registered::parse(FIRST_FORMAT.as_bytes()) else { panic!("not read") };
        assert_eq!((entry.format, entry.quota_inodes, entry.trusted), (0, 7, true));
        assert_eq!(entry.json(), FIRST_FORMAT.as_bytes(), "an older server could read what is written");
        let damaged = FIRST_FORMAT.replace("493", "511");
        assert_eq!(Registered::parse(damaged.as_bytes()), Read::Damaged);
    }

    #[test]
    fn entries_of_a_later_format_are_known_as_that_whatever_else_they_have() {
        let mut later = serde_json::json!({ "format": 9, "id": { "z": 1, "of": ["another", "kind"] } });
        later["checksum"] = sum_of(later.clone()).into();
        let later = later.to_string();
        assert_eq!(Registered::parse(later.as_bytes()), Read::Newer(9));
        assert_eq!(Registered::parse(later.replace("kind", "sort").as_bytes()), Read::Damaged);
        // One bit: of format 1 it would be 9.
        let own = Registered::new(1, 2, (0o755, 0, 0));
        let flipped = String::from_utf8(own.json()).unwrap().replace("\"format\": 1", "\"format\": 9");
        assert_eq!(Registered::parse(flipped.as_bytes()), Read::Damaged);
        let own = Registered::new(1, 2, (0o755, 0, 0));
        assert_eq!(Registered::parse(&own.json()), Read::Entry(Box::new(own)));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn who_looks_for_an_entry_that_is_removed_does_not_bring_it_back() {
        let folder = tempfile::tempdir().unwrap();
        let files = object_store::local::LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        let store = Arc::new(Store::new("files", Arc::new(files), None));
        let is_over = Arc::new(AtomicBool::new(false));
        let mut readers = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (store, is_over) = (Arc::clone(&store), Arc::clone(&is_over));
            readers.spawn(async move {
                while !is_over.load(Relaxed) {
                    let _ = read(&store, "fork").await;
                }
            });
        }
        for round in 0..300 {
            // As a fork goes whose tree becomes another volume's, and one that could not be made.
            let entry = Registered::new(0, 0, (0o755, 0, 0));
            let leaving = Registered { promoted_to: Some("vol".to_owned()), ..entry.clone() };
            create(&store, "fork", &entry).await.unwrap();
            if round % 2 == 0 {
                update(&store, "fork", &leaving).await.unwrap();
            }
            remove(&store, "fork", &entry.id).await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            assert_eq!(names(&store).await.unwrap(), Vec::<String>::new(), "round {round}");
        }
        is_over.store(true, Relaxed);
        readers.join_all().await;
    }

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
