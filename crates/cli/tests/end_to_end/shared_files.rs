//! Files and directories that one mount uses and another removes.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use crate::calls;
use crate::farm::{Farm, noise, python, run, wait_until};

/// Bytes in use, as statfs says.
fn used(path: &std::path::Path) -> u64 {
    let info = calls::statfs(path);
    (info.f_blocks - info.f_bfree) * info.f_frsize
}

#[test]
fn an_open_file_that_another_mount_removes_stays_until_it_is_closed() {
    let (_farm, mounts) = Farm::shared(2);
    let (here, there) = (mounts[0].join("file"), mounts[1].join("file"));
    let content = noise(1, 8 << 20);
    fs::write(&here, &content).unwrap();
    mounts[0].sync();
    let before = used(mounts[1].path());
    let file = File::options().read(true).write(true).open(&here).unwrap();
    let replaced = File::open(&there).unwrap();
    fs::remove_file(&there).unwrap();
    assert!(!here.exists());
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    file.write_all_at(b"still mine", 4 << 20).unwrap();
    file.sync_all().unwrap();
    let mut read = vec![0; content.len()];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read[..4 << 20] == content[..4 << 20] && read[(4 << 20) + 10..] == content[(4 << 20) + 10..]);
    assert_eq!(&read[4 << 20..][..10], b"still mine");
    // The name may be somebody else's meanwhile.
    fs::write(&there, b"another").unwrap();
    assert_ne!(fs::metadata(&here).unwrap().ino(), file.metadata().unwrap().ino());
    file.set_len(6 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 6 << 20);
    // Each mount sees through its own descriptor what the other has written.
    let mut read = [0; 10];
    replaced.read_exact_at(&mut read, 4 << 20).unwrap();
    assert_eq!(&read, b"still mine");
    drop(file);
    replaced.read_exact_at(&mut read, 4 << 20).unwrap();
    drop(replaced);
    for mount in &mounts {
        wait_until("the space is free", Duration::from_secs(60), || used(mount.path()) + (7 << 20) < before);
    }
}

#[test]
fn a_file_replaced_elsewhere_stays_for_who_has_it_open_or_mapped() {
    let (_farm, mounts) = Farm::shared(2);
    let (here, there) = (mounts[0].join("program"), mounts[1].join("program"));
    fs::write(&here, noise(1, 100_000)).unwrap();
    let file = File::options().read(true).write(true).open(&here).unwrap();
    let mut map = calls::Map::new(&file, 100_000, libc::MAP_SHARED);
    assert!(map.bytes() == noise(1, 100_000));
    fs::write(mounts[1].join("new"), noise(2, 100_000)).unwrap();
    fs::rename(mounts[1].join("new"), &there).unwrap();
    assert!(fs::read(&here).unwrap() == noise(2, 100_000));
    assert!(map.bytes() == noise(1, 100_000));
    let mut read = vec![0; 100_000];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read == noise(1, 100_000));
}

/// In a directory that goes away: it can still be looked at, and nothing can be made in it.
const INSIDE: &str = r#"
import errno, os, sys
here, there = sys.argv[1:]
os.chdir(here)
fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
before = os.stat(".").st_ino
open("leftover", "w").close()
os.unlink(f"{there}/leftover")
os.rmdir(there)
assert not os.path.exists(here)
for path in [".", fd]:
    assert os.stat(path).st_ino == before
    assert os.listdir(path) == [], os.listdir(path)
for make in [lambda: open("new", "w"), lambda: os.mkdir("new"), lambda: os.symlink("x", "new")]:
    try:
        make()
        raise SystemExit("made something in a removed directory")
    except OSError as error:
        assert error.errno == errno.ENOENT, error
os.mkdir(there)
assert os.stat(here).st_ino != before and os.listdir(".") == []
"#;

#[test]
fn a_working_directory_may_be_removed_by_another_mount() {
    let (_farm, mounts) = Farm::shared(2);
    fs::create_dir(mounts[0].join("dir")).unwrap();
    run(python(INSIDE).arg(mounts[0].join("dir")).arg(mounts[1].join("dir")));
}

#[test]
fn readdir_goes_on_while_other_mounts_change_the_directory() {
    let (_farm, mounts) = Farm::shared(3);
    fs::create_dir(mounts[0].join("dir")).unwrap();
    (0..2000).for_each(|at| fs::write(mounts[0].join(&format!("dir/stays-{at}")), b"").unwrap());
    let changer = |mount: usize| {
        for at in 0..400 {
            let path = mounts[mount].join(&format!("dir/{mount}-{at}"));
            fs::write(&path, b"").unwrap();
            fs::remove_file(&path).unwrap();
        }
    };
    std::thread::scope(|scope| {
        let changers = [scope.spawn(|| changer(1)), scope.spawn(|| changer(2))];
        loop {
            let last = changers.iter().all(std::thread::ScopedJoinHandle::is_finished);
            let names = fs::read_dir(mounts[0].join("dir")).unwrap();
            let mut names: Vec<_> =
                names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.retain(|name| name.starts_with("stays-"));
            let listed = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!((listed, names.len()), (2000, 2000));
            if last {
                break;
            }
        }
    });
    for mount in &mounts {
        assert_eq!(fs::read_dir(mount.join("dir")).unwrap().count(), 2000);
    }
}
