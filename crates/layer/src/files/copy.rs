//! Copies of single files with everything that belongs to them.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{self, AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::files::folder::{FileKind, Folder, Meta, Xattrs};

/// What a file is beside its content.
#[derive(Debug, Clone)]
pub(crate) struct Attributes {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: (i64, i64),
    pub xattrs: Xattrs,
}

impl Attributes {
    pub(crate) fn new(meta: &Meta, xattrs: Xattrs) -> Attributes {
        Attributes { mode: meta.mode, uid: meta.uid, gid: meta.gid, mtime: meta.mtime, xattrs }
    }
}

/// What could not be kept: because the caller is not root, or the file system does not have it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Lost {
    /// Files that belong to whoever publishes now.
    pub owners: u64,
    /// Extended attributes: capabilities and others that only root sets, access control lists where there are none.
    pub xattrs: u64,
    /// Device nodes.
    pub devices: u64,
}

impl Lost {
    /// Whether something was lost.
    pub fn any(self) -> bool {
        self != Lost::default()
    }
}

/// Writes copies into folders, and counts.
#[derive(Debug)]
pub(crate) struct Copier {
    /// Root keeps everything or fails; others lose what they may not set.
    strict: bool,
    pub lost: Lost,
    /// Bytes of content written.
    pub bytes: u64,
    /// On a file system that syncfs(2) does not reach: every file is fsynced.
    pub fsync_each: bool,
    /// Somebody else may put a link in the place of what is made.
    pub is_watched: bool,
}

impl Copier {
    pub(crate) fn new() -> Copier {
        Copier {
            strict: may_set_everything(),
            lost: Lost::default(),
            bytes: 0,
            fsync_each: false,
            is_watched: false,
        }
    }

    /// Makes `name` in `to` what `from` (with this content) is. Folders are not for this.
    ///
    /// # Errors
    /// When something of it cannot be read or made.
    pub(crate) fn copy(
        &mut self,
        from: Source<'_>,
        attributes: &Attributes,
        to: &Folder,
        name: &OsStr,
    ) -> io::Result<()> {
        let kind = from.meta.kind;
        match kind {
            FileKind::File => self.copy_file(from.content.0, from.content.1, to, name)?,
            FileKind::Symlink => fs::symlinkat(from.content.0.link_target(from.content.1)?, to, name)?,
            FileKind::Fifo | FileKind::Socket | FileKind::Chardev | FileKind::Blockdev => {
                if !self.make_node(to, name, kind, from.meta.rdev)? {
                    return Ok(());
                }
            }
            FileKind::Folder => return Err(Errno::ISDIR.into()),
        }
        self.set(to, name, kind, attributes)?;
        if self.fsync_each && kind == FileKind::File {
            to.open_file(name)?.sync_all()?;
        }
        Ok(())
    }

    /// Makes a FIFO, a socket or a device. Gives whether it is there: only root may make devices.
    ///
    /// # Errors
    /// When it cannot be made, and this is root.
    pub(crate) fn make_node(
        &mut self,
        to: &Folder,
        name: &OsStr,
        kind: FileKind,
        device: u64,
    ) -> io::Result<bool> {
        match fs::mknodat(to, name, kind.file_type(), Mode::RUSR | Mode::WUSR, device) {
            Err(Errno::PERM) if !self.strict => {
                self.lost.devices += 1;
                Ok(false)
            }
            other => Ok(other.map(|()| true)?),
        }
    }

    fn copy_file(&mut self, from: &Folder, from_name: &OsStr, to: &Folder, name: &OsStr) -> io::Result<()> {
        let source = from.open_file(from_name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let copy = File::from(fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
        // Where the file system can, the copy shares its blocks with the original.
        if fs::ioctl_ficlone(&copy, &source).is_err() {
            self.bytes += copy_content(source, copy)?;
        }
        Ok(())
    }

    /// Gives `name` its attributes, in the order in which none undoes another: a new owner clears setuid and
    /// capabilities, and everything counts as a change but the time itself.
    ///
    /// # Errors
    /// When one cannot be set, and this is root.
    pub(crate) fn set(
        &mut self,
        folder: &Folder,
        name: &OsStr,
        kind: FileKind,
        wanted: &Attributes,
    ) -> io::Result<()> {
        let Some(now) = folder.meta(name)? else { return Err(Errno::NOENT.into()) };
        if (now.uid, now.gid) != (wanted.uid, wanted.gid) {
            let (uid, gid) = (Uid::from_raw(wanted.uid), Gid::from_raw(wanted.gid));
            match fs::chownat(folder, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::PERM | Errno::INVAL) if !self.strict => self.lost.owners += 1,
                other => other?,
            }
        }
        let mut mode = wanted.mode;
        if self.set_xattrs(folder, name, wanted)? {
            // Without the list the bits of the group are its mask, which may be more than the group had.
            let list = wanted.xattrs.get(OsStr::new(ACCESS_LIST)).map_or(&[][..], Vec::as_slice);
            mode &= !0o070 | group_of(list).unwrap_or(0) << 3;
        }
        if kind != FileKind::Symlink {
            let mode = Mode::from_raw_mode(mode);
            match self.is_watched {
                true => set_mode_of_no_link(folder, name, mode)?,
                false => fs::chmodat(folder, name, mode, AtFlags::empty())?,
            }
        }
        folder.set_mtime(name, wanted.mtime)
    }

    /// Gives whether an access control list is lost.
    fn set_xattrs(&mut self, folder: &Folder, name: &OsStr, wanted: &Attributes) -> io::Result<bool> {
        let now = folder.xattrs(name)?;
        let mut list_lost = false;
        for (attribute, value) in &wanted.xattrs {
            if now.get(attribute) == Some(value) {
                continue;
            }
            match folder.set_xattr(name, attribute, value) {
                Err(error) if is_list(attribute) && error.kind() == io::ErrorKind::Unsupported => {
                    list_lost |= attribute == OsStr::new(ACCESS_LIST);
                    self.lost.xattrs += 1;
                }
                Err(error) if !self.strict || is_host_label(attribute) => {
                    tracing::debug!(?attribute, %error, "an attribute is lost");
                    self.lost.xattrs += u64::from(!is_host_label(attribute));
                }
                other => other?,
            }
        }
        // What it has from its parent by default, as access control lists are.
        for attribute in now.keys().filter(|attribute| !wanted.xattrs.contains_key(*attribute)) {
            match folder.remove_xattr(name, attribute) {
                Err(error) if !self.strict || is_host_label(attribute) => {
                    tracing::debug!(?attribute, %error, "an attribute stays");
                }
                other => other?,
            }
        }
        Ok(list_lost)
    }
}

/// fchmodat(2) follows links, whatever its flags.
fn set_mode_of_no_link(folder: &Folder, name: &OsStr, mode: Mode) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let named = fs::openat(folder, name, flags, Mode::empty())?;
    if fs::FileType::from_raw_mode(fs::fstat(&named)?.st_mode) == fs::FileType::Symlink {
        return Err(Errno::LOOP.into());
    }
    Ok(fs::chmod(format!("/proc/self/fd/{}", named.as_raw_fd()), mode)?)
}

/// Whether this process may make devices and set every owner and attribute: root, unless of a user namespace.
pub(crate) fn may_set_everything() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map");
    let is_of_host = map.is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]));
    rustix::process::geteuid().is_root() && is_of_host
}

/// Where a copy comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub meta: &'a Meta,
    /// The folder that has the content, and its name there.
    pub content: (&'a Folder, &'a OsStr),
}

/// The access control list of a file, acl(5).
const ACCESS_LIST: &str = "system.posix_acl_access";

fn is_list(attribute: &OsStr) -> bool {
    [ACCESS_LIST, "system.posix_acl_default"].iter().any(|name| attribute == OsStr::new(name))
}

/// What the owning group may do by an access control list, as the kernel keeps it: a version, then entries of tag, rights
/// (2 bytes each) and id (4 bytes), little-endian (linux/posix_acl_xattr.h).
fn group_of(list: &[u8]) -> Option<u32> {
    const GROUP_OBJ: u16 = 0x04;
    let number = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    let mut entries = list.get(4..)?.chunks_exact(8);
    entries.find(|entry| number(entry) == GROUP_OBJ).map(|entry| u32::from(number(&entry[2..])) & 7)
}

/// Labels that a host's policy gives to files: they mean nothing elsewhere.
fn is_host_label(attribute: &OsStr) -> bool {
    ["security.selinux", "security.SMACK64", "security.ima", "security.evm"]
        .iter()
        .any(|label| attribute == OsStr::new(label))
}

/// Copies a file's bytes; holes stay holes. Gives how many were written.
fn copy_content(source: File, copy: File) -> io::Result<u64> {
    let length = source.metadata()?.len();
    copy_length(source, copy, length)
}

/// The same with the first bytes of a file that may grow meanwhile.
fn copy_length(mut source: File, mut copy: File, length: u64) -> io::Result<u64> {
    let mut written = 0;
    let mut at = 0;
    while at < length {
        // Where the file system knows no holes it is all data.
        let start = match fs::seek(&source, fs::SeekFrom::Data(at)) {
            Ok(start) if start < length => start,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(_) => at,
        };
        let end = fs::seek(&source, fs::SeekFrom::Hole(start)).unwrap_or(length).clamp(start, length);
        source.seek(SeekFrom::Start(start))?;
        copy.seek(SeekFrom::Start(start))?;
        written += copy_range(&mut source, &mut copy, end - start)?;
        if end <= at {
            break;
        }
        at = end;
    }
    copy.set_len(length)?;
    Ok(written)
}

fn copy_range(source: &mut File, copy: &mut File, length: u64) -> io::Result<u64> {
    let mut left = length;
    while left > 0 {
        match fs::copy_file_range(&*source, None, &*copy, None, usize::try_from(left).unwrap_or(usize::MAX)) {
            Ok(0) => return Ok(length - left),
            Ok(done) => left -= done as u64,
            // Not on this pair of file systems.
            Err(_) => {
                let mut rest = source.take(left);
                let mut buffer = vec![0; 256 << 10];
                loop {
                    let got = rest.read(&mut buffer)?;
                    if got == 0 {
                        return Ok(length - rest.limit());
                    }
                    copy.write_all(&buffer[..got])?;
                }
            }
        }
    }
    Ok(length)
}

/// Makes durable what was written below a folder: syncfs(2) of its file system.
///
/// # Errors
/// When the device does not take it.
pub fn sync_filesystem(path: &Path) -> io::Result<()> {
    Ok(fs::syncfs(&Folder::open(path)?)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_file_that_grows_is_copied_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let source = File::create_new(&from).unwrap();
        source.write_at(b"text", 0).unwrap();
        // Beyond the length, behind a hole.
        source.write_at(b"more", 4 << 20).unwrap();
        let open = || (File::open(&from).unwrap(), File::create(&to).unwrap());
        for length in [2, 4, 1 << 20] {
            let (source, copy) = open();
            copy_length(source, copy, length).unwrap();
            let copied = std::fs::read(&to).unwrap();
            assert_eq!(copied.len() as u64, length);
            assert!(copied.iter().zip(b"text").all(|(a, b)| a == b), "{length}");
        }
    }
}
