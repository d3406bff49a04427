//! The locks of one family that are held of a file. A client may hold tens of thousands of one file, so nothing here looks at all of them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::RangeInclusive;

use crate::locks::{LAST_BYTE, Lock, Mode, Owner};

/// Those of one mode and of about one length: first byte and owner, and the last byte.
type Class = BTreeMap<(u64, Owner), u64>;

/// Those of one owner neither overlap nor, in one mode, touch.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// By owner and first byte.
    by_owner: BTreeMap<(Owner, u64), Lock>,
    /// By mode and class of length ([`class`]): who overlaps a range begins not much before it.
    by_place: BTreeMap<(Mode, u32), Class>,
}

/// Locks of class N cover at least 2^N bytes, and less than twice as many.
fn class(lock: &Lock) -> u32 {
    (lock.end - lock.start + 1).ilog2()
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.by_owner.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.by_owner.len()
    }

    /// By owner, those of each from the first byte on.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Lock> {
        self.by_owner.values()
    }

    /// What an owner has.
    pub(super) fn of(&self, owner: Owner) -> impl Iterator<Item = &Lock> {
        self.by_owner.range((owner, 0)..=(owner, u64::MAX)).map(|(_, lock)| lock)
    }

    /// Where, and whose, what is near a lock in a mode that does not go with its own, what its owner has included; whether it overlaps.
    pub(super) fn near_to(&self, lock: &Lock) -> impl Iterator<Item = (u64, Owner, bool)> {
        // Who shares is in the way of those who do not; these are in everybody's.
        let least = if lock.mode == Mode::Exclusive { Mode::Shared } else { Mode::Exclusive };
        let (start, end) = (lock.start, lock.end);
        let near = self.by_place.range((least, 0)..).flat_map(move |((_, class), held)| {
            let longest = u64::MAX >> (63 - class);
            held.range((start.saturating_sub(longest - 1), Owner::MIN)..=(end, Owner::MAX))
        });
        near.map(move |((first, owner), last)| (*first, *owner, *last >= start))
    }

    /// What is in the way of a lock.
    pub(super) fn obstacle(&self, lock: &Lock) -> Option<&Lock> {
        let (first, owner, _) = self.near_to(lock).find(|(_, owner, hits)| *hits && *owner != lock.owner)?;
        self.by_owner.get(&(owner, first))
    }

    /// Whether something of an owner begins before a range, and ends behind it: to free the range makes two of it.
    pub(super) fn splits(&self, owner: Owner, start: u64, end: u64) -> bool {
        self.near(owner, start, end).first().is_some_and(|lock| lock.start < start && lock.end > end)
    }

    /// Takes from an owner what it holds of a range; whether there was something.
    pub(super) fn cut(&mut self, owner: Owner, start: u64, end: u64) -> bool {
        let hit = self.near(owner, start, end);
        for lock in &hit {
            self.remove(lock);
            if lock.start < start {
                self.insert(Lock { end: start - 1, ..*lock });
            }
            if lock.end > end {
                self.insert(Lock { start: end + 1, ..*lock });
            }
        }
        !hit.is_empty()
    }

    /// Sets a lock that nothing is in the way of; whether the owner held something of its range.
    pub(super) fn put(&mut self, mut lock: Lock) -> bool {
        let had = self.cut(lock.owner, lock.start, lock.end);
        let around = (lock.start.saturating_sub(1), (lock.end + 1).min(LAST_BYTE));
        for neighbour in self.near(lock.owner, around.0, around.1) {
            if neighbour.mode == lock.mode {
                self.remove(&neighbour);
                lock.start = lock.start.min(neighbour.start);
                lock.end = lock.end.max(neighbour.end);
            }
        }
        self.insert(lock);
        had
    }

    /// Removes what these owners hold, and says how many locks that was.
    pub(super) fn strike(&mut self, owners: &RangeInclusive<Owner>) -> usize {
        let range = (*owners.start(), 0)..=(*owners.end(), u64::MAX);
        let of_gone: Vec<Lock> = self.by_owner.range(range).map(|(_, lock)| *lock).collect();
        of_gone.iter().for_each(|lock| self.remove(lock));
        of_gone.len()
    }

    /// What an owner holds that overlaps a range.
    fn near(&self, owner: Owner, start: u64, end: u64) -> Vec<Lock> {
        let before = self.by_owner.range((owner, 0)..(owner, start)).next_back();
        let before = before.filter(|(_, lock)| lock.end >= start);
        before
            .into_iter()
            .chain(self.by_owner.range((owner, start)..=(owner, end)))
            .map(|(_, lock)| *lock)
            .collect()
    }

    fn insert(&mut self, lock: Lock) {
        self.by_owner.insert((lock.owner, lock.start), lock);
        self.by_place
            .entry((lock.mode, class(&lock)))
            .or_default()
            .insert((lock.start, lock.owner), lock.end);
    }

    fn remove(&mut self, lock: &Lock) {
        self.by_owner.remove(&(lock.owner, lock.start));
        if let Entry::Occupied(mut held) = self.by_place.entry((lock.mode, class(lock))) {
            held.get_mut().remove(&(lock.start, lock.owner));
            if held.get().is_empty() {
                held.remove();
            }
        }
    }
}
