//! Sizes of files that others have changed, as the kernel has them.
//!
//! Linux passes an answer about attributes on to the program that has asked, but does not keep it when it was told meanwhile
//! that they have changed. Then the program knows the new size, and its reads and maps end at the old one. So where the size
//! has changed, the program has its answer when the kernel has the size: the client looks, and has it ask once more
//! by a call of its own.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hayloft_model::Ino;
use rustc_hash::FxBuildHasher;

use crate::host::handle::Place;
use crate::kernel::nodes::NodeId;

/// So many threads ask at a time.
const ASK_AT_ONCE: usize = 4;
/// How often is tried: each time others have changed the file in the some ten microseconds that asking takes.
const TRIES: usize = 200;
/// So often without a pause.
const AT_ONCE: usize = 4;
const PAUSE: Duration = Duration::from_micros(200);

/// Sizes that the kernel had when it was told that the attributes have changed; `None`: it is not known which.
#[derive(Debug, Default)]
pub(crate) struct Sizes(HashMap<Ino, Option<u64>, FxBuildHasher>);

impl Sizes {
    /// The kernel is told that attributes of a file have changed.
    pub(crate) fn changes(&mut self, ino: Ino, size: Option<u64>) {
        // It may have asked in between, or not.
        let kept = self.0.entry(ino).or_insert(size);
        *kept = kept.filter(|kept| size.is_none_or(|size| size == *kept));
    }

    /// Whether the kernel may have another size than this. If not, it has it.
    pub(crate) fn may_differ(&mut self, ino: Ino, size: u64) -> bool {
        let may_differ = self.0.get(&ino).is_some_and(|kept| *kept != Some(size));
        if !may_differ {
            self.settled(ino);
        }
        may_differ
    }

    /// The kernel has the right one, or nothing of the file.
    pub(crate) fn settled(&mut self, ino: Ino) {
        self.0.remove(&ino);
    }

    pub(crate) fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }
}

/// Threads that look at what the kernel has.
#[derive(Debug, Default)]
pub(crate) struct Lookers {
    threads: [AtomicU32; ASK_AT_ONCE],
    place: OnceLock<Place>,
}

impl Lookers {
    pub(crate) fn begin(&self, place: Place) {
        let _ = self.place.set(place);
    }

    /// Whether it can be seen which sizes the kernel has.
    pub(crate) fn can_look(&self) -> bool {
        self.place.get().is_some()
    }

    /// Whether a request comes from here: it must not wait for anything. (What the kernel asks for by itself comes from 0.)
    pub(crate) fn has(&self, tid: u32) -> bool {
        tid != 0 && self.threads.iter().any(|thread| thread.load(Ordering::Acquire) == tid)
    }

    /// Sees to it that the kernel has the size of a file. `size`: what that is now, if it is known without waiting. Returns which one the
    /// kernel has; `None`: that cannot be seen, or the size has to be fetched first.
    pub(crate) fn confirm(&self, node: NodeId, size: impl Fn() -> Option<u64>) -> Option<u64> {
        let place = self.place.get()?;
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let take = |thread: &&AtomicU32| {
            thread.compare_exchange(0, tid, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let mut thread = None;
        for _ in 0..TRIES {
            thread = self.threads.iter().find(take);
            if thread.is_some() {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        let thread = thread?;
        let kept = look(place, node, size);
        thread.store(0, Ordering::Release);
        kept
    }
}

fn look(place: &Place, node: NodeId, size: impl Fn() -> Option<u64>) -> Option<u64> {
    let found = place.find(node.0).ok()?;
    for at in 0..TRIES {
        let kept = found.size().ok()?;
        if kept == size()? {
            return Some(kept);
        }
        // What is changed meanwhile is asked for once more; and again where the kernel takes no answer, since a call is writing.
        if found.ask().is_err() || at >= AT_ONCE {
            std::thread::sleep(PAUSE);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_others_have_changed_may_differ_until_it_is_settled() {
        let (file, mut sizes) = (Ino(7), Sizes::default());
        assert!(!sizes.may_differ(file, 5));
        sizes.changes(file, Some(5));
        sizes.changes(file, None);
        assert!(sizes.may_differ(file, 6) && !sizes.may_differ(file, 5));
        assert!(!sizes.may_differ(file, 6), "it has had the right one");
        sizes.changes(file, Some(5));
        // Changed twice: which of the two the kernel has asked for is not known.
        sizes.changes(file, Some(6));
        assert!(sizes.may_differ(file, 5) && sizes.may_differ(file, 6));
        sizes.settled(file);
        assert!(!sizes.may_differ(file, 6));
        sizes.changes(file, None);
        assert!(sizes.may_differ(file, 6));
    }

    #[test]
    fn what_the_kernel_asks_for_by_itself_is_nobodys_look() {
        let lookers = Lookers::default();
        assert!(!lookers.has(0));
        lookers.threads[1].store(5, Ordering::Release);
        assert!(lookers.has(5) && !lookers.has(6) && !lookers.has(0));
    }
}
