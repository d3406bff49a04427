//! Which inodes the kernel knows, noted where the keeper sees it.

use std::collections::HashMap;
use std::sync::Arc;

use hayloft_model::Ino;
use hayloft_model::tree::Known;
use rustc_hash::FxBuildHasher;

use super::shared::{CHUNK, Shared};

/// The client's side of the set. All changes come one at a time.
#[derive(Debug)]
pub(crate) struct KnownInodes {
    shared: Arc<Shared>,
    places: HashMap<u64, u32, FxBuildHasher>,
    free: Vec<u32>,
}

impl KnownInodes {
    pub(crate) fn new(shared: Arc<Shared>) -> KnownInodes {
        KnownInodes { shared, places: HashMap::default(), free: Vec::new() }
    }

    fn place(&mut self, chunk: u64) -> Option<u32> {
        if let Some(at) = self.places.get(&chunk) {
            return Some(*at);
        }
        let at = self.free.pop().or_else(|| self.shared.take_chunk())?;
        self.shared.name_chunk(at, Some(chunk));
        self.places.insert(chunk, at);
        Some(at)
    }
}

impl Known for KnownInodes {
    fn insert(&mut self, ino: Ino) {
        match self.place(ino.0 / CHUNK) {
            Some(at) => self.shared.set(at, ino.0 % CHUNK),
            None => self.shared.set_beyond(ino.0),
        }
    }

    fn remove(&mut self, ino: Ino) {
        let chunk = ino.0 / CHUNK;
        if let Some(at) = self.places.get(&chunk).copied()
            && self.shared.clear(at, ino.0 % CHUNK)
        {
            self.shared.name_chunk(at, None);
            self.places.remove(&chunk);
            self.free.push(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sweep::Inodes;
    use super::*;

    #[test]
    fn what_is_known_is_seen_on_the_other_side_and_places_are_used_again() {
        let shared = Arc::new(Shared::new().unwrap());
        let mut known = KnownInodes::new(Arc::clone(&shared));
        let there = Arc::new(Shared::over(shared.descriptor().try_clone_to_owned().unwrap()).unwrap());
        let seen = || {
            let mut seen: Vec<u64> = Inodes::new(Arc::clone(&there)).collect();
            seen.sort_unstable();
            seen
        };
        assert_eq!(seen(), [1]);
        let numbers = [2, 63, 64, 511, 512, 1 << 40, (1 << 40) + 513];
        numbers.iter().for_each(|ino| known.insert(Ino(*ino)));
        assert_eq!(seen(), [&[1][..], &numbers].concat());
        [2, 63, 64, 511, 7].iter().for_each(|ino| known.remove(Ino(*ino)));
        assert_eq!(seen(), [1, 512, 1 << 40, (1 << 40) + 513]);
        let used = shared.used();
        known.insert(Ino(99_999));
        assert_eq!(shared.used(), used);
        assert_eq!(seen(), [1, 512, 99_999, 1 << 40, (1 << 40) + 513]);
        shared.set_beyond(5);
        shared.set_beyond(7);
        assert_eq!(seen(), [1, 5, 6, 7, 512, 99_999, 1 << 40, (1 << 40) + 513]);
    }
}
