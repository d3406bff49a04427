//! Snapshots, forks and the way back, on real mounts.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::setup::farm::{Farm, noise, run, run_failing, sh, wait_until};

pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// What is in a folder: mode, number of names and content, or where a link leads, by path.
pub(crate) type Tree = BTreeMap<PathBuf, (u32, u64, Vec<u8>)>;

pub(crate) fn tree(at: &Path) -> Tree {
    fn add(root: &Path, dir: &Path, tree: &mut Tree) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let found = fs::symlink_metadata(&path).unwrap();
            let content = match found.file_type() {
                kind if kind.is_file() => fs::read(&path).unwrap(),
                kind if kind.is_symlink() => {
                    fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
                }
                _ => Vec::new(),
            };
            tree.insert(path.strip_prefix(root).unwrap().to_owned(), (found.mode(), found.nlink(), content));
            if found.is_dir() {
                add(root, &path, tree);
            }
        }
    }
    let mut found = Tree::new();
    add(at, at, &mut found);
    found
}

pub(super) fn snapshot(farm: &Farm, name: &str) {
    run(&mut farm.ask(["snapshot", "create", name]));
}

pub(crate) fn seen(farm: &Farm, version: &str, name: &str) -> Tree {
    let mount = farm.mount_as(version, name, "", None);
    let found = tree(mount.path());
    mount.unmount();
    found
}

pub(super) fn is_sound(farm: &Farm, volume: &str) {
    run(&mut farm.volume(["check", volume, "--content"]));
}

/// Objects of a store beyond what an empty one has.
pub(super) fn objects(store: &Path) -> usize {
    let found = run(&mut sh(&format!("find {} -type f | grep -vc self-test || true", store.display())));
    found.trim().parse().unwrap()
}

pub(crate) fn is_given_back(store: &Path) {
    wait_until("everything is given back", PATIENCE, || objects(store) == 0);
}

#[test]
fn a_snapshot_has_what_all_hosts_have_done_and_nothing_later() {
    let (farm, mounts) = Farm::shared_with(2, "commit=3600", &[]);
    let volume = "v";
    let [a, b] = &mounts[..] else { panic!("two mounts") };
    fs::create_dir(a.join("of-a")).unwrap();
    fs::create_dir(b.join("of-b")).unwrap();
    for number in 0..50 {
        fs::write(a.join(&format!("of-a/{number}")), format!("a{number}")).unwrap();
        fs::write(b.join(&format!("of-b/{number}")), vec![b'b'; 9000 + number]).unwrap();
    }
    fs::write(a.join("large"), vec![7; 3 << 20]).unwrap();
    let before = tree(a.path());
    snapshot(&farm, &format!("{volume}@one"));
    fs::write(b.join("of-b/7"), "later").unwrap();
    fs::remove_file(a.join("of-a/3")).unwrap();
    fs::rename(a.join("large"), a.join("renamed")).unwrap();
    fs::write(a.join("late"), "late").unwrap();
    let later = tree(b.path());
    let view = farm.mount_as(&format!("{volume}@one"), "view", "", None);
    assert_eq!(tree(view.path()), before);
    // Nothing in it changes, whoever asks and however it is mounted.
    assert_eq!(fs::write(view.join("x"), "x").unwrap_err().raw_os_error(), Some(30));
    let refused = farm.mount_as(&format!("{volume}@one"), "other", "rw", None);
    assert_eq!(fs::write(refused.join("x"), "x").unwrap_err().raw_os_error(), Some(30));
    refused.unmount();
    assert_eq!(tree(a.path()), later);
    // It is in use, and then it is not.
    let (code, said) = run_failing(&mut farm.ask(["snapshot", "delete", "v@one"]));
    assert_eq!(code, 5, "{said}");
    view.unmount();
    run(&mut farm.ask(["snapshot", "delete", "v@one"]));
    let (code, said) = run_failing(&mut farm.ask(["snapshot", "show", "v@one"]));
    assert_eq!((code, said.contains("there is no snapshot v@one")), (4, true), "{said}");
    assert!(farm.try_mount("v@one", "gone").is_err());
    is_sound(&farm, volume);
}

#[test]
fn forks_share_what_they_had_and_nothing_else_and_go_in_any_order() {
    let (farm, mount) = Farm::mounted("base");
    let store = farm.dir().join("store");
    for number in 0..200 {
        fs::write(mount.join(&format!("f{number}")), vec![number as u8; 2000 + 50 * number]).unwrap();
    }
    fs::write(mount.join("large"), vec![3; 5 << 20]).unwrap();
    let before = tree(mount.path());
    run(&mut farm.ask(["fork", "base", "one"]));
    snapshot(&farm, "base@point");
    fs::remove_file(mount.join("large")).unwrap();
    fs::write(mount.join("f1"), "of the base").unwrap();
    run(&mut farm.ask(["fork", "base@point", "two"]));
    let one = farm.mount_as("one", "one", "", None);
    assert_eq!(tree(one.path()), before);
    fs::write(one.join("f1"), "of one").unwrap();
    fs::write(one.join("own"), vec![9; 2 << 20]).unwrap();
    let of_one = tree(one.path());
    one.sync();
    run(&mut farm.ask(["fork", "one", "three"]));
    assert_eq!(fs::read(mount.join("f1")).unwrap(), b"of the base");
    assert_eq!(seen(&farm, "two", "two"), before);
    let shown: serde_json::Value =
        serde_json::from_str(&run(&mut farm.volume(["show", "one", "--json"]))).unwrap();
    assert_eq!((&shown["origin"], &shown["snapshots"]), (&"base".into(), &0.into()), "{shown}");
    let bytes = |key: &str| shown[key].as_u64().unwrap();
    assert!(20 * bytes("own_bytes") < bytes("shared_bytes"), "three has all of it: {shown}");
    // What others have is not given back by a sweep, and is given back when they do not.
    mount.sync();
    run(&mut farm.volume(["sweep", "base"]));
    one.unmount();
    run(&mut farm.volume(["delete", "one"]));
    assert_eq!(seen(&farm, "three", "three"), of_one);
    let (code, said) = run_failing(&mut farm.volume(["delete", "base"]));
    assert_eq!(code, 5, "{said}");
    mount.unmount();
    let (code, said) = run_failing(&mut farm.volume(["delete", "base"]));
    assert_eq!((code, said.contains("base has 1 snapshots")), (5, true), "{said}");
    run(&mut farm.volume(["delete", "base", "--snapshots"]));
    for volume in ["two", "three"] {
        run(&mut farm.volume(["sweep", volume]));
        is_sound(&farm, volume);
    }
    assert_eq!(seen(&farm, "three", "three"), of_one);
    assert_eq!(seen(&farm, "two", "two"), before);
    run(&mut farm.volume(["delete", "three"]));
    assert_eq!(seen(&farm, "two", "two"), before);
    run(&mut farm.volume(["delete", "two"]));
    is_given_back(&store);
}

#[test]
fn all_hosts_go_back_without_mounting_anew_and_can_go_forward_again() {
    let (farm, mounts) = Farm::shared(3);
    let [a, b, c] = &mounts[..] else { panic!("three mounts") };
    fs::create_dir(a.join("dir")).unwrap();
    fs::write(a.join("dir/kept"), "then").unwrap();
    fs::write(b.join("removed"), "then").unwrap();
    let before = tree(c.path());
    snapshot(&farm, "v@then");
    fs::write(b.join("dir/kept"), "now").unwrap();
    fs::remove_file(a.join("removed")).unwrap();
    fs::write(c.join("made"), "now").unwrap();
    let kept = fs::File::open(a.join("dir/kept")).unwrap();
    let made = fs::File::open(b.join("made")).unwrap();
    let number = made.metadata().unwrap().ino();
    let now = tree(a.path());
    run(&mut farm.ask(["rollback", "v@then", "--keep-as", "now"]));
    for mount in &mounts {
        assert_eq!(tree(mount.path()), before);
    }
    // A file that is open stays what it was.
    assert_eq!(std::io::read_to_string(&kept).unwrap(), "now");
    assert_eq!(std::io::read_to_string(&made).unwrap(), "now");
    fs::write(c.join("made"), "another").unwrap();
    assert_ne!(fs::metadata(c.join("made")).unwrap().ino(), number, "numbers are never used twice");
    assert_eq!(fs::read(a.join("made")).unwrap(), b"another");
    run(&mut farm.ask(["rollback", "v@now"]));
    for mount in &mounts {
        assert_eq!(tree(mount.path()), now);
    }
    assert_eq!(fs::read(b.join("made")).unwrap(), b"now");
    fs::write(b.join("made"), "goes on").unwrap();
    assert_eq!(fs::read(a.join("made")).unwrap(), b"goes on");
    is_sound(&farm, "v");
    let listed = run(&mut farm.ask(["snapshot", "list", "v"]));
    assert_eq!(listed.matches("v@").count(), 3, "{listed}");
}

/// Without an entry what only the snapshot has would be deleted: it is there twice.
#[test]
fn a_snapshot_outlives_one_of_its_entries() {
    let (mut farm, mount) = Farm::mounted("v");
    for number in 0..300 {
        fs::write(mount.join(&format!("file-{number}")), noise(number, 3000)).unwrap();
    }
    let was = tree(mount.path());
    snapshot(&farm, "v@one");
    run(&mut sh(&format!("rm {}/file-*", mount.path().display())));
    mount.sync();
    let store = farm.dir().join("store");
    let entries = |folder: &str| {
        let found = run(&mut sh(&format!("find {}/{folder} -type f", store.display())));
        found.lines().map(PathBuf::from).collect::<Vec<_>>()
    };
    let [first, second] = [entries("snapshots"), entries("snapshots-copy")];
    assert_eq!((first.len(), second.len()), (1, 1));
    let lost = |path: &Path| fs::remove_file(path).unwrap();
    // What is lost is written again when the volume is opened; what is damaged stays until it is changed.
    for lose in
        [&|| lost(&first[0]), &|| lost(&second[0]), &|| fs::write(&first[0], "{}").unwrap()] as [&dyn Fn(); 3]
    {
        lose();
        run(&mut farm.volume(["sweep", "v"]));
        assert_eq!(seen(&farm, "v@one", "view"), was);
        farm.kill_server();
        farm.start_server();
        fs::write(mount.join("wakes"), "").unwrap();
        mount.sync();
    }
    run(&mut farm.ask(["snapshot", "delete", "v@one"]));
    let (code, said) = run_failing(&mut farm.ask(["snapshot", "show", "v@one"]));
    assert_eq!(code, 4, "{said}");
    assert_eq!((entries("snapshots").len(), entries("snapshots-copy").len()), (0, 0));
}

#[test]
fn a_fork_takes_the_place_of_its_origin() {
    let (farm, mounts) = Farm::shared(2);
    let [a, b] = &mounts[..] else { panic!("two mounts") };
    fs::write(a.join("file"), "origin").unwrap();
    run(&mut farm.ask(["fork", "v", "test"]));
    let fork = farm.mount_as("test", "test", "", None);
    fs::write(fork.join("file"), "tested").unwrap();
    fs::write(fork.join("more"), "more").unwrap();
    let tested = tree(fork.path());
    assert!(fs::metadata(fork.join("more")).unwrap().ino() < 1 << 32);
    // Numbers of both are never those of two files.
    fs::write(b.join("meanwhile"), "meanwhile").unwrap();
    let meanwhile = fs::File::open(b.join("meanwhile")).unwrap();
    let (code, said) = run_failing(&mut farm.ask(["promote", "test"]));
    assert_eq!(code, 5, "{said}");
    fork.unmount();
    let was = tree(a.path());
    run(&mut farm.ask(["promote", "test", "--keep-as", "was"]));
    assert_eq!((tree(a.path()), tree(b.path())), (tested.clone(), tested.clone()));
    // What is open stays what it was.
    assert_eq!(std::io::read_to_string(&meanwhile).unwrap(), "meanwhile");
    let (code, said) = run_failing(&mut farm.volume(["show", "test"]));
    assert_eq!(code, 4, "{said}");
    assert_eq!(seen(&farm, "v@was", "was"), was);
    // Programs of 32 bits that were not built for large files cannot look at higher numbers (EOVERFLOW).
    fs::write(b.join("new"), "").unwrap();
    for name in ["file", "more", "new"] {
        assert!(fs::metadata(a.join(name)).unwrap().ino() < 1 << 32, "{name}");
    }
    fs::remove_file(b.join("new")).unwrap();
    fs::write(a.join("file"), "goes on").unwrap();
    assert_eq!(fs::read(b.join("file")).unwrap(), b"goes on");
    run(&mut farm.ask(["fork", "v@was", "test"]));
    assert_eq!(seen(&farm, "test", "again"), was);
    is_sound(&farm, "v");
    let (code, said) = run_failing(&mut farm.ask(["promote", "v"]));
    assert_eq!((code, said.contains("no fork")), (2, true), "{said}");
}

#[test]
fn a_host_that_does_not_answer_is_named_and_can_be_left_out() {
    let (farm, mounts) = Farm::shared_with(2, "commit=3600", &["--lease", "2"]);
    fs::create_dir(mounts[0].join("dir")).unwrap();
    fs::write(mounts[0].join("dir/shipped"), "1").unwrap();
    mounts[0].sync();
    fs::write(mounts[0].join("dir/unshipped"), "2").unwrap();
    crate::setup::farm::kill(mounts[0].pid(), libc::SIGSTOP);
    let (code, said) = run_failing(&mut farm.ask(["snapshot", "create", "v@all"]));
    let named = said.contains(&mounts[0].path().display().to_string()) && said.contains("--as-stored");
    assert!(code == 5 && named, "{code} {said}");
    run(&mut farm.ask(["snapshot", "create", "v@stored", "--as-stored"]));
    crate::setup::farm::kill(mounts[0].pid(), libc::SIGCONT);
    // A name that was refused is free.
    snapshot(&farm, "v@all");
    let names = |tree: Tree| tree.into_keys().map(|path| path.display().to_string()).collect::<Vec<_>>();
    assert_eq!(names(seen(&farm, "v@stored", "stored")), ["dir", "dir/shipped"]);
    assert_eq!(names(seen(&farm, "v@all", "all")), ["dir", "dir/shipped", "dir/unshipped"]);
}

#[test]
fn what_is_wrong_is_said_in_words() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("f"), "x").unwrap();
    snapshot(&farm, "v@s");
    for (args, wanted, part) in [
        (&["snapshot", "create", "v@s"][..], 9, "there is a snapshot v@s already"),
        (&["snapshot", "create", "w@s"], 4, "there is no volume w"),
        (&["snapshot", "create", "v"], 2, "VOLUME@NAME"),
        (&["snapshot", "create", "v@a b"], 2, "cannot be the name of a snapshot"),
        (&["snapshot", "create", "v@.x"], 2, "cannot be the name of a snapshot"),
        (&["snapshot", "delete", "v@none"], 4, "there is no snapshot v@none"),
        (&["fork", "v@none", "f"], 4, "there is no snapshot v@none"),
        (&["fork", "v", "v"], 9, "there is a volume v already"),
        (&["fork", "v", "a@b"], 2, "cannot be the name of a volume"),
        (&["rollback", "v"], 2, "VOLUME@NAME"),
        (&["rollback", "v@none"], 4, "there is no snapshot v@none"),
        (&["rollback", "v@s", "--keep-as", "s"], 9, "there is a snapshot v@s already"),
        (&["promote", "v"], 2, "no fork"),
        (&["snapshot", "list", "w"], 4, "there is no volume w"),
    ] {
        let mut command = crate::setup::farm::hayloft(args);
        command.args(["--server", &farm.address]);
        let (code, said) = run_failing(&mut command);
        assert!(code == wanted && said.contains(part), "{args:?}: {code} {said}");
    }
    assert_eq!(fs::read(mount.join("f")).unwrap(), b"x");
    let listed = run(&mut farm.ask(["snapshot", "list", "v"]));
    assert_eq!(listed.lines().count(), 2, "{listed}");
    // Of one hour the last one is kept, and what is asked is only told.
    snapshot(&farm, "v@t");
    let told = run(&mut farm.ask(["snapshot", "prune", "v", "--keep", "3h"]));
    let hours = told.matches("would delete v@s").count();
    assert_eq!(run(&mut farm.ask(["snapshot", "list", "v"])).lines().count(), 3);
    run(&mut farm.ask(["snapshot", "prune", "v", "--keep", "3h", "--yes"]));
    assert_eq!(run(&mut farm.ask(["snapshot", "list", "v"])).lines().count(), 3 - hours);
}

/// What `hayloft diff` tells has to name every path that differs, and no path that is not there.
pub(super) fn tells_what_differs(farm: &Farm, (from, old): (&str, &Tree), (to, new): (&str, &Tree)) {
    let told = run(&mut farm.ask(["diff", from, to, "--json"]));
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let mut named = std::collections::BTreeSet::new();
    for difference in told["differences"].as_array().unwrap() {
        for (side, tree) in [("old", old), ("new", new)] {
            let Some(path) = difference[side]["path"].as_str() else { continue };
            assert!(path.is_empty() || tree.contains_key(Path::new(path)), "{from} {to}: {difference}");
            named.insert(PathBuf::from(path));
        }
        let path = |side: &str| difference[side]["path"].as_str().map(PathBuf::from);
        if difference["kind"] == "changed" && path("old") == path("new") {
            let path = path("new").unwrap();
            let is_content = difference["changed"].as_array().unwrap().contains(&"content".into());
            assert_eq!(is_content, old[&path].2 != new[&path].2, "{from} {to}: {difference}");
        }
    }
    let all: std::collections::BTreeSet<&PathBuf> = old.keys().chain(new.keys()).collect();
    let has_names = |tree: &Tree, path: &PathBuf| {
        tree.get(path).is_some_and(|found| found.0 & 0o170_000 == 0o100_000 && found.1 > 1)
    };
    // What lies in a folder that has moved is not named, and a file with several names is named by one of them.
    for path in all.into_iter().filter(|path| old.get(*path) != new.get(*path)) {
        let is_named =
            path.ancestors().any(|path| named.contains(path)) || has_names(old, path) || has_names(new, path);
        assert!(is_named, "{from} {to}: {} is not named", path.display());
    }
}

/// What has changed in a file is told also when in the same time it got another name, or lost one.
#[test]
fn what_has_changed_in_a_file_is_told_beside_names_that_come_and_go() {
    let (farm, mount) = Farm::mounted("v");
    for name in ["stays", "goes", "plain"] {
        fs::write(mount.join(name), "before").unwrap();
    }
    fs::hard_link(mount.join("goes"), mount.join("other")).unwrap();
    snapshot(&farm, "v@before");
    fs::hard_link(mount.join("stays"), mount.join("new")).unwrap();
    fs::write(mount.join("stays"), "after").unwrap();
    fs::remove_file(mount.join("goes")).unwrap();
    fs::write(mount.join("other"), "after").unwrap();
    fs::hard_link(mount.join("plain"), mount.join("second")).unwrap();
    snapshot(&farm, "v@after");
    let told = run(&mut farm.ask(["diff", "v@before", "v@after"]));
    let told: Vec<&str> = told.lines().collect();
    assert_eq!(
        told,
        ["D goes", "A new", "M other (content, links)", "A second", "M stays (content, links)"],
        "{told:?}"
    );
}
