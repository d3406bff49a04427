//! Names of trees by content, and their signatures: `hayloft verify`, `hayloft snapshot sign`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::setup::farm::{Farm, hayloft, leave, noise, run, run_failing, sh};

/// A tree with files of all sizes that are stored differently, and of all kinds.
fn fill(top: &Path) {
    fs::create_dir_all(top.join("dir/deep/er")).unwrap();
    for (name, size) in
        [("empty", 0), ("small", 100), ("inline", 4096), ("block", 65_536), ("blocks", 300_001)]
    {
        fs::write(top.join("dir").join(name), noise(size as u64, size)).unwrap();
    }
    fs::write(top.join("dir/pages"), noise(7, 5_000_000)).unwrap();
    // A hole in the middle, zeros at the end of a block, and a file that was cut and made longer again.
    run(&mut sh(&format!(
        "cd {0}; truncate -s 200000 hole; printf x | dd of=hole bs=1 seek=150000 conv=notrunc status=none
        head -c 70000 /dev/urandom > cut; truncate -s 66000 cut; truncate -s 300000 cut
        printf abc > short; truncate -s 3000 short; mkfifo fifo; mknod null c 1 3
        setfattr -n user.note -v something dir/small; ln dir/small dir/deep/linked",
        top.display()
    )));
    symlink("dir/small", top.join("link")).unwrap();
    fs::set_permissions(top.join("dir/deep"), fs::Permissions::from_mode(0o2750)).unwrap();
    std::os::unix::fs::chown(top.join("dir/block"), Some(1234), Some(99)).unwrap();
}

fn name_of(verify: &mut Command) -> String {
    run(verify).lines().next().unwrap().to_owned()
}

fn folder(dir: &Path) -> Command {
    let mut command = hayloft(["verify"]);
    command.arg(dir);
    command
}

fn snapshot(farm: &Farm, name: &str) {
    run(&mut farm.ask(["snapshot", "create", name]));
}

#[test]
fn a_tree_has_the_same_name_wherever_it_is() {
    let (farm, mount) = Farm::mounted("v");
    fill(mount.path());
    let local = farm.dir().join("local");
    run(Command::new("cp").arg("-a").arg(mount.path()).arg(&local));
    let name = name_of(&mut folder(&local));
    assert_eq!(name_of(&mut folder(mount.path())), name, "as it is read from a mount");
    assert_eq!(name_of(&mut farm.ask(["verify", "v"])), name, "as the server has it");
    snapshot(&farm, "v@one");
    assert_eq!(name_of(&mut farm.ask(["verify", "v@one", "--deep"])), name);
    assert_eq!(name_of(&mut farm.ask(["verify", "v@one", "--against", &name])), name, "from all rows");
    // Made anew, in another order, with another server.
    let (other, copy) = Farm::mounted("w");
    run(&mut sh(&format!("cd {}; tar c . | (cd {}; tar xp)", local.display(), copy.path().display())));
    let xattr = "setfattr -n user.note -v something dir/small; chmod 2750 dir/deep";
    run(&mut sh(&format!("cd {}; {xattr}", copy.path().display())));
    snapshot(&other, "w@one");
    assert_eq!(name_of(&mut other.ask(["verify", "w@one"])), name);
    // A fork is what it was made of, until it is changed.
    run(&mut farm.ask(["fork", "v@one", "fork"]));
    run(&mut farm.ask(["verify", "fork", "--against", "v@one"]));
}

#[test]
fn what_was_changed_is_worked_out_and_nothing_else() {
    let (farm, mount) = Farm::mounted("v");
    for dir in 0..50 {
        fs::create_dir(mount.join(&format!("dir-{dir}"))).unwrap();
        for file in 0..100 {
            fs::write(mount.join(&format!("dir-{dir}/{file}")), format!("{dir} {file}")).unwrap();
        }
    }
    snapshot(&farm, "v@one");
    let first = name_of(&mut farm.ask(["verify", "v@one"]));
    fs::write(mount.join("dir-7/50"), "changed").unwrap();
    fs::remove_file(mount.join("dir-8/1")).unwrap();
    fs::rename(mount.join("dir-9"), mount.join("dir-10/moved")).unwrap();
    snapshot(&farm, "v@two");
    // Of 5,000 files and their names not 1,000 rows are read.
    let told: Value = serde_json::from_str(&run(&mut farm.ask(["verify", "v@two", "--json"]))).unwrap();
    assert!(told["rows_read"].as_u64().unwrap() < 1000, "{told}");
    let second = told["tree"].as_str().unwrap().to_owned();
    assert_ne!(first, second);
    assert_eq!(name_of(&mut farm.ask(["verify", "v@two", "--deep"])), second, "from all rows, and read");
    assert_eq!(name_of(&mut folder(mount.path())), second);
    // And back.
    run(&mut farm.ask(["rollback", "v@one"]));
    assert_eq!(name_of(&mut farm.ask(["verify", "v"])), first);
}

#[test]
fn what_differs_is_listed() {
    let (farm, mount) = Farm::mounted("v");
    fill(mount.path());
    snapshot(&farm, "v@one");
    let local = farm.dir().join("local");
    run(Command::new("cp").arg("-a").arg(mount.path()).arg(&local));
    let against = |extra: &[&str]| {
        let mut command = farm.ask(["verify", "--against", "v@one"]);
        command.arg(&local).args(extra);
        command
    };
    run(&mut against(&[]));
    fs::write(local.join("dir/small"), "other").unwrap();
    fs::remove_file(local.join("link")).unwrap();
    fs::write(local.join("dir/new"), "").unwrap();
    fs::set_permissions(local.join("dir/deep"), fs::Permissions::from_mode(0o755)).unwrap();
    let output = against(&[]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(10), "{said}");
    let listed: Vec<&str> = said.lines().filter(|line| !line.starts_with("tree1-")).collect();
    assert_eq!(
        listed,
        [
            "dir/deep: mode",
            "dir/deep/linked: content",
            "dir/new: added",
            "dir/small: content",
            "link: missing"
        ]
    );
    let output = against(&["--json"]).output().unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["same"], told["differences"].as_array().unwrap().len()), (&Value::Bool(false), 5));
    // What else is wrong is said in words.
    for (what, code) in [("v@none", 4), ("none", 4), ("v@", 2), ("/nowhere/at/all", 1)] {
        let (found, said) = run_failing(&mut farm.ask(["verify", what]));
        assert_eq!(found, code, "{what}: {said}");
    }
}

#[test]
fn only_snapshots_that_trusted_keys_have_signed_are_mounted() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("file"), "text").unwrap();
    snapshot(&farm, "v@one");
    let dir = farm.dir();
    let key = |name: &str| {
        let path = dir.join(name);
        run(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f"]).arg(&path));
        (path.clone(), fs::read_to_string(path.with_extension("pub")).unwrap())
    };
    let ((ours, ours_public), (theirs, _)) = (key("ours"), key("theirs"));
    let signers = dir.join("signers");
    fs::write(&signers, format!("release@farm {ours_public}")).unwrap();
    fs::write(dir.join("config"), format!("[mount]\ntrusted_keys = \"{}\"\n", signers.display())).unwrap();
    let point = dir.join("point");
    fs::create_dir(&point).unwrap();
    let mount_it = || {
        let mut command = hayloft(["mount", &format!("{}/v@one", farm.address)]);
        command.arg(&point).env("HAYLOFT_CONFIG", dir.join("config"));
        command
    };
    let sign = |key: &Path| run(farm.ask(["snapshot", "sign", "v@one"]).arg("--key").arg(key));
    let (code, said) = run_failing(&mut mount_it());
    assert!(code == 6 && said.contains("nobody has signed it"), "{code}: {said}");
    sign(&theirs);
    let (code, said) = run_failing(&mut mount_it());
    assert!(code == 6 && said.contains("none of its signatures"), "{code}: {said}");
    let (code, _) = run_failing(farm.ask(["verify", "v@one"]).arg("--signers").arg(&signers));
    assert_eq!(code, 6);
    sign(&ours);
    run(&mut mount_it());
    assert_eq!(fs::read(point.join("file")).unwrap(), b"text");
    leave(hayloft(["umount"]).arg(&point));
    let said = run(farm.ask(["verify", "v@one"]).arg("--signers").arg(&signers));
    assert!(said.contains("signed by release@farm"), "{said}");
    // The signature is one that ssh-keygen verifies, and the name is what it is of.
    let info: Value =
        serde_json::from_str(&run(&mut farm.ask(["snapshot", "show", "v@one", "--json"]))).unwrap();
    assert_eq!(info["signatures"].as_array().unwrap().len(), 2);
    fs::write(dir.join("signature"), info["signatures"][1].as_str().unwrap()).unwrap();
    run(&mut sh(&format!(
        "cd {}; echo {} | ssh-keygen -Y verify -n hayloft-tree -f signers -I release@farm -s signature",
        dir.display(),
        info["tree"].as_str().unwrap()
    )));
    // Build roots ask for it as well.
    fs::write(dir.join("run"), format!("[run]\ntrusted_keys = \"{}\"\n", signers.display())).unwrap();
    run(hayloft(["mount", &format!("{}/v@one", farm.address)]).arg(&point));
    let root = |layer: &Path| {
        let mut command = hayloft(["run", "--layers-dir"]);
        command.arg(dir.join("layers")).arg("--state-dir").arg(dir.join("state")).arg("--root").arg(layer);
        command.args(["--root", "/usr", "--", "true"]).env("HAYLOFT_CONFIG", dir.join("run"));
        command
    };
    let (code, said) = run_failing(&mut root(dir));
    assert!(code == 125 && said.contains("is not in a mounted snapshot"), "{code}: {said}");
    let (_, said) = run_failing(&mut root(&point));
    assert!(said.contains("/usr is not in a mounted snapshot"), "the signed one is let in: {said}");
    leave(hayloft(["umount"]).arg(&point));
    // The live volume is no snapshot.
    let mut live = hayloft(["mount", &format!("{}/v", farm.address)]);
    run(live.arg(&point).env("HAYLOFT_CONFIG", dir.join("config")));
    leave(hayloft(["umount"]).arg(&point));
}

/// A byte of a pack that changes is found, by the server where it reads content, and in any case by who reads all.
#[test]
fn damage_is_found() {
    let (farm, mount) = Farm::mounted("v");
    for at in 0..400 {
        fs::write(mount.join(&format!("file-{at}")), noise(at, 3000)).unwrap();
    }
    mount.sync();
    snapshot(&farm, "v@one");
    run(&mut farm.ask(["verify", "v@one"]));
    let packs =
        run(&mut sh(&format!("find {} -path '*/packs/*' -type f", farm.dir().join("store").display())));
    let pack = packs.lines().next().expect("contents lie in packs");
    let mut bytes = fs::read(pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(pack, bytes).unwrap();
    let (_, said) = run_failing(&mut farm.ask(["verify", "v@one"]));
    assert!(said.contains("packs/") && said.contains("damaged"), "{said}");
}

/// To read a volume as it is, the server makes a snapshot of it. That goes, whatever happens to who asks and to the server.
#[test]
fn what_is_made_for_a_request_goes_with_it() {
    let (mut farm, mount) = Farm::mounted("v");
    for at in 0..2000 {
        fs::write(mount.join(&format!("{at}")), noise(at, 3000)).unwrap();
    }
    let gone = |farm: &Farm| {
        let begun = std::time::Instant::now();
        let list = || run(&mut farm.ask(["snapshot", "list", "v", "--json"]));
        while list().trim() != "[]" {
            assert!(begun.elapsed().as_secs() < 20, "{}", list());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    };
    for round in 1..10 {
        let mut asked = farm.ask(["verify", "v"]).stdout(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(round * 8));
        let _ = asked.kill();
        asked.wait().unwrap();
    }
    gone(&farm);
    for round in 1..4 {
        let mut asked = farm.ask(["verify", "v"]).stderr(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(round * 25));
        farm.kill_server();
        let _ = asked.wait();
        farm.start_server();
    }
    gone(&farm);
    run(&mut farm.ask(["verify", "v"]));
    gone(&farm);
}

/// A path that is longer than the kernel takes at once: names are told, compared and merged all the same.
#[test]
fn what_lies_deeper_than_a_path_is_long_is_named_told_and_merged() {
    let (farm, mount) = Farm::mounted("v");
    let python = |top: &Path, begin: &str, make: &str, then: &str| {
        let script = format!(
            "import os\nos.chdir({:?})\n{begin}\nfor at in range(500):\n    name = 'level-%06d' % at\n    {make}\n    os.chdir(name)\n{then}",
            top.display().to_string()
        );
        run(&mut crate::setup::farm::python(&script));
    };
    python(
        mount.path(),
        "os.mkdir('top'); os.chdir('top')",
        "os.mkdir(name)",
        "open('file', 'w').write('one\\n')",
    );
    snapshot(&farm, "v@one");
    let name = name_of(&mut farm.ask(["verify", "v@one"]));
    assert_eq!(name_of(&mut farm.ask(["verify", "v@one", "--deep"])), name);
    run(&mut farm.ask(["fork", "v@one", "f"]));
    let fork = farm.mount("f", "");
    python(fork.path(), "os.chdir('top')", "pass", "open('file', 'a').write('two\\n')");
    fs::rename(fork.join("top"), fork.join("moved")).unwrap();
    let told = run(&mut farm.ask(["diff", "v@one", "f", "--patch"]));
    assert!(told.contains("\n+two\n"), "{told}");
    fs::write(mount.join("beside"), "x").unwrap();
    run(&mut farm.ask(["merge", "f"]));
    python(mount.path(), "os.chdir('moved')", "pass", "assert open('file').read() == 'one\\ntwo\\n'");
    assert!(mount.join("beside").exists() && !mount.join("top").exists());
}
