//! The one place where an error number is chosen.

use hayloft_fuse::Errno;
use hayloft_model::TreeError;

use crate::log::ledger::FlushError;
use crate::sharing::fault::FaultError;
use crate::sharing::locks::LockError;

/// Why a request fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FsError {
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error(transparent)]
    Fault(#[from] FaultError),
    #[error("the change cannot be made durable: {0:?}")]
    Flush(FlushError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("what was changed could not be applied, and is kept elsewhere")]
    Lost,
    #[error("a lock of the file that is held here was lost")]
    LockLost,
    #[error("interrupted")]
    Interrupted,
    #[error("the session has ended: {0}")]
    Ended(String),
    #[error("the volume was mounted read-only")]
    ReadOnly,
    #[error("not supported here")]
    NotSupported,
    #[error("the kernel is to do this itself")]
    NotImplemented,
    #[error("not a terminal")]
    NoTty,
    #[error("the buffer is too small")]
    Range,
    #[error("no data or hole there")]
    NoSuchOffset,
}

impl FsError {
    /// The number that the caller of the system call sees.
    pub(crate) fn errno(&self) -> Errno {
        match self {
            FsError::Tree(error) => match error {
                TreeError::NotFound => Errno::ENOENT,
                TreeError::NoAttribute => Errno::ENODATA,
                TreeError::Exists => Errno::EEXIST,
                TreeError::Stale => Errno::ESTALE,
                TreeError::NotDirectory => Errno::ENOTDIR,
                TreeError::IsDirectory => Errno::EISDIR,
                TreeError::NotEmpty => Errno::ENOTEMPTY,
                TreeError::NameTooLong => Errno::ENAMETOOLONG,
                TreeError::Invalid => Errno::EINVAL,
                TreeError::NotPermitted => Errno::EPERM,
                TreeError::TooManyLinks => Errno::EMLINK,
                TreeError::TooLarge => Errno::EFBIG,
                TreeError::AttributeTooLarge => Errno::E2BIG,
                TreeError::NoSpace => Errno::ENOSPC,
                TreeError::Missing(_) => Errno::EIO,
            },
            FsError::Fault(error) => match error {
                FaultError::Gone => Errno::ESTALE,
                FaultError::Interrupted => Errno::EINTR,
                FaultError::NoSpace => Errno::ENOSPC,
                FaultError::Ended(_) => Errno::EIO,
                FaultError::Broken(reason) => {
                    tracing::error!(reason, "cannot fetch from the server");
                    Errno::EIO
                }
            },
            FsError::Lock(error) => match error {
                LockError::Held => Errno::EAGAIN,
                LockError::Deadlock => Errno::EDEADLK,
                LockError::Interrupted => Errno::EINTR,
                LockError::NoLocks(_) => Errno::ENOLCK,
                LockError::Denied(_) => Errno::EACCES,
                LockError::Failed(_) => Errno::EIO,
            },
            FsError::Flush(error) => match error {
                FlushError::NoSpace => Errno::ENOSPC,
                FlushError::Store(_) | FlushError::Ended(_) | FlushError::Lost(_) | FlushError::Replaced => {
                    Errno::EIO
                }
                FlushError::Interrupted => Errno::EINTR,
            },
            FsError::Interrupted => Errno::EINTR,
            FsError::Ended(_) | FsError::Lost | FsError::LockLost => Errno::EIO,
            FsError::ReadOnly => Errno::EROFS,
            FsError::NotSupported => Errno::EOPNOTSUPP,
            FsError::NotImplemented => Errno::ENOSYS,
            FsError::NoTty => Errno::ENOTTY,
            FsError::Range => Errno::ERANGE,
            FsError::NoSuchOffset => Errno::ENXIO,
        }
    }
}
