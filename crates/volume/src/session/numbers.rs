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
use crate::volume::Volume;

/// Inode numbers that a session gets at its start.
pub(super) const FIRST_NUMBERS: u64 = 1 << 16;

/// Rows that are looked up at a time.
const LOOKUPS: usize = 16;

/// Most inode numbers handed out at once.
const NUMBERS_MAX: u64 = 1 << 24;

impl Volume {
    /// More inode numbers for a session.
    pub(crate) async fn allocate(
        self: &Arc<Self>,
        session: SessionId,
        count: u64,
    ) -> Result<InoRange, VolumeError> {
        let turn = self.turn.lock().await;
        let db = self.db()?;
        let (row, range) = {
            let mut state = self.state.lock();
            let range = InoRange { next: state.next_ino, end: state.next_ino + count.clamp(1, NUMBERS_MAX) };
            state.next_ino = range.end;
            state.given.insert(range.next, (range.end, session));
            (state.volume_row(), range)
        };
        let mut batch = Rows::new();
        batch.put(tables::VOLUME, row.encode_to_vec());
        let ordered = self.order(&db, batch).await?;
        drop(turn);
        self.durable(&ordered).await?;
        Ok(range)
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
                if ino >= state.next_ino {
                    let what = "a number that was not given to anybody";
                    return Err(Unsound { ino: Ino(ino), what }.into());
                }
                let is_births = (state.births.next..state.births.end).contains(&ino);
                let given = state.given.range(..=ino).next_back();
                let is_of_another = given.is_some_and(|(_, (end, session))| {
                    ino < *end && *session != id && state.sessions.contains_key(session)
                });
                if is_births || is_of_another {
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
        let none_left = {
            let births = self.state.lock().births;
            births.next == births.end
        };
        if none_left {
            let (row, range) = {
                let mut state = self.state.lock();
                let range = InoRange { next: state.next_ino, end: state.next_ino + FIRST_NUMBERS };
                state.next_ino = range.end;
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
