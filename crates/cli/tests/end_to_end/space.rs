//! Full stores, quotas, and memory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::calls::{self, errno};
use crate::farm::{Farm, Mount, noise, number, run, sh, wait_until};

/// A small ext4 file system in a file, for a store that can be full.
struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    fn new(mib: u32) -> SmallDisk {
        let folder = tempfile::Builder::new().prefix("hayloft-disk-").tempdir_in("/var/tmp").unwrap();
        let script =
            format!("truncate -s {mib}M img; mkfs.ext4 -q -F -m 0 img; mkdir disk; mount -o loop img disk");
        run(sh(&script).current_dir(folder.path()));
        SmallDisk { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = sh("umount disk || umount -l disk").current_dir(self.folder.path()).status();
    }
}

fn write_durably(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Bytes in the client's memory that the server has not acknowledged.
fn held(mount: &Mount) -> u64 {
    let stats = mount.stats();
    number(&stats, "log.dirty_bytes") + number(&stats, "log.in_flight_bytes")
}

/// Writes files of 1 MiB until one fails; how many succeeded, and the error.
fn fill(mount: &Mount, most: u64) -> (u64, io::Error) {
    for at in 0..most {
        if let Err(error) = write_durably(&mount.path().join(format!("fill-{at}")), &noise(at + 1, 1 << 20)) {
            return (at, error);
        }
    }
    panic!("{most} MiB fitted");
}

#[test]
fn a_full_store_says_so_keeps_what_it_has_and_goes_on_when_there_is_room() {
    let disk = SmallDisk::new(160);
    let farm = Farm::with(Some(&disk.path().join("store")), &["--reserve", "24M"]);
    farm.create("v");
    let mount = farm.mount("v", "commit=1");
    write_durably(&mount.path().join("old"), b"older than the flood").unwrap();
    let (kept, error) = fill(&mount, 200);
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    assert!(kept > 20, "full after {kept} MiB");
    // Everything that was durable is there, and reading goes on.
    assert_eq!(fs::read(mount.path().join("old")).unwrap(), b"older than the flood");
    for at in 0..kept {
        assert_eq!(
            fs::read(mount.path().join(format!("fill-{at}"))).unwrap(),
            noise(at + 1, 1 << 20),
            "{at}"
        );
    }
    // Deleting needs room in the reserve only, and gives the rest back.
    for entry in fs::read_dir(mount.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("fill-") {
            fs::remove_file(path).unwrap();
        }
    }
    mount.sync();
    wait_until("room after a sweep", Duration::from_secs(60), || {
        run(&mut farm.volume(["sweep", "v"]));
        write_durably(&mount.path().join("new"), &noise(999, 8 << 20)).is_ok()
    });
    mount.unmount();
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
    let mount = farm.mount("v", "");
    assert_eq!(fs::read(mount.path().join("old")).unwrap(), b"older than the flood");
    assert_eq!(fs::read(mount.path().join("new")).unwrap(), noise(999, 8 << 20));
}

#[test]
fn quotas_in_bytes_and_inodes() {
    let farm = Farm::new();
    run(&mut farm.volume(["create", "v", "--quota", "16M", "--inodes", "100", "--owner", "0:0"]));
    let mount = farm.mount("v", "");
    let (kept, error) = fill(&mount, 40);
    assert!(matches!(error.raw_os_error(), Some(libc::EDQUOT | libc::ENOSPC)), "{error}");
    assert!((8..=16).contains(&kept), "full after {kept} MiB");
    (0..=kept).for_each(|at| drop(fs::remove_file(mount.path().join(format!("fill-{at}")))));
    write_durably(&mount.path().join("again"), &noise(7, 4 << 20)).unwrap();
    let refused =
        (0..200).map(|at| fs::create_dir(mount.path().join(format!("dir-{at}")))).find(Result::is_err);
    let errno = errno(refused.expect("200 inodes fitted"));
    assert!(matches!(errno, libc::EDQUOT | libc::ENOSPC), "{errno}");
    run(&mut farm.volume(["set-quota", "v", "--inodes", "0"]));
    mount.unmount();
    let mount = farm.mount("v", "");
    assert_eq!(fs::read(mount.path().join("again")).unwrap(), noise(7, 4 << 20));
    (0..200).for_each(|at| fs::create_dir(mount.path().join(format!("more-{at}"))).unwrap());
}

#[test]
fn statfs_tells_the_truth() {
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "");
    let whole = calls::statfs(mount.path());
    assert!(whole.f_blocks > 0 && whole.f_bavail <= whole.f_blocks && whole.f_namemax == 255);
    mount.unmount();
    run(&mut farm.volume(["set-quota", "v", "--quota", "64M", "--inodes", "1000"]));
    let mount = farm.mount("v", "");
    let free = |stat: &libc::statvfs| stat.f_bfree * stat.f_frsize;
    let before = calls::statfs(mount.path());
    assert_eq!((before.f_blocks * before.f_frsize, before.f_files), (64 << 20, 1000));
    write_durably(&mount.path().join("file"), &noise(1, 8 << 20)).unwrap();
    let after = calls::statfs(mount.path());
    assert_eq!(free(&before) - free(&after), 8 << 20);
    assert_eq!(before.f_ffree - after.f_ffree, 1);
}

#[test]
fn writers_wait_instead_of_filling_the_memory() {
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "dirty=16M,cache=16M,commit=1");
    // From now on the client owns the directory and needs no answer to write in it.
    fs::write(mount.path().join("first"), b"x").unwrap();
    mount.sync();
    farm.signal_server(libc::SIGSTOP);
    let dir = mount.path().to_owned();
    let writer = std::thread::spawn(move || {
        for at in 0..96u64 {
            fs::write(dir.join(format!("file-{at}")), noise(at + 1, 1 << 20)).unwrap();
        }
    });
    // As long as the server takes nothing, the writer stands still at its budget.
    wait_until("writers are held", Duration::from_secs(30), || held(&mount) >= 14 << 20);
    for _ in 0..20 {
        assert!(held(&mount) <= 20 << 20, "{}", mount.stats()["log"]);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!writer.is_finished());
    farm.signal_server(libc::SIGCONT);
    writer.join().unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kib < 200 << 10, "the client took {peak_kib} KiB");
    mount.unmount();
    let mount = farm.mount("v", "");
    for at in 0..96u64 {
        assert_eq!(fs::read(mount.path().join(format!("file-{at}"))).unwrap(), noise(at + 1, 1 << 20));
    }
}
