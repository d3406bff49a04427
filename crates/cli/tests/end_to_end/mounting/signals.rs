//! Signals: calls go on when a program handles them, and end when it is being killed.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::setup::farm::{Farm, Mount, kill, python, rounds, run, sh, wait_until};

/// Does all kinds of calls in a folder, for so many seconds, while a timer sends a signal with a handler (SA_RESTART)
/// every 0.7 ms. Says how many signals there were, and fails when a call does.
const SIGNALLED: &str = r#"
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long signals;
static void handle(int number) { signals++; }
static int failures;
static void check(const char *what, long result) {
    if (result >= 0 || failures++ > 20) return;
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
}
int main(int count, char **args) {
    const char *dir = args[1], *own = args[2];
    char name[600], other[600];
    struct sigaction action = { .sa_handler = handle, .sa_flags = SA_RESTART };
    sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = { { 0, 700 }, { 0, 700 } };
    setitimer(ITIMER_REAL, &timer, NULL);
    time_t end = time(NULL) + atoi(args[3]);
    long at = 0;
    for (; time(NULL) < end; at++) {
        struct stat stat_;
        snprintf(name, sizeof name, "%s/%s-%ld", dir, own, at % 50);
        snprintf(other, sizeof other, "%s/%s-new-%ld", dir, own, at % 50);
        int file = open(name, O_CREAT | O_RDWR | O_TRUNC, 0644);
        check("creat", file);
        check("write", write(file, name, 100));
        check("fdatasync", fdatasync(file));
        check("write", write(file, name, 100));
        check("fsync", fsync(file));
        close(file);
        check("rename", rename(name, other));
        check("mkdir", mkdir(name, 0755));
        check("stat", stat(other, &stat_));
        check("rmdir", rmdir(name));
        check("truncate", truncate(other, 10));
        DIR *open_dir = opendir(dir);
        check("opendir", open_dir ? 0 : -1);
        errno = 0;
        while (open_dir && readdir(open_dir));
        check("readdir", errno ? -1 : 0);
        if (open_dir) closedir(open_dir);
        check("unlink", unlink(other));
    }
    printf("%ld rounds, %ld signals\n", at, signals);
    return failures || signals < 100;
}
"#;

fn compile(farm: &Farm) -> PathBuf {
    let (source, program) = (farm.dir().join("signalled.c"), farm.dir().join("signalled"));
    fs::write(&source, SIGNALLED).unwrap();
    run(Command::new("cc").arg("-O1").arg("-o").arg(&program).arg(&source));
    program
}

#[test]
fn handled_signals_disturb_no_call_even_while_the_server_is_away() {
    let (mut farm, mounts) = Farm::shared_with(2, "commit=0.2", &[]);
    let program = compile(&farm);
    // One works alone in its folder, and two share one, where each change is a request.
    let dirs = ["alone", "shared"].map(|name| mounts[0].join(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let seconds = rounds(8, 60);
    let start = |dir: PathBuf, own: &str| {
        Command::new(&program).arg(dir).args([own, &seconds.to_string()]).spawn().unwrap()
    };
    let mut programs =
        vec![start(dirs[0].clone(), "a"), start(dirs[1].clone(), "b"), start(mounts[1].join("shared"), "c")];
    std::thread::sleep(Duration::from_secs(2));
    farm.signal_server(libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(1500));
    farm.signal_server(libc::SIGCONT);
    std::thread::sleep(Duration::from_secs(1));
    farm.kill_server();
    std::thread::sleep(Duration::from_millis(700));
    farm.start_server();
    for program in &mut programs {
        assert!(program.wait().unwrap().success(), "a call has failed, see above");
    }
}

/// Longer than anybody waits for a killed process.
const PATIENCE: Duration = Duration::from_secs(5);

fn quiet(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

const LOCKS: &str = r#"
import fcntl, sys
file = open(sys.argv[1], "r+b")
print("locks", flush=True)
getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX)
"#;

/// Programs that wait for the server, each in another way.
fn waiting(mount: &Mount, held: &Path) -> Vec<(&'static str, Child)> {
    let path = |name: &str| mount.join(name).display().to_string();
    let locks = |lock: &str| {
        let mut program = python(LOCKS).arg(held).arg(lock).stdout(Stdio::piped()).spawn().unwrap();
        // What starts Python may be a shell, which takes no notice of some signals.
        let mut line = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "locks\n");
        program
    };
    vec![
        ("fsync", quiet(&mut sh(&format!("echo x > {0}; exec sync {0}", path("own"))))),
        ("mkdir", quiet(Command::new("mkdir").arg(path("shared/made")))),
        ("unlink", quiet(Command::new("rm").arg(path("shared/gone")))),
        ("rename", quiet(Command::new("mv").args(["-T", &path("shared/old"), &path("shared/new")]))),
        ("read", quiet(Command::new("cat").arg(path("large")))),
        ("readdir", quiet(Command::new("ls").arg(path("unknown")))),
        ("flock", locks("flock")),
        ("fcntl", locks("lockf")),
    ]
}

/// What a shell starts in the background takes no notice of SIGQUIT, and neither does what that starts.
#[allow(unsafe_code)]
fn hear_sigquit() {
    // SAFETY: the default action needs nothing.
    unsafe { libc::signal(libc::SIGQUIT, libc::SIG_DFL) };
}

#[test]
fn a_killed_program_is_gone_at_once_while_the_server_is_away() {
    hear_sigquit();
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGQUIT] {
        let (farm, mounts) = Farm::shared_with(3, "commit=0.2", &[]);
        let there = &mounts[1];
        fs::write(there.join("large"), crate::setup::farm::noise(3, 8 << 20)).unwrap();
        run(sh("mkdir shared unknown; touch unknown/a shared/gone shared/old held").current_dir(there.path()));
        there.sync();
        // From now on names in `shared` are changed by request.
        for mount in [&mounts[0], there, &mounts[0]] {
            run(sh("touch shared/x$$; cat held; sleep 0.1").current_dir(mount.path()));
        }
        farm.signal_server(libc::SIGSTOP);
        let mut programs = waiting(&mounts[0], &mounts[0].join("held"));
        std::thread::sleep(Duration::from_millis(800));
        for (what, program) in &mut programs {
            assert!(program.try_wait().unwrap().is_none(), "{what} did not wait");
        }
        let begun = Instant::now();
        programs.iter().for_each(|(_, program)| kill(program.id(), signal));
        for (what, program) in &mut programs {
            wait_until(what, PATIENCE, || program.try_wait().unwrap().is_some());
            eprintln!("{what} {:?}", begun.elapsed());
        }
        eprintln!("all are gone {:?} after signal {signal}", begun.elapsed());
        farm.signal_server(libc::SIGCONT);
        // What they had asked for is done or not, on all hosts alike, and nothing stays behind.
        let list = |mount: &Mount| run(sh("find shared | sort").current_dir(mount.path()));
        run(sh("flock held true; mkdir shared/after; rmdir shared/after; sync shared")
            .current_dir(mounts[0].path()));
        wait_until("hosts agree", PATIENCE, || {
            list(&mounts[0]) == list(&mounts[2]) && list(&mounts[0]) == list(there)
        });
        run(sh("rm -r shared/* unknown; mkdir shared/made; touch shared/gone").current_dir(mounts[0].path()));
        assert_eq!(list(there), list(&mounts[2]));
    }
}
