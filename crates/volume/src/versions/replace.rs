//! Another tree in the place of a volume's: an earlier one of its own, or that of a fork. The volume keeps its name, and its
//! mounts go on; what it had is kept as a snapshot.
//!
//! The database with the other tree is made ready beside the one that is in use. Then the volume stands still: its last state
//! becomes the snapshot, the new database learns who has the volume mounted, and the registry's entry leads to it. When a
//! session comes back it is told so; its mount lets go of everything that it knows and begins another one (ADR 15). Until all
//! have, or their leases are over, nobody is served: no host sees the one tree while another one changes the other.

use std::sync::Arc;

use hayloft_model::SessionId;
use prost::Message;

use crate::database::family::Snapshot;
use crate::database::format::RUNS;
use crate::database::numbers::Numbers;
use crate::database::registry::{self, Registered};
use crate::database::rows::Rows;
use crate::database::tables::{self, HistoryRow, NumbersRow, SessionRow, VolumeRow};
use crate::database::{self, Db, family, named};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::session::Session;
use crate::session::ended::Ended;
use crate::versions::snapshot::{self, Wanted};
use crate::versions::{clone, leftovers, volume_of};
use crate::volume::{Slot, Volume};

/// What the volume that takes another one's place has to know of it.
struct Inheritance {
    history: HistoryRow,
    mark: u64,
    /// The numbers that the volume goes on with, and where its window begins.
    numbers: Numbers,
    window: u64,
    ended: Ended,
    sessions: Vec<(SessionId, SessionRow)>,
}

/// Gives all hosts the tree of a snapshot. Returns what the present one is kept as.
pub(crate) async fn rollback(
    shared: &Arc<Shared>,
    (volume, to): (&str, &str),
    keep: &Wanted<'_>,
) -> Result<Snapshot, VolumeError> {
    let old = shared.volume(volume).await?;
    let entry = old.registered.lock().clone();
    let target = snapshot::find(shared, &entry, volume, to).await?;
    let checkpoint = target.checkpoint.ok_or_else(|| VolumeError::SnapshotUnfinished(target.shown()))?;
    let begun = snapshot::begin_to_keep(shared, &old, keep).await?;
    let replaced = async {
        old.all_shipped().await?;
        let _structure = shared.structure.lock().await;
        let new_entry = old.registered.lock().clone().with_id(registry::random_id());
        let family = old.homes.first();
        clone::make(&shared.store, family, (&target.database, checkpoint), &new_entry.id).await?;
        let opened = Volume::open(Arc::clone(shared), volume, new_entry.clone(), false).await;
        let replaced = match opened {
            Ok(new) => {
                let replaced = replace(shared, &old, &new, None, &begun).await;
                if replaced.is_err()
                    && let Err(error) = new.close().await
                {
                    tracing::warn!(volume, %error, "the database that was to take its place does not close");
                }
                replaced
            }
            Err(error) => Err(error),
        };
        if let Err(error) = &replaced
            && !is_uncertain(error)
        {
            let undone = async {
                leftovers::delete_database(&shared.store, &new_entry.id).await?;
                family::leave(&shared.store, family, &new_entry.id).await
            };
            if let Err(error) = undone.await {
                tracing::warn!(volume, %error, "what was begun of another tree goes later");
                shared.leftovers.look_at(family);
            }
        }
        replaced
    };
    ended(shared, &begun, replaced.await).await
}

/// Nobody knows which of two trees the volume has.
fn is_uncertain(error: &VolumeError) -> bool {
    matches!(error, VolumeError::Uncertain(_))
}

/// What was to be kept is not, unless the tree was replaced, or may have been.
async fn ended(
    shared: &Arc<Shared>,
    begun: &snapshot::Begun,
    replaced: Result<Snapshot, VolumeError>,
) -> Result<Snapshot, VolumeError> {
    if replaced.as_ref().is_err_and(|error| !is_uncertain(error)) {
        snapshot::give_up(shared, begun).await;
    }
    replaced
}

/// The volume that a fork was made of.
pub(crate) fn origin_of(fork: &Registered) -> Result<&str, VolumeError> {
    let none = VolumeError::Invalid("a volume that is no fork has nothing to replace");
    let origin = fork.origin.as_deref().ok_or(none)?;
    Ok(volume_of(origin))
}

/// Puts the fork that has this name and id in the place of its origin. Returns what the origin's tree is kept as.
pub(crate) async fn promote(
    shared: &Arc<Shared>,
    (fork, id): (&str, &str),
    keep: &Wanted<'_>,
) -> Result<Snapshot, VolumeError> {
    let new = shared.volume(fork).await?;
    let fork_entry = new.registered.lock().clone();
    if fork_entry.id != id {
        return Err(VolumeError::OtherFork(fork.to_owned()));
    }
    let volume = origin_of(&fork_entry)?.to_owned();
    let old = shared.volume(&volume).await?;
    if old.homes.first() != new.homes.first() {
        return Err(VolumeError::Invalid("the volume that it was forked from is another one by now"));
    }
    new.refuse_when_mounted()?;
    let begun = snapshot::begin_to_keep(shared, &old, keep).await?;
    let replaced = async {
        old.all_shipped().await?;
        let _structure = shared.structure.lock().await;
        let mut place = shared.hold(fork).await;
        // Hosts were waited for, and meanwhile the name may have become another one's.
        let fork_entry = registry::read(&shared.store, fork).await?;
        if fork_entry.id != id {
            return Err(VolumeError::OtherFork(fork.to_owned()));
        }
        if !place.as_ref().is_some_and(|open| Arc::ptr_eq(open, &new)) {
            // It was opened anew.
            return Err(VolumeError::ShuttingDown);
        }
        new.refuse_when_mounted()?;
        // Its snapshots are listed with the volume from now on.
        let own = snapshot::list(shared, &fork_entry, fork).await?;
        if !own.is_empty() {
            return Err(VolumeError::HasSnapshots { volume: fork.to_owned(), count: own.len() });
        }
        // From here on nobody opens the fork; if all ends here, whoever does so next finds out which name has the database.
        let leaving = Registered { promoted_to: Some(volume.clone()), ..fork_entry.clone() };
        registry::update(&shared.store, fork, &leaving).await?;
        *place = None;
        let replaced = replace(shared, &old, &new, Some(&fork_entry), &begun).await;
        let left = match &replaced {
            Ok(_) => registry::remove(&shared.store, fork, &fork_entry.id).await,
            Err(error) if is_uncertain(error) => Ok(()),
            Err(_) => {
                if let Err(error) = new.close().await {
                    tracing::warn!(volume = fork, %error, "the database of a fork does not close");
                }
                registry::update(&shared.store, fork, &fork_entry).await
            }
        };
        if let Err(error) = left {
            tracing::warn!(volume = fork, %error, "the entry of a fork is put in order when it is looked for next");
        }
        replaced
    };
    ended(shared, &begun, replaced.await).await
}

/// A volume that was to take another one's place when a server was killed: whether it has done so, and is none of its own any
/// more. Puts the entry in order.
pub(crate) async fn has_left(shared: &Shared, name: &str, entry: &Registered) -> Result<bool, VolumeError> {
    let Some(volume) = &entry.promoted_to else { return Ok(false) };
    let is_there = match registry::read(&shared.store, volume).await {
        Ok(found) => found.id == entry.id,
        Err(VolumeError::NoVolume(_)) => false,
        // Whether it leads to this database is not known: a name of its own might be a second one.
        Err(error) => return Err(error),
    };
    match is_there {
        true => registry::remove(&shared.store, name, &entry.id).await?,
        false => {
            let stays = Registered { promoted_to: None, ..entry.clone() };
            registry::update(&shared.store, name, &stays).await?;
        }
    }
    Ok(is_there)
}

/// Puts `new`, whose database is ready, in the place of `old`. `fork`: the entry of `new`, if it was a volume of its own.
async fn replace(
    shared: &Arc<Shared>,
    old: &Arc<Volume>,
    new: &Arc<Volume>,
    fork: Option<&Registered>,
    begun: &snapshot::Begun,
) -> Result<Snapshot, VolumeError> {
    let mut place = shared.hold(&old.name).await;
    // Rights and quota as they are by now: nobody changes them while the place is held.
    // Nobody gives numbers of `new`, nor writes its row, until it is closed. It stands still before its turn is waited for, which one
    // that is being opened again, or cannot be, keeps.
    let slot = new.stand_still();
    let Slot::Open(db_of_new) = &slot else {
        new.go_on(slot);
        return Err(new.db().err().unwrap_or(VolumeError::ShuttingDown));
    };
    let (db_of_new, mut slot_of_new) = (db_of_new.clone(), Some(slot));
    let turn_of_new = new.turn.lock().await;
    let turn = old.turn.lock().await;
    let mut entry = old.registered.lock().with_id(new.id.clone());
    let given = new.state.lock().numbers;
    if let Some(fork) = fork {
        entry.format = entry.format.max(RUNS);
        let last = if given.end == 0 { fork.numbers_from } else { 0 };
        entry.numbers_past = entry.numbers_past.max(fork.numbers_past).max(last);
    }
    let entry = &entry;
    let db = match old.db() {
        Ok(db) => db,
        Err(error) => {
            slot_of_new.into_iter().for_each(|slot| new.go_on(slot));
            return Err(error);
        }
    };
    // From now on nothing changes: whoever comes has to come again.
    let slot = old.stand_still();
    let changed = async {
        let kept = snapshot::at_point(shared, old, &db, begun, None).await?;
        new.inherit(&db_of_new, old.inheritance(fork.map(|_| given), &kept), fork.is_some()).await?;
        if let Some(slot) = slot_of_new.take() {
            new.sharing.lock().close();
            new.end(slot).await?;
        }
        hayloft_crash::point("replace.ready");
        named::remove(&shared.store, &old.name, &old.id).await?;
        if let Err(error) = registry::update(&shared.store, &old.name, entry).await {
            // What it says now is what counts.
            match registry::read(&shared.store, &old.name).await {
                Ok(now) if now.id == entry.id => {}
                Ok(_) => return Err(error),
                Err(_) => return Err(VolumeError::Uncertain(Box::new(error))),
            }
        }
        hayloft_crash::point("replace.registered");
        Ok::<_, VolumeError>(kept)
    };
    let changed = changed.await;
    if let Some(slot) = slot_of_new {
        new.go_on(slot);
    }
    drop(turn_of_new);
    if let Err(error) = &changed
        && !is_uncertain(error)
    {
        old.go_on(slot);
        let registered = old.registered.lock().clone();
        if let Err(error) = named::keep(&shared.store, &old.name, &registered).await {
            tracing::warn!(volume = old.name, %error, "the name in a volume's folder is put there when it is opened next");
        }
        return changed;
    }
    // Whoever opens it next opens what the registry says.
    *place = None;
    drop(turn);
    if let Err(error) = old.retire(slot).await {
        tracing::warn!(volume = old.name, %error, "the database of a tree that was replaced does not close");
    }
    shared.leftovers.look_at(old.homes.first());
    drop(place);
    let kept = changed?;
    tracing::info!(volume = old.name, id = entry.id, kept = kept.shown(), "the volume has another tree");
    match shared.volume(&old.name).await {
        Ok(volume) => volume.await_moved().await,
        Err(error) => {
            tracing::warn!(volume = old.name, %error, "the volume has another tree, and does not open yet")
        }
    }
    Ok(kept)
}

impl Volume {
    /// What a database has to know that takes this one's place. `fork`: the numbers that a fork had left, if it is one.
    fn inheritance(&self, fork: Option<Numbers>, kept: &Snapshot) -> Inheritance {
        let window = self.registered.lock().numbers_from;
        let state = self.state.lock();
        let mut numbers = state.numbers;
        numbers.take_back(fork.unwrap_or_default());
        let ended = state.ended.clone();
        let (kept, kept_id) = (kept.shown(), kept.view.clone().unwrap_or_default());
        let moved = |(id, session): (&SessionId, &Session)| {
            let (kept, kept_id) = (kept.clone(), kept_id.clone());
            (*id, SessionRow { moved: true, kept, kept_id, ..session.row.clone() })
        };
        let sessions = state.sessions.iter().map(moved).collect();
        drop(state);
        Inheritance {
            history: self.history_row(),
            mark: self.order.last_mark(),
            numbers,
            window,
            ended,
            sessions,
        }
    }

    /// Writes down what it has to know of the volume in whose place it comes.
    async fn inherit(&self, db: &Db, from: Inheritance, is_fork: bool) -> Result<(), VolumeError> {
        let mut batch = Rows::new();
        let row = {
            let mut state = self.state.lock();
            if !is_fork {
                state.numbers = from.numbers;
            }
            // Should it not come to it, a fork goes on with numbers of its own.
            let heir = is_fork.then(|| NumbersRow::new(from.numbers, from.window));
            VolumeRow { heir, ..state.volume_row() }
        };
        batch.put(tables::VOLUME, row.encode_to_vec());
        batch.put(tables::HISTORY, from.history.encode_to_vec());
        let mark = from.mark.max(self.order.last_mark());
        batch.put(tables::MARK, self.journal.mark_row(mark).encode_to_vec());
        for (id, row) in &from.ended {
            batch.put(tables::ended(*id), row.encode_to_vec());
        }
        for (id, row) in &from.sessions {
            batch.put(tables::session(*id), row.encode_to_vec());
        }
        database::write_durably(db, batch).await?;
        // With that it is opened, and its tree is the same.
        self.shared.lately_named.moved(&self.id, self.order.tree_mark(), mark);
        Ok(())
    }
}
