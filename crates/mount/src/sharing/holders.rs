//! Who holds a lock, and when they are gone.
//!
//! The kernel opens and closes files of this mount without a word (OPEN is answered with ENOSYS, see ADR 6), so that
//! a lock's end has to be found out otherwise, for the files that are locked and for no others. Whoever asks for a
//! lock waits in its system call for our answer; so `/proc/TID/syscall` names the descriptor, and pidfd_getfd(2)
//! gives us the open file itself for a moment. Put into an epoll of ours, it is no longer held by us, but the
//! epoll's `fdinfo` lists it as long as anybody has it: in whatever process, in flight on a socket, or mapped.
//!
//! - A lock of flock, or of `F_OFD_SETLK`, ends with its open file: exactly then.
//! - A lock of fcntl ends with its process, with the last open file through which the process locked, or when the
//!   process has no descriptor of the inode any more.
//!
//! inotify (the close of an open file of the inode) and pidfds (the end of a process) say when to look. Both only
//! hint: everything is also looked at a few times a second as long as there are locks, and when somebody is refused.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::ffi::CString;
use std::io::{self, Error};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

use crate::host::caller::{Capability, own_capability, process_of};
use crate::host::thread::{Place, place_of};

/// What a program called to get its lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Caller {
    /// The thread that waits for us.
    pub(crate) tid: u32,
    /// The descriptor that it named.
    pub(crate) fd: i32,
    /// The lock is to belong to the open file (`F_OFD_SETLK`).
    pub(crate) of_file: bool,
}

/// How often to look again at a caller that has not gone to sleep yet.
const LOOKS: u32 = 400;

/// System calls that lock and unlock.
#[cfg(target_arch = "x86_64")]
const LOCKING: &[libc::c_long] = &[
    libc::SYS_fcntl,
    libc::SYS_flock,
    // Of 32-bit programs; in 64 bits nothing that unlocks.
    55,
    143,
    221,
];
#[cfg(not(target_arch = "x86_64"))]
const LOCKING: &[libc::c_long] = &[libc::SYS_fcntl, libc::SYS_flock];

impl Caller {
    /// Finds out which descriptor a thread that waits for our answer wants locked.
    pub(crate) fn of(tid: u32) -> io::Result<Caller> {
        for look in 0..LOOKS {
            if let Place::Call { number, arguments } = place_of(tid)? {
                return Ok(Caller::in_call(tid, number, arguments));
            }
            Caller::await_sleep(look);
        }
        Err(Error::other("the caller is in no system call"))
    }

    /// Which descriptor a thread wants unlocked. `None`: it has not asked for that itself, but closes, or ends.
    pub(crate) fn that_unlocks(tid: u32) -> Option<Caller> {
        for look in 0..LOOKS {
            match place_of(tid).ok()? {
                Place::Call { number, arguments } => {
                    return LOCKING.contains(&number).then(|| Caller::in_call(tid, number, arguments));
                }
                Place::Elsewhere => return None,
                Place::Running => Caller::await_sleep(look),
            }
        }
        None
    }

    /// It has sent its request and is about to sleep.
    fn await_sleep(look: u32) {
        std::thread::sleep(std::time::Duration::from_micros(10 + u64::from(look)));
    }

    fn in_call(tid: u32, number: libc::c_long, arguments: [u64; 5]) -> Caller {
        let [fd, command, ..] = arguments.map(|argument| argument as i32);
        // Of a program of another word size the number means nothing; flock's commands are below these.
        let of_file =
            number != libc::SYS_flock && (libc::F_OFD_GETLK..=libc::F_OFD_SETLKW).contains(&command);
        Caller { tid, fd, of_file }
    }

    /// The open file itself. It counts as open for as long as the answer lives: keep it short.
    pub(crate) fn open_file(&self) -> io::Result<OwnedFd> {
        /// `PIDFD_THREAD`: the thread's own table of descriptors, not its process's. Linux 6.9.
        const PIDFD_THREAD: libc::c_int = libc::O_EXCL;
        let pidfd =
            pidfd_open(self.tid, PIDFD_THREAD).or_else(|_| pidfd_open(living_process_of(self.tid)?, 0))?;
        // SAFETY: numbers only; the result is a new descriptor of ours.
        check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), self.fd, 0) })
    }
}

fn living_process_of(tid: u32) -> io::Result<u32> {
    process_of(tid).ok_or_else(|| Error::other("the thread has ended"))
}

/// Whether two threads use one table of descriptors.
pub(crate) fn share_descriptors(one: u32, other: u32) -> bool {
    const KCMP_FILES: libc::c_int = 2;
    // SAFETY: numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_FILES, 0, 0) == 0 }
}

fn pidfd_open(pid: u32, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: numbers only; the result is a new descriptor of ours.
    check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) })
}

/// Closes an open file: what was stored in it through maps is written by that.
///
/// # Errors
/// It could not be written. Nobody else is told who closes afterwards.
pub(crate) fn close(file: OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is ours alone, and not used afterwards.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

fn check(result: libc::c_long) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the callers pass the result of a call that makes a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(result as RawFd) })
}

/// Whether this client may look into other processes as far as shared locks need.
///
/// # Errors
/// In words, why not.
pub(crate) fn possible() -> Result<(), &'static str> {
    if !own_capability(Capability::SysPtrace) {
        return Err("it needs CAP_SYS_PTRACE");
    }
    if std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() == "3") {
        return Err("kernel.yama.ptrace_scope=3 forbids it");
    }
    let own = pidfd_open(std::process::id(), 0).map_err(|_| "the kernel has no pidfds")?;
    // SAFETY: numbers only; the result is a new descriptor of ours.
    let copied = check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, own.as_raw_fd(), own.as_raw_fd(), 0) });
    copied.map_err(|_| "the kernel has no pidfd_getfd")?;
    std::fs::read("/proc/self/syscall").map(drop).map_err(|_| "there is no /proc/PID/syscall")
}

/// Lets this process have as many descriptors as it may: each holder of a lock takes one.
pub(crate) fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 && limit.rlim_cur < limit.rlim_max {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// Open files, known without being held open.
#[derive(Debug)]
pub(crate) struct OpenFiles(OwnedFd);

impl OpenFiles {
    pub(crate) fn new() -> io::Result<OpenFiles> {
        // SAFETY: a number only; the result is a new descriptor of ours.
        check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }.into()).map(OpenFiles)
    }

    /// Adds one, which stays until nobody has it open.
    ///
    /// The first time in a mount's life the kernel asks the file system whether it can poll: not to be called on a
    /// thread that has to answer that.
    pub(crate) fn add(&self, file: &OwnedFd) -> io::Result<()> {
        let mut none = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: both descriptors are open, the event is valid.
        let result = unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, file.as_raw_fd(), &raw mut none)
        };
        let error = Error::last_os_error();
        // It is in there already, with the same number.
        if result == 0 || error.raw_os_error() == Some(libc::EEXIST) { Ok(()) } else { Err(error) }
    }

    /// Whether anybody still has any of them open. In doubt: yes.
    pub(crate) fn any(&self) -> bool {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()));
        info.map_or(true, |info| info.lines().any(|line| line.starts_with("tfd:")))
    }
}

/// A process that holds locks.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pidfd: OwnedFd,
}

impl Process {
    pub(crate) fn of(tid: u32) -> io::Result<Process> {
        let pid = living_process_of(tid)?;
        Ok(Process { pid, pidfd: pidfd_open(pid, 0)? })
    }

    pub(crate) fn pidfd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }

    /// Whether it has ended, with all its threads.
    pub(crate) fn has_ended(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.pidfd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid structure.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    /// Whether any of its threads has a descriptor of the inode. In doubt: yes. `likely`: look there first.
    pub(crate) fn has_open(&self, file: FileId, likely: i32) -> bool {
        let fd = |path: String| FileId::of_path(&path).is_ok_and(|found| found == file);
        if fd(format!("/proc/{}/fd/{likely}", self.pid)) {
            return true;
        }
        // Threads may have tables of their own, and the first one may have ended.
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else {
            return !self.has_ended();
        };
        for task in tasks {
            let Ok(task) = task else { return true };
            let tid = task.file_name().to_string_lossy().parse().unwrap_or(self.pid);
            if tid != self.pid && share_descriptors(self.pid, tid) {
                continue;
            }
            let Ok(fds) = std::fs::read_dir(task.path().join("fd")) else { continue };
            for entry in fds {
                let Ok(entry) = entry else { return true };
                if fd(entry.path().to_string_lossy().into_owned()) {
                    return true;
                }
            }
        }
        false
    }
}

/// An inode of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct FileId {
    device: (u32, u32),
    pub(crate) ino: u64,
}

impl FileId {
    pub(crate) fn of(file: &OwnedFd) -> io::Result<FileId> {
        FileId::stat(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH)
    }

    fn of_path(path: &str) -> io::Result<FileId> {
        let path = CString::new(std::ffi::OsStr::new(path).as_bytes())?;
        FileId::stat(libc::AT_FDCWD, &path, 0)
    }

    /// Asks the kernel only for what it knows: neither this mount nor a dead one elsewhere is waited for.
    fn stat(dir: RawFd, path: &std::ffi::CStr, flags: libc::c_int) -> io::Result<FileId> {
        // SAFETY: all zeroes are a valid statx.
        let mut stat: libc::statx = unsafe { std::mem::zeroed() };
        let flags = flags | libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
        // SAFETY: the path ends in NUL and the structure is valid.
        if unsafe { libc::statx(dir, path.as_ptr(), flags, libc::STATX_INO, &raw mut stat) } != 0 {
            return Err(Error::last_os_error());
        }
        Ok(FileId { device: (stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino })
    }
}

/// Waits for closes of watched inodes and ends of watched processes.
#[derive(Debug)]
pub(crate) struct Alarm {
    poll: OwnedFd,
    closes: OwnedFd,
    /// Wakes the waiting thread for other reasons.
    bell: OwnedFd,
}

impl Alarm {
    pub(crate) fn new() -> io::Result<Alarm> {
        // SAFETY: numbers only; the results are new descriptors of ours.
        let (poll, closes, bell) = unsafe {
            (
                check(libc::epoll_create1(libc::EPOLL_CLOEXEC).into())?,
                check(libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC).into())?,
                check(libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).into())?,
            )
        };
        let alarm = Alarm { poll, closes, bell };
        alarm.listen(alarm.closes.as_raw_fd())?;
        alarm.listen(alarm.bell.as_raw_fd())?;
        Ok(alarm)
    }

    fn listen(&self, fd: RawFd) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        // SAFETY: both descriptors are open, the event is valid.
        let result =
            unsafe { libc::epoll_ctl(self.poll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) };
        if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
    }

    /// Tells when the process ends, until it is dropped.
    pub(crate) fn watch_process(&self, process: &Process) {
        // Without it the end is noticed a little later.
        let _ = self.listen(process.pidfd());
    }

    /// Forgets a process that has ended: its pidfd would ring for ever.
    pub(crate) fn forget_process(&self, process: &Process) {
        // SAFETY: both descriptors are open; no event is needed.
        unsafe {
            libc::epoll_ctl(self.poll.as_raw_fd(), libc::EPOLL_CTL_DEL, process.pidfd(), std::ptr::null_mut())
        };
    }

    /// Tells about closes of an inode; `None` when the kernel has no more room for it.
    pub(crate) fn watch_closes(&self, file: &OwnedFd) -> Option<i32> {
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        let mask = libc::IN_CLOSE_WRITE | libc::IN_CLOSE_NOWRITE;
        // SAFETY: the path ends in NUL.
        let watch = unsafe { libc::inotify_add_watch(self.closes.as_raw_fd(), path.as_ptr(), mask) };
        (watch >= 0).then_some(watch)
    }

    pub(crate) fn unwatch_closes(&self, watch: i32) {
        // SAFETY: numbers only; the watch may be gone already.
        unsafe { libc::inotify_rm_watch(self.closes.as_raw_fd(), watch) };
    }

    pub(crate) fn ring(&self) {
        let one = 1u64;
        // SAFETY: eight valid bytes.
        unsafe { libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Waits for something to look at, or for the time to be over.
    pub(crate) fn wait(&self, timeout_ms: i32) -> Rang {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: room for as many events as said.
        let count = unsafe { libc::epoll_wait(self.poll.as_raw_fd(), events.as_mut_ptr(), 16, timeout_ms) };
        let own = [self.closes.as_raw_fd() as u64, self.bell.as_raw_fd() as u64];
        let is_process = |event: &libc::epoll_event| !own.contains(&{ event.u64 });
        let ended = events.iter().take(count.max(0) as usize).any(is_process);
        let mut rang = Rang { closed: HashSet::new(), any_closed: false, ended };
        let mut buffer = [0u8; 4096];
        loop {
            // SAFETY: the buffer is valid for its length.
            let len =
                unsafe { libc::read(self.closes.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
            let Some(mut rest) = usize::try_from(len).ok().filter(|len| *len > 0).map(|len| &buffer[..len])
            else {
                break;
            };
            while let Some((event, behind)) = rest.split_at_checked(size_of::<libc::inotify_event>()) {
                let field = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| event[at + byte]));
                rang.any_closed |= field(4) & libc::IN_Q_OVERFLOW != 0;
                rang.closed.insert(field(0) as i32);
                rest = behind.get(field(12) as usize..).unwrap_or_default();
            }
        }
        // SAFETY: the buffer is valid for its length. What it says does not matter, only that it said it.
        unsafe { libc::read(self.bell.as_raw_fd(), buffer.as_mut_ptr().cast(), 8) };
        rang
    }
}

/// What an [`Alarm`] rang for; beside that, somebody may have rung the bell.
#[derive(Debug)]
pub(crate) struct Rang {
    /// Watches of files that were closed.
    pub(crate) closed: HashSet<i32>,
    /// Others may have been, too many to tell.
    pub(crate) any_closed: bool,
    /// A process has ended.
    pub(crate) ended: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn the_descriptor_is_read_from_the_system_call() {
        let caller = Caller::in_call(5, libc::SYS_flock, [9, 6, 0, 0, 0]);
        assert_eq!(caller, Caller { tid: 5, fd: 9, of_file: false });
        let caller = Caller::in_call(5, libc::SYS_fcntl, [3, 0x25, 0, 0, 0]);
        assert_eq!(caller, Caller { tid: 5, fd: 3, of_file: true });
    }

    #[test]
    fn an_open_file_is_known_until_its_last_descriptor_is_closed() {
        // A pipe: files of local file systems cannot be polled.
        let (reader, writer) = io::pipe().unwrap();
        let files = OpenFiles::new().unwrap();
        let reader = OwnedFd::from(reader);
        files.add(&reader).unwrap();
        files.add(&reader).unwrap();
        let copy = reader.try_clone().unwrap();
        drop(reader);
        assert!(files.any());
        drop(copy);
        assert!(!files.any());
        drop(writer);
    }

    #[test]
    fn a_process_has_open_what_it_has_open() {
        let process = Process::of(std::process::id()).unwrap();
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let id = FileId::of(&file).unwrap();
        assert!(process.has_open(id, file.as_raw_fd()) && process.has_open(id, -1));
        drop(file);
        assert!(!process.has_open(id, -1));
        assert!(!process.has_ended());
        assert!(share_descriptors(process.pid, process.pid));
        assert!(FileId::of(&OwnedFd::from(File::open("/dev/null").unwrap())).unwrap() != id);
    }
}
