//! Sessions that were ended without a word of their clients, and the sessions that take their places.
//!
//! A client that was cut off may come back later than its lease. It finds its session ended, and begins another one on
//! the same mount. For as long as an ended session is remembered, that one learns what was applied of the old one's log,
//! and the outcomes of changes that it had asked for are its own: they are executed once even so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hayloft_model::SessionId;
use hayloft_wire::Changed;
use prost::Message;
use slatedb::WriteBatch;

use crate::database::tables::{self, EndedRow, SessionRow};
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::sharing::{Progress, Sharing};
use crate::volume::{State, Volume};

/// How long ended sessions are remembered.
const KEPT_SECS: i64 = 7 * 24 * 3600;
/// Most ended sessions that are remembered.
const KEPT_MAX: usize = 4096;
/// How long a client is kept waiting for changes of its old session that are on their way to others; it comes again.
const CHANGES_PATIENCE: Duration = Duration::from_secs(10);
const CHANGES_PAUSE: Duration = Duration::from_millis(20);

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
    /// Adds to a batch that a session is over. Returns the sessions of which nothing is remembered any more.
    pub(crate) async fn put_end(
        &self,
        db: &Db,
        batch: &mut WriteBatch,
        id: SessionId,
        end: End,
    ) -> Result<Vec<SessionId>, VolumeError> {
        batch.delete(tables::session(id));
        let now_secs = self.shared.now().secs;
        let mut forgotten = outdated(&self.state.lock().ended, now_secs);
        if end == End::Goodbye {
            forgotten.push(id);
        } else {
            let row = ended_row(&self.state.lock(), id, end, now_secs);
            batch.put(tables::ended(id), row.encode_to_vec());
        }
        let snapshot = db.snapshot()?;
        for old in &forgotten {
            batch.delete(tables::ended(*old));
            let mut outcomes = database::scan(&snapshot, &tables::changes(*old)).await?;
            while let Some(found) = outcomes.next().await? {
                batch.delete(found.key);
            }
        }
        Ok(forgotten)
    }

    /// The batch is durable.
    pub(crate) fn ended(&self, id: SessionId, end: End, last_sequence: u64, forgotten: &[SessionId]) {
        let mut sharing = self.sharing.lock();
        let mut state = self.state.lock();
        if end != End::Goodbye {
            let row = EndedRow { last_sequence, ..ended_row(&state, id, end, self.shared.now().secs) };
            state.ended.insert(id, row);
        }
        for old in forgotten {
            state.ended.remove(old);
            sharing.estates.forget(*old);
            sharing.forget_changes(*old);
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
        let mut batch = WriteBatch::new();
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

    fn forget_changes(&mut self, session: SessionId) {
        self.changes.retain(|(of, _), _| *of != session);
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
