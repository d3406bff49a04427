//! `hayloft merge`.

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::setup::farm::{Farm, noise, run, run_failing};

fn merge(farm: &Farm, fork: &str) -> Command {
    let mut command = farm.ask(["merge", fork]);
    command.arg("--cache").arg(farm.dir().join("cache"));
    command
}

fn snapshots(farm: &Farm, volume: &str) -> String {
    run(&mut farm.ask(["snapshot", "list", volume]))
}

#[test]
fn what_a_fork_has_changed_is_done_to_the_volume_at_once_or_not_at_all() {
    let (farm, mount) = Farm::mounted("v");
    fs::create_dir(mount.join("dir")).unwrap();
    for at in 0..50 {
        fs::write(mount.join(&format!("dir/{at}")), noise(at, 2000)).unwrap();
    }
    run(&mut farm.ask(["snapshot", "create", "v@base"]));
    run(&mut farm.ask(["fork", "v@base", "fix"]));
    let fork = farm.mount("fix", "");
    fs::write(fork.join("dir/1"), "fixed").unwrap();
    fs::rename(fork.join("dir/2"), fork.join("moved")).unwrap();
    fs::hard_link(fork.join("dir/3"), fork.join("three")).unwrap();
    fs::write(fork.join("large"), noise(7, 1_000_000)).unwrap();
    fs::write(mount.join("dir/4"), "went on").unwrap();
    fs::remove_file(mount.join("dir/5")).unwrap();
    let said = run(&mut merge(&farm, "fix"));
    assert!(said.contains("merged fix into v"), "{said}");
    let has = |name: &str| fs::read(mount.join(name)).unwrap_or_default();
    assert_eq!((has("dir/1"), has("dir/4")), (b"fixed".to_vec(), b"went on".to_vec()));
    assert_eq!((has("moved"), has("large")), (noise(2, 2000), noise(7, 1_000_000)));
    assert!(!mount.join("dir/2").exists() && !mount.join("dir/5").exists());
    assert_eq!(has("three"), noise(3, 2000));
    // The volume and the fork have the snapshots that they should, and the way back is there.
    let kept = said.trim().rsplit(' ').next().unwrap().to_owned();
    assert_eq!(snapshots(&farm, "v").lines().count(), 3, "{}", snapshots(&farm, "v"));
    assert!(!snapshots(&farm, "fix").contains("merge"));
    run(&mut farm.ask(["rollback", &kept, "--keep-as", "merged"]));
    assert_eq!((has("dir/1"), has("dir/4")), (noise(1, 2000), b"went on".to_vec()));
    run(&mut farm.ask(["rollback", "v@merged"]));
    // What is there already is not done twice; what both have changed is named.
    let said = run(&mut merge(&farm, "fix"));
    assert!(said.contains("nothing that v has not"), "{said}");
    fs::write(fork.join("dir/6"), "fork").unwrap();
    fs::write(fork.join("dir/7"), "fork").unwrap();
    fs::write(mount.join("dir/6"), "volume").unwrap();
    let before = snapshots(&farm, "v");
    let (code, said) = run_failing(&mut merge(&farm, "fix"));
    assert!(code == 9 && said.contains("dir/6: it was changed here and there"), "{code}: {said}");
    assert_eq!((has("dir/6"), has("dir/7")), (b"volume".to_vec(), noise(7, 2000)));
    assert_eq!(snapshots(&farm, "v"), before);
}

/// Without files of several names only what differs is compared, also where folders got another path.
#[test]
fn folders_that_were_renamed_are_merged_with_what_is_in_them() {
    let (farm, mount) = Farm::mounted("v");
    for dir in ["a/deep", "b", "c", "gone"] {
        fs::create_dir_all(mount.join(dir)).unwrap();
        for at in 0..30 {
            fs::write(mount.join(&format!("{dir}/{at}")), noise(at, 3000)).unwrap();
        }
    }
    run(&mut farm.ask(["snapshot", "create", "v@base"]));
    run(&mut farm.ask(["fork", "v@base", "fix"]));
    let fork = farm.mount("fix", "");
    fs::rename(fork.join("a"), fork.join("moved")).unwrap();
    fs::write(fork.join("moved/deep/1"), "fixed").unwrap();
    fs::remove_dir_all(fork.join("gone")).unwrap();
    fs::write(fork.join("gone"), "a file now").unwrap();
    fs::create_dir(fork.join("new")).unwrap();
    fs::write(fork.join("new/file"), noise(5, 300_000)).unwrap();
    fs::rename(mount.join("b"), mount.join("renamed")).unwrap();
    fs::write(mount.join("renamed/2"), "went on").unwrap();
    let has = |path: &str| fs::read(mount.join(path)).unwrap_or_default();
    let before = snapshots(&farm, "v");
    // What both have changed, the one by another path of the folder.
    fs::write(mount.join("a/deep/3"), "here").unwrap();
    let (code, said) = run_failing(&mut merge(&farm, "fix"));
    assert!(code == 9 && said.contains("a/deep/3: it was changed here, and removed there"), "{code}: {said}");
    assert_eq!(snapshots(&farm, "v"), before);
    // A new file in a folder that is gone on the other side.
    fs::write(mount.join("a/deep/3"), noise(3, 3000)).unwrap();
    fs::write(mount.join("gone/new"), "here").unwrap();
    let (code, said) = run_failing(&mut merge(&farm, "fix"));
    assert!(code == 9 && said.contains("gone/new: its folder was removed or replaced"), "{code}: {said}");
    fs::remove_file(mount.join("gone/new")).unwrap();
    run(&mut merge(&farm, "fix"));
    assert_eq!((has("moved/deep/1"), has("moved/deep/2")), (b"fixed".to_vec(), noise(2, 3000)));
    assert_eq!((has("renamed/2"), has("renamed/3")), (b"went on".to_vec(), noise(3, 3000)));
    assert_eq!((has("gone"), has("new/file")), (b"a file now".to_vec(), noise(5, 300_000)));
    assert_eq!((has("c/7"), fs::read_dir(mount.join("c")).unwrap().count()), (noise(7, 3000), 30));
    assert!(!mount.join("a").exists() && !mount.join("b").exists());
    assert!(run(&mut merge(&farm, "fix")).contains("nothing that v has not"));
}

/// Hosts that write all the time are not interrupted: what they do in the moment of an exchange would be kept apart.
#[test]
fn a_volume_that_is_being_written_is_left_alone() {
    let (farm, mount) = Farm::mounted("v");
    for dir in ["a", "b"] {
        fs::create_dir(mount.join(dir)).unwrap();
    }
    run(&mut farm.ask(["snapshot", "create", "v@base"]));
    run(&mut farm.ask(["fork", "v@base", "fix"]));
    let fork = farm.mount("fix", "");
    fs::write(fork.join("b/fixed"), "fixed").unwrap();
    let over = AtomicBool::new(false);
    let (merged, written) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = 0;
            while !over.load(Relaxed) {
                fs::write(mount.join(&format!("a/{written}")), format!("text {written}")).unwrap();
                written += 1;
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            written
        });
        let merged = run_failing(&mut merge(&farm, "fix"));
        over.store(true, Relaxed);
        (merged, writer.join().unwrap())
    });
    assert!(merged.0 == 5 && merged.1.contains("hosts are writing to v"), "{merged:?}");
    assert!(!mount.join("b/fixed").exists());
    assert_eq!(snapshots(&farm, "v").lines().count(), 2, "{}", snapshots(&farm, "v"));
    run(&mut merge(&farm, "fix"));
    assert_eq!(fs::read(mount.join("b/fixed")).unwrap(), b"fixed");
    for at in 0..written {
        assert_eq!(fs::read(mount.join(&format!("a/{at}"))).unwrap(), format!("text {at}").into_bytes());
    }
}

#[test]
fn what_is_wrong_is_said_in_words() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("a"), "a").unwrap();
    let failing = |command: &mut Command, code: i32, what: &str| {
        let (found, said) = run_failing(command);
        assert!(found == code && said.contains(what), "{found}: {said}");
    };
    failing(&mut merge(&farm, "v"), 2, "v is no fork");
    failing(&mut merge(&farm, "nothing"), 4, "nothing");
    run(&mut farm.ask(["snapshot", "create", "v@base"]));
    run(&mut farm.ask(["fork", "v", "live"]));
    failing(&mut merge(&farm, "live"), 2, "--base");
    let mut with_base = merge(&farm, "live");
    with_base.args(["--base", "v@base"]);
    assert!(run(&mut with_base).contains("nothing that v has not"));
    run(&mut farm.ask(["fork", "v@base", "fork"]));
    run(&mut farm.ask(["snapshot", "delete", "v@base"]));
    // Another one of that name is not what it began as.
    fs::write(mount.join("b"), "b").unwrap();
    run(&mut farm.ask(["snapshot", "create", "v@base"]));
    failing(&mut merge(&farm, "fork"), 2, "v@base is not what fork began as");
    run(&mut farm.ask(["snapshot", "delete", "v@base"]));
    failing(&mut merge(&farm, "fork"), 4, "v@base");
    assert!(!snapshots(&farm, "fork").contains("merge"));
}

/// A snapshot that is older than the fork, and is not what that began as: what only the snapshot has would be taken for what the fork has removed.
#[test]
fn what_a_fork_did_not_begin_as_is_no_base() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("old"), "old").unwrap();
    run(&mut farm.ask(["snapshot", "create", "v@one"]));
    fs::write(mount.join("new"), "new").unwrap();
    run(&mut farm.ask(["snapshot", "create", "v@two"]));
    run(&mut farm.ask(["fork", "v@one", "fork"]));
    let fork = farm.mount("fork", "");
    fs::write(fork.join("old"), "changed").unwrap();
    let mut with_base = merge(&farm, "fork");
    with_base.args(["--base", "v@two"]);
    let (code, said) = run_failing(&mut with_base);
    assert!(code == 2 && said.contains("v@two is not what fork began as"), "{code}: {said}");
    assert_eq!(fs::read(mount.join("new")).unwrap(), b"new");
    run(&mut merge(&farm, "fork"));
    assert_eq!(fs::read(mount.join("new")).unwrap(), b"new");
    assert_eq!(fs::read(mount.join("old")).unwrap(), b"changed");
}

/// What each side has moved elsewhere is there once, or nothing is merged.
#[test]
fn what_was_moved_on_both_sides_is_never_there_twice_nor_lost() {
    let (farm, mount) = Farm::mounted("v");
    for dir in ["p", "q", "dir"] {
        fs::create_dir(mount.join(dir)).unwrap();
        fs::write(mount.join(&format!("{dir}/file")), dir).unwrap();
    }
    for name in ["a", "b", "c"] {
        fs::write(mount.join(name), name).unwrap();
    }
    fs::create_dir_all(mount.join("out/in")).unwrap();
    fs::write(mount.join("out/in/file"), "in").unwrap();
    run(&mut farm.ask(["snapshot", "create", "v@base"]));
    run(&mut farm.ask(["fork", "v@base", "w"]));
    let fork = farm.mount("w", "");
    let mv = |at: &crate::setup::farm::Mount, from: &str, to: &str| {
        fs::rename(at.join(from), at.join(to)).unwrap()
    };
    let refused = |what: &str| {
        let before = super::live::tree(mount.path());
        let (code, said) = run_failing(&mut merge(&farm, "w"));
        assert!(code == 9 && said.contains(what), "{code}: {said}");
        assert_eq!(super::live::tree(mount.path()), before);
    };
    // To two names.
    mv(&mount, "a", "here");
    mv(&fork, "a", "there");
    refused("a: it was renamed here and there");
    mv(&mount, "here", "a");
    mv(&fork, "there", "a");
    mv(&mount, "dir", "here");
    mv(&fork, "dir", "there");
    refused("dir: it was renamed here and there");
    mv(&mount, "here", "dir");
    mv(&fork, "there", "dir");
    // The one with a folder far above it.
    mv(&mount, "out", "away");
    mv(&fork, "out/in/file", "q/taken");
    refused("out/in/file: it was renamed here and there");
    mv(&mount, "away", "out");
    mv(&fork, "q/taken", "out/in/file");
    // Each into the other one: together they would hang in the air.
    mv(&mount, "p", "q/p");
    mv(&fork, "q", "p/q");
    refused("its folder was removed or replaced on the other side");
    mv(&mount, "q/p", "p");
    mv(&fork, "p/q", "q");
    // Exchanged on the one side, changed on the other one.
    mv(&fork, "b", "x");
    mv(&fork, "c", "b");
    mv(&fork, "x", "c");
    fs::write(mount.join("b"), "changed").unwrap();
    refused("b: it was changed here and there");
    fs::write(mount.join("b"), "b").unwrap();
    // The same on both sides is no conflict.
    mv(&mount, "a", "new");
    mv(&fork, "a", "new");
    run(&mut merge(&farm, "w"));
    let has = |name: &str| fs::read_to_string(mount.join(name)).unwrap();
    assert_eq!(
        (has("b"), has("c"), has("new"), has("p/file"), has("q/file")),
        ("c".into(), "b".into(), "a".into(), "p".into(), "q".into())
    );
    assert!(!mount.join("a").exists() && !mount.join("x").exists());
}
