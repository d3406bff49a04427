//! `hayloft try`: it does what it says and leaves nothing behind, however it ends.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::setup::farm::{hayloft, kill, run, sh, wait_until};

/// `hayloft try` in `dir`, with its temporary files there as well.
fn trial(dir: &Path, args: &[&str]) -> Command {
    let temporary = dir.join("tmp");
    fs::create_dir_all(&temporary).unwrap();
    fs::create_dir_all(dir.join("source")).unwrap();
    let mut command = hayloft(["try"]);
    command.args(args).current_dir(dir.join("source")).env("TMPDIR", temporary);
    command
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("hayloft-e2e-").tempdir_in("/var/tmp").unwrap()
}

/// No folder, no mount, no process.
fn assert_nothing_left(dir: &Path) {
    assert_eq!(fs::read_dir(dir.join("tmp")).unwrap().count(), 0);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
    let left = processes(dir);
    assert!(left.is_empty(), "{left:?}");
}

/// Processes that name a temporary folder of the trial in their command line.
fn processes(dir: &Path) -> Vec<String> {
    let search = format!("grep -lz '{}/tmp' /proc/[0-9]*/cmdline 2>/dev/null || true", dir.display());
    let ours = format!("/proc/{}/cmdline", std::process::id());
    run(&mut sh(&search)).lines().filter(|line| *line != ours && !is_shell(line)).map(str::to_owned).collect()
}

/// The search itself, and what has ended since.
fn is_shell(cmdline: &str) -> bool {
    let text = fs::read(cmdline).unwrap_or_default();
    text.is_empty() || text.starts_with(b"sh\0") || text.starts_with(b"grep\0")
}

fn write_program(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("main.c"), "int main(void) { return 0; }\n").unwrap();
    fs::write(
        dir.join("Makefile"),
        "prog: main.c\n\tcc -o prog main.c\ncheck: prog\n\t./prog\nclean:\n\trm -f prog\n",
    )
    .unwrap();
}

#[test]
fn a_command_runs_in_a_copy_of_the_folder_and_its_code_comes_back() {
    let dir = folder();
    let mut command =
        trial(dir.path(), &["--", "sh", "-c", "cat file; echo made > made; stat -f -c %T .; exit 7"]);
    fs::write(dir.path().join("source/file"), "from here\n").unwrap();
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("from here\nfuse"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("exit code 7") && !said.contains("did not end"), "{said}");
    assert!(!dir.path().join("source/made").exists());
    assert_nothing_left(dir.path());
    let output = trial(dir.path(), &["--", "no-such-program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_nothing_left(dir.path());
}

#[test]
fn a_folder_is_built_in_three_places() {
    let dir = folder();
    write_program(&dir.path().join("program"));
    let source = dir.path().join("program");
    let out = run(&mut trial(dir.path(), &["--rounds", "2", "--source", source.to_str().unwrap()]));
    for word in ["local disk", "tmpfs", "Hayloft", "unpack", "make check", "in all", "client to the server"] {
        assert!(out.contains(word), "{word}: {out}");
    }
    let out = run(&mut trial(dir.path(), &["--json", "--source", source.to_str().unwrap()]));
    let result: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(result["steps"].as_array().unwrap().len(), 4);
    assert!(result["total_seconds"]["Hayloft"].as_f64().unwrap() > 0.0);
    // A build that fails is said to fail, with its output.
    fs::write(source.join("main.c"), "nonsense\n").unwrap();
    let output = trial(dir.path(), &["--source", source.to_str().unwrap()]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(1) && said.contains("nonsense") && said.contains("make failed on"),
        "{said}"
    );
    assert_nothing_left(dir.path());
}

#[test]
fn a_store_that_was_given_stays_without_the_volume() {
    let dir = folder();
    let store = format!("file://{}", dir.path().join("store").display());
    run(&mut trial(dir.path(), &["--store", &store, "--", "true"]));
    assert!(dir.path().join("store").exists());
    let farm = crate::setup::farm::Farm::with(Some(&dir.path().join("store")), &[]);
    assert_eq!(run(&mut farm.volume(["list", "--json"])).trim(), "[]");
    assert_nothing_left(dir.path());
}

/// Starts a trial whose command runs until it is ended.
fn endless(dir: &Path) -> Child {
    let script = "echo $$ >../../beginning; mv ../../beginning ../../started; exec sleep 300";
    let child = trial(dir, &["--", "sh", "-c", script]).stderr(Stdio::piped()).spawn().unwrap();
    let started =
        || fs::read_dir(dir.join("tmp")).unwrap().flatten().any(|work| work.path().join("started").exists());
    wait_until("the command runs", Duration::from_secs(30), || started() || dir.join("tmp/started").exists());
    child
}

#[test]
fn signals_end_it_and_nothing_is_left() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let dir = folder();
        let child = endless(dir.path());
        kill(child.id(), signal);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(128 + signal), "{said}");
        assert!(!said.contains("did not end"), "{said}");
        let _ = fs::remove_file(dir.path().join("tmp/started"));
        assert_nothing_left(dir.path());
    }
}

#[test]
fn what_a_command_leaves_behind_for_a_moment_is_waited_for() {
    let dir = folder();
    run(&mut trial(dir.path(), &["--", "sh", "-c", "sleep 0.7 </dev/null >/dev/null 2>&1 &"]));
    assert_nothing_left(dir.path());
}

#[test]
fn kill_9_ends_its_processes_too() {
    let dir = folder();
    let mut child = endless(dir.path());
    let command = std::fs::read_to_string(dir.path().join("tmp/started")).or_else(|_| {
        let works = fs::read_dir(dir.path().join("tmp"))?.flatten();
        works
            .map(|work| fs::read_to_string(work.path().join("started")))
            .find(Result::is_ok)
            .expect("it has begun")
    });
    let command = command.unwrap().trim().parse().expect("the number of a process");
    kill(child.id(), libc::SIGKILL);
    child.wait().unwrap();
    // The command itself is nobody's child now, and holds the mount.
    let mounted = || {
        fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&format!("{}/tmp", dir.path().display()))
    };
    wait_until("the mount is gone", Duration::from_secs(30), || !mounted());
    wait_until("client and server have ended", Duration::from_secs(30), || processes(dir.path()).is_empty());
    kill(command, libc::SIGKILL);
}
