//! What several hosts rename or move to the same name is claimed by one of them.

use std::fs;

use crate::setup::farm::{Farm, python, rounds, run, sh};

/// Claims jobs by renaming each to the same new name, as build queues do; prints which it has got.
const CLAIMS: &str = r#"
import os, sys
top, way, jobs = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.chdir(top)
for job in range(jobs):
    if way == "files": old, new = f"jobs/{job}", f"jobs/{job}.taken"
    if way == "moved": old, new = f"jobs/{job}", f"taken/{job}"
    if way == "directories": old, new = f"jobs/dir-{job}", f"jobs/dir-{job}.taken"
    if way in ("replaced", "replaced-moved"):
        old, new = f"jobs/{job}", f"jobs/{job}.taken" if way == "replaced" else f"taken/{job}"
        os.stat(new)
    try: os.rename(old, new)
    except FileNotFoundError: continue
    print(job)
"#;

fn claimed_once(way: &str) {
    let (_farm, mounts) = Farm::shared(4);
    let jobs = rounds(150, 3000);
    run(&mut sh(&format!(
        "cd '{}'; mkdir jobs taken; cd jobs; for job in $(seq 0 {}); do {}; done",
        mounts[0].path().display(),
        jobs - 1,
        match way {
            "directories" => "mkdir dir-$job",
            "replaced" => "echo $job > $job; touch $job.taken",
            "replaced-moved" => "echo $job > $job; touch ../taken/$job",
            _ => "echo $job > $job",
        }
    )));
    let start = |at: usize| {
        let mut claims = python(CLAIMS);
        claims.arg(mounts[at % 4].path()).arg(way).arg(jobs.to_string());
        claims.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let workers: Vec<_> = (0..8).map(start).collect();
    let mut claimed: Vec<usize> = Vec::new();
    for worker in workers {
        let output = worker.wait_with_output().unwrap();
        assert!(output.status.success(), "a process has failed, see above");
        let lines = String::from_utf8(output.stdout).unwrap();
        claimed.extend(lines.lines().map(|line| line.parse::<usize>().unwrap()));
    }
    claimed.sort_unstable();
    assert_eq!(claimed, (0..jobs).collect::<Vec<_>>(), "each is claimed once");
    for mount in &mounts {
        let there = run(sh("ls jobs taken | grep -c -e taken$ -e '^[0-9][0-9]*$'").current_dir(mount.path()));
        assert_eq!(there.trim(), jobs.to_string());
    }
}

#[test]
fn what_hosts_rename_one_after_the_other_is_found_by_each() {
    let (_farm, mounts) = Farm::shared(2);
    run(sh("mkdir -p a b a/dir-0 && touch a/file-0 a/dir-0/inner && ln -s dir-0 a/link-0")
        .current_dir(mounts[0].path()));
    for round in 0..rounds(40, 1000) {
        // Each takes it from where the other host has just put it, and goes through the directory that was just moved.
        let mount = &mounts[round % 2];
        let (from, to) = if round % 3 == 0 { ("a", "b") } else { ("a", "a") };
        for kind in ["file", "dir", "link"] {
            let (old, new) = (format!("{from}/{kind}-{round}"), format!("{to}/{kind}-{}", round + 1));
            fs::rename(mount.join(&old), mount.join(&new)).unwrap_or_else(|error| panic!("{old}: {error}"));
        }
        let dir = mounts[(round + 1) % 2].join(&format!("{to}/dir-{}", round + 1));
        fs::rename(dir.join("inner"), dir.join("other")).unwrap();
        fs::rename(dir.join("other"), dir.join("inner")).unwrap();
        for kind in ["file", "dir", "link"].into_iter().filter(|_| to == "b") {
            let name = format!("{kind}-{}", round + 1);
            fs::rename(mount.join(&format!("b/{name}")), mount.join(&format!("a/{name}"))).unwrap();
        }
    }
}

#[test]
fn a_file_that_all_rename_to_the_same_name_is_claimed_by_one() {
    claimed_once("files");
}

#[test]
fn a_file_that_all_move_to_the_same_name_is_claimed_by_one() {
    claimed_once("moved");
}

#[test]
fn a_directory_that_all_rename_to_the_same_name_is_claimed_by_one() {
    claimed_once("directories");
}

/// Whose kernels know what is replaced. (They look at that once more, and then look it up.)
#[test]
fn a_file_that_all_rename_to_a_name_that_is_there_is_claimed_by_one() {
    claimed_once("replaced");
}

#[test]
fn a_file_that_all_move_to_a_name_that_is_there_is_claimed_by_one() {
    claimed_once("replaced-moved");
}
