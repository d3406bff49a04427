//! An inode of a mount by its number, without a way to it: what the kernel believes of it.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};

/// The kind of handle that FUSE takes: the inode's number in two parts, and its generation, which is 0 here.
const INO64_GEN: i32 = 0x81;
const PARTS: usize = 3;
/// The number of the root.
const ROOT: u64 = 1;

/// Where a mount is, and which one it is.
#[derive(Debug)]
pub(crate) struct Place {
    point: PathBuf,
    device: (u32, u32),
}

#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    parts: [u32; PARTS],
}

impl Place {
    /// Of what is mounted there now; fails as [`Place::find`] does.
    pub(crate) fn new(point: PathBuf) -> io::Result<Place> {
        let root = open(&point, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let place = Place { device: device(&root)?, point };
        drop(root);
        place.find(ROOT)?;
        Ok(place)
    }

    /// Finds an inode that the kernel has, by its number there. The mount is in use as long as this goes on. Fails without the
    /// right to do so (CAP_DAC_READ_SEARCH), when something else is mounted there, and when the kernel does not have it.
    pub(crate) fn find(&self, number: u64) -> io::Result<Found> {
        let root = open(&self.point, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if device(&root)? != self.device {
            return Err(io::ErrorKind::NotFound.into());
        }
        let mut handle = Handle {
            bytes: (PARTS * size_of::<u32>()) as u32,
            kind: INO64_GEN,
            parts: [(number >> 32) as u32, number as u32, 0],
        };
        // SAFETY: the structure is laid out as file_handle, says how long it is, and outlives the call.
        let descriptor = unsafe {
            libc::open_by_handle_at(
                root.as_raw_fd(),
                (&raw mut handle).cast(),
                libc::O_PATH | libc::O_CLOEXEC,
            )
        };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just opened, and nobody else has it.
        Ok(Found(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }
}

fn device(file: impl AsFd) -> io::Result<(u32, u32)> {
    let stat = statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok((stat.stx_dev_major, stat.stx_dev_minor))
}

/// An inode that the kernel has.
pub(crate) struct Found(OwnedFd);

impl Found {
    /// The size that reads, and maps, end at, bytes.
    pub(crate) fn size(&self) -> io::Result<u64> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        Ok(statx(&self.0, "", flags, StatxFlags::SIZE)?.stx_size)
    }

    /// Has the kernel ask for the attributes, by a request of the calling thread.
    pub(crate) fn ask(&self) -> io::Result<()> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        statx(&self.0, "", flags, StatxFlags::SIZE)?;
        Ok(())
    }
}
