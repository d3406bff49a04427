//! The system calls that `rustix` and `hayloft-process` lack, each behind a safe signature.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Whether this process has children, ended or not.
pub(crate) fn has_children() -> bool {
    // SAFETY: zero is a valid value; nothing is waited for and nothing is taken.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT) == 0
    }
}

/// Holds all signals back and gives a descriptor that these ones are read from.
///
/// # Errors
/// When there are too many open files.
pub(crate) fn all_signals_by_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: the set is made valid before it is used and lives until the call returns.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        check(libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()))?;
    }
    hayloft_process::signals_by_descriptor(signals).map(|(fd, _)| fd)
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

/// Whether mounts of the namespace of this file, an open `/proc/PID/mountinfo`, have changed since it was opened or this was asked.
pub(crate) fn have_mounts_changed(mounts: &std::fs::File) -> bool {
    let mut ends = [PollFd::new(mounts, PollFlags::PRI)];
    let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut ends, Some(&at_once)) != Ok(0)
}

/// The signal that asks the first process of a task to end all of it.
pub(crate) fn end_all_signal() -> i32 {
    libc::SIGRTMIN()
}

/// Makes these the standard descriptors; all others close with the next exec.
///
/// # Errors
/// As dup2(2) says.
pub(crate) fn set_standard(standard: &[RawFd; 3]) -> io::Result<()> {
    for (number, fd) in standard.iter().enumerate() {
        // SAFETY: onto one of the standard descriptors, which are expected to be open and nothing more.
        check(unsafe { libc::dup2(*fd, number as i32) })?;
    }
    hayloft_process::close_on_exec_from(3)
}

/// A descriptor stays open with the next exec.
///
/// # Errors
/// When it is none.
pub(crate) fn keep_open(fd: RawFd) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }).map(drop)
}

/// Descriptors that have come with a message.
pub(crate) fn descriptors(control: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let of_message = |message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    };
    control.drain().filter_map(of_message).flatten().collect()
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

/// A descriptor that tasks of the runtime wait for to be readable.
///
/// # Errors
/// When it cannot be waited for.
pub(crate) fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays open, and the same one, as long as it is held there.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// A timer of the kernel that kills this process, also one that is stopped.
#[derive(Debug)]
pub(crate) struct Deadline(libc::timer_t);

impl Deadline {
    /// One that does not run yet.
    ///
    /// # Errors
    /// When the kernel has no room for it.
    pub(crate) fn new() -> io::Result<Deadline> {
        // SAFETY: zero is a valid value; all that is pointed to lives until the call returns.
        unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = libc::SIGKILL;
            let mut timer = std::mem::zeroed();
            check(libc::timer_create(libc::CLOCK_BOOTTIME, &raw mut event, &raw mut timer))?;
            Ok(Deadline(timer))
        }
    }

    /// So long from now, or never with zero; whatever was set before does not hold any more.
    pub(crate) fn set(&self, left: Duration) {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value =
            libc::timespec { tv_sec: left.as_secs() as libc::time_t, tv_nsec: left.subsec_nanos().into() };
        let times = libc::itimerspec { it_interval: zero, it_value: value };
        // SAFETY: the timer is there; the times live until the call returns.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, std::ptr::null_mut()) };
    }
}

/// A descriptor from which files are read that were closed on mounts that are marked with it.
///
/// # Errors
/// Without the right to it.
pub(crate) fn file_events() -> io::Result<OwnedFd> {
    let flags = libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK | libc::FAN_UNLIMITED_QUEUE;
    // Opening a file of ours has no effect on it, and does not wait for anybody.
    let opens = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_LARGEFILE | libc::O_NOATIME | libc::O_NONBLOCK;
    // SAFETY: plain numbers; a descriptor that is returned is nobody's yet.
    unsafe {
        let fd = check(libc::fanotify_init(flags, opens as libc::c_uint))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// From now on files that are closed on the mount at this point are told.
///
/// # Errors
/// As fanotify_mark(2) says.
pub(crate) fn hear_closed_files(events: &OwnedFd, point: &CStr) -> io::Result<()> {
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_MOUNT;
    let mask = libc::FAN_CLOSE_WRITE | libc::FAN_CLOSE_NOWRITE;
    // SAFETY: the string lives until the call returns.
    let done =
        unsafe { libc::fanotify_mark(events.as_raw_fd(), flags, mask, libc::AT_FDCWD, point.as_ptr()) };
    check(done).map(drop)
}

/// How many bytes can be read at once.
pub(crate) fn bytes_to_read(fd: &OwnedFd) -> usize {
    rustix::io::ioctl_fionread(fd).unwrap_or(0) as usize
}

/// Files that were closed, and whether they were open for writing, and for reading only; none when no more are waiting.
///
/// # Errors
/// One file cannot be opened; others may wait.
pub(crate) fn closed_files(events: &OwnedFd) -> io::Result<Vec<(OwnedFd, bool, bool)>> {
    const SIZE: usize = size_of::<libc::fanotify_event_metadata>();
    let mut buffer = [0; 256 * SIZE];
    let length = match rustix::io::read(events, &mut buffer[..]) {
        Err(rustix::io::Errno::AGAIN) => return Ok(Vec::new()),
        length => length?,
    };
    let event = |bytes: &[u8]| {
        // SAFETY: there are as many bytes, whatever their alignment; plain numbers, of which all values are valid.
        let event: libc::fanotify_event_metadata = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
        // SAFETY: the kernel has opened it for whoever reads the event.
        let file = (event.fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(event.fd) })?;
        let has = |kind| event.mask & kind != 0;
        Some((file, has(libc::FAN_CLOSE_WRITE), has(libc::FAN_CLOSE_NOWRITE)))
    };
    // Without further information, which was not asked for, all have the same length.
    Ok(buffer[..length].chunks_exact(SIZE).filter_map(event).collect())
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
