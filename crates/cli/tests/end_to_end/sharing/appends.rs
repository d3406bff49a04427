//! Lines that several hosts append to one file.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::setup::farm::{Farm, Mount, kill, python, rounds};

/// Half of the processes keep the file open, half open it for each line.
const APPENDER: &str = r#"
import os, sys
path, me, lines = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
fd = os.open(path, flags, 0o644)
for at in range(lines):
    line = f"{me} {at} {'x' * (at * 37 % 190)} {me} {at}\n".encode()
    if me % 2:
        os.close(fd)
        fd = os.open(path, flags, 0o644)
    assert os.write(fd, line) == len(line)
"#;

#[test]
fn lines_appended_on_eight_mounts_are_there_once_and_whole() {
    let (_farm, mounts) = Farm::shared(8);
    let (workers, lines) = (24, rounds(40, 1000));
    let start = |at: usize| {
        let mut command = python(APPENDER);
        command.arg(mounts[at % 8].join("log")).arg(at.to_string()).arg(lines.to_string()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..workers).map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a process has failed, see above");
    }
    let line = |me, at| format!("{me} {at} {} {me} {at}", "x".repeat(at * 37 % 190));
    let mut expected: Vec<String> =
        (0..workers).flat_map(|me| (0..lines).map(move |at| line(me, at))).collect();
    expected.sort();
    let texts: Vec<String> =
        mounts.iter().map(|mount| fs::read_to_string(mount.join("log")).unwrap()).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "the mounts differ");
    let mut found: Vec<&str> = texts[0].lines().collect();
    found.sort_unstable();
    let difference = found.iter().zip(&expected).find(|(found, expected)| *found != expected);
    assert!(found.len() == expected.len() && difference.is_none(), "{} lines, {difference:?}", found.len());
    // Each process's own lines are in the order in which it wrote them.
    let mut next = vec![0; workers];
    for line in texts[0].lines() {
        let mut numbers = line.split(' ').map(|word| word.parse::<usize>().unwrap_or(0));
        let (me, at) = (numbers.next().unwrap(), numbers.next().unwrap());
        assert_eq!(next[me], at, "{line}");
        next[me] += 1;
    }
}

/// A control group in which processes get 2 ms of processor time, and then none for half a second.
struct SlowGroup(PathBuf);

impl SlowGroup {
    fn new() -> Option<SlowGroup> {
        let name = format!("hayloft-test-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/cpu").join(&name);
        let v2 = Path::new("/sys/fs/cgroup").join(&name);
        if fs::create_dir(&v1).is_ok() {
            fs::write(v1.join("cpu.cfs_period_us"), "500000").unwrap();
            fs::write(v1.join("cpu.cfs_quota_us"), "2000").unwrap();
            return Some(SlowGroup(v1));
        }
        // Where there is none, that may be a folder like any other.
        let all = Path::new("/sys/fs/cgroup/cgroup.subtree_control");
        if !all.exists() {
            return None;
        }
        let _ = fs::write(all, "+cpu");
        fs::create_dir(&v2).ok()?;
        let group = SlowGroup(v2);
        fs::write(group.0.join("cpu.max"), "2000 500000").ok().map(|()| group)
    }

    fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for SlowGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn an_append_is_whole_however_long_its_process_is_kept_from_going_on() {
    let Some(slow) = SlowGroup::new() else {
        return println!("skipped: no control group for processor time can be made here");
    };
    let (_farm, mounts) = Farm::shared(2);
    let script = r#"
import os, sys, time
path, me, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 12
while time.monotonic() < end:
    # Most of them reach into another page.
    assert os.write(fd, me.encode() * 2999 + b"\n") == 3000
    time.sleep(pause)
"#;
    let start = |mount: &Mount, me: &str, pause: &str| {
        let mut command = python(script);
        command.arg(mount.join("log")).args([me, pause]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut writer = command.spawn().unwrap();
        BufReader::new(writer.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        writer
    };
    let mut writers = [start(&mounts[0], "a", "0"), start(&mounts[1], "b", "0.002")];
    slow.add(writers[0].id());
    for writer in &mut writers {
        drop(writer.stdin.take());
    }
    for writer in &mut writers {
        assert!(writer.wait().unwrap().success(), "a process has failed, see above");
    }
    let text = fs::read_to_string(mounts[1].join("log")).unwrap();
    let torn = text.lines().find(|line| *line != "a".repeat(2999) && *line != "b".repeat(2999));
    assert!(
        torn.is_none(),
        "a line of {} bytes with {} of a",
        torn.unwrap().len(),
        torn.unwrap().matches('a').count()
    );
    let of_slow = text.lines().filter(|line| line.starts_with('a')).count();
    assert!(of_slow > 20, "{of_slow} lines of the slow one");
}

#[test]
fn the_end_of_an_append_is_not_there_without_its_beginning() {
    const APPENDS: &str = r#"
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
line = b"(" + b"a" * int(sys.argv[2]) + b")\n"
print("ready", flush=True)
while True:
    try: os.write(fd, line)
    except OSError: pass
"#;
    let mut shared = None;
    for round in 0..rounds(6, 60) {
        let mounts = Farm::for_round(&mut shared, round, "commit=3600");
        let name = format!("log-{round}");
        fs::write(mounts[0].join(&name), "").unwrap();
        let start = |at: usize| {
            let mut command = python(APPENDS);
            command.arg(mounts[0].join(&name)).arg((8997 + at).to_string()).stdout(Stdio::piped());
            let mut writer = command.spawn().unwrap();
            BufReader::new(writer.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
            writer
        };
        let mut writers: Vec<Child> = (0..3).map(start).collect();
        std::thread::sleep(Duration::from_millis(200));
        // One of them is within a call, of which the first part may be done. Their host stands still for longer than its lease.
        kill(mounts[0].pid(), libc::SIGSTOP);
        let mut there = File::options().append(true).open(mounts[1].join(&name)).unwrap();
        there.write_all(b"(b)\n").unwrap();
        kill(mounts[0].pid(), libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(300));
        for writer in &mut writers {
            writer.kill().unwrap();
            writer.wait().unwrap();
        }
        let text = fs::read_to_string(mounts[1].join(&name)).unwrap();
        // What was being written when a writer was ended may be there in part, if that is the beginning.
        let torn = text.split_inclusive('\n').find(|line| !line.starts_with('('));
        assert!(torn.is_none(), "round {round}: {} bytes, {torn:.20?}", torn.unwrap_or_default().len());
    }
}

/// Asks for the size of a file to which others append, and reads, and maps, all up to there.
const WATCHING: &str = r#"
import mmap, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR)
sizes, end = set(), time.monotonic() + 60
while len(sizes) < int(sys.argv[2]) and time.monotonic() < end:
    size = os.fstat(file).st_size
    sizes.add(size)
    first = max(size - 1000, 0)
    got = len(os.pread(file, 4096, first))
    assert got >= size - first, (size, got)
    if size:
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as pages:
            assert pages[size - 1] == ord("x")
print(len(sizes))
"#;

#[test]
fn all_of_a_file_up_to_its_size_is_there_while_others_append() {
    let (_farm, mounts) = Farm::shared(2);
    fs::write(mounts[0].join("log"), "").unwrap();
    let sizes = rounds(150, 2000);
    let start = |_| {
        python(WATCHING)
            .arg(mounts[1].join("log"))
            .arg(sizes.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let readers: Vec<Child> = (0..3).map(start).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut log = File::options().append(true).open(mounts[0].join("log")).unwrap();
            while !done.load(Ordering::Relaxed) {
                log.write_all(&[b'x'; 3000]).unwrap();
            }
        });
        let outputs: Vec<_> = readers.into_iter().map(Child::wait_with_output).collect();
        done.store(true, Ordering::Relaxed);
        for output in outputs {
            let output = output.unwrap();
            assert!(output.status.success(), "{}: see above", output.status);
            let seen: usize = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
            assert!(seen >= sizes, "{seen} sizes were seen");
        }
    });
}
