//! What one worker does in each part, every call timed.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Looks;
use crate::rng::{Rng, mix};
use crate::sys;

/// An object file of the usual size.
const OBJECT: usize = 20_000;
/// What libtool's dependency tracking writes for each object.
const DEPENDENCIES: usize = 3000;
/// What IO500's mdtest-hard writes to each file.
const HARD: usize = 3901;
/// What a worker of a crowd leaves in its directory.
const CROWD_LEFT: usize = 8;
/// A log, and what is written to it at a time.
const LOG: usize = 65_536;
const LINE: usize = 64;
/// How often who waits for an object looks for it.
const LOOK: Duration = Duration::from_millis(1);

/// The calls of one worker, by kind, in seconds.
pub(super) type Calls = Vec<(&'static str, Vec<f64>)>;

/// Adds calls to those of their kind. Kinds stay in the order in which they came.
pub(super) fn add(calls: &mut Calls, call: &'static str, times: impl IntoIterator<Item = f64>) {
    match calls.iter_mut().find(|(known, _)| *known == call) {
        Some((_, all)) => all.extend(times),
        None => calls.push((call, times.into_iter().collect())),
    }
}

pub(super) struct Worker<'a> {
    pub(super) number: usize,
    pub(super) all: usize,
    pub(super) dir: &'a Path,
    pub(super) until: Instant,
    pub(super) calls: Calls,
}

impl Worker<'_> {
    fn timed<T>(&mut self, call: &'static str, what: impl FnOnce() -> io::Result<T>) -> Result<T> {
        let begun = Instant::now();
        let done = what().with_context(|| format!("{call} in {}", self.dir.display()))?;
        add(&mut self.calls, call, [begun.elapsed().as_secs_f64()]);
        Ok(done)
    }

    /// Goes on until the time is over. Returns how often.
    fn repeat(&mut self, mut once: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<usize> {
        let mut done = 0;
        while Instant::now() < self.until {
            sys::check_interrupted()?;
            once(self, done)?;
            done += 1;
        }
        Ok(done)
    }

    fn create(&mut self, path: &Path, bytes: usize) -> Result<()> {
        self.timed("create", || File::create_new(path)?.write_all(&vec![b'x'; bytes]))
    }

    fn own_directory(&self) -> Result<PathBuf> {
        let own = self.dir.join(format!("own{}", self.number));
        fs::create_dir(&own)?;
        Ok(own)
    }

    /// Compilers with libtool: a temporary file beside the others, then its name.
    pub(super) fn depend(&mut self) -> Result<usize> {
        self.repeat(|worker, n| {
            let number = worker.number;
            let [from, to] = ["Tpo", "Po"].map(|end| worker.dir.join(format!("w{number}-{n}.{end}")));
            worker.create(&from, DEPENDENCIES)?;
            worker.timed("rename", || fs::rename(&from, &to))
        })
    }

    /// Each in a directory of its own.
    pub(super) fn easy(&mut self) -> Result<usize> {
        let own = self.own_directory()?;
        self.repeat(|worker, n| worker.create(&own.join(n.to_string()), 0))
    }

    /// Each in a directory of its own, and made durable.
    pub(super) fn durable(&mut self) -> Result<usize> {
        let own = self.own_directory()?;
        self.repeat(|worker, n| {
            let mut file = File::create_new(own.join(n.to_string()))?;
            file.write_all(&[b'x'; HARD])?;
            worker.timed("fsync", || file.sync_all())
        })
    }

    fn of(&self, worker: usize, n: usize) -> PathBuf {
        self.dir.join(format!("f{worker}-{n}"))
    }

    /// All in one directory.
    pub(super) fn hard(&mut self) -> Result<usize> {
        self.repeat(|worker, n| worker.create(&worker.of(worker.number, n), HARD))
    }

    /// What the next worker has made in `hard`.
    pub(super) fn look(&mut self, made: &[usize]) -> Result<()> {
        let other = (self.number + 1) % self.all;
        let paths: Vec<PathBuf> = (0..made[other]).map(|n| self.of(other, n)).collect();
        for path in &paths {
            sys::check_interrupted()?;
            self.timed("stat", || fs::symlink_metadata(path))?;
        }
        for path in &paths {
            sys::check_interrupted()?;
            let mut bytes = Vec::with_capacity(HARD);
            self.timed("read", || File::open(path)?.read_to_end(&mut bytes))?;
            ensure!(
                bytes.len() == HARD && bytes.iter().all(|byte| *byte == b'x'),
                "{} is not what was written",
                path.display()
            );
        }
        for path in &paths {
            sys::check_interrupted()?;
            self.timed("delete", || fs::remove_file(path))?;
        }
        Ok(())
    }

    /// As `hard`, and those who watch are told how many there are.
    pub(super) fn make_watched(&mut self, made: &[AtomicUsize]) -> Result<()> {
        self.repeat(|worker, n| {
            worker.create(&worker.of(worker.number, n), HARD)?;
            made[worker.number].store(n + 1, Ordering::Release);
            Ok(())
        })?;
        Ok(())
    }

    /// Looks at names of files that others have made, and now and then at all of them. What has been made has to be there.
    pub(super) fn watch(&mut self, made: &[AtomicUsize], looks: Looks) -> Result<()> {
        let mut random = Rng::new(self.number as u64);
        let mut listed: Option<Instant> = None;
        let there = |of: usize| made[of].load(Ordering::Acquire);
        let (every, list) = (looks.look_every / 1e3, Duration::from_secs_f64(looks.list_every));
        let among = if looks.look_among == 0 { usize::MAX } else { looks.look_among };
        self.repeat(|worker, _| {
            if !list.is_zero() && listed.is_none_or(|at| at.elapsed() >= list) {
                let least: usize = (0..made.len()).map(there).sum();
                let dir = worker.dir;
                let names = worker.timed("list", || {
                    fs::read_dir(dir)?.try_fold(0, |count, entry| entry.map(|_| count + 1))
                })?;
                ensure!(names >= least, "{}: {names} names listed, {least} made before", dir.display());
                listed = Some(Instant::now());
            }
            let of = random.below(made.len());
            if let known @ 1.. = there(of) {
                let path = worker.of(of, random.below(known.min(among)));
                worker.timed("stat", || fs::symlink_metadata(&path))?;
            }
            // Who looks all the time takes the processor from who makes them.
            let left = worker.until.saturating_duration_since(Instant::now());
            std::thread::sleep(Duration::from_secs_f64(every).min(left));
            Ok(())
        })?;
        Ok(())
    }

    /// Creates and renames in one directory, and deletes all but the last eight. Returns how many are left.
    pub(super) fn come_and_go(&mut self) -> Result<usize> {
        let of = |worker: &Self, n: usize| worker.dir.join(format!("c{}-{n}.Po", worker.number));
        let done = self.repeat(|worker, n| {
            let to = of(worker, n);
            let from = to.with_extension("Tpo");
            worker.create(&from, 0)?;
            worker.timed("rename", || fs::rename(&from, &to))?;
            match n.checked_sub(CROWD_LEFT) {
                Some(old) => {
                    let old = of(worker, old);
                    worker.timed("delete", || fs::remove_file(old))
                }
                None => Ok(()),
            }
        })?;
        Ok(done.min(CROWD_LEFT))
    }

    /// Lists the directory and looks at each name: there have to be so many.
    pub(super) fn list_all(&mut self, names: usize) -> Result<()> {
        let dir = self.dir;
        let found = self.timed("list", || {
            fs::read_dir(dir)?.try_fold(0, |count, entry| entry?.path().symlink_metadata().map(|_| count + 1))
        })?;
        ensure!(found == names, "{}: {found} names instead of {names}", dir.display());
        Ok(())
    }

    /// All write the same file in turn: what the one before has written is read, and one more is written. So each waits for the
    /// file to come over, and whoever is late finds what others have written meanwhile.
    pub(super) fn pass_on(&mut self) -> Result<usize> {
        let path = self.dir.join("ball");
        self.repeat(|worker, n| {
            let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
            let mut seen = Vec::new();
            worker.timed("read", || file.read_to_end(&mut seen))?;
            ensure!(seen.len() % HARD == 0 || n == 0, "{} is half written", path.display());
            worker.timed("write", || {
                file.rewind()?;
                file.write_all(&[b'x'; HARD])
            })
        })
    }

    /// All put the same contents into one store, in the same order: 256 directories, and who finds a name has nothing to do.
    pub(super) fn put(&mut self) -> Result<usize> {
        self.repeat(|worker, n| {
            let hash = format!("{:016x}", mix(n as u64 + 1));
            let (dir, name) = (worker.dir.join(&hash[..2]), &hash[2..]);
            let path = dir.join(name);
            if worker.timed("stat", || path.try_exists())? {
                return Ok(());
            }
            match fs::create_dir(&dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
                _ => {}
            }
            let temporary = dir.join(format!("{name}.{}", worker.number));
            worker.create(&temporary, DEPENDENCIES)?;
            worker.timed("rename", || fs::rename(&temporary, &path))
        })
    }

    /// The first writes a file of full size without a pause, a line at a time; all others read all of it again and again.
    pub(super) fn follow(&mut self) -> Result<usize> {
        let path = self.dir.join("log");
        if self.number > 0 {
            return self.repeat(|worker, _| {
                let bytes = worker.timed("read", || match fs::read(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
                    read => read,
                })?;
                ensure!(bytes.len().is_multiple_of(LINE), "{} has {} bytes", path.display(), bytes.len());
                Ok(())
            });
        }
        let file = File::create_new(&path)?;
        let lines = LOG / LINE;
        (0..lines).try_for_each(|line| file.write_all_at(&[b'x'; LINE], (line * LINE) as u64))?;
        self.repeat(|worker, n| {
            let at = (n % lines * LINE) as u64;
            worker.timed("write", || file.write_all_at(&[b'y'; LINE], at))
        })
    }

    /// One makes objects; all others read each as soon as it has its name.
    pub(super) fn hand_over(&mut self) -> Result<usize> {
        let (ready, number) = (|dir: &Path, n: usize| dir.join(format!("o{n}")), self.number);
        if number > 0 {
            return self.repeat(|worker, n| worker.take_over(&ready(worker.dir, n)));
        }
        self.repeat(|worker, n| {
            let (temporary, path) = (worker.dir.join("temporary"), ready(worker.dir, n));
            worker.create(&temporary, OBJECT)?;
            worker.timed("rename", || fs::rename(&temporary, &path))
        })
    }

    /// Waits until an object has its name, as long as there is time, and reads it.
    fn take_over(&mut self, path: &Path) -> Result<()> {
        let mut bytes = Vec::with_capacity(OBJECT);
        let begun = Instant::now();
        while let Err(error) = fs::symlink_metadata(path) {
            ensure!(error.kind() == io::ErrorKind::NotFound, "{}: {error}", path.display());
            if Instant::now() >= self.until {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        add(&mut self.calls, "await", [begun.elapsed().as_secs_f64()]);
        self.timed("read", || File::open(path)?.read_to_end(&mut bytes))?;
        ensure!(bytes.len() == OBJECT, "{} is half written", path.display());
        Ok(())
    }
}
