//! Directories that one host moves to another parent, and others find there.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, rounds, run, sh};
use crate::sharing::caching::{PASS, lookups, tree};
use crate::sharing::costs::messages;

/// Makes and removes names of its own in a directory, until told to end.
fn keep_busy(dir: &Path, me: usize, over: &AtomicBool) {
    for at in 0.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let path = dir.join(format!("busy-{me}-{at}"));
        drop(File::create(&path).unwrap());
        fs::remove_file(&path).unwrap();
    }
}

/// Uses a directory that is there, and what is below it, in one of many ways.
fn look(dir: &Path, way: usize) -> io::Result<()> {
    match way % 8 {
        0 => fs::metadata(dir).map(drop),
        1 => File::open(dir).map(drop),
        2 => fs::read_dir(dir)?.try_for_each(|entry| entry.map(drop)),
        3 => std::process::Command::new("true").current_dir(dir).status().map(drop),
        4 => {
            fs::write(dir.join("made"), b"made")?;
            fs::remove_file(dir.join("made"))
        }
        5 => fs::read(dir.join("sub/below/file")).map(drop),
        6 => fs::rename(dir.join("sub/a"), dir.join("sub/b"))
            .and_then(|()| fs::rename(dir.join("sub/b"), dir.join("sub/a"))),
        _ => fs::create_dir(dir.join("sub/new")).and_then(|()| fs::remove_dir(dir.join("sub/new"))),
    }
}

#[test]
fn a_directory_moved_between_busy_parents_is_found_at_once() {
    let (_farm, mounts) = Farm::shared(2);
    let parents = ["one", "two"];
    parents.iter().for_each(|parent| fs::create_dir(mounts[0].join(parent)).unwrap());
    fs::create_dir_all(mounts[0].join("one/dir/sub/below")).unwrap();
    fs::write(mounts[0].join("one/dir/sub/below/file"), b"text").unwrap();
    fs::write(mounts[0].join("one/dir/sub/a"), b"text").unwrap();
    let ino = fs::metadata(mounts[1].join("one/dir")).unwrap().ino();
    let over = AtomicBool::new(false);
    let failed: Vec<String> = std::thread::scope(|scope| {
        for (at, parent) in (0..8).zip(parents.iter().cycle()) {
            let (dir, over) = (mounts[at / 2 % 2].join(parent), &over);
            scope.spawn(move || keep_busy(&dir, at, over));
        }
        let mut failed = Vec::new();
        for round in 0..rounds(60, 3000) {
            let path = |at: usize| PathBuf::from(parents[at % 2]).join("dir");
            let (mover, looker) = if round % 5 == 4 { (1, 0) } else { (0, 1) };
            let (from, to) =
                (mounts[mover].path().join(path(round)), mounts[mover].path().join(path(round + 1)));
            let there = mounts[looker].path().join(path(round + 1));
            let mut note = |what: &str, result: io::Result<()>| {
                result.unwrap_or_else(|error| failed.push(format!("round {round}, {what}: {error}")));
            };
            note("rename", fs::rename(from, to));
            note("look", look(&there, round));
            note("look again", look(&there, round / 8));
            note("look where it is moved", look(&mounts[mover].path().join(path(round + 1)), round));
            let gone = fs::metadata(mounts[looker].path().join(path(round)));
            if gone.as_ref().err().map(io::Error::kind) != Some(io::ErrorKind::NotFound) {
                failed.push(format!("round {round}: it is left behind: {gone:?}"));
            }
            if fs::metadata(&there).ok().map(|info| info.ino()) != Some(ino) {
                failed.push(format!("round {round}: another inode"));
            }
        }
        over.store(true, Ordering::Relaxed);
        failed
    });
    assert!(failed.is_empty(), "{} failed: {:#?}", failed.len(), &failed[..failed.len().min(10)]);
}

#[test]
fn who_works_in_a_moved_directory_and_who_finds_it_there_see_each_other() {
    let (_farm, mounts) = Farm::shared(2);
    let here = |path: &str| mounts[1].join(path);
    for parent in ["one", "two"] {
        fs::create_dir(mounts[0].join(parent)).unwrap();
    }
    for round in 0..rounds(10, 300) {
        let (old, new) = (format!("one/dir-{round}"), format!("two/dir-{round}"));
        fs::create_dir_all(mounts[0].join(&format!("{old}/sub"))).unwrap();
        let open = File::open(here(&old)).unwrap();
        let within = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        let names = |dir: &Path| -> Vec<String> {
            let names =
                fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        assert!(!within.join("made").exists() && names(&within) == ["sub"]);
        fs::rename(mounts[0].join(&old), mounts[0].join(&new)).unwrap();
        let there = here(&new);
        assert!(!there.join("made").exists() && names(&there) == ["sub"]);
        assert_eq!(fs::metadata(&there).unwrap().ino(), open.metadata().unwrap().ino());
        for (by, other) in [(&there, &within), (&within, &there)] {
            fs::write(by.join("made"), b"text").unwrap();
            assert_eq!(fs::read(other.join("made")).unwrap(), b"text");
            assert_eq!(names(other), ["made", "sub"]);
            fs::set_permissions(by, fs::Permissions::from_mode(0o711)).unwrap();
            assert_eq!(fs::metadata(other).unwrap().mode() & 0o777, 0o711);
            fs::set_permissions(by, fs::Permissions::from_mode(0o755)).unwrap();
            fs::create_dir(by.join("more")).unwrap();
            assert_eq!(fs::metadata(other).unwrap().nlink(), 4);
            assert!(other.join("more").is_dir());
            fs::rename(by.join("made"), by.join("sub/moved")).unwrap();
            assert!(!other.join("made").exists() && other.join("sub/moved").exists());
            fs::remove_file(other.join("sub/moved")).unwrap();
            assert!(!by.join("sub/moved").exists());
            fs::remove_dir(other.join("more")).unwrap();
            assert!(!by.join("more").exists() && names(by) == ["sub"]);
        }
        // What others do is seen by both.
        fs::write(mounts[0].join(&format!("{new}/theirs")), b"x").unwrap();
        assert!(there.join("theirs").exists() && within.join("theirs").exists());
        fs::remove_file(mounts[0].join(&format!("{new}/theirs"))).unwrap();
        assert!(names(&there) == ["sub"] && names(&within) == ["sub"]);
        // And it ends.
        fs::remove_dir_all(&there).unwrap();
        assert_eq!(fs::write(within.join("late"), b"x").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

#[test]
fn a_tree_that_others_have_moved_is_found_whole_and_costs_nothing_when_it_is_known() {
    let (_farm, mounts) = Farm::shared(2);
    for parent in ["one", "two"] {
        fs::create_dir(mounts[0].join(parent)).unwrap();
    }
    tree(&mounts[0].join("one/tree"), 400);
    let pass = |path: &str| run(sh(PASS).current_dir(mounts[1].join(path)));
    let inos = |at: usize, path: &str| {
        run(sh("find . -printf '%p %i %l\n' | sort").current_dir(mounts[at].join(path)))
    };
    pass("one/tree");
    let before = inos(1, "one/tree");
    fs::rename(mounts[0].join("one/tree"), mounts[0].join("two/tree")).unwrap();
    assert_eq!(inos(1, "two/tree"), before);
    // What others have just moved is looked up anew for ten seconds (`mount::moved`).
    std::thread::sleep(std::time::Duration::from_secs(11));
    pass("two/tree");
    let known = mounts[1].stats();
    pass("two/tree");
    let after = mounts[1].stats();
    assert_eq!(lookups(&after) - lookups(&known), 0, "{} {}", known["fuse"], after["fuse"]);
    assert_eq!(messages(&after), messages(&known), "{} {}", known["server"], after["server"]);
    // What this host moves takes along what the kernel knows.
    fs::rename(mounts[1].join("two/tree"), mounts[1].join("one/tree")).unwrap();
    assert_eq!(inos(1, "one/tree"), before);
    assert_eq!(inos(0, "one/tree"), before);
    run(sh("rm -rf one/tree").current_dir(mounts[1].path()));
    assert!(fs::read_dir(mounts[0].join("one")).unwrap().next().is_none());
}

#[test]
fn working_directories_below_what_others_move_go_on() {
    let (_farm, mounts): (Farm, Vec<Mount>) = Farm::shared(2);
    fs::create_dir_all(mounts[0].join("one/dir/sub")).unwrap();
    fs::create_dir(mounts[0].join("two")).unwrap();
    // The second move leads into what the kernel of the other host has above it.
    let mut shell = sh("cd sub; echo ready; read go; echo made > made; cat made; ls ..; ls ../..");
    shell.current_dir(mounts[1].join("one/dir")).stdin(std::process::Stdio::piped());
    let mut shell = shell.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut ready = [0; 6];
    io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut ready).unwrap();
    fs::rename(mounts[0].join("one/dir"), mounts[0].join("two/dir")).unwrap();
    fs::rename(mounts[0].join("one"), mounts[0].join("two/dir/one")).unwrap();
    assert!(mounts[1].join("two/dir/one").is_dir());
    io::Write::write_all(shell.stdin.as_mut().unwrap(), b"go\n").unwrap();
    let output = shell.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "made\none\nsub\n");
    assert_eq!(fs::read(mounts[0].join("two/dir/sub/made")).unwrap(), b"made\n");
    assert_eq!(fs::read(mounts[1].join("two/dir/sub/made")).unwrap(), b"made\n");
}

/// A directory that was moved has several numbers in the kernel. What a host renames or exchanges there takes along how long the kernel may keep
/// it, and goes all the same when another host renames it back.
#[test]
fn what_a_host_has_renamed_in_a_moved_directory_goes_when_others_rename_it() {
    let (_farm, mounts) = Farm::shared(2);
    let (other, here) = (&mounts[0], &mounts[1]);
    let inode = |mount: &Mount, name: &str| fs::metadata(mount.join(name)).unwrap().ino();
    fs::create_dir_all(other.join("top/elsewhere")).unwrap();
    fs::create_dir(other.join("top/dir")).unwrap();
    for name in ["top/dir/one", "top/two"] {
        fs::write(other.join(name), name).unwrap();
    }
    let mut open = vec![File::open(here.join("top/dir")).unwrap()];
    for (from, to) in [("top/dir", "top/elsewhere/dir"), ("top/elsewhere/dir", "top/dir")] {
        fs::rename(other.join(from), other.join(to)).unwrap();
        open.push(File::open(here.join(to)).unwrap());
        inode(here, &format!("{to}/one"));
    }
    let [one, two] = ["top/dir/one", "top/two"].map(|name| inode(other, name));
    let look = || ["top/dir/one", "top/two"].map(|name| inode(here, name));
    for round in 0..3 {
        // For a moment after a change names are for one use.
        std::thread::sleep(Duration::from_millis(1200));
        assert_eq!(look(), [one, two], "round {round}");
        assert_eq!(look(), [one, two], "round {round}");
        for mount in [here, other] {
            let [from, to] = ["top/dir/one", "top/two"].map(|name| mount.join(name));
            calls::rename(&from, &to, libc::RENAME_EXCHANGE).unwrap();
        }
        assert_eq!(look(), [one, two], "round {round}: exchanged");
        std::thread::sleep(Duration::from_millis(1200));
        assert_eq!(look(), [one, two], "round {round}");
        fs::rename(here.join("top/dir/one"), here.join("top/three")).unwrap();
        fs::rename(other.join("top/two"), other.join("top/dir/one")).unwrap();
        fs::rename(other.join("top/three"), other.join("top/two")).unwrap();
        assert_eq!(look(), [two, one], "round {round}: renamed");
        assert!(!here.join("top/three").exists(), "round {round}");
        fs::rename(other.join("top/two"), other.join("top/three")).unwrap();
        fs::rename(other.join("top/dir/one"), other.join("top/two")).unwrap();
        fs::rename(other.join("top/three"), other.join("top/dir/one")).unwrap();
    }
}
