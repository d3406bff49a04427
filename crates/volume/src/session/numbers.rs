//! Inode numbers: each is given once.

use std::sync::Arc;

use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::sound::Unsound;
use hayloft_model::{Ino, InoRange, SessionId};
use hayloft_wire::{RecordMessage, record_message::Body};
use prost::Message;

use crate::database::Db;
use crate::database::rows::Rows;
use crate::database::tables;
use crate::error::VolumeError;
use crate::volume::{State, Volume};

/// Inode numbers that a session gets at its start: most sessions make few files, and what they do not use is nobody's any more.
pub(super) const FIRST_NUMBERS: u64 = 1 << 12;

/// Inode numbers that the server takes for what changes make, after the first ones.
const MORE_NUMBERS: u64 = 1 << 16;

/// Rows that are looked up at a time.
const LOOKUPS: usize = 16;

/// Most inode numbers handed out at once.
const NUMBERS_MAX: u64 = 1 << 24;

/// Ranges of numbers that one session has been given apart, since others were given some in between.
const RANGES_MAX: usize = 4096;

impl State {
    /// Notes that numbers are a session's. What ended sessions were given need not be known.
    pub(super) fn give(&mut self, range: InoRange, session: SessionId) -> Result<(), VolumeError> {
        if let Some((_, (end, last))) = self.given.iter_mut().next_back()
            && (*end, *last) == (range.next, session)
        {
            *end = range.end;
            return Ok(());
        }
        if self.given.len() >= self.given_looked + RANGES_MAX {
            let sessions = &self.sessions;
            self.given.retain(|_, (_, of)| sessions.contains_key(of));
            self.given_looked = self.given.len();
            if self.given.values().filter(|(_, of)| *of == session).count() >= RANGES_MAX {
                return Err(VolumeError::Limit {
                    what: "ranges of inode numbers for one session",
                    limit: RANGES_MAX,
                });
            }
        }
        self.given.insert(range.next, (range.end, session));
        Ok(())
    }
}

impl Volume {
    /// More inode numbers for a session.
    pub(crate) async fn allocate(
        self: &Arc<Self>,
        session: SessionId,
        count: u64,
    ) -> Result<InoRange, VolumeError> {
        self.give_durably(|state| {
            let range = state.numbers.take(count.clamp(1, NUMBERS_MAX));
            state.give(range, session)?;
            Ok(range)
        })
        .await
    }

    /// Inode numbers for a fork of this volume, if there are low ones left.
    pub(crate) async fn give_run(self: &Arc<Self>) -> Result<Option<(u64, u64)>, VolumeError> {
        self.give_durably(|state| Ok(state.numbers.take_run())).await
    }

    /// Takes numbers, and waits until it is durable that they are given.
    async fn give_durably<T>(
        self: &Arc<Self>,
        take: impl FnOnce(&mut State) -> Result<T, VolumeError>,
    ) -> Result<T, VolumeError> {
        let turn = self.turn.lock().await;
        let db = self.db()?;
        let (row, taken) = {
            let mut state = self.state.lock();
            let taken = take(&mut state)?;
            (state.volume_row(), taken)
        };
        let mut batch = Rows::new();
        batch.put(tables::VOLUME, row.encode_to_vec());
        let ordered = self.order(&db, batch).await?;
        drop(turn);
        self.durable(&ordered).await?;
        Ok(taken)
    }

    /// Refuses what a session makes under a number that it was not given: of nobody's yet, of the server's own, or of another
    /// session's that may use it still. Rows that are there already it may change, if it owns them.
    pub(crate) async fn check_numbers(
        &self,
        db: &Db,
        id: SessionId,
        records: &[RecordMessage],
    ) -> Result<(), VolumeError> {
        let mut of_others = Vec::new();
        {
            let state = self.state.lock();
            for record in records {
                let Some(Body::PutInode(row)) = &record.body else { continue };
                let ino = row.ino;
                if state.numbers.may_give(ino) {
                    let what = "a number that was not given to anybody";
                    return Err(Unsound { ino: Ino(ino), what }.into());
                }
                // Those above are other members' of the family: of a fork that has taken this volume's place there may be some.
                let is_above = ino >= state.numbers.next;
                let is_births = (state.births.next..state.births.end).contains(&ino);
                let given = state.given.range(..=ino).next_back();
                let is_of_another = given.is_some_and(|(_, (end, session))| {
                    ino < *end && *session != id && state.sessions.contains_key(session)
                });
                if is_above || is_births || is_of_another {
                    of_others.push(Ino(ino));
                }
            }
        }
        stream::iter(of_others)
            .map(|ino| async move {
                match db.get(tables::inode(ino)).await? {
                    Some(_) => Ok(()),
                    None => Err(Unsound { ino, what: "a number that was given to another one" }.into()),
                }
            })
            .buffer_unordered(LOOKUPS)
            .try_collect()
            .await
    }

    /// An inode number for what a change makes. It is never given again, also if the change is not durable when the
    /// server ends. The caller has the turn.
    pub(crate) async fn number_of_birth(self: &Arc<Self>, db: &Db) -> Result<InoRange, VolumeError> {
        let births = self.state.lock().births;
        if births.left() == 0 {
            let count = if births.end == 0 { FIRST_NUMBERS } else { MORE_NUMBERS };
            let (row, range) = {
                let mut state = self.state.lock();
                let range = state.numbers.take(count);
                (state.volume_row(), range)
            };
            let mut batch = Rows::new();
            batch.put(tables::VOLUME, row.encode_to_vec());
            self.write(db, batch).await?;
            self.state.lock().births = range;
        }
        let mut state = self.state.lock();
        let next = state.births.next;
        state.births.next += 1;
        Ok(InoRange { next, end: next + 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_numbers_are_bounded_for_each_session_and_those_of_ended_ones_go() {
        let mut state = State::default();
        let (own, other) = (SessionId(1), SessionId(2));
        for session in [own, other] {
            state.sessions.insert(session, crate::session::Session::found(&Default::default(), 0));
        }
        let mut next = 0;
        let mut give = |state: &mut State, session| {
            next += 10;
            state.give(InoRange { next: next - 10, end: next }, session)
        };
        for _ in 0..10 * RANGES_MAX {
            give(&mut state, own).unwrap();
        }
        assert_eq!(state.given.len(), 1, "those that follow one another are one");
        let refused = (0..10 * RANGES_MAX).find(|at| give(&mut state, [other, own][at % 2]).is_err());
        assert!(refused.is_some_and(|at| (RANGES_MAX..4 * RANGES_MAX).contains(&at)), "{refused:?}");
        // Others come and go.
        state.sessions.remove(&other);
        for session in 10..10 + 3 * RANGES_MAX as u64 {
            give(&mut state, SessionId(session)).unwrap();
        }
        assert!(state.given.len() < 4 * RANGES_MAX, "{}", state.given.len());
    }
}
