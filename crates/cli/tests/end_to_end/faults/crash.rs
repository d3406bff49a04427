//! kill -9 of the client, of the server, of both, at random moments. After it the tree must be a prefix
//! of what was done to it, at or beyond the last fsync or sync that returned.
//!
//! `HAYLOFT_CRASH_ROUNDS` sets how often (default 6), `HAYLOFT_CRASH_SEED` where it begins.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::setup::farm::{Farm, Mount};
use crate::setup::model::{Op, Random, Tree, find_prefix, read_tree};

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// What a writer has done.
pub(crate) struct History {
    pub ops: Vec<Op>,
    /// So many of them were known to be durable.
    pub durable: usize,
    pub tree: Tree,
}

/// Changes the tree until told to stop, or until the mount is gone.
pub(crate) fn write(top: &Path, start: &Tree, seed: u64, stop: &AtomicBool) -> History {
    let mut random = Random::new(seed);
    let mut history = History { ops: Vec::new(), durable: 0, tree: start.clone() };
    while !stop.load(Ordering::Relaxed) {
        let op = Op::random(&history.tree, &mut random, seed * 1_000_000 + history.ops.len() as u64);
        let outcome = op.perform(top);
        // One that was under way may have happened or not: it is the last of the history either way.
        op.apply(&mut history.tree);
        let sync = op.is_sync();
        history.ops.push(op);
        match outcome {
            Ok(()) if sync => history.durable = history.ops.len(),
            Ok(()) => {}
            Err(error) if is_gone(&error) => break,
            Err(error) => panic!("{error}: {:.100}", format!("{:?}", history.ops.last())),
        }
    }
    history
}

/// What a call says whose mount has lost its process. ECANCELED comes over io_uring, and EINTR, once in 600 kills, when
/// the kernel was handing the request to the process that it killed.
fn is_gone(error: &std::io::Error) -> bool {
    let gone = [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED, libc::EINTR, libc::EIO];
    error.raw_os_error().is_some_and(|errno| gone.contains(&errno))
}

/// Lets a writer run for a while, does something terrible, and gives what the writer has done.
pub(crate) fn disturbed(mount: &Mount, start: &Tree, seed: u64, act: impl FnOnce()) -> History {
    let stop = AtomicBool::new(false);
    let top = mount.path().to_owned();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(&top, start, seed, &stop));
        act();
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    })
}

fn moment(random: &mut Random) -> Duration {
    Duration::from_millis(20 + random.below(1500))
}

/// kill -9 of the process that serves a mount, without taking the mount away.
fn kill_client(mount: &Mount) {
    crate::setup::farm::kill(mount.pid(), libc::SIGKILL);
}

fn rounds(kill_server: bool, kill_mount: bool) {
    let (count, first) = (setting("HAYLOFT_CRASH_ROUNDS", 6), setting("HAYLOFT_CRASH_SEED", 1));
    let mut farm = Farm::new();
    farm.create("v");
    let mut tree = Tree::new();
    for seed in first..first + count {
        let mut random = Random::new(seed ^ 0xdead);
        let mount = farm.mount("v", "commit=0.2");
        let server = &mut farm;
        let history = disturbed(&mount, &tree, seed, || {
            std::thread::sleep(moment(&mut random));
            if kill_server {
                server.kill_server();
            }
            if kill_mount {
                std::thread::sleep(Duration::from_millis(random.below(2) * random.below(300)));
                kill_client(&mount);
            }
        });
        mount.kill();
        if kill_server {
            farm.start_server();
        }
        let mount = farm.mount("v", "");
        let found = read_tree(mount.path());
        let kept = find_prefix(&tree, &history.ops, history.durable, &found);
        eprintln!("seed {seed}: {} changes, {} durable, {kept} kept", history.ops.len(), history.durable);
        mount.unmount();
        tree = found;
    }
    let said = crate::setup::farm::run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}

#[test]
fn a_killed_client_leaves_a_prefix() {
    rounds(false, true);
}

#[test]
fn a_killed_client_and_server_leave_a_prefix() {
    rounds(true, true);
}

#[test]
fn a_killed_server_costs_nothing_but_time() {
    let mut farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "commit=0.2");
    let mut random = Random::new(setting("HAYLOFT_CRASH_SEED", 1));
    let server = &mut farm;
    let history = disturbed(&mount, &Tree::new(), 77, || {
        for _ in 0..setting("HAYLOFT_CRASH_ROUNDS", 6) {
            std::thread::sleep(moment(&mut random));
            server.kill_server();
            std::thread::sleep(Duration::from_millis(random.below(500)));
            server.start_server();
        }
    });
    assert_eq!(read_tree(mount.path()), history.tree);
    mount.unmount();
    let mount = farm.mount("v", "");
    let found = read_tree(mount.path());
    find_prefix(&Tree::new(), &history.ops, history.ops.len(), &found);
}
