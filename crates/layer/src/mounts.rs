//! What is mounted in a folder.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, StatxFlags};

use crate::error::{Context, LayerError, Result};
use crate::folder::Folder;

/// Refuses a folder that something is mounted in: what moves the folder would take that along.
///
/// # Errors
/// [`LayerError::Target`] with what is mounted; when that cannot be told.
pub(crate) fn refuse_mounts(folder: &Folder, target: &Path) -> Result<()> {
    let own_path = folder.host_path().context("find", target)?;
    let own_mount = mount_of(folder).context("look at", target)?;
    let table = std::fs::read("/proc/self/mountinfo").context("read", Path::new("/proc/self/mountinfo"))?;
    let mut inside = table
        .split(|byte| *byte == b'\n')
        .filter_map(read_line)
        .filter(|(parent, point)| *parent == own_mount && point.starts_with(&own_path));
    match inside.next() {
        None => Ok(()),
        Some((_, point)) => {
            let why = format!("a file system is mounted on {} in it: unmount it", point.display());
            Err(LayerError::Target { path: target.to_owned(), why })
        }
    }
}

/// The number of the mount that a folder was opened by.
fn mount_of(folder: &Folder) -> io::Result<u64> {
    Ok(fs::statx(folder, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id)
}

/// The parent's number and the mount point in a line of proc_pid_mountinfo(5).
fn read_line(line: &[u8]) -> Option<(u64, PathBuf)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let parent = std::str::from_utf8(fields.nth(1)?).ok()?.parse().ok()?;
    Some((parent, OsString::from_vec(unescape_mountinfo(fields.nth(2)?)).into()))
}

/// A field of proc_pid_mountinfo(5) as it was: blanks, tabs, line ends and backslashes are there as `\` and three octal
/// digits.
pub fn unescape_mountinfo(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let digits = (*first == b'\\').then(|| after.get(..3)).flatten();
        let code = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                rest = &after[3..];
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let line = br"36 35 98:0 /mnt1 /mnt\0402/a\134b rw,noatime master:1 - ext3 /dev/root rw";
        assert_eq!(read_line(line), Some((35, PathBuf::from(r"/mnt 2/a\b"))));
        assert_eq!(read_line(b""), None);
        assert_eq!(unescape_mountinfo(br"\04"), br"\04");
    }
}
