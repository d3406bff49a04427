//! The lock table of a volume: who holds which lock of flock(2) or fcntl(2), and who waits for one.
//!
//! Pure: the server feeds it requests and ended sessions, and answers those who wait when
//! [`Locks::take_granted`] names them. The client keeps one of its own session's locks, to claim them again.
//!
//! The rules are those of Linux (`fs/locks.c`, fcntl_locking(2), flock(2)):
//! - Locks of fcntl are ranges of bytes. An owner's new lock replaces what it holds of that range; neighbours of one
//!   mode become one. An owner never conflicts with itself.
//! - A lock of flock covers the file. Changing its mode gives the old one up first, even when the new one then cannot
//!   be had.
//! - The two families do not see each other.
//! - What nobody holds is given at once, also past somebody who waits; those who wait are served in the order in which
//!   they came, each as soon as nothing held is in its way.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Ino, SessionId};

/// The last byte there can be: a lock up to it covers whatever will be appended.
pub const LAST_BYTE: u64 = i64::MAX as u64;

/// Which call a lock is of. The families do not see each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Family {
    /// fcntl(2): ranges.
    Posix,
    /// flock(2): whole files.
    Flock,
}

/// What a lock excludes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Mode {
    /// Writers (`F_RDLCK`, `LOCK_SH`).
    Shared,
    /// Everybody (`F_WRLCK`, `LOCK_EX`).
    Exclusive,
}

/// Who holds a lock: a process, or an open file, of a session's host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Owner {
    /// The session.
    pub session: SessionId,
    /// The number by which the session knows it.
    pub id: u64,
}

/// A lock, held or wanted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Lock {
    /// The file.
    pub ino: Ino,
    /// Of which call.
    pub family: Family,
    /// Whose.
    pub owner: Owner,
    /// First byte.
    pub start: u64,
    /// Last byte, [`LAST_BYTE`] for all there will ever be.
    pub end: u64,
    /// What it excludes.
    pub mode: Mode,
    /// The process that asked for it, as its host numbers it.
    pub pid: u32,
    /// It belongs to an open file (`F_OFD_SETLK`), and not to a process: no part in the search for deadlocks.
    pub of_file: bool,
}

impl Lock {
    fn key(&self) -> Key {
        (self.ino, self.family)
    }

    fn overlaps(&self, other: &Lock) -> bool {
        self.start <= other.end && other.start <= self.end
    }

    /// Whether the two cannot be held at once.
    pub fn conflicts(&self, other: &Lock) -> bool {
        self.key() == other.key()
            && self.owner != other.owner
            && self.overlaps(other)
            && (self.mode == Mode::Exclusive || other.mode == Mode::Exclusive)
    }

    fn touches(&self, other: &Lock) -> bool {
        self.start <= other.end.saturating_add(1) && other.start <= self.end.saturating_add(1)
    }

    /// Whether it can be one: a range, and of flock the whole file.
    pub fn is_valid(&self) -> bool {
        let whole = (self.start, self.end) == (0, LAST_BYTE);
        self.start <= self.end && self.end <= LAST_BYTE && (self.family == Family::Posix || whole)
    }
}

/// A request that waits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Wait(u64);

/// What a request has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It is set.
    Set,
    /// This one is in the way.
    Blocked(Lock),
    /// It waits, and will be among [`Locks::take_granted`].
    Waits(Wait),
    /// It would wait for somebody who waits for its owner.
    Deadlock,
}

type Key = (Ino, Family);

/// One family's locks of one file.
#[derive(Clone, Debug, Default)]
struct Queue {
    /// By their first byte; those of one owner neither overlap nor, in one mode, touch.
    held: Vec<Lock>,
    waiting: BTreeMap<Wait, Lock>,
}

impl Queue {
    fn obstacle(&self, lock: &Lock) -> Option<&Lock> {
        self.held.iter().find(|held| held.conflicts(lock))
    }

    /// Takes from an owner what it holds of a range; whether there was something.
    fn cut(&mut self, owner: Owner, start: u64, end: u64) -> bool {
        let hit = |lock: &Lock| lock.owner == owner && lock.start <= end && start <= lock.end;
        if !self.held.iter().any(hit) {
            return false;
        }
        let mut kept = Vec::with_capacity(self.held.len() + 1);
        for lock in self.held.drain(..) {
            if !hit(&lock) {
                kept.push(lock);
                continue;
            }
            if lock.start < start {
                kept.push(Lock { end: start - 1, ..lock });
            }
            if lock.end > end {
                kept.push(Lock { start: end + 1, ..lock });
            }
        }
        kept.sort_by_key(|lock| (lock.start, lock.owner));
        self.held = kept;
        true
    }

    /// Sets a lock that nothing is in the way of.
    fn put(&mut self, mut lock: Lock) {
        self.cut(lock.owner, lock.start, lock.end);
        self.held.retain(|held| {
            let joins = held.owner == lock.owner && held.mode == lock.mode && held.touches(&lock);
            if joins {
                lock.start = lock.start.min(held.start);
                lock.end = lock.end.max(held.end);
            }
            !joins
        });
        let at = self.held.partition_point(|held| (held.start, held.owner) < (lock.start, lock.owner));
        self.held.insert(at, lock);
    }
}

/// The locks of a volume.
#[derive(Clone, Debug, Default)]
pub struct Locks {
    queues: BTreeMap<Key, Queue>,
    /// Where a request waits, and for whom.
    waits: BTreeMap<Wait, (Key, Owner)>,
    last_wait: u64,
    granted: Vec<Wait>,
}

impl Locks {
    /// Sets a lock, says what is in the way, or waits.
    pub fn set(&mut self, lock: Lock, wait: bool) -> Answer {
        let queue = self.queues.entry(lock.key()).or_default();
        let own = |held: &Lock| held.owner == lock.owner;
        let mut freed = false;
        if lock.family == Family::Flock && queue.held.iter().any(|held| own(held) && held.mode != lock.mode) {
            freed = queue.cut(lock.owner, 0, LAST_BYTE);
        }
        let Some(obstacle) = queue.obstacle(&lock).copied() else {
            // Whoever waits for what the owner gives up by this must see it.
            freed |= lock.mode == Mode::Shared && queue.held.iter().any(own);
            queue.put(lock);
            if freed {
                self.wake(lock.key());
            }
            return Answer::Set;
        };
        if freed {
            self.wake(lock.key());
        }
        let answer = if !wait {
            Answer::Blocked(obstacle)
        } else if self.deadlocks(&lock) {
            Answer::Deadlock
        } else {
            self.last_wait += 1;
            let wait = Wait(self.last_wait);
            self.queues.entry(lock.key()).or_default().waiting.insert(wait, lock);
            self.waits.insert(wait, (lock.key(), lock.owner));
            return Answer::Waits(wait);
        };
        self.drop_if_empty(lock.key());
        answer
    }

    /// Notes a lock as held, whatever else is: for a copy of what a server has decided, in which the end of one lock
    /// may be noted later than the beginning of the next.
    pub fn note(&mut self, lock: Lock) {
        self.queues.entry(lock.key()).or_default().put(lock);
    }

    /// Gives up what the lock's owner holds of its range, whatever the mode.
    pub fn unset(&mut self, lock: &Lock) {
        self.free(lock.key(), lock.owner, lock.start, lock.end);
    }

    /// What would be in the way of a lock.
    pub fn test(&self, lock: &Lock) -> Option<Lock> {
        self.queues.get(&lock.key())?.obstacle(lock).copied()
    }

    /// A request waits no more; `false` when it does not wait (any more).
    pub fn cancel(&mut self, wait: Wait) -> bool {
        let Some((key, _)) = self.waits.remove(&wait) else { return false };
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.waiting.remove(&wait);
        }
        self.drop_if_empty(key);
        true
    }

    /// The requests that got their lock since the last time, in this order.
    pub fn take_granted(&mut self) -> Vec<Wait> {
        std::mem::take(&mut self.granted)
    }

    /// An owner gives up all that it holds of a file in one family.
    pub fn release(&mut self, ino: Ino, family: Family, owner: Owner) {
        self.free((ino, family), owner, 0, LAST_BYTE);
    }

    /// An owner is gone: it holds nothing and waits for nothing.
    pub fn end_owner(&mut self, owner: Owner) {
        self.end(|other| other == owner);
    }

    /// A session is gone.
    pub fn end_session(&mut self, session: SessionId) {
        self.end(|owner| owner.session == session);
    }

    /// A session says what it holds: that, nothing else, and it waits for nothing. Returns what it cannot have
    /// because somebody else has it by now.
    pub fn claim(&mut self, session: SessionId, locks: impl IntoIterator<Item = Lock>) -> Vec<Lock> {
        let freed = self.strike(|owner| owner.session == session);
        let mut refused = Vec::new();
        for lock in locks {
            let queue = self.queues.entry(lock.key()).or_default();
            if queue.obstacle(&lock).is_some() {
                refused.push(lock);
            } else {
                queue.put(lock);
            }
        }
        freed.into_iter().for_each(|key| self.wake(key));
        refused
    }

    /// All locks that are held, by file.
    pub fn held(&self) -> impl Iterator<Item = &Lock> {
        self.queues.values().flat_map(|queue| &queue.held)
    }

    /// All requests that wait, by file, in order.
    pub fn waiting(&self) -> impl Iterator<Item = (Wait, &Lock)> {
        self.queues.values().flat_map(|queue| queue.waiting.iter().map(|(wait, lock)| (*wait, lock)))
    }

    /// Sessions that wait for a lock of a file before who has come last, another one: they are in its way as soon as they have it.
    pub fn waiting_before_others(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.queues.values().flat_map(|queue| {
            let sessions = queue.waiting.values().map(|lock| lock.owner.session);
            let last = sessions.clone().next_back();
            sessions.filter(move |session| Some(*session) != last)
        })
    }

    /// How many locks a session holds.
    pub fn count(&self, session: SessionId) -> usize {
        self.held().filter(|lock| lock.owner.session == session).count()
    }

    /// Whether an owner holds anything of a file in one family.
    pub fn holds(&self, ino: Ino, family: Family, owner: Owner) -> bool {
        let queue = self.queues.get(&(ino, family));
        queue.is_some_and(|queue| queue.held.iter().any(|held| held.owner == owner))
    }

    fn free(&mut self, key: Key, owner: Owner, start: u64, end: u64) {
        if self.queues.get_mut(&key).is_some_and(|queue| queue.cut(owner, start, end)) {
            self.wake(key);
        }
    }

    fn end(&mut self, gone: impl Fn(Owner) -> bool) {
        let freed = self.strike(gone);
        freed.into_iter().for_each(|key| self.wake(key));
    }

    /// Removes owners everywhere; where they held something.
    fn strike(&mut self, gone: impl Fn(Owner) -> bool) -> Vec<Key> {
        self.waits.retain(|_, (_, owner)| !gone(*owner));
        let mut freed = Vec::new();
        self.queues.retain(|key, queue| {
            let held = queue.held.len();
            queue.held.retain(|lock| !gone(lock.owner));
            queue.waiting.retain(|_, lock| !gone(lock.owner));
            if queue.held.len() != held {
                freed.push(*key);
            }
            !queue.held.is_empty() || !queue.waiting.is_empty()
        });
        freed
    }

    /// Something was given up: whoever can go on does.
    fn wake(&mut self, key: Key) {
        let Some(queue) = self.queues.get_mut(&key) else { return };
        loop {
            let next = queue.waiting.iter().find(|(_, lock)| queue.obstacle(lock).is_none());
            // From the start each time: a lock that is given may stand for more than was held before.
            let Some((&wait, &lock)) = next else { break };
            queue.waiting.remove(&wait);
            queue.put(lock);
            self.waits.remove(&wait);
            self.granted.push(wait);
        }
        self.drop_if_empty(key);
    }

    fn drop_if_empty(&mut self, key: Key) {
        if self.queues.get(&key).is_some_and(|queue| queue.held.is_empty() && queue.waiting.is_empty()) {
            self.queues.remove(&key);
        }
    }

    /// Whether somebody whom the lock would wait for waits, over any number of others, for its owner.
    fn deadlocks(&self, lock: &Lock) -> bool {
        if lock.family == Family::Flock || lock.of_file {
            return false;
        }
        let mut seen = BTreeSet::new();
        let mut open = self.in_the_way(lock);
        while let Some(owner) = open.pop() {
            if owner == lock.owner {
                return true;
            }
            if seen.insert(owner) {
                for (key, _) in self.waits.values().filter(|(_, waiting)| *waiting == owner) {
                    let waiting = self.queues.get(key).into_iter().flat_map(|queue| queue.waiting.values());
                    for other in waiting.filter(|other| other.owner == owner && !other.of_file) {
                        open.extend(self.in_the_way(other));
                    }
                }
            }
        }
        false
    }

    /// The owners of what is in the way of a lock of fcntl.
    fn in_the_way(&self, lock: &Lock) -> Vec<Owner> {
        if lock.family == Family::Flock {
            return Vec::new();
        }
        let held = self.queues.get(&lock.key()).into_iter().flat_map(|queue| &queue.held);
        held.filter(|held| held.conflicts(lock)).map(|held| held.owner).collect()
    }
}

#[cfg(test)]
#[path = "locks_tests.rs"]
mod tests;
