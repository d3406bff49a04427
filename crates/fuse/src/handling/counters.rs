//! Counts of requests by opcode.
//!
//! Each transport thread counts in a shard of its own, on cache lines of its own, so that counting costs
//! a load and a store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::protocol::abi::{OPCODE_LIMIT, opcode_name};

/// The counts of one thread, the only one that writes to them.
#[repr(align(128))]
pub(crate) struct Shard([AtomicU64; OPCODE_LIMIT]);

impl Shard {
    /// Counts one request. Only the thread that the shard was made for may call this.
    pub(crate) fn count(&self, opcode: u32) {
        let index = (opcode as usize).min(OPCODE_LIMIT - 1);
        let counter = &self.0[index];
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// Requests received so far, by opcode.
#[derive(Clone, Default)]
pub struct Counters {
    shards: Arc<Mutex<Vec<Arc<Shard>>>>,
}

impl Counters {
    pub(crate) fn shard(&self) -> Arc<Shard> {
        let shard = Arc::new(Shard(std::array::from_fn(|_| AtomicU64::new(0))));
        self.shards.lock().push(Arc::clone(&shard));
        shard
    }

    /// The opcodes received at least once, by the kernel's names (`LOOKUP`, `GETATTR`, ...), in the order of
    /// their numbers.
    pub fn by_opcode(&self) -> Vec<(&'static str, u64)> {
        let shards = self.shards.lock();
        let total =
            |index: usize| shards.iter().map(|shard| shard.0[index].load(Ordering::Relaxed)).sum::<u64>();
        (0..OPCODE_LIMIT).map(|index| (opcode_name(index as u32), total(index))).filter(|c| c.1 > 0).collect()
    }

    /// How many requests of the opcode with this name were received.
    pub fn get(&self, name: &str) -> u64 {
        self.by_opcode().into_iter().filter(|c| c.0 == name).map(|c| c.1).sum()
    }

    /// All requests.
    pub fn total(&self) -> u64 {
        self.by_opcode().into_iter().map(|c| c.1).sum()
    }
}

impl std::fmt::Debug for Counters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.by_opcode()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_add_up() {
        let counters = Counters::default();
        let (one, two) = (counters.shard(), counters.shard());
        one.count(1);
        two.count(1);
        two.count(53);
        two.count(u32::MAX);
        assert_eq!(counters.by_opcode(), [("LOOKUP", 2), ("COPY_FILE_RANGE_64", 1), ("UNKNOWN", 1)]);
        assert_eq!((counters.get("LOOKUP"), counters.total()), (2, 4));
    }
}
