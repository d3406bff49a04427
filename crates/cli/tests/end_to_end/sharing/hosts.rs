//! Hosts on a network that fails: each mount in a network namespace of its own.

use std::fs;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::faults::server_loss::write_program;
use crate::setup::farm::{Farm, Mount, number, run, sh, wait_until};
use crate::setup::model::Random;
use crate::setup::net::{Net, SERVER};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(240);

/// A server on its host and one mount on each other.
pub(crate) fn network(hosts: usize, lease: &str, options: &str) -> (Net, Farm, Vec<Mount>) {
    let net = Net::new(hosts);
    let farm = Farm::at(Some(&net.server()), &format!("{SERVER}:7440"), None, &["--lease", lease]);
    farm.create("v");
    let mount = |at| farm.mount_as("v", &format!("mnt-{at}"), options, Some(&net.host(at)));
    let mounts = (0..hosts).map(mount).collect();
    (net, farm, mounts)
}

/// The shell enters the folder itself: that may block, and starting a process waits for what comes before its exec.
fn start(script: &str, dir: &std::path::Path) -> Child {
    let script = format!("cd '{}' && {{ {script}; }}", dir.display());
    sh(&script).stdout(Stdio::null()).spawn().unwrap()
}

fn is_over(child: &mut Child) -> bool {
    child.try_wait().unwrap().is_some()
}

/// Builds a program of 60 sources again and again, and keeps the last.
const BUILDS: &str =
    "for round in 1 2 3; do make -s -j2; test $(./prog) = 1770; make -s clean; done; make -s -j2";

fn builds(mounts: &[Mount]) -> Vec<Child> {
    let build = |(at, mount): (usize, &Mount)| {
        let dir = mount.join(&format!("build-{at}"));
        fs::create_dir(&dir).unwrap();
        write_program(&dir);
        start(BUILDS, &dir)
    };
    mounts.iter().enumerate().map(build).collect()
}

/// Until it is in the middle of it.
fn compiles(mount: &Mount, at: usize) {
    let dir = mount.join(&format!("build-{at}"));
    let has_object = || {
        fs::read_dir(&dir)
            .unwrap()
            .any(|entry| entry.unwrap().path().extension().is_some_and(|found| found == "o"))
    };
    wait_until("the first object", PATIENCE, has_object);
}

fn all_is_built(mounts: &[Mount]) {
    for mount in mounts {
        for at in 0..mounts.len() {
            let dir = mount.join(&format!("build-{at}"));
            assert_eq!(run(sh("./prog; make -s").current_dir(dir)), "1770\n");
        }
    }
}

#[test]
fn a_host_that_returns_within_its_lease_goes_on_building() {
    let (net, _farm, mounts) = network(3, "60", "commit=0.2");
    let mut builds = builds(&mounts);
    compiles(&mounts[2], 2);
    for _ in 0..3 {
        net.cut(2);
        std::thread::sleep(Duration::from_millis(1500));
        net.join(2);
        std::thread::sleep(Duration::from_millis(500));
    }
    for build in &mut builds {
        assert!(build.wait().unwrap().success());
    }
    all_is_built(&mounts);
    assert!(mounts.iter().all(|mount| mount.unsent().is_empty()));
}

#[test]
fn a_host_that_gets_another_address_keeps_its_session() {
    let (net, _farm, mounts) = network(2, "20", "commit=3600");
    fs::create_dir(mounts[1].join("dir")).unwrap();
    mounts[1].sync();
    fs::write(mounts[1].join("dir/unsent"), b"here").unwrap();
    net.readdress(1);
    let seen = fs::read_to_string(mounts[0].join("dir/unsent")).unwrap_or_default();
    assert_eq!(seen, "here", "it has connected again before the lease was over: {}", mounts[1].log());
    assert_eq!(number(&mounts[1].stats(), "server.sessions_replaced"), 0);
    assert!(mounts[1].unsent().is_empty());
}

#[test]
fn a_host_that_is_cut_off_blocks_while_the_others_go_on_and_tells_what_it_could_not_send() {
    let (net, _farm, mounts) = network(3, "2", "commit=3600");
    let (lost, others) = (&mounts[2], &mounts[..2]);
    fs::create_dir(lost.join("dir")).unwrap();
    fs::write(lost.join("dir/sent"), b"sent").unwrap();
    lost.sync();
    fs::write(lost.join("dir/unsent"), b"never").unwrap();
    let mut builds = builds(others);
    compiles(&mounts[0], 0);
    net.cut(2);
    // Nobody needs what it holds: the others are not even delayed, and it may say nothing for ever.
    for build in &mut builds {
        assert!(build.wait().unwrap().success());
    }
    // Now somebody does. They get it when the lease has run out, as the server knows it.
    assert_eq!(fs::read(mounts[0].join("dir/sent")).unwrap(), b"sent");
    assert!(!mounts[1].join("dir/unsent").exists());
    fs::write(mounts[1].join("dir/unsent"), b"mine").unwrap();
    // There it is not known what has become of it: no answer is better than an old one.
    let mut looks = [
        start("cat dir/unsent", lost.path()),
        start("ls dir", lost.path()),
        start("touch dir/new", lost.path()),
    ];
    std::thread::sleep(Duration::from_secs(3));
    assert!(looks.iter_mut().all(|look| !is_over(look)), "it answers from a cache that nobody keeps true");
    net.join(2);
    wait_until("they are told", PATIENCE, || looks.iter_mut().all(is_over));
    wait_until("a report", PATIENCE, || lost.unsent().iter().any(|kept| kept.join("REPORT").exists()));
    let kept = &lost.unsent()[0];
    let report = fs::read_to_string(kept.join("REPORT")).unwrap();
    assert!(report.contains("dir/unsent") && !report.contains("dir/sent"), "{report}");
    assert_eq!(fs::read(kept.join("files/dir/unsent")).unwrap(), b"never");
    wait_until("a line in the log", PATIENCE, || lost.log().contains(kept.to_str().unwrap()));
    // It goes on with another session, and all see the same.
    assert!(looks.iter_mut().all(|look| look.wait().unwrap().success()), "they had nothing at stake");
    fs::write(mounts[2].join("dir/back"), b"back").unwrap();
    for mount in &mounts {
        assert_eq!(run(sh("cat dir/back dir/sent dir/unsent").current_dir(mount.path())), "backsentmine");
    }
    let listings: Vec<String> =
        mounts.iter().map(|mount| run(sh("ls -il dir").current_dir(mount.path()))).collect();
    assert!(listings.iter().all(|listing| *listing == listings[0]), "{listings:?}");
}

#[test]
fn a_host_that_is_stuck_in_sending_stops_answering_too() {
    let (farm, mounts) = Farm::shared_with(2, "commit=3600", &["--lease", "2"]);
    let mount = &mounts[1];
    fs::create_dir(mount.join("dir")).unwrap();
    fs::write(mount.join("dir/file"), b"known").unwrap();
    mount.sync();
    // More than what is on its way takes.
    fs::write(mount.join("dir/large"), Random::new(7).bytes(64 << 20)).unwrap();
    farm.signal_server(libc::SIGSTOP);
    let mut sync = start("sync -d large", &mount.join("dir"));
    std::thread::sleep(Duration::from_secs(3));
    let mut look = start("cat dir/file", mount.path());
    std::thread::sleep(Duration::from_secs(2));
    let answered = is_over(&mut look);
    farm.signal_server(libc::SIGCONT);
    assert!(!answered, "nobody keeps true any more what it answers with");
    wait_until("it goes on", PATIENCE, || is_over(&mut look) && is_over(&mut sync));
    assert!(look.wait().unwrap().success() && sync.wait().unwrap().success());
}

/// A thread of a process that stands still, while all others of it go on.
struct Stopped(libc::pid_t);

impl Stopped {
    fn new(pid: u32, name: &str) -> Stopped {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|task| task.unwrap());
        let is_named = |task: &fs::DirEntry| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        let task = tasks.into_iter().find(is_named).expect("such a thread");
        let tid: libc::pid_t = task.file_name().to_str().unwrap().parse().unwrap();
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: plain numbers; the status is written to a place that lives until the call returns.
        unsafe {
            assert_eq!(libc::ptrace(libc::PTRACE_SEIZE, tid, none, none), 0);
            assert_eq!(libc::ptrace(libc::PTRACE_INTERRUPT, tid, none, none), 0);
            let mut status = 0;
            assert_eq!(libc::waitpid(tid, &raw mut status, libc::__WALL), tid);
        }
        Stopped(tid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: plain numbers; it is gone, or stopped by this thread.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, none, none) };
    }
}

#[test]
fn a_host_that_is_heard_but_gives_nothing_back_is_ended_and_shows_nothing_old() {
    let (farm, mounts) = Farm::shared_with(2, "commit=3600", &["--lease", "2"]);
    let (stuck, other) = (&mounts[0], &mounts[1]);
    fs::create_dir(stuck.join("dir")).unwrap();
    fs::write(stuck.join("dir/file"), b"old").unwrap();
    stuck.sync();
    fs::write(stuck.join("dir/unsent"), b"never").unwrap();
    // It goes on saying that it is alive.
    let stopped = Stopped::new(stuck.pid(), "hayloft-recall");
    let mut look = start("ls > /dev/null && echo new > file", &other.join("dir"));
    wait_until("the other goes on", Duration::from_secs(60), || is_over(&mut look));
    assert!(look.wait().unwrap().success());
    let clients = farm.clients("v");
    assert!(clients.iter().all(|client| client["silent_ms"].as_u64() < Some(2000)), "{clients:?}");
    let found = sh("timeout 3 cat dir/file || true").current_dir(stuck.path()).output().unwrap().stdout;
    assert!(found != b"old", "what others have changed since is shown");
    drop(stopped);
    // The session that takes its place brings what was not sent, if nobody has changed the directory before.
    let brought = other.join("dir/unsent");
    let is_kept = || stuck.unsent().iter().any(|kept| kept.join("REPORT").exists());
    wait_until("it is brought, or reported", Duration::from_secs(60), || is_kept() || brought.exists());
    let unsent = if brought.exists() { brought } else { stuck.unsent()[0].join("files/dir/unsent") };
    assert_eq!(fs::read(unsent).unwrap(), b"never");
    assert_eq!(fs::read_to_string(other.join("dir/file")).unwrap(), "new\n");
}

#[test]
fn two_hosts_that_were_cut_off_from_each_others_directories_agree_afterwards() {
    let (net, _farm, mounts) = network(2, "60", "commit=0.2");
    fs::create_dir(mounts[0].join("dir")).unwrap();
    // Both write into one directory, and lose their networks in turn.
    let write = "for at in $(seq 150); do echo $at > $NAME-$at; mv $NAME-$at $NAME.$at; done";
    let mut writers: Vec<Child> = (0..2)
        .map(|at| {
            sh(write).env("NAME", format!("host{at}")).current_dir(mounts[at].join("dir")).spawn().unwrap()
        })
        .collect();
    let mut turn = 0;
    while writers.iter_mut().any(|writer| !is_over(writer)) {
        net.cut(turn % 2);
        std::thread::sleep(Duration::from_millis(700));
        net.join(turn % 2);
        std::thread::sleep(Duration::from_millis(700));
        turn += 1;
    }
    for writer in &mut writers {
        assert!(writer.wait().unwrap().success());
    }
    for mount in &mounts {
        for host in 0..2 {
            for at in 1..=150 {
                let text = fs::read_to_string(mount.join(&format!("dir/host{host}.{at}"))).unwrap();
                assert_eq!(text, format!("{at}\n"));
            }
        }
        assert_eq!(fs::read_dir(mount.join("dir")).unwrap().count(), 300);
    }
}
