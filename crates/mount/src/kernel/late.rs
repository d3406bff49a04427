//! Answers about names that may count late in the kernel.
//!
//! To expire a name takes its directory's lock, and so waits for who has asked for the name and has that lock until the answer counts. But
//! Linux *revalidates* a name that it has without the lock (`fuse_dentry_revalidate`): if the caller gets no processor between the
//! answer and the moment in which that counts, the name lasts, although it was expired meanwhile. So it is noted whom the
//! kernel was last told for that a name may be kept. The caller has come to the answer when it asks for something else, has ended, or
//! sleeps as nobody does on the way to it. As long as that is not known the epoch is raised instead: what was looked up
//! before that does not count, however late a name is revalidated.
//!
//! A listing with attributes (READDIRPLUS) has the lock, but reads the epoch only when it has the answer: no epoch is raised before
//! its caller has come to it.
//!
//! An epoch does not end it: a listing gives a name that the kernel has the new one, and then what is late makes it last all the same,
//! without our knowing. So it is kept in mind which names were noted then (**unsure** ones), until each is expired.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hayloft_fuse::{Control, Operation, Pace, Request};
use hayloft_model::{Ino, Name};
use rustc_hash::FxBuildHasher;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::core::Client;
use crate::host::thread::state_of;
use crate::kernel::nodes::NodeId;

/// Threads with the same remainder share what is noted of their requests.
const TURNS: usize = 4096;
/// Most threads of which it is noted that their last answer may be late.
const MOST: usize = 4096;
/// So many are kept without looking whether they have come to it.
const FEW: usize = 64;
/// How soon it is looked again whether callers have come to their answers.
const PAUSE: Duration = Duration::from_micros(200);

/// Which thread has asked last, and how often one did, by remainders of their numbers.
#[derive(Debug)]
pub(crate) struct Callers(Box<[AtomicU64]>);

impl Default for Callers {
    fn default() -> Callers {
        Callers((0..TURNS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Callers {
    /// The kernel hands on a request. Those that it may send later than the thread has made them do not count.
    pub(crate) fn ask(&self, request: &Request<'_>) {
        use Operation::{
            Create, Getattr, Getxattr, Link, Lookup, Mkdir, Mknod, Open, Readdir, Readdirplus, Readlink,
            Rename, Rmdir, Setattr, Symlink, Unlink,
        };
        let is_in_turn = matches!(
            request.op,
            Lookup { .. }
                | Getattr { .. }
                | Setattr { .. }
                | Getxattr { .. }
                | Open { .. }
                | Create { .. }
                | Readdir { .. }
                | Readdirplus { .. }
                | Readlink
                | Mkdir { .. }
                | Mknod { .. }
                | Symlink { .. }
                | Link { .. }
                | Unlink { .. }
                | Rmdir { .. }
                | Rename { .. }
        );
        if is_in_turn {
            self.asks(request.pid);
        }
    }

    fn asks(&self, tid: u32) {
        let slot = self.slot(tid);
        let count = (slot.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        slot.store(count << 32 | u64::from(tid), Ordering::Release);
    }

    /// What is noted of a thread that asks just now. `None`: it cannot be told from others.
    fn turn(&self, tid: u32) -> Option<u64> {
        let turn = self.slot(tid).load(Ordering::Acquire);
        (tid != 0 && turn as u32 == tid).then_some(turn)
    }

    /// Whether the thread has asked for something else since.
    fn has_asked_since(&self, turn: u64) -> bool {
        let now = self.slot(turn as u32).load(Ordering::Acquire);
        now as u32 == turn as u32 && now != turn
    }

    fn slot(&self, tid: u32) -> &AtomicU64 {
        &self.0[tid as usize % TURNS]
    }
}

/// Who is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    tid: u32,
    /// The answer is with the kernel when all are that had begun.
    pub(crate) in_time: bool,
}

impl Caller {
    pub(crate) fn of(request: &Request<'_>, pace: Pace<'_>) -> Caller {
        Caller { tid: request.pid, in_time: matches!(pace, Pace::Fast) }
    }
}

/// The last answer to a thread by which the kernel may keep names.
#[derive(Debug)]
struct Answer {
    what: What,
    turn: u64,
    in_time: bool,
    /// How many were begun before it.
    number: u64,
}

#[derive(Debug)]
enum What {
    /// A name. The kernel may have moved what it has there: a directory has one place at a time.
    Name { places: Vec<(NodeId, Name)>, directory: Option<Ino> },
    /// The names of a directory.
    Listing(NodeId),
}

impl Answer {
    fn places(&self) -> &[(NodeId, Name)] {
        match &self.what {
            What::Name { places, .. } => places,
            What::Listing(_) => &[],
        }
    }
}

/// Answers that the kernel may come to late, by thread.
#[derive(Debug, Default)]
pub(crate) struct Late {
    pub(crate) callers: Arc<Callers>,
    answers: HashMap<u32, Answer, FxBuildHasher>,
    /// With so many it is looked which threads have come to theirs, or have ended: they are looked through for each directory.
    enough: usize,
    /// How many were begun, and up to which all are with the kernel that were in time.
    begun: u64,
    settled: u64,
    /// Names that somebody may have made last since, whatever else is known of them.
    unsure: HashSet<(Ino, Name), FxBuildHasher>,
}

impl Late {
    /// The kernel is going to be told that it may keep a name that it may revalidate, of a directory or something else. `false`: it
    /// must not be.
    pub(crate) fn begin(
        &mut self,
        caller: Caller,
        (dir, name): (NodeId, &[u8]),
        directory: Option<Ino>,
    ) -> bool {
        let places = vec![(dir, Name::new(name))];
        caller.in_time && self.note(caller, What::Name { places, directory })
    }

    /// The same for the names of a listing.
    pub(crate) fn begin_listing(&mut self, caller: Caller, dir: NodeId) -> bool {
        self.note(caller, What::Listing(dir))
    }

    /// It was told of none.
    pub(crate) fn end(&mut self, caller: Caller) {
        self.answers.remove(&caller.tid);
    }

    fn note(&mut self, Caller { tid, in_time }: Caller, what: What) -> bool {
        let Some(turn) = self.callers.turn(tid) else { return false };
        if self.answers.len() >= self.enough.clamp(FEW, MOST) && !self.answers.contains_key(&tid) {
            // Who sleeps may do so because he is not answered yet.
            self.retain(|tid, _| !is_gone(tid));
            self.enough = 2 * self.answers.len();
            if self.answers.len() >= MOST {
                return false;
            }
        }
        self.begun += 1;
        // To what it was told before this it has come.
        self.answers.insert(tid, Answer { what, turn, in_time, number: self.begun });
        true
    }

    /// How many were begun so far.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// Those of them that were in time are with the kernel.
    pub(crate) fn settled(&mut self, begun: u64) {
        self.settled = self.settled.max(begun);
    }

    fn retain(&mut self, keeps: impl Fn(u32, &Answer) -> bool) {
        let Late { callers, answers, .. } = self;
        answers.retain(|tid, answer| !callers.has_asked_since(answer.turn) && keeps(*tid, answer));
    }

    /// The kernel is told of a directory under a name, however long it may keep that: it moves what it has of it there.
    pub(crate) fn told(&mut self, told: Ino, dir: NodeId, name: &[u8]) {
        for answer in self.answers.values_mut() {
            if let What::Name { places, directory } = &mut answer.what
                && *directory == Some(told)
                && note_at(places, (dir, name))
            {
                self.unsure.insert((dir.ino(), Name::new(name)));
            }
        }
    }

    /// The epoch was raised.
    pub(crate) fn dropped(&mut self) {
        let late = self.answers.values().filter(|answer| !self.callers.has_asked_since(answer.turn));
        let places = late.flat_map(Answer::places);
        self.unsure.extend(places.map(|(dir, name)| (dir.ino(), name.clone())));
    }

    /// Forgets unsure names but those of these directories, if there are many.
    pub(crate) fn bound_unsure(&mut self, keeps: impl Fn(Ino) -> bool) {
        if self.unsure.len() > MOST {
            self.unsure.retain(|(dir, _)| keeps(*dir));
        }
    }

    /// This name is on its way out of the kernel.
    pub(crate) fn take_unsure(&mut self, dir: Ino, name: &Name) {
        if !self.unsure.is_empty() {
            self.unsure.remove(&(dir, name.clone()));
        }
    }

    /// Directories of which somebody may not have come to a listing.
    pub(crate) fn listed(&self) -> HashSet<Ino, FxBuildHasher> {
        let late = self.answers.values().filter_map(|answer| match &answer.what {
            What::Listing(dir) if !self.callers.has_asked_since(answer.turn) => Some(dir.ino()),
            _ => None,
        });
        late.collect()
    }

    /// The server is asked to rename what the kernel has, which may take along how long it may keep a name before it is known that it
    /// was done: who expires the new name waits for the lock, and then it has moved.
    pub(crate) fn may_move(&mut self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        for answer in self.answers.values_mut() {
            let What::Name { places, .. } = &mut answer.what else { continue };
            let has = |at: (NodeId, &[u8])| places.iter().any(|(dir, name)| (*dir, name.as_bytes()) == at);
            let (moves, comes_back) = (has(from), exchange && has(to));
            if moves {
                note_at(places, to);
            }
            if comes_back {
                note_at(places, from);
            }
        }
    }

    /// This host has renamed what the kernel had: it takes along how long it may keep a name.
    pub(crate) fn moves(&mut self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        for answer in self.answers.values_mut() {
            let What::Name { places, .. } = &mut answer.what else { continue };
            for (dir, name) in std::mem::take(places) {
                let now = (dir, name.as_bytes());
                let place = match () {
                    () if now == from => to,
                    () if exchange && now == to => from,
                    () => now,
                };
                note_at(places, place);
            }
        }
    }

    /// Whether a name of a directory may be made to last by somebody: also where nothing is known to be kept.
    pub(crate) fn has(&self, dir: Ino, name: &Name) -> bool {
        let is_it = |place: &(NodeId, Name)| place.0.ino() == dir && place.1 == *name;
        let is_late =
            |answer: &Answer| answer.places().iter().any(is_it) && !self.callers.has_asked_since(answer.turn);
        self.answers.values().any(is_late)
            || (!self.unsure.is_empty() && self.unsure.contains(&(dir, name.clone())))
    }

    pub(crate) fn shrink(&mut self) {
        self.retain(|tid, _| !is_gone(tid));
        self.answers.shrink_to_fit();
        self.unsure.shrink_to_fit();
    }

    /// Whether one of these answers may be on its way; looks at threads.
    fn awaits(&mut self, is_meant: impl Fn(&Answer) -> bool) -> bool {
        if self.answers.is_empty() {
            return false;
        }
        let settled = self.settled;
        self.retain(|tid, answer| !(is_meant(answer) && has_come(tid, answer, settled)));
        self.answers.values().any(is_meant)
    }
}

/// Notes a place, once. Whether it was not.
fn note_at(places: &mut Vec<(NodeId, Name)>, place: (NodeId, &[u8])) -> bool {
    let is_new = !places.iter().any(|(dir, name)| (*dir, name.as_bytes()) == place);
    if is_new {
        places.push((place.0, Name::new(place.1)));
    }
    is_new
}

fn is_gone(tid: u32) -> bool {
    Pid::from_raw(tid as i32).is_some_and(|tid| test_kill_process(tid) == Err(Errno::SRCH))
}

/// Whether a thread has come to its answer, as far as can be seen from where it is.
fn has_come(tid: u32, answer: &Answer, settled: u64) -> bool {
    // Between an answer and what it is for nobody sleeps so that a signal could wake him. Before it he does.
    let is_answered = answer.in_time && answer.number <= settled;
    is_gone(tid) || (is_answered && matches!(state_of(tid), Some(b'S' | b'T' | b't' | b'Z' | b'X')))
}

impl Client {
    /// Waits until all answers that were begun are with the kernel, but those of threads that may block.
    pub(crate) fn settle(&self, control: &Control) {
        let begun = self.core().names.late.begun();
        control.settle();
        self.core().names.late.settled(begun);
    }

    /// Waits until nobody can make one of these names last any more who was told of it. Returns whether that is so.
    pub(crate) fn await_callers(&self, names: &[(Ino, Name)], patience: Duration) -> bool {
        let names: HashSet<(u64, &[u8])> = names.iter().map(|(dir, name)| (dir.0, name.as_bytes())).collect();
        self.await_late(patience, |answer| {
            answer.places().iter().any(|(dir, name)| names.contains(&(dir.0, name.as_bytes())))
        })
    }

    /// The same for listings of directories.
    pub(crate) fn await_listings(&self, dirs: &HashSet<Ino>, patience: Duration) -> bool {
        self.await_late(
            patience,
            |answer| matches!(answer.what, What::Listing(dir) if dirs.contains(&dir.ino())),
        )
    }

    fn await_late(&self, patience: Duration, is_meant: impl Fn(&Answer) -> bool) -> bool {
        let begun = Instant::now();
        while self.core().names.late.awaits(&is_meant) {
            if begun.elapsed() >= patience {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::core::Core;

    const DIR: NodeId = NodeId(10);

    fn caller(late: &Late, tid: u32) -> Caller {
        late.callers.asks(tid);
        Caller { tid, in_time: true }
    }

    fn is(name: &'static str) -> impl Fn(&Answer) -> bool {
        move |answer| answer.places().iter().any(|place| *place == (DIR, Name::new(name.as_bytes())))
    }

    /// A thread that takes a processor until it is told to end.
    fn busy() -> (u32, std::sync::mpsc::Sender<()>, std::thread::JoinHandle<()>) {
        let ((said, tid), (stop, stopped)) = (channel(), channel::<()>());
        let runs = std::thread::spawn(move || {
            said.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                std::hint::spin_loop();
            }
        });
        (tid.recv().unwrap(), stop, runs)
    }

    #[test]
    fn who_asks_for_something_else_has_come_to_the_answer_before() {
        let (tid, stop, runs) = busy();
        let mut late = Late::default();
        let asks = caller(&late, tid);
        assert!(late.begin(asks, (DIR, b"a"), None) && late.awaits(is("a")) && !late.awaits(is("b")));
        late.callers.asks(tid + TURNS as u32);
        assert!(late.awaits(is("a")), "another thread");
        late.callers.asks(tid);
        assert!(!late.awaits(is("a")));
        // And of an answer in its place.
        let asks = caller(&late, tid);
        assert!(late.begin(asks, (DIR, b"b"), None) && late.awaits(is("b")) && !late.awaits(is("a")));
        assert!(late.has(Ino(10), &Name::new(b"b")) && !late.has(Ino(10), &Name::new(b"a")));
        drop(stop);
        runs.join().unwrap();
    }

    #[test]
    fn who_sleeps_or_has_ended_has_come_to_it() {
        let ((said, tid), (stop, stopped)) = (channel(), channel::<()>());
        let runs = std::thread::spawn(move || {
            said.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            let _ = stopped.recv();
        });
        let (tid, mut late) = (tid.recv().unwrap(), Late::default());
        while state_of(tid) != Some(b'S') {
            std::thread::yield_now();
        }
        let asks = caller(&late, tid);
        assert!(
            late.begin(asks, (DIR, b"a"), None) && late.awaits(is("a")),
            "it may sleep since it is not answered"
        );
        late.settled(late.begun());
        assert!(!late.awaits(is("a")));
        // It sleeps before it is answered as well, which may be for long.
        let asks = Caller { in_time: false, ..caller(&late, tid) };
        assert!(!late.begin(asks, (DIR, b"a"), None) && late.begin_listing(asks, DIR));
        let is_listing = |answer: &Answer| matches!(answer.what, What::Listing(_));
        assert!(late.awaits(is_listing));
        let asks = caller(&late, tid + 1);
        assert!(late.begin_listing(asks, DIR));
        late.end(asks);
        assert_eq!(late.answers.len(), 1);
        drop(stop);
        runs.join().unwrap();
        while late.awaits(is_listing) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_cannot_be_told_apart_is_not_begun_and_what_is_moved_is_found() {
        let (tid, stop, runs) = busy();
        let mut late = Late::default();
        let unseen = Caller { tid: 0, in_time: true };
        late.callers.asks(0);
        assert!(!late.begin(unseen, (DIR, b"a"), None));
        let asks = caller(&late, tid);
        late.callers.asks(tid + TURNS as u32);
        assert!(!late.begin(asks, (DIR, b"a"), None));
        let asks = caller(&late, tid);
        assert!(late.begin(asks, (NodeId(11), b"old"), None));
        late.moves((NodeId(11), b"old"), (DIR, b"new"), false);
        assert!(late.awaits(is("new")));
        late.moves((DIR, b"other"), (DIR, b"new"), false);
        assert!(late.awaits(is("new")), "it may come to nothing");
        late.moves((DIR, b"other"), (DIR, b"new"), true);
        assert!(late.awaits(is("other")) && !late.awaits(is("new")));
        late.may_move((DIR, b"other"), (NodeId(12), b"asked"), false);
        late.may_move((DIR, b"none"), (DIR, b"none2"), true);
        late.may_move((DIR, b"other"), (NodeId(12), b"asked"), false);
        let has = |late: &Late, dir: u64, name: &[u8]| late.has(Ino(dir), &Name::new(name));
        assert!(has(&late, 10, b"other") && has(&late, 12, b"asked"), "it is known when it is done");
        late.moves((DIR, b"other"), (NodeId(12), b"asked"), false);
        assert!(!has(&late, 10, b"other") && has(&late, 12, b"asked"));
        assert!(late.answers.values().all(|answer| answer.places().len() == 1));
        // A directory is in one place of the kernel: what it is told under.
        let asks = caller(&late, tid);
        assert!(late.begin(asks, (DIR, b"dir"), Some(Ino(20))));
        late.told(Ino(20), DIR, b"moved");
        late.told(Ino(21), DIR, b"others");
        assert!(late.awaits(is("dir")) && late.awaits(is("moved")) && !late.awaits(is("others")));
        drop(stop);
        runs.join().unwrap();
    }

    #[test]
    fn what_is_late_counts_as_held_after_an_epoch_too() {
        let (tid, stop, runs) = busy();
        let mut core = Core::default();
        let asks = caller(&core.names.late, tid);
        let name = |name: &str| vec![(DIR.ino(), Name::new(name.as_bytes()))];
        assert!(core.names.late.begin(asks, (DIR, b"a"), Some(Ino(20))));
        // Names of the directory are for one use from now on, and the kernel has none of before.
        core.heat(DIR.ino());
        core.names.dropped();
        core.names.late.told(Ino(20), DIR, b"b");
        // The caller has come to it, and nobody has said so.
        core.names.late.callers.asks(tid);
        assert!(core.expire(name("c"), &[]).is_empty());
        assert_eq!(core.expire(name("a"), &[]), name("a"));
        assert!(core.expire(name("a"), &[]).is_empty(), "it was");
        assert_eq!(core.expire(name("b"), &[]), name("b"));
        // What is held of a directory that somebody lists may get the new epoch.
        let asks = caller(&core.names.late, tid);
        core.tree.remember(DIR.ino());
        core.names.holds((DIR.ino(), &Name::new(b"d")));
        assert!(core.names.late.begin_listing(asks, DIR));
        core.names.dropped();
        assert_eq!(core.expire(name("d"), &[]), name("d"));
        core.names.holds((DIR.ino(), &Name::new(b"d")));
        core.names.late.callers.asks(tid);
        core.names.dropped();
        assert!(core.expire(name("d"), &[]).is_empty());
        drop(stop);
        runs.join().unwrap();
    }

    #[test]
    fn there_are_not_too_many() {
        let mut late = Late::default();
        let begun: Vec<bool> = (1 << 30..(1 << 30) + 2 * MOST as u32)
            .map(|tid| {
                let asks = caller(&late, tid);
                late.begin(asks, (DIR, b"a"), None)
            })
            .collect();
        assert!(late.answers.len() <= MOST && begun.into_iter().all(|begun| begun), "all have ended");
    }
}
