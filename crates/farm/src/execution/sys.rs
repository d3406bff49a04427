//! The system calls that `rustix` lacks, each behind a safe signature.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_long(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Both sides of [`fork`].
pub(crate) enum Forked {
    /// In the caller: the new process.
    Parent(i32),
    /// In the new process.
    Child,
}

/// Makes a process like fork(2) does, in the new namespaces that `flags` of clone3(2) name. Only in a process of one thread:
/// the copy would wait for ever for a lock that another thread held.
///
/// # Errors
/// As clone3(2) says.
pub(crate) fn fork(flags: i32) -> io::Result<Forked> {
    // SAFETY: zero is a valid value of every field: no stack (that of the caller is copied), no thread area.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: without CLONE_VM the child has a copy of everything, and the caller has one thread.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    Ok(match check_long(pid)? {
        0 => Forked::Child,
        pid => Forked::Parent(pid as i32),
    })
}

/// Ends this process without running anything that belongs to the process it is a copy of.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code) }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
}

/// The next child that has ended, if one has; none when there is no child.
pub(crate) fn reap() -> Option<(i32, Exit)> {
    let mut status = 0;
    // SAFETY: the output lives until the call returns.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let exit = match libc::WIFSIGNALED(status) {
        true => Exit::Signal(libc::WTERMSIG(status)),
        false => Exit::Code(libc::WEXITSTATUS(status)),
    };
    (pid > 0).then_some((pid, exit))
}

/// Whether this process has children, ended or not.
pub(crate) fn has_children() -> bool {
    // SAFETY: zero is a valid value; nothing is waited for and nothing is taken.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT) == 0
    }
}

/// Sends a signal; negative numbers mean what they mean to kill(2).
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: plain numbers. Who has ended already needs no signal.
    unsafe { libc::kill(pid, signal) };
}

/// Holds all signals back and gives a descriptor that these ones are read from.
///
/// # Errors
/// When there are too many open files.
pub(crate) fn signals_by_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: sets are made valid before they are used and live until the calls return; the descriptor is new and ours.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        check(libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()))?;
        let mut some = std::mem::zeroed();
        libc::sigemptyset(&raw mut some);
        for signal in signals {
            libc::sigaddset(&raw mut some, *signal);
        }
        let fd = check(libc::signalfd(-1, &raw const some, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The next signal from [`signals_by_descriptor`], if one has come.
pub(crate) fn next_signal(signals: BorrowedFd<'_>) -> Option<i32> {
    // SAFETY: zero is a valid value, the kernel fills it, and the size is its own.
    let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::signalfd_siginfo>();
    let read = unsafe { libc::read(signals.as_raw_fd(), (&raw mut info).cast(), size) };
    (read == size as isize).then_some(info.ssi_signo as i32)
}

/// All signals as a fresh process has them: none held back, the default action for each.
pub(crate) fn reset_signals() {
    // SAFETY: default actions involve no handler of ours; signals that cannot be changed are left alone.
    unsafe {
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Has the kernel send a signal to this process when its parent ends.
pub(crate) fn die_with_parent(signal: i32) {
    // SAFETY: plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) };
}

/// Processes that lose their parent below this one become its children.
pub(crate) fn adopt_orphans() {
    // SAFETY: plain numbers.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// The signal that asks the first process of a task to end all of it.
pub(crate) fn end_all_signal() -> i32 {
    libc::SIGRTMIN()
}

/// Becomes this user in every respect: real, effective and saved.
///
/// # Errors
/// As setresuid(2) and setgroups(2) say.
pub(crate) fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: plain numbers, and a slice that lives until the call returns. This process has one thread.
    unsafe {
        check(libc::setgroups(groups.len(), groups.as_ptr()))?;
        check(libc::setresgid(gid, gid, gid))?;
        check(libc::setresuid(uid, uid, uid)).map(drop)
    }
}

/// Makes descriptor `number` the same as another one, and all from 3 on close with the next exec.
///
/// # Errors
/// As dup2(2) says.
pub(crate) fn set_standard(standard: [BorrowedFd<'_>; 3]) -> io::Result<()> {
    for (number, fd) in standard.iter().enumerate() {
        // SAFETY: an open descriptor onto 0, 1 or 2; this process is about to become another program.
        check(unsafe { libc::dup2(fd.as_raw_fd(), number as i32) })?;
    }
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: plain numbers; nothing is closed now.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, CLOSE_RANGE_CLOEXEC) }).map(drop)
}

/// Moves descriptors to numbers above all that are open, and closes everything else but 0, 1 and 2.
///
/// # Errors
/// When there are too many open files.
pub(crate) fn keep_only(fds: Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
    let mut numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    numbers.sort_unstable();
    let mut first = 3;
    for number in numbers.into_iter().chain([i32::MAX]) {
        if number > first {
            // SAFETY: plain numbers; whatever else is open belongs to the process that this one is a copy of, whose owners are
            // never run here.
            unsafe { libc::syscall(libc::SYS_close_range, first, number - 1, 0) };
        }
        first = first.max(number.saturating_add(1));
    }
    Ok(fds)
}

/// Replaces this process by a program; returns when that fails.
pub(crate) fn exec(path: &CStr, args: &[CString], env: &[CString]) -> io::Error {
    let pointers = |strings: &[CString]| {
        strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>()
    };
    // SAFETY: both lists end in a null pointer, and all strings live until the call fails.
    unsafe { libc::execve(path.as_ptr(), pointers(args).as_ptr(), pointers(env).as_ptr()) };
    io::Error::last_os_error()
}

/// mount(2).
///
/// # Errors
/// As mount(2) says.
pub(crate) fn mount(source: &CStr, target: &CStr, kind: Option<&CStr>, flags: u64) -> io::Result<()> {
    let kind = kind.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: all strings live until the call returns; no data is passed.
    check(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind, flags, std::ptr::null()) }).map(drop)
}

/// A user of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: Vec<u8>,
}

/// Looks a user up by name, with all groups.
pub(crate) fn user(name: &str) -> Option<User> {
    let c_name = CString::new(name).ok()?;
    let mut buffer = vec![0; 16 << 10];
    // SAFETY: zero is a valid passwd; all buffers live until the calls return and their sizes are theirs; strings that the
    // result points to are in the buffer.
    unsafe {
        let mut entry: libc::passwd = std::mem::zeroed();
        let mut found = std::ptr::null_mut();
        let (text, size) = (buffer.as_mut_ptr(), buffer.len());
        libc::getpwnam_r(c_name.as_ptr(), &raw mut entry, text, size, &raw mut found);
        if found.is_null() {
            return None;
        }
        let mut groups = vec![0; 1024];
        let mut count = groups.len() as libc::c_int;
        if libc::getgrouplist(c_name.as_ptr(), entry.pw_gid, groups.as_mut_ptr(), &raw mut count) < 0 {
            return None;
        }
        groups.truncate(count as usize);
        let home = CStr::from_ptr(entry.pw_dir).to_bytes().to_vec();
        Some(User { uid: entry.pw_uid, gid: entry.pw_gid, groups, home })
    }
}

/// The name of a user of this machine.
pub(crate) fn user_name(uid: u32) -> Option<String> {
    let mut buffer = vec![0; 16 << 10];
    // SAFETY: as above.
    unsafe {
        let mut entry: libc::passwd = std::mem::zeroed();
        let mut found = std::ptr::null_mut();
        let (text, size) = (buffer.as_mut_ptr(), buffer.len());
        libc::getpwuid_r(uid, &raw mut entry, text, size, &raw mut found);
        (!found.is_null()).then(|| CStr::from_ptr(entry.pw_name).to_string_lossy().into_owned())
    }
}
