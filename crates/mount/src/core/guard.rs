//! The lock of the core, and how long it is waited for and held: all of a host's operations pass it.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Instant;

use hayloft_model::tree::Ended;
use parking_lot::{Mutex, MutexGuard};

use crate::cache::data::File;
use crate::core::Core;
use crate::stats::{LockTimes, ONE_IN};

thread_local! {
    static TIMES: Cell<u32> = const { Cell::new(0) };
}

/// The core, locked.
pub(crate) struct CoreGuard<'a> {
    core: MutexGuard<'a, Core>,
    /// Since when, if this time is measured.
    since: Option<(Instant, &'a LockTimes)>,
    /// After the lock.
    garbage: Garbage,
}

/// What goes when the lock has been given back: until its memory is free takes a while.
#[derive(Debug, Default)]
pub(crate) struct Garbage {
    pub(super) rows: Vec<Ended>,
    pub(super) files: Vec<Arc<File>>,
}

impl<'a> CoreGuard<'a> {
    pub(crate) fn lock(core: &'a Mutex<Core>, times: &'a LockTimes) -> CoreGuard<'a> {
        let count = TIMES.get().wrapping_add(1);
        TIMES.set(count);
        if !count.is_multiple_of(ONE_IN) {
            return CoreGuard { core: core.lock(), since: None, garbage: Garbage::default() };
        }
        let asked = Instant::now();
        let core = core.lock();
        let since = Instant::now();
        times.measured.add(1);
        times.waited_ns.add(since.duration_since(asked).as_nanos() as u64);
        CoreGuard { core, since: Some((since, times)), garbage: Garbage::default() }
    }
}

impl Drop for CoreGuard<'_> {
    fn drop(&mut self) {
        self.garbage = std::mem::take(&mut self.core.garbage);
        if let Some((since, times)) = self.since {
            times.held_ns.add(since.elapsed().as_nanos() as u64);
        }
    }
}

impl Deref for CoreGuard<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for CoreGuard<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}
