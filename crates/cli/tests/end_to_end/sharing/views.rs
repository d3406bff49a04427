//! What a host sees of another one's changes while these are under way never goes back.
//!
//! One host changes a directory step by step, and programs of another look at it by every call that tells its state. A look
//! is possible at some of the steps; the first of these that is not before what was seen already is what it has seen.
//! Where there is none, the view has gone back.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, kill, number, rounds, seed};
use crate::setup::model::Random;

/// Names that change. The first ones are of files, or absent; the others of directories.
const NAMES: [&str; 6] = ["file-a", "file-b", "file-c", "dir-a", "dir-b", "dir-c"];
const FILES: usize = 3;
/// Changes of one directory.
const STEPS: usize = 4;

/// What the names lead to; 0: they are not there.
type State = [usize; NAMES.len()];

/// A change of names.
#[derive(Clone, Copy, Debug)]
enum Step {
    Make(usize),
    Remove(usize),
    /// In place of what is there, if anything.
    Rename(usize, usize),
    /// Of a file.
    Link(usize, usize),
}

impl Step {
    /// One that is possible.
    fn any(state: &State, random: &mut Random) -> Step {
        let at = random.below(NAMES.len() as u64) as usize;
        if state[at] == 0 {
            return Step::Make(at);
        }
        let to = at / FILES * FILES + random.below(FILES as u64) as usize;
        match random.below(3) {
            0 => Step::Remove(at),
            1 if at < FILES && state[to] == 0 => Step::Link(at, to),
            // Two names of one file stay.
            _ if state[to] == state[at] => Step::Remove(at),
            _ => Step::Rename(at, to),
        }
    }

    /// `new`: a number that nothing else has.
    fn after(self, mut state: State, new: usize) -> State {
        match self {
            Step::Make(at) => state[at] = new,
            Step::Remove(at) => state[at] = 0,
            Step::Rename(from, to) => (state[from], state[to]) = (0, state[from]),
            Step::Link(from, to) => state[to] = state[from],
        }
        state
    }

    fn make(self, dir: &Path) {
        let path = |at: usize| dir.join(NAMES[at]);
        match self {
            Step::Make(at) if at < FILES => drop(File::create_new(path(at)).unwrap()),
            Step::Make(at) => fs::create_dir(path(at)).unwrap(),
            Step::Remove(at) if at < FILES => fs::remove_file(path(at)).unwrap(),
            Step::Remove(at) => fs::remove_dir(path(at)).unwrap(),
            Step::Rename(from, to) => fs::rename(path(from), path(to)).unwrap(),
            Step::Link(from, to) => fs::hard_link(path(from), path(to)).unwrap(),
        }
    }
}

/// What a look has shown.
#[derive(Clone, Debug, PartialEq)]
enum Shown {
    Name(usize, bool),
    /// Names of the file, if the name is there.
    Links(usize, u64),
    /// Names of what the first name led to at the beginning.
    Held(u64),
    List([bool; NAMES.len()]),
    /// Links and time of the directory.
    Directory(u64, (i64, i64)),
}

/// The ways to look.
const WAYS: [&str; 8] = [
    "stat",
    "open",
    "a call for the other kind",
    "a new listing",
    "a listing that begins anew",
    "stat of the directory",
    "fstat of the directory",
    "fstat of a file",
];

/// A look at a directory.
#[derive(Clone, Debug)]
struct Look {
    begun: Instant,
    ended: Instant,
    way: usize,
    shown: Shown,
    /// Steps that had returned before it, and that had begun before its end.
    returned: usize,
    started: usize,
}

fn is_there<T>(result: io::Result<T>, otherwise: i32) -> bool {
    match result {
        Ok(_) => true,
        Err(error) if error.raw_os_error() == Some(otherwise) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => panic!("{error}"),
    }
}

fn list(dir: &File) -> [bool; NAMES.len()] {
    let listed = calls::list_once(dir, 4096);
    NAMES.map(|name| listed.iter().any(|listed| listed == name.as_bytes()))
}

fn look(dir: &Path, (open, held): (&File, &Option<File>), way: usize, at: usize) -> Shown {
    let path = dir.join(NAMES[at]);
    let times = |info: fs::Metadata| Shown::Directory(info.nlink(), (info.mtime(), info.mtime_nsec()));
    match way {
        0 if at < FILES => match fs::symlink_metadata(path) {
            Ok(info) => Shown::Links(at, info.nlink()),
            Err(error) => Shown::Name(at, is_there::<()>(Err(error), 0)),
        },
        0 => Shown::Name(at, is_there(fs::symlink_metadata(path), 0)),
        1 => Shown::Name(at, is_there(File::open(path), 0)),
        2 if at < FILES => Shown::Name(at, is_there(fs::remove_dir(path), libc::ENOTDIR)),
        2 => Shown::Name(at, is_there(fs::remove_file(path), libc::EISDIR)),
        3 => Shown::List(list(&File::open(dir).unwrap())),
        4 => {
            calls::seek(open, 0, libc::SEEK_SET).unwrap();
            Shown::List(list(open))
        }
        5 => times(fs::metadata(dir).unwrap()),
        7 if held.is_some() => Shown::Held(held.as_ref().unwrap().metadata().unwrap().nlink()),
        _ => times(open.metadata().unwrap()),
    }
}

/// The states of a directory, one after the other, and its times then.
struct History {
    states: Vec<State>,
    times: Vec<(i64, i64)>,
}

impl History {
    /// Whether a look from one step on may show this at another.
    fn is_possible(&self, shown: &Shown, from: usize, step: usize) -> bool {
        let state = self.states[step];
        let count = |of: usize| state.iter().filter(|other| **other == of).count() as u64;
        match shown {
            Shown::Name(at, there) => (state[*at] != 0) == *there,
            // The name is looked up first; what it led to may have lost it by then.
            Shown::Links(at, links) => {
                let found = self.states[from..=step].iter().map(|state| state[*at]);
                found.filter(|of| *of != 0).any(|of| count(of) == *links)
            }
            Shown::Held(links) => count(self.states[0][0]) == *links,
            Shown::List(list) => state.map(|of| of != 0) == *list,
            Shown::Directory(links, time) => {
                let dirs = state[FILES..].iter().filter(|of| **of != 0).count() as u64;
                *links == 2 + dirs && *time == self.times[step]
            }
        }
    }

    /// Where the view went back: which way of looking was followed by which.
    fn check(&self, looks: &[Look]) -> Vec<(usize, usize, String)> {
        let mut moments: Vec<(Instant, bool, usize)> = Vec::new();
        for (number, look) in looks.iter().enumerate() {
            moments.extend([(look.begun, true, number), (look.ended, false, number)]);
        }
        moments.sort_by_key(|(at, begins, _)| (*at, *begins));
        let (mut seen, mut by) = (0, None);
        let mut least = vec![(0, None); looks.len()];
        let mut back = Vec::new();
        for (_, begins, number) in moments {
            let look = &looks[number];
            if begins {
                least[number] = (seen.max(look.returned), by);
                continue;
            }
            let (from, before): (usize, Option<usize>) = least[number];
            match (from..=look.started).find(|step| self.is_possible(&look.shown, from, *step)) {
                Some(step) if step > seen => (seen, by) = (step, Some(number)),
                Some(_) => {}
                None => {
                    let earlier = before.map(|before| &looks[before]);
                    let text = format!("{look:?}\nafter {earlier:?}\nof {:?} {:?}", self.states, self.times);
                    back.push((earlier.map_or(look.way, |earlier| earlier.way), look.way, text));
                }
            }
        }
        back
    }
}

/// Changes a new directory step by step on one mount, and looks at it on another.
fn round(
    mounts: &[Mount],
    number: usize,
    lookers: usize,
    random: &mut Random,
) -> Vec<(usize, usize, String)> {
    let name = format!("round-{number}");
    let dirs = [mounts[0].join(&name), mounts[1].join(&name)];
    fs::create_dir(&dirs[0]).unwrap();
    let mut states: Vec<State> = vec![std::array::from_fn(|at| (at + 1) * random.below(2) as usize)];
    (0..NAMES.len()).filter(|at| states[0][*at] != 0).for_each(|at| Step::Make(at).make(&dirs[0]));
    let steps: Vec<Step> = (0..STEPS)
        .map(|at| {
            let step = Step::any(&states[at], random);
            states.push(step.after(states[at], NAMES.len() + 1 + at));
            step
        })
        .collect();
    let time = || {
        let info = fs::metadata(&dirs[0]).unwrap();
        (info.mtime(), info.mtime_nsec())
    };
    let (started, returned, over) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let barrier = Barrier::new(lookers + 1);
    let mut times = vec![time()];
    let mut looks: Vec<Look> = std::thread::scope(|scope| {
        let looking: Vec<_> = (0..lookers)
            .map(|me| {
                let (dir, started, returned, over) = (&dirs[1], &started, &returned, &over);
                let (barrier, mut random) = (&barrier, Random::new(random.below(1 << 40) + me as u64));
                scope.spawn(move || {
                    // The kernel knows everything before.
                    let open = File::open(dir).unwrap();
                    let held = File::open(dir.join(NAMES[0])).ok();
                    let open = (&open, &held);
                    for at in 0..WAYS.len() * NAMES.len() {
                        look(dir, open, at % WAYS.len(), at / WAYS.len());
                    }
                    barrier.wait();
                    let mut looks = Vec::new();
                    while !over.load(Ordering::SeqCst) {
                        let way = random.below(WAYS.len() as u64) as usize;
                        let at = random.below(NAMES.len() as u64) as usize;
                        let (begun, returned) = (Instant::now(), returned.load(Ordering::SeqCst));
                        let shown = look(dir, open, way, at);
                        let (started, ended) = (started.load(Ordering::SeqCst), Instant::now());
                        looks.push(Look { begun, ended, way, shown, returned, started });
                    }
                    looks
                })
            })
            .collect();
        barrier.wait();
        for (at, step) in steps.iter().enumerate() {
            std::thread::sleep(Duration::from_micros(random.below(500)));
            started.store(at + 1, Ordering::SeqCst);
            step.make(&dirs[0]);
            returned.store(at + 1, Ordering::SeqCst);
            times.push(time());
        }
        over.store(true, Ordering::SeqCst);
        looking.into_iter().flat_map(|looking| looking.join().unwrap()).collect()
    });
    looks.sort_by_key(|look| look.begun);
    fs::remove_dir_all(&dirs[0]).unwrap();
    History { states, times }.check(&looks)
}

fn never_goes_back(lookers: usize, count: usize) {
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let farm = Farm::with(Some(store.path()), &[]);
    farm.create("v");
    let mounts = farm.mounts("v", 2, "");
    let mut random = Random::new(seed() + lookers as u64);
    let (mut kinds, mut first, mut rounds_back, mut rounds_late) = (BTreeMap::new(), None, 0, 0);
    // Whoever gets no processor while it has the lock of the directory keeps the kernel from letting go of names in time,
    // which docs/semantics.md says, and is counted.
    let late = || number(&mounts[1].stats(), "server.late_names");
    for at in 0..count {
        let before = late();
        let back = round(&mounts, at, lookers, &mut random);
        if late() > before {
            rounds_late += 1;
            continue;
        }
        rounds_back += usize::from(!back.is_empty());
        for (before, after, text) in back {
            *kinds.entry((WAYS[before], WAYS[after])).or_insert(0) += 1;
            first.get_or_insert(text);
        }
    }
    println!("names were late in {rounds_late} of {count} rounds");
    assert!(rounds_late < count / 2, "the kernel is told too late in {rounds_late} of {count} rounds");
    let first = first.unwrap_or_default();
    assert!(kinds.is_empty(), "in {rounds_back} of {count} rounds: {kinds:#?}\n{first}");
}

#[test]
fn what_one_program_sees_of_a_change_under_way_never_goes_back() {
    never_goes_back(1, rounds(120, 3000));
}

#[test]
fn what_programs_of_a_host_see_of_a_change_under_way_never_goes_back() {
    never_goes_back(3, rounds(80, 3000));
}

/// What a program is told that tries to make what another host is just making, and what it finds then.
#[test]
fn what_is_said_to_be_there_is_there() {
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let farm = Farm::with(Some(store.path()), &[]);
    farm.create("v");
    let mounts = farm.mounts("v", 2, "");
    let mut random = Random::new(seed());
    let (mut told, mut lost, count) = (0, Vec::new(), rounds(150, 5000));
    // How long the other's call takes, so that both meet.
    let mut takes = Duration::from_millis(5);
    for number in 0..count {
        let dirs = [0, 1].map(|at| mounts[at].join(&format!("round-{number}")));
        fs::create_dir(&dirs[0]).unwrap();
        let paths: Vec<PathBuf> = dirs.iter().map(|dir| dir.join("name")).collect();
        let open = File::open(&dirs[1]).unwrap();
        assert!(!is_there(fs::metadata(&paths[1]), 0) && calls::list_once(&open, 4096).len() == 2);
        let makes_dir = number % 2 == 0;
        let barrier = Barrier::new(2);
        let delay = Duration::from_nanos(random.below(takes.as_nanos() as u64 * 3 / 2));
        let (error, is_found, is_listed) = std::thread::scope(|scope| {
            let tries = scope.spawn(|| {
                barrier.wait();
                std::thread::sleep(delay);
                let made = match makes_dir {
                    true => calls::open(&paths[1], libc::O_CREAT | libc::O_WRONLY, 0o644).map(drop),
                    false => fs::create_dir(&paths[1]),
                };
                let is_found = is_there(fs::metadata(&paths[1]), 0);
                calls::seek(&open, 0, libc::SEEK_SET).unwrap();
                let names = calls::list_once(&open, 4096);
                (made.err(), is_found, names.iter().any(|name| name == b"name"))
            });
            barrier.wait();
            let begun = Instant::now();
            // Either may be the first.
            let _ = if makes_dir { fs::create_dir(&paths[0]) } else { File::create_new(&paths[0]).map(drop) };
            takes = (takes * 7
                + begun.elapsed().clamp(Duration::from_micros(100), Duration::from_millis(50)))
                / 8;
            tries.join().unwrap()
        });
        if let Some(error) = error {
            let expected = if makes_dir { libc::EISDIR } else { libc::EEXIST };
            assert_eq!(error.raw_os_error(), Some(expected), "{error}");
            told += 1;
            if !is_found || !is_listed {
                lost.push((number, makes_dir, is_found, is_listed));
            }
        }
        fs::remove_dir_all(&dirs[0]).unwrap();
    }
    assert!(told > 0);
    assert!(lost.is_empty(), "{} of {told} (of {count}) are not there: {lost:?}", lost.len());
}

/// One host makes a name and does not return from that, since another one has not heard of it: nobody sees the name yet. Else
/// who has seen it would tell a program on the host that has not heard, and that would look for it in vain.
#[test]
fn what_one_host_sees_every_other_sees_that_looks_later() {
    let (_farm, mounts) = Farm::shared_with(4, "", &["--lease", "30"]);
    let [maker, looker, lister, late] = &mounts[..] else { unreachable!() };
    fs::create_dir(maker.join("shared")).unwrap();
    for (at, mount) in mounts.iter().enumerate() {
        fs::create_dir(mount.join(&format!("shared/of-{at}"))).unwrap();
        assert!(!mount.join("shared/new").exists());
    }
    kill(late.pid(), libc::SIGSTOP);
    let seen = AtomicUsize::new(0);
    let see = |is_seen: bool| {
        if is_seen {
            seen.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| fs::create_dir(maker.join("shared/new")).unwrap());
        std::thread::sleep(Duration::from_millis(300));
        scope.spawn(|| see(looker.join("shared/new").exists()));
        let has = |name: io::Result<fs::DirEntry>| name.unwrap().file_name() == "new";
        scope.spawn(move || see(fs::read_dir(lister.join("shared")).unwrap().any(has)));
        scope.spawn(|| see(fs::create_dir(lister.join("shared/new")).is_err()));
        std::thread::sleep(Duration::from_millis(700));
        let seen_early = seen.load(Ordering::Relaxed);
        kill(late.pid(), libc::SIGCONT);
        assert_eq!(seen_early, 0, "seen by others, and not known to all");
    });
    assert!(late.join("shared/new").exists());
    // Nothing is left to wait for.
    mounts.iter().for_each(|mount| assert!(mount.join("shared/new").is_dir()));
}
