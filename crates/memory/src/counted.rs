//! The C library's allocator, with a count of what it has given out: to ask it takes a walk through all that is free, with each
//! heap locked meanwhile.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Counts that threads share: fewer would be written by several processors at once.
const COUNTS: usize = 32;

/// A count with a cache line of its own, and the one that is fetched beside it.
#[repr(align(128))]
struct Count(AtomicU64);

/// What the allocator of the program is.
struct Counted {
    counts: [Count; COUNTS],
    threads: AtomicUsize,
}

#[global_allocator]
static ALLOCATOR: Counted =
    Counted { counts: [const { Count(AtomicU64::new(0)) }; COUNTS], threads: AtomicUsize::new(0) };

thread_local! {
    /// Which count is this thread's; it has none yet.
    static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// What the C library takes for so many bytes: with the length before them, in steps of sixteen, and never less than thirty-two.
fn taken(size: usize) -> u64 {
    (size as u64).saturating_add(8).next_multiple_of(16).max(32)
}

impl Counted {
    /// Adds to a thread's count; what another one has allocated makes it less than nothing, and only the sum of all counts.
    fn add(&self, bytes: u64) {
        let own = OWN.try_with(|own| {
            if own.get() == usize::MAX {
                own.set(self.threads.fetch_add(1, Relaxed) % COUNTS);
            }
            own.get()
        });
        self.counts[own.unwrap_or(0)].0.fetch_add(bytes, Relaxed);
    }

    fn sum(&self) -> u64 {
        let sum = self.counts.iter().fold(0, |sum: u64, count| sum.wrapping_add(count.0.load(Relaxed)));
        // One that was read before another was written may lack what it frees.
        if sum > u64::MAX / 2 { 0 } else { sum }
    }
}

/// Bytes that were allocated and not freed, with what the allocator takes for each.
pub(crate) fn in_use() -> u64 {
    ALLOCATOR.sum()
}

// SAFETY: all is done by the C library's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller has promised.
        let at = unsafe { System.alloc(layout) };
        if !at.is_null() {
            self.add(taken(layout.size()));
        }
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller has promised.
        let at = unsafe { System.alloc_zeroed(layout) };
        if !at.is_null() {
            self.add(taken(layout.size()));
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller has promised.
        unsafe { System.dealloc(at, layout) };
        self.add(taken(layout.size()).wrapping_neg());
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller has promised.
        let moved = unsafe { System.realloc(at, layout, size) };
        if !moved.is_null() {
            self.add(taken(size).wrapping_sub(taken(layout.size())));
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allocated_counts_until_it_is_freed_by_whichever_thread() {
        const LARGE: usize = 1 << 30;
        let before = in_use();
        let mut bytes: Vec<u8> = Vec::with_capacity(LARGE);
        // Other tests of the process allocate and free meanwhile, but less.
        assert!(in_use() >= before + LARGE as u64 / 2);
        bytes.reserve_exact(2 * LARGE);
        assert!(in_use() >= before + LARGE as u64 / 2 * 3);
        std::thread::spawn(move || drop(bytes)).join().unwrap();
        assert!(in_use() < before + LARGE as u64 / 2);
        let zeroed = vec![0_u8; LARGE];
        assert!(in_use() >= before + LARGE as u64 / 2);
        drop(zeroed);
        assert!(in_use() < before + LARGE as u64 / 2);
    }

    #[test]
    fn a_piece_counts_as_much_as_the_c_library_takes_for_it() {
        for (size, most) in [(1, 32), (24, 32), (25, 48), (40, 48), (41, 64), (1000, 1008)] {
            assert_eq!(taken(size), most, "{size}");
        }
    }
}
