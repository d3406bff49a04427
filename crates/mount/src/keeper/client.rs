//! The client's side: starting a keeper, and another when it ends.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use hayloft_fuse::Control;

use super::ARGUMENT;
use super::process::{DEATH, Task};
use super::shared::Shared;
use crate::host::moment::Moment;

/// How soon another one is started, at first and at most.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// Has a mount kept as long as it lasts.
///
/// # Errors
/// When no thread can be had.
pub(crate) fn start(control: Control, shared: Arc<Shared>) -> io::Result<()> {
    // The thread that starts the keeper is the one whose end it hears of.
    std::thread::Builder::new().name("hayloft-keeper".to_string()).spawn(move || keep(&control, &shared))?;
    Ok(())
}

fn keep(control: &Control, shared: &Shared) {
    let mut pause = RETRY_MIN;
    loop {
        let begun = Moment::now();
        let ended = spawn(control, shared).and_then(|mut child| child.wait());
        if control.await_end(Duration::ZERO) {
            return;
        }
        match ended {
            Ok(status) => tracing::warn!(%status, "the mount's keeper has ended; starting another"),
            Err(error) => tracing::warn!(
                %error,
                "no keeper: should this process be stopped for longer than its lease, the kernel goes on serving old data"
            ),
        }
        // One that has lasted is replaced at once.
        pause = if begun.elapsed() > RETRY_MAX { RETRY_MIN } else { pause };
        std::thread::sleep(pause);
        pause = (pause * 2).min(RETRY_MAX);
    }
}

fn spawn(control: &Control, shared: &Shared) -> io::Result<Child> {
    let descriptors = [control.as_fd().as_raw_fd(), shared.descriptor().as_raw_fd()];
    let task = Task {
        device: descriptors[0],
        memory: descriptors[1],
        number: control.device()?,
        client: std::process::id(),
    };
    // The very program, whatever its file's name leads to by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg(ARGUMENT).args(task.arguments()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
    unsafe { command.pre_exec(move || prepare(&descriptors)) };
    command.spawn()
}

/// In the new process: what the keeper has to find when it begins.
fn prepare(descriptors: &[RawFd]) -> io::Result<()> {
    let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: plain numbers, but for a set that is initialized here and lives until the call returns.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, DEATH);
        check(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()))?;
        check(libc::prctl(libc::PR_SET_PDEATHSIG, DEATH))?;
        // What comes from keys is for the client.
        check(libc::setsid())?;
        for descriptor in descriptors {
            check(libc::fcntl(*descriptor, libc::F_SETFD, 0))?;
        }
    }
    Ok(())
}
