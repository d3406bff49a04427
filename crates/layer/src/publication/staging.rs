//! New versions of folders, made beside the old ones and put in their place in one step.
//!
//! The version of `NAME` that is being made is in `.NAME.hayloft-new`, each under a name of its own: what a crash has left may not
//! be removable, or a program that it has left goes on writing there. Whoever makes one holds flock(2) on
//! `.NAME.hayloft-new/lock`; that excludes others, and tells what a crash has left: a folder that nobody holds. The next
//! one empties it and takes it over. Who makes a version of a folder below holds that lock with others, and those of all folders
//! between: an exchange would take along what they have made. The way to the locks is from the top, so nobody waits in a circle.
//!
//! The lock is on a file, not on the folder: Linux keeps locks of folders on FUSE to itself,
//! and they would exclude nobody on other hosts.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{self, Access, AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{Context, LayerError, Result};
use crate::files::folder::{FileKind, Folder, Meta};
use crate::files::mounts::refuse_mounts;

/// What the name of a staging folder ends in.
const SUFFIX: &str = ".hayloft-new";
/// What the new version's name in the staging folder begins with.
const NEW: &str = "new-";
/// The name in the staging folder of the file that is locked.
const LOCK: &str = "lock";

/// A version in the making.
#[derive(Debug)]
pub(crate) struct Staging {
    held: Held,
    parent_path: PathBuf,
    name: OsString,
    /// The new version's name in the staging folder.
    new_name: OsString,
    done: bool,
    /// Of the folders above the target.
    _above: Vec<Above>,
}

impl Staging {
    /// Removes what crashes have left of versions of anything in `parent`; what somebody holds stays.
    pub(crate) fn sweep(parent: &Path) -> Result<()> {
        let folder = Folder::open(parent).context("open", parent)?;
        for name in folder.names().context("list", parent)? {
            if !is_staging(&name) {
                continue;
            }
            // Gone meanwhile, or held.
            let Ok(left) = folder.sub(Path::new(&name)) else { continue };
            let path = parent.join(&name);
            if let Some(_lock) = hold(&left, FlockOperation::NonBlockingLockExclusive, &path)?
                && let Err(error) = clear(&folder, &name, &left)
            {
                tracing::warn!(path = %path.display(), %error, "what a crash has left stays");
            }
        }
        Ok(())
    }

    /// Waits until nobody else makes a version of `name` in `parent`, and removes what a crash has left of one.
    pub(crate) fn begin(parent: &Path, name: &OsStr) -> Result<Staging> {
        let folder = Folder::open(parent).context("open", parent)?;
        Staging::begin_in(folder, parent.to_owned(), name, Vec::new())
    }

    /// The same for the folder at `path` in `volume`: until nobody makes a version of a folder above or below it either.
    /// Folders above it that are missing are made.
    pub(crate) fn begin_below(volume: &Path, path: &Path) -> Result<Staging> {
        let mut at = Folder::open(volume).context("open", volume)?;
        let (mut shown, mut above) = (volume.to_owned(), Vec::new());
        let (names, name) = steps(path)?;
        for name in names {
            // Before it is opened: until then it may be exchanged.
            above.extend(Above::take(&at, &shown, name)?);
            shown.push(name);
            at = step_into(&at, name, &shown)?;
        }
        Staging::begin_in(at, shown, name, above)
    }

    /// Fails where a version could not be made, as far as that can be known without a change.
    pub(crate) fn check_below(volume: &Path, path: &Path) -> Result<()> {
        let mut at = Folder::open(volume).context("open", volume)?;
        let mut shown = volume.to_owned();
        let (names, name) = steps(path)?;
        for name in names {
            let below = shown.join(name);
            if !is_folder_there(&at, name, &below)? {
                return check_access(&at, &shown);
            }
            at = at.sub(Path::new(name)).context("open", &below)?;
            shown = below;
        }
        if is_folder_there(&at, name, &shown.join(name))? {
            open_target(&at, name, &shown.join(name))?;
        }
        check_access(&at, &shown)
    }

    fn begin_in(parent: Folder, parent_path: PathBuf, name: &OsStr, above: Vec<Above>) -> Result<Staging> {
        let held = Held::take(&parent, &parent_path, name, FlockOperation::LockExclusive)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let (name, new_name) = (name.to_owned(), format!("{NEW}{since:x}").into());
        let staging = Staging { held, parent_path, name, new_name, done: false, _above: above };
        let path = &staging.held.path;
        for left in staging.folder().names().context("list", path)? {
            if left == LOCK {
                continue;
            }
            let path = path.join(&left);
            match staging.folder().remove(&left) {
                Ok(()) => tracing::info!(path = %path.display(), "removed what a crash has left"),
                Err(error) => tracing::warn!(path = %path.display(), %error, "an old version stays"),
            }
        }
        Ok(staging)
    }

    /// The folder that the version is to be made in, under the name [`Staging::new_name`].
    pub(crate) fn folder(&self) -> &Folder {
        &self.held.folder
    }

    /// The new version's name.
    pub(crate) fn new_name(&self) -> &OsStr {
        &self.new_name
    }

    /// The path of the new version on the host.
    pub(crate) fn path(&self) -> PathBuf {
        self.held.path.join(&self.new_name)
    }

    /// The folder where the target is.
    pub(crate) fn parent(&self) -> &Folder {
        &self.held.parent
    }

    /// The target's path on the host.
    pub(crate) fn target(&self) -> PathBuf {
        self.parent_path.join(&self.name)
    }

    /// What the target is; `None` when there is none.
    pub(crate) fn there(&self) -> Result<Option<Meta>> {
        self.held.parent.meta(&self.name).context("look at", self.target())
    }

    /// The target, as [`open_target`].
    pub(crate) fn old(&self) -> Result<Option<Folder>> {
        open_target(&self.held.parent, &self.name, &self.target())
    }

    /// Puts the target aside, to be removed.
    pub(crate) fn take_old(&self) -> Result<()> {
        self.old()?;
        fs::renameat(&self.held.parent, &self.name, &self.held.folder, &self.new_name)
            .context("remove", self.target())
    }

    /// Puts the new version in the place of the old one, if there is one, in one step.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let target = self.target();
        let there = self.there()?;
        self.old()?;
        let flags = if there.is_some() { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        let why = |why: &str| LayerError::Target { path: target.clone(), why: why.to_owned() };
        match fs::renameat_with(&self.held.folder, &self.new_name, &self.held.parent, &self.name, flags) {
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

    /// The same, where it matters to nobody whether all of it can be removed.
    pub(crate) fn end(self) {
        if let Err(error) = self.finish() {
            tracing::warn!(%error, "the old version stays; the next one there removes it");
        }
    }

    /// Leaves everything as a crash would.
    pub(crate) fn leave(mut self) {
        self.done = true;
    }

    fn clear(&mut self) -> Result<()> {
        self.done = true;
        self.held.clear()
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

/// A staging folder that is held.
#[derive(Debug)]
struct Held {
    /// The folder that it is in.
    parent: Folder,
    name: OsString,
    /// On the host.
    path: PathBuf,
    folder: Folder,
    /// Held as long as it is open.
    lock: OwnedFd,
}

impl Held {
    /// Waits for the staging folder of the target `name`, and makes it when there is none.
    fn take(parent: &Folder, parent_path: &Path, name: &OsStr, how: FlockOperation) -> Result<Held> {
        let mut staging_name = OsString::from(".");
        staging_name.push(name);
        staging_name.push(SUFFIX);
        let path = parent_path.join(&staging_name);
        loop {
            match fs::mkdirat(parent, &staging_name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error).context("make", &path),
            }
            let folder = match parent.sub_of_this_mount(&staging_name) {
                Ok(folder) => folder,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error).context("open", &path),
            };
            let Some(lock) = hold(&folder, how, &path)? else { continue };
            // The one who held it may have removed it when done.
            let there = parent.meta(&staging_name).context("look at", &path)?;
            let inode = folder.own_meta().context("look at", &path)?.inode;
            if there.is_some_and(|there| there.inode == inode) {
                let parent = parent.again().context("open", parent_path)?;
                return Ok(Held { parent, name: staging_name, path, folder, lock });
            }
        }
    }

    fn clear(&self) -> Result<()> {
        clear(&self.parent, &self.name, &self.folder).context("remove", &self.path)
    }
}

/// The staging folder of a folder above a target, held with others who publish below it: nobody exchanges that folder meanwhile.
#[derive(Debug)]
struct Above(Held);

impl Above {
    /// `None` for somebody who may not make one there; whoever may exchange that folder is not kept from it then.
    fn take(parent: &Folder, parent_path: &Path, name: &OsStr) -> Result<Option<Above>> {
        match Held::take(parent, parent_path, name, FlockOperation::LockShared) {
            Ok(held) => Ok(Some(Above(held))),
            Err(LayerError::Io { path, source, .. }) if is_refused(&source) => {
                let folder = parent_path.join(name);
                tracing::warn!(
                    lock = %path.display(), error = %source,
                    "no right to keep others from publishing to {} meanwhile", folder.display()
                );
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for Above {
    fn drop(&mut self) {
        let held = &self.0;
        // The last one removes it. For a moment nobody has it: then it is somebody else's, or gone.
        if fs::flock(&held.lock, FlockOperation::NonBlockingLockExclusive).is_ok()
            && is_current(&held.folder, &held.lock).unwrap_or(false)
            && let Err(error) = held.clear()
        {
            tracing::warn!(%error, "a staging folder stays; the next one to publish there removes it");
        }
    }
}

fn is_refused(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}

/// Whether a name is that of a staging folder.
pub(crate) fn is_staging(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(SUFFIX.as_bytes())
}

/// The names of the folders above a target, and its own.
fn steps(path: &Path) -> Result<(Vec<&OsStr>, &OsStr)> {
    let wrong = |why: &str| LayerError::Target { path: path.to_owned(), why: why.to_owned() };
    let mut names = Vec::new();
    for step in path.components() {
        match step {
            Component::Normal(name) => names.push(name),
            Component::CurDir => {}
            _ => return Err(wrong("its path leads out of the volume")),
        }
    }
    let name = names.pop().ok_or_else(|| wrong("it has no name"))?;
    Ok((names, name))
}

/// Opens a folder, and makes it when there is none.
fn step_into(parent: &Folder, name: &OsStr, shown: &Path) -> Result<Folder> {
    match fs::mkdirat(parent, name, Mode::RWXU | Mode::RWXG | Mode::RWXO) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error).context("make", shown),
    }
    is_folder_there(parent, name, shown)?;
    parent.sub(Path::new(name)).context("open", shown)
}

/// Whether there is a folder of that name.
///
/// # Errors
/// When there is something else.
fn is_folder_there(parent: &Folder, name: &OsStr, shown: &Path) -> Result<bool> {
    let why = |why: &str| LayerError::Target { path: shown.to_owned(), why: why.to_owned() };
    match parent.meta(name).context("look at", shown)?.map(|there| there.kind) {
        None => Ok(false),
        Some(FileKind::Folder) => Ok(true),
        Some(FileKind::Symlink) => Err(why("it is a symbolic link, and none is followed in a volume")),
        Some(_) => Err(why("it is no folder")),
    }
}

/// Opens a target when it is a folder; as long as nothing is mounted on it or in it, which would be moved with it and be in what
/// is removed.
fn open_target(parent: &Folder, name: &OsStr, target: &Path) -> Result<Option<Folder>> {
    let folder = match parent.sub_of_this_mount(name) {
        Ok(folder) => folder,
        Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Some(Errno::XDEV) => {
                let why = "it is a mount point: name a folder in it".to_owned();
                return Err(LayerError::Target { path: target.to_owned(), why });
            }
            _ => return Err(error).context("open", target),
        },
    };
    refuse_mounts(&folder, target)?;
    Ok(Some(folder))
}

/// Fails when this user may not make anything in a folder.
fn check_access(folder: &Folder, shown: &Path) -> Result<()> {
    fs::accessat(folder, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).context("write to", shown)
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
    Ok(is_current(folder, &lock).context("look at", path)?.then_some(lock))
}

/// Whether a lock is the one that whoever comes now would wait for.
fn is_current(folder: &Folder, lock: &OwnedFd) -> std::io::Result<bool> {
    let held = fs::fstat(lock)?;
    let there = folder.meta(OsStr::new(LOCK))?;
    Ok(there.is_some_and(|there| there.inode == (held.st_dev, held.st_ino)))
}

/// Removes a staging folder that the caller holds; it stays when something in it cannot be removed.
fn clear(parent: &Folder, name: &OsStr, folder: &Folder) -> std::io::Result<()> {
    let all = folder.names()?;
    let removed: Vec<_> = all.iter().filter(|left| *left != LOCK).map(|left| folder.remove(left)).collect();
    removed.into_iter().collect::<std::io::Result<()>>()?;
    // From here on somebody else may make a lock of his own, and has the folder then.
    folder.remove(OsStr::new(LOCK))?;
    match fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
