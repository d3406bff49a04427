//! What the folder of a volume's own database says: the volume's name, and what the registry has of it. When both entries of the
//! registry are lost, this brings them back.
//!
//! The note is there only while the registry leads to the database: it is written after the first entry, and goes before the last
//! one does, or before an entry leads to another database. So a note with a name that the registry does not know is that of a
//! volume whose entries are lost.

use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_store::{Store, StoreError};
use serde_json::Value;

use crate::database::format::KNOWN;
use crate::database::ledger::Damage;
use crate::database::registry::{self, Registered, sum_of};
use crate::error::VolumeError;

/// Notes that are read at a time.
const READS: usize = 16;

/// A volume whose entries in the registry are lost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Lost {
    pub(crate) name: String,
    pub(crate) entry: Registered,
}

impl Lost {
    /// What to tell who asks for it.
    pub(crate) fn told(&self) -> VolumeError {
        let Lost { name, entry } = self;
        let object = format!("registry/{name}");
        let what = format!(
            "is lost, and so is registry-copy/{name}; the volume is there, as {} says: hayloft volume check {name} --repair brings the entries back",
            path(&entry.id)
        );
        VolumeError::Of {
            volume: name.clone(),
            source: Box::new(VolumeError::AtRest(Damage { object, what })),
        }
    }
}

fn path(id: &str) -> String {
    format!("volumes/{id}/name")
}

fn json(name: &str, entry: &Registered) -> Vec<u8> {
    let plain = Registered { checksum: None, ..entry.clone() };
    let Ok(Value::Object(mut fields)) = serde_json::to_value(plain) else { unreachable!("plain data") };
    fields.insert("name".to_owned(), name.into());
    let sum = sum_of(Value::Object(fields.clone()));
    fields.insert("checksum".to_owned(), sum.into());
    serde_json::to_vec_pretty(&fields).expect("plain data")
}

/// `None`: it is damaged, or of a version that is not known.
fn parse(json: &[u8]) -> Option<Lost> {
    let Ok(Value::Object(mut fields)) = serde_json::from_slice(json) else { return None };
    let sum = fields.remove("checksum")?;
    if sum.as_str()? != sum_of(Value::Object(fields.clone())) {
        return None;
    }
    let Value::String(name) = fields.remove("name")? else { return None };
    let entry: Registered = serde_json::from_value(Value::Object(fields)).ok()?;
    (entry.format <= KNOWN).then_some(Lost { name, entry })
}

/// What is stored; `None` when there is nothing.
async fn read(store: &Store, id: &str) -> Result<Option<Option<Lost>>, VolumeError> {
    match store.get(&path(id)).await {
        Ok(json) => Ok(Some(parse(&json))),
        Err(StoreError::Damaged { .. }) => Ok(Some(None)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether the folder says that it is a volume's, in whatever words.
pub(crate) async fn is_there(store: &Store, id: &str) -> Result<bool, VolumeError> {
    Ok(read(store, id).await?.is_some())
}

/// Writes what the registry says of a volume. One that is being made or deleted, or is to become another one, has no name of its own.
pub(super) async fn write(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    if entry.deleting || entry.promoted_to.is_some() {
        return Ok(());
    }
    Ok(store.put(&path(&entry.id), json(name, entry)).await?)
}

/// Writes it if it is not there as it should be: it was lost, or this volume is of an earlier version.
pub(crate) async fn keep(store: &Store, name: &str, entry: &Registered) -> Result<(), VolumeError> {
    let expected = Lost { name: name.to_owned(), entry: Registered { checksum: None, ..entry.clone() } };
    match read(store, &entry.id).await? {
        Some(Some(found)) if found == expected => Ok(()),
        _ => write(store, name, entry).await,
    }
}

/// The volume whose database an entry leads to, where that is another one: the entry is a copy of that one's, made by hand. Two names
/// of one database would be opened beside each other, and the deletion of one would delete both.
pub(crate) async fn is_of_another(
    store: &Store,
    name: &str,
    id: &str,
) -> Result<Option<String>, VolumeError> {
    let Some(Some(Lost { name: other, .. })) = read(store, id).await? else { return Ok(None) };
    if other == name {
        return Ok(None);
    }
    match registry::read(store, &other).await {
        Ok(entry) if entry.id == id && !entry.deleting && entry.promoted_to.is_none() => Ok(Some(other)),
        Ok(_) | Err(VolumeError::NoVolume(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What to tell who asks for it.
pub(crate) fn told_of_copy(name: &str, other: &str) -> VolumeError {
    let object = format!("registry/{name}");
    let what = format!(
        "leads to the database of the volume {other}: it is a copy of registry/{other}, and no volume; hayloft volume delete {name} takes it away, and nothing else"
    );
    VolumeError::AtRest(Damage { object, what })
}

/// The database is not this volume's any more.
pub(crate) async fn remove(store: &Store, name: &str, id: &str) -> Result<(), VolumeError> {
    match read(store, id).await? {
        // It has become another one's.
        Some(Some(found)) if found.name != name => Ok(()),
        Some(_) => Ok(store.delete(&path(id)).await?),
        None => Ok(()),
    }
}

/// All volumes whose entries in the registry are lost, by name.
pub(crate) async fn lost(store: &Store) -> Result<Vec<Lost>, VolumeError> {
    let folders = store.folders("volumes").await?;
    let found = stream::iter(folders).map(|id| async move {
        let Some(Some(found)) = read(store, &id).await? else { return Ok(None) };
        match registry::read(store, &found.name).await {
            // It may be deleted at this moment: then the note has gone before the entries.
            Err(VolumeError::NoVolume(_)) if found.entry.id == id && is_there(store, &id).await? => {
                Ok(Some(found))
            }
            // Damaged entries are told by whoever reads them.
            _ => Ok::<_, VolumeError>(None),
        }
    });
    let mut lost: Vec<Lost> =
        found.buffered(READS).try_filter_map(|found| async { Ok(found) }).try_collect().await?;
    lost.sort_by(|a, b| (&a.name, a.entry.created_secs).cmp(&(&b.name, b.entry.created_secs)));
    Ok(lost)
}

/// Brings the entries of a volume back. Says what was mended.
pub(crate) async fn restore(store: &Store, lost: &Lost) -> Result<String, VolumeError> {
    registry::update(store, &lost.name, &lost.entry).await?;
    let Lost { name, entry } = lost;
    tracing::warn!(
        volume = name,
        id = entry.id,
        "its entries in the registry were lost, and are brought back"
    );
    Ok(format!(
        "mended: registry/{name} and registry-copy/{name} were lost, and are written again as {} says",
        path(&entry.id)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_says_name_and_entry_and_nothing_when_it_was_changed() {
        let entry = Registered { trusted: true, ..Registered::new(7, 0, (0o755, 1, 2)) };
        let note = json("vol", &entry);
        assert_eq!(parse(&note), Some(Lost { name: "vol".to_owned(), entry }));
        for at in 0..note.len() {
            let mut flipped = note.clone();
            flipped[at] ^= 4;
            // A blank that becomes another blank says the same.
            assert!(parse(&flipped).is_none() || parse(&flipped) == parse(&note), "byte {at}");
            assert_eq!(parse(&note[..at]), None);
        }
    }
}
