//! Many roots in a row, and roots whose processes are killed: nothing stays.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::setup::farm::{kill, run, wait_until};
use crate::setup::root_box::{RootBox, processes, wait_no_process};

fn our_groups() -> BTreeSet<PathBuf> {
    // Of all controllers that roots use, below every group there is; other tests' come and go.
    let found = run(crate::setup::farm::sh("find /sys/fs/cgroup -name 'hayloft-*' 2>/dev/null || true")
        .stderr(std::process::Stdio::null()));
    found.lines().map(PathBuf::from).collect()
}

#[test]
fn a_hundred_roots_leave_nothing() {
    let roots = RootBox::new();
    let mut seen = Vec::new();
    for at in 0..100 {
        let script = format!("sleep 4715.{at} & echo {at} >/file; echo {at}");
        assert_eq!(run(&mut roots.run(["--memory", "64M"], &script)), format!("{at}\n"));
        if at % 10 == 0 {
            run(&mut roots.run(["--keep", "--name", "kept"], "true"));
            seen.extend(roots.groups());
            run(&mut roots.hayloft(["root", "rm", "kept"]));
        }
    }
    assert!(!seen.is_empty());
    assert_eq!(processes("sleep\x004715."), 0);
    assert_eq!(roots.leftovers(&seen), [""; 0]);
}

#[test]
fn what_was_killed_is_cleaned_up_by_the_next_start() {
    let roots = RootBox::new();
    let mut seen = Vec::new();
    for at in 0..20u64 {
        let flags = ["--name", "killed", "--memory", "64M", "--spill", "64M"];
        let mut child = roots.run(flags, "sleep 4716.1").spawn().unwrap();
        // From before its state is written to after its command has started.
        std::thread::sleep(Duration::from_millis(at * 4));
        seen.extend(roots.groups());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    wait_no_process("4716.1");
    run(&mut roots.run([], "true"));
    assert!(!seen.is_empty());
    assert_eq!(roots.leftovers(&seen), [""; 0]);
}

fn compressed_devices() -> BTreeSet<PathBuf> {
    let all = std::fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path());
    all.filter(|device| device.file_name().unwrap().to_string_lossy().starts_with("zram")).collect()
}

#[test]
fn a_root_that_is_killed_while_it_makes_compressed_memory_leaves_no_device() {
    if !std::path::Path::new("/sys/class/zram-control").exists() {
        return eprintln!("skipped: this kernel has no zram");
    }
    let roots = RootBox::new();
    let before = compressed_devices();
    for _ in 0..30 {
        // What the last one has left goes first.
        run(&mut roots.run([], "true"));
        let there = compressed_devices();
        let mut child =
            roots.run(["--memory", "64M", "--spill", "zram:64M"], "sleep 4726.1").spawn().unwrap();
        // It is there a moment before its number is known to who made it.
        while compressed_devices().is_subset(&there) && child.try_wait().unwrap().is_none() {}
        child.kill().unwrap();
        child.wait().unwrap();
    }
    wait_no_process("4726.1");
    run(&mut roots.run([], "true"));
    // Other tests' devices come and go.
    let left = compressed_devices();
    let is_there = |device: &PathBuf| compressed_devices().contains(device);
    wait_until("only what was there before is left", Duration::from_secs(60), || {
        left.difference(&before).all(|device| !is_there(device))
    });
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn when_the_first_process_is_killed_the_command_dies_and_the_caller_says_so() {
    let roots = RootBox::new();
    let mut started = roots.start(["--name", "r"], "sleep 4717.1");
    let pid = roots.show("r")["pid"].as_u64().unwrap();
    kill(pid as u32, libc::SIGKILL);
    assert_eq!(started.child.wait().unwrap().code(), Some(125));
    wait_no_process("4717.1");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn a_kept_root_outlives_its_caller_and_dies_with_its_holder() {
    let roots = RootBox::new();
    run(&mut roots.run(["--keep", "--name", "k"], "echo x >/x"));
    let groups = roots.groups();
    let pid = roots.show("k")["pid"].as_u64().unwrap();
    kill(pid as u32, libc::SIGKILL);
    wait_until("the root is dead", Duration::from_secs(10), || roots.list().is_empty());
    run(&mut roots.run([], "true"));
    assert_eq!(roots.leftovers(&groups), [""; 0]);
}

#[test]
fn sweeping_leaves_what_is_alive_or_not_ours() {
    let roots = RootBox::new();
    let alive = roots.start(["--name", "alive", "--memory", "64M", "--spill", "64M"], "sleep 4718.1");
    let strange = roots.state().join("strange");
    std::fs::create_dir_all(&strange).unwrap();
    std::fs::write(strange.join("file"), "somebody's").unwrap();
    run(&mut roots.run([], "true"));
    assert!(strange.join("file").exists());
    assert_eq!(roots.list().len(), 1);
    let groups = roots.groups();
    assert!(!groups.is_empty() && groups.iter().all(|group| group.exists() && our_groups().contains(group)));
    run(&mut roots.hayloft(["root", "enter", "alive", "--", "true"]));
    drop(alive);
    std::fs::remove_dir_all(&strange).unwrap();
}

#[test]
fn a_kept_root_holds_nothing_of_its_caller() {
    let roots = RootBox::new();
    // The shell's pipe ends when every holder of its other end has gone, a descriptor of no meaning to us included.
    let script = format!(
        "exec 9>&1; {} run --keep --name k -- true 2>/dev/null; echo done",
        crate::setup::farm::HAYLOFT
    );
    let mut command = crate::setup::farm::sh(&script);
    command.current_dir("/");
    command.env("HAYLOFT_STATE_DIR", roots.state()).env("HAYLOFT_CONFIG", "/dev/null");
    assert_eq!(run(&mut command), "done\n");
    assert_eq!(roots.list().len(), 1);
}

#[test]
fn twenty_roots_start_at_once() {
    let roots = RootBox::new();
    let flags = ["--memory", "32M", "--spill", "32M", "--require-free", "64M"];
    let all: Vec<_> = (0..20).map(|_| roots.run(flags, "echo x >/x; sleep 0.2").spawn().unwrap()).collect();
    for mut child in all {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}
