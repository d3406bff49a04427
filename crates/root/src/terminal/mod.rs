//! A terminal of the root's own, joined to the caller's: what is typed goes in, what is shown comes out, and nothing
//! in the root holds the caller's terminal. That is so when standard input is one. When only standard output or standard
//! error is, the command gets that as it is, as any other descriptor; it is not its session's then: nothing can be
//! typed into it, and its keys send it no signals.
//!
//! A shell's background job leaves the caller's terminal as it is, and what is typed to others: to touch it would stop the
//! job. What the command shows comes out all the same.

pub(crate) mod standard;
pub(crate) mod watch;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::termios::{LocalModes, OptionalActions, Termios};

use crate::error::{Result, Trying};
use crate::report;

/// Read at a time.
const CHUNK: usize = 16 << 10;
/// Written at a time where writing may wait, once there is some room.
const BLOCKING_CHUNK: usize = 256;

/// The two terminals, and what is on its way between them.
#[derive(Debug)]
pub(crate) struct Joined {
    inner: File,
    outer: Outer,
    /// How the outer one was set before it passed every key on.
    before: Option<Termios>,
    /// Whether it does: in the background it is left alone.
    has_keys: bool,
    /// Read from the caller, not yet taken by the root.
    pending: Vec<u8>,
    /// Whether the caller's input has ended.
    is_over: bool,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The root's terminal.
    Inner,
    /// The keys of the caller's.
    Keys,
    /// Room on the caller's.
    Room,
}

/// The caller's terminal, to write to: never standard output that is something else.
#[derive(Debug)]
struct Outer {
    /// None where nothing can be shown (any more).
    file: Option<File>,
    /// Most that is written at a time.
    chunk: usize,
    /// Come out of the root, not yet taken by the terminal.
    pending: Vec<u8>,
}

impl Outer {
    /// The first of standard output, error and input that is a terminal and open for writing.
    fn open() -> Outer {
        let all = [rustix::stdio::stdout(), rustix::stdio::stderr(), rustix::stdio::stdin()];
        let is_fit = |one: &BorrowedFd<'_>| {
            let flags = rustix::fs::fcntl_getfl(one).unwrap_or(OFlags::RDONLY);
            rustix::termios::isatty(one) && flags & OFlags::ACCMODE != OFlags::RDONLY
        };
        let mut outer = Outer { file: None, chunk: CHUNK, pending: Vec::new() };
        let Some(found) = all.into_iter().find(is_fit) else { return outer };
        // Opened once more: what others have open must not cease to wait.
        let path = format!("/proc/self/fd/{}", found.as_raw_fd());
        let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
        match OpenOptions::new().write(true).custom_flags(flags).open(path) {
            Ok(file) => outer.file = Some(file),
            Err(_) => {
                outer.chunk = BLOCKING_CHUNK;
                outer.file = found.try_clone_to_owned().ok().map(File::from);
            }
        }
        outer
    }

    /// Shows what is waiting, as far as the terminal takes it.
    fn write(&mut self) {
        let Some(file) = &mut self.file else { return self.pending.clear() };
        let some = self.pending.len().min(self.chunk);
        match file.write(&self.pending[..some]) {
            Ok(written) => drop(self.pending.drain(..written)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            // It is gone.
            Err(_) => {
                self.file = None;
                self.pending.clear();
            }
        }
    }
}

impl Joined {
    /// Opens a terminal in a root if standard input is one. `merged` leads to the root's tree.
    ///
    /// # Errors
    /// When there are no more terminals.
    pub(crate) fn open(merged: &Path) -> Result<Option<(Joined, report::Terminal)>> {
        let stdin = io::stdin();
        if !rustix::termios::isatty(&stdin) {
            return Ok(None);
        }
        let what = || "open a terminal in the root".to_owned();
        let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
        let path = merged.join("dev/pts/ptmx");
        let inner = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).trying(what)?;
        rustix::pty::unlockpt(&inner).trying(what)?;
        let name = rustix::pty::ptsname(&inner, Vec::new()).trying(what)?;
        let number =
            name.to_string_lossy().rsplit('/').next().and_then(|text| text.parse().ok()).unwrap_or(0);
        let descriptors: [(i32, bool); 3] = [
            (0, true),
            (1, rustix::termios::isatty(io::stdout())),
            (2, rustix::termios::isatty(io::stderr())),
        ];
        let descriptors = descriptors.into_iter().filter(|(_, is)| *is).map(|(number, _)| number).collect();
        let outer = Outer::open();
        let joined =
            Joined { inner, outer, before: None, has_keys: false, pending: Vec::new(), is_over: false };
        joined.resize();
        Ok(Some((joined, report::Terminal { number, descriptors })))
    }

    /// From now on every key goes into the root, Ctrl-C too, unless others have the terminal. To be called again when this
    /// process was stopped and goes on, since others may have it then or have set it differently.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(crate) fn join(&mut self) -> Result<()> {
        let what = || "set up the terminal".to_owned();
        self.has_keys = false;
        if !is_foreground() {
            return Ok(());
        }
        let now = rustix::termios::tcgetattr(io::stdin()).trying(what)?;
        // A shell may have left it as we had set it.
        let is_raw = !now.local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
        let before = self.before.take().filter(|_| is_raw).unwrap_or(now);
        let mut raw = before.clone();
        self.before = Some(before);
        raw.make_raw();
        rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw).trying(what)?;
        self.has_keys = true;
        self.resize();
        Ok(())
    }

    /// Takes the keys if they have become this process's. Whether to look again, since nobody tells: a shell that brings a
    /// job that runs to the foreground sends no signal.
    pub(crate) fn look(&mut self) -> bool {
        if !self.has_keys && !self.is_over {
            self.is_over = self.join().is_err();
        }
        !self.has_keys && !self.is_over
    }

    /// The inner terminal is as large as the outer one.
    pub(crate) fn resize(&self) {
        if let Ok(size) = rustix::termios::tcgetwinsize(io::stdin()) {
            let _ = rustix::termios::tcsetwinsize(&self.inner, size);
        }
    }

    /// What to wait for, and where. What one side does not take holds the other one up, as on any terminal.
    pub(crate) fn ends(&self) -> Vec<(End, PollFd<'_>)> {
        let mut ends = Vec::new();
        let mut inner = PollFlags::empty();
        inner.set(PollFlags::OUT, !self.pending.is_empty());
        inner.set(PollFlags::IN, self.outer.pending.is_empty());
        if !inner.is_empty() {
            ends.push((End::Inner, PollFd::from_borrowed_fd(self.inner.as_fd(), inner)));
        }
        if self.pending.is_empty() && !self.is_over && self.has_keys {
            ends.push((End::Keys, PollFd::from_borrowed_fd(rustix::stdio::stdin(), PollFlags::IN)));
        }
        ends.extend(self.room().map(|room| (End::Room, room)));
        ends
    }

    /// Where to wait for room when something is to be shown.
    pub(crate) fn room(&self) -> Option<PollFd<'_>> {
        let file = self.outer.file.as_ref().filter(|_| !self.outer.pending.is_empty())?;
        Some(PollFd::from_borrowed_fd(file.as_fd(), PollFlags::OUT))
    }

    /// Does what one of [`Joined::ends`] is ready for. False when there was nothing to do.
    pub(crate) fn serve(&mut self, end: End) -> bool {
        match end {
            End::Inner => {
                self.pass_input();
                return self.show_output();
            }
            End::Keys => self.take_input(),
            End::Room => self.outer.write(),
        }
        true
    }

    /// Takes what was typed.
    fn take_input(&mut self) {
        // To read what is for others would stop this process.
        self.has_keys = is_foreground();
        if !self.has_keys {
            return;
        }
        let mut bytes = [0; CHUNK];
        match rustix::io::read(io::stdin(), &mut bytes) {
            Ok(0) => {
                // Ctrl-D at the beginning of a line says so.
                self.pending.push(4);
                self.is_over = true;
            }
            Ok(read) => self.pending.extend(&bytes[..read]),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => (),
            Err(_) => self.is_over = true,
        }
        self.pass_input();
    }

    /// Passes on what is waiting, as far as the root takes it.
    fn pass_input(&mut self) {
        if let Ok(written) = self.inner.write(&self.pending) {
            self.pending.drain(..written);
        }
    }

    /// Shows what has come out, unless something is waiting already. Whether there may be more at once.
    pub(crate) fn show_output(&mut self) -> bool {
        if !self.outer.pending.is_empty() {
            return false;
        }
        let mut bytes = [0; CHUNK];
        match self.inner.read(&mut bytes) {
            Ok(read @ 1..) => {
                self.outer.pending.extend(&bytes[..read]);
                self.outer.write();
                true
            }
            _ => false,
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        if let Some(before) = self.before.as_ref().filter(|_| is_foreground()) {
            let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Whether the terminal's keys are for this process: always, when it is not the terminal of its session.
fn is_foreground() -> bool {
    rustix::termios::tcgetpgrp(io::stdin()).map_or(true, |group| group == rustix::process::getpgrp())
}
