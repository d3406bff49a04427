//! Two hosts that make, rename, remove and read files, in directories of their own and in one that both change, and know what has to
//! be in each: for tests in which something else goes wrong meanwhile.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::setup::farm::{Mount, hayloft, noise, number};
use crate::setup::model::Random;

/// Files that a directory has at most: older ones are removed.
const KEPT: usize = 60;

/// A file that was made: its name says what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Made {
    seed: u64,
    len: usize,
    /// By which host, and the how many-th of it.
    host: usize,
    serial: u64,
    /// fsync(2) of it, and of its directory, has returned.
    durable: bool,
    /// It is being removed, or was: it may be there.
    removed: bool,
}

impl Made {
    fn content(&self) -> Vec<u8> {
        noise(self.seed, self.len)
    }
}

/// What all workers have made, by path.
type Known = Mutex<BTreeMap<String, Made>>;

/// Counts of what has happened.
#[derive(Default)]
pub(crate) struct Counts {
    pub made: AtomicUsize,
    pub read: AtomicUsize,
    pub refused: AtomicUsize,
    /// Files that were not fsynced, and were not there, or not yet as they were left: their host's session had ended.
    pub missing: AtomicUsize,
}

pub(crate) struct Work {
    /// The folders to work in: of each mount the same one.
    mounts: [PathBuf; 2],
    known: Known,
    pub counts: Counts,
    pub over: AtomicBool,
}

/// A call that failed since its batch did not get through in so many attempts, or found no room: whoever waits is told.
fn is_told(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOSPC))
}

/// What an ended session had not shipped is not there, until it is brought.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESTALE)
}

impl Work {
    /// In a folder of this name, which is made in two mounts.
    pub(crate) fn new(mounts: &[Mount], folder: &str) -> Work {
        let tops = [0, 1].map(|at| mounts[at].join(folder));
        for dir in ["both", "own-0", "own-1"] {
            fs::create_dir_all(tops[0].join(dir)).unwrap();
        }
        mounts[0].sync();
        let (known, counts, over) = (Known::default(), Counts::default(), AtomicBool::new(false));
        Work { mounts: tops, known, counts, over }
    }

    /// Lets both hosts work until `meanwhile` returns, or one of them has failed.
    pub(crate) fn run(&self, seed: u64, meanwhile: impl FnOnce(&AtomicBool)) {
        std::thread::scope(|scope| {
            for at in [0, 1] {
                scope.spawn(move || stopping(self, || self.write(at, Random::new(seed * 10 + at as u64))));
                scope.spawn(move || stopping(self, || self.read(at, Random::new(seed * 10 + 5 + at as u64))));
            }
            stopping(self, || meanwhile(&self.over));
        });
    }

    /// Whether all is as it was left; `below` is the folder in a mount that nobody changes now. Where something was lost
    /// and told (`lost` counts how often), that is what was not fsynced.
    pub(crate) fn verify(&self, below: &Path, lost: u64) {
        for (path, made) in self.known.lock().unwrap().iter() {
            match fs::read(below.join(path)) {
                Ok(content) => {
                    let is_early = !made.durable && lost > 0 && made.content().starts_with(&content);
                    assert!(content == made.content() || is_early, "{path} has wrong data: {made:?}");
                }
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::NotFound, "{path}: {error}");
                    assert!(!made.durable || made.removed, "{path} was fsynced, and is missing");
                    assert!(made.removed || lost > 0, "{path} is missing");
                }
            }
        }
    }

    /// Makes files, in a directory of its own and in one that both hosts change, renames and removes them.
    fn write(&self, at: usize, mut random: Random) {
        let mut serial = 0;
        let mut own: Vec<String> = Vec::new();
        while !self.over.load(Ordering::SeqCst) {
            serial += 1;
            let dir = if random.below(3) == 0 { "both".to_owned() } else { format!("own-{at}") };
            let len = match random.below(10) {
                0 => 200_000 + random.below(900_000),
                1..4 => 5000 + random.below(60_000),
                _ => 1 + random.below(3000),
            } as usize;
            let seed = random.below(1 << 40);
            let mut made = Made { seed, len, host: at, serial, durable: false, removed: false };
            let path = format!("{dir}/{at}-{serial}");
            let durable = random.below(2) == 0;
            match self.make(at, &path, &made, durable, random.below(2) == 0) {
                Ok(()) => {
                    made.durable = durable;
                    self.known.lock().unwrap().insert(path.clone(), made);
                    self.counts.made.fetch_add(1, Ordering::SeqCst);
                    own.push(path);
                }
                Err(error) if is_told(&error) => drop(self.counts.refused.fetch_add(1, Ordering::SeqCst)),
                Err(error) => panic!("{path}: {error}"),
            }
            if own.len() > KEPT {
                let path = own.swap_remove(random.below(own.len() as u64) as usize);
                self.known.lock().unwrap().get_mut(&path).unwrap().removed = true;
                match fs::remove_file(self.mounts[at].join(&path)) {
                    Ok(()) => {}
                    Err(error) if is_told(&error) || error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => panic!("{path} is removed: {error}"),
                }
            }
        }
    }

    /// Writes a file, perhaps under another name at first.
    fn make(&self, at: usize, path: &str, made: &Made, durable: bool, rename: bool) -> io::Result<()> {
        let full = self.mounts[at].join(path);
        let first = if rename { full.with_extension("new") } else { full.clone() };
        let mut file = File::create(&first)?;
        file.write_all(&made.content())?;
        if durable {
            file.sync_all()?;
        }
        drop(file);
        if rename {
            fs::rename(&first, &full)?;
        }
        if durable {
            File::open(full.parent().unwrap())?.sync_all()?;
        }
        Ok(())
    }

    /// Reads what the other host, or this one, has made; in one of two cases what the other one has made last.
    fn read(&self, at: usize, mut random: Random) {
        while !self.over.load(Ordering::SeqCst) {
            let picked = {
                let known = self.known.lock().unwrap();
                let there: Vec<(&String, &Made)> = known.iter().filter(|(_, made)| !made.removed).collect();
                let picked = match random.below(2) {
                    0 => there.iter().filter(|(_, made)| made.host != at).max_by_key(|(_, made)| made.serial),
                    _ => there.get(random.below(there.len().max(1) as u64) as usize),
                };
                picked.map(|(path, made)| ((*path).clone(), **made))
            };
            let Some((path, made)) = picked else {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
            match fs::read(self.mounts[at].join(&path)) {
                Ok(content) => {
                    let (right, is_early) = (made.content(), content.len() < made.len && !made.durable);
                    let is_right = content == right || is_early && right.starts_with(&content);
                    assert!(
                        is_right,
                        "{path} has wrong data at mount {at}: {made:?}, {} bytes",
                        content.len()
                    );
                    self.counts.read.fetch_add(1, Ordering::SeqCst);
                    self.counts.missing.fetch_add(usize::from(is_early), Ordering::SeqCst);
                }
                // ESTALE: it was there a moment ago.
                Err(error) if is_gone(&error) => {
                    let removed = self.known.lock().unwrap()[&path].removed;
                    assert!(
                        removed || !made.durable,
                        "{path} was fsynced, and is missing at mount {at}: {error}"
                    );
                    self.counts.missing.fetch_add(usize::from(!removed), Ordering::SeqCst);
                }
                Err(error) => panic!("{path} cannot be read: {error}"),
            }
        }
    }
}

/// Leaves a mount. What an ended session had not shipped, and others have changed since, is kept, which is told: none of it was fsynced.
pub(crate) fn leave(mount: Mount, replaced: u64) {
    let synced = hayloft(["sync"]).arg(mount.path()).output().unwrap();
    if synced.status.success() {
        return mount.unmount();
    }
    let said = String::from_utf8_lossy(&synced.stderr);
    assert!(replaced > 0 && said.contains("are kept in"), "{said}");
    mount.kill();
}

pub(crate) fn of_all(mounts: &[Mount], key: &str) -> u64 {
    mounts.iter().map(|mount| number(&mount.stats(), key)).sum()
}

/// When one fails, the others stop.
fn stopping(work: &Work, run: impl FnOnce()) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let _stop = Stop(&work.over);
    run();
}
