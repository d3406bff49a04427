//! Names that others have just taken from inodes that the kernel knows.
//!
//! A rename looks up its source first, and then its target. When another host renames the same file to the same target
//! in between, both names lead to one inode, and the kernel takes that for two links of one file: it reports success
//! without asking. Two hosts would have claimed one job. So a thread that is within a rename, and looks up a name to which
//! an inode has just been moved from the name that it renames, gets ESTALE, once: then the kernel begins the call anew and asks
//! for everything, the source too. Where the names cannot be read in the thread's memory, every rename counts.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use hayloft_model::{Ino, Name};
use rustc_hash::FxBuildHasher;

use crate::host::thread::{Place, path_at, place_of};

/// How long a rename may take from the one lookup to the other.
const KEPT: Duration = Duration::from_secs(10);
/// Most names that are remembered.
pub(crate) const KEPT_MAX: usize = 4096;
/// Most names of one inode that are remembered; with more, any may have been its.
const NAMES_MAX: usize = 16;
/// Most threads that are told to look again, for one name, or because of what they are told of a directory.
const EXCUSED_MAX: usize = 256;
/// How long a thread that was told to look again is not told once more, and most threads that are remembered for that.
const EXCUSED_FOR: Duration = Duration::from_secs(1);
const REMEMBERED_MAX: usize = 4096;
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
/// Those of two paths, without folders to begin at.
#[cfg(target_arch = "x86_64")]
const RENAMES_OF_PATHS: &[libc::c_long] = &[libc::SYS_rename, 38];
#[cfg(not(target_arch = "x86_64"))]
const RENAMES_OF_PATHS: &[libc::c_long] = &[];

/// A name that was taken from an inode.
#[derive(Debug)]
struct Taken {
    /// Its names until then, the latest last.
    places: Vec<(Ino, Name)>,
    since: Instant,
    /// Threads that were told to look again; 0 for all that cannot be seen.
    excused: Vec<u32>,
}

/// Names that were taken from inodes lately.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    by_inode: HashMap<Ino, Taken, FxBuildHasher>,
    in_order: VecDeque<(Ino, Instant)>,
    told: Excused,
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
        let known = self.by_inode.remove(&ino).filter(|taken| taken.since.elapsed() < KEPT);
        let mut places = known.map(|taken| taken.places).unwrap_or_default();
        let place = (dir, name.clone());
        if places.len() < NAMES_MAX && !places.contains(&place) {
            places.push(place);
        }
        self.by_inode.insert(ino, Taken { places, since, excused: Vec::new() });
        self.in_order.push_back((ino, since));
    }

    /// Whether the inode had another name than this just now.
    pub(crate) fn was_elsewhere(&self, ino: Ino, dir: Ino, name: &[u8]) -> bool {
        self.by_inode.get(&ino).is_some_and(|taken| {
            let is_other = |place: &(Ino, Name)| (place.0, place.1.as_bytes()) != (dir, name);
            taken.since.elapsed() < KEPT && taken.places.iter().any(is_other)
        })
    }

    /// Whether a rename from a name of this kind may have found the inode there.
    pub(crate) fn was_named(&self, ino: Ino, name: &[u8]) -> bool {
        self.by_inode.get(&ino).is_some_and(|taken| {
            taken.places.len() >= NAMES_MAX || taken.places.iter().any(|(_, old)| old.as_bytes() == name)
        })
    }

    /// Whether a thread is to look again: once, since a second time would be an error.
    pub(crate) fn excuse(&mut self, ino: Ino, tid: u32) -> bool {
        let Some(taken) = self.by_inode.get_mut(&ino) else { return false };
        let is_first = !taken.excused.contains(&tid) && taken.excused.len() < EXCUSED_MAX;
        if is_first {
            taken.excused.push(tid);
            self.told.note(tid, ino);
        }
        is_first
    }

    /// The same for one of which it is not known what it does: it may be on the way along a path of which several parts have moved.
    pub(crate) fn excuse_unseen(&mut self, ino: Ino, tid: u32) -> bool {
        let is_first = !self.told.was_told(tid) && self.excuse(ino, 0);
        if is_first {
            self.told.note(tid, ino);
        }
        is_first
    }
}

/// Threads that were told to look again lately, and at what.
#[derive(Debug, Default)]
pub(crate) struct Excused(VecDeque<(u32, Ino, Instant)>);

impl Excused {
    /// Whether a thread is to look again at what is in a directory: once, since a second time would be an error.
    pub(crate) fn excuse(&mut self, tid: u32, dir: Ino) -> bool {
        self.forget_old();
        let is_known = self.0.iter().any(|(known, of, _)| (*known, *of) == (tid, dir));
        // Threads of other PID namespaces are all the same one.
        let is_first = tid != 0 && !is_known && self.0.len() < EXCUSED_MAX;
        if is_first {
            self.note(tid, dir);
        }
        is_first
    }

    /// A thread was told.
    fn note(&mut self, tid: u32, at: Ino) {
        self.forget_old();
        if tid != 0 && self.0.len() < REMEMBERED_MAX {
            self.0.push_back((tid, at, Instant::now()));
        }
    }

    /// Whether a thread was, whatever it was to look at.
    fn was_told(&mut self, tid: u32) -> bool {
        self.forget_old();
        self.0.iter().any(|(known, ..)| *known == tid)
    }

    fn forget_old(&mut self) {
        while self.0.front().is_some_and(|(_, _, at)| at.elapsed() > EXCUSED_FOR) {
            self.0.pop_front();
        }
    }
}

/// What a thread that waits for us is doing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It renames the one to the other; the last parts of their paths, if they can be read.
    Rename(Option<(Vec<u8>, Vec<u8>)>),
    /// Something else.
    Other,
    /// That cannot be seen.
    Unseen,
}

/// What a thread that waits for us is doing.
pub(crate) fn doing(tid: u32) -> Doing {
    let begun = Instant::now();
    while tid != 0 && begun.elapsed() < SETTLES {
        match place_of(tid) {
            Ok(Place::Call { number, arguments }) if RENAMES.contains(&number) => {
                let [from, to] = if RENAMES_OF_PATHS.contains(&number) { [0, 1] } else { [1, 3] };
                let last_part = |at: usize| path_at(tid, arguments[at]).map(|path| last_part(&path).to_vec());
                return Doing::Rename(last_part(from).and_then(|from| Ok((from, last_part(to)?))).ok());
            }
            Ok(Place::Call { .. }) => return Doing::Other,
            // It has asked, and is not asleep yet.
            Ok(Place::Running) => std::thread::sleep(PAUSE),
            Ok(Place::Elsewhere) | Err(_) => return Doing::Unseen,
        }
    }
    Doing::Unseen
}

fn last_part(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    path[..end].rsplit(|byte| *byte == b'/').next().unwrap_or_default()
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
        assert_eq!([7, 7, 8].map(|tid| moved.excuse(Ino(5), tid)), [true, false, true]);
        assert!(!moved.excuse(Ino(6), 7));
        // One that cannot be seen, on a path of which two parts have moved.
        moved.take(Ino(8), dir, &Name::new(b"old"));
        assert_eq!([5, 8].map(|ino| moved.excuse_unseen(Ino(ino), 9)), [true, false]);
        assert!(moved.excuse_unseen(Ino(8), 10) && !moved.excuse_unseen(Ino(8), 11));
        moved.take(Ino(5), dir, &Name::new(b"newer"));
        assert!(moved.excuse(Ino(5), 7), "it has moved once more");
        assert!(moved.was_named(Ino(5), b"old") && moved.was_named(Ino(5), b"newer"));
        assert!(!moved.was_named(Ino(5), b"new") && !moved.was_named(Ino(6), b"old"));
        for ino in 10..10 + 2 * KEPT_MAX as u64 {
            moved.take(Ino(ino), dir, &Name::new(b"old"));
        }
        assert!(moved.by_inode.len() <= KEPT_MAX && moved.in_order.len() <= KEPT_MAX);
        assert!(!moved.was_elsewhere(Ino(5), dir, b"new"));
    }

    #[test]
    fn a_thread_is_told_once_to_look_again() {
        let mut excused = Excused::default();
        let told = [(7, 1), (7, 1), (8, 1), (7, 2), (0, 1)].map(|(tid, dir)| excused.excuse(tid, Ino(dir)));
        assert_eq!(told, [true, false, true, true, false]);
        for tid in 10..10 + 2 * EXCUSED_MAX as u32 {
            excused.excuse(tid, Ino(1));
        }
        assert_eq!(excused.0.len(), EXCUSED_MAX);
    }

    #[test]
    fn the_last_part_of_a_path_is_a_name() {
        let parts = [&b"a"[..], b"a/b", b"/a/b/", b"/", b""].map(last_part);
        assert_eq!(parts, [&b"a"[..], b"b", b"b", b"", b""]);
    }

    #[test]
    fn a_thread_that_does_something_else_does_not_rename() {
        let (said, tid) = std::sync::mpsc::channel();
        let waits = std::thread::spawn(move || {
            let own = std::fs::read_link("/proc/thread-self").unwrap();
            said.send(own.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
            std::thread::sleep(Duration::from_secs(2));
        });
        assert_eq!(doing(tid.recv().unwrap()), Doing::Other);
        assert_eq!((doing(0), doing(u32::MAX)), (Doing::Unseen, Doing::Unseen));
        waits.join().unwrap();
    }
}
