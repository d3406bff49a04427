//! Memory of tasks: what recipes took is asked for by the next build, and what fails since its host had too little runs again. The same of room for
//! temporary files.

use std::fs;
use std::process::Command;

use crate::mounting::memory::Group;
use crate::setup::agents::{Agent, Site};
use crate::setup::farm::{HAYLOFT, run};

/// Takes 250 MiB for a while. How many do so at a time is seen in `running`.
const MAKEFILE: &str = "\
all: a b c
a b c:
\t@echo + >> running; python3 -c 'import time; x = bytearray(250 << 20); time.sleep(1.2); print(len(x))' > $@.part && mv $@.part $@; \\
\t  end=$$?; echo - >> running; exit $$end
";

fn most_at_a_time(text: &str) -> i32 {
    let counts = text.lines().scan(0, |now, line| {
        *now += if line == "+" { 1 } else { -1 };
        Some(*now)
    });
    counts.max().unwrap_or(0)
}

fn kernel_kills() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill ")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn what_fails_for_want_of_memory_runs_again_and_the_next_build_asks_for_it() {
    let site = Site::new(1, &["--slots", "4", "--memory", "600M", "--allow-root"]);
    let Some(group) = Group::new("farm", 600) else {
        eprintln!("not tried: no control group with memory can be made here");
        return;
    };
    let agent = site.agents[0].id();
    group.add(agent);
    let children = fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).unwrap();
    children.split_whitespace().for_each(|child| group.add(child.parse().unwrap()));
    let project = site.dir().join("p");
    fs::create_dir(&project).unwrap();
    fs::write(project.join("Makefile"), MAKEFILE).unwrap();
    let make = || {
        let mut make = site.command(&["make", "--summary", "-j4"], &["all"]);
        run(make.current_dir(&project).env_remove("MAKEFLAGS"));
        ["a", "b", "c"].map(|name| fs::read_to_string(project.join(name)).unwrap())
    };
    let before = kernel_kills();
    assert_eq!(make(), ["262144000\n"; 3]);
    assert!(kernel_kills() > before, "there was memory for all of them");
    ["a", "b", "c", "running"].iter().for_each(|name| fs::remove_file(project.join(name)).unwrap());
    assert_eq!(make(), ["262144000\n"; 3]);
    assert_eq!(most_at_a_time(&fs::read_to_string(project.join("running")).unwrap()), 1);
}

#[test]
fn what_fails_for_want_of_room_on_its_host_runs_elsewhere() {
    let site = Site::new(1, &["--slots", "4", "--allow-root"]);
    let mut small = Command::new("unshare");
    let script = "mount -t tmpfs -o size=1M small /tmp && exec \"$@\"";
    small.args(["--mount", "--propagation", "slave", "sh", "-c", script, "sh", HAYLOFT]);
    small.env("HAYLOFT_CONFIG", "/dev/null");
    let args = ["--slots", "4", "--allow-root", "--label", "small"];
    let small = Agent::by(small, &site.broker.url(), "small", site.mounts[1].path(), &args);
    site.wait_for(2);
    let script = "f=$(mktemp -p /tmp) && trap 'rm -f $f' EXIT && head -c 8M /dev/zero > $f && echo made";
    let task = |more: &[&str]| {
        site.command(&[&["task", "--farm"][..], more].concat(), &["sh", "-c", script]).output().unwrap()
    };
    // Where there is none it is the farm that has failed.
    let output = task(&["--label", "small"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("no room for temporary files"), "{said}");
    for _ in 0..8 {
        assert_eq!(String::from_utf8_lossy(&task(&[]).stdout), "made\n");
    }
    // What fails by itself does.
    let own = site.command(&["task", "--farm"], &["sh", "-c", "exit 7"]).status().unwrap();
    assert_eq!(own.code(), Some(7));
    drop(small);
}
