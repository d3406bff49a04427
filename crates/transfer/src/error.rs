//! What can go wrong with a transfer.

use std::io;

use hayloft_tree::WalkError;

/// Why nothing was sent or received.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// Something cannot be read or written.
    #[error("{what}: {source}")]
    Io {
        /// What was done, and with what.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// The mirror has no such version.
    #[error("{0}")]
    Missing(String),
    /// Something else is where a mirror is wanted.
    #[error("{0}")]
    Exists(String),
    /// Something is not what its name says.
    #[error("{0}: damaged, or not written by hayloft send")]
    Damaged(String),
    /// A chunk that is nowhere.
    #[error("{0}")]
    Lacking(String),
    /// A web server does not answer, or not with what was asked for.
    #[error("{0}")]
    Web(String),
    /// A folder cannot be read.
    #[error(transparent)]
    Walk(#[from] WalkError),
}

impl TransferError {
    /// For `map_err`: what was done when it failed.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> TransferError {
        let what = what.into();
        move |source| TransferError::Io { what, source }
    }
}
