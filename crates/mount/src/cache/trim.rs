//! Keeping what is in memory within its bounds.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hayloft_model::{Ino, Sequence};
use rustc_hash::FxBuildHasher;

use crate::cache::data::File;
use crate::core::Client;

/// How soon what this host would rather not own is told again, and rows are looked at again that had to stay.
const RELEASE_PAUSE: Duration = Duration::from_millis(200);
/// Places in the queue of blocks that are never worth a clean-up.
const QUEUE_MIN: usize = 1 << 16;

/// Whether a file has data that is not at the server, or calls under way.
fn is_used(files: &HashMap<Ino, Arc<File>, FxBuildHasher>, durable: Sequence) -> impl Fn(Ino) -> bool {
    move |ino| {
        files.get(&ino).is_some_and(|file| Arc::strong_count(file) > 1 || !file.data.lock().is_clean(durable))
    }
}

/// When rows were evicted last, which looks at all of them, and how many had to stay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trimmed {
    at: Instant,
    left: usize,
}

impl Trimmed {
    /// Whether it is worth to look again: there are a tenth more, or those that had to stay may go by now.
    fn is_over(self, rows: usize, most: usize) -> bool {
        rows > self.left + most / 10 || self.at.elapsed() > RELEASE_PAUSE
    }
}

impl Client {
    /// So much unshipped data is shipped before its time; writers go on meanwhile with the other half.
    pub(crate) fn ship_at(&self) -> u64 {
        self.memory.dirty() / if self.memory.is_short() { 8 } else { 2 }
    }

    /// Whether `bytes` more would exceed the budget for unshipped data, or for all data.
    pub(crate) fn over_budget(&self, bytes: u64) -> bool {
        let unshipped = self.budget.unshipped() + self.budget.in_flight();
        // Clean data alone holds nobody up: it is about to go.
        let all_full = unshipped > 0 && self.budget.held() + bytes > self.memory.all_content();
        all_full || unshipped + bytes > self.memory.dirty()
    }

    /// Whatever can go to the server should, and soon.
    pub(crate) fn ship_soon(&self) {
        self.room_wanted.store(true, Ordering::Relaxed);
        self.ledger.kick();
    }

    /// Keeps clean data, and rows, within their bounds.
    pub(crate) fn trim(&self) {
        self.trim_content(self.memory.content());
        let durable = self.ledger.durable_sequence();
        let mut released = Vec::new();
        let most = self.memory.rows();
        let mut core = self.core();
        let rows = core.tree.in_memory().0;
        if rows > most && core.trimmed.is_none_or(|trimmed| trimmed.is_over(rows, most)) {
            let core = &mut *core;
            // Some more than needed, so that this is rare.
            let before = core.tree.in_memory();
            let enough = most / 10 * 9;
            let dropped = core.tree.evict(enough, durable, is_used(&core.files, durable));
            dropped.into_iter().for_each(|ino| self.drop_file(core, ino));
            if core.tree.in_memory() != before {
                self.evictions.fetch_add(1, Ordering::Relaxed);
            }
            let left = core.tree.in_memory().0;
            core.trimmed = Some(Trimmed { at: Instant::now(), left });
            // Looking through all directories is for once.
            if left > most
                && !self.told_of_large.load(Ordering::Relaxed)
                && let Some((directory, names)) = core.tree.largest_directory().filter(|(_, of)| *of > most)
            {
                self.told_of_large.store(true, Ordering::Relaxed);
                tracing::warn!(
                    %directory,
                    names,
                    most,
                    "a directory has more names than inodes= allows to keep: it is kept whole while it is used, with about 1 KiB of memory for each"
                );
            }
            let excess = left.saturating_sub(enough);
            if excess > 0 && core.released.is_none_or(|since| since.elapsed() > RELEASE_PAUSE) {
                core.released = Some(Instant::now());
                released = core.tree.releasable(excess, durable, is_used(&core.files, durable));
            }
        }
        drop(core);
        if !released.is_empty() {
            self.release(released);
        }
    }

    /// Places of files that are gone leave the queue when it has grown much longer than what it is about.
    fn shorten_queue(&self) {
        let limit = QUEUE_MIN + 4 * (self.budget.cached() / 4096) as usize;
        if self.cache_queue.lock().len() > limit {
            let core = self.core();
            self.cache_queue.lock().retain(|(ino, _)| core.files.contains_key(ino));
        }
    }

    /// Clean data leaves memory until there are at most so many bytes of it, and room for what is not clean.
    pub(crate) fn trim_content(&self, most: u64) {
        self.shorten_queue();
        let durable = self.ledger.durable_sequence();
        let all_most = most + self.memory.dirty();
        let mut looks = self.cache_queue.lock().len() * 2;
        while (self.budget.cached() > most || self.budget.held() > all_most) && looks > 0 {
            looks -= 1;
            let Some((ino, index)) = self.cache_queue.lock().pop_front() else { break };
            let mut core = self.core();
            let Some(file) = core.files.get(&ino) else { continue };
            if self.budget.with(file, |data| data.drop_clean(index, durable)).is_none() {
                drop(core);
                self.cache_queue.lock().push_back((ino, index));
            } else if Arc::strong_count(file) == 1 && file.data.lock().is_all_stored(durable) {
                self.drop_file(&mut core, ino);
            }
        }
    }

    /// Data of these blocks may leave memory when room is needed.
    pub(crate) fn may_drop(&self, ino: Ino, indexes: impl IntoIterator<Item = u64>) {
        self.cache_queue.lock().extend(indexes.into_iter().map(|index| (ino, index)));
    }

    /// What tables keep for more entries than they have leaves memory.
    pub(crate) fn shrink(&self) {
        self.cache_queue.lock().shrink_to_fit();
        self.core().shrink();
    }

    /// Waits a moment for unshipped data to shrink.
    pub(crate) fn await_room(&self) {
        self.stats.writers_delayed.add(1);
        self.trim_content(self.memory.content());
        self.ship_soon();
        self.ledger.await_progress(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_had_to_stay_are_not_looked_at_for_each_change() {
        let now = Trimmed { at: Instant::now() + Duration::from_secs(60), left: 1500 };
        assert!(!now.is_over(1501, 1000) && !now.is_over(1600, 1000));
        assert!(now.is_over(1601, 1000), "there are many more");
        assert!(!Trimmed { left: 900, ..now }.is_over(1000, 1000));
        let before = Instant::now().checked_sub(Duration::from_secs(60)).expect("the clock runs for longer");
        assert!(Trimmed { at: before, ..now }.is_over(1501, 1000));
    }
}
