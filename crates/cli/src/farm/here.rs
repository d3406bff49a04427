//! A task that runs on this host.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::Context;
use hayloft_farm::submit::Slots;

use crate::sys;

/// How a task ended: an exit code, or a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Code(u8),
    Signal(i32),
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Ended {
        match status.signal() {
            Some(signal) => Ended::Signal(signal),
            None => Ended::Code(status.code().unwrap_or(1) as u8),
        }
    }
}

/// The command that runs here; 0 before.
#[derive(Debug, Default)]
pub(crate) struct Child(AtomicI32);

impl Child {
    /// Runs a program, to which signals are passed on meanwhile.
    ///
    /// # Errors
    /// When it cannot be run.
    pub(crate) fn run(&self, program: &mut Command) -> io::Result<Ended> {
        let mut running = sys::ends_with_parent(program).spawn()?;
        self.0.store(running.id() as i32, Ordering::SeqCst);
        let status = running.wait();
        self.0.store(0, Ordering::SeqCst);
        Ok(status?.into())
    }

    /// Passes a signal on; false when nothing runs.
    pub(crate) fn signal(&self, signal: i32) -> bool {
        let pid = self.0.load(Ordering::SeqCst);
        if pid == 0 {
            return false;
        }
        // Keys of the terminal have reached it as well.
        let is_key =
            matches!(signal, libc::SIGINT | libc::SIGQUIT | libc::SIGWINCH) && sys::is_in_foreground();
        if !is_key {
            let _ = sys::kill(pid, signal);
        }
        true
    }
}

/// Waits for a slot and runs the command.
///
/// # Errors
/// When there are no slots to be had; a command that cannot be run is told and gives its code.
pub(crate) fn run(command: &[OsString], slots: u32, child: &Child) -> anyhow::Result<Ended> {
    let slots = Slots::open(slots).context("the slots of this host")?;
    let slot = slots.take().context("the slots of this host")?;
    let mut program = Command::new(&command[0]);
    program.args(&command[1..]);
    let ended = child.run(&mut program);
    drop(slot);
    ended.or_else(|error| {
        eprintln!("hayloft: {}: {error}", program.get_program().to_string_lossy());
        Ok(Ended::Code(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }))
    })
}
