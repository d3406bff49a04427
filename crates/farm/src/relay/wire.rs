//! What processes of this host say to each other over a socket: messages with their length before them, and descriptors.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use prost::Message;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::AsyncReadExt;

use crate::execution::sys;
use crate::protocol::{NeedMessage, Spec};
use crate::submit::Outcome;

/// Longest message: more than any command with its environment.
const LENGTH_MAX: usize = 16 << 20;
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

pub(crate) fn send(stream: &mut UnixStream, message: &impl Message) -> io::Result<()> {
    stream.write_all(&frame(message))
}

pub(crate) fn receive<M: Message + Default>(stream: &mut UnixStream) -> io::Result<M> {
    let mut before = [0; 4];
    stream.read_exact(&mut before)?;
    let mut bytes = vec![0; length(before)?];
    stream.read_exact(&mut bytes)?;
    M::decode(&*bytes).map_err(io::Error::other)
}

pub(crate) fn send_descriptors(stream: impl AsFd, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("descriptors find no room"));
    }
    rustix::net::sendmsg(stream, &[IoSlice::new(b"d")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub(crate) fn receive_descriptors<const N: usize>(stream: impl AsFd) -> io::Result<[OwnedFd; N]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    sys::descriptors(&mut control).try_into().map_err(|_| io::Error::other("descriptors are missing"))
}
