//! Messages to the kernel on one's own account: what to drop from its caches.
//!
//! They may wait for pages or directories that a request under way holds: never send them from
//! [`Pace::Fast`](crate::Pace::Fast), nor with a lock held that a request handler takes.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use crate::protocol::abi::{notify, out_header};
use crate::sys;

/// Sends notifications. Cheap to clone; outlives the mount (it then reports ENODEV or the like).
#[derive(Debug, Clone)]
pub struct Notifier {
    fd: Arc<OwnedFd>,
    minor: u32,
}

/// Inodes of one word.
const PRUNED_AT_ONCE: usize = 512;

impl Notifier {
    pub(crate) fn new(fd: Arc<OwnedFd>, minor: u32) -> Notifier {
        Notifier { fd, minor }
    }

    /// Over a descriptor of a connection that another process serves. It raises no epoch.
    pub fn over(connection: OwnedFd) -> Notifier {
        Notifier { fd: Arc::new(connection), minor: 0 }
    }

    /// Drops the cached attributes of an inode, and of its cached data `len` bytes from `offset` (`len` 0: to
    /// the end; `offset` negative: no data). Returns whether the kernel knew the inode.
    pub fn inval_inode(&self, nodeid: u64, offset: i64, len: i64) -> io::Result<bool> {
        self.send(notify::INVAL_INODE, &[&words(&[nodeid, offset as u64, len as u64])])
    }

    /// Drops a name from the cache; whatever is mounted or open below stays. Returns whether it was there.
    pub fn inval_entry(&self, parent: u64, name: &[u8]) -> io::Result<bool> {
        self.entry(parent, name, 0)
    }

    /// Lets a name be looked up again at its next use, without dropping anything now.
    pub fn expire_entry(&self, parent: u64, name: &[u8]) -> io::Result<bool> {
        self.entry(parent, name, notify::EXPIRE_ONLY)
    }

    fn entry(&self, parent: u64, name: &[u8], flags: u32) -> io::Result<bool> {
        let numbers = [name.len() as u32, flags].map(u32::to_ne_bytes).concat();
        self.send(notify::INVAL_ENTRY, &[&words(&[parent]), &numbers, &with_nul(name)])
    }

    /// Like [`Notifier::inval_entry`] when the name was deleted: drops it even when in use and tells those who
    /// watch by inotify. Nothing happens when the name now means another inode than `child`.
    pub fn delete(&self, parent: u64, child: u64, name: &[u8]) -> io::Result<bool> {
        let numbers = [name.len() as u32, 0].map(u32::to_ne_bytes).concat();
        let head = [words(&[parent, child]), numbers].concat();
        self.send(notify::DELETE, &[&head, &with_nul(name)])
    }

    /// Puts content into the page cache. Returns whether the kernel knew the inode.
    pub fn store(&self, nodeid: u64, offset: u64, data: &[u8]) -> io::Result<bool> {
        let numbers = [data.len() as u32, 0].map(u32::to_ne_bytes).concat();
        let head = [words(&[nodeid, offset]), numbers].concat();
        self.send(notify::STORE, &[&head, data])
    }

    /// Expires every name that the kernel holds, at once. `Unsupported` before Linux 6.16.
    pub fn inc_epoch(&self) -> io::Result<()> {
        if self.minor < notify::INC_EPOCH_MINOR {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.send(notify::INC_EPOCH, &[]).map(|_| ())
    }

    /// Has the kernel forget these inodes, and the names that it has of them, as far as nobody uses them: what is open, mapped or somebody's
    /// directory stays as it is. It may have to wait for pages. `Unsupported` before Linux 6.18.
    pub fn prune(&self, nodeids: &[u64]) -> io::Result<()> {
        if self.minor < notify::PRUNE_MINOR {
            return Err(io::ErrorKind::Unsupported.into());
        }
        for some in nodeids.chunks(PRUNED_AT_ONCE) {
            let head = [(some.len() as u32).to_ne_bytes(), [0; 4]].concat();
            self.send(notify::PRUNE, &[&head, &words(&[0]), &words(some)])?;
        }
        Ok(())
    }

    fn send(&self, code: i32, pieces: &[&[u8]]) -> io::Result<bool> {
        let len = pieces.iter().map(|piece| piece.len()).sum();
        let header = out_header(0, code, len);
        let mut all: [&[u8]; 4] = [&header, &[], &[], &[]];
        all[1..=pieces.len()].copy_from_slice(pieces);
        match sys::write_pieces(self.fd.as_raw_fd(), &all) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn with_nul(name: &[u8]) -> Vec<u8> {
    [name, b"\0"].concat()
}
