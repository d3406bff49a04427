//! The process that starts tasks: small and of one thread, so that it can be copied, and another one than the agent, so that
//! tasks end when that does, whatever it was doing.
//!
//! It takes requests from a socket, some with descriptors, and says on it what has become of tasks. When the socket ends, or
//! nothing has come for as long as the lease, all tasks end. First processes of tasks that have ended, with their namespaces, are
//! kept for tasks to come, as long as the host's mounts stay as they are.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use hayloft_process::{self as process, Forked};
use prost::Message;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType,
};
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::execution::init::{self, REPORT_MAX, Report};
use crate::execution::sys::{self, Deadline};

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
    /// Its mounts beside the host's, as a number: a first process has those of one task and the next.
    #[prost(uint64, tag = "7")]
    pub mounts: u64,
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

/// First processes that wait for a task: more than hosts run at a time would be of no use.
const IDLE_MAX: usize = 64;

/// A first process.
struct First {
    /// What it runs; None while it waits for a task.
    task: Option<u64>,
    /// None when its end of it has ended: it takes a while until all that it has killed is gone.
    socket: Option<OwnedFd>,
    /// It has namespaces of its own.
    namespaces: bool,
    /// As [`Request::mounts`] of its tasks.
    mounts: u64,
    /// It was told to end.
    is_ending: bool,
}

struct Spawner {
    socket: OwnedFd,
    /// By their numbers.
    firsts: BTreeMap<i32, First>,
    namespaces: bool,
    lease_ms: u64,
    /// When something has come last.
    heard_ms: u64,
    /// The host's mounts: this process is told of changes.
    mounts: File,
    /// When the lease is long over: this process is killed then, and first processes with it.
    deadline: Deadline,
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
    let mounts = File::open("/proc/self/mountinfo")?;
    let firsts = BTreeMap::new();
    let (lease_ms, deadline) = (u64::MAX, Deadline::new()?);
    let mut spawner = Spawner { socket, firsts, namespaces, lease_ms, heard_ms: now_ms(), mounts, deadline };
    spawner.say(&Event { task: 0, report: None, namespaces });
    loop {
        let mut ends =
            vec![PollFd::new(&spawner.socket, PollFlags::IN), PollFd::new(&signals, PollFlags::IN)];
        let mut busy = Vec::new();
        for (pid, first) in &spawner.firsts {
            if let (Some(_), Some(socket)) = (first.task, &first.socket) {
                ends.push(PollFd::new(socket, PollFlags::IN));
                busy.push(*pid);
            }
        }
        let left = spawner.lease_ms.saturating_sub(now_ms().saturating_sub(spawner.heard_ms)).min(60_000);
        let left = Timespec { tv_sec: (left / 1000) as i64, tv_nsec: (left % 1000 * 1_000_000) as i64 };
        let _ = poll(&mut ends, Some(&left));
        let (is_asked, has_signal) = (!ends[0].revents().is_empty(), !ends[1].revents().is_empty());
        let told = ends[2..].iter().zip(&busy).filter(|(end, _)| !end.revents().is_empty());
        let told: Vec<i32> = told.map(|(_, pid)| *pid).collect();
        told.into_iter().for_each(|pid| spawner.hear(pid));
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
            // Until the agent says the next one.
            spawner.deadline.set(Duration::ZERO);
            spawner.lease_ms = u64::MAX;
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
            // A sixth more: time to end tasks in order, and nobody may take them for lost before four thirds.
            self.deadline.set(Duration::from_millis(request.lease + request.lease / 6));
        }
        let pid = self.firsts.iter().find(|(_, first)| first.task == Some(request.task)).map(|(pid, _)| *pid);
        match pid {
            None if request.start => self.start(&request, fds),
            Some(pid) if request.end => self.end(pid),
            Some(pid) if request.signal > 0 => drop(process::kill(pid, request.signal)),
            _ => {}
        }
        true
    }

    fn start(&mut self, request: &Request, fds: Vec<OwnedFd>) {
        let task = request.task;
        if let Err(error) = self.try_start(request, fds) {
            let report = Report {
                failure: format!("start a process: {error}"),
                errno: error.raw_os_error().unwrap_or(libc::EIO),
                is_whole: true,
                ..Report::default()
            };
            self.say(&Event { task, report: Some(report), namespaces: self.namespaces });
        }
    }

    fn try_start(&mut self, request: &Request, fds: Vec<OwnedFd>) -> io::Result<()> {
        let Request { task, mounts, .. } = *request;
        let namespaces = self.namespaces && !request.plain;
        if sys::have_mounts_changed(&self.mounts) {
            self.firsts.retain(|_, first| first.task.is_some());
        }
        let idle =
            |(_, first): &(&i32, &mut First)| namespaces && first.task.is_none() && first.mounts == mounts;
        if let Some((_, first)) = self.firsts.iter_mut().find(idle)
            && first.socket.as_ref().is_some_and(|socket| hand(socket, &fds).is_ok())
        {
            first.task = Some(task);
            return Ok(());
        }
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        hand(&ours, &fds)?;
        let flags = if namespaces { libc::CLONE_NEWPID | libc::CLONE_NEWNS } else { 0 };
        match process::fork(flags as u64)? {
            Forked::Child => init::run(theirs, namespaces),
            Forked::Parent(child) => {
                let first =
                    First { task: Some(task), socket: Some(ours), namespaces, mounts, is_ending: false };
                self.firsts.insert(child.pid, first);
                Ok(())
            }
        }
    }

    fn end(&mut self, pid: i32) {
        let Some(first) = self.firsts.get_mut(&pid) else { return };
        first.is_ending = true;
        let _ = process::kill(pid, if first.namespaces { libc::SIGKILL } else { sys::end_all_signal() });
    }

    fn end_all(&mut self) {
        self.firsts.retain(|_, first| first.task.is_some());
        let busy: Vec<i32> = self.firsts.keys().copied().collect();
        busy.into_iter().for_each(|pid| self.end(pid));
    }

    /// A first process has something to say: its task has ended, and all that this has started.
    fn hear(&mut self, pid: i32) {
        let idle = self.firsts.values().filter(|first| first.task.is_none()).count();
        let Some(first) = self.firsts.get_mut(&pid) else { return };
        let Some(socket) = &first.socket else { return };
        let mut bytes = [0; REPORT_MAX];
        let length = match rustix::net::recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((length @ 1.., _)) => length,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            _ => {
                first.socket = None;
                return;
            }
        };
        let Some(report) = Report::decode(&bytes[..length]).ok().filter(|report| report.is_whole) else {
            return;
        };
        let Some(task) = first.task.take() else { return };
        if !report.goes_on || first.is_ending || idle >= IDLE_MAX {
            // Without the socket it ends, if it has not.
            self.firsts.remove(&pid);
        }
        self.say(&Event { task, report: Some(report), namespaces: self.namespaces });
    }

    /// A first process has ended, and with it its task.
    fn ended(&mut self, pid: i32) {
        self.hear(pid);
        if let Some(task) = self.firsts.remove(&pid).and_then(|first| first.task) {
            self.say(&Event { task, report: None, namespaces: self.namespaces });
        }
    }
}

/// Hands a task to its first process.
fn hand(socket: &OwnedFd, fds: &[OwnedFd]) -> io::Result<()> {
    if fds.len() != 4 {
        return Err(io::Error::other("descriptors are missing"));
    }
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(socket, &[IoSlice::new(b"t")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
