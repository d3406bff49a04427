//! Mounting, leaving, and what is said when it does not work.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Duration;

use crate::setup::calls;
use crate::setup::farm::{
    Farm, HAYLOFT, has_ended, hayloft, kill, leave, number, run, run_failing, sh, wait_until,
};

/// A command fails with this code and one line that holds this text.
fn fails(command: &mut Command, code: i32, text: &str) {
    let (got, said) = run_failing(command);
    assert_eq!(got, code, "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "more than one line: {said}");
    assert!(said.starts_with("hayloft: ") && said.contains(text), "{said}");
}

#[test]
fn every_reason_not_to_mount_has_its_message_and_code() {
    let (farm, mount) = Farm::mounted("v");
    let dir = farm.dir().join("free");
    fs::create_dir(&dir).unwrap();
    fs::write(farm.dir().join("file"), b"").unwrap();
    let logs = farm.dir().join("logs");
    let attempt = |source: &str, dir: &str, options: &str| {
        let mut command = hayloft(["mount", source]);
        command.arg(farm.dir().join(dir)).arg("--log-dir").arg(&logs);
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        command
    };
    let other = format!("{}/w", farm.address);
    let volume = format!("{}/v", farm.address);
    fails(&mut attempt("127.0.0.1:1/v", "free", ""), 3, "hayloft serve");
    fails(&mut attempt(&other, "free", ""), 4, "w");
    fails(&mut attempt(&other, "mnt-v", ""), 5, "mounted there already");
    fails(&mut attempt(&volume, "mnt-v", ""), 5, "mounted there already");
    fails(&mut attempt(&other, "none", ""), 1, "No such file");
    fails(&mut attempt(&other, "file", ""), 2, "not a folder");
    fails(&mut attempt(&other, "free", "colour=red"), 2, "colour");
    fails(&mut attempt(&other, "free", "dirty=much"), 2, "dirty");
    fails(&mut attempt("nonsense", "free", ""), 2, "HOST:PORT/VOLUME");
    // No FUSE device.
    let script = "mkdir dev; mknod dev/null c 1 3; mount --bind dev /dev; exec \"$@\"";
    farm.create("w");
    let mut without = Command::new("unshare");
    without.args(["--mount", "sh", "-euc", script, "sh", HAYLOFT, "mount", &other]).arg(&dir);
    without.arg("--log-dir").arg(&logs).args(["--config", "/dev/null"]).current_dir(farm.dir());
    fails(&mut without, 7, "/dev/fuse");
    // Not permitted: somebody else's folder.
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid", "1000", "--regid", "1000", "--clear-groups", HAYLOFT, "mount", &other]).arg(&dir);
    nobody.args(["--config", "/dev/null", "--log-dir", "/tmp/hayloft-e2e-logs"]).current_dir("/");
    calls::chmod(farm.dir(), 0o755);
    fails(&mut nobody, 6, "");
    mount.unmount();
}

#[test]
fn a_detached_mount_names_its_log_and_umount_waits_for_the_end() {
    let farm = Farm::new();
    farm.create("v");
    let dir = farm.dir().join("mnt");
    fs::create_dir(&dir).unwrap();
    let source = format!("{}/v", farm.address);
    let mut mount = hayloft(["mount", &source]);
    let said = run(mount.arg(&dir).arg("--log-dir").arg(farm.dir().join("logs")));
    let log = said.trim_end().strip_suffix(')').and_then(|said| said.split_once("(log: ")).unwrap().1;
    assert!(said.starts_with(&format!("mounted {source} on ")) && fs::metadata(log).is_ok(), "{said}");
    fs::write(dir.join("file"), b"kept").unwrap();
    let stats: serde_json::Value =
        serde_json::from_str(&run(hayloft(["stats", "--json"]).arg(&dir))).unwrap();
    let pid = number(&stats, "mount.pid");
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(info.contains(&format!("fuse.hayloft {source} ")), "{info}");
    // In use: said with the name of who uses it.
    let mut user = sh("exec sleep 60").current_dir(&dir).spawn().unwrap();
    wait_until("the shell has become sleep", Duration::from_secs(5), || {
        fs::read_to_string(format!("/proc/{}/comm", user.id())).is_ok_and(|name| name == "sleep\n")
    });
    fails(hayloft(["umount"]).arg(&dir), 5, &format!("sleep ({})", user.id()));
    user.kill().unwrap();
    user.wait().unwrap();
    leave(hayloft(["umount"]).arg(&dir));
    assert!(has_ended(pid), "the mount's process is still there");
    fails(hayloft(["umount"]).arg(&dir), 1, "not a Hayloft mount");
    fails(hayloft(["stats"]).arg(&dir), 1, "not a Hayloft mount");
    let mount = farm.mount("v", "ro");
    assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"kept");
    assert_eq!(calls::errno(fs::write(mount.path().join("file"), b"x")), libc::EROFS);
}

#[test]
fn helpers_of_mount_and_umount() {
    let farm = Farm::new();
    farm.create("v");
    for name in ["mount.hayloft", "umount.fuse.hayloft"] {
        symlink(HAYLOFT, farm.dir().join(name)).unwrap();
    }
    let dir = farm.dir().join("mnt");
    fs::create_dir(&dir).unwrap();
    let source = format!("{}/v", farm.address);
    let log =
        farm.dir().join("logs").join(format!("mount-{}.log", dir.to_str().unwrap()[1..].replace('/', "-")));
    let helper = |name: &str| {
        let mut command = Command::new(farm.dir().join(name));
        command.env("HAYLOFT_LOG_DIR", farm.dir().join("logs")).env("HAYLOFT_CONFIG", "/dev/null");
        command
    };
    // As mount(8) and umount(8), they say nothing when all is well.
    let silent = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!((output.stdout, output.stderr), (Vec::new(), Vec::new()));
    };
    silent(helper("mount.hayloft").arg(&source).arg(&dir).args(["-n", "-o", "rw,_netdev,commit=3"]));
    fs::write(dir.join("file"), b"x").unwrap();
    silent(helper("mount.hayloft").arg(&source).arg(&dir).args(["-o", "remount,ro"]));
    silent(helper("umount.fuse.hayloft").arg(&dir));
    assert_eq!(fs::read_to_string(log).unwrap(), "", "a clean mount has nothing to say");
    let (code, _) = run_failing(helper("mount.hayloft").arg("127.0.0.1:1/v").arg(&dir).args(["-o", "rw"]));
    assert_eq!(code, 32);
}

#[test]
fn work_and_a_clean_end_log_nothing_on_either_side() {
    let mut farm = Farm::new();
    farm.create("v");
    for detached in [false, true] {
        let mount = farm.mount("v", "");
        for at in 0..50 {
            fs::write(mount.join(&format!("file-{at}")), b"content").unwrap();
        }
        fs::remove_file(mount.join("file-1")).unwrap();
        let log = mount.path().with_extension("log");
        match detached {
            false => mount.unmount(),
            // As umount(8) without a helper does.
            true => {
                leave(Command::new("umount").arg("-i").arg(mount.path()));
                mount.ended();
            }
        }
        assert_eq!(fs::read_to_string(log).unwrap(), "");
    }
    farm.stop_server();
    assert_eq!(farm.server_log(), "");
}

#[test]
fn sweeps_under_load_log_nothing() {
    let (farm, mount) = Farm::mounted("v");
    // The database's compactor looks every two seconds. Some of these sweeps come while it works, some with nothing new.
    for round in 0..40 {
        fs::write(mount.join("file"), format!("{round}")).unwrap();
        mount.sync();
        run(&mut farm.volume(["sweep", "v"]));
        std::thread::sleep(Duration::from_millis(if round % 8 == 7 { 700 } else { 0 }));
    }
    std::thread::sleep(Duration::from_secs(5));
    mount.unmount();
    assert_eq!(farm.server_log(), "");
}

#[test]
fn remount_changes_what_the_kernel_keeps() {
    let farm = Farm::new();
    farm.create("v");
    let helper = farm.dir().join("mount.hayloft");
    symlink(HAYLOFT, &helper).unwrap();
    let mount = farm.mount("v", "commit=3600");
    let dir = mount.path().to_owned();
    let remount = |options: &str| {
        let mut command = Command::new(&helper);
        command.arg(format!("{}/v", farm.address)).arg(&dir).args(["-o", options]);
        command.env("HAYLOFT_CONFIG", "/dev/null");
        command
    };
    let file = fs::File::create(dir.join("file")).unwrap();
    let (code, said) = run_failing(&mut remount("ro,remount,commit=3600,_netdev"));
    assert!(code == 32 && said.contains("in use by"), "{said}");
    drop(file);
    // As mount(8) has it without a line in fstab.
    run(&mut remount("ro,noatime,remount,user_id=0,group_id=0,default_permissions,allow_other"));
    assert_eq!(number(&mount.stats(), "log.dirty_rows"), 0, "the store has everything");
    assert_eq!(calls::errno(fs::write(dir.join("file"), b"x")), libc::EROFS);
    run(&mut remount("rw,noexec,remount"));
    fs::write(dir.join("file"), b"again").unwrap();
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(info.contains(&format!("{} rw,noexec,noatime", dir.display())), "{info}");
    mount.unmount();
    // A client that has mounted read-only takes no changes, since the server takes none from it.
    let mount = farm.mount("v", "ro");
    run(&mut remount("rw,remount"));
    assert_eq!(calls::errno(fs::write(dir.join("new"), b"x")), libc::EROFS);
    assert_eq!(calls::errno(fs::remove_file(dir.join("file"))), libc::EROFS);
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"again");
    mount.unmount();
}

#[test]
fn a_client_that_ends_late_leaves_others_alone() {
    let mut farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "");
    fs::write(mount.path().join("file"), b"x").unwrap();
    farm.kill_server();
    // It has to ship the rest yet; the next mount most likely gets its device number.
    leave(Command::new("umount").arg("--internal-only").arg(mount.path()));
    let (_other_farm, other) = Farm::mounted("w");
    farm.start_server();
    mount.ended();
    assert!(number(&other.stats(), "mount.pid") > 0);
    other.unmount();
}

#[test]
fn a_signal_unmounts_a_mount_in_the_foreground() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.path().join("file"), b"kept").unwrap();
    kill(mount.pid(), libc::SIGTERM);
    let path = mount.path().to_owned();
    wait_until("unmounted", Duration::from_secs(20), || !path.join("file").exists());
    drop(mount);
    let mount = farm.mount("v", "");
    assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"kept");
}

#[test]
fn force_and_lazy() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.path().join("file"), b"kept").unwrap();
    let open = fs::File::open(mount.path().join("file")).unwrap();
    run(hayloft(["umount", "--lazy"]).arg(mount.path()));
    assert!(!mount.path().join("file").exists());
    drop(open);
    mount.ended();
    let mut farm = farm;
    let mount = farm.mount("v", "");
    fs::write(mount.path().join("lost"), b"x").unwrap();
    farm.kill_server();
    // With nobody to take the changes, only force gets out.
    run(hayloft(["umount", "--force"]).arg(mount.path()));
    drop(mount);
    farm.start_server();
    let mount = farm.mount("v", "");
    assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"kept");
}

#[test]
fn statistics_have_their_keys() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.path().join("file"), b"x").unwrap();
    fs::read(mount.path().join("file")).unwrap();
    mount.sync();
    let stats = mount.stats();
    for key in [
        "mount.pid",
        "fuse.requests.LOOKUP",
        "fuse.requests.CREATE",
        "fuse.requests.WRITE",
        "fuse.requests.total",
        "server.requests.HELLO",
        "server.requests.COMMIT",
        "server.requests.ENTER",
        "server.requests.total",
        "server.bytes_sent",
        "server.bytes_received",
        "server.reconnects",
        "cache.block_hits",
        "cache.block_misses",
        "cache.bytes",
        "log.dirty_bytes",
        "log.oldest_unsent_age_seconds",
        "log.commits",
        "log.records_shipped",
        "volume.used_bytes",
        "volume.used_inodes",
        "volume.quota_bytes",
        "volume.quota_inodes",
    ] {
        let value = key.split('.').try_fold(&stats, |value, part| value.get(part));
        assert!(value.is_some_and(serde_json::Value::is_number), "{key} is missing in {stats}");
    }
    assert_eq!(number(&stats, "fuse.requests.CREATE"), 1);
    assert!(number(&stats, "server.requests.total") >= 2);
    let stats = farm.stats();
    assert!(stats.get("server").is_some() && stats.get("store").is_some() && stats.get("volumes").is_some());
    let table = run(hayloft(["stats"]).arg(mount.path()));
    assert!(table.contains("fuse.requests.CREATE"), "{table}");
}

#[test]
fn volumes_from_create_to_delete() {
    let farm = Farm::new();
    run(&mut farm.volume(["create", "one", "--quota", "1G", "--mode", "1777"]));
    fails(&mut farm.volume(["create", "one"]), 9, "one");
    fails(&mut farm.volume(["create", "a/b"]), 2, "a/b");
    fails(&mut farm.volume(["show", "none"]), 4, "none");
    fails(&mut hayloft(["volume", "list", "--server", "127.0.0.1:1"]), 3, "127.0.0.1:1");
    let mount = farm.mount("one", "");
    fs::write(mount.path().join("file"), vec![1; 100_000]).unwrap();
    mount.sync();
    fails(&mut farm.volume(["delete", "one"]), 5, "in use");
    let shown: serde_json::Value =
        serde_json::from_str(&run(&mut farm.volume(["show", "one", "--json"]))).unwrap();
    assert!(number(&shown, "used_bytes") >= 100_000 && number(&shown, "quota_bytes") == 1 << 30, "{shown}");
    assert_eq!(shown["clients"][0]["pid"], mount.pid());
    mount.unmount();
    assert!(run(&mut farm.volume(["check", "one", "--content"])).contains("is sound"));
    run(&mut farm.volume(["delete", "one"]));
    assert_eq!(run(&mut farm.volume(["list", "--json"])).trim(), "[]");
}

#[test]
fn a_volume_is_in_use_until_its_last_mount_is_left() {
    let (farm, mounts) = Farm::shared(3);
    fs::write(mounts[0].path().join("file"), b"shared").unwrap();
    for mount in mounts {
        assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"shared");
        fails(&mut farm.volume(["delete", "v"]), 5, "in use");
        mount.unmount();
    }
    run(&mut farm.volume(["delete", "v"]));
}

#[test]
fn a_volume_is_free_as_soon_as_umount_returns() {
    let farm = Farm::new();
    farm.create("v");
    for round in 0..20 {
        let mount = farm.mount("v", "");
        fs::write(mount.path().join(format!("file-{round}")), b"x").unwrap();
        mount.unmount();
        if round % 2 == 1 {
            run(&mut farm.volume(["delete", "v"]));
            farm.create("v");
        }
    }
}
