//! Who uses a layer holds flock(2) on a file beside its tree: whatever the state folder, user or host.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::named::dir::{INFO, TREE};
use crate::named::generations::GENERATIONS;

/// Who uses a layer.
pub(super) enum Use {
    /// Nobody, as long as this lock is held; there is nothing to lock in what a crash has left of one.
    None(Vec<File>),
    Root,
}

/// Whether a root uses the layer with this file, which everyone who uses it has locked.
pub(super) fn use_of(file: &Path) -> io::Result<Use> {
    let lock = match File::options().read(true).write(true).open(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Use::None(Vec::new())),
        other => other?,
    };
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(Use::Root),
        Err(error) if has_no_locks(error) => Ok(Use::None(Vec::new())),
        other => other.map(|()| Use::None(vec![lock])).map_err(io::Error::from),
    }
}

fn has_no_locks(error: Errno) -> bool {
    [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP, Errno::INVAL].contains(&error)
}

pub(super) fn lock_shared(file: &File) -> io::Result<()> {
    match rustix::fs::flock(file, FlockOperation::LockShared) {
        Err(error) if has_no_locks(error) => Ok(()),
        other => Ok(other?),
    }
}

/// Locks a layer by one of its files, for one who uses it.
fn lock_in_place(path: &Path, how: &fs::OpenOptions) -> io::Result<File> {
    loop {
        let file = how.open(path)?;
        lock_shared(&file)?;
        // It may have been replaced or removed while we waited.
        let (held, there) = (file.metadata()?, fs::metadata(path)?);
        if (held.dev(), held.ino()) == (there.dev(), there.ino()) {
            return Ok(file);
        }
    }
}

/// Whether a root uses any generation of the layer in this folder.
pub(super) fn use_of_all(layer: &Path) -> io::Result<Use> {
    let mut files = vec![layer.join(INFO)];
    match fs::read_dir(layer.join(GENERATIONS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        generations => {
            for generation in generations? {
                files.push(generation?.path().join(INFO));
            }
        }
    }
    let mut locks = Vec::new();
    for file in files {
        match use_of(&file)? {
            Use::None(held) => locks.extend(held),
            Use::Root => return Ok(Use::Root),
        }
    }
    Ok(Use::None(locks))
}

/// Locks a generation; with device and inode of the tree that is locked, wherever it is by now, if it has one of its own.
pub(super) fn lock_tree(generation: &Path) -> io::Result<(File, Option<(u64, u64)>)> {
    loop {
        let lock = lock_in_place(&generation.join(INFO), File::options().read(true))?;
        let folder =
            rustix::fs::open(generation, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let identity = |name: &str| match rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some((stat.st_dev, stat.st_ino))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        };
        let held = lock.metadata()?;
        if identity(INFO)? == Some((held.dev(), held.ino())) {
            return Ok((lock, identity(TREE)?));
        }
    }
}

/// Says that an unpacked archive is in use; fails when there is none.
pub(super) fn touch(used: &Path) -> io::Result<File> {
    let file = lock_in_place(used, File::options().write(true))?;
    file.set_modified(SystemTime::now())?;
    Ok(file)
}
