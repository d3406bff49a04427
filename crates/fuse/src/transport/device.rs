//! The transport over /dev/fuse: one message per read(2), one answer per writev(2).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::handling::counters::Shard;
use crate::handling::engine::{Engine, Message, Verdict};
use crate::handling::filesystem::{FileSystem, Pace};
use crate::handling::settle::Turn;
use crate::protocol::abi::{PAGE_SIZE, opcode, out_header};
use crate::protocol::reply::{Area, Reply};
use crate::sys::{self, Memory};

/// How long to let FORGETs gather when nothing else comes this way (over io_uring). The kernel then hands
/// over thousands in one message. An INTERRUPT may wait as long.
const GATHER: Duration = Duration::from_millis(5);

/// One thread's end of the connection.
pub(crate) struct Device<F> {
    pub(crate) engine: Arc<Engine<F>>,
    /// Answers must go to the descriptor which the request was read from.
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) shard: Arc<Shard>,
    pub(crate) turn: Arc<Turn>,
    /// Only FORGETs and INTERRUPTs are expected.
    pub(crate) gather: bool,
}

impl<F: FileSystem> Device<F> {
    /// Serves until the connection ends.
    pub(crate) fn run(&self) -> io::Result<()> {
        let result = self.serve();
        self.turn.end();
        result
    }

    fn serve(&self) -> io::Result<()> {
        let content_max = self.engine.content_max();
        let mut input = Memory::new(content_max + PAGE_SIZE)?;
        let mut output = Memory::new(content_max)?;
        loop {
            let input = input.as_mut();
            match sys::read(self.fd.as_raw_fd(), input) {
                Ok(len) => {
                    self.turn.step();
                    let gathers = self.message(&input[..len], output.as_mut());
                    // Nobody waits for an answer while it sleeps.
                    self.turn.step();
                    if gathers {
                        std::thread::sleep(GATHER);
                    }
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => {}
                    Some(libc::ENODEV | libc::ECONNABORTED) => return Ok(()),
                    _ => return Err(error),
                },
            }
        }
    }

    /// Handles a message. Returns whether more of the same kind are to gather before the next one is read.
    fn message(&self, bytes: &[u8], output: &mut [u8]) -> bool {
        let engine = &self.engine;
        let Ok(message) = Message::split(bytes, engine.setxattr_ext()) else {
            tracing::warn!(len = bytes.len(), "malformed message");
            if let Ok(header) = crate::protocol::abi::InHeader::parse(bytes) {
                answer(&self.fd, header.unique, -libc::EIO, &[], &[]);
            }
            return false;
        };
        let header = message.header;
        self.shard.count(header.opcode);
        match header.opcode {
            opcode::FORGET | opcode::BATCH_FORGET => {
                engine.forget(&message);
                return self.gather;
            }
            opcode::INTERRUPT => match message.interrupted() {
                Ok(unique) => engine.interrupts.interrupt(unique),
                Err(_) => tracing::warn!("malformed interrupt"),
            },
            opcode::NOTIFY_REPLY => {}
            _ => {
                let capacity = message.capacity(output.len());
                let mut reply = Reply::new(header.opcode, capacity, Area::Shared(output));
                match engine.serve(&message, &mut reply, Pace::Fast) {
                    Verdict::Answer(0) => {
                        let (fixed, content) = reply.parts();
                        answer(&self.fd, header.unique, 0, fixed, content);
                    }
                    Verdict::Answer(error) => answer(&self.fd, header.unique, error, &[], &[]),
                    Verdict::Again => self.defer(&message),
                }
            }
        }
        false
    }

    /// Copies the request and hands it to the pool, which answers by itself.
    fn defer(&self, message: &Message<'_>) {
        let header = message.header;
        let capacity = message.capacity(self.engine.content_max());
        let bytes = [message.fixed, message.rest].concat();
        let split = message.fixed.len();
        let fd = Arc::clone(&self.fd);
        self.engine.submit(&header, move |engine, token| {
            let (fixed, rest) = bytes.split_at(split);
            let mut reply = Reply::new(header.opcode, capacity, Area::Owned(Vec::new()));
            match engine.serve_patiently(&Message { header, fixed, rest }, &mut reply, token) {
                0 => {
                    let (fixed, content) = reply.parts();
                    answer(&fd, header.unique, 0, fixed, content);
                }
                error => answer(&fd, header.unique, error, &[], &[]),
            }
            engine.answered(header.unique);
        });
    }
}

/// Writes an answer. `error` is 0 or negative; with an error there must be no content.
pub(crate) fn answer(fd: &OwnedFd, unique: u64, error: i32, fixed: &[u8], content: &[u8]) {
    let header = out_header(unique, error, fixed.len() + content.len());
    let Err(failure) = sys::write_pieces(fd.as_raw_fd(), &[&header, fixed, content]) else { return };
    match failure.raw_os_error() {
        // The request was interrupted and nobody waits, or the connection is gone.
        Some(libc::ENOENT | libc::ENODEV | libc::EPERM | libc::ECONNABORTED) => {}
        _ if error == 0 => {
            tracing::error!(unique, %failure, "the kernel refused an answer");
            answer(fd, unique, -libc::EIO, &[], &[]);
        }
        _ => tracing::error!(unique, error, %failure, "the kernel refused an error"),
    }
}
