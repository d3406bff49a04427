//! The caller's side while a command runs: passes signals and keys on, and waits for the end.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::error::{Error, Result, Trying};
use crate::report::{Link, Order, Said, TaskEnd};
use crate::sys::{self, Child, Mask};
use crate::terminal::Joined;

/// How long a command may take to end after SIGTERM or SIGHUP.
const GRACE: Duration = Duration::from_secs(10);
/// Signals that are passed on.
const PASSED: [i32; 8] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGQUIT,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
    libc::SIGWINCH,
];

/// Those of them that ask for the end.
const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGQUIT, libc::SIGHUP];

/// Waits for signals, from before the first process of a root is made. Dropped, it leaves signals as it found them.
#[derive(Debug)]
pub(crate) struct Watch {
    signals: OwnedFd,
    /// What was held back before.
    before: Mask,
    /// The first signal that asked for the end.
    asked: Option<i32>,
    /// When a command that was asked to end is killed.
    deadline: Option<Instant>,
}

impl Watch {
    pub(crate) fn new() -> Result<Watch> {
        let (signals, before) = sys::signals_by_descriptor(&PASSED).trying(|| "catch signals".to_owned())?;
        Ok(Watch { signals, before, asked: None, deadline: None })
    }

    /// Lets signals act as they did before. Those that have come since the command has ended act now, but for those that
    /// were meant for the command alone.
    pub(crate) fn release(&mut self) {
        let mut ending = None;
        while let Some(signal) = sys::next_signal(self.signals.as_fd()) {
            ending = ending.or(ENDING.contains(&signal).then_some(signal));
        }
        sys::restore_signals(&self.before);
        if let Some(signal) = ending {
            let _ = sys::kill(std::process::id() as i32, signal);
        }
    }

    /// Waits for the next message, ending the child when it is asked to for the second time.
    fn next(
        &mut self,
        link: &Link,
        child: &Child,
        mut terminal: Option<&mut Joined>,
    ) -> Result<Option<Said>> {
        let stdin = std::io::stdin();
        loop {
            let mut ready = vec![PollFd::new(link, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
            let mut wants_input = false;
            if let Some(terminal) = terminal.as_deref() {
                let (inner, flags) = terminal.inner();
                ready.push(PollFd::from_borrowed_fd(inner, flags));
                wants_input = terminal.wants_input();
                if wants_input {
                    ready.push(PollFd::new(&stdin, PollFlags::IN));
                }
            }
            let mut is_late = false;
            let left = self.deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left
                .map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
            match rustix::event::poll(&mut ready, left.as_ref()) {
                Ok(0) => is_late = true,
                Ok(_) | Err(rustix::io::Errno::INTR) => (),
                Err(error) => return Err(error).trying(|| "wait for the command".to_owned()),
            }
            let has = |at: usize| ready.get(at).is_some_and(|fd| !fd.revents().is_empty());
            let (said, signalled, shown, typed) = (has(0), has(1), has(2), wants_input && has(3));
            drop(ready);
            if is_late {
                self.kill(child);
            }
            if let Some(terminal) = terminal.as_deref_mut() {
                if shown {
                    terminal.pass_input();
                    // A terminal that nobody has open any more is readable for ever.
                    if !terminal.show_output() && !said {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                if typed {
                    terminal.take_input();
                }
            }
            if signalled {
                self.pass_signals(link, child, terminal.as_deref());
            }
            if said {
                let message = link.receive().trying(|| "hear from the root's first process".to_owned());
                while terminal.as_deref_mut().is_some_and(Joined::show_output) {}
                return message;
            }
        }
    }

    fn pass_signals(&mut self, link: &Link, child: &Child, terminal: Option<&Joined>) {
        while let Some(signal) = sys::next_signal(self.signals.as_fd()) {
            match signal {
                libc::SIGWINCH => {
                    if let Some(terminal) = terminal {
                        terminal.resize();
                    }
                }
                signal if ENDING.contains(&signal) => {
                    if self.asked.is_some() {
                        self.kill(child);
                        continue;
                    }
                    self.asked = Some(signal);
                    if matches!(signal, libc::SIGTERM | libc::SIGHUP) {
                        self.deadline = Some(Instant::now() + GRACE);
                    }
                    let _ = link.send(&Order::Signal(signal));
                }
                other => drop(link.send(&Order::Signal(other))),
            }
        }
    }

    fn kill(&mut self, child: &Child) {
        self.deadline = None;
        let _ = sys::pidfd_kill(child.pidfd.as_fd(), libc::SIGKILL);
    }

    /// Waits until the first process says that it has built the root.
    ///
    /// # Errors
    /// What kept it from that.
    pub(crate) fn wait_built(&mut self, link: &Link, child: &Child) -> Result<()> {
        match self.next(link, child, None)? {
            Some(Said::Built) => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Waits until the command runs.
    ///
    /// # Errors
    /// What kept it from running.
    pub(crate) fn wait_started(
        &mut self,
        link: &Link,
        child: &Child,
        terminal: Option<&mut Joined>,
    ) -> Result<()> {
        match self.next(link, child, terminal)? {
            Some(Said::Started) => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Waits until the command has ended; none when it ended by our killing it with all of its root.
    ///
    /// # Errors
    /// When the root's first process was ended by somebody else.
    pub(crate) fn wait_ended(
        &mut self,
        link: &Link,
        child: &Child,
        terminal: Option<&mut Joined>,
    ) -> Result<Option<TaskEnd>> {
        match (self.next(link, child, terminal)?, self.asked) {
            (Some(Said::Ended(end)), _) => Ok(Some(end)),
            (None, Some(_)) => Ok(None),
            (other, _) => Err(self.unexpected(other)),
        }
    }

    /// The signal that asked for the end, if one did.
    pub(crate) fn asked(&self) -> Option<i32> {
        self.asked
    }

    fn unexpected(&self, said: Option<Said>) -> Error {
        match (said, self.asked) {
            (Some(Said::Failed(failure)), _) => failure.into(),
            (None, Some(signal)) => Error::Failed(format!("ended by signal {signal} before the command ran")),
            (None, None) => Error::Failed(
                "the root's first process has ended unasked: it was killed, perhaps for want of memory (dmesg says so then)".to_owned(),
            ),
            (Some(other), _) => Error::Failed(format!("the root's first process said {other:?} out of turn")),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // What was to end a command that is not there any more must not hide why.
        while sys::next_signal(self.signals.as_fd()).is_some() {}
        sys::restore_signals(&self.before);
    }
}
