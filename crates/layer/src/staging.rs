//! New versions of folders, made beside the old ones and put in their place in one step.
//!
//! The version of `NAME` that is being made is `.NAME.hayloft-new/new`. Whoever makes one holds flock(2) on
//! `.NAME.hayloft-new/lock`; that excludes others, and tells what a crash has left: a folder that nobody holds. The next
//! one empties it and takes it over. The lock is on a file, not on the folder: Linux keeps locks of folders on FUSE to itself,
//! and they would exclude nobody on other hosts.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{self, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{Context, LayerError, Result};
use crate::folder::Folder;
use crate::mounts::refuse_mounts;

/// What the name of a staging folder ends in.
const SUFFIX: &str = ".hayloft-new";
/// The new version's name in the staging folder.
const NEW: &str = "new";
/// The name in the staging folder of the file that is locked.
const LOCK: &str = "lock";

/// A version in the making.
#[derive(Debug)]
pub(crate) struct Staging {
    parent: Folder,
    parent_path: PathBuf,
    name: OsString,
    staging_name: OsString,
    folder: Folder,
    /// Held as long as it is open.
    _lock: OwnedFd,
    done: bool,
}

impl Staging {
    /// Removes what crashes have left of versions of anything in `parent`; what somebody holds stays.
    pub(crate) fn sweep(parent: &Path) -> Result<()> {
        let folder = Folder::open(parent).context("open", parent)?;
        for name in folder.names().context("list", parent)? {
            let text = name.to_string_lossy();
            if !text.starts_with('.') || !text.ends_with(SUFFIX) {
                continue;
            }
            // Gone meanwhile, or held.
            let Ok(left) = folder.sub(Path::new(&name)) else { continue };
            let path = parent.join(&name);
            if let Some(_lock) = hold(&left, FlockOperation::NonBlockingLockExclusive, &path)? {
                clear(&folder, &name, &left).context("remove", path)?;
            }
        }
        Ok(())
    }

    /// Waits until nobody else makes a version of `name` in `parent`, and removes what a crash has left of one.
    pub(crate) fn begin(parent: &Path, name: &OsStr) -> Result<Staging> {
        let parent_folder = Folder::open(parent).context("open", parent)?;
        let mut staging_name = OsString::from(".");
        staging_name.push(name);
        staging_name.push(SUFFIX);
        let path = parent.join(&staging_name);
        loop {
            match fs::mkdirat(&parent_folder, &staging_name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error).context("make", &path),
            }
            let folder = match parent_folder.sub(Path::new(&staging_name)) {
                Ok(folder) => folder,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error).context("open", &path),
            };
            let Some(lock) = hold(&folder, FlockOperation::LockExclusive, &path)? else { continue };
            // The one who held it may have removed it when done.
            let there = parent_folder.meta(&staging_name).context("look at", &path)?;
            let held = folder.own_meta().context("look at", &path)?;
            if there.is_none_or(|there| there.inode != held.inode) {
                continue;
            }
            let staging = Staging {
                parent: parent_folder,
                parent_path: parent.to_owned(),
                name: name.to_owned(),
                staging_name,
                folder,
                _lock: lock,
                done: false,
            };
            for left in staging.folder.names().context("list", &path)? {
                if left == LOCK {
                    continue;
                }
                tracing::info!(path = %path.display(), "removing what a crash has left");
                staging.folder.remove(&left).context("remove", path.join(&left))?;
            }
            return Ok(staging);
        }
    }

    /// The folder that the version is to be made in, under the name [`Staging::new_name`].
    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// The new version's name.
    pub(crate) fn new_name() -> &'static OsStr {
        OsStr::new(NEW)
    }

    /// The path of the new version on the host.
    pub(crate) fn path(&self) -> PathBuf {
        self.parent_path.join(&self.staging_name).join(NEW)
    }

    /// The folder where the target is.
    pub(crate) fn parent(&self) -> &Folder {
        &self.parent
    }

    /// The target's path on the host.
    pub(crate) fn target(&self) -> PathBuf {
        self.parent_path.join(&self.name)
    }

    /// The target, opened, when it is a folder; as long as nothing is mounted on it or in it, which would be moved with it and
    /// be in what is removed.
    pub(crate) fn old(&self) -> Result<Option<Folder>> {
        let target = self.target();
        let old = match self.parent.sub_of_this_mount(&self.name) {
            Ok(old) => old,
            Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
                Some(Errno::XDEV) => {
                    let why = "it is a mount point: name a folder in it".to_owned();
                    return Err(LayerError::Target { path: target, why });
                }
                _ => return Err(error).context("open", &target),
            },
        };
        refuse_mounts(&old, &target)?;
        Ok(Some(old))
    }

    /// Puts the target aside, to be removed.
    pub(crate) fn take_old(&self) -> Result<()> {
        self.old()?;
        fs::renameat(&self.parent, &self.name, &self.folder, NEW).context("remove", self.target())
    }

    /// Puts the new version in the place of the old one, if there is one, in one step.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let target = self.target();
        let there = self.parent.meta(&self.name).context("look at", &target)?;
        self.old()?;
        let flags = if there.is_some() { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        let why = |why: &str| LayerError::Target { path: target.clone(), why: why.to_owned() };
        match fs::renameat_with(&self.folder, NEW, &self.parent, &self.name, flags) {
            Ok(()) => {
                self.done = true;
                Ok(())
            }
            Err(Errno::BUSY) => Err(why("it is a mount point: name a folder in it")),
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Err(why(
                "its file system cannot exchange two folders in one step (renameat2, RENAME_EXCHANGE)",
            )),
            Err(Errno::EXIST) => Err(why("somebody else made it meanwhile")),
            Err(error) => Err(error).context("rename to", &target),
        }
    }

    /// Removes the staging folder, with the old version after a commit, or what was made before one.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.clear()
    }

    /// Leaves everything as a crash would.
    pub(crate) fn leave(mut self) {
        self.done = true;
    }

    fn clear(&mut self) -> Result<()> {
        let path = self.parent_path.join(&self.staging_name);
        self.done = true;
        clear(&self.parent, &self.staging_name, &self.folder).context("remove", path)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.done
            && let Err(error) = self.clear()
        {
            tracing::warn!(%error, "a staging folder stays; the next one to publish there removes it");
        }
    }
}

/// Locks a staging folder, or waits for that. `None` when somebody else has it, or it is on its way out.
fn hold(folder: &Folder, how: FlockOperation, path: &Path) -> Result<Option<OwnedFd>> {
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = match fs::openat(folder, LOCK, flags, Mode::RUSR | Mode::WUSR) {
        Ok(lock) => lock,
        // The folder has been removed.
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error).context("lock", path),
    };
    match fs::flock(&lock, how) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error).context("lock", path),
    }
    let held = fs::fstat(&lock).context("look at", path)?;
    let there = folder.meta(OsStr::new(LOCK)).context("look at", path)?;
    Ok(there.is_some_and(|there| there.inode == (held.st_dev, held.st_ino)).then_some(lock))
}

/// Removes a staging folder that the caller holds.
fn clear(parent: &Folder, name: &OsStr, folder: &Folder) -> std::io::Result<()> {
    for left in folder.names()? {
        if left != LOCK {
            folder.remove(&left)?;
        }
    }
    // From here on somebody else may make a lock of his own, and has the folder then.
    folder.remove(OsStr::new(LOCK))?;
    match fs::unlinkat(parent, name, fs::AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
