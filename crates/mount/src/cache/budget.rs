//! How much file data is in memory, and how much more may come.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::cache::data::{File, FileData};

/// How often who waits to fetch something looks whether that was given up.
const FETCH_POLL: Duration = Duration::from_millis(50);

/// What has to stay within bounds.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    /// Bytes written and not in any cut.
    unshipped: AtomicI64,
    /// Bytes in the cut that is being shipped.
    in_flight: AtomicI64,
    /// Bytes of clean data in memory.
    cached: AtomicI64,
    /// What the data in memory takes, clean or not, with what buffers have to spare.
    held: AtomicI64,
    /// Bytes of content on their way here.
    fetched: Mutex<u64>,
    /// Some of it has come.
    has_come: Condvar,
}

/// Whether so much more may be fetched: always, when nothing is.
fn has_room(fetched: u64, bytes: u64, most: u64) -> bool {
    fetched == 0 || fetched + bytes <= most
}

impl Budget {
    pub(crate) fn unshipped(&self) -> u64 {
        self.unshipped.load(Ordering::Relaxed).max(0) as u64
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed).max(0) as u64
    }

    pub(crate) fn cached(&self) -> u64 {
        self.cached.load(Ordering::Relaxed).max(0) as u64
    }

    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed).max(0) as u64
    }

    pub(crate) fn add_in_flight(&self, bytes: i64) {
        self.in_flight.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So much content is about to be fetched. Waits until there is room, `most` bytes, for all that is on its way; `None`
    /// when `is_given_up`.
    pub(crate) fn fetch(&self, bytes: u64, most: u64, is_given_up: impl Fn() -> bool) -> Option<Fetch<'_>> {
        let mut fetched = self.fetched.lock();
        while !has_room(*fetched, bytes, most) {
            if is_given_up() {
                return None;
            }
            self.has_come.wait_for(&mut fetched, FETCH_POLL);
        }
        *fetched += bytes;
        Some(Fetch { budget: self, bytes })
    }

    /// The same, if there is room at once.
    pub(crate) fn fetch_now(&self, bytes: u64, most: u64) -> Option<Fetch<'_>> {
        let mut fetched = self.fetched.lock();
        has_room(*fetched, bytes, most).then(|| {
            *fetched += bytes;
            Fetch { budget: self, bytes }
        })
    }

    /// Looks at, or changes, a file's data and keeps the books.
    pub(crate) fn with<T>(&self, file: &File, work: impl FnOnce(&mut FileData) -> T) -> T {
        let mut data = file.data.lock();
        let figures = |data: &FileData| [data.dirty_bytes(), data.cached_bytes(), data.held_bytes()];
        let before = figures(&data);
        data.take_due();
        let result = work(&mut data);
        let after = figures(&data);
        if after != before {
            self.count(before, after);
        }
        result
    }

    /// Takes the file's data out of memory.
    pub(crate) fn take(&self, file: &File) -> FileData {
        // Whoever still holds it and fetches for it finds nothing to fill.
        let mut there = file.data.lock();
        let before = [there.dirty_bytes(), there.cached_bytes(), there.held_bytes()];
        let data = there.leave();
        self.count(before, [0; 3]);
        data
    }

    /// The figures of a file have changed.
    fn count(&self, before: [u64; 3], after: [u64; 3]) {
        for (at, sum) in [&self.unshipped, &self.cached, &self.held].into_iter().enumerate() {
            sum.fetch_add(after[at] as i64 - before[at] as i64, Ordering::Relaxed);
        }
    }
}

/// Content on its way; ends when this is dropped.
pub(crate) struct Fetch<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        *self.budget.fetched.lock() -= self.bytes;
        self.budget.has_come.notify_all();
    }
}
