//! Requests about extended attributes.

use hayloft_fuse::{Reply, Request};
use hayloft_model::{FileKind, Ino, TreeError};

use super::error::FsError;
use super::{Done, VolumeFs, done, ino_of};

/// Longest name, as everywhere on Linux.
const NAME_MAX: usize = 255;

/// The volume's id, on whatever is in it: two mounts with the same one are mounts of one volume. It is not listed, since
/// programs that copy attributes would copy it.
pub const VOLUME_XATTR: &str = "hayloft.volume";

/// Attributes of users, of root, and of security modules are kept. Those of the system, POSIX access control
/// lists among them, are refused: what is not enforced must not look as if it was.
fn check_name(name: &[u8]) -> Done {
    let known = [&b"user."[..], b"trusted.", b"security."];
    if !known.iter().any(|prefix| name.starts_with(prefix)) {
        return Err(FsError::NotSupported.into());
    }
    if known.contains(&name) {
        return Err(TreeError::Invalid.into());
    }
    if name.len() > NAME_MAX { Err(FsError::Range.into()) } else { Ok(()) }
}

impl VolumeFs {
    pub(super) fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], flags: u32) -> Done {
        check_name(name)?;
        let mut core = self.client.core();
        // The kernel checks this for its own file systems; user attributes mean nothing on the others.
        let kind = core.tree.inode(ino)?.kind();
        if name.starts_with(b"user.") && !matches!(kind, FileKind::Regular | FileKind::Directory) {
            return Err(TreeError::NotPermitted.into());
        }
        let mode = (flags & libc::XATTR_CREATE as u32 != 0, flags & libc::XATTR_REPLACE as u32 != 0);
        core.tree.set_xattr(ino, name, value, mode, self.now())?;
        self.changed(&mut core);
        Ok(())
    }

    pub(super) fn get_xattr(
        &self,
        request: &Request<'_>,
        name: &[u8],
        size: u32,
        reply: &mut Reply<'_>,
    ) -> Done {
        let ino = ino_of(request);
        let id = self.client.volume_id.get().filter(|_| name == VOLUME_XATTR.as_bytes());
        let mut core = self.client.core();
        let value = match id {
            Some(id) => id.as_bytes(),
            None => {
                check_name(name)?;
                core.tree.shown(ino)?;
                core.tree.xattr(ino, name)?
            }
        };
        match size as usize {
            0 => reply.xattr_size(value.len() as u32),
            size if size < value.len() => return Err(FsError::Range.into()),
            _ => reply.data(value),
        }
        done(request, &mut core);
        Ok(())
    }

    pub(super) fn list_xattrs(&self, ino: Ino, size: u32, reply: &mut Reply<'_>) -> Done {
        let core = self.client.core();
        let mut list = Vec::new();
        for name in core.tree.shown(ino)?.xattrs.keys() {
            list.extend_from_slice(name);
            list.push(0);
        }
        match size as usize {
            0 => reply.xattr_size(list.len() as u32),
            size if size < list.len() => return Err(FsError::Range.into()),
            _ => reply.data(&list),
        }
        Ok(())
    }

    pub(super) fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Done {
        check_name(name)?;
        let mut core = self.client.core();
        core.tree.remove_xattr(ino, name, self.now())?;
        self.changed(&mut core);
        Ok(())
    }
}
