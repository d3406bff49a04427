//! Sessions that were ended without a word of their clients, and the sessions that take their places.
//!
//! A client that was cut off may come back later than its lease. It finds its session ended, and begins another one on
//! the same mount. For as long as an ended session is remembered, that one learns what was applied of the old one's log,
//! and the outcomes of changes that it had asked for are its own: they are executed once even so.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hayloft_model::{Ino, SessionId};
use hayloft_wire::{Changed, InodeRowMessage};
use prost::Message;

use crate::database::rows::Rows;
use crate::database::tables::{self, EndedRow, SessionRow};
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::sharing::{Progress, Sharing};
use crate::volume::{State, Volume};

/// How long ended sessions are remembered.
const KEPT_SECS: i64 = 7 * 24 * 3600;
/// Most ended sessions that are remembered.
const KEPT_MAX: usize = 4096;
/// How long a client is kept waiting for changes of its old session that are on their way to others; it comes again.
const CHANGES_PATIENCE: Duration = Duration::from_secs(10);
const CHANGES_PAUSE: Duration = Duration::from_millis(20);
/// How often to look whether clients know of another tree.
const MOVED_PAUSE: Duration = Duration::from_millis(2);

/// Why a session ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// Its client says goodbye.
    Goodbye,
    /// It is dead or silent, or cannot go on; its mount may come back with another one.
    Lost,
    /// An administrator wants it to stop.
    ByHand,
}

/// An inode without a name that a session has open which ends.
struct Orphan {
    ino: Ino,
    /// Others use it as well; they have, or get, orphan rows of their own.
    is_used: bool,
    /// Others who may use it, and have not said so yet.
    heirs: Vec<SessionId>,
}

/// Sessions that were ended, as the tables have them.
pub(crate) type Ended = BTreeMap<SessionId, EndedRow>;

/// Those that are remembered long enough.
fn outdated(ended: &Ended, now_secs: i64) -> Vec<SessionId> {
    let mut by_time: Vec<(i64, SessionId)> = ended.iter().map(|(id, row)| (row.ended_secs, *id)).collect();
    by_time.sort_unstable();
    let excess = by_time.len().saturating_sub(KEPT_MAX);
    let is_old = |at: usize, secs: i64| at < excess || now_secs.saturating_sub(secs) > KEPT_SECS;
    by_time.iter().enumerate().filter(|(at, (secs, _))| is_old(*at, *secs)).map(|(_, (_, id))| *id).collect()
}

/// What is remembered of a session.
fn ended_row(state: &State, id: SessionId, end: End, ended_secs: i64) -> EndedRow {
    let row = state.sessions.get(&id).map(|found| found.row.clone()).unwrap_or_default();
    let SessionRow { last_sequence, peer, token, .. } = row;
    EndedRow { last_sequence, ended_secs, by_hand: end == End::ByHand, peer, token }
}

impl Volume {
    /// Ends a session: what nobody else has open without a name is deleted, what it held is free. The caller has the
    /// turn.
    pub(crate) async fn end_session(
        self: &Arc<Self>,
        db: &Db,
        id: SessionId,
        end: End,
    ) -> Result<(), VolumeError> {
        let orphans = match self.orphans_of(id) {
            Some(orphans) => orphans,
            // Whoever wants it ended relies on that.
            None => return self.durable(&self.order.last(db.clone())).await,
        };
        let mut batch = Rows::new();
        let (mut deleted, mut inherited) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        for Orphan { ino, is_used, heirs } in orphans {
            batch.delete(tables::orphan(id, ino));
            let Some(row) = db.get(tables::inode(ino)).await? else { continue };
            let row = database::decode::<InodeRowMessage>(row, "inode")?;
            if row.nlink > 0 {
                continue;
            }
            heirs.iter().for_each(|heir| batch.put(tables::orphan(*heir, ino), vec![1]));
            if !is_used && heirs.is_empty() {
                // It left the usage when it lost its name.
                batch.delete(tables::inode(ino));
                bytes += row.allocated;
                deleted.push(ino);
            }
            inherited.push((ino, heirs));
        }
        let forgotten = self.put_end(&mut batch, &[id], end);
        self.write(db, batch).await?;
        {
            let mut state = self.state.lock();
            state.dead_bytes += bytes as i64;
            for (ino, heirs) in &inherited {
                for heir in heirs {
                    state.sessions.get_mut(heir).map(|session| session.orphans.insert(*ino));
                }
            }
        }
        {
            let mut sharing = self.sharing.lock();
            inherited.iter().for_each(|(ino, heirs)| sharing.uses.keep(*ino, heirs));
            deleted.iter().for_each(|ino| sharing.grants.forget(*ino));
        }
        self.forget_ended(&forgotten);
        let owned = match end {
            End::Lost => self.sharing.lock().grants.owned_by(id),
            _ => Vec::new(),
        };
        self.is_over(id, end, owned);
        self.settle_uses();
        tracing::info!(volume = self.name, session = %id, orphans = deleted.len(), "the session has ended");
        Ok(())
    }

    /// Ends sessions, all together that have nothing open without a name. The caller has the turn.
    pub(crate) async fn end_all(
        self: &Arc<Self>,
        db: &Db,
        ids: &[SessionId],
        end: End,
    ) -> Result<(), VolumeError> {
        let has_orphans = |id: &SessionId| {
            self.state.lock().sessions.get(id).is_some_and(|session| !session.orphans.is_empty())
        };
        let (single, together): (Vec<SessionId>, Vec<SessionId>) = ids.iter().partition(|id| has_orphans(id));
        if !together.is_empty() {
            self.end_sessions(db, &together, end).await?;
        }
        for id in single {
            self.end_session(db, id, end).await?;
        }
        Ok(())
    }

    /// Ends sessions that have nothing open without a name, all together: the store is waited for once. The caller has the turn.
    pub(crate) async fn end_sessions(
        self: &Arc<Self>,
        db: &Db,
        ids: &[SessionId],
        end: End,
    ) -> Result<(), VolumeError> {
        let mut batch = Rows::new();
        let forgotten = self.put_end(&mut batch, ids, end);
        self.write(db, batch).await?;
        let owners = match end {
            End::Lost => self.sharing.lock().grants.owners(),
            _ => HashSet::new(),
        };
        self.are_over(ids, end, &owners, &forgotten);
        Ok(())
    }

    /// Ends sessions that own nothing, have nothing open without a name and no connection. Nobody gets anything of theirs, so that need not be
    /// durable before others go on; who comes back for one of them hears it when it is ([`Volume::hello`]). The caller has the turn.
    pub(crate) async fn end_bare(
        self: &Arc<Self>,
        db: &Db,
        ids: &[SessionId],
    ) -> Result<Ordered, VolumeError> {
        let mut batch = Rows::new();
        let forgotten = self.put_end(&mut batch, ids, End::Lost);
        let place = self.order(db, batch).await?;
        self.are_over(ids, End::Lost, &HashSet::new(), &forgotten);
        Ok(place)
    }

    /// That sessions are over, all together, counts from now on; `owners` are those that own something.
    fn are_over(
        self: &Arc<Self>,
        ids: &[SessionId],
        end: End,
        owners: &HashSet<SessionId>,
        forgotten: &[SessionId],
    ) {
        self.forget_ended(forgotten);
        for id in ids {
            let owned = match owners.contains(id) {
                true => self.sharing.lock().grants.owned_by(*id),
                false => Vec::new(),
            };
            self.is_over(*id, end, owned);
            tracing::info!(volume = self.name, session = %id, "the session has ended");
        }
        self.settle_uses();
    }

    /// That a session is over has its place in the order, and is durable where it had something; what it has owned until then.
    fn is_over(&self, id: SessionId, end: End, owned: Vec<Ino>) {
        let now_ms = self.shared.uptime_ms();
        let hang_up = {
            let (mut sharing, mut state) = (self.sharing.lock(), self.state.lock());
            if end != End::Goodbye {
                let row = ended_row(&state, id, end, self.shared.now().secs);
                state.ended.insert(id, row);
            }
            if end == End::Lost {
                sharing.estates.leave(id, owned);
            }
            sharing.end(id, now_ms);
            state.sessions.remove(&id).map(|session| session.hang_up)
        };
        if let Some(hang_up) = hang_up {
            hang_up.notify_one();
        }
        self.locks.end_session(id);
    }

    /// What a session has open without a name; `None` when there is no such session.
    fn orphans_of(&self, id: SessionId) -> Option<Vec<Orphan>> {
        let (sharing, state) = (self.sharing.lock(), self.state.lock());
        let session = state.sessions.get(&id)?;
        let others = || state.sessions.iter().filter(|(other, _)| **other != id);
        let unclaimed = sharing.grants.unclaimed();
        let orphans = session.orphans.iter().map(|ino| Orphan {
            ino: *ino,
            is_used: !sharing.uses.others(id, *ino).is_empty()
                || others().any(|(_, other)| other.orphans.contains(ino)),
            heirs: others()
                .map(|(other, _)| *other)
                .filter(|other| sharing.uses.is_open(*ino) || unclaimed.contains(other))
                .collect(),
        });
        Some(orphans.collect())
    }

    /// Adds to a batch that sessions are over. Returns those of which nothing is remembered any more.
    fn put_end(&self, batch: &mut Rows, ids: &[SessionId], end: End) -> Vec<SessionId> {
        let now_secs = self.shared.now().secs;
        let mut forgotten = outdated(&self.state.lock().ended, now_secs);
        for id in ids {
            batch.delete(tables::session(*id));
            if end == End::Goodbye {
                forgotten.push(*id);
            } else {
                let row = ended_row(&self.state.lock(), *id, end, now_secs);
                batch.put(tables::ended(*id), row.encode_to_vec());
            }
        }
        let sharing = self.sharing.lock();
        for old in &forgotten {
            batch.delete(tables::ended(*old));
            sharing.outcomes_of(*old).for_each(|request| batch.delete(tables::change(*old, request)));
        }
        forgotten
    }

    /// Nothing is remembered any more of these.
    fn forget_ended(&self, forgotten: &[SessionId]) {
        let (mut sharing, mut state) = (self.sharing.lock(), self.state.lock());
        for old in forgotten {
            state.ended.remove(old);
            sharing.estates.forget(*old);
            sharing.forget_changes(*old);
        }
    }

    /// A session that is of a tree in whose place this one came; `None` for all others.
    pub(crate) fn moved(&self, session: SessionId) -> Option<SessionRow> {
        let state = self.state.lock();
        state.sessions.get(&session).filter(|found| found.row.moved).map(|found| found.row.clone())
    }

    /// Waits until the clients of the tree in whose place this one came know of it, or their leases are over.
    pub(crate) async fn await_moved(&self) {
        let begun = tokio::time::Instant::now();
        let longest = || {
            let state = self.state.lock();
            let moved = state.sessions.values().filter(|session| session.row.moved);
            moved.map(|session| Duration::from_millis(session.lease_ms(&self.shared.config))).max()
        };
        while longest().is_some_and(|lease| begun.elapsed() < lease + CHANGES_PAUSE) {
            tokio::time::sleep(MOVED_PAUSE).await;
        }
    }

    /// Why a session that is not known any more is not resumed.
    pub(crate) fn why_over(&self, session: SessionId) -> VolumeError {
        match self.state.lock().ended.get(&session) {
            Some(row) if row.by_hand => VolumeError::Evicted(session),
            Some(row) => VolumeError::SessionOver { session, last_sequence: row.last_sequence },
            None => VolumeError::SessionEnded(session),
        }
    }

    /// Waits until no change of an ended session is on its way to others: its client counts it as done when it hears
    /// the outcome.
    pub(crate) async fn await_changes(&self, session: SessionId) -> Result<(), VolumeError> {
        let begun = tokio::time::Instant::now();
        while self.sharing.lock().is_changing(session) {
            if begun.elapsed() > CHANGES_PATIENCE {
                return Err(VolumeError::Settling);
            }
            tokio::time::sleep(CHANGES_PAUSE).await;
        }
        Ok(())
    }

    /// A new session takes the place of an ended one: the outcomes of its changes are the new one's from now on.
    /// `false`: nothing is known of the old one. The caller has the turn.
    pub(crate) async fn replace(
        self: &Arc<Self>,
        db: &Db,
        old: SessionId,
        new: SessionId,
    ) -> Result<bool, VolumeError> {
        match self.state.lock().ended.get(&old) {
            Some(row) if row.by_hand => return Err(VolumeError::Evicted(old)),
            Some(_) => {}
            None => return Ok(false),
        }
        let mut batch = Rows::new();
        let snapshot = db.snapshot()?;
        let mut outcomes = Vec::new();
        let mut found = database::scan(&snapshot, &tables::changes(old)).await?;
        while let Some(row) = found.next().await? {
            let request =
                tables::second_number_in(&row.key).ok_or(VolumeError::Damaged("key of a change"))?;
            batch.delete(row.key);
            batch.put(tables::change(new, request), row.value.clone());
            outcomes.push((request, database::decode::<Changed>(row.value, "outcome of a change")?));
        }
        if outcomes.is_empty() {
            return Ok(true);
        }
        self.write(db, batch).await?;
        let mut sharing = self.sharing.lock();
        sharing.forget_changes(old);
        for (request, outcome) in outcomes {
            sharing.changes.insert((new, request), Progress::Done(outcome));
        }
        Ok(true)
    }
}

impl Sharing {
    /// Whether a change of the session is under way.
    fn is_changing(&self, session: SessionId) -> bool {
        let mut changes = self.changes.range((session, 0)..=(session, u64::MAX));
        changes.any(|(_, progress)| matches!(progress, Progress::UnderWay))
    }

    /// Which of its changes the tables may have outcomes of.
    fn outcomes_of(&self, session: SessionId) -> impl Iterator<Item = u64> {
        let known = self.changes.range((session, 0)..=(session, u64::MAX)).map(|((_, request), _)| *request);
        known.chain(self.forgotten.get(&session).into_iter().flatten().copied())
    }

    fn forget_changes(&mut self, session: SessionId) {
        let known: Vec<_> =
            self.changes.range((session, 0)..=(session, u64::MAX)).map(|(key, _)| *key).collect();
        known.iter().for_each(|key| drop(self.changes.remove(key)));
        self.forgotten.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_ends_are_forgotten_and_there_are_not_too_many() {
        let row = |ended_secs| EndedRow { last_sequence: 1, ended_secs, ..EndedRow::default() };
        let mut ended: Ended = [(SessionId(1), row(0)), (SessionId(2), row(KEPT_SECS))].into();
        assert_eq!(outdated(&ended, KEPT_SECS + 1), [SessionId(1)]);
        ended.extend((10..10 + KEPT_MAX as u64).map(|id| (SessionId(id), row(KEPT_SECS + 1))));
        assert_eq!(outdated(&ended, KEPT_SECS), [SessionId(1), SessionId(2)]);
    }
}
