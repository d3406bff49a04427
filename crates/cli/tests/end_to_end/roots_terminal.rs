//! `hayloft run` on a terminal: the command has one of its own, joined to the caller's.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Child;
use std::time::Duration;

use crate::farm::wait_until;
use crate::root_box::{RootBox, wait_no_process};

/// Starts a script in a root, on a new terminal; the terminal's other end.
fn start(roots: &RootBox, script: &str) -> (Child, File) {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize { ws_row: 33, ws_col: 77, ws_xpixel: 0, ws_ypixel: 0 };
    let none = std::ptr::null_mut();
    // SAFETY: both descriptors are written before the call returns, and are ours then.
    let (ours, theirs) = unsafe {
        assert_eq!(libc::openpty(&raw mut ours, &raw mut theirs, none, std::ptr::null(), &raw const size), 0);
        libc::fcntl(ours, libc::F_SETFD, libc::FD_CLOEXEC);
        (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    };
    let mut command = roots.run([], script);
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs);
    // SAFETY: system calls only, between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            libc::ioctl(0, libc::TIOCSCTTY, 0);
            Ok(())
        });
    }
    (command.spawn().unwrap(), ours)
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
