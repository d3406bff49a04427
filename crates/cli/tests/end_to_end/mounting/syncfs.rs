//! The mount option `syncfs`: syncfs(2) reaches the client. Linux has that from 6.18.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::setup::calls;
use crate::setup::farm::{Farm, HAYLOFT, Mount, hayloft, leave, number, run, run_failing, wait_until};

/// What the loop devices of this machine hold, of which one may be a mount's: its file is named after the volume.
fn loop_files() -> String {
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    devices.filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok()).collect()
}

/// Linux 6.18 or newer, and loop devices: elsewhere the option has to be refused.
fn can_be_had(farm: &Farm) -> bool {
    if calls::is_linux_since((6, 18)) && Path::new("/dev/loop-control").exists() {
        return true;
    }
    let mut mount = hayloft(["mount", &format!("{}/v", farm.address), "-o", "syncfs", "--log-dir"]);
    let (code, said) = run_failing(mount.arg(farm.dir()).arg(farm.dir().join("refused")));
    assert!(code == 7 && said.contains("without"), "{code}: {said}");
    assert!(!loop_files().contains(&farm.address));
    println!("skipped: {said}");
    false
}

fn syncfs(dir: &Path) {
    calls::syncfs(&File::open(dir).unwrap()).unwrap();
}

/// Writes files, calls syncfs(2), and kills everybody: what is there afterwards.
fn left_after_syncfs_and_death(farm: &mut Farm, options: &str) -> Vec<u8> {
    let mount = farm.mount("v", options);
    let content = mount.path().join("dir/file");
    fs::create_dir_all(mount.path().join("dir")).unwrap();
    fs::write(&content, vec![b'x'; 300_000]).unwrap();
    syncfs(mount.path());
    crate::setup::farm::kill(mount.pid(), libc::SIGKILL);
    farm.kill_server();
    mount.kill();
    farm.start_server();
    let mount = farm.mount("v", "ro");
    let left = fs::read(mount.path().join("dir/file")).unwrap_or_default();
    mount.unmount();
    left
}

#[test]
fn syncfs_waits_for_the_store() {
    let mut farm = Farm::new();
    farm.create("v");
    if !can_be_had(&farm) {
        return;
    }
    // Without the option nobody hears of it.
    assert_eq!(left_after_syncfs_and_death(&mut farm, "commit=3600"), b"");
    for transport in ["auto", "dev"] {
        let options = format!("commit=3600,syncfs,transport={transport}");
        assert_eq!(left_after_syncfs_and_death(&mut farm, &options), vec![b'x'; 300_000]);
        let mount = farm.mount("v", &options);
        fs::remove_dir_all(mount.path().join("dir")).unwrap();
        let requests = |mount: &Mount| number(&mount.stats(), "fuse.requests.SYNCFS");
        let before = requests(&mount);
        syncfs(mount.path());
        assert_eq!(requests(&mount) - before, 1);
        // The kernel may forget what was removed after that, which ends it: two more rows, for the next one.
        wait_until("nothing is left to ship", Duration::from_secs(20), || {
            syncfs(mount.path());
            number(&mount.stats(), "log.dirty_rows") == 0
        });
        mount.unmount();
    }
}

#[test]
fn a_mount_with_syncfs_is_left_like_any_other() {
    let farm = Farm::new();
    farm.create("v");
    if !can_be_had(&farm) {
        return;
    }
    let source = format!("{}/v", farm.address);
    let gone = |how: &str| {
        wait_until(&format!("no loop device after {how}"), Duration::from_secs(20), || {
            !loop_files().contains(&source)
        });
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(farm.dir().to_str().unwrap()), "{mounts}");
    };
    let mount = farm.mount("v", "syncfs");
    let dir = mount.path().to_owned();
    assert!(loop_files().contains(&source));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(mounts.contains(&format!("{} rw,nosuid,nodev,noatime", dir.display())), "{mounts}");
    assert!(mounts.contains(" - fuseblk.hayloft /dev/loop"), "{mounts}");
    assert!(number(&mount.stats(), "fuse.requests.total") > 0);
    let (code, said) = run_failing(hayloft(["mount", &source]).arg(&dir));
    assert!(code == 5 && said.contains(&format!("{source} is mounted there already")), "{said}");
    fs::write(dir.join("file"), b"1").unwrap();
    mount.unmount();
    gone("hayloft umount");

    let mount = farm.mount("v", "syncfs");
    fs::write(dir.join("file"), b"2").unwrap();
    leave(Command::new("umount").arg("--internal-only").arg(&dir));
    mount.ended();
    gone("umount(8)");

    let mount = farm.mount("v", "syncfs");
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"2");
    let helper = farm.dir().join("umount.fuseblk.hayloft");
    symlink(HAYLOFT, &helper).unwrap();
    run(Command::new(helper).arg(&dir));
    mount.ended();
    gone("umount(8) with its helper");

    // Killed; its loop device goes with what is left of the mount.
    let mount = farm.mount("v", "syncfs");
    crate::setup::farm::kill(mount.pid(), libc::SIGKILL);
    assert!(loop_files().contains(&source));
    mount.kill();
    gone("umount --lazy of a dead mount");

    // Read-only there is nothing to sync.
    let mount = farm.mount("v", "syncfs,ro");
    assert!(!loop_files().contains(&source));
    mount.unmount();
}

#[test]
fn syncfs_is_refused_in_words_where_it_cannot_be_had() {
    let farm = Farm::new();
    run(&mut farm.volume(["create", "v", "--owner", "0:0", "--grant", "uid:*=write"]));
    let (dir, logs) = (farm.dir().join("free"), farm.dir().join("logs"));
    fs::create_dir(&dir).unwrap();
    fs::create_dir(&logs).unwrap();
    let source = format!("{}/v", farm.address);
    let refused = |outside: &mut Command, code: i32, text: &str| {
        let mount = outside.args([HAYLOFT, "mount", &source, "-o", "syncfs", "--config", "/dev/null"]);
        let (got, said) = run_failing(mount.arg(&dir).arg("--log-dir").arg(&logs));
        assert!(got == code && said.contains(text) && said.contains("without"), "{got}: {said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    };
    // No loop devices.
    let script =
        "mkdir -p dev; mknod dev/null c 1 3; mknod dev/fuse c 10 229; mount --bind dev /dev; exec \"$@\"";
    let mut without = Command::new("unshare");
    refused(
        without.args(["--mount", "sh", "-euc", script, "sh"]).current_dir(farm.dir()),
        7,
        "modprobe loop",
    );
    // The one that is free is not given to the container.
    let mut without = Command::new("unshare");
    let script = "mknod dev/loop-control c 10 237; mount --bind dev /dev; exec \"$@\"";
    let without = without.args(["--mount", "sh", "-euc", script, "sh"]).current_dir(farm.dir());
    if Path::new("/dev/loop-control").exists() {
        refused(without, 7, "/dev/loop");
    }
    // Not root, though the folder is its own.
    calls::chmod(farm.dir(), 0o755);
    calls::chown(&dir, 1000, 1000);
    fs::remove_dir_all(&logs).unwrap();
    fs::create_dir(&logs).unwrap();
    calls::chown(&logs, 1000, 1000);
    let mut nobody = Command::new("setpriv");
    let nobody = nobody.args(["--reuid", "1000", "--regid", "1000", "--clear-groups"]).current_dir("/");
    refused(nobody, 6, "needs root");
    assert!(!loop_files().contains(&source));
}
