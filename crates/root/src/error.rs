//! What can go wrong, by what the caller should do about it.

use std::io;

/// The result of what this crate does.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a root could not be made, entered or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request itself is wrong: ask differently.
    #[error("{0}")]
    Usage(String),
    /// There is no root, layer or folder of that name.
    #[error("{0}")]
    NotFound(String),
    /// A root of that name exists, or it is in use.
    #[error("{0}")]
    Busy(String),
    /// A layer was replaced after it was looked up: look it up again.
    #[error("{0}")]
    Replaced(String),
    /// Not permitted for this user: become root, or leave out what needs it.
    #[error("{0}")]
    Denied(String),
    /// This kernel or machine lacks something.
    #[error("{0}")]
    Missing(String),
    /// Memory, swap or disk does not suffice: wait for other roots, or ask for less.
    #[error("{0}")]
    NoRoom(String),
    /// The command is not in the root.
    #[error("{0}")]
    NoCommand(String),
    /// The command is there and cannot be run.
    #[error("{0}")]
    CannotRun(String),
    /// Anything else, from another process.
    #[error("{0}")]
    Failed(String),
    /// A system call failed in a way that has no better name.
    #[error("cannot {what}")]
    System {
        /// What was tried, as in "mount the overlay".
        what: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// A failed system call; missing permission and full memory get the variants that say so.
    pub fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Error {
        let (what, source) = (what.into(), source.into());
        match source.kind() {
            io::ErrorKind::PermissionDenied => Error::Denied(format!("not permitted to {what}: {source}")),
            io::ErrorKind::StorageFull => Error::NoRoom(format!("no room left to {what}: {source}")),
            _ => Error::System { what, source },
        }
    }
}

/// Names what was tried when a system call fails.
pub(crate) trait Trying<T> {
    /// `what` completes the sentence "cannot ...".
    fn trying(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Trying<T> for std::result::Result<T, E> {
    fn trying(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Error::system(what(), error))
    }
}
