//! A folder, and access to what is below it that never leaves it.
//!
//! What a build task has left behind is not to be trusted: a name in it may have become a symbolic link to somewhere
//! else between two looks. So nothing here goes by the path of the host: each folder is opened below the top one with
//! openat2(2), without following links, and what is in it is reached from its descriptor.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, ResolveFlags, Timespec};
use rustix::io::Errno;

use crate::files::removal::remove_folder;

/// Extended attributes by name.
pub(crate) type Xattrs = BTreeMap<OsString, Vec<u8>>;

/// What kind of file something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum FileKind {
    File,
    Folder,
    Symlink,
    Fifo,
    Socket,
    Chardev,
    Blockdev,
}

impl FileKind {
    /// The kind in the words of the system.
    pub(crate) fn file_type(self) -> FileType {
        match self {
            FileKind::File => FileType::RegularFile,
            FileKind::Folder => FileType::Directory,
            FileKind::Symlink => FileType::Symlink,
            FileKind::Fifo => FileType::Fifo,
            FileKind::Socket => FileType::Socket,
            FileKind::Chardev => FileType::CharacterDevice,
            FileKind::Blockdev => FileType::BlockDevice,
        }
    }

    fn of(mode: u32) -> FileKind {
        match FileType::from_raw_mode(mode) {
            FileType::Directory => FileKind::Folder,
            FileType::Symlink => FileKind::Symlink,
            FileType::Fifo => FileKind::Fifo,
            FileType::Socket => FileKind::Socket,
            FileType::CharacterDevice => FileKind::Chardev,
            FileType::BlockDevice => FileKind::Blockdev,
            _ => FileKind::File,
        }
    }
}

/// What stat(2) says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Meta {
    pub kind: FileKind,
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: u64,
    /// Seconds and nanoseconds of the last modification.
    pub mtime: (i64, i64),
    /// Device and number: the same for all names of one file.
    pub inode: (u64, u64),
    pub nlink: u64,
}

impl Meta {
    fn of(stat: &fs::Stat) -> Meta {
        #[allow(clippy::unnecessary_cast)]
        Meta {
            kind: FileKind::of(stat.st_mode),
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            rdev: stat.st_rdev as u64,
            size: stat.st_size as u64,
            mtime: (stat.st_mtime as i64, stat.st_mtime_nsec as i64),
            inode: (stat.st_dev as u64, stat.st_ino as u64),
            nlink: stat.st_nlink as u64,
        }
    }

    /// A character device 0/0: overlayfs's word for "removed".
    pub(crate) fn is_whiteout(&self) -> bool {
        self.kind == FileKind::Chardev && self.rdev == 0
    }

    pub(crate) fn is_folder(&self) -> bool {
        self.kind == FileKind::Folder
    }
}

/// An open folder.
#[derive(Debug)]
pub(crate) struct Folder {
    fd: OwnedFd,
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Folder {
    /// Opens a folder of the host; links in its path are followed.
    pub(crate) fn open(path: &Path) -> io::Result<Folder> {
        Ok(Folder { fd: fs::open(path, DIRECTORY, Mode::empty())? })
    }

    /// Opens the folder at `path` below this one, no link followed; this one again for an empty path.
    pub(crate) fn sub(&self, path: &Path) -> io::Result<Folder> {
        self.sub_with(path, ResolveFlags::BENEATH)
    }

    /// This folder, opened once more.
    pub(crate) fn again(&self) -> io::Result<Folder> {
        self.sub(Path::new(""))
    }

    /// The same as [`Folder::sub`], into no mount: that is the error EXDEV.
    pub(crate) fn sub_of_this_mount(&self, path: impl AsRef<Path>) -> io::Result<Folder> {
        self.sub_with(path.as_ref(), ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)
    }

    /// The folder that this one is in, of the same mount.
    pub(crate) fn above(&self) -> io::Result<Folder> {
        self.sub_with(Path::new(".."), ResolveFlags::NO_XDEV)
    }

    fn sub_with(&self, path: &Path, resolve: ResolveFlags) -> io::Result<Folder> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = resolve | ResolveFlags::NO_SYMLINKS;
        loop {
            match fs::openat2(&self.fd, path, DIRECTORY | OFlags::NOFOLLOW, Mode::empty(), resolve) {
                Ok(fd) => return Ok(Folder { fd }),
                // Something was renamed meanwhile: openat2(2) asks to try again.
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Opens the folder at `path`; links in it are followed as if this folder was the top of all.
    pub(crate) fn sub_in_root(&self, path: &Path) -> io::Result<Folder> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        Ok(Folder { fd: fs::openat2(&self.fd, path, DIRECTORY, Mode::empty(), resolve)? })
    }

    /// The folder that `path` is in, and its name there.
    pub(crate) fn parent_of<'p>(&self, path: &'p Path) -> io::Result<(Folder, &'p OsStr)> {
        match path.file_name() {
            Some(name) => Ok((self.sub(path.parent().unwrap_or(Path::new("")))?, name)),
            None => Ok((self.sub(Path::new(""))?, OsStr::new("."))),
        }
    }

    /// What `name` in this folder is; `None` when there is nothing.
    pub(crate) fn meta(&self, name: &OsStr) -> io::Result<Option<Meta>> {
        match fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(Meta::of(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// What this folder is.
    pub(crate) fn own_meta(&self) -> io::Result<Meta> {
        Ok(Meta::of(&fs::fstat(&self.fd)?))
    }

    /// The names in this folder.
    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        Ok(names)
    }

    /// Where the link `name` points.
    pub(crate) fn link_target(&self, name: &OsStr) -> io::Result<OsString> {
        Ok(OsString::from_vec(fs::readlinkat(&self.fd, name, Vec::new())?.into_bytes()))
    }

    /// Opens the regular file `name` to read it.
    pub(crate) fn open_file(&self, name: &OsStr) -> io::Result<File> {
        // Named first, and opened when it is known to be a file: opening a device is enough to set off what it does.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let named = fs::openat(&self.fd, name, flags, Mode::empty())?;
        if Meta::of(&fs::fstat(&named)?).kind != FileKind::File {
            return Err(io::Error::other("it is no regular file any more"));
        }
        let again = format!("/proc/self/fd/{}", named.as_raw_fd());
        Ok(File::from(fs::open(again, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// Where this folder is on the host, as the kernel tells it.
    pub(crate) fn host_path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.fd.as_raw_fd()))
    }

    /// A path of `name` for the calls that know no descriptors.
    pub(crate) fn by_descriptor(&self, name: &OsStr) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd())).join(name)
    }

    /// One extended attribute of `name`.
    pub(crate) fn xattr(&self, name: &OsStr, attribute: &str) -> io::Result<Option<Vec<u8>>> {
        xattr(&self.by_descriptor(name), OsStr::new(attribute))
    }

    /// All extended attributes of `name`.
    pub(crate) fn xattrs(&self, name: &OsStr) -> io::Result<Xattrs> {
        let path = self.by_descriptor(name);
        let mut all = Xattrs::new();
        for attribute in xattr_names(&path)? {
            // It may have been removed meanwhile.
            if let Some(value) = xattr(&path, &attribute)? {
                all.insert(attribute, value);
            }
        }
        Ok(all)
    }

    /// Sets one extended attribute of `name`.
    pub(crate) fn set_xattr(&self, name: &OsStr, attribute: &OsStr, value: &[u8]) -> io::Result<()> {
        Ok(fs::lsetxattr(self.by_descriptor(name), attribute, value, fs::XattrFlags::empty())?)
    }

    /// Removes one extended attribute of `name`.
    pub(crate) fn remove_xattr(&self, name: &OsStr, attribute: &OsStr) -> io::Result<()> {
        Ok(fs::lremovexattr(self.by_descriptor(name), attribute)?)
    }

    /// Sets the time of the last modification of `name`, and leaves the other one.
    pub(crate) fn set_mtime(&self, name: &OsStr, (tv_sec, tv_nsec): (i64, i64)) -> io::Result<()> {
        let times = fs::Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT },
            last_modification: Timespec { tv_sec, tv_nsec },
        };
        Ok(fs::utimensat(&self.fd, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Removes `name`, with everything below when it is a folder, but for what is mounted there. Nothing there is fine.
    pub(crate) fn remove(&self, name: &OsStr) -> io::Result<()> {
        match self.unlink(name)? {
            true => Ok(()),
            false => remove_folder(self, name),
        }
    }

    /// Removes `name` unless it is a folder. Gives whether it is gone.
    pub(crate) fn unlink(&self, name: &OsStr) -> io::Result<bool> {
        match fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(true),
            Err(Errno::ISDIR) => Ok(false),
            // POSIX has it for folders, Linux for what may not be removed.
            Err(Errno::PERM) => match self.meta(name)? {
                Some(there) if there.is_folder() => Ok(false),
                Some(_) => Err(Errno::PERM.into()),
                None => Ok(true),
            },
            Err(error) => Err(error.into()),
        }
    }
}

fn xattr(path: &Path, attribute: &OsStr) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; 256];
    loop {
        match fs::lgetxattr(path, attribute, &mut value[..]) {
            Ok(length) => {
                value.truncate(length);
                return Ok(Some(value));
            }
            Err(Errno::RANGE) if value.len() < 65_536 => value.resize(65_536, 0),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

fn xattr_names(path: &Path) -> io::Result<Vec<OsString>> {
    let mut list = vec![0; 1024];
    let length = loop {
        match fs::llistxattr(path, &mut list[..]) {
            Ok(length) => break length,
            Err(Errno::RANGE) if list.len() < 65_536 => list.resize(65_536, 0),
            Err(Errno::OPNOTSUPP) => break 0,
            Err(error) => return Err(error.into()),
        }
    };
    let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| OsStr::from_bytes(name).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        let folder = Folder::open(dir.path()).unwrap();
        fs::mknodat(&folder, "fifo", FileType::Fifo, Mode::RUSR, 0).unwrap();
        let mut names = vec!["link", "socket", "fifo"];
        // A device that no driver has: to open it would be an error of its own.
        if fs::mknodat(&folder, "device", FileType::CharacterDevice, Mode::RUSR, fs::makedev(240, 77)).is_ok()
        {
            names.push("device");
        }
        for name in names {
            let error = folder.open_file(OsStr::new(name)).unwrap_err();
            assert!(error.to_string().contains("no regular file"), "{name}: {error}");
        }
        assert_eq!(io::read_to_string(folder.open_file(OsStr::new("file")).unwrap()).unwrap(), "text");
    }
}
