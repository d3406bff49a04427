//! Locks between processes on several mounts.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use crate::setup::farm::{Farm, Mount, number, python, rounds, run, wait_until};

/// Adds to a number that it reads first: without the lock some additions get lost.
const COUNTER: &str = r#"
import fcntl, os, sys
top, kind, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
take = fcntl.flock if kind == "flock" else fcntl.lockf
for at in range(times):
    with open(top + "/number", "r+") as file:
        take(file, fcntl.LOCK_EX)
        number = int(file.read())
        file.seek(0)
        file.write(f"{number + 1}\n")
        file.flush()
        take(file, fcntl.LOCK_UN)
"#;

fn count(kind: &str) {
    let (_farm, mounts) = Farm::shared(4);
    fs::write(mounts[0].join("number"), "0\n").unwrap();
    let (workers, times) = (12, rounds(15, 500));
    let start = |at: usize| {
        python(COUNTER).arg(mounts[at % 4].path()).arg(kind).arg(times.to_string()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..workers).map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a process has failed, see above");
    }
    for mount in &mounts {
        assert_eq!(fs::read_to_string(mount.join("number")).unwrap(), format!("{}\n", workers * times));
    }
}

#[test]
fn flock_excludes_across_mounts() {
    count("flock");
}

#[test]
fn fcntl_excludes_across_mounts() {
    count("fcntl");
}

/// Adds to numbers in two pages of a map, which nothing writes but what the lock does.
const MAPPED: &str = r#"
import fcntl, mmap, sys
name, times = sys.argv[1], int(sys.argv[2])
for at in range(times):
    with open(name, "r+b") as file, mmap.mmap(file.fileno(), 32768) as pages:
        for _ in range(10):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, 120)
            number = int.from_bytes(pages[0:8], "little")
            assert int.from_bytes(pages[4096:4104], "little") == number
            pages[0:8] = pages[4096:4104] = (number + 1).to_bytes(8, "little")
            fcntl.lockf(file, fcntl.LOCK_UN, 1, 120)
"#;

#[test]
fn what_is_stored_through_a_map_under_a_lock_is_there_for_who_locks_next() {
    let (_farm, mounts) = Farm::shared(2);
    fs::write(mounts[0].join("map"), [0; 32768]).unwrap();
    let times = rounds(20, 500);
    let start = |mount: &Mount| python(MAPPED).arg(mount.join("map")).arg(times.to_string()).spawn().unwrap();
    let children: Vec<Child> = mounts.iter().map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a process has failed, see above");
    }
    for mount in &mounts {
        let bytes = fs::read(mount.join("map")).unwrap();
        assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), 20 * times as u64);
        assert_eq!(number(&mount.stats(), "server.sessions_replaced"), 0);
    }
}

/// Adds to a number of its own, and to one of all, in one page of a map, each under a lock of its own.
const MAPPED_BESIDE: &str = r#"
import fcntl, mmap, sys
name, own, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def add(file, pages, at):
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 32768 + at)
    pages[at:at + 8] = (int.from_bytes(pages[at:at + 8], "little") + 1).to_bytes(8, "little")
    fcntl.lockf(file, fcntl.LOCK_UN, 1, 32768 + at)
with open(name, "r+b") as file, mmap.mmap(file.fileno(), 32768) as pages:
    for _ in range(times):
        add(file, pages, 8 * own)
        add(file, pages, 0)
"#;

#[test]
fn stores_of_several_hosts_into_one_page_under_different_locks_do_not_undo_each_other() {
    let (_farm, mounts) = Farm::shared(3);
    fs::write(mounts[0].join("map"), [0; 32768]).unwrap();
    let (workers, times) = (6, rounds(60, 1000));
    let start = |at: usize| {
        let own = (at + 1).to_string();
        python(MAPPED_BESIDE).arg(mounts[at % 3].join("map")).arg(own).arg(times.to_string()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..workers).map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a process has failed, see above");
    }
    for mount in &mounts {
        let bytes = fs::read(mount.join("map")).unwrap();
        let numbers = bytes.chunks_exact(8).map(|number| u64::from_le_bytes(number.try_into().unwrap()));
        let numbers: Vec<u64> = numbers.take(workers + 1).collect();
        let expected = |at: usize| if at == 0 { workers * times } else { times } as u64;
        assert_eq!(numbers, (0..=workers).map(expected).collect::<Vec<u64>>());
    }
}

/// Each insertion is a connection of its own, so the map begins and ends all the time.
const INSERTING: &str = r#"
import sqlite3, sys
for at in range(int(sys.argv[2])):
    base = sqlite3.connect(sys.argv[1], timeout=60)
    base.execute("pragma journal_mode=wal")
    with base:
        base.execute("create table if not exists t(x)")
        base.execute("insert into t values(?)", (at,))
    base.close()
"#;

#[test]
fn sqlite_works_with_a_log_that_two_hosts_map() {
    let (_farm, mounts) = Farm::shared(2);
    run(python(INSERTING).arg(mounts[0].join("base")).arg("1"));
    let times = rounds(30, 500);
    let start =
        |mount: &Mount| python(INSERTING).arg(mount.join("base")).arg(times.to_string()).spawn().unwrap();
    let children: Vec<Child> = mounts.iter().map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a process has failed, see above");
    }
    let read = "import sqlite3,sys; b=sqlite3.connect(sys.argv[1]); print(b.execute('select count(*) from t').fetchone()[0], b.execute('pragma integrity_check').fetchone()[0])";
    for mount in &mounts {
        assert_eq!(run(python(read).arg(mount.join("base"))).trim(), format!("{} ok", 2 * times + 1));
    }
}

/// Does what it is told, a line each, and answers each with a line. When it would deadlock it lets go of everything.
const HOLDER: &str = r#"
import errno, fcntl, os, struct, sys
file = open(sys.argv[1], "r+b")
other = open(sys.argv[2], "r+b")
print("ready", flush=True)
for line in sys.stdin:
    verb, *numbers = line.split()
    start, length = (list(map(int, numbers)) + [0, 0])[:2]
    try:
        if verb == "flock": fcntl.flock(file, fcntl.LOCK_EX)
        elif verb == "shared": fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        elif verb == "try-flock": fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif verb == "unflock": fcntl.flock(file, fcntl.LOCK_UN)
        elif verb == "lock": fcntl.lockf(file, fcntl.LOCK_EX, length, start)
        elif verb == "read-lock": fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, length, start)
        elif verb == "try": fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        elif verb == "unlock": fcntl.lockf(file, fcntl.LOCK_UN, length, start)
        elif verb == "lock-other": fcntl.lockf(other, fcntl.LOCK_EX, length, start)
        elif verb == "test":
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, start, length, 0)
            kind, _, start, length, pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
            names = {fcntl.F_RDLCK: "read", fcntl.F_WRLCK: "write", fcntl.F_UNLCK: "free"}
            print("free" if kind == fcntl.F_UNLCK else f"{names[kind]} {start} {length} {pid}", flush=True)
            continue
        print("ok", flush=True)
    except OSError as error:
        if error.errno == errno.EDEADLK:
            fcntl.lockf(file, fcntl.LOCK_UN)
            fcntl.lockf(other, fcntl.LOCK_UN)
        print(errno.errorcode[error.errno], flush=True)
"#;

/// A process that holds locks.
struct Holder {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Holder {
    /// On the file "lock" of a mount, and for `lock-other` on "other".
    fn new(mount: &Mount) -> Holder {
        let mut command = python(HOLDER);
        command.arg(mount.join("lock")).arg(mount.join("other"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut holder = Holder { child, input, output };
        assert_eq!(holder.answer(), "ready");
        holder
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, what: &str) -> String {
        self.tell(what);
        self.answer()
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn with_files(count: usize, lease: &str) -> (Farm, Vec<Mount>) {
    let (farm, mounts) = Farm::shared_with(count, "", &["--lease", lease]);
    ["lock", "other"].iter().for_each(|name| fs::write(mounts[0].join(name), b"").unwrap());
    (farm, mounts)
}

#[test]
fn locks_of_two_mounts_conflict_as_on_one_host() {
    let (_farm, mounts) = with_files(3, "10");
    let mut holders: Vec<Holder> = mounts.iter().map(Holder::new).collect();
    let [one, two, three] = holders.as_mut_slice() else { unreachable!() };
    // flock.
    assert_eq!(one.ask("flock"), "ok");
    assert_eq!((two.ask("try-flock"), two.ask("shared")), ("EAGAIN".into(), "EAGAIN".into()));
    assert_eq!(one.ask("unflock"), "ok");
    assert_eq!((two.ask("shared"), three.ask("shared")), ("ok".into(), "ok".into()));
    assert_eq!(one.ask("try-flock"), "EAGAIN");
    assert_eq!((two.ask("unflock"), three.ask("unflock")), ("ok".into(), "ok".into()));
    assert_eq!((one.ask("try-flock"), one.ask("unflock")), ("ok".into(), "ok".into()));
    // fcntl, on ranges.
    assert_eq!(one.ask("lock 100 50"), "ok");
    assert_eq!(two.ask("test 0 0"), format!("write 100 50 {}", one.pid()));
    assert_eq!(two.ask("test 0 100"), "free");
    assert_eq!((two.ask("try 149 1"), two.ask("try 150 10")), ("EAGAIN".into(), "ok".into()));
    assert_eq!(three.ask("test 150 10"), format!("write 150 10 {}", two.pid()));
    assert_eq!(one.ask("unlock 100 20"), "ok");
    assert_eq!((two.ask("try 100 20"), two.ask("try 120 1")), ("ok".into(), "EAGAIN".into()));
    assert_eq!((one.ask("read-lock 500 5"), three.ask("read-lock 502 5")), ("ok".into(), "ok".into()));
    assert_eq!(two.ask("try 503 1"), "EAGAIN");
    // The two kinds know nothing of each other.
    assert_eq!(three.ask("try-flock"), "ok");
}

#[test]
fn a_lock_is_handed_to_who_waits_for_it_on_another_mount() {
    let (_farm, mounts) = with_files(3, "10");
    for (take, give) in [("flock", "unflock"), ("lock 0 0", "unlock 0 0")] {
        let mut holders: Vec<Holder> = mounts.iter().map(Holder::new).collect();
        let [one, two, three] = holders.as_mut_slice() else { unreachable!() };
        assert_eq!(one.ask(take), "ok");
        two.tell(take);
        three.tell(take);
        // One that waits may be killed; it is not given the lock then.
        three.child.kill().unwrap();
        three.child.wait().unwrap();
        assert_eq!(one.ask(give), "ok");
        assert_eq!(two.answer(), "ok");
        one.tell(take);
        // Its holder's end frees it.
        two.child.kill().unwrap();
        assert_eq!(one.answer(), "ok");
        assert_eq!(one.ask(give), "ok");
    }
}

#[test]
fn a_deadlock_between_mounts_is_refused() {
    let (_farm, mounts) = with_files(2, "10");
    let (mut one, mut two) = (Holder::new(&mounts[0]), Holder::new(&mounts[1]));
    assert_eq!((one.ask("lock 0 1"), two.ask("lock-other 0 1")), ("ok".into(), "ok".into()));
    one.tell("lock-other 0 1");
    // EDEADLK by its other name: the one that waits last is told so, and lets the other have both.
    let mut said = [two.ask("lock 0 1"), one.answer()];
    said.sort();
    assert_eq!(said, ["EDEADLOCK", "ok"]);
}

#[test]
fn locks_of_a_killed_mount_are_free_after_its_lease() {
    let (_farm, mut mounts) = with_files(3, "2");
    let last = mounts.pop().unwrap();
    let mut lost = Holder::new(&last);
    let (mut one, mut two) = (Holder::new(&mounts[0]), Holder::new(&mounts[1]));
    assert_eq!((lost.ask("flock"), lost.ask("lock 0 0")), ("ok".into(), "ok".into()));
    assert_eq!((one.ask("try-flock"), one.ask("try 5 1")), ("EAGAIN".into(), "EAGAIN".into()));
    one.tell("flock");
    last.kill();
    // Its end is the dead mount's own business: the server does not hear of it.
    drop(lost);
    // Who waits gets it, and who asks again and again as well.
    assert_eq!(one.answer(), "ok");
    wait_until("the range is free", Duration::from_secs(60), || two.ask("try 5 1") == "ok");
}
