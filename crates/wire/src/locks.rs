//! Locks to and from messages.

use hayloft_model::locks::{Family, Lock, Mode, Owner};
use hayloft_model::{Ino, SessionId};

use crate::{InvalidMessage, LockMessage};

/// The kinds of a [`LockMessage`], with the numbers of `fcntl.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum LockKind {
    /// F_RDLCK.
    Read = 0,
    /// F_WRLCK.
    Write = 1,
    /// F_UNLCK.
    Unlock = 2,
}

impl LockKind {
    /// What a mode is called here.
    pub fn of(mode: Mode) -> LockKind {
        match mode {
            Mode::Shared => LockKind::Read,
            Mode::Exclusive => LockKind::Write,
        }
    }
}

impl LockMessage {
    /// The message for a lock, or for giving up its range.
    pub fn new(lock: &Lock, kind: LockKind) -> LockMessage {
        LockMessage {
            ino: lock.ino.0,
            owner: lock.owner.id,
            start: lock.start,
            end: lock.end,
            kind: kind as u32,
            pid: lock.pid,
            flock: lock.family == Family::Flock,
            of_file: lock.of_file,
        }
    }

    /// The lock of a session that is meant, and whether it is to be set: `false` gives its range up.
    ///
    /// # Errors
    /// No such kind, or no such range.
    pub fn lock(&self, session: SessionId) -> Result<(Lock, bool), InvalidMessage> {
        let mode = match self.kind {
            0 => Some(Mode::Shared),
            1 => Some(Mode::Exclusive),
            2 => None,
            _ => return Err(InvalidMessage { what: "kind of a lock" }),
        };
        let lock = Lock {
            ino: Ino(self.ino),
            family: if self.flock { Family::Flock } else { Family::Posix },
            owner: Owner { session, id: self.owner },
            start: self.start,
            end: self.end,
            mode: mode.unwrap_or(Mode::Shared),
            pid: self.pid,
            of_file: self.of_file,
        };
        if !lock.is_valid() {
            return Err(InvalidMessage { what: "range of a lock" });
        }
        Ok((lock, mode.is_some()))
    }
}
