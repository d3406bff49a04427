//! Running programs so that an ending signal ends them, and then us.

use std::fmt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::Context;

use crate::signals;
use crate::sys;

/// The trial was told to end.
#[derive(Debug)]
pub(super) struct Interrupted {
    /// By this signal.
    pub signal: i32,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Runs one program at a time.
pub(super) struct Runner {
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// The signal that asked for the end; 0 for none.
    ended: AtomicI32,
    /// What kill(2) takes to reach the running program: its process, or negative its group; 0 for none.
    target: AtomicI32,
}

impl State {
    fn pass_on(&self) {
        let (signal, target) = (self.ended.load(Ordering::SeqCst), self.target.load(Ordering::SeqCst));
        if signal != 0 && target != 0 {
            // It may have ended by itself just now.
            let _ = sys::kill(target, signal);
        }
    }
}

impl Runner {
    /// From now on ending signals reach the running program and make [`Runner::check`] fail.
    ///
    /// # Errors
    /// When signals cannot be caught.
    pub(super) fn new() -> anyhow::Result<Runner> {
        let state = Arc::new(State::default());
        let seen = Arc::clone(&state);
        signals::on_ending(move |signal| {
            let _ = seen.ended.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
            seen.pass_on();
        })?;
        Ok(Runner { state })
    }

    /// Whether to go on.
    ///
    /// # Errors
    /// [`Interrupted`] when an ending signal has come.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        match self.state.ended.load(Ordering::SeqCst) {
            0 => Ok(()),
            signal => Err(Interrupted { signal }.into()),
        }
    }

    /// Runs a program in a process group of its own, so that a signal reaches all that it starts.
    ///
    /// # Errors
    /// When it cannot be started; [`Interrupted`].
    pub(super) fn run(&self, command: &mut Command) -> anyhow::Result<ExitStatus> {
        let status = self.wait_for(command.process_group(0), true)?;
        self.check()?;
        Ok(status)
    }

    /// Runs the user's own command, which shares our terminal, and gives its exit code as a shell would.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub(super) fn run_in_terminal(&self, command: &mut Command) -> anyhow::Result<u8> {
        let status = self.wait_for(command, false)?;
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
        Ok(u8::try_from(code).unwrap_or(1))
    }

    fn wait_for(&self, command: &mut Command, group: bool) -> anyhow::Result<ExitStatus> {
        self.check()?;
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        let pid = i32::try_from(child.id())?;
        self.state.target.store(if group { -pid } else { pid }, Ordering::SeqCst);
        // The signal may have come before the target was known.
        self.state.pass_on();
        let status = child.wait();
        self.state.target.store(0, Ordering::SeqCst);
        Ok(status?)
    }
}
