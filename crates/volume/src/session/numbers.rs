//! Inode numbers: each is given once.

use std::sync::Arc;

use hayloft_model::InoRange;
use prost::Message;
use slatedb::WriteBatch;

use crate::database::Db;
use crate::database::tables;
use crate::error::VolumeError;
use crate::volume::Volume;

/// Inode numbers that a session gets at its start.
pub(super) const FIRST_NUMBERS: u64 = 1 << 16;

/// Most inode numbers handed out at once.
const NUMBERS_MAX: u64 = 1 << 24;

impl Volume {
    /// More inode numbers for a session.
    pub(crate) async fn allocate(self: &Arc<Self>, count: u64) -> Result<InoRange, VolumeError> {
        let turn = self.turn.lock().await;
        let db = self.db()?;
        let (row, range) = {
            let mut state = self.state.lock();
            let range = InoRange { next: state.next_ino, end: state.next_ino + count.clamp(1, NUMBERS_MAX) };
            state.next_ino = range.end;
            (state.volume_row(), range)
        };
        let mut batch = WriteBatch::new();
        batch.put(tables::VOLUME, row.encode_to_vec());
        let ordered = self.order(&db, batch).await?;
        drop(turn);
        self.durable(&ordered).await?;
        Ok(range)
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
            let mut batch = WriteBatch::new();
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
