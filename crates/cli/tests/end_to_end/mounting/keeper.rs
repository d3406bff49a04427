//! Clients that are stopped or killed: their kernels serve nothing old, and nobody hangs.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::mounting::leaving::{is_gone, stuck};
use crate::setup::farm::{Farm, HAYLOFT, Mount, has_ended, kill, python, run, sh, wait_until};

const PATIENCE: Duration = Duration::from_secs(30);

/// Knows everything of the folder, and looks again when it is told to: each look in a process of its own, which prints
/// what it has seen.
const LOOKS: &str = r#"
import mmap, os, sys
def text(path):
    with open(path) as file: return file.read()
def exists(path):
    try: os.stat(path); return 'there'
    except FileNotFoundError: return 'none'
def mapped(path):
    fd = os.open(path, os.O_RDONLY)
    return mmap.mmap(fd, 8192, prot=mmap.PROT_READ)
fds = {where: os.open(where + '/open', os.O_RDONLY) for where in ('theirs', 'mine')}
maps = {where: mapped(where + '/map') for where in fds}
looks = {}
for at in fds:
    looks[at + ' open'] = lambda at=at: os.pread(fds[at], 3, 0).decode()
    looks[at + ' map'] = lambda at=at: maps[at][4096:4099].decode()
    looks[at + ' size'] = lambda at=at: 'old' if os.fstat(fds[at]).st_size == 3 else 'new'
    looks[at + ' mode'] = lambda at=at: 'old' if os.stat(at + '/mode').st_mode & 0o777 == 0o644 else 'new'
    looks[at + ' absent'] = lambda at=at: 'old' if exists(at + '/absent') == 'none' else 'new'
    looks[at + ' removed'] = lambda at=at: 'old' if exists(at + '/removed') == 'there' else 'new'
    looks[at + ' list'] = lambda at=at: 'old' if 'absent' not in os.listdir(at) else 'new'
    looks[at + ' read'] = lambda at=at: text(at + '/read')
    looks[at + ' link'] = lambda at=at: os.readlink(at + '/link')
    looks[at + ' deep'] = lambda at=at: text(at + '/deep/er/file')
for name, look in looks.items():
    for _ in range(2): assert look() == 'old', name
print('ready', flush=True)
sys.stdin.readline()
for name, look in looks.items():
    if os.fork() == 0:
        try: seen = look()
        except OSError as error: seen = 'error %d' % error.errno
        os.write(1, (name + ': ' + seen + '\n').encode())
        os._exit(0)
for _ in looks: os.wait()
os.write(1, b'over\n')
"#;

/// Looks without a pause, and prints when the last look began that found something old.
const LOOP: &str = r#"
import os, sys, time
fd = os.open('theirs/open', os.O_RDONLY)
print('ready', flush=True)
last = 0
while True:
    begun = time.monotonic_ns()
    try:
        old = os.pread(fd, 3, 0) == b'old'
        old |= os.stat('mine/mode').st_mode & 0o777 == 0o644
        old |= not os.path.lexists('theirs/absent')
    except OSError: break
    if not old and last: break
    if old: last = begun
print(last, flush=True)
"#;

/// What the looks look at, in a folder of each mount.
const MAKE: &str = "for at in open mode removed read; do printf old > $at; done; ln -s old link
    chmod 644 mode; mkdir -p deep/er; printf old > deep/er/file
    head -c 8192 /dev/zero > map; printf old | dd of=map bs=1 seek=4096 conv=notrunc status=none";

const CHANGE: &str =
    "printf newer | dd of=open conv=notrunc status=none; chmod 600 mode; rm removed; printf new > read
    : > absent; ln -s new l; mv l link; printf new | dd of=map bs=1 seek=4096 conv=notrunc status=none
    mv deep/er deep/other; mkdir deep/er; printf new > deep/er/file";

fn started(mut command: Command, dir: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = command.current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    (child, out)
}

fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure lives until the call returns.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// `signal`: to the client, which goes on later if it can.
fn nothing_old_is_served(options: &str, signal: i32) {
    let farm = Farm::with(None, &["--lease", "2"]);
    farm.create("v");
    let (stopped, other) =
        (farm.mount_as("v", "stopped", options, None), farm.mount_as("v", "other", "", None));
    for (mount, name) in [(&stopped, "mine"), (&other, "theirs")] {
        fs::create_dir(mount.join(name)).unwrap();
        run(sh(MAKE).current_dir(mount.join(name)));
    }
    stopped.sync();
    let (mut looks, mut seen) = started(python(LOOKS), stopped.path());
    let (mut busy, mut last) = started(python(LOOP), stopped.path());
    kill(stopped.pid(), signal);
    for name in ["mine", "theirs"] {
        run(sh(CHANGE).current_dir(other.join(name)));
    }
    let changed = monotonic();
    looks.stdin.take().unwrap().write_all(b"\n").unwrap();
    std::thread::sleep(Duration::from_secs(2));
    kill(stopped.pid(), libc::SIGCONT);
    let mut text = String::new();
    seen.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("over\n") && !text.contains(": old"), "{text}");
    assert!(signal != libc::SIGKILL || !text.contains(": new"), "a dead client has answered: {text}");
    looks.wait().unwrap();
    let mut text = String::new();
    last.read_to_string(&mut text).unwrap();
    let last: u64 = text.trim().parse().unwrap();
    assert!(
        last < changed,
        "something old was served {} ms after it had changed",
        (last - changed) / 1_000_000
    );
    busy.wait().unwrap();
}

#[test]
fn a_client_that_is_stopped_for_longer_than_its_lease_serves_nothing_old() {
    nothing_old_is_served("", libc::SIGSTOP);
}

#[test]
fn a_client_that_is_stopped_for_longer_than_its_lease_serves_nothing_old_over_dev_fuse() {
    nothing_old_is_served("transport=dev", libc::SIGSTOP);
}

#[test]
fn a_client_that_is_killed_leaves_nothing_old_to_be_read() {
    nothing_old_is_served("", libc::SIGKILL);
}

#[test]
fn a_client_that_is_stopped_for_less_goes_on() {
    let (_farm, mounts) = Farm::shared_with(2, "", &["--lease", "20"]);
    fs::write(mounts[0].join("file"), b"old").unwrap();
    assert_eq!(fs::read(mounts[1].join("file")).unwrap(), b"old");
    let keeper = keeper_of(&mounts[1]);
    kill(mounts[1].pid(), libc::SIGSTOP);
    std::thread::sleep(Duration::from_secs(2));
    kill(mounts[1].pid(), libc::SIGCONT);
    fs::write(mounts[0].join("file"), b"new").unwrap();
    assert_eq!(fs::read(mounts[1].join("file")).unwrap(), b"new");
    assert_eq!(keeper_of(&mounts[1]), keeper);
}

#[test]
fn a_client_that_is_stopped_goes_on_when_nobody_wanted_what_it_holds() {
    let (_farm, mounts) = Farm::shared_with(1, "commit=3600", &["--lease", "2"]);
    let mount = &mounts[0];
    fs::create_dir(mount.join("dir")).unwrap();
    fs::write(mount.join("dir/file"), b"unsent").unwrap();
    kill(mount.pid(), libc::SIGSTOP);
    let mut look = sh("cat dir/file; test ! -e dir/none")
        .current_dir(mount.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(4));
    kill(mount.pid(), libc::SIGCONT);
    let mut text = String::new();
    look.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(look.wait().unwrap().success() && text == "unsent", "{text}");
    fs::write(mount.join("dir/more"), b"x").unwrap();
    mount.sync();
}

/// The keeper of a mount.
pub(crate) fn keeper_of(mount: &Mount) -> u32 {
    let mut found = None;
    wait_until("a keeper", PATIENCE, || {
        found = keepers(mount.pid()).first().copied();
        found.is_some()
    });
    found.unwrap()
}

fn keepers(client: u32) -> Vec<u32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_keeper = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent =
            stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)).map(str::to_owned);
        stat.contains("(hayloft-keeper)") && parent == Some(client.to_string())
    };
    pids.filter(is_keeper).collect()
}

#[test]
fn a_client_that_is_killed_while_the_server_is_away_hangs_nobody() {
    let (farm, mount, _other, mut touch) = stuck();
    let keeper = keeper_of(&mount);
    kill(mount.pid(), libc::SIGKILL);
    let at = mount.join("dir");
    wait_until("an error instead of waiting", PATIENCE, || {
        fs::metadata(&at).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
    });
    is_gone(mount, &mut touch);
    assert!(has_ended(keeper.into()));
    farm.signal_server(libc::SIGCONT);
}

#[test]
fn a_keeper_that_comes_late_does_not_end_the_mount_that_has_the_number_now() {
    let (_farm, mounts) = Farm::shared(1);
    let mount = &mounts[0];
    let keeper = keeper_of(mount);
    let arguments = fs::read_to_string(format!("/proc/{keeper}/cmdline")).unwrap();
    let arguments: Vec<&str> = arguments.split('\0').collect();
    let [_, name, _, memory, number, ..] = arguments.as_slice() else { panic!("{arguments:?}") };
    // A connection that has ended, and a client that is not its parent.
    let late = format!(
        "exec 8<>/dev/fuse 9<>/proc/{keeper}/fd/{memory}; exec {HAYLOFT} {name} 8 9 {number} {}",
        std::process::id() + 1
    );
    run(&mut sh(&late));
    fs::write(mount.join("file"), b"it goes on").unwrap();
    assert_eq!(fs::read(mount.join("file")).unwrap(), b"it goes on");
}

#[test]
fn a_keeper_goes_with_its_mount_and_is_replaced_when_it_is_killed() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("file"), b"x").unwrap();
    let mut keeper = keeper_of(&mount);
    for _ in 0..3 {
        kill(keeper, libc::SIGKILL);
        // The one that was killed may still be there.
        let mut another = None;
        wait_until("another", PATIENCE, || {
            another = keepers(mount.pid()).into_iter().find(|pid| *pid != keeper);
            another.is_some()
        });
        assert_eq!(fs::read(mount.join("file")).unwrap(), b"x");
        keeper = another.unwrap();
    }
    // What asks a service to end does not end it.
    kill(keeper, libc::SIGTERM);
    kill(keeper, libc::SIGINT);
    assert_eq!(keeper_of(&mount), keeper);
    mount.unmount();
    wait_until("it ends", PATIENCE, || has_ended(keeper.into()));
    // Killed together, in both orders.
    for client_first in [true, false] {
        let mount = farm.mount("v", "");
        let (pid, keeper) = (mount.pid(), keeper_of(&mount));
        let order = if client_first { [pid, keeper] } else { [keeper, pid] };
        order.iter().for_each(|pid| kill(*pid, libc::SIGKILL));
        let at = mount.path().to_owned();
        wait_until("dead", PATIENCE, || {
            fs::metadata(&at).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
        });
        mount.kill();
        wait_until("both have ended", PATIENCE, || has_ended(keeper.into()) && keepers(pid).is_empty());
    }
}
