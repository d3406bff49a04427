//! Locks between processes of one host.

use std::fs::File;

use crate::farm::{Place, run, sh};

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
# Closing any descriptor of the file lets go of the process's locks.
open(path, "rb").close()
assert other(0, 100)
"#;
    run(std::process::Command::new("python3").args(["-c", script]).arg(place.path()));
}
