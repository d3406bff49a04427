//! Families: a volume with its snapshots and forks, and what is left of databases that one of them needs still.
//!
//! A **snapshot** is a checkpoint of a volume's database under a name. A **fork** is a volume with a database of its own that
//! began as a clone of such a checkpoint: it refers to the table files of the other one, and its rows name that one's packs.
//! All of a family are members under the id of the first: `families/FIRST/ID`. A member that no name leads to any more, since
//! its volume was deleted or has got another database, stays as long as somebody needs something of it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use hayloft_store::{Store, StoreError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use slatedb::config::{DbReaderOptions, ScanOptions};
use slatedb::{DbIterator, DbReader, DbReaderMode};
use uuid::Uuid;

use crate::database;
use crate::database::Db;
use crate::database::ledger::Damage;
use crate::database::registry::sum_of;
use crate::database::tables::{self, PackId, PackRow};
use crate::error::VolumeError;

/// How often to try a store that fails, for readers.
const RETRIES: u32 = 4;

/// A snapshot, as the store has it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) volume: String,
    pub(crate) name: String,
    /// The id of the database that it is a checkpoint of.
    pub(crate) database: String,
    /// `None`: it is being made.
    pub(crate) checkpoint: Option<Uuid>,
    pub(crate) created_nanos: i64,
    pub(crate) note: String,
    /// Who has made it.
    pub(crate) by: String,
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
    /// The id of the database in which it is mounted, made when it is for the first time.
    pub(crate) view: Option<String>,
    /// It is being deleted: what is left of it goes when that is asked again.
    #[serde(default)]
    pub(crate) deleting: bool,
    /// It was made for a request, and goes when that is over; a server that was killed deletes it when it opens the volume again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) passing: bool,
    /// Its name by content, once somebody has asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<String>,
    /// Signatures of that name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) signatures: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) checksum: Option<String>,
}

/// Entries are kept twice: without one, what only its snapshot needs would be deleted. The second counts only where the first is
/// lost or damaged; it is written last and removed first.
const FOLDERS: [&str; 2] = ["snapshots", "snapshots-copy"];

/// Names are not in paths, which an encrypted store does not hide.
fn key(store: &Store, volume: &str, name: &str) -> String {
    let mut hasher = store.note_hasher();
    hasher.update(format!("{volume}@{name}").as_bytes());
    hasher.finalize().to_hex()[..32].to_owned()
}

fn paths(family: &str, key: &str) -> [String; 2] {
    FOLDERS.map(|folder| format!("{folder}/{family}/{key}"))
}

impl Snapshot {
    fn paths(&self, store: &Store, family: &str) -> [String; 2] {
        paths(family, &key(store, &self.volume, &self.name))
    }

    /// As people write it.
    pub(crate) fn shown(&self) -> String {
        format!("{}@{}", self.volume, self.name)
    }

    /// One that nothing is known of but where its rows are.
    pub(crate) fn at(database: &str, checkpoint: Uuid) -> Snapshot {
        Snapshot { database: database.to_owned(), checkpoint: Some(checkpoint), ..Snapshot::default() }
    }

    fn json(&self) -> Vec<u8> {
        let plain = Snapshot { checksum: None, ..self.clone() };
        let sum = sum_of(serde_json::to_value(&plain).expect("plain data"));
        serde_json::to_vec_pretty(&Snapshot { checksum: Some(sum), ..plain }).expect("plain data")
    }

    fn parse(json: &[u8]) -> Option<Snapshot> {
        let found: Snapshot = serde_json::from_slice(json).ok()?;
        let plain = Snapshot { checksum: None, ..found.clone() };
        let sum = sum_of(serde_json::to_value(&plain).expect("plain data"));
        (found.checksum == Some(sum)).then_some(plain)
    }
}

async fn read_at(store: &Store, path: &str) -> Result<Option<Snapshot>, VolumeError> {
    let damaged = |what: &str| {
        VolumeError::AtRest(Damage { object: path.to_owned(), what: format!("(a snapshot's entry) {what}") })
    };
    match store.get(path).await {
        Ok(json) => Snapshot::parse(&json).map(Some).ok_or_else(|| damaged("is not as it was written")),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(StoreError::Damaged { .. }) => Err(damaged("is damaged")),
        Err(error) => Err(error.into()),
    }
}

/// The first of two entries, or the second where that is lost or damaged.
async fn read_one(store: &Store, [first, second]: &[String; 2]) -> Result<Option<Snapshot>, VolumeError> {
    let error = match read_at(store, first).await {
        Ok(Some(found)) => return Ok(Some(found)),
        Ok(None) => None,
        Err(error @ VolumeError::AtRest(_)) => Some(error),
        Err(error) => return Err(error),
    };
    match (read_at(store, second).await, error) {
        (Ok(Some(found)), error) => {
            let error = error.map(|error| error.to_string());
            tracing::error!(
                snapshot = found.shown(),
                object = first,
                error,
                "the entry of a snapshot is lost or damaged: the second one counts"
            );
            Ok(Some(found))
        }
        (_, Some(error)) | (Err(error), None) => Err(error),
        (Ok(None), None) => Ok(None),
    }
}

/// Enters a snapshot that is begun; of two of one name one succeeds.
pub(crate) async fn create(store: &Store, family: &str, snapshot: &Snapshot) -> Result<(), VolumeError> {
    let [first, _] = snapshot.paths(store, family);
    match store.create(&first, snapshot.json()).await {
        Err(StoreError::Exists { .. }) => Err(VolumeError::SnapshotExists(snapshot.shown())),
        done => Ok(done?),
    }
}

pub(crate) async fn update(store: &Store, family: &str, snapshot: &Snapshot) -> Result<(), VolumeError> {
    let ([first, second], json) = (snapshot.paths(store, family), snapshot.json());
    futures::try_join!(store.put(&first, json.clone()), store.put(&second, json.clone()))?;
    Ok(())
}

pub(crate) async fn remove(store: &Store, family: &str, snapshot: &Snapshot) -> Result<(), VolumeError> {
    let [first, second] = snapshot.paths(store, family);
    store.delete(&second).await?;
    hayloft_crash::point("family.second-removed");
    Ok(store.delete(&first).await?)
}

/// Where one of two entries of a volume's snapshots is lost, it is written again; those that are being made or deleted have one.
pub(crate) async fn mend(store: &Store, family: &str, volume: &str) -> Result<(), VolumeError> {
    let [first, second] =
        [keys_in(store, FOLDERS[0], family).await?, keys_in(store, FOLDERS[1], family).await?];
    for key in first.symmetric_difference(&second) {
        let both = paths(family, key);
        let is_whole =
            |found: &Snapshot| found.volume == volume && found.checkpoint.is_some() && !found.deleting;
        if let Some(found) = read_one(store, &both).await?.filter(is_whole) {
            update(store, family, &found).await?;
        }
    }
    Ok(())
}

/// A snapshot that is there, whole or not.
pub(crate) async fn read(
    store: &Store,
    family: &str,
    volume: &str,
    name: &str,
) -> Result<Option<Snapshot>, VolumeError> {
    read_one(store, &paths(family, &key(store, volume, name))).await
}

/// Of all entries, the last part of their paths.
async fn keys(store: &Store, family: &str) -> Result<BTreeSet<String>, VolumeError> {
    let mut keys = keys_in(store, FOLDERS[0], family).await?;
    keys.extend(keys_in(store, FOLDERS[1], family).await?);
    Ok(keys)
}

async fn keys_in(store: &Store, folder: &str, family: &str) -> Result<BTreeSet<String>, VolumeError> {
    let objects = store.list(&format!("{folder}/{family}")).await?;
    Ok(objects.iter().filter_map(|object| object.location.filename().map(str::to_owned)).collect())
}

/// All snapshots of a family, the oldest first.
pub(crate) async fn snapshots(store: &Store, family: &str) -> Result<Vec<Snapshot>, VolumeError> {
    let mut found = Vec::new();
    for key in keys(store, family).await? {
        // One that is not there any more was deleted just now.
        found.extend(read_one(store, &paths(family, &key)).await?);
    }
    found.sort_by(|a: &Snapshot, b| (a.created_nanos, &a.name).cmp(&(b.created_nanos, &b.name)));
    Ok(found)
}

fn member(family: &str, id: &str) -> String {
    format!("families/{family}/{id}")
}

/// The members of a family: ids of databases.
pub(crate) async fn members(store: &Store, family: &str) -> Result<Vec<String>, VolumeError> {
    let objects = store.list(&format!("families/{family}")).await?;
    let mut members: Vec<String> =
        objects.iter().filter_map(|object| object.location.filename().map(str::to_owned)).collect();
    members.sort_unstable();
    Ok(members)
}

/// All families.
pub(crate) async fn all(store: &Store) -> Result<Vec<String>, VolumeError> {
    let objects = store.list("families").await?;
    let family = |path: &object_store::path::Path| path.parts().nth(1).map(|part| part.as_ref().to_owned());
    let mut families: Vec<String> = objects.iter().filter_map(|object| family(&object.location)).collect();
    families.sort_unstable();
    families.dedup();
    Ok(families)
}

/// From now on nothing that a member may need is deleted without looking.
pub(crate) async fn enter(store: &Store, family: &str, id: &str) -> Result<(), VolumeError> {
    Ok(store.put(&member(family, id), Vec::new()).await?)
}

/// Nothing is left of a member.
pub(crate) async fn leave(store: &Store, family: &str, id: &str) -> Result<(), VolumeError> {
    Ok(store.delete(&member(family, id)).await?)
}

/// All packs that rows may name.
pub(crate) async fn packs(mut scan: DbIterator) -> Result<HashMap<PackId, PackRow>, VolumeError> {
    let mut packs = HashMap::new();
    while let Some(found) = scan.next().await? {
        let row = PackRow::of(&found.key, &found.value).ok_or(VolumeError::Damaged("row of a pack"))?;
        packs.insert(row.0, row.1);
    }
    Ok(packs)
}

/// Reads a database that this server does not have open, as it is, or as it was.
pub(crate) async fn reader(store: &Store, id: &str, mode: DbReaderMode) -> Result<DbReader, VolumeError> {
    let options = DbReaderOptions { object_store_max_retries: Some(RETRIES), ..DbReaderOptions::default() };
    Ok(DbReader::open(database::path(id), store.objects(), mode, options).await?)
}

async fn packs_read(store: &Store, id: &str, mode: DbReaderMode) -> Result<Vec<PackId>, VolumeError> {
    let reader = reader(store, id, mode).await?;
    let read = async {
        packs(reader.scan_prefix_with_options([tables::PACKS], .., &ScanOptions::new()).await?).await
    };
    let read = read.await;
    let _ = reader.close().await;
    Ok(read?.into_keys().collect())
}

type PacksOf = HashMap<(String, Uuid), Arc<Vec<PackId>>>;

/// What is known of snapshots, by database and checkpoint: it does not change.
#[derive(Default)]
pub(crate) struct Remembered {
    /// The packs that they have.
    packs: Mutex<PacksOf>,
    /// The mark of the tree when they were made, see `Order::tree_mark`.
    trees: Mutex<HashMap<(String, Uuid), u64>>,
}

impl Remembered {
    /// The packs of a snapshot.
    pub(crate) async fn packs(
        &self,
        store: &Store,
        id: &str,
        checkpoint: Uuid,
    ) -> Result<Arc<Vec<PackId>>, VolumeError> {
        let key = (id.to_owned(), checkpoint);
        if let Some(packs) = self.packs.lock().get(&key) {
            return Ok(Arc::clone(packs));
        }
        let packs = packs_read(store, id, DbReaderMode::Checkpoint(checkpoint)).await?;
        self.remember(id, checkpoint, packs);
        Ok(self.packs.lock().get(&key).cloned().unwrap_or_default())
    }

    /// A snapshot was made, and has these packs.
    pub(crate) fn remember(&self, id: &str, checkpoint: Uuid, mut packs: Vec<PackId>) {
        packs.sort_unstable();
        let mut of_all = self.packs.lock();
        // Most often they are those of another one as well.
        let same = of_all.iter().find(|((of, _), known)| of == id && ***known == packs);
        let packs = same.map_or_else(|| Arc::new(packs), |(_, known)| Arc::clone(known));
        of_all.insert((id.to_owned(), checkpoint), packs);
    }

    /// A snapshot was made of a tree with this mark.
    pub(crate) fn remember_tree(&self, id: &str, checkpoint: Uuid, mark: u64) {
        self.trees.lock().insert((id.to_owned(), checkpoint), mark);
    }

    /// The tree that a snapshot was made of, if this server has made it: the database, and the mark.
    pub(crate) fn tree(&self, snapshot: &Snapshot) -> Option<(String, u64)> {
        let key = (snapshot.database.clone(), snapshot.checkpoint?);
        let mark = *self.trees.lock().get(&key)?;
        Some((key.0, mark))
    }

    /// A snapshot is gone.
    pub(crate) fn forget(&self, id: &str, checkpoint: Uuid) {
        let key = (id.to_owned(), checkpoint);
        self.packs.lock().remove(&key);
        self.trees.lock().remove(&key);
    }
}

/// What others of a family have of the packs of one of them.
#[derive(Debug)]
pub(crate) enum Held {
    These(HashSet<PackId>),
    /// Nobody knows at the moment: nothing may go.
    All,
}

impl Held {
    /// Whether somebody may need it.
    pub(crate) fn has(&self, pack: PackId) -> bool {
        match self {
            Held::These(packs) => packs.contains(&pack),
            Held::All => true,
        }
    }
}

/// Which packs snapshots, and members beside `but`, may name. `retired` are members that only snapshots need; `open` are those
/// that this server has open. What comes to have a pack while this looks is among those it looks at: whoever begins to
/// have one is entered first, and who has it gives it up last.
pub(crate) async fn held(
    store: &Store,
    remembered: &Remembered,
    family: &str,
    (but, retired): (&str, &HashSet<String>),
    open: &HashMap<String, Db>,
) -> Result<Held, VolumeError> {
    let before = members(store, family).await?;
    let mut held = HashSet::new();
    for id in before.iter().filter(|id| *id != but && !retired.contains(*id)) {
        match open.get(id) {
            Some(db) => {
                let scan = db.scan_prefix_with_options([tables::PACKS], .., &ScanOptions::new()).await?;
                held.extend(packs(scan).await?.into_keys());
            }
            // One that is being made has no tables yet.
            None => match packs_read(store, id, DbReaderMode::FollowLatest).await {
                Ok(packs) => held.extend(packs),
                Err(error) => {
                    tracing::debug!(family, id, %error, "a member cannot be read: no packs are deleted");
                    return Ok(Held::All);
                }
            },
        }
    }
    for snapshot in snapshots(store, family).await? {
        let Some(checkpoint) = snapshot.checkpoint else { return Ok(Held::All) };
        if snapshot.deleting {
            continue;
        }
        match remembered.packs(store, &snapshot.database, checkpoint).await {
            Ok(packs) => held.extend(packs.iter()),
            // Deleted since, most likely.
            Err(error) => {
                tracing::debug!(family, snapshot = snapshot.shown(), %error, "a snapshot cannot be read: no packs are deleted");
                return Ok(Held::All);
            }
        }
    }
    match members(store, family).await? == before {
        true => Ok(Held::These(held)),
        false => Ok(Held::All),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_snapshots_know_when_they_are_damaged() {
        let snapshot = Snapshot {
            volume: "src".to_owned(),
            name: "monday".to_owned(),
            database: "0123".to_owned(),
            checkpoint: Some(Uuid::from_u128(7)),
            created_nanos: 5,
            note: "before the \u{fc}ber-merge".to_owned(),
            by: "uid:0".to_owned(),
            bytes: 9,
            inodes: 3,
            tree: Some("tree1-00".to_owned()),
            signatures: vec!["-----BEGIN".to_owned()],
            ..Snapshot::default()
        };
        let json = snapshot.json();
        assert_eq!(Snapshot::parse(&json), Some(snapshot));
        for at in 0..json.len() {
            let mut damaged = json.clone();
            damaged[at] ^= 1;
            let read = Snapshot::parse(&damaged);
            assert!(read.is_none() || read == Snapshot::parse(&json), "byte {at}");
        }
    }
}
