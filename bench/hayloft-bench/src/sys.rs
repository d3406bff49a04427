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

/// Processor time, of user and kernel together, of all processes that this one has started and waited for.
pub(crate) fn children_cpu_seconds() -> io::Result<f64> {
    // SAFETY: `rusage` is plain numbers, and the call writes within it.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        if libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) != 0 {
            return Err(io::Error::last_os_error());
        }
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok(seconds(usage.ru_utime) + seconds(usage.ru_stime))
}

/// Processor time, of user and kernel together, of a process that is running: fields 14 and 15 of proc_pid_stat(5).
pub(crate) fn process_cpu_seconds(pid: u32) -> io::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let ticks = cpu_ticks(&stat).ok_or_else(|| io::Error::other(format!("not understood: {stat}")))?;
    // SAFETY: touches no memory of ours.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Ok(ticks as f64 / per_second as f64)
}

/// The name, the second field, may hold anything but ends with the last parenthesis.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let after_name = stat.rsplit_once(')')?.1;
    let mut fields = after_name.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let stat = "12 (a) b (c) S 1 12 12 0 -1 4194560 105 0 0 0 70 8 3 4 20 0 1 0 5 6 7";
        assert_eq!(cpu_ticks(stat), Some(78));
        assert!(process_cpu_seconds(std::process::id()).is_ok());
        assert!(children_cpu_seconds().is_ok());
    }
}
