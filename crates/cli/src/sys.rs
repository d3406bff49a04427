//! The few system calls that the standard library lacks.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io::{self, PipeReader};
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Ends this process quietly when whoever reads its output goes away. For commands that only print.
pub(crate) fn default_sigpipe() {
    // SAFETY: installs the default action; no handler of ours is involved.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Ends this process without anything more.
pub(crate) fn exit_now(code: u8) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code.into()) }
}

/// The effective user and group.
pub(crate) fn user_and_group() -> (u32, u32) {
    // SAFETY: these calls take nothing and cannot fail.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// The number of a group of this host.
pub(crate) fn group_number(name: &str) -> Option<u32> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: the string lives until the call returns; what it gives is read before another call could change it.
    unsafe { libc::getgrnam(name.as_ptr()).as_ref() }.map(|group| group.gr_gid)
}

/// Whether this process may do what only root may.
pub(crate) fn is_root() -> bool {
    user_and_group().0 == 0
}

/// From now on this process makes files and folders for its user only.
pub(crate) fn private_umask() {
    // SAFETY: takes a number and cannot fail.
    unsafe { libc::umask(0o077) };
}

/// The folder of logs: /var/log/hayloft for root, else one of the user's state.
pub(crate) fn log_dir() -> Option<PathBuf> {
    if is_root() {
        return Some("/var/log/hayloft".into());
    }
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    Some(state.or_else(home)?.join("hayloft"))
}

/// Sends a signal to a process, or with a negative number to a process group.
///
/// # Errors
/// When there is no such process, or it is somebody else's.
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::kill(pid, signal) })
}

/// Makes this process the leader of a session without a terminal.
///
/// # Errors
/// When it leads a process group already.
pub(crate) fn new_session() -> io::Result<()> {
    // SAFETY: takes nothing.
    check(unsafe { libc::setsid() })
}

/// Has a command start as the leader of a session of its own, without a terminal: what ends the caller's session or comes
/// from its keys does not reach it, and the scheduler counts it apart from what the caller runs (docs/operations.md,
/// "Sessions").
pub(crate) fn in_own_session(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec one system call is made.
    unsafe { command.pre_exec(new_session) }
}

/// Has the kernel send SIGTERM to this process when its parent ends. `parent` is its parent as far as
/// the caller knows: when it has ended already, that is an error.
///
/// # Errors
/// When the parent is gone.
pub(crate) fn die_with_parent() -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) })?;
    // SAFETY: takes nothing.
    match unsafe { libc::getppid() } {
        1 => Err(io::Error::other("the parent process has ended")),
        _ => Ok(()),
    }
}

/// Has the kernel end what a command starts when this process ends, however that happens.
pub(crate) fn ends_with_parent(command: &mut Command) -> &mut Command {
    let ends = || {
        // SAFETY: plain numbers.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })
    };
    // SAFETY: between fork and exec one system call is made.
    unsafe { command.pre_exec(ends) }
}

/// Becomes another program; returns why not.
pub(crate) fn exec(command: &[std::ffi::OsString]) -> io::Error {
    Command::new(&command[0]).args(&command[1..]).exec()
}

/// Whether keys of the terminal reach this process: it is of the group in front of it.
pub(crate) fn is_in_foreground() -> bool {
    let Ok(terminal) = std::fs::File::open("/dev/tty") else { return false };
    // SAFETY: an open descriptor, and calls that take nothing.
    unsafe { libc::tcgetpgrp(std::os::fd::AsRawFd::as_raw_fd(&terminal)) == libc::getpgrp() }
}

/// Ends this process by a signal, as a command has ended that it stands for. Returns if the signal does not end it.
pub(crate) fn end_by(signal: i32) {
    // SAFETY: plain numbers; a core of this process would be of no use to anybody.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
    std::thread::sleep(std::time::Duration::from_millis(100));
}

/// A copy of a standard descriptor, as a file.
///
/// # Errors
/// When it is closed, or too many files are open.
pub(crate) fn standard(number: i32) -> io::Result<std::fs::File> {
    use std::os::fd::FromRawFd;
    // SAFETY: plain numbers; the new descriptor is nobody else's.
    unsafe {
        let fd = libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3);
        check(fd)?;
        Ok(std::fs::File::from_raw_fd(fd))
    }
}

/// Lets standard output go nowhere from now on; whoever reads it sees its end.
///
/// # Errors
/// When /dev/null cannot be opened.
pub(crate) fn close_stdout() -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    // SAFETY: both descriptors are open; 1 is replaced in one step.
    check(unsafe { libc::dup2(null.as_raw_fd(), 1) })
}

/// Unmounts with the flags of umount2(2).
///
/// # Errors
/// As umount2(2) says.
pub(crate) fn unmount(dir: &Path, flags: i32) -> io::Result<()> {
    let dir = c_path(dir)?;
    // SAFETY: the string lives until the call returns.
    check(unsafe { libc::umount2(dir.as_ptr(), flags) })
}

/// Changes the flags of mount(2) that a mount has.
///
/// # Errors
/// As mount(2) says; only root may.
pub(crate) fn remount(dir: &Path, flags: libc::c_ulong) -> io::Result<()> {
    let dir = c_path(dir)?;
    let none = std::ptr::null();
    // SAFETY: the string lives until the call returns; for MS_REMOUNT the kernel reads no other one.
    check(unsafe { libc::mount(none, dir.as_ptr(), none, libc::MS_REMOUNT | flags, none.cast()) })
}

/// Mounts a fresh tmpfs.
///
/// # Errors
/// As mount(2) says; only root may.
pub(crate) fn mount_tmpfs(dir: &Path) -> io::Result<()> {
    let dir = c_path(dir)?;
    let kind = c"tmpfs";
    let options = c"mode=0755";
    // SAFETY: all strings live until the call returns.
    check(unsafe { libc::mount(kind.as_ptr(), dir.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast()) })
}

/// How many bytes the file system at a path holds.
///
/// # Errors
/// As statvfs(3) says.
pub(crate) fn used_bytes(path: &Path) -> io::Result<u64> {
    let path = c_path(path)?;
    // SAFETY: zero is a valid value of every field; string and structure live until the call returns.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    check(unsafe { libc::statvfs(path.as_ptr(), &raw mut stat) })?;
    Ok((stat.f_blocks - stat.f_bfree) * stat.f_frsize)
}

/// Sets the modification time of a file or link itself.
///
/// # Errors
/// As utimensat(2) says.
pub(crate) fn set_mtime(path: &Path, secs: i64, nanos: i64) -> io::Result<()> {
    let path = c_path(path)?;
    let omit = libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT };
    let times = [omit, libc::timespec { tv_sec: secs, tv_nsec: nanos }];
    // SAFETY: the string and the two times live until the call returns.
    check(unsafe {
        libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), libc::AT_SYMLINK_NOFOLLOW)
    })
}

/// Where the signal handler writes to.
static SIGNAL_PIPE: AtomicI32 = AtomicI32::new(-1);

/// Passes a signal's number on; does only what signal-safety(7) allows.
extern "C" fn pass_on(signal: libc::c_int) {
    let number = signal as u8;
    // SAFETY: write(2) is safe in a handler; the descriptor is never closed and the buffer is a local.
    unsafe { libc::write(SIGNAL_PIPE.load(Ordering::Relaxed), (&raw const number).cast(), 1) };
}

/// From now on the signals do nothing but come out of the reader, a byte with the number of each.
/// Programs that we start get them as usual: a handler does not outlive exec, as a blocked mask would.
///
/// # Errors
/// When there are too many open files.
pub(crate) fn catch_signals(signals: &[i32]) -> io::Result<PipeReader> {
    let (reader, writer) = io::pipe()?;
    SIGNAL_PIPE.store(writer.into_raw_fd(), Ordering::Relaxed);
    for signal in signals {
        // SAFETY: zero is a valid sigaction; the handler is as signal-safety(7) asks.
        let outcome = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = pass_on as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(*signal, &raw const action, std::ptr::null_mut())
        };
        check(outcome)?;
    }
    Ok(reader)
}
