//! Processes by system calls, each behind a safe signature: made, waited for, signalled, turned into programs.
#![allow(unsafe_code)]

mod program;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

pub use program::Program;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_long(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A process that we made.
#[derive(Debug)]
pub struct Child {
    /// Its number, as this process sees it.
    pub pid: i32,
    /// A descriptor that becomes readable when it ends.
    pub pidfd: OwnedFd,
}

/// Both sides of [`fork`].
pub enum Forked {
    /// In the caller.
    Parent(Child),
    /// In the new process.
    Child,
}

/// The end of a scope of threads does not wait until the kernel has none of them.
const THREAD_ENDS_WITHIN_MS: u32 = 50;

/// Fails when this process has more threads than one: a [`fork`] has only one of them, and would wait for ever for a
/// lock that another one held. One that has done its work and is on its way out is waited for.
///
/// # Errors
/// EDEADLK then; also when /proc is not there.
pub fn check_single_thread() -> io::Result<()> {
    for _ in 0..THREAD_ENDS_WITHIN_MS {
        if std::fs::read_dir("/proc/self/task")?.count() == 1 {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Err(io::Error::from_raw_os_error(libc::EDEADLK))
}

/// Makes a process like fork(2) does, in the new namespaces that `flags` of clone3(2) name. Only in a process
/// of one thread: see [`check_single_thread`].
///
/// # Errors
/// As clone3(2) says.
pub fn fork(flags: u64) -> io::Result<Forked> {
    let mut pidfd: libc::c_int = -1;
    // SAFETY: zero is a valid value of every field: no stack (that of the caller is copied), no thread area.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags | libc::CLONE_PIDFD as u64;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: without CLONE_VM the child has a copy of everything; this process has one thread, so that no lock
    // of the allocator or of the standard library is held by a thread that the child lacks.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match check_long(pid)? {
        0 => Ok(Forked::Child),
        // SAFETY: the kernel has just opened it for us.
        pid => Ok(Forked::Parent(Child { pid: pid as i32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })),
    }
}

/// A stack for processes that share the memory of this one.
#[derive(Debug)]
pub struct Stack(Vec<u128>);

impl Default for Stack {
    fn default() -> Stack {
        Stack(vec![0; (64 << 10) / size_of::<u128>()])
    }
}

/// What a process does that shares the memory of the one that has made it.
pub trait Shared {
    /// Makes system calls only: it does not allocate, and changes nothing but atomics. It ends by becoming another program, or returns.
    fn run(&self);
}

/// Makes a process that runs this with the memory of the calling one, which goes on beside it; its number. That costs a third of a copy.
///
/// # Safety
/// Only in a process of one thread. What is run, all that it uses, and the stack stay where they are until that process has become another
/// program, or has ended.
///
/// # Errors
/// As clone(2) says.
pub unsafe fn fork_sharing<S: Shared>(stack: &mut Stack, what: &S) -> io::Result<i32> {
    extern "C" fn begin<S: Shared>(what: *mut libc::c_void) -> libc::c_int {
        // SAFETY: it is what was given, which is there by the contract.
        unsafe { (*what.cast::<S>()).run() };
        127
    }
    let top = stack.0.as_mut_ptr_range().end;
    let what = std::ptr::from_ref(what).cast_mut().cast();
    // SAFETY: by the caller; stacks grow down from their end, which is aligned.
    check(unsafe { libc::clone(begin::<S>, top.cast(), libc::CLONE_VM | libc::SIGCHLD, what) })
}

/// Ends this process without running anything that belongs to the process it is a copy of.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code) }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub pid: i32,
    /// Its exit code, 128+N after signal N.
    pub code: i32,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Processor time in user mode, of it and all it has waited for.
    pub user: Duration,
    /// Processor time in the kernel.
    pub system: Duration,
    /// Page faults that had to read.
    pub major_faults: u64,
    /// Most memory that any one of these processes had resident at a time, bytes.
    pub peak: u64,
}

fn duration(time: libc::timeval) -> Duration {
    Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000)
}

/// Waits for the end of a child, of any with `None`.
///
/// # Errors
/// ECHILD when there is none.
pub fn wait(pid: Option<i32>, block: bool) -> io::Result<Option<Ended>> {
    let mut status = 0;
    // SAFETY: zero is a valid rusage, and both outputs live until the call returns.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let options = if block { 0 } else { libc::WNOHANG };
    let pid = loop {
        // SAFETY: as above.
        match check(unsafe { libc::wait4(pid.unwrap_or(-1), &raw mut status, options, &raw mut usage) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            other => break other?,
        }
    };
    let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
    let code = signal.map_or_else(|| libc::WEXITSTATUS(status), |signal| 128 + signal);
    Ok((pid != 0).then(|| Ended {
        pid,
        code,
        signal,
        user: duration(usage.ru_utime),
        system: duration(usage.ru_stime),
        major_faults: usage.ru_majflt as u64,
        // The kernel counts it in KiB.
        peak: (usage.ru_maxrss as u64) << 10,
    }))
}

/// Sends a signal; negative numbers and -1 mean what they mean to kill(2).
///
/// # Errors
/// As kill(2) says.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Sends a signal to the process of a descriptor.
///
/// # Errors
/// ESRCH when it has ended.
pub fn pidfd_kill(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: an open descriptor and plain numbers.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) };
    check_long(result).map(drop)
}

fn signal_set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: sigemptyset makes a valid set of any memory, and sigaddset only takes numbers.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// The signals that a thread holds back.
#[derive(Clone, Copy)]
pub struct Mask(libc::sigset_t);

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mask")
    }
}

/// Holds these signals back and gives a descriptor that they are read from, and what was held back before.
///
/// # Errors
/// When there are too many open files.
pub fn signals_by_descriptor(signals: &[i32]) -> io::Result<(OwnedFd, Mask)> {
    let set = signal_set(signals);
    let mut before = Mask(signal_set(&[]));
    // SAFETY: both sets live until the call returns.
    check(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, &raw mut before.0) })?;
    // SAFETY: as above; the descriptor is new and ours.
    let fd = check(unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, before))
}

/// Holds back what was held back before; what has come meanwhile acts now.
pub fn restore_signals(mask: &Mask) {
    // SAFETY: the set lives until the call returns.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const mask.0, std::ptr::null_mut()) };
}

/// The next signal from [`signals_by_descriptor`], if one has come.
pub fn next_signal(signals: BorrowedFd<'_>) -> Option<i32> {
    // SAFETY: zero is a valid value, the kernel fills it, and the size is its own.
    let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::signalfd_siginfo>();
    let read = unsafe { libc::read(signals.as_raw_fd(), (&raw mut info).cast(), size) };
    (read == size as isize).then_some(info.ssi_signo as i32)
}

/// The first of these signals that is held back and has come. It stays so.
pub fn pending_signal(signals: &[i32]) -> Option<i32> {
    let mut set = signal_set(&[]);
    // SAFETY: the set lives until both calls have returned.
    unsafe {
        libc::sigpending(&raw mut set);
        signals.iter().copied().find(|signal| libc::sigismember(&raw const set, *signal) == 1)
    }
}

/// All signals as a fresh process has them: none held back, the default action for each.
pub fn reset_signals() {
    default_actions();
    hold_back_no_signals();
}

/// Who writes to a pipe that nobody reads is told by an error. The standard library does that before `main`, in programs that have one of it.
pub fn ignore_broken_pipes() {
    // SAFETY: no handler of ours is involved.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Undoes [`ignore_broken_pipes`]: for a program that this process becomes.
pub fn take_broken_pipes() {
    // SAFETY: no handler of ours is involved.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// The default action for each signal.
pub fn default_actions() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: default actions involve no handler of ours; signals that cannot be changed are left alone.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// No signal is held back any more.
pub fn hold_back_no_signals() {
    restore_signals(&Mask(signal_set(&[])));
}

/// Becomes this user in every respect: real, effective and saved.
///
/// # Errors
/// As setresuid(2) and setgroups(2) say.
pub fn become_user(uid: u32, gid: u32, groups: Option<&[u32]>) -> io::Result<()> {
    // SAFETY: plain numbers, and a slice that lives until the call returns. This process has one thread.
    unsafe {
        if let Some(groups) = groups {
            check(libc::setgroups(groups.len(), groups.as_ptr()))?;
        }
        check(libc::setresgid(gid, gid, gid))?;
        check(libc::setresuid(uid, uid, uid)).map(drop)
    }
}

/// Replaces this process by the program in an open file.
pub fn exec_file(file: BorrowedFd<'_>, args: &[CString], env: &[CString]) -> io::Error {
    let (args, env) = (pointers(args), pointers(env));
    // SAFETY: both lists end in a null pointer, and all strings live until the call fails.
    unsafe {
        let (args, env) = (args.as_ptr(), env.as_ptr());
        libc::syscall(libc::SYS_execveat, file.as_raw_fd(), c"".as_ptr(), args, env, libc::AT_EMPTY_PATH)
    };
    io::Error::last_os_error()
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
}

/// Replaces this process by a program.
pub fn exec(path: &Path, args: &[CString], env: &[CString]) -> io::Error {
    let path = match CString::new(path.as_os_str().as_bytes()) {
        Ok(path) => path,
        Err(error) => return error.into(),
    };
    // SAFETY: both lists end in a null pointer, and all strings live until the call fails.
    unsafe { libc::execve(path.as_ptr(), pointers(args).as_ptr(), pointers(env).as_ptr()) };
    io::Error::last_os_error()
}

/// Every descriptor from this number on is closed by the next exec.
///
/// # Errors
/// ENOSYS before Linux 5.11.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: plain numbers; nothing is closed now.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, CLOSE_RANGE_CLOEXEC) })
        .map(drop)
}

/// Closes every descriptor from 3 on but these. Only for a process that uses no other one from then on, and ends
/// without closing any.
pub fn close_all_but(keep: &mut [i32]) {
    keep.sort_unstable();
    let mut first = 3;
    for number in keep.iter().copied().chain([i32::MAX]) {
        if number > first {
            // SAFETY: plain numbers; whoever owns what is closed here never uses it again, by this function's contract.
            unsafe { libc::syscall(libc::SYS_close_range, first, number - 1, 0) };
        }
        first = first.max(number.saturating_add(1));
    }
}

/// Makes one of the standard descriptors the same as another one.
///
/// # Errors
/// As dup2(2) says.
pub fn replace_standard(fd: impl AsFd, number: i32) -> io::Result<()> {
    assert!((0..=2).contains(&number), "only standard descriptors are replaced");
    // SAFETY: an open descriptor onto 0, 1 or 2, which the standard library expects to be open and nothing more.
    check(unsafe { libc::dup2(fd.as_fd().as_raw_fd(), number) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_is_not_copied() {
        // Tests run in a thread of their own.
        let error = check_single_thread().err().and_then(|error| error.raw_os_error());
        assert_eq!(error, Some(libc::EDEADLK));
    }
}
