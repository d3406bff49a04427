//! Extended attributes, as the kernel has them.

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs;
use rustix::io::Errno;

use crate::name;

/// Names and values, in the order of the names.
pub(crate) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Those of what is open that count, or of a name in a directory that is.
pub(crate) fn of(fd: BorrowedFd<'_>, name: Option<&[u8]>) -> Result<Xattrs, Errno> {
    // Links and devices cannot be opened for it; the name is looked for in the directory that is open.
    let by_path = name.map(|name| {
        let begin = format!("/proc/self/fd/{}/", fd.as_raw_fd()).into_bytes();
        CString::new([begin, name.to_vec()].concat()).unwrap_or_default()
    });
    let list = |buffer: &mut [u8]| match &by_path {
        Some(path) => fs::llistxattr(path.as_c_str(), buffer),
        None => fs::flistxattr(fd, buffer),
    };
    let Some(names) = read_whole(list, 1024)? else { return Ok(Vec::new()) };
    let mut xattrs = Vec::new();
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty() && name::counts(name)) {
        let get = |buffer: &mut [u8]| match &by_path {
            Some(path) => fs::lgetxattr(path.as_c_str(), name, buffer),
            None => fs::fgetxattr(fd, name, buffer),
        };
        match read_whole(get, 256) {
            Ok(value) => xattrs.push((name.to_vec(), value.unwrap_or_default())),
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error),
        }
    }
    xattrs.sort_unstable();
    Ok(xattrs)
}

/// Reads with a larger buffer until it is large enough; `None` where there is nothing of the kind.
fn read_whole(
    mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    first: usize,
) -> Result<Option<Vec<u8>>, Errno> {
    let mut buffer = vec![0; first];
    loop {
        match read(&mut buffer) {
            Ok(len) => {
                buffer.truncate(len);
                return Ok(Some(buffer));
            }
            Err(Errno::RANGE) => buffer.resize(buffer.len() * 8, 0),
            Err(Errno::OPNOTSUPP) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}
