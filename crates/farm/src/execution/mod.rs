//! Tasks on this host: processes that end with all that they have started.

mod command;
mod init;
mod record;
mod spawner;
pub(crate) mod sys;

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, IoSlice, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use prost::Message;
use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::net::{SocketFlags, SocketType};
use tokio::io::unix::AsyncFd;

pub(crate) use init::{Execution, Report};
pub(crate) use spawner::Event;
use spawner::Request;

/// The first argument by which this program becomes the process that starts tasks.
pub const SPAWNER_ARGUMENT: &str = "farm-spawner";

/// Serves an agent as the process that starts its tasks.
///
/// # Errors
/// When it cannot.
pub fn spawner() -> io::Result<()> {
    spawner::serve()
}

/// The agent's side of the process that starts tasks. Dropped, all tasks end.
#[derive(Debug)]
pub(crate) struct Spawner {
    socket: OwnedFd,
    child: Child,
    /// Tasks get namespaces of their own.
    pub namespaces: bool,
}

/// Where events come from.
#[derive(Debug)]
pub(crate) struct Events(AsyncFd<OwnedFd>);

impl Spawner {
    /// Starts the process. `command` runs this program with [`SPAWNER_ARGUMENT`].
    pub(crate) async fn begin(mut command: Command) -> io::Result<(Spawner, Events)> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // Keys of the terminal that the agent was started on are for the agent.
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn()?;
        drop(command);
        let heard = rustix::io::fcntl_dupfd_cloexec(&ours, 3)?;
        let events = Events(sys::readable(heard)?);
        let ready =
            events.next().await.ok_or_else(|| io::Error::other("the process that starts tasks has ended"))?;
        Ok((Spawner { socket: ours, child, namespaces: ready.namespaces }, events))
    }

    /// Starts a task on these descriptors. With `plain` it gets no namespaces: its command makes them. Gives what the record is read from
    /// when it has ended, if there is to be one.
    pub(crate) fn start(
        &self,
        task: u64,
        what: &Execution,
        standard: [OwnedFd; 3],
        plain: bool,
    ) -> io::Result<Option<File>> {
        let memory = rustix::fs::memfd_create(c"task", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut memory = File::from(memory);
        memory.write_all(&what.encode_to_vec())?;
        let [input, output, error] = standard.each_ref().map(AsFd::as_fd);
        let mut mounts = DefaultHasher::new();
        (&what.bind_from, &what.bind_to, what.records).hash(&mut mounts);
        let mounts = mounts.finish();
        self.ask(
            &Request { task, start: true, plain, mounts, ..Request::default() },
            &[memory.as_fd(), input, output, error],
        )?;
        Ok(what.records.then_some(memory))
    }

    /// Sends a task's process group a signal.
    pub(crate) fn signal(&self, task: u64, signal: i32) -> io::Result<()> {
        self.ask(&Request { task, signal, ..Request::default() }, &[])
    }

    /// Ends a task with everything that it has started.
    pub(crate) fn end(&self, task: u64) -> io::Result<()> {
        self.ask(&Request { task, end: true, ..Request::default() }, &[])
    }

    /// A sign of life: without the next one within this time all tasks end.
    pub(crate) fn live(&self, lease: Duration) -> io::Result<()> {
        self.ask(&Request { lease: lease.as_millis() as u64, ..Request::default() }, &[])
    }

    fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("too many descriptors"));
        }
        let bytes = request.encode_to_vec();
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// What a task is told, and what it says in place of that: a file in memory is a message.
///
/// # Errors
/// When it is not, or another one.
pub(crate) fn message_in<M: Message + Default>(mut memory: &File) -> io::Result<M> {
    let mut bytes = Vec::new();
    memory.rewind()?;
    memory.read_to_end(&mut bytes)?;
    M::decode(&*bytes).map_err(io::Error::other)
}

impl Drop for Spawner {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

impl Events {
    /// Waits for the next event; None when the process has ended.
    pub(crate) async fn next(&self) -> Option<Event> {
        // A report, and which task it is of.
        let mut bytes = vec![0; 2 * init::REPORT_MAX];
        loop {
            let mut ready = self.0.readable().await.ok()?;
            let received =
                ready.try_io(|socket| Ok(rustix::net::recv(socket, &mut bytes[..], RecvFlags::DONTWAIT)?));
            match received {
                Ok(Ok((length @ 1.., _))) => return Event::decode(&bytes[..length]).ok(),
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_would_block) => {}
                Ok(_) => return None,
            }
        }
    }
}
