//! The caller's side while a command runs: passes signals and keys on, and waits for the end.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::error::{Error, Result, Trying};
use crate::report::{Link, Order, Said, TaskEnd};
use crate::sys::{self, Child, Mask};
use crate::terminal::{End, Joined};

/// How long a command may take to end after SIGTERM or SIGHUP.
const GRACE: Duration = Duration::from_secs(10);
/// Between two looks whether the terminal has become this process's.
const LOOK: Duration = Duration::from_millis(200);
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
    /// The first signal that asked for the end after the command's.
    late: Option<i32>,
}

impl Watch {
    pub(crate) fn new() -> Result<Watch> {
        let (signals, before) = sys::signals_by_descriptor(&PASSED).trying(|| "catch signals".to_owned())?;
        Ok(Watch { signals, before, asked: None, deadline: None, late: None })
    }

    /// Lets signals act as they did before. Those that have come since the command has ended act now, but for those that
    /// were meant for the command alone.
    pub(crate) fn release(&mut self) {
        self.take_late();
        sys::restore_signals(&self.before);
        if let Some(signal) = self.late.take() {
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
        loop {
            let is_away = terminal.as_deref_mut().is_some_and(Joined::look);
            let mut ready = vec![PollFd::new(link, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
            let (ends, polled): (Vec<End>, Vec<_>) =
                terminal.as_deref().map(Joined::ends).unwrap_or_default().into_iter().unzip();
            ready.extend(polled);
            match rustix::event::poll(&mut ready, self.left(is_away).as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => (),
                Err(error) => return Err(error).trying(|| "wait for the command".to_owned()),
            }
            let has = |fd: &PollFd<'_>| !fd.revents().is_empty();
            let (said, signalled) = (has(&ready[0]), has(&ready[1]));
            let ends: Vec<End> =
                ends.into_iter().zip(&ready[2..]).filter(|(_, fd)| has(fd)).map(|(end, _)| end).collect();
            drop(ready);
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.kill(child);
            }
            if let Some(terminal) = terminal.as_deref_mut() {
                for end in ends {
                    // A terminal that nobody has open any more is readable for ever.
                    if !terminal.serve(end) && !said {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            }
            if signalled {
                self.pass_signals(link, child, terminal.as_deref_mut());
            }
            if said {
                let message = link.receive().trying(|| "hear from the root's first process".to_owned());
                match (&message, terminal) {
                    (Ok(Some(Said::Ended(_) | Said::Failed(_))), Some(terminal)) => self.show_rest(terminal),
                    // Killed: what is not shown at once is not waited for.
                    (Ok(None), Some(terminal)) => while terminal.show_output() {},
                    _ => (),
                }
                return message;
            }
        }
    }

    /// How long to wait: as long as a command that was asked to end may still take, and until the next look for the
    /// terminal.
    fn left(&self, is_away: bool) -> Option<Timespec> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.into_iter().chain(is_away.then_some(LOOK)).min()?;
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
    }

    /// Shows what a command that has ended has left on its terminal; a signal that asks for the end is the end of that,
    /// and so is the time that the command had.
    fn show_rest(&mut self, terminal: &mut Joined) {
        while self.late.is_none() {
            while terminal.show_output() {}
            let Some(room) = terminal.room() else { return };
            let mut ready = [room, PollFd::new(&self.signals, PollFlags::IN)];
            if let Ok(0) = rustix::event::poll(&mut ready, self.left(false).as_ref()) {
                return;
            }
            terminal.serve(End::Room);
            self.take_late();
        }
    }

    /// Takes the signals that have come since the command has ended.
    fn take_late(&mut self) {
        while let Some(signal) = sys::next_signal(self.signals.as_fd()) {
            self.late = self.late.or(ENDING.contains(&signal).then_some(signal));
        }
    }

    fn pass_signals(&mut self, link: &Link, child: &Child, mut terminal: Option<&mut Joined>) {
        while let Some(signal) = sys::next_signal(self.signals.as_fd()) {
            if let (libc::SIGCONT, Some(terminal)) = (signal, terminal.as_deref_mut()) {
                // One that is gone ends the command by SIGHUP.
                let _ = terminal.join();
            }
            match signal {
                libc::SIGWINCH => {
                    if let Some(terminal) = terminal.as_deref() {
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

    /// Waits until the command runs; or until its root was killed because it did not end when it was asked to: it may have
    /// run by then, and [`Watch::wait_ended`] tells how it ended.
    ///
    /// # Errors
    /// What kept it from running.
    pub(crate) fn wait_started(
        &mut self,
        link: &Link,
        child: &Child,
        terminal: Option<&mut Joined>,
    ) -> Result<()> {
        match (self.next(link, child, terminal)?, self.asked) {
            (Some(Said::Started), _) | (None, Some(_)) => Ok(()),
            (other, _) => Err(self.unexpected(other)),
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

    /// Fails when a signal has come that asks for the end: for a start that has nothing to end yet.
    ///
    /// # Errors
    /// Which signal it was.
    pub(crate) fn check_not_ended(&self) -> Result<()> {
        sys::pending_signal(&ENDING).map_or(Ok(()), |signal| Err(ended_early(signal)))
    }

    /// The signal that asked for the end, if one did.
    pub(crate) fn asked(&self) -> Option<i32> {
        self.asked
    }

    fn unexpected(&self, said: Option<Said>) -> Error {
        match (said, self.asked) {
            (Some(Said::Failed(failure)), _) => failure.into(),
            (None, Some(signal)) => ended_early(signal),
            (None, None) => Error::Failed(
                "the root's first process has ended unasked: it was killed, perhaps for want of memory (dmesg says so then)".to_owned(),
            ),
            (Some(other), _) => Error::Failed(format!("the root's first process said {other:?} out of turn")),
        }
    }
}

fn ended_early(signal: i32) -> Error {
    Error::Failed(format!("ended by signal {signal} before the command ran"))
}

impl Drop for Watch {
    fn drop(&mut self) {
        // What was to end a command that is not there any more must not hide why.
        while sys::next_signal(self.signals.as_fd()).is_some() {}
        sys::restore_signals(&self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    /// A first process that has a command running already and has not come to say so.
    #[test]
    fn a_root_that_is_killed_while_its_command_starts_ended_by_the_signal() {
        let (ours, theirs) = Link::pair().unwrap();
        let mut first = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = first.id() as i32;
        let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let child = Child { pid, pidfd };
        let mut watch = Watch::new().unwrap();
        // Held back in this thread, to be read.
        [libc::SIGTERM, libc::SIGINT].into_iter().for_each(sys::signal_this_thread);
        let ending = std::thread::spawn(move || {
            first.wait().unwrap();
            drop(theirs);
        });
        watch.wait_started(&ours, &child, None).unwrap();
        assert!(matches!(watch.wait_ended(&ours, &child, None), Ok(None)));
        assert!(watch.asked().is_some());
        ending.join().unwrap();
    }
}
