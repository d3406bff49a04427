//! Tasks while agents, brokers and submitters are killed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::setup::agents::Site;
use crate::setup::farm::{Farm, kill, run, tree, wait_until};

const ALLOWED: [&str; 3] = ["--slots", "4", "--allow-root"];

/// Says in a file that it runs, for some seconds; then that it is done. Two at a time are seen by the lock.
const WORK: &str =
    "exec 9> lock; flock -n 9 || echo TWICE >> log; echo run >> log; sleep 3; echo done >> log; echo out";

fn log(dir: &Path) -> Vec<String> {
    fs::read_to_string(dir.join("log")).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn wait_for_runs(site: &Site, count: usize) {
    wait_until("it runs", Duration::from_secs(60), || {
        log(site.dir()).iter().filter(|line| *line == "run").count() == count
    });
}

#[test]
fn a_task_whose_agent_is_killed_runs_again_elsewhere_never_twice_at_a_time() {
    let mut site = Site::new(2, &ALLOWED);
    // The other one gives slots: it is older. Then the one that does is killed as well.
    for round in 1..=2 {
        let first = site.task(WORK).stdout(Stdio::piped()).spawn().unwrap();
        wait_for_runs(&site, if round == 1 { 1 } else { 3 });
        let hosts = site.status()["hosts"].as_array().unwrap().clone();
        let busy = hosts.iter().find(|host| host["busy"] == 1).expect("a host with a task");
        let at = busy["host"].as_str().unwrap()[1..].parse::<usize>().unwrap();
        let index = if round == 1 { at - 1 } else { site.agents.len() - 1 };
        site.agents.remove(index).kill();
        if round == 2 {
            site.add(1, &ALLOWED);
        }
        let output = first.wait_with_output().unwrap();
        assert!(output.status.success());
        assert_eq!(output.stdout, b"out\n");
        if round == 1 {
            site.agents.drain(..).for_each(crate::setup::agents::Agent::stop);
            site.add(1, &ALLOWED);
        }
    }
    assert_eq!(log(site.dir()), ["run", "run", "done", "run", "run", "done"]);
}

#[test]
fn a_task_whose_agent_is_stopped_runs_elsewhere_at_once() {
    let mut site = Site::new(2, &ALLOWED);
    let task = site.task(WORK).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_runs(&site, 1);
    let hosts = site.status()["hosts"].as_array().unwrap().clone();
    let busy = hosts.iter().find(|host| host["busy"] == 1).expect("a host with a task");
    let at = busy["host"].as_str().unwrap()[1..].parse::<usize>().unwrap();
    site.agents.remove(at - 1).stop();
    let output = task.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"out\n"[..]));
    assert_eq!(log(site.dir()), ["run", "run", "done"]);
}

#[test]
fn an_agent_that_has_time_to_go_finishes_what_it_runs_and_takes_nothing_new() {
    let args = ["--slots", "4", "--allow-root", "--grace", "60"];
    let mut site = Site::new(2, &args);
    let task = site.task(WORK).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_runs(&site, 1);
    let hosts = site.status()["hosts"].as_array().unwrap().clone();
    let busy = hosts.iter().position(|host| host["busy"] == 1).expect("a host with a task");
    let at = hosts[busy]["host"].as_str().unwrap()[1..].parse::<usize>().unwrap();
    let agent = site.agents.remove(at - 1);
    kill(agent.id(), libc::SIGTERM);
    let is_ending = |host: &serde_json::Value| host["draining"] == true;
    wait_until("it is known to go", Duration::from_secs(60), || {
        site.status()["hosts"].as_array().unwrap().iter().any(is_ending)
    });
    run(&mut site.task("true"));
    let output = task.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"out\n"[..]));
    assert_eq!(log(site.dir()), ["run", "done"]);
    wait_until("it has gone", Duration::from_secs(60), || {
        site.status()["hosts"].as_array().unwrap().len() == 1
    });
    drop(agent);
}

#[test]
fn what_ends_by_a_signal_to_all_of_a_job_runs_elsewhere() {
    let mut site = Site::new(2, &["--slots", "4", "--allow-root", "--grace", "60"]);
    let task = site.task(&WORK.replace("sleep 3", "sleep 3.217")).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_runs(&site, 1);
    let hosts = site.status()["hosts"].as_array().unwrap().clone();
    let busy = hosts.iter().find(|host| host["busy"] == 1).expect("a host with a task");
    let at = busy["host"].as_str().unwrap()[1..].parse::<usize>().unwrap();
    let agent = site.agents.remove(at - 1);
    // As a batch system does: each process of the job, in any order.
    let inner = Command::new("pgrep").args(["-f", "^sleep 3.217$"]).output().unwrap();
    let inner = String::from_utf8(inner.stdout).unwrap();
    for pid in inner.split_whitespace() {
        kill(pid.parse().unwrap(), libc::SIGTERM);
    }
    agent.stop();
    let output = task.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"out\n"[..]));
    let log = log(site.dir());
    assert_eq!((log.first().unwrap().as_str(), log.last().unwrap().as_str()), ("run", "done"), "{log:?}");
}

#[test]
fn tasks_of_an_agent_that_hangs_end_and_then_nothing_is_busy() {
    let site = Site::new(1, &ALLOWED);
    let mut task = site.task("echo $$ > begun; exec sleep 6789").stderr(Stdio::null()).spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.dir().join("begun").exists());
    let agent = site.agents[0].id();
    let children = fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).unwrap();
    let is_spawner = |pid: &&str| {
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("farm-spawner"))
    };
    let spawner = children.split(' ').find(is_spawner).expect("a process that starts tasks");
    kill(agent, libc::SIGSTOP);
    wait_until("the task has ended", Duration::from_secs(60), || {
        !Command::new("pgrep").args(["-f", "^sleep 6789$"]).stdout(Stdio::null()).status().unwrap().success()
    });
    // One that looks again and again is never found asleep.
    wait_until("what starts tasks rests", Duration::from_secs(60), || {
        let stat = fs::read_to_string(format!("/proc/{spawner}/stat")).unwrap();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
    });
    kill(agent, libc::SIGCONT);
    task.kill().unwrap();
    task.wait().unwrap();
}

#[test]
fn an_agent_goes_on_beside_a_mount_whose_server_does_not_answer() {
    let (other, unrelated) = Farm::mounted("other");
    let mount = unrelated.path().to_str().unwrap();
    let mut site = Site::new(1, &["--slots", "4", "--allow-root", "--mount", mount]);
    other.signal_server(libc::SIGSTOP);
    // Longer than the lease, and than it takes until mounts are looked at anew.
    let mut task = site.task("sleep 9; echo out").stdout(Stdio::piped()).spawn().unwrap();
    wait_until("it has ended", Duration::from_secs(60), || task.try_wait().unwrap().is_some());
    let output = task.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"out\n"[..]));
    assert_eq!(run(&mut site.task("echo next")), "next\n");
    // One that begins now as well, and it ends when it is told to.
    site.agents.remove(0).stop();
    site.add(1, &["--slots", "4", "--allow-root", "--mount", mount]);
    assert_eq!(run(&mut site.task("echo new")), "new\n");
    site.agents.remove(0).stop();
    other.signal_server(libc::SIGCONT);
}

#[test]
fn a_task_of_a_host_that_stands_still_does_not_write_when_that_goes_on() {
    let site = Site::new(2, &ALLOWED);
    let script = "if mkdir first 2> /dev/null; then echo begun > begun; while :; do echo old > out; sleep 0.01; done; \
                  else echo new > out; fi";
    let mut task = site.task(script).spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.dir().join("out").exists());
    let hosts = site.status()["hosts"].as_array().unwrap().clone();
    let busy = hosts.iter().find(|host| host["busy"] == 1).expect("a host with a task");
    let at = busy["host"].as_str().unwrap()[1..].parse::<usize>().unwrap();
    // The mount is the first that goes on, then the task, and only then what would end that.
    let agent = tree(site.agents[at - 1].id());
    let stopped: Vec<u32> = agent.into_iter().chain(tree(site.mounts[at].pid())).rev().collect();
    for pid in &stopped {
        // SAFETY: plain numbers. The script's sleeps come and go.
        unsafe { libc::kill(*pid as i32, libc::SIGSTOP) };
    }
    wait_until("it has ended elsewhere", Duration::from_secs(120), || task.try_wait().unwrap().is_some());
    assert!(task.wait().unwrap().success());
    assert_eq!(fs::read_to_string(site.dir().join("out")).unwrap(), "new\n");
    for pid in stopped {
        // SAFETY: plain numbers. Some of them are gone by now.
        unsafe { libc::kill(pid as i32, libc::SIGCONT) };
        std::thread::sleep(Duration::from_millis(300));
    }
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(fs::read_to_string(site.dir().join("out")).unwrap(), "new\n");
}

#[test]
fn tasks_of_a_submitter_that_is_killed_end() {
    let site = Site::new(1, &ALLOWED);
    let mut task = site.task("sleep 5; echo late > late").spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.status()["hosts"][0]["busy"] == 1);
    task.kill().unwrap();
    task.wait().unwrap();
    wait_until("its slot is free", Duration::from_secs(60), || site.status()["hosts"][0]["busy"] == 0);
    std::thread::sleep(Duration::from_secs(2));
    assert!(!site.dir().join("late").exists());
}

/// Long before its lease is over: the broker knows that nobody is there.
#[test]
fn tasks_of_a_make_that_is_killed_end_when_the_broker_has_missed_it() {
    let site = Site::new(1, &[&ALLOWED[..], &["--lease", "40"]].concat());
    std::fs::write(site.dir().join("Makefile"), "all:\n\techo > begun; sleep 15; echo > late\n").unwrap();
    let mut make = site.command(&["make", "-j2"], &[]);
    let mut make = make.stderr(Stdio::null()).spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.dir().join("begun").exists());
    make.kill().unwrap();
    make.wait().unwrap();
    wait_until("its slot is free", Duration::from_secs(60), || site.status()["hosts"][0]["busy"] == 0);
    assert!(!site.dir().join("late").exists());
}

#[test]
fn a_broker_that_is_killed_and_started_again_costs_nothing() {
    let mut site = Site::new(2, &ALLOWED);
    let task = site.task(WORK).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_runs(&site, 1);
    site.broker.kill();
    std::thread::sleep(Duration::from_millis(500));
    site.broker.start();
    let output = task.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"out\n"[..]));
    let log = log(site.dir());
    assert!(!log.contains(&"TWICE".to_owned()) && log.iter().any(|line| line == "done"), "{log:?}");
}

#[test]
fn when_the_agent_that_gives_slots_is_killed_another_one_does() {
    let mut site = Site::new(2, &ALLOWED);
    let hosts = site.status()["hosts"].as_array().unwrap().clone();
    let dispatches = hosts.iter().find(|host| host["dispatches"] == true).expect("one gives slots");
    let at = dispatches["host"].as_str().unwrap()[1..].parse::<usize>().unwrap();
    site.agents.remove(at - 1).kill();
    assert_eq!(run(&mut site.task("echo again")), "again\n");
}

/// The processes that submit for tasks at this broker.
fn relays(site: &Site) -> Vec<u32> {
    let url: String = site.broker.url().bytes().map(|byte| format!("{byte:02x}")).collect();
    let is_one = |pid: &u32| {
        let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        read("cmdline").ends_with(b"farm-relay\0") && String::from_utf8_lossy(&read("environ")).contains(&url)
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_one).collect()
}

#[test]
fn tasks_of_a_build_have_one_submitter_and_fail_with_the_farm_when_it_is_killed() {
    let site = Site::new(1, &ALLOWED);
    let tasks: Vec<_> = (0..4).map(|_| site.task("sleep 1").spawn().unwrap()).collect();
    for mut task in tasks {
        assert!(task.wait().unwrap().success());
    }
    let before = relays(&site);
    assert_eq!(before.len(), 1);
    assert!(site.task("exit 0").status().unwrap().success());
    assert_eq!(relays(&site), before);
    let other = site.command(&["task", "--farm", "--build", "other"], &["true"]).status().unwrap();
    assert!(other.success());
    assert_eq!(relays(&site).len(), 2);
    let task = site.task("echo > begun; sleep 30; echo > late").stderr(Stdio::piped()).spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.dir().join("begun").exists());
    crate::setup::farm::kill(before[0], libc::SIGKILL);
    let output = task.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("the farm has failed"), "{output:?}");
    // Nobody is there to hear how it ends: its host ends it.
    assert!(site.task("exit 0").status().unwrap().success());
    wait_until("its slot is free", Duration::from_secs(60), || site.status()["hosts"][0]["busy"] == 0);
    assert!(!site.dir().join("late").exists());
    wait_until("they end by themselves", Duration::from_secs(60), || relays(&site).is_empty());
}
