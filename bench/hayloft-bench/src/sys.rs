//! The few system calls that the standard library lacks.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// The process group of the command under way; 0 without one.
static COMMAND: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
    let group = COMMAND.load(Ordering::Relaxed);
    if group > 0 {
        // SAFETY: kill(2) is async-signal-safe and touches no memory of ours.
        unsafe { libc::kill(-group, libc::SIGTERM) };
    }
}

/// Waits for a command, in a process group of its own that an interruption ends as a whole.
pub(crate) fn wait_interruptibly(command: &mut Command) -> io::Result<ExitStatus> {
    let mut child = command.process_group(0).spawn()?;
    COMMAND.store(child.id() as i32, Ordering::Relaxed);
    if interrupted() {
        // It came before the handler knew of the child.
        let _ = child.kill();
    }
    let status = child.wait();
    COMMAND.store(0, Ordering::Relaxed);
    status
}

/// From here on, SIGINT and SIGTERM only make [`interrupted`] true, so that a workload can delete its tree.
pub(crate) fn catch_interrupts() {
    let handler = on_interrupt as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only uses atomics and kill(2), which are async-signal-safe.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// Whether somebody asked to stop.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// An error when somebody asked to stop.
pub(crate) fn check_interrupted() -> io::Result<()> {
    if interrupted() { Err(io::Error::other("interrupted")) } else { Ok(()) }
}

/// Writes back everything dirty of the file system that `file` is on.
pub(crate) fn syncfs(file: &File) -> io::Result<()> {
    // SAFETY: takes an open descriptor and touches no memory of ours.
    if unsafe { libc::syncfs(file.as_raw_fd()) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes and inodes that this user may still use; nothing where the file system does not say.
pub(crate) fn free_space(dir: &Path) -> io::Result<(Option<u64>, Option<u64>)> {
    let path = CString::new(dir.as_os_str().as_bytes())?;
    // SAFETY: the path is NUL-terminated; `statvfs` is plain numbers, and the call writes within it.
    let stat = unsafe {
        let mut stat = std::mem::zeroed::<libc::statvfs>();
        if libc::statvfs(path.as_ptr(), &mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        stat
    };
    let bytes = (stat.f_blocks > 0).then(|| stat.f_bavail * stat.f_frsize);
    Ok((bytes, (stat.f_files > 0).then_some(stat.f_favail)))
}
