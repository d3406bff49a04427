//! What all connections together may take of the server's memory, and each by itself. `docs/operations.md` has the table.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a frame, of a batch that is not committed, or of answers, that need no room of all.
pub(crate) const FREE_BYTES: usize = 128 << 10;

/// Bytes of larger frames that arrive at a time, all connections together.
const FRAMES_BYTES: usize = 32 << 20;

/// Bytes of batches that are not committed and not in the store yet, all connections together.
pub(crate) const BATCHES_BYTES: usize = 64 << 20;

/// Bytes of answers that wait to be read, beyond one for each connection.
const ANSWERS_BYTES: usize = 64 << 20;

/// Bytes of requests that are worked on or wait, beyond [`ASKED_FREE`] of each connection, all connections together.
const ASKED_BYTES: usize = 32 << 20;

/// Bytes of requests of one connection that are worked on or wait, in any case.
pub(crate) const ASKED_FREE: usize = 128 << 10;

/// Requests of fewer bytes are not counted: their number is bounded.
const ASKED_SMALL: usize = 1 << 10;

/// Connections from which much is read at a time.
const EAGER: usize = 256;

/// Requests that wait for other sessions, beyond [`WAITING_FREE`] for each connection.
const WAITING: usize = 1 << 15;

/// Requests of one connection that may wait in any case.
const WAITING_FREE: usize = 64;

/// Requests of one connection that wait for other sessions at a time. They must not keep the socket from being read:
/// acknowledgements come by it.
const WAITING_MAX: usize = 1024;

/// Messages that wait to be read, all connections together; beyond it those end that have more than [`UNREAD_FREE`].
pub(crate) const UNREAD: usize = 1 << 17;

/// Messages that one connection may leave unread in any case.
pub(crate) const UNREAD_FREE: usize = 256;

/// Messages that one connection may leave unread at most.
pub(crate) const UNREAD_MAX: usize = 1 << 14;

/// Sessions that begin at a time.
const HELLOS: usize = 16;

/// Room is given by so many bytes.
const UNIT: usize = 1 << 10;

/// A part of a room, until it is dropped.
pub(crate) type Held = Option<OwnedSemaphorePermit>;

/// The rooms of a server.
pub(crate) struct Room {
    pub(crate) frames: Arc<Semaphore>,
    pub(crate) batches: Arc<Semaphore>,
    pub(crate) answers: Arc<Semaphore>,
    pub(crate) waiting: Arc<Semaphore>,
    pub(crate) asked: Arc<Semaphore>,
    pub(crate) eager: Arc<Semaphore>,
    pub(crate) hellos: Semaphore,
    /// Large messages are decoded one after the other: they take more than their bytes.
    pub(crate) decoding: Semaphore,
    /// Messages that wait to be read.
    pub(crate) unread: AtomicUsize,
}

/// Room for so many bytes.
pub(crate) fn units(bytes: usize) -> u32 {
    bytes.div_ceil(UNIT) as u32
}

impl Default for Room {
    fn default() -> Room {
        let room = |bytes| Arc::new(Semaphore::new(units(bytes) as usize));
        Room {
            frames: room(FRAMES_BYTES),
            batches: room(BATCHES_BYTES),
            answers: room(ANSWERS_BYTES),
            waiting: Arc::new(Semaphore::new(WAITING)),
            asked: room(ASKED_BYTES),
            eager: Arc::new(Semaphore::new(EAGER)),
            hellos: Semaphore::new(HELLOS),
            decoding: Semaphore::new(1),
            unread: AtomicUsize::new(0),
        }
    }
}

impl Room {
    /// A place for one more request that waits for other sessions, of a connection that has so many of them.
    ///
    /// # Errors
    /// The limit, where there is none.
    pub(crate) fn place_to_wait(&self, own: usize) -> Result<Held, usize> {
        match own {
            0..WAITING_FREE => Ok(None),
            WAITING_FREE..WAITING_MAX => {
                Arc::clone(&self.waiting).try_acquire_owned().map(Some).map_err(|_| WAITING)
            }
            _ => Err(WAITING_MAX),
        }
    }

    /// Room for what a request takes as long as it is worked on or waits: of its connection's own, else of all.
    ///
    /// # Errors
    /// The limit, where there is none.
    pub(crate) fn to_ask(&self, own: &Arc<Semaphore>, bytes: usize) -> Result<Held, usize> {
        if bytes < ASKED_SMALL {
            return Ok(None);
        }
        let of = |room: &Arc<Semaphore>| Arc::clone(room).try_acquire_many_owned(units(bytes)).ok();
        of(own).or_else(|| of(&self.asked)).map(Some).ok_or(ASKED_BYTES)
    }

    /// Bytes that are given out of all rooms.
    pub(crate) fn taken(&self) -> usize {
        let of = |room: &Semaphore, bytes: usize| bytes - (room.available_permits() * UNIT).min(bytes);
        of(&self.frames, FRAMES_BYTES)
            + of(&self.batches, BATCHES_BYTES)
            + of(&self.answers, ANSWERS_BYTES)
            + of(&self.asked, ASKED_BYTES)
    }

    /// Room for answers is short: who has some, and does not read them, is given up.
    pub(crate) fn is_short_for_answers(&self) -> bool {
        self.answers.available_permits() < units(ANSWERS_BYTES / 8) as usize
    }

    /// Room for bytes of a batch is short: who has some that can be in the store puts it there.
    pub(crate) fn is_short_for_batches(&self) -> bool {
        self.batches.available_permits() < units(BATCHES_BYTES / 8) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_requests_are_bounded_for_each_connection_and_for_all() {
        let room = Room::default();
        let own = || Arc::new(Semaphore::new(units(ASKED_FREE) as usize));
        let (one, other) = (own(), own());
        assert!(room.to_ask(&one, ASKED_SMALL - 1).unwrap().is_none());
        let kept: Vec<Held> = (0..).map_while(|_| room.to_ask(&one, 16 << 10).ok()).collect();
        assert_eq!(kept.len() * (16 << 10), ASKED_FREE + ASKED_BYTES);
        assert!(room.to_ask(&other, ASKED_FREE).is_ok_and(|held| held.is_some()), "who asks for little may");
        assert_eq!(room.to_ask(&other, ASKED_FREE + 1).err(), Some(ASKED_BYTES));
        assert_eq!(room.taken(), ASKED_BYTES);
        drop(kept);
        assert_eq!(room.taken(), 0);
        assert!(room.to_ask(&other, ASKED_FREE + 1).is_ok());
    }

    #[test]
    fn requests_that_wait_are_bounded_for_each_connection_and_for_all() {
        let room = Room::default();
        assert!(room.place_to_wait(WAITING_FREE).is_ok_and(|place| place.is_some()));
        assert_eq!(room.place_to_wait(WAITING_MAX).err(), Some(WAITING_MAX));
        let all: Vec<Held> = (0..WAITING).map(|_| room.place_to_wait(WAITING_FREE).unwrap()).collect();
        assert_eq!(room.place_to_wait(WAITING_FREE).err(), Some(WAITING));
        assert!(room.place_to_wait(WAITING_FREE - 1).is_ok(), "who has few waiting has a place");
        drop(all);
        assert!(room.place_to_wait(WAITING_FREE).is_ok());
    }
}
