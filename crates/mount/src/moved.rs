//! Names that others have just taken from inodes that the kernel knows.
//!
//! A rename looks up its source first, and then its target. When another host renames the same file to the same target
//! in between, both names lead to one inode, and the kernel takes that for two links of one file: it reports success
//! without asking. Two hosts would have claimed one job. So a thread that is within a rename, and looks up a name to which
//! an inode has just been moved from elsewhere, is told that the name does not exist: then the kernel asks for the rename,
//! and gets the answer of the tree.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use hayloft_model::{Ino, Name};
use rustc_hash::FxBuildHasher;

use crate::thread::{Place, place_of};

/// How long a rename may take from the one lookup to the other.
const KEPT: Duration = Duration::from_secs(10);
/// Most names that are remembered.
pub(crate) const KEPT_MAX: usize = 4096;
/// How long it is waited until a thread that asks sleeps, so that it can be seen where it is.
const SETTLES: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(50);

/// System calls that rename.
#[cfg(target_arch = "x86_64")]
const RENAMES: &[libc::c_long] = &[
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    // Of 32-bit programs; in 64 bits nothing that looks up names.
    38,
    302,
    353,
];
#[cfg(not(target_arch = "x86_64"))]
const RENAMES: &[libc::c_long] = &[libc::SYS_renameat, libc::SYS_renameat2];

/// A name that was taken from an inode.
#[derive(Debug)]
struct Taken {
    place: (Ino, Name),
    since: Instant,
    /// A thread that cannot be seen was told to look again.
    excused: bool,
}

/// Names that were taken from inodes lately.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    by_inode: HashMap<Ino, Taken, FxBuildHasher>,
    in_order: VecDeque<(Ino, Instant)>,
    /// What a rename was told does not exist.
    hidden: HashMap<(Ino, Name), Ino, FxBuildHasher>,
}

/// What a lookup of a name is answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// What it leads to.
    Inode,
    /// That there is no such name.
    Nothing,
    /// That everything has to be looked up anew.
    Again,
}

impl Moved {
    /// Others have taken this name from the inode, which the kernel knows.
    pub(crate) fn take(&mut self, ino: Ino, dir: Ino, name: &Name) {
        let since = Instant::now();
        while let Some((first, at)) = self.in_order.front().copied()
            && (self.in_order.len() >= KEPT_MAX || at.elapsed() > KEPT)
        {
            self.in_order.pop_front();
            if self.by_inode.get(&first).is_some_and(|taken| taken.since == at) {
                self.by_inode.remove(&first);
            }
        }
        if self.in_order.is_empty() {
            self.hidden.clear();
        }
        self.by_inode.insert(ino, Taken { place: (dir, name.clone()), since, excused: false });
        self.in_order.push_back((ino, since));
    }

    /// Whether the inode had another name than this just now.
    pub(crate) fn was_elsewhere(&self, ino: Ino, dir: Ino, name: &[u8]) -> bool {
        self.by_inode.get(&ino).is_some_and(|taken| {
            taken.since.elapsed() < KEPT && (taken.place.0, taken.place.1.as_bytes()) != (dir, name)
        })
    }

    /// A rename was told that this name does not exist, which leads to the inode.
    pub(crate) fn hide(&mut self, ino: Ino, dir: Ino, name: &[u8]) {
        if self.hidden.len() < KEPT_MAX {
            self.hidden.insert((dir, Name::new(name)), ino);
        }
    }

    /// A rename to this name is done: what it has replaced without the kernel knowing.
    pub(crate) fn replaced(&mut self, dir: Ino, name: &[u8]) -> Option<Ino> {
        if self.hidden.is_empty() { None } else { self.hidden.remove(&(dir, Name::new(name))) }
    }

    /// Whether a thread that cannot be seen is to look again: once, since a second time would be an error.
    pub(crate) fn excuse(&mut self, ino: Ino) -> bool {
        self.by_inode.get_mut(&ino).is_some_and(|taken| !std::mem::replace(&mut taken.excused, true))
    }
}

/// Whether a thread that waits for us is within a rename; `None` when that cannot be seen.
pub(crate) fn renames(tid: u32) -> Option<bool> {
    let begun = Instant::now();
    while tid != 0 && begun.elapsed() < SETTLES {
        match place_of(tid) {
            Ok(Place::Call { number, .. }) => return Some(RENAMES.contains(&number)),
            // It has asked, and is not asleep yet.
            Ok(Place::Running) => std::thread::sleep(PAUSE),
            Ok(Place::Elsewhere) | Err(_) => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_moved_is_remembered_for_a_while_and_in_bounds() {
        let (dir, mut moved) = (Ino(1), Moved::default());
        moved.take(Ino(5), dir, &Name::new(b"old"));
        assert!(moved.was_elsewhere(Ino(5), dir, b"new") && moved.was_elsewhere(Ino(5), Ino(2), b"old"));
        assert!(!moved.was_elsewhere(Ino(5), dir, b"old") && !moved.was_elsewhere(Ino(6), dir, b"new"));
        assert_eq!((moved.excuse(Ino(5)), moved.excuse(Ino(5)), moved.excuse(Ino(6))), (true, false, false));
        moved.hide(Ino(5), dir, b"new");
        assert_eq!((moved.replaced(dir, b"new"), moved.replaced(dir, b"new")), (Some(Ino(5)), None));
        for ino in 10..10 + 2 * KEPT_MAX as u64 {
            moved.take(Ino(ino), dir, &Name::new(b"old"));
        }
        assert!(moved.by_inode.len() <= KEPT_MAX && moved.in_order.len() <= KEPT_MAX);
        assert!(!moved.was_elsewhere(Ino(5), dir, b"new"));
    }

    #[test]
    fn a_thread_that_does_something_else_does_not_rename() {
        let (said, tid) = std::sync::mpsc::channel();
        let waits = std::thread::spawn(move || {
            let own = std::fs::read_link("/proc/thread-self").unwrap();
            said.send(own.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
            std::thread::sleep(Duration::from_secs(2));
        });
        assert_eq!(renames(tid.recv().unwrap()), Some(false));
        assert_eq!((renames(0), renames(u32::MAX)), (None, None));
        waits.join().unwrap();
    }
}
