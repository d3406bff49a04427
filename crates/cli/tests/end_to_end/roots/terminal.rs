//! `hayloft run` on a terminal: the command has one of its own, joined to the caller's.

use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use crate::setup::farm::{kill, wait_until};
use crate::setup::root_box::{RootBox, wait_no_process};

/// Both ends of a new terminal, the one that shows first.
fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize { ws_row: 33, ws_col: 77, ws_xpixel: 0, ws_ypixel: 0 };
    let none = std::ptr::null_mut();
    // SAFETY: both descriptors are written before the call returns, and are ours then.
    unsafe {
        assert_eq!(libc::openpty(&raw mut ours, &raw mut theirs, none, std::ptr::null(), &raw const size), 0);
        libc::fcntl(ours, libc::F_SETFD, libc::FD_CLOEXEC);
        (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    }
}

/// Has a command start in a session whose terminal is its standard input.
fn in_session(mut command: Command) -> Command {
    // SAFETY: system calls only, between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            libc::ioctl(0, libc::TIOCSCTTY, 0);
            Ok(())
        });
    }
    command
}

/// Starts a script in a root, on a new terminal; the terminal's other end.
fn start(roots: &RootBox, script: &str) -> (Child, File) {
    let (ours, theirs) = terminal();
    let mut command = roots.run([], script);
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs);
    (in_session(command).spawn().unwrap(), ours)
}

/// Reads until a text has come.
fn read_until(terminal: &mut File, text: &str) -> String {
    let mut all = Vec::new();
    let mut bytes = [0; 1000];
    while !String::from_utf8_lossy(&all).contains(text) {
        match terminal.read(&mut bytes) {
            Ok(read @ 1..) => all.extend(&bytes[..read]),
            // The other end is closed.
            _ => break,
        }
    }
    String::from_utf8_lossy(&all).into_owned()
}

#[test]
fn a_command_has_a_terminal_of_its_own() {
    let roots = RootBox::new();
    let (mut child, mut terminal) =
        start(&roots, "tty; stty size; test -t 1 && test -t 2; ls /dev/pts; exit 4");
    let said = read_until(&mut terminal, "ptmx");
    assert_eq!(
        said.split_whitespace().collect::<Vec<_>>(),
        ["/dev/pts/0", "33", "77", "0", "ptmx"],
        "{said}"
    );
    assert_eq!(child.wait().unwrap().code(), Some(4));
}

#[test]
fn what_is_typed_arrives_and_ctrl_c_ends_the_command() {
    let roots = RootBox::new();
    let (mut child, mut terminal) = start(&roots, "echo ready; read line; echo \"got $line\"; sleep 4721.1");
    read_until(&mut terminal, "ready");
    terminal.write_all(b"some words\n").unwrap();
    let said = read_until(&mut terminal, "got some words");
    assert!(said.contains("got some words"), "{said}");
    // A shell that is just starting a program may miss the first.
    wait_until("Ctrl-C has ended it", Duration::from_secs(20), || {
        let _ = terminal.write_all(b"\x03");
        std::thread::sleep(Duration::from_millis(50));
        child.try_wait().unwrap().is_some()
    });
    assert_eq!(child.wait().unwrap().code(), Some(130));
    wait_no_process("4721.1");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

/// Starts a shell with jobs on a new terminal; `$0 ...` in its script is `hayloft` with these roots.
fn start_shell(roots: &RootBox, shell: &str, script: &str) -> (Child, File) {
    let (ours, theirs) = terminal();
    let hayloft = roots.hayloft([]);
    let mut command = Command::new(shell);
    command.args(["-c", script]).arg(hayloft.get_program()).current_dir("/");
    for (name, value) in hayloft.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs);
    (in_session(command).spawn().unwrap(), ours)
}

#[test]
fn a_background_job_runs_and_leaves_the_terminal_to_others() {
    let roots = RootBox::new();
    let script =
        "set -m; \"$0\" run -- sh -c 'echo shown; sleep 0.3; exit 5' & wait $!; echo \"ended $?\"; stty -a";
    let (mut child, mut terminal) = start_shell(&roots, "sh", script);
    let said = read_until(&mut terminal, "echoke");
    // Signals by keys are the shell's, as they were.
    assert!(said.contains("shown") && said.contains("ended 5") && said.contains("\nisig icanon"), "{said}");
    child.wait().unwrap();
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn a_job_has_the_keys_when_it_is_in_the_foreground() {
    let roots = RootBox::new();
    // dash tells a job that runs of it by a signal, bash does not.
    for shell in ["dash", "bash"] {
        let script = "set -m; \"$0\" run -- sh -c 'echo ready; read line; echo \"got $line\"; exit 6' &
            sleep 1; fg; echo \"ended $?\"; stty -a";
        let (mut child, mut terminal) = start_shell(&roots, shell, script);
        read_until(&mut terminal, "ready");
        std::thread::sleep(Duration::from_millis(1500));
        terminal.write_all(b"words\n").unwrap();
        let said = read_until(&mut terminal, "echoke");
        assert!(said.contains("got words") && said.contains("ended 6"), "{shell}: {said}");
        assert!(said.contains("\nisig icanon"), "{shell}: {said}");
        child.wait().unwrap();
    }
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn a_terminal_that_goes_away_ends_the_command() {
    let roots = RootBox::new();
    let (mut child, mut terminal) = start(&roots, "echo ready; sleep 4722.1");
    read_until(&mut terminal, "ready");
    drop(terminal);
    wait_until("the run has ended", Duration::from_secs(20), || child.try_wait().unwrap().is_some());
    wait_no_process("4722.1");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

/// Starts a script that has a terminal but for its output, which goes to a file.
fn start_redirected(roots: &RootBox, script: &str, output: File) -> (Child, File) {
    let (ours, theirs) = terminal();
    let mut command = roots.run([], script);
    command.stdin(theirs.try_clone().unwrap()).stdout(output).stderr(theirs);
    (in_session(command).spawn().unwrap(), ours)
}

#[test]
fn what_is_redirected_holds_nothing_else() {
    let roots = RootBox::new();
    let path = roots.dir().join("out");
    let script = "echo out; echo err >&2; read x; echo got $x";
    let (mut child, mut terminal) = start_redirected(&roots, script, File::create(&path).unwrap());
    terminal.write_all(b"typed\n").unwrap();
    // All of it.
    let said = read_until(&mut terminal, "got");
    assert!(said.contains("typed") && said.contains("err") && !said.contains("out"), "{said}");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(std::fs::read_to_string(path).unwrap(), "out\ngot typed\n");
}

#[test]
fn a_terminal_that_nobody_reads_holds_no_signal_up() {
    let roots = RootBox::new();
    let (mut child, mut terminal) =
        start(&roots, "trap 'exit 9' TERM; echo ready; while :; do echo 4724.1; done");
    read_until(&mut terminal, "ready");
    // Until all that lies between is full.
    std::thread::sleep(Duration::from_millis(500));
    assert!(child.try_wait().unwrap().is_none());
    for _ in 0..2 {
        kill(child.id(), libc::SIGTERM);
        std::thread::sleep(Duration::from_millis(100));
    }
    wait_until("the run has ended", Duration::from_secs(20), || child.try_wait().unwrap().is_some());
    wait_no_process("4724.1");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn a_terminal_that_does_not_wait_loses_nothing() {
    let roots = RootBox::new();
    let (ours, theirs) = terminal();
    // SAFETY: an open descriptor and plain numbers.
    unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFL, libc::O_RDWR | libc::O_NONBLOCK) };
    let mut command = roots.run([], "stty -opost; seq -w 100000; echo end");
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs);
    let mut child = in_session(command).spawn().unwrap();
    let mut terminal = std::io::BufReader::new(ours);
    std::thread::sleep(Duration::from_millis(300));
    let mut line = String::new();
    for number in 1..=100_000 {
        line.clear();
        terminal.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), format!("{number:06}"));
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
