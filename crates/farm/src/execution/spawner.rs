//! The process that starts tasks: small and of one thread, so that it can be copied, and another one than the agent, so that
//! tasks end when that does, whatever it was doing.
//!
//! It takes requests from a socket, some with descriptors, and says on it what has become of tasks. When the socket ends, or
//! nothing has come for as long as the lease, all tasks end.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use hayloft_process::{self as process, Forked};
use prost::Message;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags};
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::execution::init::{self, Descriptors, Report};
use crate::execution::sys;

/// What is asked of the spawner.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Request {
    /// Which task; 0 for a sign of life.
    #[prost(uint64, tag = "1")]
    pub task: u64,
    /// Start it: with the descriptors of what to run, standard input, output and error.
    #[prost(bool, tag = "2")]
    pub start: bool,
    /// Send it a signal.
    #[prost(int32, tag = "3")]
    pub signal: i32,
    /// End it at once.
    #[prost(bool, tag = "4")]
    pub end: bool,
    /// Its command makes namespaces itself, and ends with all that is in them.
    #[prost(bool, tag = "6")]
    pub plain: bool,
    /// From now on without a word for so long all tasks end, milliseconds.
    #[prost(uint64, tag = "5")]
    pub lease: u64,
}

/// What the spawner says.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Event {
    /// Which task; 0: it is ready.
    #[prost(uint64, tag = "1")]
    pub task: u64,
    /// How it has ended. Without one it was killed with all that belonged to it.
    #[prost(message, optional, tag = "2")]
    pub report: Option<Report>,
    /// When it is ready: whether tasks get namespaces.
    #[prost(bool, tag = "3")]
    pub namespaces: bool,
}

struct Running {
    task: u64,
    report: File,
    /// It has a PID namespace of its own.
    namespaces: bool,
}

struct Spawner {
    socket: OwnedFd,
    /// By the number of the first process.
    running: BTreeMap<i32, Running>,
    namespaces: bool,
    lease_ms: u64,
    /// When something has come last.
    heard_ms: u64,
}

/// Milliseconds that go on while the host sleeps.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Serves the socket that is standard input until it ends.
///
/// # Errors
/// When signals cannot be caught.
pub(crate) fn serve() -> io::Result<()> {
    let socket = rustix::io::dup(rustix::stdio::stdin())?;
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    let signals = sys::all_signals_by_descriptor(&[libc::SIGCHLD])?;
    let namespaces = can_have_namespaces();
    let mut spawner =
        Spawner { socket, running: BTreeMap::new(), namespaces, lease_ms: u64::MAX, heard_ms: now_ms() };
    spawner.say(&Event { task: 0, report: None, namespaces });
    loop {
        let mut ends = [PollFd::new(&spawner.socket, PollFlags::IN), PollFd::new(&signals, PollFlags::IN)];
        let left = spawner.lease_ms.saturating_sub(now_ms().saturating_sub(spawner.heard_ms)).min(60_000);
        let left = Timespec { tv_sec: (left / 1000) as i64, tv_nsec: (left % 1000 * 1_000_000) as i64 };
        let _ = poll(&mut ends, Some(&left));
        let (is_asked, has_signal) = (!ends[0].revents().is_empty(), !ends[1].revents().is_empty());
        if has_signal {
            while process::next_signal(signals.as_fd()).is_some() {}
            while let Ok(Some(ended)) = process::wait(None, false) {
                spawner.ended(ended.pid);
            }
        }
        if is_asked && !spawner.take_request() {
            break;
        }
        if now_ms().saturating_sub(spawner.heard_ms) >= spawner.lease_ms {
            spawner.end_all();
        }
    }
    // The agent has ended.
    spawner.end_all();
    while sys::has_children() {
        let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], None);
        while process::next_signal(signals.as_fd()).is_some() {}
        while let Ok(Some(_)) = process::wait(None, false) {}
    }
    Ok(())
}

/// Whether a process may have a PID namespace and a /proc of its own.
fn can_have_namespaces() -> bool {
    match process::fork((libc::CLONE_NEWPID | libc::CLONE_NEWNS) as u64) {
        Ok(Forked::Child) => {
            let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
            let done = sys::mount(c"none", c"/", None, libc::MS_REC | libc::MS_SLAVE)
                .and_then(|()| sys::mount(c"proc", c"/proc", Some(c"proc"), flags));
            process::exit_now(i32::from(done.is_err()))
        }
        Ok(Forked::Parent(child)) => {
            process::wait(Some(child.pid), true).is_ok_and(|ended| ended.is_some_and(|ended| ended.code == 0))
        }
        Err(_) => false,
    }
}

impl Spawner {
    fn say(&self, event: &Event) {
        let _ = rustix::net::send(&self.socket, &event.encode_to_vec(), SendFlags::NOSIGNAL);
    }

    /// False when the agent has ended.
    fn take_request(&mut self) -> bool {
        let mut bytes = [0; 256];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let length = match rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags) {
            Ok(message) if message.bytes > 0 => message.bytes,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return true,
            _ => return false,
        };
        let fds = sys::descriptors(&mut control);
        self.heard_ms = now_ms();
        let Ok(request) = Request::decode(&bytes[..length]) else { return true };
        if request.lease > 0 {
            self.lease_ms = request.lease;
        }
        let pid = self.running.iter().find(|(_, running)| running.task == request.task).map(|(pid, _)| *pid);
        match pid {
            None if request.start => self.start(request.task, fds, self.namespaces && !request.plain),
            Some(pid) if request.end => self.end(pid),
            Some(pid) if request.signal > 0 => drop(process::kill(pid, request.signal)),
            _ => {}
        }
        true
    }

    fn start(&mut self, task: u64, fds: Vec<OwnedFd>, namespaces: bool) {
        if let Err(error) = self.try_start(task, fds, namespaces) {
            let report = Report {
                failure: format!("start a process: {error}"),
                errno: error.raw_os_error().unwrap_or(libc::EIO),
                is_whole: true,
                ..Report::default()
            };
            self.say(&Event { task, report: Some(report), namespaces: self.namespaces });
        }
    }

    fn try_start(&mut self, task: u64, fds: Vec<OwnedFd>, namespaces: bool) -> io::Result<()> {
        let [execution, input, output, error] =
            <[OwnedFd; 4]>::try_from(fds).map_err(|_| io::Error::other("descriptors are missing"))?;
        let (reader, writer) = io::pipe()?;
        let flags = if namespaces { libc::CLONE_NEWPID | libc::CLONE_NEWNS } else { 0 };
        match process::fork(flags as u64)? {
            Forked::Child => {
                let standard = [input, output, error];
                init::run(Descriptors { execution, standard, report: writer.into() }, namespaces)
            }
            Forked::Parent(child) => {
                let report = File::from(OwnedFd::from(reader));
                self.running.insert(child.pid, Running { task, report, namespaces });
                Ok(())
            }
        }
    }

    fn end(&self, pid: i32) {
        let namespaces = self.running.get(&pid).is_some_and(|running| running.namespaces);
        let _ = process::kill(pid, if namespaces { libc::SIGKILL } else { sys::end_all_signal() });
    }

    fn end_all(&self) {
        self.running.keys().for_each(|pid| self.end(*pid));
    }

    /// A task's first process has ended, and with it the task.
    fn ended(&mut self, pid: i32) {
        let Some(mut running) = self.running.remove(&pid) else { return };
        let mut bytes = Vec::new();
        let _ = running.report.read_to_end(&mut bytes);
        let report = Report::decode(&*bytes).ok().filter(|report| report.is_whole);
        self.say(&Event { task: running.task, report, namespaces: self.namespaces });
    }
}
