//! Each crash point of the program (`hayloft_crash`, ADR 0032) ends its process under load, as kill -9 does: what was answered when
//! the server died alone is there, what was fsynced is there whatever died, and the check finds nothing.
//!
//! `HAYLOFT_TEST_LONG` makes it twenty rounds a point, `HAYLOFT_TEST_SEED` begins elsewhere.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::faults::crash::{History, disturbed};
use crate::faults::crash_points_versions::VERSIONING;
use crate::setup::farm::{Farm, Mount, noise, rounds, run, seed, wait_until};
use crate::setup::model::{Random, Tree, find_prefix, read_tree};
use crate::setup::workers::Work;

/// The variable that chooses a point.
pub(crate) const VARIABLE: &str = "HAYLOFT_CRASH_AT";

/// Longer than any point is in coming.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Points of a server that two hosts use, with about how often each is passed in a second.
const SERVING: [(&str, u64); 10] = [
    ("ledger.object-durable", 60),
    ("ledger.line-added", 60),
    ("commit.pack-put", 3),
    ("commit.content-durable", 10),
    ("commit.ordered", 10),
    ("commit.durable", 10),
    ("order.entry-kept", 60),
    ("order.written", 60),
    ("order.flushed", 60),
    ("change.ordered", 20),
];
/// The same, as soon as what was changed has been heard of.
const HEARD: [(&str, u64); 1] = [("change.heard", 20)];
/// Points of a server that comes after one that was killed.
const COMING_BACK: [&str; 5] =
    ["ledger.database-open", "ledger.rewritten", "ledger.old-deleted", "replay.written", "replay.durable"];
/// Points of a server whose store fails for a while.
const FAILING: [&str; 1] = ["replay.redone"];
/// Points of a sweep.
const SWEEPING: [&str; 5] = [
    "sweep.chunks-dropped",
    "sweep.row-deleted",
    "sweep.orphan-deleted",
    "sweep.pack-put",
    "sweep.pack-named",
];
/// Points of commands about volumes.
const ADMINISTERING: [(&str, &str); 6] = [
    ("registry.created-first", "create"),
    ("registry.updated-first", "set-quota"),
    ("delete.marked", "delete"),
    ("delete.packs-gone", "delete"),
    ("delete.tables-gone", "delete"),
    ("registry.removed-second", "delete"),
];
/// Points of a repair.
const MENDING: [&str; 2] = ["mend.kept", "mend.accepted"];
/// Points of a mount, with about how often each is passed in a second.
pub(crate) const MOUNTED: [(&str, u64); 4] =
    [("log.cut", 5), ("log.content-sent", 5), ("log.records-sent", 5), ("log.answered", 5)];
/// Points of a mount whose session was ended.
pub(crate) const RESCUING: [&str; 1] = ["rescue.kept"];
/// Points of a command that publishes.
pub(crate) const PUBLISHING: [&str; 4] =
    ["publish.staged", "publish.staged-durable", "publish.exchanged", "publish.durable"];
/// Points of a command that makes layers.
pub(crate) const LAYERING: [&str; 5] =
    ["layer.made", "layer.exchanged", "layer.unpacked", "generation.made", "generation.there"];

fn all() -> BTreeSet<&'static str> {
    let counted = SERVING.iter().chain(&HEARD).chain(&MOUNTED).map(|(point, _)| *point);
    let named = [&COMING_BACK[..], &FAILING, &SWEEPING, &MENDING, &RESCUING, &PUBLISHING, &LAYERING].concat();
    let of_commands =
        ADMINISTERING.map(|(point, _)| point).into_iter().chain(VERSIONING.map(|(point, _)| point));
    counted.chain(named).chain(of_commands).collect()
}

#[test]
fn every_point_is_killed_and_listed() {
    fn points(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                points(&path, found);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let calls = text.split("hayloft_crash::point(").skip(1);
                for call in calls {
                    let name = call.strip_prefix('"').and_then(|name| name.split_once('"'));
                    let new = found.insert(name.unwrap_or_else(|| panic!("{path:?}: no name")).0.to_owned());
                    assert!(new, "{path:?} names a point twice: {call:.40}");
                }
            }
        }
    }
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = BTreeSet::new();
    for member in fs::read_dir(top).unwrap() {
        let src = member.unwrap().path().join("src");
        if src.is_dir() {
            points(&src, &mut found);
        }
    }
    let killed: BTreeSet<String> = all().into_iter().map(str::to_owned).collect();
    assert_eq!(found, killed, "points in the sources, and points that a test kills");
    let listed = fs::read_to_string(top.parent().unwrap().join("docs/crash-points.md")).unwrap();
    let listed = listed.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let listed: BTreeSet<String> = listed.map(|(name, _)| name.to_owned()).collect();
    assert_eq!(listed, found, "points in docs/crash-points.md, and points in the sources");
}

pub(crate) fn at(point: &str, passing: u64) -> [(&'static str, String); 1] {
    [(VARIABLE, format!("{point}:{passing}"))]
}

pub(crate) fn is_alive(pid: u32) -> bool {
    // One that has ended, and nobody has waited for, has no program.
    fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

/// Waits until the server has killed itself.
pub(crate) fn await_death(farm: &mut Farm, point: &str) {
    let pid = farm.server_pid();
    wait_until(point, SOON, || !is_alive(pid));
    farm.kill_server();
    assert!(!farm.server_log().contains("panicked"), "{}", farm.server_log());
}

pub(crate) fn sound(farm: &Farm) {
    let said = run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}

/// The tree after a crash: a prefix of what was done to the one before.
pub(crate) fn left(farm: &Farm, before: &Tree, history: &History) -> Tree {
    let mount = farm.mount("v", "");
    let found = read_tree(mount.path());
    find_prefix(before, &history.ops, history.durable, &found);
    mount.unmount();
    sound(farm);
    found
}

/// Lets two hosts work in a folder of their own, `die` the server meanwhile, and starts another one. Nothing is lost.
fn working(farm: &mut Farm, folder: &str, seed: u64, die: impl FnOnce(&mut Farm)) {
    let mounts: [Mount; 2] = [0, 1].map(|at| farm.mount_as("v", &format!("mnt-{at}"), "commit=0.2", None));
    let work = Work::new(&mounts, folder);
    work.run(seed, |_| {
        die(farm);
        farm.set_env(&[]);
        farm.start_server();
        std::thread::sleep(Duration::from_millis(300));
    });
    // What another host has made, and what the server has: from its own kernel's pages nobody would notice a loss.
    work.verify(&mounts[1].join(folder), 0);
    mounts.into_iter().for_each(Mount::unmount);
    sound(farm);
    let mount = farm.mount("v", "ro");
    work.verify(&mount.join(folder), 0);
    mount.unmount();
}

/// Starts the server anew, to die at a point.
pub(crate) fn arm(farm: &mut Farm, env: &[(&'static str, String)]) {
    farm.stop_server();
    farm.set_env(env);
    farm.start_server();
}

fn serving(points: &[(&str, u64)]) {
    let mut farm = Farm::new();
    farm.create("v");
    for round in 0..rounds(1, 20) as u64 {
        for (number, (point, often)) in points.iter().enumerate() {
            let mut random = Random::new(seed() ^ (round * 1000 + number as u64));
            // Behind what the two hosts do to begin with.
            let passing = 1 + often / 2 + random.below(*often * 2);
            eprintln!("{point}:{passing}");
            arm(&mut farm, &at(point, passing));
            let folder = format!("{point}-{round}");
            working(&mut farm, &folder, seed() + round, |farm| await_death(farm, point));
        }
    }
}

#[test]
fn a_server_that_two_hosts_use_dies_at_each_point() {
    serving(&SERVING);
}

#[test]
fn a_server_dies_when_a_change_was_heard_of() {
    serving(&HEARD);
}

/// Server and mount die together: a prefix is left, at or beyond the last fsync.
#[test]
fn a_server_dies_at_each_point_and_its_mount_with_it() {
    let mut farm = Farm::new();
    farm.create("v");
    let mut tree = Tree::new();
    for round in 0..rounds(1, 20) as u64 {
        for (number, (point, often)) in SERVING.iter().enumerate() {
            // One mount alone asks for no changes, and brings little content at a time.
            if ["commit.pack-put", "change.ordered"].contains(point) {
                continue;
            }
            let seed = seed() * 100 + round * 1000 + number as u64;
            // Behind what mounting passes, which commits nothing.
            let first = if point.starts_with("commit.") { 1 } else { 1 + often / 2 };
            arm(&mut farm, &at(point, first + Random::new(seed).below(often / 3)));
            let mount = farm.mount("v", "commit=0.2");
            let history = disturbed(&mount, &tree, seed, || {
                await_death(&mut farm, point);
                crate::setup::farm::kill(mount.pid(), libc::SIGKILL);
            });
            mount.kill();
            farm.set_env(&[]);
            farm.start_server();
            tree = left(&farm, &tree, &history);
        }
    }
}

#[test]
fn a_server_that_comes_back_dies_again() {
    let mut farm = Farm::new();
    farm.create("v");
    for round in 0..rounds(1, 20) as u64 {
        for point in COMING_BACK {
            eprintln!("{point}");
            working(&mut farm, &format!("{point}-{round}"), seed() + round, |farm| {
                // There is not always something to bring back, or an old ledger.
                for _ in 0..100 {
                    std::thread::sleep(Duration::from_millis(300));
                    farm.kill_server();
                    farm.set_env(&at(point, 1));
                    farm.start_server();
                    let pid = farm.server_pid();
                    for _ in 0..100 {
                        std::thread::sleep(Duration::from_millis(20));
                        if !is_alive(pid) {
                            return await_death(farm, point);
                        }
                    }
                }
                panic!("{point} is never passed");
            });
        }
    }
}

#[test]
fn a_server_dies_that_writes_once_more_what_its_failing_store_has_lost() {
    let mut farm = Farm::new();
    farm.create("v");
    let file = farm.dir().join("faults");
    for round in 0..rounds(1, 20) as u64 {
        for point in FAILING {
            let [crash] = at(point, 1);
            arm(&mut farm, &[crash, ("HAYLOFT_STORE_FAULTS", file.display().to_string())]);
            working(&mut farm, &format!("{point}-{round}"), seed() + round, |farm| {
                let pid = farm.server_pid();
                // Longer than it has patience with a store; nothing may have been under way in that moment.
                wait_until(point, SOON, || {
                    fs::write(&file, "error 1000").unwrap();
                    std::thread::sleep(Duration::from_secs(4));
                    fs::write(&file, "").unwrap();
                    std::thread::sleep(Duration::from_secs(3));
                    !is_alive(pid)
                });
                await_death(farm, point);
            });
        }
    }
}

/// Content that is mostly dead, and a pack that no row names.
fn litter(farm: &Farm, folder: &str) {
    let mount = farm.mount("v", "");
    let top = mount.join(folder);
    fs::create_dir(&top).unwrap();
    for n in 0..12 {
        fs::write(top.join(format!("{n}")), noise(seed() + n, 300_000)).unwrap();
    }
    fs::write(top.join("kept"), noise(seed(), 200_000)).unwrap();
    mount.sync();
    for n in 0..12 {
        fs::write(top.join(format!("alone-{n}")), noise(seed() + 20 + n, 300_000)).unwrap();
    }
    mount.sync();
    for n in 0..12 {
        fs::remove_file(top.join(format!("{n}"))).unwrap();
        fs::remove_file(top.join(format!("alone-{n}"))).unwrap();
    }
    mount.unmount();
    let packs = fs::read_dir(farm.dir().join("store/packs")).unwrap().next().unwrap().unwrap().path();
    let some = fs::read_dir(&packs).unwrap().next().unwrap().unwrap().path();
    fs::copy(some, packs.join(format!("{:016x}", 0xabcd))).unwrap();
}

#[test]
fn a_server_dies_in_the_middle_of_a_sweep() {
    let mut farm = Farm::new();
    farm.create("v");
    for round in 0..rounds(1, 20) as u64 {
        for point in SWEEPING {
            eprintln!("{point}");
            let folder = format!("{point}-litter-{round}");
            litter(&farm, &folder);
            arm(&mut farm, &at(point, 1));
            working(&mut farm, &format!("{point}-{round}"), seed() + round, |farm| {
                let swept = farm.volume(["sweep", "v"]).output().unwrap();
                assert!(!swept.status.success(), "{point} was not passed");
                await_death(farm, point);
            });
            run(&mut farm.volume(["sweep", "v"]));
            sound(&farm);
            let mount = farm.mount("v", "ro");
            assert!(fs::read(mount.join(&folder).join("kept")).unwrap() == noise(seed(), 200_000));
            mount.unmount();
        }
    }
}

#[test]
fn a_server_dies_in_the_middle_of_what_is_done_to_a_volume() {
    let mut farm = Farm::new();
    for (point, verb) in ADMINISTERING {
        eprintln!("{point}");
        if verb != "create" {
            farm.create("v");
            let mount = farm.mount("v", "");
            fs::write(mount.join("file"), noise(1, 300_000)).unwrap();
            mount.unmount();
        }
        let command = |farm: &Farm| match verb {
            "create" => farm.volume(["create", "v", "--owner", "0:0"]),
            "set-quota" => farm.volume(["set-quota", "v", "--quota", "1G"]),
            _ => farm.volume(["delete", "v"]),
        };
        arm(&mut farm, &at(point, 1));
        assert!(!command(&farm).output().unwrap().status.success(), "{point} was not passed");
        await_death(&mut farm, point);
        farm.set_env(&[]);
        farm.start_server();
        // What was begun can be done again, or was done.
        let again = command(&farm).output().unwrap();
        match verb {
            "delete" => assert!(again.status.success(), "{again:?}"),
            "create" => {
                assert!(again.status.success() || again.status.code() == Some(9), "it is there: {again:?}");
            }
            _ => assert!(again.status.success(), "{again:?}"),
        }
        let listed = run(&mut farm.volume(["list"]));
        assert_eq!(listed.contains('v'), verb != "delete", "{listed}");
        if verb != "delete" {
            sound(&farm);
            let entries =
                ["registry", "registry-copy"].map(|of| fs::read(farm.dir().join("store").join(of).join("v")));
            let [first, second] = entries.map(Result::unwrap);
            assert!(first == second, "the two entries differ");
            run(&mut farm.volume(["delete", "v"]));
        }
        let left: Vec<_> = ["packs", "volumes"]
            .into_iter()
            .filter_map(|of| fs::read_dir(farm.dir().join("store").join(of)).ok())
            .flatten()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_server_dies_in_the_middle_of_a_repair() {
    for point in MENDING {
        eprintln!("{point}");
        let mut farm = Farm::new();
        farm.create("v");
        let mount = farm.mount("v", "");
        for n in 0..5 {
            fs::write(mount.join(&format!("file-{n}")), noise(n, 3000)).unwrap();
            mount.sync();
        }
        mount.unmount();
        farm.kill_server();
        // The last file of the log with changes in it loses its end.
        let volume = fs::read_dir(farm.dir().join("store/volumes")).unwrap().next().unwrap().unwrap().path();
        let mut log: Vec<_> =
            fs::read_dir(volume.join("db/wal")).unwrap().map(|entry| entry.unwrap().path()).collect();
        log.sort();
        let file = log.into_iter().rfind(|file| fs::metadata(file).unwrap().len() > 1000).unwrap();
        let harmed = fs::read(&file).unwrap()[..1000].to_vec();
        fs::write(&file, &harmed).unwrap();
        farm.set_env(&at(point, 1));
        farm.start_server();
        let repaired = farm.volume(["check", "v", "--repair"]).output().unwrap();
        assert!(!repaired.status.success(), "{point} was not passed");
        await_death(&mut farm, point);
        farm.set_env(&[]);
        farm.start_server();
        let said = run(&mut farm.volume(["check", "v", "--repair"]));
        assert!(said.contains("sound") || said.contains("mended"), "{said}");
        sound(&farm);
        // What was damaged is kept, however often the repair was begun.
        let kept = volume.join("damaged").join(file.file_name().unwrap());
        assert!(fs::read(&kept).unwrap() == harmed, "{} bytes", fs::metadata(&kept).unwrap().len());
    }
}
