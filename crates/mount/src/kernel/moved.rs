//! Names that others have just taken from inodes that the kernel knows.
//!
//! A rename looks up its source first, and then its target. When another host renames the same file to the same target
//! in between, both names lead to one inode, and the kernel takes that for two links of one file: it reports success
//! without asking. Two hosts would have claimed one job. So a thread that is within a rename, and looks up a name to which
//! an inode has just been moved from the name that it renames, gets ESTALE, once: then the kernel begins the call anew and asks
//! for everything, the source too. Where the names cannot be read in the thread's memory, every rename counts.
//!
//! Of a target that it has, the kernel asks whether that is so still, takes any error for "no", and looks the name up at once. A thread that asks so
//! (`/proc/TID/stack` says it) gets an error, and is told what counts when it looks up.
//!
//! A second ESTALE for the call would be the caller's. So a thread that has just had one, and finds the target moved once more, is told that
//! there is none: it asks for the rename then, and that is decided by what is so. What it had not been told of is said to have
//! changed, before the call returns. Where there has to be one (an exchange), or that would not do, it is told of the target under a number
//! that the kernel has not heard (`Told::Apart`): then it does not take it for its source, whatever that is, and asks.
//!
//! A directory that has come from another parent is told by another number in any case (see [`crate::kernel::nodes`]).

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
/// Those with flags behind the paths.
#[cfg(target_arch = "x86_64")]
const RENAMES_WITH_FLAGS: &[libc::c_long] = &[libc::SYS_renameat2, 353];
#[cfg(not(target_arch = "x86_64"))]
const RENAMES_OF_PATHS: &[libc::c_long] = &[];
#[cfg(not(target_arch = "x86_64"))]
const RENAMES_WITH_FLAGS: &[libc::c_long] = &[libc::SYS_renameat2];

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
    renames: HashMap<u32, Again, FxBuildHasher>,
    /// Threads that were told of no target, and which inodes they were not told of.
    hidden: VecDeque<(u32, Ino, Instant)>,
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
    /// `within`: of a directory, which was in that one then.
    fn was_named(&self, ino: Ino, name: &[u8], within: Option<Ino>) -> bool {
        let is_it =
            |(dir, old): &(Ino, Name)| old.as_bytes() == name && within.is_none_or(|within| within == *dir);
        self.by_inode
            .get(&ino)
            .is_some_and(|taken| taken.places.len() >= NAMES_MAX || taken.places.iter().any(is_it))
    }

    /// A thread looks up a name: for its rename, if it was told to look again. (Then the kernel asks for both names.)
    pub(crate) fn looks_up(&mut self, tid: u32, (dir, name): (Ino, &[u8])) {
        if !self.renames.is_empty()
            && let Some(again) = self.renames.get_mut(&tid)
            && again.paths.target() == name
        {
            again.first.get_or_insert(dir);
        }
    }

    /// What a thread looks up is not there, or cannot be found: its rename ends, or has what it needs.
    pub(crate) fn finds_nothing(&mut self, tid: u32) {
        if !self.renames.is_empty() {
            self.renames.remove(&tid);
        }
    }

    /// Whether a name may be the target of this rename, and the inode its source.
    pub(crate) fn concerns(&self, ino: Ino, place: (Ino, &[u8]), is_directory: bool, paths: &Paths) -> bool {
        let within = is_directory.then_some(place.0);
        paths.target() == place.1 && !paths.is_of_itself() && self.was_named(ino, paths.source(), within)
    }

    /// What a thread is told that renames, and looks up a name of the inode.
    pub(crate) fn told_renamer(
        &mut self,
        ino: Ino,
        tid: u32,
        place: (Ino, &[u8]),
        kind: Kind,
        paths: &Paths,
    ) -> Told {
        if !self.concerns(ino, place, kind.is_directory, paths) {
            return Told::Truth;
        }
        let is_first = self.excuse(ino, tid);
        let again = self
            .renames
            .get_mut(&tid)
            .filter(|again| again.since.elapsed() < EXCUSED_FOR && again.paths == *paths);
        match again.map(|again| (paths.part(place, again.first), again)) {
            // The answer may not have come about: it is the same when the name is looked up once more.
            Some((part, again)) if !is_first && again.apart == Some(ino) && part != Part::Source => {
                return Told::Apart;
            }
            _ if !is_first => return Told::Truth,
            Some((Part::Source, _)) => return Told::Truth,
            Some((Part::Target, _)) if kind.can_be_absent && !paths.exchanges => return Told::Absent,
            Some((_, again)) => {
                again.apart = Some(ino);
                return Told::Apart;
            }
            None => {}
        }
        self.renames.retain(|_, again| again.since.elapsed() < EXCUSED_FOR);
        if tid != 0 && self.renames.len() < EXCUSED_MAX {
            let again = Again { paths: paths.clone(), since: Instant::now(), first: None, apart: None };
            self.renames.insert(tid, again);
        }
        Told::LookAgain
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

    /// A thread is told that there is no target of its rename.
    pub(crate) fn hide(&mut self, tid: u32, ino: Ino) {
        self.reveal(tid);
        self.hidden.retain(|(.., since)| since.elapsed() < KEPT);
        if self.hidden.len() >= EXCUSED_MAX {
            self.hidden.pop_front();
        }
        self.hidden.push_back((tid, ino, Instant::now()));
    }

    /// What a thread that asks for a rename was not told of.
    pub(crate) fn hidden(&self, tid: u32) -> Option<Ino> {
        self.hidden.iter().find(|(hidden_from, ..)| *hidden_from == tid).map(|(_, ino, _)| *ino)
    }

    /// The rename is done. Whether something is hidden from others still.
    pub(crate) fn reveal(&mut self, tid: u32) -> bool {
        self.hidden.retain(|(hidden_from, ..)| *hidden_from != tid);
        !self.hidden.is_empty()
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
    /// It renames, what is known if that can be read.
    Rename(Option<Paths>),
    /// Something else.
    Other,
    /// That cannot be seen.
    Unseen,
}

/// What a thread renames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Paths {
    from: Vec<u8>,
    to: Vec<u8>,
    /// Both begin at one folder.
    from_one: bool,
    exchanges: bool,
}

impl Paths {
    fn source(&self) -> &[u8] {
        parts(&self.from).next_back().unwrap_or_default()
    }

    fn target(&self) -> &[u8] {
        parts(&self.to).next_back().unwrap_or_default()
    }

    fn is_of_itself(&self) -> bool {
        self.from == self.to && (self.from_one || self.from.starts_with(b"/"))
    }

    /// What a name in a directory is to it. `first`: where the thread has looked up first, since the kernel has begun anew, what both names
    /// are called, if that is one: for the source.
    fn part(&self, (dir, name): (Ino, &[u8]), first: Option<Ino>) -> Part {
        let met = parts(&self.from).chain(parts(&self.to)).filter(|part| *part == name).count();
        match (self.source() == name, self.target() == name, met) {
            (false, true, 1) => Part::Target,
            (true, true, 2) if first == Some(dir) => Part::Source,
            (true, true, 2) if first.is_some() => Part::Target,
            _ => Part::Any,
        }
    }
}

/// What a name is to a rename.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Source,
    Target,
    /// It may be on the way.
    Any,
}

/// What a name leads to that has just moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) is_directory: bool,
    /// Whether a rename to it is asked for if the kernel is told that there is none.
    pub(crate) can_be_absent: bool,
}

/// What a thread is told of a name that leads to an inode which has just moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Truth,
    LookAgain,
    Absent,
    /// What is so, under a number that the kernel has nothing by.
    Apart,
}

impl Told {
    /// It looks again if it has not done so.
    pub(crate) fn once(looks_again: bool) -> Told {
        if looks_again { Told::LookAgain } else { Told::Truth }
    }
}

/// A rename that was told to look again.
#[derive(Debug)]
struct Again {
    paths: Paths,
    since: Instant,
    /// Where it has looked up first what both names are called, since then.
    first: Option<Ino>,
    /// What it was told of apart.
    apart: Option<Ino>,
}

/// What a thread that waits for us is doing.
pub(crate) fn doing(tid: u32) -> Doing {
    let begun = Instant::now();
    while tid != 0 && begun.elapsed() < SETTLES {
        match place_of(tid) {
            Ok(Place::Call { number, arguments }) if RENAMES.contains(&number) => {
                let [from, to] = if RENAMES_OF_PATHS.contains(&number) { [0, 1] } else { [1, 3] };
                let exchanges = RENAMES_WITH_FLAGS.contains(&number)
                    && arguments[4] & u64::from(libc::RENAME_EXCHANGE) != 0;
                let path = |at: usize| path_at(tid, arguments[at]).ok();
                let from_one = RENAMES_OF_PATHS.contains(&number) || arguments[0] == arguments[2];
                let paths =
                    path(from).zip(path(to)).map(|(from, to)| Paths { from, to, from_one, exchanges });
                return Doing::Rename(paths);
            }
            Ok(Place::Call { .. }) => return Doing::Other,
            // It has asked, and is not asleep yet.
            Ok(Place::Running) => std::thread::sleep(PAUSE),
            Ok(Place::Elsewhere) | Err(_) => return Doing::Unseen,
        }
    }
    Doing::Unseen
}

fn parts(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|part| !part.is_empty())
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
        assert!(moved.was_named(Ino(5), b"old", None) && moved.was_named(Ino(5), b"newer", None));
        assert!(!moved.was_named(Ino(5), b"new", None) && !moved.was_named(Ino(6), b"old", None));
        assert!(moved.was_named(Ino(5), b"old", Some(dir)) && !moved.was_named(Ino(5), b"old", Some(Ino(2))));
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

    const FILE: Kind = Kind { is_directory: false, can_be_absent: true };
    const DIRECTORY: Kind = Kind { is_directory: true, can_be_absent: false };

    fn paths(from: &str, to: &str) -> Paths {
        Paths { from: from.into(), to: to.into(), from_one: true, exchanges: false }
    }

    #[test]
    fn the_target_of_a_rename_is_told_from_what_is_on_the_way() {
        let names = [("a", "a/b"), ("/a/b/", "/"), ("", "b//")].map(|(from, to)| {
            let paths = paths(from, to);
            [paths.source().to_vec(), paths.target().to_vec()]
        });
        assert_eq!(names, [[&b"a"[..], b"b"], [b"b", b""], [b"", b"b"]]);
        let (dir, other) = (Ino(5), Ino(6));
        let part = |from: &str, to: &str, first| paths(from, to).part((dir, b"x"), first);
        assert_eq!([part("d/a", "d/x", None), part("d/x", "d/a", None)], [Part::Target, Part::Any]);
        let by_first = [None, Some(dir), Some(other)].map(|first| part("a/x", "b/x/", first));
        assert_eq!(by_first, [Part::Any, Part::Source, Part::Target]);
        let on_the_way = [part("x/a", "x", None), part("a/x", "x/x", Some(other))];
        assert_eq!(on_the_way, [Part::Any, Part::Any]);
        assert!(paths("a/x", "a/x").is_of_itself() && !paths("a/x", "b/x").is_of_itself());
        let of_two = Paths { from_one: false, ..paths("x", "x") };
        assert!(!of_two.is_of_itself() && Paths { from_one: false, ..paths("/x", "/x") }.is_of_itself());
    }

    #[test]
    fn a_rename_is_told_to_look_again_once() {
        let (dir, other, tid, mut moved) = (Ino(1), Ino(2), 7, Moved::default());
        let renamed = paths("old", "new");
        let tell = |moved: &mut Moved, from: &[u8], place, paths: &Paths| {
            moved.take(Ino(5), dir, &Name::new(from));
            moved.looks_up(tid, place);
            moved.told_renamer(Ino(5), tid, place, FILE, paths)
        };
        assert_eq!(tell(&mut moved, b"old", (dir, b"new"), &renamed), Told::LookAgain);
        assert_eq!(
            moved.told_renamer(Ino(5), tid, (dir, b"new"), FILE, &renamed),
            Told::Truth,
            "it has looked again"
        );
        assert_eq!(tell(&mut moved, b"old", (dir, b"new"), &renamed), Told::Absent, "it has moved once more");
        assert_eq!(tell(&mut moved, b"old", (dir, b"old"), &renamed), Told::Truth, "the source");
        let exchanged = Paths { exchanges: true, ..renamed.clone() };
        let again = [(); 2].map(|()| tell(&mut moved, b"old", (dir, b"new"), &exchanged));
        assert_eq!(again, [Told::LookAgain, Told::Apart], "it needs a target");
        let once_more = [5, 6].map(|ino| moved.told_renamer(Ino(ino), tid, (dir, b"new"), FILE, &exchanged));
        assert_eq!(once_more, [Told::Apart, Told::Truth], "that answer was not given");
        assert_eq!(tell(&mut moved, b"old", (dir, b"old"), &exchanged), Told::Truth, "the source");
        // A directory from another parent has another number there.
        moved.take(Ino(5), dir, &Name::new(b"old"));
        let of_parents =
            [other, dir].map(|at| moved.told_renamer(Ino(5), 8, (at, b"new"), DIRECTORY, &renamed));
        assert_eq!(of_parents, [Told::Truth, Told::LookAgain]);
        moved.take(Ino(5), dir, &Name::new(b"old"));
        let told = moved.told_renamer(Ino(5), 8, (dir, b"new"), DIRECTORY, &renamed);
        assert_eq!(told, Told::Apart, "the kernel would do less than to ask");
        assert_eq!(tell(&mut moved, b"old", (dir, b"old"), &paths("old", "old")), Told::Truth);
        // Names that are the same in two folders: the source comes first.
        let renamed = paths("a/old", "b/old");
        let told = [dir, dir, other].map(|dir| tell(&mut moved, b"old", (dir, b"old"), &renamed));
        assert_eq!(told, [Told::LookAgain, Told::Truth, Told::Absent]);
        // Who has found nothing may be within another call by now, for which the kernel has the source at hand.
        moved.finds_nothing(tid);
        assert_eq!(tell(&mut moved, b"old", (other, b"old"), &renamed), Told::LookAgain);
        assert_eq!(tell(&mut moved, b"old", (other, b"old"), &paths("b/old", "a/old")), Told::LookAgain);
    }

    #[test]
    fn what_a_thread_was_not_told_of_is_known_until_it_has_renamed() {
        let mut moved = Moved::default();
        moved.hide(7, Ino(5));
        moved.hide(8, Ino(5));
        moved.hide(7, Ino(6));
        assert_eq!([7, 8, 9].map(|tid| moved.hidden(tid)), [Some(Ino(6)), Some(Ino(5)), None]);
        assert!(moved.reveal(7) && moved.hidden(7).is_none() && !moved.reveal(8));
        for tid in 0..2 * EXCUSED_MAX as u32 {
            moved.hide(tid, Ino(5));
        }
        assert_eq!(moved.hidden.len(), EXCUSED_MAX);
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
