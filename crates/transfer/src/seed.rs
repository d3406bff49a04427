//! A tree on this host that chunks are read from.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hayloft_tree::open_below;
use rustix::fs::{self as sys, Mode, OFlags};

use crate::error::TransferError;

/// A folder that is open. Nothing outside of it is read, whatever a manifest says.
pub(crate) struct Seed {
    top: OwnedFd,
    folder: PathBuf,
}

impl Seed {
    pub(crate) fn open(folder: &Path) -> Result<Seed, TransferError> {
        let top = sys::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| TransferError::io(format!("cannot open {}", folder.display()))(error.into()))?;
        Ok(Seed { top, folder: folder.to_owned() })
    }

    /// Where something in it is, for people.
    pub(crate) fn shown(&self, path: &[u8]) -> PathBuf {
        self.folder.join(OsStr::from_bytes(path))
    }

    /// Opens a file of it.
    pub(crate) fn file(&self, path: &[u8]) -> Result<File, TransferError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let fd = open_below(&self.top, path, flags).map_err(|error| {
            TransferError::io(format!("cannot read {}", self.shown(path).display()))(error.into())
        })?;
        Ok(File::from(fd))
    }
}

/// How many threads read, compress and write files.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 8))
}
