//! What administrators ask for about snapshots and forks.

use std::sync::Arc;

use hayloft_transport::Peer;
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    CreateSnapshot, Diff, Differences, Done, Fork, NameTree, Named, Promote, Rollback, SignSnapshot,
    Snapshots, Version, VolumeInfo,
};

use crate::database::family::{self, Snapshot};
use crate::database::{self, registry, tables};
use crate::error::VolumeError;
use crate::rights::{Right, denied};
use crate::server::Shared;
use crate::versions::diff::{Asked, Found};
use crate::versions::snapshot::{self, Wanted};
use crate::versions::{check_name, cutting, diff, fork, leftovers, naming, replace};
use crate::words;

/// What a request is about, and the right on it that is needed; `None` for requests that are not about versions.
pub(super) fn needed(body: &Body) -> Option<(&str, Right)> {
    fn of(version: &Option<Version>) -> &str {
        version.as_ref().map_or("", |version| version.volume.as_str())
    }
    Some(match body {
        Body::ListSnapshots(asked) => (of(&asked.of), Right::Read),
        Body::CreateSnapshot(asked) => (of(&asked.of), Right::Write),
        Body::DeleteSnapshot(asked) => (of(&asked.of), Right::Admin),
        Body::Fork(asked) => (of(&asked.of), Right::Admin),
        Body::Rollback(asked) => (of(&asked.to), Right::Admin),
        Body::Promote(asked) => (&asked.fork, Right::Admin),
        Body::Diff(asked) => (of(&asked.from), Right::Read),
        Body::NameTree(asked) => (of(&asked.of), Right::Read),
        Body::SignSnapshot(asked) => (of(&asked.of), Right::Admin),
        Body::CutFile(asked) => (of(&asked.of), Right::Read),
        Body::ReadParts(asked) => (of(&asked.of), Right::Read),
        _ => return None,
    })
}

fn version(of: Option<Version>) -> Result<Version, VolumeError> {
    of.ok_or(VolumeError::Invalid("of which volume?"))
}

/// Answers a request about versions, and does it to its end, should nobody wait for the answer any more.
pub(super) async fn perform(shared: &Arc<Shared>, peer: &Peer, body: Body) -> Result<Answer, VolumeError> {
    let (shared, peer) = (Arc::clone(shared), peer.clone());
    let done = tokio::spawn(async move { perform_all(&shared, &peer, body).await }).await;
    done.unwrap_or(Err(VolumeError::Invalid("the server has failed in it; its log says why")))
}

async fn perform_all(shared: &Arc<Shared>, peer: &Peer, body: Body) -> Result<Answer, VolumeError> {
    let by = peer.identity.to_string();
    match body {
        Body::ListSnapshots(asked) => {
            let of = version(asked.of)?;
            let entry = registry::read(&shared.store, &of.volume).await?;
            let found = match of.snapshot.as_str() {
                "" => snapshot::list(shared, &entry, &of.volume).await?,
                name => vec![snapshot::find(shared, &entry, &of.volume, name).await?],
            };
            told(shared, found).await
        }
        Body::CreateSnapshot(CreateSnapshot { of, note, as_stored }) => {
            words::check_note(&note)?;
            let of = version(of)?;
            let volume = shared.volume(&of.volume).await?;
            let wanted = Wanted { name: &of.snapshot, note: &note, by: &by, as_stored, passing: false };
            let made = snapshot::create(shared, &volume, &wanted).await;
            told(shared, vec![made.inspect_err(|error| volume.note(error))?]).await
        }
        Body::DeleteSnapshot(asked) => {
            let of = version(asked.of)?;
            let entry = registry::read(&shared.store, &of.volume).await?;
            snapshot::delete(shared, &entry, &of.volume, &of.snapshot).await?;
            Ok(Answer::Done(Done {}))
        }
        Body::Fork(Fork { of, name, as_stored }) => {
            let of = version(of)?;
            fork::fork(shared, (&of.volume, &of.snapshot), &name, &by, as_stored).await?;
            super::one(shared, peer, &name).await
        }
        Body::Rollback(Rollback { to, keep_as }) => {
            let to = version(to)?;
            let name = name_of_kept(shared, "before-rollback", &keep_as)?;
            let note = format!("what {} was before it went back to {}", to.volume, to.snapshot);
            let keep = Wanted { name: &name, note: &note, by: &by, as_stored: false, passing: false };
            told(shared, vec![replace::rollback(shared, (&to.volume, &to.snapshot), &keep).await?]).await
        }
        Body::Promote(Promote { fork, keep_as, id }) => {
            // Of the fork the right was looked at already; that is none to give the volume another tree.
            let entry = registry::read(&shared.store, &fork).await?;
            let volume = replace::origin_of(&entry)?;
            let right = shared.right_of(peer, &registry::read(&shared.store, volume).await?);
            if right < Right::Admin {
                return Err(denied(peer, volume, right, Right::Admin));
            }
            let id = if id.is_empty() { entry.id.clone() } else { id };
            let name = name_of_kept(shared, "before-promote", &keep_as)?;
            let note = format!("what the volume was before {fork} took its place");
            let keep = Wanted { name: &name, note: &note, by: &by, as_stored: false, passing: false };
            told(shared, vec![replace::promote(shared, (&fork, &id), &keep).await?]).await
        }
        Body::Diff(Diff { from, to, below, times }) => {
            let (from, to) = (version(from)?, version(to)?);
            // Of the first one the right was looked at already.
            let entry = registry::read(&shared.store, &to.volume).await?;
            let right = shared.right_of(peer, &entry);
            if right < Right::Read {
                return Err(denied(peer, &to.volume, right, Right::Read));
            }
            let Found { differences, rows_read, descends } =
                diff::diff(shared, (&from, &to), &Asked { below: &below, times, by: &by }).await?;
            Ok(Answer::Differences(Differences { differences, more: false, rows_read, times, descends }))
        }
        Body::NameTree(NameTree { of, anew }) => {
            let of = version(of)?;
            let naming::Named { snapshot, name, rows_read } = naming::name(shared, &of, &by, anew).await?;
            let snapshot = match of.snapshot.is_empty() {
                true => None,
                false => Some(snapshot::info(shared, &snapshot).await),
            };
            Ok(Answer::Named(Named { tree: name.to_string(), snapshot, rows_read }))
        }
        Body::SignSnapshot(SignSnapshot { of, tree, signature }) => {
            let name = tree.parse().map_err(VolumeError::Invalid)?;
            told(shared, vec![naming::sign(shared, &version(of)?, name, &signature).await?]).await
        }
        Body::CutFile(asked) => Ok(Answer::Cuts(cutting::cut(shared, asked).await?)),
        Body::ReadParts(asked) => Ok(Answer::FileParts(cutting::read(shared, asked).await?)),
        _ => Err(VolumeError::Invalid("not a request about versions")),
    }
}

/// Adds what a volume has in common with others.
pub(super) async fn add(shared: &Arc<Shared>, info: &mut VolumeInfo) -> Result<(), VolumeError> {
    let volume = shared.volume(&info.name).await?;
    let entry = volume.registered.lock().clone();
    info.snapshots = snapshot::list(shared, &entry, &info.name).await?.len() as u64;
    let (db, held) = (volume.db()?, shared.held_by_others(&volume).await?);
    let mut tell = |is_shared: bool, bytes: u64| match is_shared {
        true => info.shared_bytes += bytes,
        false => info.own_bytes += bytes,
    };
    let rows = db.snapshot()?;
    for (pack, row) in family::packs(database::scan(&rows, &[tables::PACKS]).await?).await? {
        tell(!volume.homes.is_own(pack) || held.has(pack), row.size);
    }
    for (is_shared, bytes) in leftovers::table_files(&shared.store, &volume.id, &db).await? {
        tell(is_shared, bytes);
    }
    Ok(())
}

/// The name of the snapshot that a tree is kept as.
fn name_of_kept(shared: &Shared, what: &str, wanted: &str) -> Result<String, VolumeError> {
    let name = match wanted {
        "" => {
            let now = shared.now();
            format!("{what}-{}.{:03}", now.secs, now.nanos / 1_000_000)
        }
        wanted => wanted.to_owned(),
    };
    check_name(&name)?;
    Ok(name)
}

async fn told(shared: &Shared, found: Vec<Snapshot>) -> Result<Answer, VolumeError> {
    let mut snapshots = Vec::with_capacity(found.len());
    for snapshot in &found {
        snapshots.push(snapshot::info(shared, snapshot).await);
    }
    Ok(Answer::Snapshots(Snapshots { snapshots }))
}
