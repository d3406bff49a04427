//! The system calls that `rustix` lacks, each behind a safe signature.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_long(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// A process that we made.
#[derive(Debug)]
pub(crate) struct Child {
    /// Its number, as this process sees it.
    pub pid: i32,
    /// A descriptor that becomes readable when it ends.
    pub pidfd: OwnedFd,
}

/// Both sides of [`fork`].
pub(crate) enum Forked {
    /// In the caller.
    Parent(Child),
    /// In the new process.
    Child,
}

/// Fails when this process has more threads than one: a [`fork`] has only one of them, and would wait for ever for a
/// lock that another one held.
///
/// # Errors
/// EDEADLK then; also when /proc is not there.
pub(crate) fn check_single_thread() -> io::Result<()> {
    match std::fs::read_dir("/proc/self/task")?.count() {
        1 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EDEADLK)),
    }
}

/// Makes a process like fork(2) does, in the new namespaces that `flags` of clone3(2) name. Only in a process
/// of one thread: see [`check_single_thread`].
///
/// # Errors
/// As clone3(2) says.
pub(crate) fn fork(flags: u64) -> io::Result<Forked> {
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

/// Ends this process without running anything that belongs to the process it is a copy of.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code) }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
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
}

fn duration(time: libc::timeval) -> Duration {
    Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000)
}

/// Waits for the end of a child, of any with `None`.
///
/// # Errors
/// ECHILD when there is none.
pub(crate) fn wait(pid: Option<i32>, block: bool) -> io::Result<Option<Ended>> {
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
    }))
}

/// Sends a signal; negative numbers and -1 mean what they mean to kill(2).
///
/// # Errors
/// As kill(2) says.
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Sends a signal to the process of a descriptor.
///
/// # Errors
/// ESRCH when it has ended.
pub(crate) fn pidfd_kill(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: an open descriptor and plain numbers.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) };
    check_long(result).map(drop)
}

/// When a process was started, in ticks since the machine was: with its number it means one process for ever.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, which may have anything in it, is in parentheses; the time is the twentieth field after it.
    text.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// Gives this process a mount namespace of its own, a copy of the one it had; and, where the kernel knows them, a
/// namespace of control groups in which its own group is the top.
///
/// # Errors
/// As unshare(2) says.
pub(crate) fn new_mount_namespace() -> io::Result<()> {
    // SAFETY: plain numbers; file descriptors stay shared with nobody, since this process has one thread.
    let unshare = |flags| check(unsafe { libc::unshare(flags) }).map(drop);
    unshare(libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP).or_else(|_| unshare(libc::CLONE_NEWNS))
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
pub(crate) struct Mask(libc::sigset_t);

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mask")
    }
}

/// Holds these signals back and gives a descriptor that they are read from, and what was held back before.
///
/// # Errors
/// When there are too many open files.
pub(crate) fn signals_by_descriptor(signals: &[i32]) -> io::Result<(OwnedFd, Mask)> {
    let set = signal_set(signals);
    let mut before = Mask(signal_set(&[]));
    // SAFETY: both sets live until the call returns.
    check(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, &raw mut before.0) })?;
    // SAFETY: as above; the descriptor is new and ours.
    let fd = check(unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, before))
}

/// Holds back what was held back before; what has come meanwhile acts now.
pub(crate) fn restore_signals(mask: &Mask) {
    // SAFETY: the set lives until the call returns.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const mask.0, std::ptr::null_mut()) };
}

/// The next signal from [`signals_by_descriptor`], if one has come.
pub(crate) fn next_signal(signals: BorrowedFd<'_>) -> Option<i32> {
    // SAFETY: zero is a valid value, the kernel fills it, and the size is its own.
    let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::signalfd_siginfo>();
    let read = unsafe { libc::read(signals.as_raw_fd(), (&raw mut info).cast(), size) };
    (read == size as isize).then_some(info.ssi_signo as i32)
}

/// Sends the calling thread a signal.
#[cfg(test)]
pub(crate) fn signal_this_thread(signal: i32) {
    // SAFETY: the thread is there.
    assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), signal) }, 0);
}

/// The first of these signals that is held back and has come. It stays so.
pub(crate) fn pending_signal(signals: &[i32]) -> Option<i32> {
    let mut set = signal_set(&[]);
    // SAFETY: the set lives until both calls have returned.
    unsafe {
        libc::sigpending(&raw mut set);
        signals.iter().copied().find(|signal| libc::sigismember(&raw const set, *signal) == 1)
    }
}

/// All signals as a fresh process has them: none held back, the default action for each.
pub(crate) fn reset_signals() {
    let none = signal_set(&[]);
    // SAFETY: default actions involve no handler of ours; signals that cannot be changed are left alone.
    unsafe {
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Changes the flags of a mount: `MOUNT_ATTR_*` of mount_setattr(2).
///
/// # Errors
/// As mount_setattr(2) says.
pub(crate) fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    set: u64,
    clear: u64,
    recursive: bool,
) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: path and structure live until the call returns, and the size is the structure's.
    check_long(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Installs a seccomp filter on this process.
///
/// # Errors
/// EACCES without CAP_SYS_ADMIN and no_new_privs.
pub(crate) fn install_filter(program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, which lives until the call returns, and changes nothing in it.
    check_long(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    })
    .map(drop)
}

/// Swaps to a device from now on, with the lowest priority.
///
/// # Errors
/// As swapon(2) says.
pub(crate) fn swap_on(device: &Path) -> io::Result<()> {
    let device = c_path(device)?;
    // SAFETY: the string lives until the call returns.
    check(unsafe { libc::swapon(device.as_ptr(), 0) }).map(drop)
}

/// Brings back what is swapped to a device, and stops swapping to it.
///
/// # Errors
/// As swapoff(2) says: EINVAL when it is not used for swapping, ENOMEM when memory has no room for it.
pub(crate) fn swap_off(device: &Path) -> io::Result<()> {
    let device = c_path(device)?;
    // SAFETY: the string lives until the call returns.
    check(unsafe { libc::swapoff(device.as_ptr()) }).map(drop)
}

const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;

/// The device goes when its last user does.
pub(crate) const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Nothing is written to the file.
pub(crate) const LO_FLAGS_READ_ONLY: u32 = 1;
/// The file's pages are not cached a second time.
pub(crate) const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    numbers: [u64; 5],
    number: u32,
    encrypt: [u32; 2],
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// The number of a loop device that was free a moment ago.
///
/// # Errors
/// When none can be made.
pub(crate) fn free_loop_device(control: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: the ioctl takes no argument.
    check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })
}

/// Sets a file behind an open loop device.
///
/// # Errors
/// EBUSY when somebody else has taken the device.
pub(crate) fn configure_loop(device: BorrowedFd<'_>, file: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    // SAFETY: zero is a valid value of every field.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = file.as_raw_fd() as u32;
    config.info.flags = flags;
    // SAFETY: the ioctl reads a `struct loop_config`, which lives until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) }).map(drop)
}

/// Brings the loopback interface of this network namespace up.
///
/// # Errors
/// As netdevice(7) says.
pub(crate) fn loopback_up() -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: zero is a valid ifreq; the kernel reads the name and the flags, which are set.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = *from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)).map(drop)
    }
}

/// Becomes this user in every respect: real, effective and saved.
///
/// # Errors
/// As setresuid(2) and setgroups(2) say.
pub(crate) fn become_user(uid: u32, gid: u32, groups: Option<&[u32]>) -> io::Result<()> {
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
pub(crate) fn exec_file(file: BorrowedFd<'_>, args: &[CString], env: &[CString]) -> io::Error {
    let (args, env) = (pointers(args), pointers(env));
    // SAFETY: both lists end in a null pointer, and all strings live until the call fails.
    unsafe {
        let (args, env) = (args.as_ptr(), env.as_ptr());
        libc::syscall(libc::SYS_execveat, file.as_raw_fd(), c"".as_ptr(), args, env, libc::AT_EMPTY_PATH)
    };
    io::Error::last_os_error()
}

/// Waits until this process is killed.
pub(crate) fn wait_for_ever() -> ! {
    loop {
        // SAFETY: takes nothing.
        unsafe { libc::pause() };
    }
}

/// From now on no other process of this user may look into this one: what it has open, its program, its memory. The
/// next exec ends that.
///
/// # Errors
/// Never, on Linux.
pub(crate) fn hide_from_others() -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }).map(drop)
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
}

/// Replaces this process by a program.
pub(crate) fn exec(path: &Path, args: &[CString], env: &[CString]) -> io::Error {
    let path = match c_path(path) {
        Ok(path) => path,
        Err(error) => return error,
    };
    // SAFETY: both lists end in a null pointer, and all strings live until the call fails.
    unsafe { libc::execve(path.as_ptr(), pointers(args).as_ptr(), pointers(env).as_ptr()) };
    io::Error::last_os_error()
}

/// Every descriptor from this number on is closed by the next exec.
///
/// # Errors
/// ENOSYS before Linux 5.11.
pub(crate) fn close_on_exec_from(first: u32) -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: plain numbers; nothing is closed now.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, CLOSE_RANGE_CLOEXEC) })
        .map(drop)
}

/// Closes every descriptor from 3 on but these. Only for a process that uses no other one from then on, and ends
/// without closing any.
pub(crate) fn close_all_but(keep: &mut [i32]) {
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
pub(crate) fn replace_standard(fd: impl AsFd, number: i32) -> io::Result<()> {
    assert!((0..=2).contains(&number), "only standard descriptors are replaced");
    // SAFETY: an open descriptor onto 0, 1 or 2, which the standard library expects to be open and nothing more.
    check(unsafe { libc::dup2(fd.as_fd().as_raw_fd(), number) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernel() {
        assert_eq!((size_of::<LoopInfo>(), size_of::<LoopConfig>()), (232, 304));
        assert_eq!(size_of::<libc::mount_attr>(), 32);
    }

    #[test]
    fn processes_have_a_start_time() {
        let own = std::process::id() as i32;
        assert!(start_time(own).is_some_and(|time| time > 0));
        assert_eq!(start_time(own), start_time(own));
        assert_eq!(start_time(i32::MAX), None);
    }

    #[test]
    fn a_process_with_threads_is_not_copied() {
        // Tests run in a thread of their own.
        let error = check_single_thread().err().and_then(|error| error.raw_os_error());
        assert_eq!(error, Some(libc::EDEADLK));
    }
}
