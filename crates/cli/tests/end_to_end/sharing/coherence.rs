//! What one mount has changed is seen by every other from the moment the call has returned.
//!
//! Each round, all mounts look at the names concerned first, so that their kernels remember them, also those
//! that are not there; then one changes something, and the others are asked what they see. `HAYLOFT_TEST_LONG`
//! makes it 20,000 rounds, `HAYLOFT_TEST_SEED` others.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, rounds, seed, wait_until};
use crate::setup::model::Random;
use crate::sharing::kinds::{KINDS, Kind};

/// Everything that can be seen of a file, save its access time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub ino: u64,
    pub mode: u32,
    pub nlink: u64,
    pub owner: (u32, u32),
    pub size: u64,
    pub mtime: (i64, i64),
    pub ctime: (i64, i64),
    /// Bytes, names of a directory, or a link's target.
    pub content: Content,
    pub xattrs: Vec<(String, Vec<u8>)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    Bytes { len: usize, hash: u64 },
    Names(Vec<String>),
    Target(PathBuf),
}

impl Content {
    pub(crate) fn bytes(bytes: &[u8]) -> Content {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        Content::Bytes { len: bytes.len(), hash: hasher.finish() }
    }
}

impl Seen {
    fn new(info: &fs::Metadata, content: Content, xattrs: Vec<(String, Vec<u8>)>) -> Seen {
        Seen {
            ino: info.ino(),
            mode: info.mode(),
            nlink: info.nlink(),
            owner: (info.uid(), info.gid()),
            size: info.size(),
            mtime: (info.mtime(), info.mtime_nsec()),
            ctime: (info.ctime(), info.ctime_nsec()),
            content,
            xattrs,
        }
    }
}

/// Looks at a path by every call there is.
fn look(path: &Path) -> io::Result<Option<Seen>> {
    let found = || -> io::Result<Seen> {
        let info = fs::symlink_metadata(path)?;
        let content = if info.is_symlink() {
            Content::Target(fs::read_link(path)?)
        } else if info.is_dir() {
            let names =
                fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            let mut names = names.collect::<io::Result<Vec<String>>>()?;
            names.sort();
            Content::Names(names)
        } else {
            Content::bytes(&fs::read(path)?)
        };
        let names = calls::list_xattr(path)?.into_iter().filter(|name| name.starts_with("user."));
        let xattrs = names.map(|name| calls::get_xattr(path, &name).map(|value| (name, value)));
        Ok(Seen::new(&info, content, xattrs.collect::<io::Result<_>>()?))
    };
    match found() {
        Ok(seen) => Ok(Some(seen)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Looks through a descriptor that was opened before.
fn look_through(mut file: &File) -> io::Result<Seen> {
    let info = file.metadata()?;
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(Seen::new(&info, Content::bytes(&bytes), Vec::new()))
}

/// What a mount sees of these names of a directory, of the directory, and through an open descriptor.
#[derive(Debug, PartialEq, Eq)]
struct View {
    names: Vec<Option<Seen>>,
    dir: Option<Seen>,
    held: Option<Seen>,
}

impl View {
    fn of_names(&self) -> Vec<Option<&Seen>> {
        self.names.iter().map(Option::as_ref).collect()
    }
}

impl View {
    /// The same without the times of the directory.
    fn without_times(&self) -> View {
        let dir = self.dir.clone().map(|dir| Seen { mtime: (0, 0), ctime: (0, 0), ..dir });
        View { names: self.names.clone(), dir, held: self.held.clone() }
    }
}

/// What several mounts see. While several make files in a directory its times run with the clock, and stand still soon
/// after (docs/semantics.md): if that is all in which they differ, it is waited for.
fn views(look: impl Fn() -> Vec<View>) -> Vec<View> {
    let seen = look();
    let all_same = |views: &[View]| views.iter().all(|view| *view == views[0]);
    let plain: Vec<View> = seen.iter().map(View::without_times).collect();
    if all_same(&seen) || !all_same(&plain) {
        return seen;
    }
    let mut again = seen;
    wait_until("the times of a directory stand still", Duration::from_secs(20), || {
        again = look();
        all_same(&again)
    });
    again
}

fn view(dir: &Path, names: &[&str], held: Option<&File>) -> View {
    let at = |path: &Path| look(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    View {
        names: names.iter().map(|name| at(&dir.join(name))).collect(),
        dir: at(dir),
        held: held.map(|file| look_through(file).unwrap()),
    }
}

/// Empties a directory.
fn clear(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            fs::remove_dir_all(entry.path()).unwrap();
        } else {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

/// Threads that look at a directory through every mount all the time: an answer of theirs that was under way
/// while something changed must not stay in a cache.
fn with_onlookers(mounts: &[Mount], names: &[&str], work: impl FnOnce(&Mutex<String>)) {
    let (stop, at) = (AtomicBool::new(false), Mutex::new(String::from("none")));
    std::thread::scope(|scope| {
        for mount in mounts {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let dir = mount.join(&at.lock().unwrap().clone());
                    // What is there may change at any time, so all answers will do.
                    let _ = look(&dir);
                    names.iter().for_each(|name| drop(look(&dir.join(name))));
                }
            });
        }
        // Stopped by a panic as well.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(&stop);
        work(&at);
    });
}

struct Round<'a> {
    mounts: &'a [Mount],
    dir: String,
    kind: &'a Kind,
    maker: usize,
    /// All look before, so that their caches are full.
    warm: bool,
    /// A file stays open on all mounts meanwhile.
    hold: bool,
}

impl Round<'_> {
    fn dir_on(&self, mount: usize) -> PathBuf {
        self.mounts[mount].join(&self.dir)
    }

    /// What was missed, in words.
    fn run(&self, preparer: usize, cleaner: usize) -> Vec<String> {
        let (kind, count) = (self.kind, self.mounts.len());
        let dirs: Vec<PathBuf> = (0..count).map(|mount| self.dir_on(mount)).collect();
        (kind.prepare)(&dirs[preparer]);
        let before = view(&dirs[self.maker], kind.names, None);
        if self.warm {
            dirs.iter().for_each(|dir| drop(view(dir, kind.names, None)));
        }
        let held: Vec<Option<File>> = dirs
            .iter()
            .map(|dir| dir.join("a"))
            .map(|path| (self.hold && path.is_file()).then(|| File::open(&path).unwrap()))
            .collect();
        let kept_open = (kind.change)(&dirs[self.maker]);
        // The one that made it comes last: its own look must not help.
        let order: Vec<usize> = (1..=count).map(|step| (self.maker + step) % count).collect();
        let views =
            views(|| order.iter().map(|at| view(&dirs[*at], kind.names, held[*at].as_ref())).collect());
        let truth = views.last().unwrap();
        let mut missed = Vec::new();
        for (at, view) in order.iter().zip(&views).filter(|(_, view)| *view != truth) {
            missed.push(format!("mount {at} saw\n{view:#?}\nwhere mount {} has\n{truth:#?}", self.maker));
        }
        let empty = Vec::new();
        let is_so = (kind.is_so)(&before.of_names(), &truth.of_names());
        if !is_so {
            missed.push(format!("it was not done at all: {before:#?} became {truth:#?}"));
        }
        drop((kept_open, held));
        clear(&dirs[cleaner]);
        for (at, dir) in dirs.iter().enumerate() {
            let left = match look(dir).unwrap().unwrap().content {
                Content::Names(names) => names,
                _ => empty.clone(),
            };
            let known: Vec<&&str> =
                kind.names.iter().filter(|name| look(&dir.join(name)).unwrap().is_some()).collect();
            if !left.is_empty() || !known.is_empty() {
                missed.push(format!(
                    "mount {at} saw {left:?} and {known:?} after mount {cleaner} had removed everything"
                ));
            }
        }
        missed
            .into_iter()
            .map(|text| format!("{} in {} by mount {}: {text}", kind.name, self.dir, self.maker))
            .collect()
    }
}

/// The rounds, each with some kind of change.
fn run_rounds(mounts: &[Mount], count: usize, seed: u64, mut enter: impl FnMut(&str)) {
    let mut random = Random::new(seed);
    let mut pick = |end: usize| random.below(end as u64) as usize;
    for dir in 0..4 {
        fs::create_dir(mounts[dir % mounts.len()].join(&format!("dir-{dir}"))).unwrap();
    }
    let mut missed: Vec<String> = Vec::new();
    let (mut maker, mut streak) = (0, 0);
    for round in 0..count {
        // Mostly another mount each time; now and then one has the tree for itself for a while.
        if streak == 0 {
            maker = pick(mounts.len());
            streak = if pick(20) == 0 { 15 } else { 1 };
        }
        streak -= 1;
        let fresh = pick(8) == 0;
        let dir = if fresh { format!("fresh-{round}") } else { format!("dir-{}", pick(4)) };
        if fresh {
            fs::create_dir(mounts[maker].join(&dir)).unwrap();
        }
        enter(&dir);
        let preparer = if fresh { maker } else { pick(mounts.len()) };
        let cleaner = pick(mounts.len());
        let kind = &KINDS[round % KINDS.len()];
        let round = Round { mounts, dir, kind, maker, warm: pick(6) != 0, hold: pick(2) == 0 };
        missed.extend(round.run(preparer, cleaner));
        if fresh {
            fs::remove_dir(mounts[pick(mounts.len())].join(&round.dir)).unwrap();
        }
        assert!(missed.len() < 5, "seed {seed}: {}", missed.join("\n"));
    }
    assert!(missed.is_empty(), "seed {seed}: {}", missed.join("\n"));
}

#[test]
fn a_change_is_seen_everywhere_when_its_call_has_returned() {
    let (_farm, mounts) = Farm::shared(4);
    run_rounds(&mounts, rounds(500, 20_000), seed(), |_| {});
}

#[test]
fn a_change_is_seen_everywhere_while_all_look_all_the_time() {
    let (_farm, mounts) = Farm::shared(4);
    with_onlookers(&mounts, &["a", "b", "d", "e"], |at| {
        run_rounds(&mounts, rounds(150, 5000), seed() + 1, |dir| dir.clone_into(&mut at.lock().unwrap()));
    });
}

/// A change that only one of several can make, and what the others are told.
struct Race {
    name: &'static str,
    prepare: fn(&Path, usize),
    /// With the number of the runner.
    change: fn(&Path, usize) -> io::Result<()>,
    loser: i32,
}

const NO_REPLACE: u32 = 1;

fn each(count: usize, prefix: &str, dir: &Path) {
    (0..count).for_each(|at| fs::write(dir.join(format!("{prefix}{at}")), at.to_string()).unwrap());
}

const RACES: &[Race] = &[
    Race {
        name: "O_EXCL",
        prepare: |_, _| {},
        change: |dir, _| {
            calls::open(&dir.join("a"), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o644).map(drop)
        },
        loser: libc::EEXIST,
    },
    Race {
        name: "mkdir",
        prepare: |_, _| {},
        change: |dir, _| fs::create_dir(dir.join("a")),
        loser: libc::EEXIST,
    },
    Race {
        name: "symlink",
        prepare: |_, _| {},
        change: |dir, at| std::os::unix::fs::symlink(at.to_string(), dir.join("a")),
        loser: libc::EEXIST,
    },
    Race {
        name: "link",
        prepare: |dir, count| each(count, "own-", dir),
        change: |dir, at| fs::hard_link(dir.join(format!("own-{at}")), dir.join("a")),
        loser: libc::EEXIST,
    },
    Race {
        name: "rename without replacing",
        prepare: |dir, count| each(count, "own-", dir),
        change: |dir, at| calls::rename(&dir.join(format!("own-{at}")), &dir.join("a"), NO_REPLACE),
        loser: libc::EEXIST,
    },
    Race {
        name: "rename away",
        prepare: |dir, _| fs::write(dir.join("a"), b"x").unwrap(),
        change: |dir, at| fs::rename(dir.join("a"), dir.join(format!("to-{at}"))),
        loser: libc::ENOENT,
    },
    Race {
        name: "unlink",
        prepare: |dir, _| fs::write(dir.join("a"), b"x").unwrap(),
        change: |dir, _| fs::remove_file(dir.join("a")),
        loser: libc::ENOENT,
    },
    Race {
        name: "rmdir",
        prepare: |dir, _| fs::create_dir(dir.join("a")).unwrap(),
        change: |dir, _| fs::remove_dir(dir.join("a")),
        loser: libc::ENOENT,
    },
];

#[test]
fn of_simultaneous_exclusive_changes_exactly_one_wins() {
    let (_farm, mounts) = Farm::shared(4);
    fs::create_dir(mounts[0].join("dir")).unwrap();
    let dirs: Vec<PathBuf> = mounts.iter().map(|mount| mount.join("dir")).collect();
    for round in 0..rounds(15, 500) {
        for race in RACES {
            (race.prepare)(&dirs[round % dirs.len()], dirs.len());
            dirs.iter().for_each(|dir| drop(view(dir, &["a"], None)));
            let barrier = Barrier::new(dirs.len());
            let run = &|at: usize| {
                barrier.wait();
                (race.change)(&dirs[at], at)
            };
            let outcomes: Vec<io::Result<()>> = std::thread::scope(|scope| {
                let runners: Vec<_> = (0..dirs.len()).map(|at| scope.spawn(move || run(at))).collect();
                runners.into_iter().map(|runner| runner.join().unwrap()).collect()
            });
            let won = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            let lost = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()?.raw_os_error());
            assert!(won == 1 && lost.clone().all(|errno| errno == race.loser), "{}: {outcomes:?}", race.name);
            let views = views(|| dirs.iter().map(|dir| view(dir, &["a"], None)).collect());
            assert!(views.iter().all(|view| *view == views[0]), "{}: {views:#?}", race.name);
            clear(&dirs[(round + 1) % dirs.len()]);
        }
    }
}

#[test]
fn times_never_go_backwards() {
    let (_farm, mounts) = Farm::shared(3);
    let times = |path: &Path| {
        let info = fs::metadata(path).unwrap();
        ((info.mtime(), info.mtime_nsec()), (info.ctime(), info.ctime_nsec()))
    };
    let mut last = ((0, 0), (0, 0));
    let mut last_of_all = (0, 0);
    for round in 0..rounds(200, 5000) {
        let (one, other) = (&mounts[round % 3], &mounts[(round + 1) % 3]);
        // One file that is changed here and there.
        fs::write(one.join("file"), round.to_string()).unwrap();
        let now = times(&other.join("file"));
        assert!(now.0 >= last.0 && now.1 >= last.1, "round {round}: {now:?} after {last:?}");
        last = now;
        // What make goes by: the product is not older than its source, wherever either was made.
        fs::write(one.join("source"), round.to_string()).unwrap();
        let text = fs::read(other.join("source")).unwrap();
        fs::write(other.join(&format!("product-{}", round % 5)), text).unwrap();
        for mount in &mounts {
            let source = times(&mount.join("source")).0;
            let product = times(&mount.join(&format!("product-{}", round % 5))).0;
            assert!(
                last_of_all <= source && source <= product,
                "round {round}: {last_of_all:?} {source:?} {product:?}"
            );
        }
        last_of_all = times(&one.join(&format!("product-{}", round % 5))).0;
    }
}
