//! The volume's order. Everything that is written gets the next number, its mark (`history`), and is what readers find from
//! then on; it becomes durable in groups: one flush at a time takes all that has gathered since the one before. The log
//! is flushed in order, so what is durable is always a prefix.

pub(crate) mod history;

use std::sync::Arc;

use parking_lot::Mutex;
use prost::Message;
use slatedb::{CloseReason, Db, ErrorKind, WriteBatch, WriteHandle};

use crate::database::tables::{self, MarkRow};
use crate::error::VolumeError;
use crate::volume::Volume;

/// A place in the order.
#[derive(Clone)]
pub(crate) struct Ordered {
    /// It counts for this opening of the database: when that has failed, numbers that were not durable are given anew.
    db: Db,
    opening: u64,
    number: u64,
}

#[derive(Default)]
pub(crate) struct Order {
    state: Mutex<State>,
    /// One flush at a time.
    flushing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    opening: u64,
    /// The last number that was given.
    last: u64,
    /// The last one that was written.
    written: Option<(u64, WriteHandle)>,
}

impl Order {
    /// A database was opened that is so far.
    pub(crate) fn begin(&self, mark: u64) {
        let mut state = self.state.lock();
        *state = State { opening: state.opening + 1, last: mark, written: None };
    }

    /// The place of all that has one.
    pub(crate) fn last(&self, db: Db) -> Ordered {
        let state = self.state.lock();
        Ordered { db, opening: state.opening, number: state.last }
    }

    fn next(&self, db: &Db) -> Ordered {
        let mut state = self.state.lock();
        state.last += 1;
        Ordered { db: db.clone(), opening: state.opening, number: state.last }
    }

    fn written(&self, place: &Ordered, handle: WriteHandle) {
        let mut state = self.state.lock();
        if state.opening == place.opening {
            state.written = Some((place.number, handle));
        }
    }

    /// Whether the database of a place is open still.
    fn is_of_now(&self, place: &Ordered) -> bool {
        self.state.lock().opening == place.opening
    }

    /// What the next flush makes durable. `None`: the database is another one.
    fn gathered(&self, place: &Ordered) -> Option<(u64, WriteHandle)> {
        let state = self.state.lock();
        state.written.clone().filter(|_| state.opening == place.opening)
    }
}

impl Volume {
    /// Gives a batch the next place: readers find it. The caller has the turn.
    ///
    /// # Errors
    /// The database failed. Whether the batch is there is known when it is open again.
    pub(crate) async fn order(
        self: &Arc<Self>,
        db: &Db,
        mut batch: WriteBatch,
    ) -> Result<Ordered, VolumeError> {
        let place = self.order.next(db);
        batch.put(tables::MARK, MarkRow { mark: place.number }.encode_to_vec());
        let handle = db.write(batch).await.map_err(|error| self.write_failed(error))?;
        self.order.written(&place, handle);
        Ok(place)
    }

    /// Waits until everything up to a place is durable.
    ///
    /// # Errors
    /// As [`Volume::order`].
    pub(crate) async fn durable(self: &Arc<Self>, place: &Ordered) -> Result<(), VolumeError> {
        let _one = self.order.flushing.lock().await;
        if self.order.is_of_now(place) && self.mark() >= place.number {
            return Ok(());
        }
        let gathered = self.order.gathered(place);
        let (upto, handle) = gathered.ok_or_else(|| VolumeError::Reopening("it had failed".to_owned()))?;
        // Only the handle says that another server has opened the database meanwhile.
        let flushed = async {
            place.db.flush().await?;
            handle.await_durable().await
        };
        flushed.await.map_err(|error| self.write_failed(error))?;
        self.counted(upto);
        Ok(())
    }

    /// Orders a batch and waits until it is durable, and with it all that came before. The caller has the turn.
    ///
    /// # Errors
    /// As [`Volume::order`].
    pub(crate) async fn write(self: &Arc<Self>, db: &Db, batch: WriteBatch) -> Result<(), VolumeError> {
        let place = self.order(db, batch).await?;
        self.durable(&place).await
    }

    /// The database is closed and opened again, and what it holds then is the truth.
    fn write_failed(self: &Arc<Self>, error: slatedb::Error) -> VolumeError {
        self.database_failed(&error);
        match error.kind() {
            ErrorKind::Closed(CloseReason::Fenced) => VolumeError::Fenced,
            _ => error.into(),
        }
    }
}
