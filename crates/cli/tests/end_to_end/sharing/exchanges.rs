//! Names that several hosts exchange (`RENAME_EXCHANGE`) at the same time.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, rounds};

/// What hosts exchange: files, and directories, in one directory and in two.
const PAIRS: [[&str; 2]; 4] =
    [["p/file", "p/other-file"], ["p/file", "q/file"], ["p/dir", "p/other-dir"], ["p/dir", "q/dir"]];

fn exchange(mount: &Mount, pair: [&str; 2]) -> io::Result<()> {
    calls::rename(&mount.join(pair[0]), &mount.join(pair[1]), libc::RENAME_EXCHANGE)
}

fn inodes(mount: &Mount, pair: [&str; 2]) -> [u64; 2] {
    pair.map(|name| fs::symlink_metadata(mount.join(name)).unwrap().ino())
}

/// Names in two directories, each directory with a file in it.
fn make_names(top: &Path) {
    for dir in ["p/dir", "p/other-dir", "q/dir"] {
        fs::create_dir_all(top.join(dir)).unwrap();
        fs::write(top.join(dir).join("in"), b"in").unwrap();
    }
    for file in ["p/file", "p/other-file", "q/file"] {
        fs::write(top.join(file), file).unwrap();
    }
}

/// Exchanges names from all mounts at once, while some look at what is below them, and again from each alone.
fn exchange_all(mounts: &[Mount], pair: [&str; 2], lookers: usize) {
    let times = rounds(150, 3000);
    let before = inodes(&mounts[0], pair);
    let over = AtomicBool::new(false);
    let failed: Vec<io::Error> = std::thread::scope(|scope| {
        for mount in mounts {
            for _ in 0..lookers {
                let below = mount.join(pair[0]).join("in");
                let over = &over;
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let _ = File::open(&below);
                    }
                });
            }
        }
        let changers: Vec<_> = mounts
            .iter()
            .map(|mount| {
                scope
                    .spawn(move || (0..times).filter_map(|_| exchange(mount, pair).err()).collect::<Vec<_>>())
            })
            .collect();
        let failed: Vec<_> = changers.into_iter().map(|changer| changer.join()).collect();
        over.store(true, Ordering::Relaxed);
        failed.into_iter().flat_map(|failed| failed.unwrap()).collect()
    });
    assert!(failed.is_empty(), "{pair:?}: {} of {times} each failed: {:?}", failed.len(), failed[0]);
    // Nobody looks at the names first.
    for mount in mounts {
        for at in 0..20 {
            exchange(mount, pair).unwrap_or_else(|error| panic!("{pair:?}, alone, {at}: {error}"));
        }
    }
    // As often as each has done it, which is even for two of them.
    for mount in mounts {
        assert_eq!(inodes(mount, pair), before, "{pair:?}");
    }
}

#[test]
fn hosts_that_exchange_the_same_names_are_refused_nothing() {
    let (_farm, mounts) = Farm::shared(2);
    make_names(mounts[0].path());
    for pair in PAIRS {
        exchange_all(&mounts, pair, 0);
    }
    // Contents have gone along.
    let text = |mount: &Mount, name: &str| fs::read_to_string(mount.join(name)).unwrap();
    for mount in &mounts {
        assert_eq!(text(mount, "p/file"), "p/file");
        exchange(mount, PAIRS[1]).unwrap();
        assert_eq!([text(&mounts[0], "q/file"), text(&mounts[1], "p/file")], ["p/file", "q/file"]);
        exchange(mount, PAIRS[1]).unwrap();
    }
}

#[test]
fn who_looks_while_directories_are_exchanged_keeps_nobody_from_it() {
    let (_farm, mounts) = Farm::shared(2);
    make_names(mounts[0].path());
    exchange_all(&mounts, PAIRS[3], 2);
}
