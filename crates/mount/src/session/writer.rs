//! The writing side of a connection.

use std::io;

use hayloft_transport::Sending;
use hayloft_wire::frame::Sealer;
use socket2::SockRef;

/// Puts messages on a connection.
pub(crate) struct Writer {
    sending: Sending,
    sealer: Sealer,
}

impl Writer {
    pub(crate) fn new(sending: Sending) -> Writer {
        Writer { sending, sealer: Sealer::default() }
    }

    pub(crate) fn socket(&self) -> SockRef<'_> {
        self.sending.socket()
    }

    /// Sends whole frames. When it fails, nothing more can be sent.
    pub(crate) fn write_all(&mut self, frames: &mut [u8]) -> io::Result<()> {
        self.sealer.seal(frames);
        self.sending.write_all(frames)
    }
}
