//! Two mounts behind a network that flips, drops, doubles and moves bytes, and cuts connections: no wrong data is read, nothing that
//! was fsynced is missing, and nobody hangs. `HAYLOFT_TEST_LONG` makes it 30 minutes, `HAYLOFT_TEST_SEED` another one.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::farm::{Farm, Mount, hayloft, noise, number, rounds, run, seed};
use crate::mangler::Mangler;
use crate::model::Random;
use crate::watchdog::Watchdog;

/// Files that a directory has at most: older ones are removed.
const KEPT: usize = 60;

/// A file that was made: its name says what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Made {
    seed: u64,
    len: usize,
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
struct Counts {
    made: AtomicUsize,
    read: AtomicUsize,
    refused: AtomicUsize,
    /// Files that were not fsynced, and were not there, or not yet as they were left: their host's session had ended.
    missing: AtomicUsize,
}

struct Work<'a> {
    mounts: [&'a Path; 2],
    known: Known,
    counts: Counts,
    over: AtomicBool,
    watchdog: &'a Watchdog,
}

/// A call that failed since its batch did not get through in so many attempts: whoever waits is told.
fn is_told(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// What an ended session had not shipped is not there, until it is brought.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESTALE)
}

impl Work<'_> {
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
            let mut made = Made { seed: random.below(1 << 40), len, durable: false, removed: false };
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
            self.watchdog.progress();
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

    /// Reads what the other host, or this one, has made.
    fn read(&self, at: usize, mut random: Random) {
        while !self.over.load(Ordering::SeqCst) {
            let picked = {
                let known = self.known.lock().unwrap();
                let there: Vec<(&String, &Made)> = known.iter().filter(|(_, made)| !made.removed).collect();
                let at = random.below(there.len().max(1) as u64) as usize;
                there.get(at).map(|(path, made)| ((*path).clone(), **made))
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
            self.watchdog.progress();
        }
    }
}

/// Leaves a mount. What an ended session had not shipped, and others have changed since, is kept, which is told: none of it was fsynced.
fn leave(mount: Mount, replaced: u64) {
    let synced = hayloft(["sync"]).arg(mount.path()).output().unwrap();
    if synced.status.success() {
        return mount.unmount();
    }
    let said = String::from_utf8_lossy(&synced.stderr);
    assert!(replaced > 0 && said.contains("are kept in"), "{said}");
    mount.kill();
}

fn of_all(mounts: &[Mount], key: &str) -> u64 {
    mounts.iter().map(|mount| number(&mount.stats(), key)).sum()
}

#[test]
fn what_a_network_does_to_bytes_does_nothing_to_data() {
    let farm = Farm::with(None, &["--lease", "3"]);
    farm.create("v");
    let mangler = Mangler::before(&farm.address, seed());
    let mounts = [0, 1].map(|at| farm.mount_through(&mangler.address, "v", &format!("mnt-{at}")));
    for dir in ["both", "own-0", "own-1"] {
        fs::create_dir(mounts[0].join(dir)).unwrap();
    }
    mounts[0].sync();
    let watchdog = Watchdog::over(&mounts);
    let work = Work {
        mounts: [mounts[0].path(), mounts[1].path()],
        known: Known::default(),
        counts: Counts::default(),
        over: AtomicBool::new(false),
        watchdog: &watchdog,
    };
    let until = Instant::now() + Duration::from_secs(rounds(40, 30 * 60) as u64);
    mangler.set_active(true);
    std::thread::scope(|scope| {
        let work = &work;
        for at in [0, 1] {
            scope.spawn(move || stopping(work, || work.write(at, Random::new(seed() * 10 + at as u64))));
            scope.spawn(move || stopping(work, || work.read(at, Random::new(seed() * 10 + 5 + at as u64))));
        }
        while Instant::now() < until && !work.over.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(100));
        }
        work.over.store(true, Ordering::SeqCst);
        // Whoever waits is served when it is quiet.
        mangler.set_active(false);
    });
    let damaged = number(&farm.stats(), "server.frames_damaged") + of_all(&mounts, "server.frames_damaged");
    let replaced = of_all(&mounts, "server.sessions_replaced");
    let (counts, known) = (&work.counts, work.known.lock().unwrap());
    let [made, read, refused, missing] = [&counts.made, &counts.read, &counts.refused, &counts.missing]
        .map(|count| count.load(Ordering::SeqCst));
    println!(
        "made {made}, read {read}, refused {refused}, missing {missing}; {:?}; frames damaged {damaged}, connected again {}, sessions replaced {replaced}",
        mangler.counts(),
        of_all(&mounts, "server.reconnects"),
    );
    assert!(damaged > 0, "{:?}", mangler.counts());
    assert!(made > 0 && read > 0);
    assert!(
        missing == 0 || replaced > 0,
        "{missing} files that were not fsynced were missing, and no session had ended"
    );
    let [one, two] = mounts;
    leave(one, replaced);
    leave(two, replaced);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
    let mount = farm.mount("v", "");
    for (path, made) in known.iter() {
        match fs::read(mount.join(path)) {
            Ok(content) => {
                let is_early = !made.durable && replaced > 0 && made.content().starts_with(&content);
                assert!(
                    content == made.content() || is_early,
                    "{path} has wrong data in the store: {made:?}"
                );
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::NotFound, "{path}: {error}");
                assert!(!made.durable || made.removed, "{path} was fsynced, and is missing in the store");
                assert!(made.removed || replaced > 0, "{path} is missing in the store");
            }
        }
    }
}

/// When one fails, the others stop.
fn stopping(work: &Work<'_>, run: impl FnOnce()) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let _stop = Stop(&work.over);
    run();
}
