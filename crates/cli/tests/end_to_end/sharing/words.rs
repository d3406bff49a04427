//! What the kernel is told while calls are under way that wait for each other.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, number, rounds, seed};
use crate::setup::model::Random;

/// What is waited for in vain is waited for 30 seconds.
const HANG: Duration = Duration::from_secs(15);

/// Does something again and again. Returns how long the longest call took.
fn longest(duration: Duration, mut call: impl FnMut(usize) -> std::io::Result<()>) -> Duration {
    let (begun, mut longest, mut at) = (Instant::now(), Duration::ZERO, 0);
    while begun.elapsed() < duration {
        let called = Instant::now();
        match call(at) {
            Err(error) if ![ErrorKind::NotFound, ErrorKind::AlreadyExists].contains(&error.kind()) => {
                panic!("{error}");
            }
            _ => longest = longest.max(called.elapsed()),
        }
        at += 1;
    }
    longest
}

#[test]
fn links_that_are_replaced_while_others_follow_them_hold_nobody_up() {
    // In memory: the more changes there are, the more calls wait for each other.
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let farm = Farm::with(Some(store.path()), &[]);
    farm.create("v");
    let mounts = farm.mounts("v", 4, "");
    fs::create_dir(mounts[0].join("shared")).unwrap();
    (0..3).for_each(|at| fs::write(mounts[0].join(&format!("shared/target-{at}")), b"text").unwrap());
    (0..4).for_each(|at| fs::create_dir(mounts[at].join(&format!("own-{at}"))).unwrap());
    let duration = Duration::from_secs(rounds(8, 120) as u64);
    let all = Mutex::new(Vec::new());
    let note = |what: &'static str, longest: Duration| all.lock().unwrap().push((longest, what));
    std::thread::scope(|scope| {
        for (n, mount) in mounts.iter().enumerate() {
            let (dir, note) = (mount.path(), &note);
            for part in 0..2 {
                scope.spawn(move || {
                    let new = dir.join(format!("shared/new-{n}-{part}"));
                    let mut random = Random::new((n * 2 + part) as u64 + seed());
                    let links = |_| {
                        let common = dir.join(format!("shared/current-{}", random.below(2)));
                        match random.below(13) {
                            0 | 1 => {
                                symlink(format!("target-{}", random.below(3)), &new)?;
                                fs::rename(&new, common)
                            }
                            2 => fs::remove_file(common),
                            // The link is another host's, and dropped everywhere else: it is read again.
                            3..5 => calls::set_times(&common, [(1, 1), (2, 2)]),
                            5..9 => fs::read(common).map(drop),
                            _ => fs::read_link(common).map(drop),
                        }
                    };
                    note("links", longest(duration, links));
                });
            }
            scope.spawn(move || {
                note(
                    "elsewhere",
                    longest(duration, |at| fs::write(dir.join(format!("own-{n}/{at}")), b"text")),
                );
            });
        }
    });
    let all = all.into_inner().unwrap();
    assert!(all.iter().all(|(longest, _)| *longest < HANG), "{all:?}");
}

/// What is done, how, and by what it is seen.
type Change = (&'static str, fn(&Path) -> std::io::Result<()>, fn(&fs::Metadata) -> bool);

/// What one mount does to a file as soon as it sees its name.
const CHANGES: [Change; 4] = [
    (
        "chmod",
        |path| fs::set_permissions(path, fs::Permissions::from_mode(0o600)),
        |info| info.mode() & 0o777 == 0o600,
    ),
    ("truncate", |path| File::options().write(true).open(path)?.set_len(77), |info| info.size() == 77),
    ("link", |path| fs::hard_link(path, path.with_extension("link")), |info| info.nlink() == 2),
    ("unlink", |path| fs::remove_file(path), |info| info.nlink() == 0),
];

/// Ends those who look, however the test ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two mounts that change one directory, by request.
fn shared_directory() -> (tempfile::TempDir, Farm, Vec<Mount>) {
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let farm = Farm::with(Some(store.path()), &[]);
    farm.create("v");
    let mounts = farm.mounts("v", 2, "");
    fs::create_dir(mounts[0].join("shared")).unwrap();
    (0..2).for_each(|at| drop(File::create(mounts[at].join(&format!("shared/first-{at}"))).unwrap()));
    (store, farm, mounts)
}

#[test]
fn attributes_are_new_however_soon_another_mount_changes_what_was_just_made() {
    let (_store, _farm, mounts) = shared_directory();
    let files = rounds(1500, 40_000);
    let path = |mount: usize, at: usize| mounts[mount].join(&format!("shared/{at}"));
    let ((made, is_made), (changed, is_changed)) = (channel(), channel());
    let (over, mut unseen) = (AtomicBool::new(false), Vec::new());
    // Others look at everything meanwhile: their answers are on their way when the file is changed.
    let look = |mount: usize| {
        for entry in fs::read_dir(mounts[mount].join("shared")).unwrap() {
            let _ = entry.unwrap().metadata();
        }
    };
    std::thread::scope(|scope| {
        for looker in 0..4 {
            let (look, over) = (&look, &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    look(looker % 2);
                }
            });
        }
        let ended = &over;
        scope.spawn(move || {
            for at in 0..files {
                while let Err(error) = CHANGES[at % 4].1(&path(1, at)) {
                    assert_eq!(error.kind(), ErrorKind::NotFound, "{at}");
                    if ended.load(Ordering::Relaxed) {
                        return;
                    }
                }
                // The creation has returned as well.
                is_made.recv().unwrap();
                changed.send(()).unwrap();
            }
        });
        // Also when something is not as it should be.
        let _over = Over(&over);
        for at in 0..files {
            let file = File::options().create_new(true).write(true).open(path(0, at)).unwrap();
            made.send(()).unwrap();
            is_changed.recv().unwrap();
            let (what, _, is_seen) = CHANGES[at % 4];
            let info = file.metadata().unwrap();
            if !is_seen(&info) {
                unseen.push((at, what, info.mode(), info.size(), info.nlink()));
            }
        }
    });
    assert!(unseen.is_empty(), "{} of {files} changes are not seen: {unseen:?}", unseen.len());
}

#[test]
fn attributes_are_new_although_their_maker_gets_no_processor_meanwhile() {
    let (_store, _farm, mounts) = shared_directory();
    let asked = || number(&mounts[0].stats(), "fuse.requests.CREATE");
    let (over, mut unseen) = (AtomicBool::new(false), Vec::new());
    let processors = std::thread::available_parallelism().unwrap().get();
    let files = rounds(10, 60);
    std::thread::scope(|scope| {
        let _over = Over(&over);
        for _ in 0..4 * processors {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        for at in 0..files {
            // The maker's host owns it, and its kernel knows that the name is free: it asks for nothing else.
            let path = |mount: usize, name: &str| mounts[mount].join(&format!("own-{at}{name}"));
            let linked = |mount: usize| mounts[mount].join(&format!("shared/{at}"));
            fs::create_dir(path(0, "")).unwrap();
            assert!(!path(0, "/file").exists());
            let before = asked();
            let (made, done) = (channel(), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let done = &done;
                scope.spawn(move || {
                    calls::be_idle(true);
                    let file = File::options().create_new(true).write(true).open(path(0, "/file")).unwrap();
                    calls::be_idle(false);
                    made.0.send(file).unwrap();
                });
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        let _ = fs::symlink_metadata(linked(0));
                    }
                });
                // It is answered, and its maker does not know yet.
                while asked() == before {}
                while let Err(error) = fs::hard_link(path(1, "/file"), linked(1)) {
                    assert_eq!(error.kind(), ErrorKind::NotFound, "{at}");
                }
                fs::set_permissions(linked(1), fs::Permissions::from_mode(0o600)).unwrap();
                done.store(true, Ordering::Relaxed);
            });
            let file = made.1.recv().unwrap();
            // Who is kept waiting for longer than anybody waits for gets word again.
            std::thread::sleep(Duration::from_millis(100));
            let info = file.metadata().unwrap();
            if info.mode() & 0o777 != 0o600 || info.nlink() != 2 {
                unseen.push((at, info.mode(), info.nlink()));
            }
        }
    });
    assert!(unseen.is_empty(), "{} of {files} changes are not seen: {unseen:?}", unseen.len());
}
