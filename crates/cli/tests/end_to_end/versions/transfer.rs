//! `hayloft send` and `hayloft receive`: by mirrors, behind web servers, as streams.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use serde_json::Value;

use crate::setup::farm::{Farm, Mount, hayloft, noise, number, run, run_failing, sh};

/// What a command says that fails with this code.
fn failing(code: i32, command: &mut Command) -> String {
    let (found, said) = run_failing(command);
    assert_eq!(found, code, "{command:?}: {said}");
    said
}

fn fill(top: &Path) {
    fs::create_dir_all(top.join("dir/deep")).unwrap();
    for at in 0..200 {
        fs::write(top.join(format!("dir/{at}")), noise(at, at as usize * 41)).unwrap();
    }
    fs::write(top.join("large"), noise(3, 4_000_000)).unwrap();
    symlink("dir/7", top.join("link")).unwrap();
    fs::hard_link(top.join("dir/9"), top.join("dir/deep/nine")).unwrap();
    fs::set_permissions(top.join("dir/8"), fs::Permissions::from_mode(0o4755)).unwrap();
    std::os::unix::fs::chown(top.join("dir/10"), Some(1234), Some(99)).unwrap();
    run(&mut sh(&format!(
        "cd {}; mkfifo fifo; mknod null c 1 3; setfattr -n user.note -v x dir/11",
        top.display()
    )));
}

/// A farm with a volume, a mirror and a cache of its own.
pub(super) struct Side {
    pub(super) farm: Farm,
    cache: PathBuf,
}

impl Side {
    pub(super) fn new() -> Side {
        let farm = Farm::new();
        let cache = farm.dir().join("cache");
        Side { farm, cache }
    }

    pub(super) fn ask<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = self.farm.ask(args);
        command.arg("--cache").arg(&self.cache);
        command
    }

    pub(super) fn snapshot(&self, name: &str) {
        run(&mut self.farm.ask(["snapshot", "create", name]));
    }

    pub(super) fn tree(&self, of: &str) -> String {
        run(&mut self.farm.ask(["verify", of])).lines().next().unwrap().to_owned()
    }

    pub(super) fn send(&self, what: &str, mirror: &Path) -> Value {
        let told = run(self.ask(["send", what, "--json"]).arg("--to").arg(mirror));
        serde_json::from_str(&told).unwrap()
    }

    pub(super) fn receive(&self, from: &Path, what: &str) -> Value {
        let told = run(self.ask(["receive", "--json"]).arg(from).arg(what));
        serde_json::from_str(&told).unwrap()
    }

    pub(super) fn mount(&self, volume: &str) -> Mount {
        self.farm.mount(volume, "")
    }
}

#[test]
fn versions_go_by_a_mirror_and_all_hosts_see_them_at_once() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mirror = here.farm.dir().join("mirror");
    let mount = here.mount("v");
    fill(mount.path());
    here.snapshot("v@one");
    here.send("v@one", &mirror);
    let first = there.receive(&mirror, "v");
    assert_eq!(first["received"], "v@one");
    assert_eq!(there.tree("v@one"), here.tree("v@one"));
    run(&mut there.farm.ask(["verify", "v", "--deep", "--against", &here.tree("v@one")]));
    // A host that has it mounted is given the next one, and what it was is kept.
    let far = there.mount("v");
    assert_eq!(
        fs::metadata(far.join("dir/9")).unwrap().ino(),
        fs::metadata(far.join("dir/deep/nine")).unwrap().ino()
    );
    assert_eq!(
        fs::metadata(far.join("dir/5")).unwrap().modified().unwrap(),
        fs::metadata(mount.join("dir/5")).unwrap().modified().unwrap()
    );
    let mut large = fs::read(mount.join("large")).unwrap();
    large.insert(2_000_000, 1);
    fs::write(mount.join("large"), large).unwrap();
    fs::rename(mount.join("dir/deep"), mount.join("moved")).unwrap();
    fs::write(mount.join("dir/new"), "new").unwrap();
    fs::remove_file(mount.join("dir/1")).unwrap();
    here.snapshot("v@two");
    let sent = here.send("v@two", &mirror);
    assert!(sent["new_chunks"].as_u64().unwrap() < 10, "{sent}");
    let second = there.receive(&mirror, "v");
    assert!(second["lacked_bytes"].as_u64().unwrap() < 200_000, "{second}");
    assert_eq!(fs::read(far.join("dir/new")).unwrap(), b"new");
    assert!(!far.join("dir/1").exists() && far.join("moved/nine").exists());
    assert_eq!(there.tree("v@two"), here.tree("v@two"));
    // What it was has a name already.
    assert!(second["kept"].is_null(), "{second}");
    run(&mut there.farm.ask(["rollback", "v@one", "--keep-as", "again"]));
    assert!(far.join("dir/1").exists());
    run(&mut there.farm.ask(["rollback", "v@two"]));
    // What is here already is said to be, and an older one is one as well.
    run(there.ask(["receive"]).arg(&mirror).arg("v@two"));
    run(&mut there.farm.ask(["rollback", "v@one", "--keep-as", "later"]));
    let said = failing(9, there.ask(["receive"]).arg(&mirror).arg("v@two"));
    assert!(said.contains("hayloft rollback v@two"), "{said}");
    run(&mut there.farm.ask(["rollback", "v@two"]));
    run(there.ask(["receive", "--volume", "w"]).arg(&mirror).arg("v@one"));
    assert_eq!(there.tree("w@one"), here.tree("v@one"));
    // It came from the other volume: nothing was lacking.
    let third = run(there.ask(["receive", "--json", "--volume", "x"]).arg(&mirror).arg("v@one"));
    let third: Value = serde_json::from_str(&third).unwrap();
    assert_eq!(third["lacked_bytes"], 0, "{third}");
}

#[test]
fn what_others_have_changed_is_not_replaced() {
    let (here, there) = (Side::new(), Side::new());
    let mirror = here.farm.dir().join("mirror");
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mount = here.mount("v");
    fs::write(mount.join("a"), "1").unwrap();
    here.snapshot("v@one");
    here.send("v@one", &mirror);
    there.receive(&mirror, "v");
    let far = there.mount("v");
    fs::write(far.join("own"), "work").unwrap();
    fs::write(mount.join("a"), "2").unwrap();
    here.snapshot("v@two");
    here.send("v@two", &mirror);
    let said = failing(9, there.ask(["receive"]).arg(&mirror).arg("v"));
    assert!(said.contains("differs from v@one in 1 paths"), "{said}");
    assert_eq!(fs::read(far.join("own")).unwrap(), b"work");
    let told = run(there.ask(["receive", "--force", "--json"]).arg(&mirror).arg("v"));
    let told: Value = serde_json::from_str(&told).unwrap();
    assert!(!far.join("own").exists());
    let old = there.mount(told["kept"].as_str().unwrap());
    assert_eq!(fs::read(old.join("own")).unwrap(), b"work");
    // A volume that has files and no snapshot is somebody's.
    run(&mut there.farm.ask(["volume", "create", "mine"]));
    let mine = there.mount("mine");
    fs::write(mine.join("own"), "work").unwrap();
    run(hayloft(["sync"]).arg(mine.path()));
    let said = failing(9, there.ask(["receive", "--volume", "mine"]).arg(&mirror).arg("v"));
    assert!(said.contains("no snapshot"), "{said}");
    run(there.ask(["receive", "--volume", "mine", "--force"]).arg(&mirror).arg("v"));
    assert_eq!(there.tree("mine@two"), here.tree("v@two"));
    // What is made for the time being is gone, and nobody's volume is taken for it.
    run(&mut there.farm.ask(["volume", "create", "v.incoming"]));
    fs::write(mount.join("a"), "3").unwrap();
    here.snapshot("v@three");
    here.send("v@three", &mirror);
    there.receive(&mirror, "v");
    let volumes = run(&mut there.farm.ask(["volume", "list", "--json"]));
    let volumes: Value = serde_json::from_str(&volumes).unwrap();
    let names: Vec<&str> =
        volumes.as_array().unwrap().iter().map(|info| info["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["mine", "v", "v.incoming"]);
    // A mirror keeps what it has under a name.
    let said = failing(9, side_send(&there, "mine@two", "v@one").arg(&mirror));
    assert!(said.contains("another tree as v@one"), "{said}");
}

#[test]
fn a_quota_bounds_what_a_volume_gets_and_not_what_that_takes_meanwhile() {
    let (here, there) = (Side::new(), Side::new());
    let mirror = here.farm.dir().join("mirror");
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mount = here.mount("v");
    let send = |name: &str, seed: u64, len: usize| {
        fs::write(mount.join("a"), noise(seed, len)).unwrap();
        here.snapshot(&format!("v@{name}"));
        here.send(&format!("v@{name}"), &mirror);
    };
    send("one", 1, 3_000_000);
    there.receive(&mirror, "v");
    run(&mut there.farm.ask(["volume", "set-quota", "v", "--quota", "4M"]));
    let far = there.mount("v");
    // Both trees together have more.
    send("two", 2, 3_500_000);
    there.receive(&mirror, "v");
    assert_eq!(fs::read(far.join("a")).unwrap(), noise(2, 3_500_000));
    send("three", 3, 5_000_000);
    let said = failing(8, there.ask(["receive"]).arg(&mirror).arg("v"));
    assert!(said.contains("more than the quota of v"), "{said}");
    assert_eq!(fs::read(far.join("a")).unwrap(), noise(2, 3_500_000));
    run(&mut there.farm.ask(["volume", "check", "v"]));
    let left = run(&mut there.farm.ask(["volume", "list"]));
    assert!(!left.contains("incoming"), "{left}");
    fs::write(far.join("b"), noise(4, 1_000_000)).expect_err("it is more than the quota");
}

fn side_send(side: &Side, what: &str, name: &str) -> Command {
    let mut command = side.ask(["send", what, "--as", name]);
    command.arg("--to");
    command
}

#[test]
fn a_stream_brings_what_the_other_side_lacks() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mount = here.mount("v");
    fill(mount.path());
    here.snapshot("v@one");
    fs::write(mount.join("more"), noise(9, 100_000)).unwrap();
    here.snapshot("v@two");
    let pipe = |send: &mut Command, receive: &mut Command| {
        let mut sending = send.stdout(Stdio::piped()).spawn().unwrap();
        let told = run(receive.stdin(sending.stdout.take().unwrap()));
        assert!(sending.wait().unwrap().success());
        told
    };
    // The receiver has nothing yet.
    let mut sending = here.ask(["send", "v@two", "--since", "v@one"]).stdout(Stdio::piped()).spawn().unwrap();
    let said = failing(1, there.ask(["receive", "-"]).stdin(sending.stdout.take().unwrap()));
    sending.wait().unwrap();
    assert!(said.contains("--since"), "{said}");
    assert_eq!(run(&mut there.farm.ask(["volume", "list", "--json"])).trim(), "[]");
    pipe(&mut here.ask(["send", "v@one"]), &mut there.ask(["receive", "-", "v"]));
    pipe(&mut here.ask(["send", "v@two", "--since", "v@one"]), &mut there.ask(["receive", "-"]));
    assert_eq!(there.tree("v@two"), here.tree("v@two"));
    // Folders are sent and made, too.
    let local = here.farm.dir().join("local");
    run(Command::new("cp").arg("-a").arg(mount.path()).arg(&local));
    let copy = there.farm.dir().join("copy");
    let mut send = here.ask(["send", "--as", "x@1"]);
    send.arg(&local);
    let told = pipe(&mut send, there.ask(["receive", "--json", "-"]).arg("--into").arg(&copy));
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["tree"], here.tree("v@two"));
    assert_eq!(told["lacked_bytes"], 0, "its chunks are in a volume of this host: {told}");
    run(&mut there.farm.ask(["verify", "v@two", "--against", told["tree"].as_str().unwrap()]));
}

#[test]
fn only_what_trusted_keys_have_signed_is_received() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mount = here.mount("v");
    fs::write(mount.join("a"), "1").unwrap();
    let (mirror, key) = (here.farm.dir().join("mirror"), here.farm.dir().join("key"));
    run(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key));
    let public = fs::read_to_string(key.with_extension("pub")).unwrap();
    let signers = here.farm.dir().join("signers");
    fs::write(&signers, format!("release {public}")).unwrap();
    here.snapshot("v@one");
    here.send("v@one", &mirror);
    let receive = || {
        let mut command = there.ask(["receive"]);
        command.arg("--signers").arg(&signers).arg(&mirror).arg("v");
        command
    };
    let said = failing(6, &mut receive());
    assert!(said.contains("none of its signatures"), "{said}");
    here.snapshot("v@two");
    run(here.farm.ask(["snapshot", "sign", "v@two"]).arg("--key").arg(&key));
    here.send("v@two", &mirror);
    run(&mut receive());
    // The signature came with it, and counts at this server.
    run(there.farm.ask(["verify", "v@two"]).arg("--signers").arg(&signers));
}

#[test]
fn what_is_wrong_is_said_in_words() {
    let side = Side::new();
    run(&mut side.farm.ask(["volume", "create", "v"]));
    let dir = side.farm.dir().to_owned();
    let cases: [(i32, Vec<&str>, &str); 7] = [
        (4, vec!["receive", "nowhere", "v"], "has no version v"),
        (3, vec!["receive", "http://127.0.0.1:1/m", "v"], "http://127.0.0.1:1/m/versions/v/latest.json"),
        (2, vec!["receive", "nowhere"], "which version"),
        (4, vec!["send", "v@nothing", "--to", "mirror"], "nothing"),
        (2, vec!["send", "./x", "--to", "mirror"], "--as VOLUME@NAME"),
        (1, vec!["send", "./x", "--as", "v@1", "--to", "mirror"], "x"),
        (2, vec!["send", "v", "--to", "mirror"], "a snapshot is missing"),
    ];
    for (code, args, what) in cases {
        let mut command = side.ask([args[0]]);
        command.args(&args[1..]).current_dir(&dir);
        let said = failing(code, &mut command);
        assert!(said.contains(what), "{args:?}: {said}");
    }
    // What is no mirror is not made one.
    let said = failing(9, side.ask(["send", "./cache", "--as", "v@1", "--to", "."]).current_dir(&dir));
    assert!(said.contains("no mirror"), "{said}");
}

#[test]
fn snapshots_of_another_server_are_pulled() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mount = here.mount("v");
    fill(mount.path());
    let pull = |what: &str| {
        let mut command = there.ask(["pull", "--json"]);
        command.arg(format!("{}/{what}", here.farm.address));
        command
    };
    let said = failing(4, &mut pull("v"));
    assert!(said.contains("has no snapshot"), "{said}");
    here.snapshot("v@one");
    run(&mut pull("v"));
    assert_eq!(there.tree("v@one"), here.tree("v@one"));
    fs::write(mount.join("dir/7"), "new").unwrap();
    here.snapshot("v@two");
    let far = there.mount("v");
    let told: Value = serde_json::from_str(&run(&mut pull("v@two"))).unwrap();
    assert_eq!(told["lacked_bytes"], 3, "{told}");
    assert_eq!(fs::read(far.join("dir/7")).unwrap(), b"new");
    assert_eq!(there.tree("v@two"), here.tree("v@two"));
    // Folders with another path, other names of a file, and times are brought too.
    fs::rename(mount.join("dir"), mount.join("moved")).unwrap();
    fs::hard_link(mount.join("moved/7"), mount.join("seven")).unwrap();
    fs::write(mount.join("moved/7"), "seven").unwrap();
    let old = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    fs::File::open(mount.join("moved/8")).unwrap().set_modified(old).unwrap();
    here.snapshot("v@three");
    run(&mut pull("v@three"));
    assert_eq!(there.tree("v@three"), here.tree("v@three"));
    let stat = |path: &str| fs::metadata(far.join(path)).unwrap();
    assert_eq!(stat("moved/8").modified().unwrap(), old);
    assert_eq!((stat("moved/7").ino(), stat("seven").nlink()), (stat("seven").ino(), 2));
    let said = failing(2, &mut pull("v/w"));
    assert!(said.contains("names no snapshot"), "{said}");
}

/// Two commands on one volume do not meet: each does all of what it has to do, or says why not.
#[test]
fn two_that_receive_into_one_volume_leave_one_of_both_trees() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mirror = here.farm.dir().join("mirror");
    let mount = here.mount("v");
    fill(mount.path());
    let versions: Vec<String> = (0..6).map(|at| format!("v@{at}")).collect();
    for (at, version) in versions.iter().enumerate() {
        fs::write(mount.join("dir/7"), format!("{at}")).unwrap();
        here.snapshot(version);
        here.send(version, &mirror);
    }
    for pair in versions.chunks(2) {
        let both = pair.iter().map(|version| {
            let mut command = there.ask(["receive"]);
            command.arg(&mirror).arg(version).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        let both: Vec<_> =
            both.collect::<Vec<_>>().into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        assert!(both.iter().any(|output| output.status.success()), "{both:?}");
        let tree = there.tree("v");
        assert!(pair.iter().any(|version| here.tree(version) == tree), "{both:?}");
        for (version, output) in pair.iter().zip(&both) {
            if output.status.success() {
                assert_eq!(there.tree(version), here.tree(version));
            }
        }
    }
}

/// Whatever a receiver is killed at, hosts see the old tree or the new one, and the same command brings the new one.
#[test]
fn a_receiver_that_is_killed_goes_on() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mirror = here.farm.dir().join("mirror");
    let mount = here.mount("v");
    fill(mount.path());
    here.snapshot("v@0");
    here.send("v@0", &mirror);
    there.receive(&mirror, "v");
    let far = there.mount("v");
    let mut before = here.tree("v@0");
    for round in 1..=8 {
        for at in 0..100 {
            fs::write(mount.join(&format!("dir/{at}")), noise(round * 1000 + at, 3000)).unwrap();
        }
        let name = format!("v@{round}");
        here.snapshot(&name);
        here.send(&name, &mirror);
        let mut killed = there.ask(["receive"]);
        killed.arg(&mirror).arg("v").stdout(Stdio::null()).stderr(Stdio::null());
        let mut killed = killed.spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(round * 60));
        killed.kill().unwrap();
        killed.wait().unwrap();
        let (seen, after) = (there.tree("v"), here.tree(&name));
        assert!([&before, &after].contains(&&seen), "round {round}: {seen}");
        run(there.ask(["receive"]).arg(&mirror).arg("v"));
        assert_eq!(there.tree("v"), after);
        assert_eq!(fs::read(far.join("dir/7")).unwrap(), noise(round * 1000 + 7, 3000));
        before = after;
    }
}

/// Of a large file what differs comes, and nothing of it through the mount; the far server's cuts are the same as one's own.
#[test]
fn of_large_files_of_another_server_what_differs_is_pulled() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mount = here.mount("v");
    fill(mount.path());
    // As volumes have it: whole blocks, a hole, an end that was cut off, and blocks that follow a short one.
    let mut large = noise(5, 9_000_000);
    fs::write(mount.join("large"), &large).unwrap();
    let holes = fs::File::create(mount.join("holes")).unwrap();
    holes.write_all_at(&noise(6, 100_000), 300_000).unwrap();
    holes.set_len(777_777).unwrap();
    let shorter = fs::File::create(mount.join("shorter")).unwrap();
    shorter.write_all_at(&noise(7, 400_000), 0).unwrap();
    mount.sync();
    shorter.set_len(200_001).unwrap();
    mount.sync();
    shorter.set_len(270_000).unwrap();
    let pull = |what: &str| -> Value {
        let mut command = there.ask(["pull", "--json"]);
        command.arg(format!("{}/{what}", here.farm.address));
        serde_json::from_str(&run(&mut command)).unwrap()
    };
    let asked = |what: &str| number(&here.farm.stats(), &format!("server.requests.{what}"));
    here.snapshot("v@one");
    pull("v@one");
    assert_eq!(there.tree("v@one"), here.tree("v@one"));
    large.insert(4_500_000, 7);
    fs::write(mount.join("large.new"), &large).unwrap();
    fs::rename(mount.join("large.new"), mount.join("large")).unwrap();
    here.snapshot("v@two");
    let before = asked("FETCH_CONTENT");
    let told = pull("v@two");
    assert_eq!(there.tree("v@two"), here.tree("v@two"));
    assert!(told["lacked_bytes"].as_u64().unwrap() < 200_000, "{told}");
    assert!((1..250_000).contains(&told["asked_bytes"].as_u64().unwrap()), "{told}");
    assert_eq!(asked("FETCH_CONTENT"), before, "the file was read through the mount");
    assert_eq!(fs::read(there.mount("v").join("large")).unwrap(), large);
    // As it is read here it has the same cuts: a mirror gets the chunks once, whoever sends.
    let mirror = here.farm.dir().join("mirror");
    here.send("v@two", &mirror);
    let copy = here.farm.dir().join("copy");
    run(&mut sh(&format!("cp -a {}/. {}", mount.path().display(), copy.display())));
    let mut command = here.ask(["send", "--json", "--as", "copy@two"]);
    command.arg("--to").arg(&mirror).arg(&copy);
    let sent: Value = serde_json::from_str(&run(&mut command)).unwrap();
    assert_eq!(sent["new_chunks"], 0, "{sent}");
}

/// Most of the tree is another one, so it is named from all rows, once. What is made of it later is named by what differs.
#[test]
fn a_received_tree_is_named_once_and_the_next_one_by_what_differs() {
    let side = Side::new();
    let (folder, mirror) = (side.farm.dir().join("folder"), side.farm.dir().join("mirror"));
    let write = |what: &str, dirs: usize| {
        for at in 0..dirs * 60 {
            let dir = folder.join(format!("{}", at / 60));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(format!("{at}")), format!("{what} {at}")).unwrap();
        }
    };
    for (version, dirs) in [("one", 50), ("two", 30)] {
        write(version, dirs);
        let name = format!("v@{version}");
        run(side.ask(["send", folder.to_str().unwrap(), "--as", &name]).arg("--to").arg(&mirror));
        side.receive(&mirror, "v");
        let tree = side.tree(folder.to_str().unwrap());
        run(&mut side.farm.ask(["verify", &name, "--deep", "--against", &tree]));
    }
    let mount = side.mount("v");
    let found = (0..100).any(|at| {
        fs::write(mount.join("7/425"), format!("changed {at}")).unwrap();
        side.snapshot(&format!("v@{at}"));
        let told = run(&mut side.farm.ask(["verify", &format!("v@{at}"), "--json"]));
        let told: Value = serde_json::from_str(&told).unwrap();
        told["rows_read"].as_u64().unwrap() < 1000
    });
    assert!(found, "all rows are read again and again");
    fs::write(folder.join("7/425"), fs::read(mount.join("7/425")).unwrap()).unwrap();
    assert_eq!(side.tree("v"), side.tree(folder.to_str().unwrap()));
}
