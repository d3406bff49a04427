//! Where the builds run.

use std::path::{Path, PathBuf};

use crate::mountinfo;
use crate::sys;

/// A folder on some file system.
pub(super) struct Place {
    /// What the table calls it.
    pub name: &'static str,
    /// An empty folder.
    pub folder: PathBuf,
    /// What it is, in one phrase.
    pub what: String,
}

/// A folder on tmpfs, gone when dropped.
pub(super) struct Memory {
    folder: PathBuf,
    mounted: bool,
}

impl Memory {
    /// Mounts a tmpfs in `work` where that is allowed, else makes a folder in /dev/shm.
    ///
    /// # Errors
    /// When neither works.
    pub(super) fn new(work: &Path) -> anyhow::Result<Memory> {
        let folder = work.join("tmpfs");
        std::fs::create_dir(&folder)?;
        if sys::is_root() && sys::mount_tmpfs(&folder).is_ok() {
            return Ok(Memory { folder, mounted: true });
        }
        let folder = PathBuf::from(format!("/dev/shm/hayloft-try-{}", std::process::id()));
        std::fs::create_dir(&folder)?;
        Ok(Memory { folder, mounted: false })
    }

    /// The folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.mounted {
            let _ = sys::unmount(&self.folder, libc::MNT_DETACH);
        } else {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// The type of the file system that `folder` is on.
pub(super) fn kind_of(folder: &Path) -> String {
    let mounts = mountinfo::all().unwrap_or_default();
    let holding = hayloft_layer::mount_over(mounts, folder, |entry| &entry.mount_point);
    holding.map_or_else(|| "unknown".to_owned(), |entry| entry.kind)
}
