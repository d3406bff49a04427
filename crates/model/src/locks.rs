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

mod held;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use crate::locks::held::Held;
use crate::{Ino, SessionId};

/// The last byte there can be: a lock up to it covers whatever will be appended.
pub const LAST_BYTE: u64 = i64::MAX as u64;

/// Most locks that the search for a deadlock looks at: what is farther away is not found. (Linux looks at ten owners.)
const SEARCH_MAX: usize = 1 << 14;

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

impl Owner {
    const MIN: Owner = Owner { session: SessionId(0), id: 0 };
    const MAX: Owner = Owner { session: SessionId(u64::MAX), id: u64::MAX };

    /// All owners of a session.
    fn all_of(session: SessionId) -> RangeInclusive<Owner> {
        Owner { session, ..Owner::MIN }..=Owner { session, ..Owner::MAX }
    }
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
    held: Held,
    waiting: BTreeMap<Wait, Lock>,
}

impl Queue {
    fn obstacle(&self, lock: &Lock) -> Option<&Lock> {
        self.held.obstacle(lock)
    }
}

/// The locks of a volume.
#[derive(Clone, Debug, Default)]
pub struct Locks {
    queues: BTreeMap<Key, Queue>,
    /// Where a request waits, and for whom.
    waits: BTreeMap<Wait, (Key, Owner)>,
    /// The same by owner.
    waits_of: BTreeSet<(Owner, Wait)>,
    /// How many locks each session holds that holds any, and all together.
    counts: BTreeMap<SessionId, usize>,
    total: usize,
    last_wait: u64,
    granted: Vec<Wait>,
}

impl Locks {
    /// Sets a lock, says what is in the way, or waits.
    pub fn set(&mut self, lock: Lock, wait: bool) -> Answer {
        let (key, session) = (lock.key(), lock.owner.session);
        let of_owner = |queue: &Queue| queue.held.of(lock.owner).any(|held| held.mode != lock.mode);
        let mut freed = false;
        if lock.family == Family::Flock && self.queues.get(&key).is_some_and(of_owner) {
            freed = self.change(key, session, |held| held.cut(lock.owner, 0, LAST_BYTE));
        }
        let Some(obstacle) = self.test(&lock) else {
            // Whoever waits for what the owner gives up by this must see it.
            freed |= self.change(key, session, |held| held.put(lock)) && lock.mode == Mode::Shared;
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
            self.waits_of.insert((lock.owner, wait));
            return Answer::Waits(wait);
        };
        self.drop_if_empty(lock.key());
        answer
    }

    /// Notes a lock as held, whatever else is: for a copy of what a server has decided, in which the end of one lock
    /// may be noted later than the beginning of the next.
    pub fn note(&mut self, lock: Lock) {
        self.change(lock.key(), lock.owner.session, |held| held.put(lock));
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
        let Some((key, owner)) = self.waits.remove(&wait) else { return false };
        self.waits_of.remove(&(owner, wait));
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
        self.end(owner..=owner);
    }

    /// A session is gone.
    pub fn end_session(&mut self, session: SessionId) {
        self.end(Owner::all_of(session));
    }

    /// The requests of a session that wait.
    pub fn waits_of(&self, session: SessionId) -> impl Iterator<Item = Wait> + '_ {
        self.waits_among(&Owner::all_of(session))
    }

    fn waits_among<'s>(&'s self, owners: &RangeInclusive<Owner>) -> impl Iterator<Item = Wait> + use<'s> {
        let range = (*owners.start(), Wait(0))..=(*owners.end(), Wait(u64::MAX));
        self.waits_of.range(range).map(|(_, wait)| *wait)
    }

    /// A session says what it holds: that, nothing else, and it waits for nothing. Returns what it cannot have
    /// because somebody else has it by now.
    pub fn claim(&mut self, session: SessionId, locks: impl IntoIterator<Item = Lock>) -> Vec<Lock> {
        let freed = self.strike(Owner::all_of(session));
        let mut refused = Vec::new();
        for lock in locks {
            if self.test(&lock).is_some() {
                refused.push(lock);
            } else {
                self.note(lock);
            }
        }
        freed.into_iter().for_each(|key| self.wake(key));
        refused
    }

    /// All locks that are held, by file.
    pub fn held(&self) -> impl Iterator<Item = &Lock> {
        self.queues.values().flat_map(|queue| queue.held.iter())
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
        self.counts.get(&session).copied().unwrap_or_default()
    }

    /// How many all sessions hold.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Whether to give up a range would make two locks of one.
    pub fn splits(&self, range: &Lock) -> bool {
        let queue = self.queues.get(&range.key());
        queue.is_some_and(|queue| queue.held.splits(range.owner, range.start, range.end))
    }

    /// Whether an owner holds anything of a file in one family.
    pub fn holds(&self, ino: Ino, family: Family, owner: Owner) -> bool {
        let queue = self.queues.get(&(ino, family));
        queue.is_some_and(|queue| queue.held.of(owner).next().is_some())
    }

    fn free(&mut self, key: Key, owner: Owner, start: u64, end: u64) {
        if self.queues.contains_key(&key)
            && self.change(key, owner.session, |held| held.cut(owner, start, end))
        {
            self.wake(key);
        }
    }

    /// Changes what a session holds of a file.
    fn change<T>(&mut self, key: Key, session: SessionId, change: impl FnOnce(&mut Held) -> T) -> T {
        let held = &mut self.queues.entry(key).or_default().held;
        let before = held.len();
        let done = change(held);
        let (more, fewer) = (held.len().saturating_sub(before), before.saturating_sub(held.len()));
        self.total = self.total + more - fewer;
        let count = self.counts.entry(session).or_default();
        *count = *count + more - fewer;
        if *count == 0 {
            self.counts.remove(&session);
        }
        done
    }

    fn end(&mut self, owners: RangeInclusive<Owner>) {
        let freed = self.strike(owners);
        freed.into_iter().for_each(|key| self.wake(key));
    }

    /// Removes owners of one session everywhere; where they held something. What waits is found by its owner, what is held by looking at all files:
    /// most sessions that end hold nothing.
    fn strike(&mut self, owners: RangeInclusive<Owner>) -> Vec<Key> {
        let waits: Vec<Wait> = self.waits_among(&owners).collect();
        for wait in waits {
            self.cancel(wait);
        }
        let session = owners.start().session;
        let Some(count) = self.counts.get_mut(&session) else { return Vec::new() };
        let (mut freed, total) = (Vec::new(), &mut self.total);
        self.queues.retain(|key, queue| {
            let gone = queue.held.strike(&owners);
            *count -= gone;
            *total -= gone;
            if gone > 0 {
                freed.push(*key);
            }
            !queue.held.is_empty() || !queue.waiting.is_empty()
        });
        if *count == 0 {
            self.counts.remove(&session);
        }
        freed
    }

    /// Something was given up: whoever can go on does.
    fn wake(&mut self, key: Key) {
        let mut from = Wait(0);
        loop {
            let Some(queue) = self.queues.get_mut(&key) else { return };
            let Some((&wait, &lock)) = queue.waiting.range(from..).next() else { break };
            from = Wait(wait.0 + 1);
            if queue.obstacle(&lock).is_some() {
                continue;
            }
            queue.waiting.remove(&wait);
            if self.change(key, lock.owner.session, |held| held.put(lock)) {
                // From the start again: it may stand for more than was held before.
                from = Wait(0);
            }
            self.waits.remove(&wait);
            self.waits_of.remove(&(lock.owner, wait));
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
        let (mut seen, mut open, mut looks) = (BTreeSet::new(), BTreeSet::new(), 0);
        self.in_the_way(lock, &mut open, &mut looks);
        while let Some(owner) = open.pop_first() {
            if owner == lock.owner {
                return true;
            }
            if looks < SEARCH_MAX && seen.insert(owner) {
                for (_, wait) in self.waits_of.range((owner, Wait(0))..=(owner, Wait(u64::MAX))) {
                    let queue = self.waits.get(wait).and_then(|(key, _)| self.queues.get(key));
                    let waiting = queue.and_then(|queue| queue.waiting.get(wait));
                    if let Some(waiting) = waiting.filter(|waiting| !waiting.of_file) {
                        self.in_the_way(waiting, &mut open, &mut looks);
                    }
                }
            }
        }
        false
    }

    /// Adds the owners of what is in the way of a lock of fcntl, as far as so much may be looked at.
    fn in_the_way(&self, lock: &Lock, owners: &mut BTreeSet<Owner>, looks: &mut usize) {
        let queue = self.queues.get(&lock.key()).filter(|_| lock.family == Family::Posix);
        let near = queue.into_iter().flat_map(|queue| queue.held.near_to(lock));
        for (_, owner, hits) in near.take(SEARCH_MAX.saturating_sub(*looks)) {
            *looks += 1;
            if hits && owner != lock.owner {
                owners.insert(owner);
            }
        }
    }
}

#[cfg(test)]
#[path = "locks_tests.rs"]
mod tests;
