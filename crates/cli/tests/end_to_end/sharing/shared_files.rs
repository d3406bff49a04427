//! Files and directories that one mount uses and another removes.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use crate::setup::calls;
use crate::setup::farm::{Farm, noise, python, rounds, run, wait_until};

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

#[test]
fn a_file_that_another_host_has_removed_gets_no_new_name() {
    let (_farm, mounts) = Farm::shared(2);
    let (here, there) = (&mounts[0], &mounts[1]);
    fs::create_dir(here.join("dir")).unwrap();
    for round in 0..rounds(10, 100) {
        // Names in the directory are changed by the server, or by their owner.
        if round % 2 == 0 {
            fs::write(there.join("dir/other"), b"x").unwrap();
        }
        let (old, new) = (format!("dir/old-{round}"), format!("dir/new-{round}"));
        fs::write(here.join(&old), b"content").unwrap();
        let open = fs::File::open(here.join(&old)).unwrap();
        fs::remove_file(there.join(&old)).unwrap();
        assert_eq!(calls::errno(calls::link_fd(&open, &here.join(&new))), libc::ENOENT, "round {round}");
        assert!(!here.join(&new).exists() && !there.join(&new).exists());
        assert_eq!(fs::metadata(format!("/proc/self/fd/{}", open.as_raw_fd())).unwrap().nlink(), 0);
        // What never had a name gets one, and others after it.
        let unnamed = calls::open(&here.join("dir"), libc::O_TMPFILE | libc::O_RDWR, 0o644).unwrap();
        calls::link_fd(&unnamed, &here.join(&new)).unwrap();
        calls::link_fd(&unnamed, &here.join(&old)).unwrap();
        assert_eq!(fs::metadata(there.join(&new)).unwrap().nlink(), 2);
        fs::remove_file(there.join(&new)).unwrap();
        fs::remove_file(there.join(&old)).unwrap();
        assert_eq!(calls::errno(calls::link_fd(&unnamed, &here.join(&new))), libc::ENOENT);
        // Not even once may it have a name when it is asked for alone.
        let alone = libc::O_TMPFILE | libc::O_RDWR | libc::O_EXCL;
        let unnamed = calls::open(&here.join("dir"), alone, 0o644).unwrap();
        assert_eq!(calls::errno(calls::link_fd(&unnamed, &here.join(&new))), libc::ENOENT);
    }
}

/// Links a file that the other removes, which has it open: without a name once, it never has one again.
const LINKER: &str = r#"
import os, sys
top, rounds = sys.argv[1], int(sys.argv[2])
for at in range(rounds):
    while not os.path.exists(f"{top}/start-{at}"): pass
    try: os.link(f"{top}/old-{at}", f"{top}/new-{at}")
    except FileNotFoundError: pass
"#;
const REMOVER: &str = r#"
import os, sys, time
top, rounds = sys.argv[1], int(sys.argv[2])
for at in range(rounds):
    old, new = f"{top}/old-{at}", f"{top}/new-{at}"
    file = os.open(old, os.O_CREAT | os.O_RDWR)
    os.close(os.open(f"{top}/start-{at}", os.O_CREAT))
    time.sleep(at % 20 * 0.0003)
    os.unlink(old)
    links = os.fstat(file).st_nlink
    time.sleep(0.02)
    assert os.path.exists(new) == (links == 1), (at, links)
    assert os.fstat(file).st_nlink == links, (at, links, os.fstat(file).st_nlink)
    os.close(file)
"#;

#[test]
fn a_link_and_a_removal_at_the_same_time_leave_a_name_or_none_for_ever() {
    let (_farm, mounts) = Farm::shared(2);
    let times = rounds(100, 2000).to_string();
    let start = |script, at: usize| python(script).arg(mounts[at].path()).arg(&times).spawn().unwrap();
    let mut children = [start(LINKER, 0), start(REMOVER, 1)];
    // The one that waits would wait for ever.
    let removed = children[1].wait().unwrap().success();
    if !removed {
        children[0].kill().unwrap();
    }
    let linked = children[0].wait().unwrap().success();
    assert!(removed && linked, "a process has failed, see above");
}
