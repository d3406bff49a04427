//! What processes of this host say to each other over a socket: messages with their length before them, and descriptors.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use prost::Message;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::AsyncReadExt;

use crate::execution::sys;
use crate::protocol::{NeedMessage, Spec};
use crate::submit::Outcome;

/// Longest message: more than any command with its environment.
const LENGTH_MAX: usize = 16 << 20;
/// Signals that ask for an end.
const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
/// Signals that are passed on to a task.
pub(crate) const PASSED: [i32; 7] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];
/// Most descriptors that come with a message.
const DESCRIPTORS_MAX: usize = 3;

/// A task; standard input, output and error come behind it.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Hand {
    #[prost(message, optional, tag = "1")]
    pub spec: Option<Spec>,
    #[prost(message, optional, tag = "2")]
    pub need: Option<NeedMessage>,
    /// There is something to read on standard input.
    #[prost(bool, tag = "3")]
    pub has_input: bool,
    /// Standard error is the same stream as standard output.
    #[prost(bool, tag = "4")]
    pub merged: bool,
    /// It is given back when the farm is away.
    #[prost(bool, tag = "5")]
    pub may_run_here: bool,
    /// The name of the socket at which tasks of the same command line come; empty when none do.
    #[prost(string, tag = "6")]
    pub again: String,
}

/// A task like one that was handed over before; standard input, output and error come with it.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Again {
    /// Program and arguments.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub command: Vec<Vec<u8>>,
    /// `NAME=VALUE` each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub environment: Vec<Vec<u8>>,
    /// Its working directory.
    #[prost(bytes = "vec", tag = "3")]
    pub directory: Vec<u8>,
    /// File mode creation mask.
    #[prost(uint32, tag = "4")]
    pub umask: u32,
}

/// What has become of it.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Told {
    /// It was taken: from now on it must not be handed to anybody else. All else says how it has ended.
    #[prost(bool, tag = "1")]
    pub is_taken: bool,
    #[prost(enumeration = "Kind", tag = "2")]
    pub kind: i32,
    #[prost(int32, tag = "3")]
    pub number: i32,
    #[prost(string, tag = "4")]
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Kind {
    Exited = 0,
    Signalled = 1,
    NotRun = 2,
    FarmFailed = 3,
    Nowhere = 4,
}

impl From<Outcome> for Told {
    fn from(outcome: Outcome) -> Told {
        let told = |kind: Kind, number, reason| Told { is_taken: false, kind: kind as i32, number, reason };
        match outcome {
            Outcome::Exited(code) => told(Kind::Exited, code, String::new()),
            Outcome::Signalled(signal) => told(Kind::Signalled, signal, String::new()),
            Outcome::NotRun(code, reason) => told(Kind::NotRun, code, reason),
            Outcome::FarmFailed(reason) => told(Kind::FarmFailed, 0, reason),
            Outcome::Nowhere(reason) => told(Kind::Nowhere, 0, reason),
        }
    }
}

impl From<Told> for Outcome {
    fn from(told: Told) -> Outcome {
        match Kind::try_from(told.kind) {
            Ok(Kind::Exited) => Outcome::Exited(told.number),
            Ok(Kind::Signalled) => Outcome::Signalled(told.number),
            Ok(Kind::NotRun) => Outcome::NotRun(told.number, told.reason),
            Ok(Kind::Nowhere) => Outcome::Nowhere(told.reason),
            Ok(Kind::FarmFailed) | Err(_) => Outcome::FarmFailed(told.reason),
        }
    }
}

/// A message as it goes over a socket.
pub(crate) fn frame(message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut all = Vec::with_capacity(4 + length);
    all.extend((length as u32).to_le_bytes());
    all.extend(message.encode_to_vec());
    all
}

/// How long the message is that stands behind these bytes.
///
/// # Errors
/// When no message is so long.
fn length(bytes: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_le_bytes(bytes) as usize;
    if length > LENGTH_MAX { Err(io::Error::other("a message is too long")) } else { Ok(length) }
}

/// The next message, for programs that wait for many at a time.
pub(crate) async fn heard<M: Message + Default>(
    stream: &mut (impl tokio::io::AsyncRead + Unpin),
) -> io::Result<M> {
    let mut before = [0; 4];
    stream.read_exact(&mut before).await?;
    let mut bytes = vec![0; length(before)?];
    stream.read_exact(&mut bytes).await?;
    M::decode(&*bytes).map_err(io::Error::other)
}

/// The next message and the descriptors that come with it, for programs that wait for many at a time.
pub(crate) async fn heard_with_descriptors<M: Message + Default, const N: usize>(
    stream: &mut tokio::net::UnixStream,
) -> io::Result<(M, [OwnedFd; N])> {
    let mut bytes = vec![0; 16 << 10];
    let (count, fds) = loop {
        stream.readable().await?;
        match stream.try_io(tokio::io::Interest::READABLE, || receive_some(&*stream, &mut bytes)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            received => break received?,
        }
    };
    let fds = fds.try_into().map_err(|_| io::Error::other("descriptors are missing"))?;
    bytes.truncate(count);
    let mut all = AsyncReadExt::chain(io::Cursor::new(bytes), stream);
    Ok((heard(&mut all).await?, fds))
}

/// The next descriptors, for programs that wait for many at a time.
pub(crate) async fn descriptors_heard<const N: usize>(
    stream: &tokio::net::UnixStream,
) -> io::Result<[OwnedFd; N]> {
    loop {
        stream.readable().await?;
        match stream.try_io(tokio::io::Interest::READABLE, || receive_descriptors(stream)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            received => return received,
        }
    }
}

/// A connection to the socket of this path, by system calls only.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket.into())
}

pub(crate) fn send(stream: &mut UnixStream, message: &impl Message) -> io::Result<()> {
    send_all(stream, &frame(message))
}

/// An end that has gone is an error, not a signal.
fn send_all(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => bytes = &bytes[sent?..],
        }
    }
    Ok(())
}

pub(crate) fn receive<M: Message + Default>(stream: &mut UnixStream) -> io::Result<M> {
    let mut before = [0; 4];
    stream.read_exact(&mut before)?;
    let mut bytes = vec![0; length(before)?];
    stream.read_exact(&mut bytes)?;
    M::decode(&*bytes).map_err(io::Error::other)
}

/// Waits for a message, and writes the numbers of signals that come meanwhile; the last one of them that asks for an end. With `ends_twice`
/// the second one of these is written as 0.
pub(crate) fn receive_and_pass<M: Message + Default>(
    stream: &mut UnixStream,
    signals: BorrowedFd<'_>,
    ends_twice: bool,
) -> (io::Result<M>, Option<i32>) {
    let mut ending = None;
    loop {
        let mut ends =
            [PollFd::new(&*stream, PollFlags::IN), PollFd::from_borrowed_fd(signals, PollFlags::IN)];
        match poll(&mut ends, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return (Err(error.into()), ending),
            Ok(_) => {}
        }
        let has_come = !ends[0].revents().is_empty();
        while let Some(signal) = hayloft_process::next_signal(signals) {
            let is_end = ENDING.contains(&signal);
            let number = if is_end && ending.is_some() && ends_twice { 0 } else { signal as u8 };
            ending = if is_end { Some(signal) } else { ending };
            let _ = send_all(stream, &[number]);
        }
        if has_come {
            return (receive(stream), ending);
        }
    }
}

pub(crate) fn send_descriptors(stream: impl AsFd, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_some(stream, b"d", fds).map(drop)
}

/// A message with descriptors.
pub(crate) fn send_with_descriptors(
    stream: &mut UnixStream,
    message: &impl Message,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = frame(message);
    let sent = send_some(&*stream, &bytes, fds)?;
    send_all(stream, &bytes[sent..])
}

fn send_some(stream: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("descriptors find no room"));
    }
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

pub(crate) fn receive_descriptors<const N: usize>(stream: impl AsFd) -> io::Result<[OwnedFd; N]> {
    let (_, fds) = receive_some(stream, &mut [0])?;
    fds.try_into().map_err(|_| io::Error::other("descriptors are missing"))
}

fn receive_some(stream: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    Ok((received.bytes, sys::descriptors(&mut control)))
}
