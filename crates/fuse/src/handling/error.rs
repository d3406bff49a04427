//! Why a session fails.

use std::io;

use crate::handling::config::RING_PARAMETER;

/// Why a session did not start, or ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The kernel is too old.
    #[error("the kernel speaks FUSE {major}.{minor}, at least 7.31 is needed: use Linux 5.4 or newer")]
    OldKernel {
        /// Major version of its protocol.
        major: u32,
        /// Minor version of its protocol.
        minor: u32,
    },
    /// Settings that cannot be.
    #[error("invalid settings: {0}")]
    Config(&'static str),
    /// The kernel's first message made no sense, or the mount was gone before it came.
    #[error("the kernel did not begin the connection as expected: mount again")]
    Handshake(#[source] io::Error),
    /// io_uring was asked for and the kernel does not allow it.
    #[error(
        "FUSE over io_uring is switched off: as root, write Y to {}, or use another transport",
        RING_PARAMETER
    )]
    RingDisabled,
    /// io_uring was asked for and could not be set up.
    #[error("FUSE over io_uring could not be set up: use another transport")]
    Ring(#[source] io::Error),
    /// The connection broke.
    #[error("the connection to the kernel failed: mount again")]
    Connection(#[source] io::Error),
}
