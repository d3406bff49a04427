//! A server's clock that is set wrong, and right again. Only the server's process sees it: the machine's clock stays as it is.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::setup::farm::{Farm, Mount, run, wait_until};

const SECOND: i128 = 1_000_000_000;
const HOUR: i128 = 3600 * SECOND;

/// How often a new file's time can be looked at.
const LOOKS: u32 = 300;

/// A server that sees the time which a file says, and two mounts that share its volume.
struct Host {
    mounts: [Mount; 2],
    _farm: Farm,
    clock: PathBuf,
    made: u32,
    looks: u32,
}

impl Host {
    fn new() -> Host {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap().keep();
        let clock = folder.join("clock");
        fs::write(&clock, "+0").unwrap();
        let farm = Farm::with_clock(&clock);
        farm.create("v");
        let mounts = ["a", "b"].map(|name| farm.mount_as("v", name, "", None));
        fs::create_dir(mounts[0].join("dir")).unwrap();
        for at in 0..LOOKS {
            fs::create_dir_all(mounts[0].join(&format!("quiet/{at}"))).unwrap();
        }
        Host { mounts, _farm: farm, clock, made: 0, looks: 0 }
    }

    fn set(&self, seconds: i64) {
        // In one step: the server may look at any moment.
        let new = self.clock.with_extension("new");
        fs::write(&new, format!("{seconds:+}")).unwrap();
        fs::rename(&new, &self.clock).unwrap();
    }

    /// The two mounts make directories in one directory in turn, which is done by the server, for so long. Each has a later time
    /// than the one before. Gives the time of the last one.
    fn make_directories(&mut self, how_long: Duration, mut last: i128) -> i128 {
        let until = Instant::now() + how_long;
        while Instant::now() < until {
            self.made += 1;
            let mount = &self.mounts[self.made as usize % 2];
            let path = mount.join(&format!("dir/made-{}", self.made));
            fs::create_dir(&path).unwrap();
            let dir = fs::metadata(mount.join("dir")).unwrap();
            let time = mtime(&path);
            assert!(time > last, "directory {} has the time {time} after {last}", self.made);
            assert_eq!(mtime_of(&dir), time, "it is the directory's last change");
            last = time;
            std::thread::sleep(Duration::from_millis(20));
        }
        last
    }

    /// How far the time of a new file is ahead of the true time, in a directory in which nothing was changed so far.
    fn lead(&mut self) -> i128 {
        std::thread::sleep(Duration::from_millis(100));
        assert!(self.looks < LOOKS, "the time does not come");
        let file = self.mounts[0].join(&format!("quiet/{}/file", self.looks));
        self.looks += 1;
        let before = now();
        fs::write(&file, b"x").unwrap();
        mtime(&file) - before
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.clock.parent().unwrap());
    }
}

fn now() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as i128
}

fn mtime(path: &Path) -> i128 {
    mtime_of(&fs::metadata(path).unwrap())
}

fn mtime_of(of: &fs::Metadata) -> i128 {
    i128::from(of.mtime()) * SECOND + i128::from(of.mtime_nsec())
}

#[test]
fn a_servers_clock_that_is_wrong_for_a_moment_changes_no_time() {
    let mut host = Host::new();
    let mut last = host.make_directories(Duration::from_secs(1), 0);
    for wrong in [3600, -3600] {
        host.set(wrong);
        last = host.make_directories(Duration::from_secs(6), last);
        assert!((last - now()).abs() < 5 * SECOND, "{}", last - now());
        host.set(0);
        last = host.make_directories(Duration::from_secs(2), last);
        assert!((last - now()).abs() < 5 * SECOND, "{}", last - now());
    }
}

#[test]
fn times_grow_and_come_back_when_a_servers_clock_was_wrong_for_long() {
    let mut host = Host::new();
    let mut last = host.make_directories(Duration::from_secs(1), 0);
    host.set(3600);
    let begun = Instant::now();
    // It keeps to that: then it is believed.
    while host.lead() < HOUR / 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the clock is never followed");
        last = host.make_directories(Duration::from_millis(500), last);
    }
    last = host.make_directories(Duration::from_secs(1), last);
    assert!((last - now() - HOUR).abs() < 30 * SECOND, "{}", last - now());
    let project = host.mounts[1].join("project");
    fs::create_dir(&project).unwrap();
    fs::write(project.join("Makefile"), "out: source\n\tcp source out\n").unwrap();
    fs::write(project.join("source"), "one\n").unwrap();
    run(Command::new("make").current_dir(&project));
    assert_eq!(fs::read_to_string(project.join("out")).unwrap(), "one\n");

    host.set(0);
    last = host.make_directories(Duration::from_secs(1), last);
    wait_until("times are right again", Duration::from_secs(15), || host.lead().abs() < 5 * SECOND);
    // What was changed before still grows, and so what is made anew is newer than what it is made from.
    host.make_directories(Duration::from_secs(1), last);
    for _ in 0..2 {
        let mut source = OpenOptions::new().append(true).open(project.join("source")).unwrap();
        source.write_all(b"more\n").unwrap();
        drop(source);
        let said = run(Command::new("make").current_dir(&project));
        assert!(said.contains("cp source out"), "make has left what is stale: {said}");
        let said = run(Command::new("make").current_dir(&project));
        assert!(!said.contains("cp source out"), "made again without a reason: {said}");
    }
    assert_eq!(fs::read_to_string(project.join("out")).unwrap(), "one\nmore\nmore\n");
}
