//! Full stores, quotas, and memory.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::setup::calls::{self, errno};
use crate::setup::farm::{Farm, Mount, noise, number, run, sh, wait_until};

/// A small ext4 file system in a file, for a store that can be full.
pub(crate) struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    pub(crate) fn new(mib: u32) -> SmallDisk {
        let folder = tempfile::Builder::new().prefix("hayloft-disk-").tempdir_in("/var/tmp").unwrap();
        let script =
            format!("truncate -s {mib}M img; mkfs.ext4 -q -F -m 0 img; mkdir disk; mount -o loop img disk");
        run(sh(&script).current_dir(folder.path()));
        SmallDisk { folder }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// Nothing is written to it from now on: who wants to, waits.
    pub(crate) fn freeze(&self) {
        run(sh("fsfreeze -f disk").current_dir(self.folder.path()));
    }

    pub(crate) fn thaw(&self) {
        run(sh("fsfreeze -u disk").current_dir(self.folder.path()));
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = sh("fsfreeze -u disk 2>/dev/null || true; umount disk || umount -l disk")
            .current_dir(self.folder.path())
            .status();
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

/// A program that has to end soon.
fn promptly(script: &str, mount: &Mount) -> String {
    let mut command = Command::new("timeout");
    run(command.args(["-k", "1", "30", "sh", "-euc", script]).current_dir(mount.path()))
}

/// One mount has filled the volume, with what `full` says in memory, and has been told so. Everybody else goes on.
fn nobody_but_the_writer_waits(mounts: &[Mount], full: &str) {
    let (one, two) = (&mounts[0], &mounts[1]);
    for mount in [two, one] {
        let listed = promptly("ls -l work > /dev/null; ls work", mount);
        assert!(listed.contains(full) && listed.contains("old"), "{listed}");
        assert_eq!(promptly("cat work/old", mount), "older");
    }
    // Nothing more is taken, and who writes hears so at once or from fsync, on whichever host.
    for mount in mounts {
        let error = write_durably(&mount.join("work/more"), &noise(77, 6 << 20)).unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::EDQUOT | libc::ENOSPC)), "{error}");
        promptly(
            "ls -l work > /dev/null; rm -f work/more; mv work/old work/moved; mv work/moved work/old",
            mount,
        );
    }
    let free = calls::statfs(two.path());
    assert!(free.f_bavail * free.f_frsize < 6 << 20, "{} blocks are said to be free", free.f_bavail);
    promptly("rm work/old", one);
    promptly(&format!("rm work/{full}"), two);
}

#[test]
fn a_used_up_quota_holds_up_nobody_but_the_writer() {
    let (farm, mounts) = Farm::shared(2);
    fs::create_dir(mounts[0].join("work")).unwrap();
    write_durably(&mounts[0].join("work/old"), b"older").unwrap();
    promptly("ls -l work", &mounts[1]);
    run(&mut farm.volume(["set-quota", "v", "--quota", "1M"]));
    let error = write_durably(&mounts[0].join("work/full"), &noise(1, 3 << 20)).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(libc::EDQUOT | libc::ENOSPC)), "{error}");
    nobody_but_the_writer_waits(&mounts, "full");
    for mount in &mounts {
        write_durably(&mount.join("work/again"), &noise(2, 300_000)).unwrap();
        assert_eq!(fs::read(mounts[1].join("work/again")).unwrap(), noise(2, 300_000));
    }
    assert!(mounts.iter().all(|mount| mount.unsent().is_empty()));
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
}

#[test]
fn a_used_up_quota_of_inodes_holds_up_nobody_either() {
    let (farm, mounts) = Farm::shared(2);
    fs::create_dir_all(mounts[0].join("work/mine")).unwrap();
    fs::write(mounts[0].join("work/mine/first"), b"x").unwrap();
    mounts[0].sync();
    // It is the only one that uses the directory, and makes files there without asking.
    run(&mut farm.volume(["set-quota", "v", "--inodes", "10"]));
    promptly("for at in $(seq 40); do : > work/mine/$at || break; done", &mounts[0]);
    let error = File::open(mounts[0].join("work")).unwrap().sync_all().unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(libc::EDQUOT | libc::ENOSPC)), "{error}");
    assert!(promptly("ls -l work/mine | wc -l", &mounts[1]).trim().parse::<u64>().unwrap() > 10);
    promptly("rm -r work/mine", &mounts[1]);
    wait_until("room for a directory", Duration::from_secs(30), || {
        fs::create_dir(mounts[0].join("work/other")).is_ok()
    });
}

#[test]
fn a_full_store_holds_up_nobody_but_the_writer() {
    let disk = SmallDisk::new(160);
    let farm = Farm::with(Some(&disk.path().join("store")), &["--reserve", "24M"]);
    farm.create("v");
    let mounts = farm.mounts("v", 2, "commit=1");
    fs::create_dir(mounts[0].join("work")).unwrap();
    write_durably(&mounts[0].join("work/old"), b"older").unwrap();
    promptly("ls -l work", &mounts[1]);
    let fills = (0..200u64).map(|at| {
        let name = format!("fill-{at}");
        write_durably(&mounts[0].join("work").join(&name), &noise(at + 1, 1 << 20))
            .err()
            .map(|error| (name, error))
    });
    let (full, error) = fills.flatten().next().expect("200 MiB did not fit");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    nobody_but_the_writer_waits(&mounts, &full);
    promptly("rm work/fill-*", &mounts[1]);
    // What a host's kernel has looked at counts as in use there until it looks again.
    promptly("for at in $(seq 0 200); do stat work/fill-$at > /dev/null 2>&1 || true; done", &mounts[0]);
    wait_until("room after a sweep", Duration::from_secs(60), || {
        run(&mut farm.volume(["sweep", "v"]));
        write_durably(&mounts[0].join("work/new"), &noise(999, 8 << 20)).is_ok()
    });
    assert_eq!(fs::read(mounts[1].join("work/new")).unwrap(), noise(999, 8 << 20));
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
}

#[test]
fn what_no_room_is_left_for_is_kept_on_its_host_when_others_need_the_files() {
    let disk = SmallDisk::new(200);
    let farm = Farm::with(Some(&disk.path().join("store")), &["--reserve", "24M"]);
    farm.create("v");
    // Also where many other mounts share this host's memory.
    let mounts = farm.mounts("v", 2, "commit=3600,dirty=256M");
    let (one, two) = (&mounts[0], &mounts[1]);
    fs::create_dir(one.join("work")).unwrap();
    let old = noise(1, 1 << 20);
    write_durably(&one.join("work/old"), &old).unwrap();
    write_durably(&one.join("work/longer"), &old).unwrap();
    promptly("ls -l work", two);
    // It was told of much room, and then somebody else takes it. Names are made first: that ships what there is.
    let large = noise(2, 40 << 20);
    let [mut whole, mut small] =
        ["large", "small"].map(|name| File::create(one.join("work").join(name)).unwrap());
    let mut longer = File::options().append(true).open(one.join("work/longer")).unwrap();
    small.write_all(b"fits a row").unwrap();
    whole.write_all(&large).unwrap();
    longer.write_all(&large).unwrap();
    let space = calls::statfs(&disk.path());
    let filler = (space.f_bavail * space.f_frsize).saturating_sub(30 << 20);
    run(sh(&format!("fallocate -l {filler} filler")).current_dir(disk.path()));
    let error = longer.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    let listed = promptly("ls -l work > /dev/null; ls work", two);
    assert_eq!(listed, "large\nlonger\nold\nsmall\n");
    // All see what is stored, and the rest is kept.
    for mount in [one, two] {
        assert_eq!(fs::read(mount.join("work/old")).unwrap(), old);
        assert_eq!(fs::read(mount.join("work/small")).unwrap(), b"fits a row");
        assert_eq!(fs::read(mount.join("work/longer")).unwrap(), old);
        assert_eq!(fs::read(mount.join("work/large")).unwrap(), large[..4096]);
    }
    let kept = one.unsent().pop().expect("a folder");
    let report = fs::read_to_string(kept.join("REPORT")).unwrap();
    assert!(report.contains("work/large") && report.contains("work/longer"), "{report}");
    assert!(!report.contains("work/old") && !report.contains("work/small"), "{report}");
    assert_eq!(fs::read(kept.join("files/work/large")).unwrap(), large);
    assert_eq!(fs::read(kept.join("files/work/longer")).unwrap()[1 << 20..], large);
    assert!(one.log().contains(kept.to_str().unwrap()), "{}", one.log());
    // Whoever has it open hears of it once.
    assert_eq!(longer.sync_all().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    longer.sync_all().unwrap();
    assert_eq!(whole.sync_all().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    promptly("rm work/large", two);
    fs::remove_file(disk.path().join("filler")).unwrap();
    wait_until("room", Duration::from_secs(60), || write_durably(&one.join("work/new"), &large).is_ok());
    assert_eq!(fs::read(two.join("work/new")).unwrap(), large);
    drop((longer, whole, small));
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
}

#[test]
fn statfs_tells_the_truth() {
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "");
    let whole = calls::statfs(mount.path());
    assert!(whole.f_blocks > 0 && whole.f_bavail <= whole.f_blocks && whole.f_namemax == 255);
    // What programs of 32 bits are told has to have room there, or the call fails (EOVERFLOW).
    let low = u64::from(u32::MAX);
    assert!(whole.f_blocks <= low && whole.f_files <= low && whole.f_ffree > 1 << 30, "{whole:?}");
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
    mount.unmount();
    run(&mut farm.volume(["set-quota", "v", "--quota", "64T", "--inodes", "1000"]));
    let mount = farm.mount("v", "");
    let large = calls::statfs(mount.path());
    assert_eq!(
        (large.f_bsize, large.f_frsize),
        (32 << 10, 32 << 10),
        "2^32 blocks of 16 KiB are one too many"
    );
    assert_eq!(large.f_blocks * large.f_frsize, 64 << 40);
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

/// Bytes that a sweep gives back.
fn swept(farm: &Farm) -> u64 {
    let told: serde_json::Value =
        serde_json::from_str(&run(&mut farm.volume(["sweep", "v", "--json"]))).unwrap();
    told["bytes_reclaimed"].as_u64().unwrap()
}

/// What `volume show` says can be given back is what a sweep then gives back.
#[test]
fn what_a_sweep_would_give_back_is_shown() {
    let (farm, mount) = Farm::mounted("v");
    let show = || -> serde_json::Value {
        serde_json::from_str(&run(&mut farm.volume(["show", "v", "--json"]))).unwrap()
    };
    let reclaimable = || show()["reclaimable_bytes"].as_u64().unwrap();
    let swept = || swept(&farm);
    for at in 0..30 {
        write_durably(&mount.join(&format!("f{at}")), &noise(at, 1 << 20)).unwrap();
    }
    write_durably(&mount.join("large"), &noise(99, 20 << 20)).unwrap();
    assert_eq!(reclaimable(), 0);
    // All of one pack or two, and most of others.
    fs::remove_file(mount.join("large")).unwrap();
    for at in (0..30).filter(|at| at % 4 > 0) {
        fs::remove_file(mount.join(&format!("f{at}"))).unwrap();
    }
    mount.sync();
    let told = reclaimable();
    assert!(told > 20 << 20, "{told}");
    assert!(run(&mut farm.volume(["show", "v"])).contains("by a sweep now"));
    let given = swept();
    assert!(told.abs_diff(given) < given / 50, "{told} bytes were told, {given} are given back");
    assert_eq!(reclaimable(), 0);
    // What a snapshot has is given back when that has gone.
    run(&mut farm.ask(["snapshot", "create", "v@point"]));
    for at in (0..30).filter(|at| at % 4 == 0) {
        fs::remove_file(mount.join(&format!("f{at}"))).unwrap();
    }
    mount.sync();
    assert_eq!(reclaimable(), 0, "the snapshot has it");
    run(&mut farm.ask(["snapshot", "delete", "v@point"]));
    wait_until("it can be given back", Duration::from_secs(20), || reclaimable() > 7 << 20);
    let (told, given) = (reclaimable(), swept());
    assert!(told.abs_diff(given) < given / 50, "{told} bytes were told, {given} are given back");
}

/// A kernel keeps what it has once looked up. What one host has made, and another one removes, is given back all the same, but for what a
/// program has open. (Before Linux 6.18 a kernel cannot be told.)
#[test]
fn what_another_host_has_removed_is_given_back_while_its_maker_is_mounted() {
    if !calls::is_linux_since((6, 18)) {
        return;
    }
    let (farm, mounts) = Farm::shared(2);
    let path = |at: u64| format!("f{at}");
    let swept = || swept(&farm);
    for at in 0..9 {
        write_durably(&mounts[0].join(&path(at)), &noise(at, 4 << 20)).unwrap();
    }
    let open = File::open(mounts[0].join(&path(8))).unwrap();
    let mut given = swept();
    for at in 0..9 {
        fs::remove_file(mounts[1].join(&path(at))).unwrap();
    }
    mounts[1].sync();
    wait_until("what nobody has open is given back", Duration::from_secs(60), || {
        given += swept();
        given > 31 << 20
    });
    for _ in 0..2 {
        std::thread::sleep(Duration::from_secs(2));
        given += swept();
        assert!(given < 34 << 20, "{given} bytes: what is open has gone too");
    }
    let mut content = Vec::new();
    (&open).read_to_end(&mut content).unwrap();
    assert!(content == noise(8, 4 << 20), "what is open is as it was");
    drop(open);
    wait_until("what was open is given back", Duration::from_secs(60), || {
        given += swept();
        given > 35 << 20
    });
}
