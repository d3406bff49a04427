//! The reading side of a connection.

use std::io;

use bytes::BytesMut;
use hayloft_transport::Receiving;
use hayloft_wire::ServerMessage;
use hayloft_wire::frame::{FrameError, Opener};
use socket2::SockRef;

use crate::stats::Stats;

const READ_SIZE: usize = 256 * 1024;

/// Why nothing more can be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Takes messages off a connection.
pub(crate) struct Reader {
    stream: Receiving,
    opener: Opener,
    buffer: BytesMut,
    scratch: Vec<u8>,
}

impl From<ReadError> for io::Error {
    fn from(error: ReadError) -> io::Error {
        match error {
            ReadError::Io(error) => error,
            ReadError::Frame(error) => io::Error::new(io::ErrorKind::InvalidData, error),
        }
    }
}

impl Reader {
    pub(crate) fn new(stream: Receiving) -> Reader {
        Reader { stream, opener: Opener::default(), buffer: BytesMut::new(), scratch: vec![0; READ_SIZE] }
    }

    pub(crate) fn socket(&self) -> SockRef<'_> {
        self.stream.socket()
    }

    /// Whether the next message, or a part of it that says that there can be none, is here already.
    pub(crate) fn has_next(&self) -> bool {
        self.opener.has_next(&self.buffer)
    }

    /// The next message; `None` when the peer has closed the connection.
    pub(crate) fn next(&mut self, stats: &Stats) -> Result<Option<ServerMessage>, ReadError> {
        loop {
            match self.opener.take(&mut self.buffer) {
                Ok(Some(message)) => return Ok(Some(message)),
                Ok(None) => {}
                Err(error) => {
                    stats.frames_damaged.add(u64::from(error.is_damage()));
                    return Err(error.into());
                }
            }
            let count = match self.stream.read(&mut self.scratch) {
                Ok(0) => return Ok(None),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            stats.bytes_received.add(count as u64);
            self.buffer.extend_from_slice(&self.scratch[..count]);
        }
    }
}
