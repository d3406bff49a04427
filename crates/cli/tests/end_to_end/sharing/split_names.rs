//! Names of split directories that kernels keep as long as their slots are held: whoever looks sees them as they are.
//!
//! `HAYLOFT_TEST_LONG` makes it twenty times as many changes, `HAYLOFT_TEST_SEED` others.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::setup::farm::{Farm, Mount, number, rounds, run, seed, wait_until};
use crate::setup::model::Random;
use crate::sharing::caching::lookups;
use crate::sharing::split::{dirs, until_split};

/// Names that change, each by a thread of its own; two of one stem each.
const NAMES: [&str; 4] = ["config.h", "config.o", "system.h", "system.o"];

/// Something that changes, and how it is while it does not.
#[derive(Default)]
struct Register {
    /// Odd while it is being changed.
    version: AtomicU64,
    inode: Mutex<Option<u64>>,
}

impl Register {
    fn change(&self, change: impl FnOnce() -> Option<u64>) {
        self.version.fetch_add(1, Ordering::SeqCst);
        *self.inode.lock().unwrap() = change();
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether it did not change while somebody looked at it; then he must have seen what it is.
    fn check(&self, look: impl FnOnce() -> Option<u64>, what: impl FnOnce() -> String) -> bool {
        let (version, known) = (self.version.load(Ordering::SeqCst), *self.inode.lock().unwrap());
        let seen = look();
        if !version.is_multiple_of(2) || self.version.load(Ordering::SeqCst) != version {
            return false;
        }
        assert_eq!(seen, known, "{}, version {version}", what());
        true
    }
}

fn inode(path: &Path) -> Option<u64> {
    match fs::symlink_metadata(path) {
        Ok(found) => Some(found.ino()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

/// Works in the directory on a host, with names that others use as well, until it is told to end.
fn works(dir: &Path, host: usize, ends: &AtomicBool) {
    let mut n = 0;
    while !ends.load(Ordering::Relaxed) {
        let (own, all) = (dir.join(format!("own-{host}-{}.tmp", n % 50)), dir.join(format!("all-{}", n % 7)));
        fs::write(&own, b"").unwrap();
        fs::rename(&own, own.with_extension("o")).unwrap();
        // Others remove it.
        _ = File::create(&all).and_then(|_| fs::remove_file(&all));
        n += 1;
    }
}

/// Ends the others also if a check fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Changes a name from one host after the other.
fn changes(dirs: &[PathBuf], name: &str, register: &Register, steps: usize, seed: u64) {
    let mut random = Random::new(seed);
    let mut is_there = false;
    for step in 0..steps {
        let dir = &dirs[random.below(dirs.len() as u64) as usize];
        let path = dir.join(name);
        let beside = dir.join(format!("{name}.{step}"));
        let made = |path: &Path| Some(File::create_new(path).unwrap().metadata().unwrap().ino());
        match (is_there, random.below(4)) {
            (false, 0 | 1) => register.change(|| made(&path)),
            (false, _) => {
                let ino = made(&beside);
                register.change(|| fs::rename(&beside, &path).map(|()| ino).unwrap());
            }
            (true, 0) => {
                let ino = made(&beside);
                register.change(|| fs::rename(&beside, &path).map(|()| ino).unwrap());
            }
            (true, 1) => {
                register.change(|| fs::rename(&path, &beside).map(|()| None).unwrap());
                fs::remove_file(&beside).unwrap();
            }
            (true, _) => register.change(|| fs::remove_file(&path).map(|()| None).unwrap()),
        }
        is_there = register.inode.lock().unwrap().is_some();
        // Kernels keep what is looked at more than once.
        for dir in dirs.iter().filter(|_| random.below(3) > 0) {
            for _ in 0..3 {
                let what = || format!("{name} after step {step} in {}", dir.display());
                assert!(register.check(|| inode(&dir.join(name)), what));
            }
        }
    }
}

fn splits(farm: &Farm) -> u64 {
    number(&farm.stats(), "volumes.v.directories_split")
}

/// Many look at names while these change and slots go from host to host. `more`: what is done beside that now and then.
fn all_look(more: impl Fn(&Path, usize) + Sync) -> (Farm, Vec<Mount>, u64) {
    let (farm, mounts) = Farm::shared(4);
    let dirs = dirs(&mounts);
    until_split(&farm, &dirs);
    let registers: Vec<Register> = NAMES.iter().map(|_| Register::default()).collect();
    let (ends, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    let (steps, seed) = (rounds(150, 3000), seed());
    let still: Mutex<usize> = Mutex::new(NAMES.len());
    std::thread::scope(|scope| {
        for (host, dir) in dirs.iter().enumerate() {
            let (ends, checked, registers) = (&ends, &checked, &registers);
            scope.spawn(move || {
                let _ends = Ends(ends);
                works(dir, host, ends);
            });
            scope.spawn(move || {
                let _ends = Ends(ends);
                let mut random = Random::new(seed + 100 + host as u64);
                while !ends.load(Ordering::Relaxed) {
                    let at = random.below(NAMES.len() as u64) as usize;
                    let what = || format!("{} in {}", NAMES[at], dir.display());
                    let is_checked = registers[at].check(|| inode(&dir.join(NAMES[at])), what);
                    checked.fetch_add(u64::from(is_checked), Ordering::Relaxed);
                }
            });
        }
        let (ends, more, dirs) = (&ends, &more, &dirs);
        scope.spawn(move || {
            let mut n = 0;
            while !ends.load(Ordering::Relaxed) {
                more(&dirs[n % dirs.len()], n);
                n += 1;
            }
        });
        for (at, name) in NAMES.iter().enumerate() {
            let (registers, still) = (&registers, &still);
            scope.spawn(move || {
                let mut ended = Some(Ends(ends));
                changes(dirs, name, &registers[at], steps, seed + at as u64);
                let mut still = still.lock().unwrap();
                *still -= 1;
                if *still > 0 {
                    std::mem::forget(ended.take());
                }
            });
        }
    });
    (farm, mounts, checked.into_inner())
}

#[test]
fn what_is_kept_of_a_split_directory_is_never_old() {
    let pause = |_: &Path, _: usize| std::thread::sleep(Duration::from_millis(10));
    let (farm, mounts, checked) = all_look(pause);
    assert!(checked > 100, "{checked}");
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v"])).contains("is sound"));
}

#[test]
fn nor_when_it_is_made_whole_and_split_again_and_again() {
    let (farm, mounts, checked) = all_look(|dir, n| {
        std::thread::sleep(Duration::from_millis(100));
        match n % 4 {
            0 => drop(fs::read_dir(dir).unwrap().count()),
            1 => fs::create_dir(dir.join("below")).and_then(|()| fs::remove_dir(dir.join("below"))).unwrap(),
            2 => {
                fs::write(dir.join("linked"), b"").unwrap();
                fs::hard_link(dir.join("linked"), dir.join("again")).unwrap();
                fs::remove_file(dir.join("linked"))
                    .and_then(|()| fs::remove_file(dir.join("again")))
                    .unwrap();
            }
            _ => fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap(),
        }
    });
    assert!(checked > 100 && splits(&farm) > 1, "{checked}");
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v"])).contains("is sound"));
}

#[test]
fn what_is_looked_at_again_and_again_is_not_asked_for() {
    let (farm, mounts) = Farm::shared(3);
    let dirs = dirs(&mounts);
    fs::write(dirs[1].join("there.h"), b"").unwrap();
    until_split(&farm, &dirs);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&ends);
        for (host, dir) in dirs.iter().enumerate().skip(1) {
            let ends = &ends;
            // Else it is whole after a second or two.
            scope.spawn(move || works(dir, host, ends));
        }
        let look = || {
            assert!(!dirs[0].join("missing.h").exists());
            assert!(!dirs[0].join("lost/inner.h").exists());
        };
        wait_until("the kernel keeps them", Duration::from_secs(30), || {
            let before = lookups(&mounts[0].stats());
            (0..20).for_each(|_| look());
            lookups(&mounts[0].stats()) == before
        });
        let (before, split) = (lookups(&mounts[0].stats()), splits(&farm));
        (0..1000).for_each(|_| look());
        let after = lookups(&mounts[0].stats());
        if splits(&farm) == split {
            assert!(after - before <= 100, "{} lookups", after - before);
        }
        fs::write(dirs[1].join("missing.h"), b"").unwrap();
        assert!(dirs[0].join("missing.h").exists());
        fs::remove_file(dirs[0].join("missing.h")).unwrap();
        assert!(!dirs[1].join("missing.h").exists() && !dirs[2].join("missing.h").exists());
    });
}
