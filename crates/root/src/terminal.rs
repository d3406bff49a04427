//! A terminal of the root's own, joined to the caller's: what is typed goes in, what is shown comes out, and nothing
//! in the root holds the caller's terminal. That is so when standard input is one. When only standard output or standard
//! error is, the command gets that as it is, as any other descriptor; it is not its session's then: nothing can be
//! typed into it, and its keys send it no signals.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::event::PollFlags;
use rustix::termios::{OptionalActions, Termios};

use crate::error::{Result, Trying};
use crate::report;

/// Read at a time.
const CHUNK: usize = 16 << 10;

/// The two terminals, and what is on its way in.
#[derive(Debug)]
pub(crate) struct Joined {
    inner: File,
    /// How the outer one was set before it passed every key on.
    before: Option<Termios>,
    /// Read from the caller, not yet taken by the root.
    pending: Vec<u8>,
    /// Whether the caller's input has ended.
    is_over: bool,
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
        let joined = Joined { inner, before: None, pending: Vec::new(), is_over: false };
        joined.resize();
        Ok(Some((joined, report::Terminal { number, descriptors })))
    }

    /// From now on every key goes into the root, Ctrl-C too.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(crate) fn join(&mut self) -> Result<()> {
        let what = || "set up the terminal".to_owned();
        let before = rustix::termios::tcgetattr(io::stdin()).trying(what)?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw).trying(what)?;
        self.before = Some(before);
        Ok(())
    }

    /// The inner terminal is as large as the outer one.
    pub(crate) fn resize(&self) {
        if let Ok(size) = rustix::termios::tcgetwinsize(io::stdin()) {
            let _ = rustix::termios::tcsetwinsize(&self.inner, size);
        }
    }

    /// The inner end, and what to wait for there.
    pub(crate) fn inner(&self) -> (BorrowedFd<'_>, PollFlags) {
        let out = if self.pending.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        (self.inner.as_fd(), PollFlags::IN | out)
    }

    /// Whether there is room for more input.
    pub(crate) fn wants_input(&self) -> bool {
        self.pending.is_empty() && !self.is_over
    }

    /// Takes what was typed.
    pub(crate) fn take_input(&mut self) {
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
    pub(crate) fn pass_input(&mut self) {
        if let Ok(written) = self.inner.write(&self.pending) {
            self.pending.drain(..written);
        }
    }

    /// Shows what has come out. Whether there may be more at once.
    pub(crate) fn show_output(&mut self) -> bool {
        let mut bytes = [0; CHUNK];
        match self.inner.read(&mut bytes) {
            Ok(read @ 1..) => {
                let mut out = io::stdout();
                out.write_all(&bytes[..read]).and_then(|()| out.flush()).is_ok()
            }
            _ => false,
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}
