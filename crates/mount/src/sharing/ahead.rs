//! Fetching ahead of a walk.
//!
//! What comes along with a directory, or with a file's content, ends somewhere in the order in which `find` and `tar` go through
//! a tree. Who then asks for just what follows there walks: from then on the next part is asked for when the part before it begins
//! to be read, and each is larger than the one before. So the server works, and the network carries, while the walk goes on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use hayloft_model::{Ino, Missing};
use parking_lot::{Condvar, Mutex};

use crate::core::Client;

/// Where a part begins: a directory, or a block of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) ino: Ino,
    /// Of directories 0.
    pub(crate) index: u64,
}

/// Walks that are known at a time: a tree whose files were made in several goes is several walks.
const WALKS: usize = 4;

/// What is known of walks.
#[derive(Debug)]
pub(crate) struct Ahead {
    state: Mutex<State>,
    asked: Condvar,
    /// Where what was fetched last of each begins, as long as nobody has read there; 0: nowhere.
    heads: [AtomicU64; WALKS],
    /// So many inodes may be left out between two parts.
    reach: u64,
}

#[derive(Debug, Default)]
struct State {
    walks: [Walk; WALKS],
    /// Counts what is asked for.
    clock: u64,
    /// To be fetched now.
    wanted: VecDeque<Place>,
    ended: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Walk {
    /// What was asked for last.
    asked: Option<Place>,
    /// Where that has ended.
    next: Option<Place>,
    /// How many parts in a row went on there.
    parts: u32,
    /// The block at the head.
    head_index: u64,
    /// When something was asked for last.
    at: u64,
}

impl Walk {
    fn goes_on_at(&self, place: Place, reach: u64) -> bool {
        self.next.is_some_and(|next| {
            let is_behind = (place.ino, place.index) >= (next.ino, next.index);
            is_behind && place.ino.0 - next.ino.0 <= reach
        })
    }
}

impl Ahead {
    /// For walks between whose parts so many inodes may be left out.
    pub(crate) fn new(reach: u64) -> Ahead {
        Ahead { state: Mutex::default(), asked: Condvar::new(), heads: Default::default(), reach }
    }

    /// Something is asked for, with what follows it. Returns how many parts of the walk came before it.
    pub(crate) fn asks(&self, place: Place) -> u32 {
        let mut state = self.state.lock();
        state.clock += 1;
        let now = state.clock;
        let known = state.walks.iter().position(|walk| walk.goes_on_at(place, self.reach));
        let oldest = || (0..WALKS).min_by_key(|at| state.walks[*at].at).unwrap_or_default();
        let at = known.unwrap_or_else(oldest);
        let walk = &mut state.walks[at];
        walk.parts = if known.is_some() { walk.parts + 1 } else { 0 };
        (walk.asked, walk.next, walk.at) = (Some(place), None, now);
        self.heads[at].store(0, Ordering::Relaxed);
        walk.parts
    }

    /// It has come, and with it what follows up to `next`.
    pub(crate) fn came(&self, place: Place, next: Option<Place>) {
        let mut state = self.state.lock();
        let Some(at) = state.walks.iter().position(|walk| walk.asked == Some(place)) else { return };
        let walk = &mut state.walks[at];
        walk.next = next.filter(|next| *next != place);
        if walk.parts > 0 {
            walk.head_index = place.index;
            self.heads[at].store(place.ino.0, Ordering::Relaxed);
        }
    }

    /// Something is read.
    pub(crate) fn reads(&self, place: Place) {
        // Nearly always something else.
        let is_head = |head: &AtomicU64| head.load(Ordering::Relaxed) == place.ino.0;
        let Some(at) = self.heads.iter().position(is_head) else { return };
        let mut state = self.state.lock();
        let walk = state.walks[at];
        if place.index >= walk.head_index && self.heads[at].swap(0, Ordering::Relaxed) == place.ino.0 {
            state.wanted.extend(walk.next);
            self.asked.notify_one();
        }
    }

    /// Nothing is fetched any more.
    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.asked.notify_one();
    }

    /// Waits for what is to be fetched; `None`: nothing any more.
    fn wait(&self) -> Option<Place> {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return None;
            }
            if let Some(place) = state.wanted.pop_front() {
                return Some(place);
            }
            self.asked.wait(&mut state);
        }
    }
}

/// Fetches directories, until the mount is gone.
pub(crate) fn fetch_directories(client: &Client) {
    while let Some(Place { ino: dir, .. }) = client.ahead.wait() {
        // Whoever needs it asks for it as well, and is told why it cannot be had.
        if !client.core().tree.is_listed(dir) {
            let _ = client.fetch_row(Missing::Directory(dir), None);
        }
    }
}

/// Fetches contents, until the mount is gone.
pub(crate) fn fetch_contents(client: &Client) {
    while let Some(place) = client.contents_ahead.wait() {
        client.fetch_contents_ahead(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ino: u64, index: u64) -> Place {
        Place { ino: Ino(ino), index }
    }

    fn wanted(ahead: &Ahead) -> Option<Place> {
        ahead.state.lock().wanted.pop_front()
    }

    #[test]
    fn who_goes_on_where_the_last_part_ended_walks() {
        let ahead = Ahead::new(0);
        // Somebody looks here and there.
        for dir in [1, 5, 9] {
            assert_eq!(ahead.asks(at(dir, 0)), 0);
            ahead.came(at(dir, 0), Some(at(dir + 1, 0)));
            ahead.reads(at(dir, 0));
            assert_eq!(wanted(&ahead), None);
        }
        // It goes on where that has ended.
        assert_eq!(ahead.asks(at(10, 0)), 1);
        ahead.came(at(10, 0), Some(at(20, 0)));
        ahead.reads(at(11, 0));
        assert_eq!(wanted(&ahead), None);
        ahead.reads(at(10, 0));
        assert_eq!(ahead.wait(), Some(at(20, 0)));
        ahead.reads(at(10, 0));
        assert_eq!(wanted(&ahead), None, "once is enough");
        assert_eq!(ahead.asks(at(20, 0)), 2);
        ahead.came(at(20, 0), None);
        ahead.reads(at(20, 0));
        assert_eq!(wanted(&ahead), None, "it was the last part");
        ahead.end();
        assert_eq!(ahead.wait(), None);
    }

    #[test]
    fn a_file_is_fetched_ahead_no_further_than_it_is_read() {
        let ahead = Ahead::new(0);
        ahead.asks(at(7, 0));
        ahead.came(at(7, 0), Some(at(7, 64)));
        assert_eq!(ahead.asks(at(7, 64)), 1);
        ahead.came(at(7, 64), Some(at(7, 128)));
        ahead.reads(at(7, 63));
        assert_eq!(wanted(&ahead), None);
        ahead.reads(at(7, 65));
        assert_eq!(wanted(&ahead), Some(at(7, 128)));
    }

    #[test]
    fn several_walks_go_on_beside_each_other() {
        let ahead = Ahead::new(8);
        for part in 0..4 {
            for from in [1000, 2000, 3000] {
                let place = at(from + 10 * part, 0);
                assert_eq!(u64::from(ahead.asks(place)), part, "{place:?}");
                ahead.came(place, Some(at(place.ino.0 + 7, 3)));
                ahead.reads(place);
                assert_eq!(wanted(&ahead), (part > 0).then(|| at(place.ino.0 + 7, 3)));
            }
        }
        assert_eq!(ahead.asks(at(1036, 0)), 0, "read already");
        assert_eq!(ahead.asks(at(2046, 0)), 0, "too far away");
    }
}
