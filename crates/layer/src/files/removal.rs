//! Removing a folder with everything in it.
//!
//! Mounts are left alone with all that is in them, and a tree may be as deep as somebody cared to make it: one folder is open at
//! a time, and the way back is `..`, which is held against the folder that was left.

use std::ffi::{OsStr, OsString};
use std::io;

use rustix::fs::{self, AtFlags, Mode};
use rustix::io::Errno;

use crate::files::folder::Folder;

/// Removes the folder `name` in `parent`: as much of it as can be.
///
/// # Errors
/// The first thing that cannot be removed.
pub(crate) fn remove_folder(parent: &Folder, name: &OsStr) -> io::Result<()> {
    let at = parent.again()?;
    let inode = at.own_meta()?.inode;
    let mut removal = Removal { at, top: inode, levels: Vec::new(), failed: None };
    removal.enter(name)?;
    while let Some(level) = removal.levels.last_mut() {
        match level.names.pop() {
            Some(name) => removal.remove(&name),
            None => removal.leave()?,
        }
    }
    removal.failed.map_or(Ok(()), Err)
}

/// A folder that is being emptied.
struct Level {
    name: OsString,
    inode: (u64, u64),
    /// What is left to remove in it.
    names: Vec<OsString>,
}

struct Removal {
    /// The folder of the last level.
    at: Folder,
    /// What the folder above the first level is.
    top: (u64, u64),
    levels: Vec<Level>,
    failed: Option<io::Error>,
}

impl Removal {
    fn remove(&mut self, name: &OsStr) {
        let removed = self.with_rights(|at| at.unlink(name));
        let outcome = match removed {
            Ok(true) => Ok(()),
            Ok(false) => self.enter(name),
            Err(error) => Err(error),
        };
        self.note(outcome);
    }

    fn note(&mut self, outcome: io::Result<()>) {
        if let Err(error) = outcome {
            self.failed.get_or_insert(error);
        }
    }

    /// Does something in the current folder, and takes the right to do it when it is missing.
    fn with_rights<T>(&self, what: impl Fn(&Folder) -> io::Result<T>) -> io::Result<T> {
        match what(&self.at) {
            Err(error) if is_denied(&error) && !self.levels.is_empty() => {
                fs::fchmod(&self.at, Mode::RWXU)?;
                what(&self.at)
            }
            other => other,
        }
    }

    fn enter(&mut self, name: &OsStr) -> io::Result<()> {
        let below = match self.at.sub_of_this_mount(name) {
            Err(error) if is_denied(&error) => {
                fs::chmodat(&self.at, name, Mode::RWXU, AtFlags::empty())?;
                self.at.sub_of_this_mount(name)?
            }
            other => other?,
        };
        let (inode, names) = (below.own_meta()?.inode, below.names()?);
        self.levels.push(Level { name: name.to_owned(), inode, names });
        self.at = below;
        Ok(())
    }

    /// Goes back to the folder above, and removes the one that was left.
    fn leave(&mut self) -> io::Result<()> {
        let Some(left) = self.levels.pop() else { return Ok(()) };
        self.at = self.at.above()?;
        if self.at.own_meta()?.inode != self.levels.last().map_or(self.top, |level| level.inode) {
            return Err(io::Error::other("somebody moved a folder in it meanwhile"));
        }
        let removed = self.with_rights(|at| match fs::unlinkat(at, &left.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        });
        self.note(removed);
        Ok(())
    }
}

/// EACCES, not EPERM: rights that the owner of a folder can give himself.
fn is_denied(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::ACCESS.raw_os_error())
}
