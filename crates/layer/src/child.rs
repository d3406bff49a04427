//! Programs that end with this one.
#![allow(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Has a program get SIGTERM when the thread that starts it ends, however it does: prctl(2), PR_SET_PDEATHSIG.
pub(crate) fn ends_with_us(command: &mut Command) {
    let us = getpid();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        // It may have ended just before.
        if getppid() == Some(us) { Ok(()) } else { Err(Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec this makes system calls only; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(ask) };
}
