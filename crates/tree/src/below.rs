//! What lies below a directory, wherever somebody else says.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Dir, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

/// The kernel takes paths of less than 4,096 bytes; names in them have up to 255.
const AT_ONCE: usize = 3 << 10;

/// Opens what lies at a path below a directory: through no symbolic link, and nothing outside. The path may be longer than the kernel takes at once.
///
/// # Errors
/// As openat2(2).
pub fn open_below(top: impl AsFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let open = |dir: &Option<OwnedFd>, path: &[u8], flags: OFlags| {
        let dir = dir.as_ref().map_or(top.as_fd(), AsFd::as_fd);
        openat2(dir, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
    };
    let (mut dir, mut rest) = (None, path);
    while rest.len() > AT_ONCE {
        let end = rest[..AT_ONCE].iter().rposition(|byte| *byte == b'/').ok_or(Errno::NAMETOOLONG)?;
        dir = Some(open(&dir, &rest[..end], OFlags::PATH | OFlags::DIRECTORY)?);
        rest = &rest[end + 1..];
    }
    open(&dir, if rest.is_empty() { b"." } else { rest }, flags)
}

/// Opens a file below a folder to be read.
///
/// # Errors
/// As [`open_below`].
pub fn file_below(top: &Path, path: &[u8]) -> io::Result<File> {
    // Without waiting, should it have become a fifo.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(File::from(open_below(File::open(top)?, path, flags)?))
}

/// The names in a directory below a folder; `None`: there is no directory.
///
/// # Errors
/// It cannot be read.
pub fn names_below(top: &Path, path: &[u8]) -> io::Result<Option<Vec<Vec<u8>>>> {
    let dir = match open_below(File::open(top)?, path, OFlags::RDONLY | OFlags::DIRECTORY) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        dir => dir?,
    };
    let mut names = Vec::new();
    for found in Dir::read_from(&dir)? {
        let name = found?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    Ok(Some(names))
}
