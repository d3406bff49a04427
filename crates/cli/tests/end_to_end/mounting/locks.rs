//! Locks between processes of one host; `-o locks=shared` takes them through the server.

use std::fs::File;

use crate::setup::farm::{Place, run, sh};

#[test]
fn flock_excludes_and_ends_with_its_holder() {
    let place = Place::new();
    File::create(place.join("lock")).unwrap();
    run(sh("exec 9<lock; flock 9
        ! flock --nonblock lock true
        exec 8<lock; ! flock --nonblock --shared 8
        flock --unlock 9
        flock --nonblock lock true
        flock --shared 9; flock --nonblock --shared lock true; ! flock --nonblock --exclusive lock true")
    .current_dir(place.path()));
}

#[test]
fn flock_waits_and_is_counted() {
    let place = Place::new();
    // Each worker adds to a number that it reads first: without the lock some additions get lost.
    run(sh("echo 0 > number; touch lock
        for worker in 1 2 3 4; do
            (for round in $(seq 25); do flock lock sh -c 'n=$(cat number); echo $((n + 1)) > number'; done) &
        done
        wait
        test $(cat number) = 100")
    .current_dir(place.path()));
}

#[test]
fn fcntl_locks_are_ranges_of_a_process() {
    let place = Place::new();
    let script = r#"
import fcntl, os, struct, sys
path = sys.argv[1] + "/locked"
file = open(path, "w+b")
fcntl.lockf(file, fcntl.LOCK_EX, 100, 0)
def other(start, length, kind=fcntl.LOCK_EX):
    pid = os.fork()
    if pid == 0:
        with open(path, "r+b") as mine:
            try:
                fcntl.lockf(mine, kind | fcntl.LOCK_NB, length, start)
            except OSError:
                os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not other(50, 10)
assert other(100, 10)
fcntl.lockf(file, fcntl.LOCK_UN, 20, 40)
assert other(40, 20) and not other(60, 1) and not other(0, 0)
# They end with the process's last descriptor of the file. (On a local file system: with any.)
file.close()
assert other(0, 100)
"#;
    run(std::process::Command::new("python3").args(["-c", script]).arg(place.path()));
}

/// Runs Python with `place` as its argument and the helpers below.
fn python(place: &Place, script: &str) {
    const HELPERS: &str = r#"
import ctypes, errno, fcntl, mmap, os, signal, struct, subprocess, sys, time
path = sys.argv[1] + "/locked"
file = open(path, "w+b")
def forked(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() is not False else 1
        finally:
            os._exit(code)
    return pid
def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def another(lock, *arguments):
    """Whether another process with an open file of its own gets the lock."""
    def work():
        with open(path, "r+b") as mine:
            try:
                lock(mine, *arguments)
            except BlockingIOError:
                return False
    return ended(forked(work)) == 0
EX, SH, UN, NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN, fcntl.LOCK_NB
def free(kind=EX):
    return another(fcntl.flock, kind | NB)
def range_free(start=0, length=0, kind=EX):
    return another(fcntl.lockf, kind | NB, length, start)
def soon(what):
    deadline = time.time() + 5
    while not what():
        assert time.time() < deadline
        time.sleep(0.01)
"#;
    let script = format!("{HELPERS}{script}");
    run(std::process::Command::new("timeout").args(["60", "python3", "-c", &script]).arg(place.path()));
}

#[test]
fn flock_belongs_to_the_open_file_and_ends_with_its_last_user() {
    python(
        &Place::new(),
        r#"
# A parent locks, its child inherits the open file; the parent ends.
pipe, go = os.pipe()
def parent():
    mine = open(path, "r+b")
    fcntl.flock(mine, EX)
    def child():
        os.close(go)
        os.read(pipe, 1)
    forked(child)
pid = forked(parent)
assert ended(pid) == 0
time.sleep(0.6)
assert not free()
os.close(go)
soon(free)
# A duplicate keeps it, and so does a map.
mine = open(path, "r+b")
mine.write(b"x" * 4096)
mine.flush()
fcntl.flock(mine, EX)
copy = os.dup(mine.fileno())
mapped = mmap.mmap(mine.fileno(), 4096)
mine.close()
assert not free()
os.close(copy)
time.sleep(0.6)
# (Python's map has a duplicate of its own.)
assert not free()
mapped.close()
assert free()
# Unlocking one descriptor of it unlocks it.
mine = open(path, "r+b")
fcntl.flock(mine, EX)
copy = os.dup(mine.fileno())
fcntl.flock(copy, UN)
assert free()
# In flight on a socket: open, though no process has a descriptor.
import socket, array
left, right = socket.socketpair()
fcntl.flock(mine, EX)
left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [mine.fileno()]))])
mine.close(); os.close(copy)
time.sleep(0.6)
assert not free()
left.close(); right.close()
assert free()
"#,
    );
}

#[test]
fn a_killed_holder_lets_go() {
    python(
        &Place::new(),
        r#"
for lock, is_free in ((fcntl.flock, free), (fcntl.lockf, range_free)):
    ready, tell = os.pipe()
    def hold():
        mine = open(path, "r+b")
        lock(mine, EX)
        os.write(tell, b"x")
        time.sleep(60)
    pid = forked(hold)
    os.read(ready, 1)
    assert not is_free()
    # One who waits gets it.
    def wait():
        mine = open(path, "r+b")
        lock(mine, EX)
    waiter = forked(wait)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert ended(waiter) == 0
    ended(pid)
    assert is_free()
"#,
    );
}

#[test]
fn locks_end_with_close_exec_and_exit() {
    python(
        &Place::new(),
        r#"
for attempt in range(20):
    for lock, is_free in ((fcntl.flock, free), (fcntl.lockf, range_free)):
        mine = open(path, "r+b")
        lock(mine, EX)
        assert not is_free()
        mine.close()
        # At once, for everybody on this host.
        assert is_free()
        def one():
            lock(open(path, "r+b"), EX)
        assert ended(forked(one)) == 0
        assert is_free()
# A lock of fcntl through an inherited open file: its process ends, the file stays open here.
pid = forked(lambda: fcntl.lockf(file, EX))
assert ended(pid) == 0
assert range_free()
# The process closes its descriptor of an open file that stays open here.
ready, tell = os.pipe()
hold, go = os.pipe()
def work():
    os.close(go)
    fcntl.lockf(file, EX)
    os.close(file.fileno())
    os.write(tell, b"x")
    os.read(hold, 1)
pid = forked(work)
os.read(ready, 1)
assert range_free()
os.close(go)
os.waitpid(pid, 0)
# exec keeps it with the descriptor, and ends it without.
for keep in (True, False):
    mine = os.open(path, os.O_RDWR)
    out, into = os.pipe()
    def execute():
        os.set_inheritable(mine, keep)
        fcntl.lockf(mine, EX)
        os.dup2(into, 1)
        os.execvp("sh", ["sh", "-c", "echo x; exec sleep 60 >/dev/null"])
    pid = forked(execute)
    os.read(out, 1)
    assert range_free() != keep
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    assert range_free()
"#,
    );
}

#[test]
fn ranges_split_merge_and_are_told() {
    python(
        &Place::new(),
        r#"
def holder(start, length, kind):
    """What F_GETLK says to another process."""
    out, into = os.pipe()
    def ask():
        mine = open(path, "r+b")
        told = fcntl.fcntl(mine, fcntl.F_GETLK, struct.pack("hhqqi4x", kind, 0, start, length, 0))
        os.write(into, told)
    assert ended(forked(ask)) == 0
    kind, _, start, length, pid = struct.unpack("hhqqi4x", os.read(out, 100))
    return kind, start, length, pid
me = os.getpid()
fcntl.lockf(file, EX, 100, 0)
assert holder(10, 10, fcntl.F_RDLCK) == (fcntl.F_WRLCK, 0, 100, me)
fcntl.lockf(file, UN, 20, 40)
assert holder(40, 20, fcntl.F_WRLCK)[0] == fcntl.F_UNLCK
assert holder(50, 20, fcntl.F_RDLCK) == (fcntl.F_WRLCK, 60, 40, me)
fcntl.lockf(file, SH, 0, 0)
assert holder(0, 0, fcntl.F_WRLCK) == (fcntl.F_RDLCK, 0, 0, me)
assert range_free(5, 5, SH) and not range_free(1 << 40, 1)
# Of the open file: another one of this process is in its way, a forked child is not.
fcntl.lockf(file, UN)
whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
F_OFD_SETLK = 37
fcntl.fcntl(file, F_OFD_SETLK, whole)
other = open(path, "r+b")
for lock in (lambda: fcntl.fcntl(other, F_OFD_SETLK, whole), lambda: fcntl.lockf(other, EX | NB)):
    try:
        lock()
        assert False
    except BlockingIOError:
        pass
assert ended(forked(lambda: fcntl.fcntl(file, F_OFD_SETLK, whole))) == 0
assert not range_free()
file.close()
assert range_free()
"#,
    );
}

#[test]
fn waiting_can_be_interrupted_and_deadlocks_are_found() {
    python(
        &Place::new(),
        r#"
class Alarm(Exception):
    pass
def ring(*_):
    raise Alarm()
signal.signal(signal.SIGALRM, ring)
ready, tell = os.pipe()
hold, go = os.pipe()
def holder():
    os.close(go)
    mine = open(path, "r+b")
    fcntl.flock(mine, EX)
    fcntl.lockf(mine, EX)
    os.write(tell, b"x")
    os.read(hold, 1)
pid = forked(holder)
os.read(ready, 1)
for lock in (fcntl.flock, fcntl.lockf):
    begun = time.time()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        lock(file, EX)
        assert False, "not interrupted"
    except Alarm:
        pass
    assert time.time() - begun < 3
    # A killed one that waits is gone at once.
    waiter = forked(lambda: lock(open(path, "r+b"), EX))
    time.sleep(0.2)
    os.kill(waiter, signal.SIGKILL)
    assert ended(waiter) == -signal.SIGKILL
os.close(go)
ended(pid)
# Nothing is left of those who gave up.
soon(free)
soon(range_free)
fcntl.lockf(file, EX, 1, 0)
out, into = os.pipe()
def other():
    mine = open(path, "r+b")
    fcntl.lockf(mine, EX, 1, 1)
    os.write(into, b"x")
    fcntl.lockf(mine, EX, 1, 0)
pid = forked(other)
os.read(out, 1)
time.sleep(0.3)
try:
    fcntl.lockf(file, EX, 1, 1)
    assert False, "no deadlock"
except OSError as error:
    assert error.errno == errno.EDEADLK, error
fcntl.lockf(file, UN)
assert ended(pid) == 0
"#,
    );
}

#[test]
fn more_wait_than_a_queue_has_places() {
    python(
        &Place::new(),
        r#"
fcntl.flock(file, EX)
waiters = [forked(lambda: fcntl.flock(open(path, "r+b"), EX)) for _ in range(300)]
time.sleep(1)
os.stat(sys.argv[1])
open(path + "2", "w").close()
fcntl.flock(file, UN)
assert all(ended(pid) == 0 for pid in waiters)
assert free()
"#,
    );
}

#[test]
fn thousands_of_locked_files_do_not_hold_up_each_other() {
    python(
        &Place::new(),
        r#"
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (6000, 6000))
names = [f"{path}-{number}" for number in range(5000)]
ready, go = os.pipe()
def hold():
    files = [open(name, "w+b") for name in names]
    for each in files:
        fcntl.flock(each, EX)
    os.write(go, b"x")
    signal.pause()
holder = forked(hold)
os.read(ready, 1)
for name in names[::500]:
    with open(name, "r+b") as mine:
        try:
            fcntl.flock(mine, EX | NB)
            assert False, name
        except BlockingIOError:
            pass
os.kill(holder, signal.SIGKILL)
os.waitpid(holder, 0)
for name in names:
    with open(name, "r+b") as mine:
        fcntl.flock(mine, EX)
"#,
    );
}

#[test]
fn locks_of_the_host_alone_cost_the_server_nothing() {
    let farm = crate::setup::farm::Farm::new();
    farm.create("v");
    let requests =
        |farm: &crate::setup::farm::Farm| crate::setup::farm::number(&farm.stats(), "server.requests.LOCK");
    for (options, shared) in [("locks=local", false), ("", true)] {
        let before = requests(&farm);
        let mount = farm.mount("v", options);
        run(sh("exec 9>lock; flock 9; ! flock --nonblock lock true").current_dir(mount.path()));
        assert_eq!(requests(&farm) > before, shared);
        mount.unmount();
    }
}
