//! What is mounted in a folder.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, StatxFlags};

use crate::error::{Context, LayerError, Result};
use crate::files::folder::Folder;

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
        .filter_map(MountLine::read)
        .filter(|line| line.parent == own_mount && line.point.starts_with(&own_path));
    match inside.next() {
        None => Ok(()),
        Some(line) => {
            let why = format!("a file system is mounted on {} in it: unmount it", line.point.display());
            Err(LayerError::Target { path: target.to_owned(), why })
        }
    }
}

/// The number of the mount that a folder was opened by.
fn mount_of(folder: &Folder) -> io::Result<u64> {
    Ok(fs::statx(folder, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id)
}

/// Of mounts in the order of the table the one that a path is on: that with the longest point, and of the same the last.
pub fn mount_over<T>(
    mounts: impl IntoIterator<Item = T>,
    path: &Path,
    point: impl Fn(&T) -> &Path,
) -> Option<T> {
    let over = mounts.into_iter().filter(|mount| path.starts_with(point(mount)));
    over.max_by_key(|mount| point(mount).components().count())
}

/// A mount, as a line of proc_pid_mountinfo(5) tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountLine<'a> {
    /// The kernel's number of it.
    pub id: u64,
    /// The number of the mount that it is in.
    pub parent: u64,
    /// Its device number, `MAJOR:MINOR`.
    pub device: &'a str,
    /// Which folder of its file system is seen.
    pub inner: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Its own options, with commas between.
    pub options: &'a [u8],
    /// The file system's type.
    pub kind: &'a [u8],
    /// What is mounted.
    pub source: Vec<u8>,
    /// The options of its file system.
    pub file_system_options: &'a [u8],
}

impl<'a> MountLine<'a> {
    /// Reads a line; none for what is no such line.
    pub fn read(line: &'a [u8]) -> Option<MountLine<'a>> {
        let text = |field: &'a [u8]| std::str::from_utf8(field).ok();
        let path = |field: &[u8]| PathBuf::from(OsString::from_vec(unescape_mountinfo(field)));
        let mut fields = line.split(|byte| *byte == b' ');
        let id = text(fields.next()?)?.parse().ok()?;
        let parent = text(fields.next()?)?.parse().ok()?;
        let device = text(fields.next()?)?;
        let (inner, point, options) = (path(fields.next()?), path(fields.next()?), fields.next()?);
        let mut behind = fields.skip_while(|field| *field != b"-").skip(1);
        let (kind, source) = (behind.next()?, unescape_mountinfo(behind.next()?));
        let file_system_options = behind.next()?;
        Some(MountLine { id, parent, device, inner, point, options, kind, source, file_system_options })
    }

    /// Whether a volume of Hayloft is mounted there; with the option `syncfs` that is by way of a loop device.
    pub fn is_volume(&self) -> bool {
        self.kind == b"fuse.hayloft" || self.is_volume_on_loop()
    }

    /// Whether a volume is mounted there by way of a loop device.
    pub fn is_volume_on_loop(&self) -> bool {
        self.kind == b"fuseblk.hayloft"
    }

    /// The device number as stat(2) gives it; none if it is no number.
    pub fn device_number(&self) -> Option<(u32, u32)> {
        let (major, minor) = self.device.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }
}

/// A field of proc_pid_mountinfo(5) as it was: blanks, tabs, line ends and backslashes are there as `\` and three octal
/// digits.
fn unescape_mountinfo(field: &[u8]) -> Vec<u8> {
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
        let read = MountLine::read(line).unwrap();
        assert_eq!((read.parent, read.point), (35, PathBuf::from(r"/mnt 2/a\b")));
        assert_eq!(MountLine::read(b""), None);
        assert_eq!(unescape_mountinfo(br"\04"), br"\04");
    }
}
