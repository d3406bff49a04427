//! Ending a connection to the kernel from outside, by its number.
//!
//! A client that was killed keeps its connection as long as one of its threads waits in the kernel, perhaps for a call that
//! waits for the client. The file system of the connections (`Documentation/filesystems/fuse/fuse.rst`, "Control
//! filesystem") ends it.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

/// Where it is mounted, most of the time.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// What ends the connection of one mount.
#[derive(Debug)]
pub struct Abort {
    file: std::fs::File,
}

impl Abort {
    /// Of the file system with this device number, as stat(2) has it. For root, and the user who mounted.
    ///
    /// # Errors
    /// There is no such connection, it is another user's, or the file system of the connections cannot be had.
    pub fn of(device: u64) -> io::Result<Abort> {
        // The kernel's own form of the number: `MINORBITS` is 20.
        let number = rustix::fs::major(device) << 20 | rustix::fs::minor(device);
        let path = format!("{number}/abort");
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let there = rustix::fs::openat(CWD, Path::new(CONNECTIONS).join(&path), flags, Mode::empty());
        let file = match there {
            Err(rustix::io::Errno::NOENT) => rustix::fs::openat(connections()?, &path, flags, Mode::empty())?,
            there => there?,
        };
        Ok(Abort { file: file.into() })
    }

    /// Every call that waits fails, and all others with ENOTCONN.
    ///
    /// # Errors
    /// The connection has ended already.
    pub fn abort(&mut self) -> io::Result<()> {
        self.file.write_all(b"1")
    }
}

/// The file system of the connections, mounted nowhere.
fn connections() -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// Ends the connection of the file system with this device number; see [`Abort`].
///
/// # Errors
/// As for [`Abort::of`].
pub fn abort(device: u64) -> io::Result<()> {
    Abort::of(device)?.abort()
}
