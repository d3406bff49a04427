//! Leaving a mount that is not the only one of its file system, or whose server or client is away.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::mounting::keeper::keeper_of;
use crate::setup::farm::{
    Farm, HAYLOFT, Mount, detach, has_ended, hayloft, kill, rounds, run, seed, sh, wait_until,
};
use crate::setup::model::Random;

/// Longer than any command may take when nobody answers.
const SOME_SECONDS: Duration = Duration::from_secs(20);

/// What a command printed, which must end by itself.
fn within(limit: Duration, command: &mut Command) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + limit;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("not within {limit:?}: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A command that must succeed in time; what it said on standard error.
fn does(command: &mut Command) -> String {
    let output = within(SOME_SECONDS, command);
    assert!(output.status.success(), "{command:?}: {}", said(&output));
    said(&output)
}

/// A command that must fail in time, with one line.
fn refuses(command: &mut Command) -> String {
    let output = within(SOME_SECONDS, command);
    assert!(!output.status.success(), "{command:?} succeeded");
    let said = said(&output);
    assert_eq!(said.trim_end().lines().count(), 1, "more than one line: {said}");
    said
}

fn umount(path: &Path) -> Command {
    let mut command = hayloft(["umount"]);
    command.arg(path);
    command
}

fn bind(from: &Path, to: &Path) {
    run(Command::new("mount").arg("--bind").arg(from).arg(to));
}

/// A process that has a file open. Were it open in the test's own process, programs that other tests start at that moment
/// would have it as well until their exec.
struct User(std::process::Child);

impl User {
    fn of(path: &Path) -> User {
        let child = sh("exec 3< \"$FILE\"; exec sleep 600").env("FILE", path).spawn().unwrap();
        wait_until("it has opened the file", SOME_SECONDS, || {
            fs::read_to_string(format!("/proc/{}/comm", child.id())).is_ok_and(|name| name == "sleep\n")
        });
        User(child)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_mounted(path: &Path) -> bool {
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    info.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

/// A folder and a file beside the mount to bind to.
fn places(farm: &Farm) -> (std::path::PathBuf, std::path::PathBuf) {
    let (dir, file) = (farm.dir().join("bind-dir"), farm.dir().join("bind-file"));
    fs::create_dir_all(&dir).unwrap();
    fs::write(&file, b"").unwrap();
    (dir, file)
}

fn a_bind_is_left(options: &str) {
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", options);
    let (dir, file) = places(&farm);
    fs::create_dir(mount.join("d")).unwrap();
    fs::write(mount.join("d/f"), b"kept").unwrap();
    for helper in [false, true] {
        let name = if options == "syncfs" { "umount.fuseblk.hayloft" } else { "umount.fuse.hayloft" };
        let program = farm.dir().join(name);
        let leave = |path: &Path| {
            let mut command = if helper { Command::new(&program) } else { hayloft(["umount"]) };
            command.arg(path).env("HAYLOFT_CONFIG", "/dev/null");
            command
        };
        if helper {
            symlink(HAYLOFT, &program).unwrap();
        }
        for (from, to) in [("d", &dir), ("d/f", &file)] {
            bind(&mount.join(from), to);
            let said = does(&mut leave(to));
            assert!(said.contains(mount.path().to_str().unwrap()) && said.lines().count() == 1, "{said}");
            assert!(!is_mounted(to) && is_mounted(mount.path()));
            assert_eq!(fs::read(mount.join("d/f")).unwrap(), b"kept");
        }
        // Statistics and sync of a bind are those of its mount.
        bind(&mount.join("d"), &dir);
        assert!(does(hayloft(["stats"]).arg(&dir)).is_empty());
        does(hayloft(["sync"]).arg(&dir));
        // Used elsewhere below the mount: only its own users are in the way of a bind.
        let open = User::of(&mount.join("d/f"));
        does(&mut leave(&dir));
        bind(&mount.join("d"), &dir);
        let inside = User::of(&dir.join("f"));
        let refused = refuses(&mut leave(&dir));
        assert!(refused.contains("in use"), "{refused}");
        does(leave(&dir).arg("-l"));
        drop((open, inside));
    }
    // The original goes first, and then the bind is the last.
    bind(&mount.join("d"), &dir);
    let said = does(&mut umount(mount.path()));
    assert!(said.contains(dir.to_str().unwrap()) && said.lines().count() == 1, "{said}");
    assert!(!has_ended(mount.pid().into()));
    fs::write(dir.join("late"), b"late").unwrap();
    assert_eq!(does(&mut umount(&dir)), "");
    mount.ended();
    let mount = farm.mount("v", "");
    assert_eq!(fs::read(mount.join("d/late")).unwrap(), b"late");
    mount.unmount();
}

#[test]
fn umount_takes_only_the_mount_point_that_was_named() {
    a_bind_is_left("");
}

#[test]
fn umount_takes_only_the_mount_point_that_was_named_with_syncfs() {
    a_bind_is_left("syncfs");
}

#[test]
fn nobody_waits_for_what_another_namespace_or_a_lazy_umount_keeps() {
    let (farm, mount) = Farm::mounted("v");
    let (dir, _) = places(&farm);
    fs::write(mount.join("f"), b"kept").unwrap();
    // A bind that was taken out of the tree, with a user.
    bind(mount.path(), &dir);
    let open = fs::File::open(dir.join("f")).unwrap();
    run(Command::new("umount").arg("-il").arg(&dir));
    let said = does(&mut umount(mount.path()));
    assert!(said.lines().count() == 1 && said.contains("goes on"), "{said}");
    assert!(!has_ended(mount.pid().into()));
    drop(open);
    mount.ended();
    // A copy of the tree of mounts.
    let mount = farm.mount("v", "");
    let mut elsewhere = Command::new("unshare").args(["--mount", "sleep", "600"]).spawn().unwrap();
    wait_until("it has become sleep", SOME_SECONDS, || {
        fs::read_to_string(format!("/proc/{}/comm", elsewhere.id())).is_ok_and(|name| name == "sleep\n")
    });
    let said = does(&mut umount(mount.path()));
    assert!(said.lines().count() == 1 && said.contains("goes on"), "{said}");
    elsewhere.kill().unwrap();
    elsewhere.wait().unwrap();
    mount.ended();
}

#[test]
fn forcing_a_bind_off_leaves_its_mount_alone() {
    let (farm, mount) = Farm::mounted("v");
    let (dir, _) = places(&farm);
    fs::write(mount.join("f"), b"kept").unwrap();
    bind(mount.path(), &dir);
    let open = User::of(&dir.join("f"));
    does(umount(&dir).arg("--force"));
    assert!(!is_mounted(&dir));
    assert_eq!(fs::read(mount.join("f")).unwrap(), b"kept");
    drop(open);
    mount.unmount();
}

/// A mount whose client waits in the kernel for a folder's lock, which a call holds that waits for the server: the
/// server is stopped, and the lease is over.
pub(crate) fn stuck() -> (Farm, Mount, Mount, std::process::Child) {
    let (farm, mut mounts) = Farm::shared_with(2, "", &["--lease", "2"]);
    let (stuck, other) = (mounts.pop().unwrap(), mounts.pop().unwrap());
    fs::create_dir(other.join("dir")).unwrap();
    for at in 0..20 {
        fs::write(other.join(&format!("dir/{at}")), b"x").unwrap();
    }
    run(sh("ls -l dir; cat dir/*").current_dir(stuck.path()));
    farm.signal_server(libc::SIGSTOP);
    let touch = Command::new("touch").arg(stuck.join("dir/new")).spawn().unwrap();
    let waits = |pid: u32| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        tasks.into_iter().any(|task| {
            fs::read_to_string(task.path().join("stack"))
                .is_ok_and(|stack| stack.contains("fuse_reverse_inval"))
        })
    };
    wait_until("a word waits for the folder's lock", SOME_SECONDS, || waits(stuck.pid()));
    (farm, stuck, other, touch)
}

/// The mount is dead, and everything that used it goes on. Nothing of it is left.
pub(crate) fn is_gone(mount: Mount, touch: &mut std::process::Child) {
    wait_until("the caller goes on", SOME_SECONDS, || touch.try_wait().unwrap().is_some());
    let pid = mount.pid();
    wait_until("its process ends", SOME_SECONDS, || has_ended(pid.into()) && threads(pid) <= 1);
    drop(mount);
}

/// Nobody is left who could end the connection: the keeper is killed as well, before it can.
fn kill_both(mount: &Mount) {
    let keeper = keeper_of(mount);
    kill(keeper, libc::SIGSTOP);
    kill(mount.pid(), libc::SIGKILL);
    kill(keeper, libc::SIGKILL);
}

fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

#[test]
fn a_client_that_is_killed_while_the_server_is_away_is_taken_away_by_force() {
    let (farm, mount, _other, mut touch) = stuck();
    kill_both(&mount);
    does(umount(mount.path()).arg("--force"));
    assert!(!is_mounted(mount.path()));
    is_gone(mount, &mut touch);
    farm.signal_server(libc::SIGCONT);
}

#[test]
fn a_client_that_is_killed_while_the_server_is_away_is_replaced_by_a_new_mount() {
    let (farm, mount, _other, mut touch) = stuck();
    kill_both(&mount);
    let refused = refuses(hayloft(["stats"]).arg(mount.path()));
    assert!(refused.contains("umount --force"), "{refused}");
    farm.signal_server(libc::SIGCONT);
    let source = format!("{}/v", farm.address);
    let mut again = hayloft(["mount", &source]);
    does(again.arg(mount.path()).arg("--log-dir").arg(farm.dir().join("logs")));
    assert_eq!(fs::read(mount.join("dir/3")).unwrap(), b"x");
    does(&mut umount(mount.path()));
    is_gone(mount, &mut touch);
}

#[test]
fn commands_answer_while_the_server_is_away_and_force_keeps_what_was_not_sent() {
    let (farm, mounts) = Farm::shared_with(1, "commit=3600", &["--lease", "2"]);
    let mount = &mounts[0];
    fs::write(mount.join("sent"), b"sent").unwrap();
    mount.sync();
    fs::write(mount.join("unsent"), b"kept").unwrap();
    farm.signal_server(libc::SIGSTOP);
    let mut look = sh("exec cat sent").current_dir(mount.path()).stdout(Stdio::null()).spawn().unwrap();
    look.wait().unwrap();
    std::thread::sleep(Duration::from_secs(3));
    let mut waits = Command::new("stat").arg(mount.join("sent")).stdout(Stdio::null()).spawn().unwrap();
    // None of them asks the file system, where everybody waits.
    does(hayloft(["stats"]).arg(mount.path()));
    let refused = refuses(hayloft(["sync", "--timeout", "1"]).arg(mount.path()));
    assert!(refused.contains("to go") || refused.contains("not durable"), "{refused}");
    let refused = refuses(hayloft(["umount", "--timeout", "1"]).arg(mount.path()));
    assert!(refused.contains("--force"), "{refused}");
    assert!(waits.try_wait().unwrap().is_none());
    let refused = refuses(&mut farm.hayloft(["clients", &farm.address]));
    assert!(refused.contains("does not answer"), "{refused}");
    let said = does(umount(mount.path()).arg("--force"));
    let kept = &mount.unsent()[0];
    assert!(said.contains(kept.to_str().unwrap()), "{said}");
    assert_eq!(fs::read(kept.join("files/unsent")).unwrap(), b"kept");
    assert!(fs::read_to_string(kept.join("REPORT")).unwrap().contains("unsent"));
    assert!(!is_mounted(mount.path()) && has_ended(mount.pid().into()));
    wait_until("the caller goes on", SOME_SECONDS, || waits.try_wait().unwrap().is_some());
    farm.signal_server(libc::SIGCONT);
}

#[test]
fn a_stopped_client_is_told_from_one_that_is_gone_and_goes_by_force() {
    let (_farm, mount) = Farm::mounted("v");
    kill(mount.pid(), libc::SIGSTOP);
    let refused = refuses(hayloft(["stats"]).arg(mount.path()));
    assert!(refused.contains("does not answer"), "{refused}");
    let refused = refuses(hayloft(["sync", "--timeout", "1"]).arg(mount.path()));
    assert!(refused.contains("does not answer"), "{refused}");
    does(umount(mount.path()).arg("--force"));
    assert!(!is_mounted(mount.path()));
    let pid = mount.pid();
    wait_until("its process ends", SOME_SECONDS, || has_ended(pid.into()));
}

#[test]
fn a_dead_mount_is_taken_away_whatever_is_above_it() {
    let (farm, mount) = Farm::mounted("v");
    let (dir, _) = places(&farm);
    bind(mount.path(), &dir);
    let open = fs::File::open(dir.join(".")).unwrap();
    kill(mount.pid(), libc::SIGKILL);
    let (at, pid) = (mount.path().to_owned(), mount.pid());
    wait_until("it is dead", SOME_SECONDS, || {
        has_ended(pid.into())
            && fs::metadata(&at).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
    });
    for path in [&dir, mount.path()] {
        does(&mut umount(path));
        assert!(!is_mounted(path));
    }
    drop(open);
}

/// What it asks of its own file system then is asked by another process: whoever waits for himself never ends.
#[test]
fn a_client_that_is_killed_as_soon_as_it_has_mounted_ends() {
    let farm = Farm::new();
    farm.create("v");
    let point = farm.dir().join("killed");
    fs::create_dir(&point).unwrap();
    let device = || fs::metadata(&point).map(|found| found.dev());
    let below = device().unwrap();
    let mut random = Random::new(seed());
    for at in 0..rounds(100, 1000) {
        let what = format!("{}/v", farm.address);
        let mut mount = hayloft(["mount", "--foreground", &what])
            .arg(&point)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("it is mounted", SOME_SECONDS, || {
            (0..40).any(|_| {
                std::thread::sleep(Duration::from_micros(200));
                // It may have no answer yet.
                mounts_of(&point) > 0
            })
        });
        std::thread::sleep(Duration::from_micros(random.below(4000)));
        mount.kill().unwrap();
        let begun = Instant::now();
        while mount.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < SOME_SECONDS, "the client of round {at} does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        detach(&point);
    }
    assert_eq!(device().unwrap(), below);
}

/// How many mounts there are on a folder, as the kernel tells without asking them.
fn mounts_of(point: &Path) -> usize {
    let own = fs::read_to_string("/proc/self/mounts").unwrap();
    own.lines().filter(|line| line.split(' ').nth(1) == point.to_str()).count()
}
