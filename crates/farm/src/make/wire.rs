//! What a recipe's process and the session say to each other.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use prost::Message;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::execution::sys;

/// Longest message: more than any command with its environment.
const LENGTH_MAX: usize = 16 << 20;

/// A recipe asks where it is to run.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Ask {
    /// The last argument: what make has of the recipe.
    #[prost(bytes = "vec", tag = "1")]
    pub text: Vec<u8>,
    /// Its working directory.
    #[prost(bytes = "vec", tag = "2")]
    pub directory: Vec<u8>,
    /// Its process.
    #[prost(int32, tag = "3")]
    pub pid: i32,
}

/// Where it is to run.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Answer {
    /// Here; else on the farm.
    #[prost(bool, tag = "1")]
    pub here: bool,
}

/// All of it; with standard output and standard error.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Hand {
    /// Program and arguments.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub command: Vec<Vec<u8>>,
    /// `NAME=VALUE` each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub environment: Vec<Vec<u8>>,
    /// File mode creation mask.
    #[prost(uint32, tag = "3")]
    pub umask: u32,
}

/// How it has ended.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Done {
    /// The exit code.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// The signal that has ended it; 0 for none.
    #[prost(int32, tag = "2")]
    pub signal: i32,
    /// What is to be said on standard error.
    #[prost(string, tag = "3")]
    pub message: String,
    /// It was not started, and is to run here after all.
    #[prost(bool, tag = "4")]
    pub here: bool,
}

pub(super) fn send(stream: &mut UnixStream, message: &impl Message) -> io::Result<()> {
    let bytes = message.encode_to_vec();
    let mut all = (bytes.len() as u32).to_le_bytes().to_vec();
    all.extend(bytes);
    stream.write_all(&all)
}

pub(super) fn receive<M: Message + Default>(stream: &mut UnixStream) -> io::Result<M> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LENGTH_MAX {
        return Err(io::Error::other("a message is too long"));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    M::decode(&*bytes).map_err(io::Error::other)
}

pub(super) fn send_descriptors(stream: &UnixStream, fds: &[BorrowedFd<'_>; 2]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("descriptors find no room"));
    }
    rustix::net::sendmsg(stream, &[IoSlice::new(b"d")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub(super) fn receive_descriptors(stream: &UnixStream) -> io::Result<[OwnedFd; 2]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    sys::descriptors(&mut control).try_into().map_err(|_| io::Error::other("descriptors are missing"))
}
