//! What a root's first process and the one that started it tell each other, a message a packet.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, Trying};

/// Longest message: an error with a few paths in it.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// From a root's first process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Said {
    /// The tree is complete.
    Built,
    /// The command runs.
    Started,
    /// There is no command, and why.
    Failed(Failure),
    /// The command has ended and everything else in the root with it.
    Ended(TaskEnd),
    /// The root stays without the process that started it.
    Kept,
}

/// To a root's first process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Its users are mapped: build the tree.
    Build,
    /// Start the command, on this terminal if there is one.
    Start(Option<Terminal>),
    /// Pass a signal on to the command.
    Signal(i32),
    /// Stay when the other side ends.
    Keep,
}

/// A terminal of the root.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Terminal {
    /// N of /dev/pts/N in the root.
    pub number: u32,
    /// Which of the standard descriptors it replaces: those that are a terminal outside.
    pub descriptors: Vec<i32>,
}

/// How a command ended, and what it took.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskEnd {
    /// Exit code, 128+N after signal N.
    pub exit_code: i32,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Processor time in user mode of everything that ran, in microseconds.
    pub cpu_user_us: u64,
    /// Processor time in the kernel, in microseconds.
    pub cpu_system_us: u64,
    /// Page faults that had to read from a disk or from swap.
    pub major_faults: u64,
}

/// An [`Error`] that can be sent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Failure {
    class: Class,
    message: String,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Class {
    Usage,
    NotFound,
    Busy,
    Replaced,
    Denied,
    Missing,
    NoRoom,
    NoCommand,
    CannotRun,
    Other,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let class = match &error {
            Error::Usage(_) => Class::Usage,
            Error::NotFound(_) => Class::NotFound,
            Error::Busy(_) => Class::Busy,
            Error::Replaced(_) => Class::Replaced,
            Error::Denied(_) => Class::Denied,
            Error::Missing(_) => Class::Missing,
            Error::NoRoom(_) => Class::NoRoom,
            Error::NoCommand(_) => Class::NoCommand,
            Error::CannotRun(_) => Class::CannotRun,
            Error::Failed(_) | Error::System { .. } => Class::Other,
        };
        let message = match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        Failure { class, message }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        let make = match failure.class {
            Class::Usage => Error::Usage,
            Class::NotFound => Error::NotFound,
            Class::Busy => Error::Busy,
            Class::Replaced => Error::Replaced,
            Class::Denied => Error::Denied,
            Class::Missing => Error::Missing,
            Class::NoRoom => Error::NoRoom,
            Class::NoCommand => Error::NoCommand,
            Class::CannotRun => Error::CannotRun,
            Class::Other => Error::Failed,
        };
        make(failure.message)
    }
}

/// One end of the connection.
#[derive(Debug)]
pub(crate) struct Link {
    socket: OwnedFd,
}

impl Link {
    /// Both ends of a new connection; neither outlives an exec.
    pub(crate) fn pair() -> Result<(Link, Link)> {
        let flags = SocketFlags::CLOEXEC;
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .trying(|| "make a socket".to_owned())?;
        Ok((Link { socket: a }, Link { socket: b }))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// When the other side has ended.
    pub(crate) fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        rustix::io::retry_on_intr(|| rustix::net::send(&self.socket, &bytes, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits for a message; none when the other side has ended, whether or not it had read all that was sent to it.
    ///
    /// # Errors
    /// When the message is not understood.
    pub(crate) fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        loop {
            match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                // It ended with something unread. That is told once, and before what it had said.
                Err(Errno::INTR | Errno::CONNRESET) => (),
                Err(error) => return Err(error.into()),
                Ok((0, _)) => return Ok(None),
                Ok((read, _)) => return Ok(Some(serde_json::from_slice(&bytes[..read])?)),
            }
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_and_the_end_is_seen() {
        let (a, b) = Link::pair().unwrap();
        a.send(&Order::Signal(15)).unwrap();
        a.send(&Order::Keep).unwrap();
        assert!(matches!(b.receive().unwrap(), Some(Order::Signal(15))));
        assert!(matches!(b.receive().unwrap(), Some(Order::Keep)));
        drop(a);
        assert!(b.receive::<Order>().unwrap().is_none());
        assert!(b.send(&Said::Built).is_err());
    }

    #[test]
    fn what_was_said_before_an_end_is_heard_after_it() {
        let (a, b) = Link::pair().unwrap();
        a.send(&Order::Signal(15)).unwrap();
        b.send(&Said::Built).unwrap();
        // With the signal unread.
        drop(b);
        assert!(matches!(a.receive().unwrap(), Some(Said::Built)));
        assert!(a.receive::<Said>().unwrap().is_none());
    }

    #[test]
    fn an_error_keeps_its_kind_and_its_cause() {
        let error = Error::system("mount the overlay", io::Error::from_raw_os_error(libc::EIO));
        let failure = Failure::from(error);
        assert!(Error::from(failure).to_string().starts_with("cannot mount the overlay: "));
        assert!(matches!(Error::from(Failure::from(Error::NoRoom("x".to_owned()))), Error::NoRoom(_)));
    }
}
