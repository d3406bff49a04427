//! The lock of what the sessions of a volume share, which all of them pass: it counts how long it is held.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use crate::sharing::Sharing;

/// [`Sharing`], for one at a time.
#[derive(Default)]
pub(crate) struct SharingLock {
    sharing: Mutex<Sharing>,
    taken: AtomicU64,
    held_ns: AtomicU64,
    held_max_ns: AtomicU64,
}

/// How often a lock was taken, and how long it was held, nanoseconds.
pub(crate) struct Held {
    pub(crate) taken: u64,
    pub(crate) all_ns: u64,
    /// The longest.
    pub(crate) max_ns: u64,
}

/// Who has the lock.
pub(crate) struct SharingGuard<'a> {
    sharing: MutexGuard<'a, Sharing>,
    lock: &'a SharingLock,
    since: Instant,
}

impl SharingLock {
    pub(crate) fn lock(&self) -> SharingGuard<'_> {
        let sharing = self.sharing.lock();
        SharingGuard { sharing, lock: self, since: Instant::now() }
    }

    /// Up to now, without who has it at this moment.
    pub(crate) fn held(&self) -> Held {
        Held {
            taken: self.taken.load(Relaxed),
            all_ns: self.held_ns.load(Relaxed),
            max_ns: self.held_max_ns.load(Relaxed),
        }
    }
}

impl Deref for SharingGuard<'_> {
    type Target = Sharing;

    fn deref(&self) -> &Sharing {
        &self.sharing
    }
}

impl DerefMut for SharingGuard<'_> {
    fn deref_mut(&mut self) -> &mut Sharing {
        &mut self.sharing
    }
}

impl Drop for SharingGuard<'_> {
    fn drop(&mut self) {
        let held = self.since.elapsed().as_nanos() as u64;
        self.lock.taken.fetch_add(1, Relaxed);
        self.lock.held_ns.fetch_add(held, Relaxed);
        self.lock.held_max_ns.fetch_max(held, Relaxed);
    }
}
