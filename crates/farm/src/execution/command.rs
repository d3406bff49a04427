//! The command of a task, as the process that becomes it: with everything allocated beforehand, since it shares its parent's memory until it
//! has become the command.
//!
//! To copy that memory would cost more than all else that is done here. The parent goes on meanwhile, and passes signals on: the folder may be on
//! a mount that does not answer.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use hayloft_process::{self as process, Program, Shared, Stack};

use super::init::{self, Execution, Report};
use super::sys;

/// What the process was about when it failed.
const SETS_UP: i32 = 1;
const BECOMES_USER: i32 = 2;
const GOES_THERE: i32 = 3;
const BECOMES_COMMAND: i32 = 4;

/// See the module's documentation.
pub(super) struct Command<'a> {
    execution: &'a Execution,
    program: Program,
    directory: CString,
    standard: [RawFd; 3],
    failure_file: Option<RawFd>,
    /// What it was about when it failed, if it has, and the error's number.
    failed_at: AtomicI32,
    errno: AtomicI32,
}

impl Shared for Command<'_> {
    fn run(&self) {
        let (failed_at, error) = self.become_it();
        self.errno.store(error.raw_os_error().unwrap_or(libc::EIO), Ordering::Relaxed);
        self.failed_at.store(failed_at, Ordering::Release);
    }
}

impl<'a> Command<'a> {
    /// A command on these descriptors, which have to be open only until it has begun.
    ///
    /// # Errors
    /// When there is a zero byte somewhere in it.
    pub(super) fn new(
        execution: &'a Execution,
        standard: &[OwnedFd; 3],
        failure_file: Option<&File>,
    ) -> io::Result<Command<'a>> {
        Ok(Command {
            execution,
            program: Program::new(&execution.command, &execution.environment)?,
            directory: CString::new(&*execution.directory)?,
            standard: standard.each_ref().map(AsRawFd::as_raw_fd),
            failure_file: failure_file.map(AsRawFd::as_raw_fd),
            failed_at: AtomicI32::new(0),
            errno: AtomicI32::new(0),
        })
    }

    /// Makes the process; its number. It has to be waited for before this is dropped, or the stack used again.
    ///
    /// # Errors
    /// As clone(2) says.
    pub(super) fn begin(&self, stack: &mut Stack) -> io::Result<i32> {
        // SAFETY: the first process of a task has one thread; the caller keeps all of it until the command has ended.
        unsafe { process::fork_sharing(stack, self) }
    }

    /// Why it did not begin, once its process has ended.
    pub(super) fn failure(&self) -> Option<Report> {
        let what = match self.failed_at.load(Ordering::Acquire) {
            SETS_UP => "set up the process".to_owned(),
            BECOMES_USER => "become the user".to_owned(),
            GOES_THERE => format!("go to {}", String::from_utf8_lossy(&self.execution.directory)),
            BECOMES_COMMAND => String::from_utf8_lossy(&self.execution.command[0]).into_owned(),
            _ => return None,
        };
        let error = io::Error::from_raw_os_error(self.errno.load(Ordering::Relaxed));
        let is_own = self.failed_at.load(Ordering::Relaxed) == BECOMES_COMMAND;
        Some(init::failure(&what, &error, is_own))
    }

    /// Becomes the command; returns why not. Nothing here allocates, or frees.
    fn become_it(&self) -> (i32, io::Error) {
        let Execution { umask, switches, uid, gid, groups, .. } = self.execution;
        let set_up = rustix::process::setpgid(None, None)
            .map_err(io::Error::from)
            .and_then(|()| sys::set_standard(&self.standard))
            .and_then(|()| self.failure_file.map_or(Ok(()), sys::keep_open));
        if let Err(error) = set_up {
            return (SETS_UP, error);
        }
        process::hold_back_no_signals();
        rustix::process::umask(rustix::fs::Mode::from_bits_truncate(*umask));
        if *switches && let Err(error) = process::become_user(*uid, *gid, Some(groups)) {
            return (BECOMES_USER, error);
        }
        if let Err(error) = rustix::process::chdir(&*self.directory) {
            return (GOES_THERE, error.into());
        }
        (BECOMES_COMMAND, self.program.exec())
    }
}
