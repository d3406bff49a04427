//! Operations on attributes, plain and extended.

use bytes::Bytes;

use super::Tree;
use crate::{Content, FileKind, Ino, InodeRow, Timestamp, TreeError};

const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o0010;
const CAPABILITY: &[u8] = b"security.capability";

/// Longest value of an extended attribute, bytes (Linux's own limit).
const XATTR_VALUE_MAX: usize = 64 * 1024;
/// All extended attributes of an inode together, names and values, bytes.
const XATTRS_MAX: usize = 256 * 1024;
/// Largest file: what a signed 64-bit offset can name, less a block to calculate with.
const SIZE_MAX: u64 = i64::MAX as u64 - crate::BLOCK_SIZE;

/// What setattr changes; `None` leaves a thing as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttributeChange {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size, and how many bytes take room afterwards.
    pub size: Option<(u64, u64)>,
    /// Last access; the time of the change itself if it is the one that [`Tree::set_attributes`] is called with.
    pub atime: Option<Timestamp>,
    /// Last change of the content; as `atime`.
    pub mtime: Option<Timestamp>,
    /// The caller has no right to keep setuid and setgid bits on a truncation.
    pub kill_privileges: bool,
}

impl Tree {
    /// Changes attributes.
    ///
    /// # Errors
    /// The file would be too large or the quota is used up, or the row is missing.
    pub fn set_attributes(
        &mut self,
        ino: Ino,
        change: AttributeChange,
        now: Timestamp,
    ) -> Result<(), TreeError> {
        let row = self.inode(ino)?;
        if let Some((size, _)) = change.size {
            if row.kind() != FileKind::Regular {
                return Err(if row.kind() == FileKind::Directory {
                    TreeError::IsDirectory
                } else {
                    TreeError::Invalid
                });
            }
            if size > SIZE_MAX {
                return Err(TreeError::TooLarge);
            }
        }
        self.need_row(ino)?;
        let given = now;
        let now = self.stamp(now, &[ino]);
        if let Some((size, allocated)) = change.size {
            self.set_size(ino, size, allocated, now)?;
        }
        // "The present time", as utimensat(2) has it, is that of the change.
        let time = |time: Timestamp| if time == given { now } else { time };
        let row = self.change(ino)?;
        row.ctime = now;
        if let Some(mode) = change.mode {
            row.mode = (row.mode & 0o170000) | (mode & 0o7777);
        }
        let chowned = change.uid.is_some() || change.gid.is_some();
        row.uid = change.uid.unwrap_or(row.uid);
        row.gid = change.gid.unwrap_or(row.gid);
        row.atime = change.atime.map_or(row.atime, time);
        row.mtime = change.mtime.map_or(row.mtime, time);
        if (chowned && change.mode.is_none()) || change.kill_privileges {
            drop_privileges(row);
        }
        Ok(())
    }

    /// A file's data was written: its size is at least `end` now, and `allocated` bytes take room. Whether it may be
    /// written was asked before, see [`Tree::check_owned`].
    ///
    /// # Errors
    /// The file would be too large, or the row is missing.
    pub fn wrote(
        &mut self,
        ino: Ino,
        end: u64,
        allocated: u64,
        kill_privileges: bool,
        now: Timestamp,
    ) -> Result<(), TreeError> {
        let size = self.inode(ino)?.size.max(end);
        let now = self.stamp(now, &[ino]);
        self.set_size(ino, size, allocated, now)?;
        if kill_privileges {
            drop_privileges(self.change(ino)?);
        }
        Ok(())
    }

    /// Data of a file was lost: this is what is left of it. Nobody was asked whether it may be changed: its owner gives it
    /// back.
    ///
    /// # Errors
    /// The row is missing.
    pub fn cut_down(&mut self, ino: Ino, size: u64, allocated: u64, now: Timestamp) -> Result<(), TreeError> {
        let now = self.stamp(now, &[ino]);
        self.set_size(ino, size, allocated, now)
    }

    fn set_size(&mut self, ino: Ino, size: u64, allocated: u64, now: Timestamp) -> Result<(), TreeError> {
        let row = self.change(ino)?;
        let before = std::mem::replace(&mut row.allocated, allocated);
        row.size = size;
        (row.mtime, row.ctime) = (now, now);
        if row.nlink > 0 {
            self.count(allocated as i64 - before as i64, 0);
        }
        Ok(())
    }

    /// The largest size that a file may have, bytes.
    pub fn size_max() -> u64 {
        SIZE_MAX
    }

    /// What a file's data is stored as, after its content was sent. Not a change: no cut is needed for it.
    pub fn set_content(&mut self, ino: Ino, content: Content) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.row.content = content;
        }
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// There is none of that name, or the row is missing.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<&Bytes, TreeError> {
        self.inode(ino)?.xattrs.get(name).ok_or(TreeError::NoAttribute)
    }

    /// Sets an extended attribute; `create` and `replace` as XATTR_CREATE and XATTR_REPLACE.
    ///
    /// # Errors
    /// It exists or does not, is too large, or the row is missing.
    pub fn set_xattr(
        &mut self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        (create, replace): (bool, bool),
        now: Timestamp,
    ) -> Result<(), TreeError> {
        let row = self.inode(ino)?;
        match row.xattrs.contains_key(name) {
            true if create => return Err(TreeError::Exists),
            false if replace => return Err(TreeError::NoAttribute),
            _ => {}
        }
        let others = row.xattrs.iter().filter(|(other, _)| *other != name);
        let total: usize = others.map(|(name, value)| name.len() + value.len()).sum();
        if value.len() > XATTR_VALUE_MAX {
            return Err(TreeError::AttributeTooLarge);
        }
        if total + name.len() + value.len() > XATTRS_MAX {
            return Err(TreeError::NoSpace);
        }
        self.need_row(ino)?;
        let now = self.stamp(now, &[ino]);
        let row = self.change(ino)?;
        row.xattrs.insert(Bytes::copy_from_slice(name), Bytes::copy_from_slice(value));
        row.ctime = now;
        Ok(())
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// There is none of that name, or the row is missing.
    pub fn remove_xattr(&mut self, ino: Ino, name: &[u8], now: Timestamp) -> Result<(), TreeError> {
        self.xattr(ino, name)?;
        self.need_row(ino)?;
        let now = self.stamp(now, &[ino]);
        let row = self.change(ino)?;
        row.xattrs.remove(name);
        row.ctime = now;
        Ok(())
    }
}

/// Whether a write by somebody without privileges takes some from the file that the kernel may have in its cache.
pub fn has_privileges(row: &InodeRow) -> bool {
    row.mode & SETUID != 0 || (row.mode & SETGID != 0 && row.mode & GROUP_EXECUTE != 0)
}

/// As the kernel does on a write by somebody without CAP_FSETID: no setuid, no setgid on an executable
/// of the group, no capabilities.
fn drop_privileges(row: &mut InodeRow) {
    if row.kind() == FileKind::Directory {
        return;
    }
    row.mode &= !SETUID;
    if row.mode & GROUP_EXECUTE != 0 {
        row.mode &= !SETGID;
    }
    row.xattrs.remove(CAPABILITY);
}
