//! Which history a store holds: a client that has seen a later state of it, or another one, is told.
//!
//! Everything that is written counts the volume's **mark** up, and each opening by a server has a random number and
//! notes the mark that it found. A client keeps the last opening and mark that it has heard of. They are part of what a
//! store holds if it knows the opening, and the next one did not find less: a store that was put back to an older copy
//! has either never heard of the opening, or has begun the next one earlier.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use prost::Message;

use crate::database::registry::random;
use crate::database::rows::Rows;
use crate::database::tables::{self, HistoryRow, MarkRow, Opening};
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::order::entry::SealKey;
use crate::volume::Volume;

/// Most openings that are remembered: who has not been heard of for longer is told that it is another history.
const OPENINGS_MAX: usize = 1024;

/// From so many openings before the present one entries can be brought back: who has been away for longer brings nothing.
const ENDED_MAX: usize = 16;

/// The openings of a volume that this server knows of.
#[derive(Debug, Default)]
pub(crate) struct History {
    openings: Vec<Opening>,
    /// The number of the present opening; 0: it could not be stored, and nobody is told of it.
    own: u64,
}

impl History {
    /// Where an opening stands among those that are remembered, and up to which mark of it all was durable when the next
    /// one began; `None` for the present one, and for one that is not among the last ones.
    fn ended(&self, opening: u64) -> Option<(usize, u64)> {
        let at = self.openings.iter().position(|known| known.id == opening)?;
        if at + ENDED_MAX < self.openings.len() {
            return None;
        }
        self.openings.get(at + 1).map(|next| (at, next.from))
    }

    /// Whether a client that has heard of this may go on with what the store holds.
    fn holds(&self, opening: u64, mark: u64, now: u64) -> bool {
        let Some(at) = self.openings.iter().position(|known| known.id == opening) else { return false };
        mark <= self.openings.get(at + 1).map_or(now, |next| next.from)
    }
}

impl Volume {
    /// Reads the history, and adds that the volume is opened. `false`: nobody else had it open since this server did.
    pub(crate) async fn open_history(&self, db: &Db) -> Result<bool, VolumeError> {
        let mark = match db.get(tables::MARK).await? {
            Some(row) => database::decode::<MarkRow>(row, "mark")?.mark,
            None => 0,
        };
        let mut openings = match db.get(tables::HISTORY).await? {
            Some(row) => database::decode::<HistoryRow>(row, "history")?.openings,
            None => Vec::new(),
        };
        let generation = self.packed.begin(db).await?;
        self.journal.begin(db, &self.id).await?;
        let (key, is_stored) = seal_key(db).await?;
        self.order.begin(mark, key);
        let own = self.history.lock().own;
        if own != 0 && openings.last().is_some_and(|last| last.id == own) {
            self.counted(mark);
            self.history.lock().openings = openings;
            return Ok(false);
        }
        // Connections of the opening before are never told marks of this one.
        *self.mark.lock() = Arc::new(AtomicU64::new(mark));
        let opening = Opening { id: random().max(1), from: mark };
        openings.push(opening);
        openings.drain(..openings.len().saturating_sub(OPENINGS_MAX));
        let mut batch = Rows::new();
        batch.put(tables::HISTORY, HistoryRow { openings: openings.clone() }.encode_to_vec());
        batch.put(tables::GENERATION, generation);
        let stored = match is_stored {
            true => database::write_durably(db, batch).await.map_err(VolumeError::from),
            false => Err(VolumeError::StoreFull),
        };
        let mut history = self.history.lock();
        match stored {
            Ok(()) => *history = History { openings, own: opening.id },
            // A full store can be opened, so that something can be deleted.
            Err(error) => {
                tracing::warn!(volume = self.name, %error, "clients will not notice if the store is put back");
                openings.pop();
                *history = History { openings, own: 0 };
            }
        }
        Ok(true)
    }

    /// The openings, as they are stored.
    pub(crate) fn history_row(&self) -> HistoryRow {
        HistoryRow { openings: self.history.lock().openings.clone() }
    }

    /// What a client that has a session is to remember: the opening; marks come with all messages.
    pub(crate) fn opening(&self) -> u64 {
        self.history.lock().own
    }

    /// How far the history is.
    pub(crate) fn mark(&self) -> u64 {
        self.mark.lock().load(Acquire)
    }

    /// Refuses a client that has seen what the store does not hold.
    pub(crate) fn check_history(&self, opening: u64, mark: u64) -> Result<(), VolumeError> {
        let is_held = opening == 0 || self.history.lock().holds(opening, mark, self.mark());
        if is_held { Ok(()) } else { Err(VolumeError::OtherHistory) }
    }

    /// See [`History::ended`].
    pub(crate) fn ended_opening(&self, opening: u64) -> Option<(usize, u64)> {
        self.history.lock().ended(opening)
    }

    /// Everything up to here is durable.
    pub(crate) fn counted(&self, mark: u64) {
        self.mark.lock().fetch_max(mark, AcqRel);
    }

    /// Where the mark is, for messages to say it.
    pub(crate) fn shared_mark(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.mark.lock())
    }
}

/// The key of the volume's seals, made when there is none, and whether it is stored. Without it nothing is answered before
/// it is durable.
async fn seal_key(db: &Db) -> Result<(SealKey, bool), VolumeError> {
    if let Some(row) = db.get(tables::SEAL_KEY).await? {
        let key = row.as_ref().try_into().map_err(|_| VolumeError::Damaged("key of the seals"))?;
        return Ok((key, true));
    }
    let key: SealKey = std::array::from_fn(|_| random() as u8);
    let mut batch = Rows::new();
    batch.put(tables::SEAL_KEY, key.to_vec());
    let stored = database::write_durably(db, batch).await;
    Ok((key, stored.inspect_err(|error| tracing::warn!(%error, "a key cannot be stored")).is_ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_holds_what_came_before_its_next_opening() {
        let opening = |id, from| Opening { id, from };
        let history = History { openings: vec![opening(7, 0), opening(8, 100), opening(9, 140)], own: 9 };
        assert!(history.holds(7, 100, 150) && history.holds(8, 140, 150) && history.holds(9, 150, 150));
        // It went on to 120 and 160 in another store than this one.
        assert!(!history.holds(7, 120, 150) && !history.holds(9, 160, 150));
        assert!(!history.holds(10, 1, 150), "it was opened in another store");
        assert_eq!((history.ended(7), history.ended(8)), (Some((0, 100)), Some((1, 140))));
        assert_eq!(
            (history.ended(9), history.ended(10)),
            (None, None),
            "the present one, and an unknown one"
        );
    }
}
