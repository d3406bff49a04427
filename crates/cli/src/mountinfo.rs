//! What is mounted where: `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hayloft_layer::MountLine;
use hayloft_mount::control::Target;

use crate::exit::{Exit, failure};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountEntry {
    /// The kernel's number of it.
    id: u64,
    /// Where.
    pub mount_point: PathBuf,
    /// Type, `ext4` or `fuse.hayloft`.
    pub kind: String,
    /// What, for ours `HOST:PORT/VOLUME`, or a loop device that was made for it.
    pub source: String,
    /// Its device number, `MAJOR:MINOR`.
    device: String,
    /// The same as stat(2) gives it; 0 if it is no number.
    number: u64,
    /// It is a Hayloft mount, and one by way of a loop device.
    is_ours: (bool, bool),
    /// The top folder is there, and can be changed: neither read-only nor a bind of a folder inside.
    whole: bool,
}

impl MountEntry {
    /// Whether it is a Hayloft mount.
    pub(crate) fn is_ours(&self) -> bool {
        self.is_ours.0
    }

    /// `HOST:PORT/VOLUME` of a Hayloft mount; a loop device's file in memory is named after it (losetup(8)).
    pub(crate) fn volume(&self) -> String {
        let file = std::fs::read_to_string(format!("/sys/dev/block/{}/loop/backing_file", self.device));
        let file = file.ok().filter(|_| self.is_ours.1);
        let name = file.as_deref().and_then(|file| file.trim_end().strip_prefix("/memfd:"));
        name.map_or(&*self.source, |name| name.strip_suffix(" (deleted)").unwrap_or(name)).to_owned()
    }

    /// Whose client is to be asked about it.
    pub(crate) fn target(&self) -> Target {
        Target { path: self.mount_point.clone(), device: self.number }
    }

    /// Where else its file system is mounted, as far as this process sees.
    ///
    /// # Errors
    /// When /proc is not there.
    pub(crate) fn others(&self) -> io::Result<Vec<PathBuf>> {
        let others = all()?.into_iter().filter(|entry| entry.device == self.device && entry.id != self.id);
        Ok(others.map(|entry| entry.mount_point).collect())
    }

    /// Whether all of it can be changed at its mount point: it is the whole of it, not read-only, its process lives, and
    /// nothing is mounted above it.
    pub(crate) fn is_usable(&self) -> bool {
        let here = |meta: std::fs::Metadata| {
            let (major, minor) = (libc::major(meta.dev()), libc::minor(meta.dev()));
            format!("{major}:{minor}") == self.device
        };
        self.whole && std::fs::metadata(&self.mount_point).is_ok_and(here)
    }
}

/// All mounts that this process sees, in the order of mounting.
///
/// # Errors
/// When /proc is not there.
pub(crate) fn all() -> io::Result<Vec<MountEntry>> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// The Hayloft mount on `dir`.
///
/// # Errors
/// When there is none on exactly this folder.
pub(crate) fn ours(dir: &Path) -> anyhow::Result<MountEntry> {
    let mounts = all()?;
    // The last one is on top. To find out where a path leads may have to wait for a file system that it leads through.
    let on = |dir: &Path| mounts.iter().rev().find(|entry| entry.mount_point == dir);
    let dir = std::path::absolute(dir)?;
    let (dir, entry) = match on(&dir) {
        Some(entry) => (dir, Some(entry)),
        None => {
            let dir = absolute(&dir)?;
            let entry = on(&dir);
            (dir, entry)
        }
    };
    match entry.cloned() {
        Some(entry) if entry.is_ours() => Ok(entry),
        Some(entry) => Err(failure(
            Exit::Failed,
            format!("{} is not a Hayloft mount (it is a mount of type {})", dir.display(), entry.kind),
        )),
        None => Err(failure(Exit::Failed, format!("{} is not a Hayloft mount", dir.display()))),
    }
}

/// The path as the kernel's table has it: absolute, without links. The last component itself is not
/// looked at, since a mount whose process is gone answers nothing.
pub(crate) fn absolute(dir: &Path) -> io::Result<PathBuf> {
    let lexical = std::path::absolute(dir)?;
    if let (Some(parent), Some(name)) = (lexical.parent(), lexical.file_name()) {
        let path = parent.canonicalize()?.join(name);
        return match path.read_link() {
            Ok(_) => path.canonicalize(),
            Err(_) => Ok(path),
        };
    }
    lexical.canonicalize()
}

fn parse(line: &[u8]) -> Option<MountEntry> {
    let line = MountLine::read(line)?;
    let read_only = |options: &[u8]| options.split(|byte| *byte == b',').any(|option| option == b"ro");
    let is_writable = !read_only(line.options) && !read_only(line.file_system_options);
    Some(MountEntry {
        id: line.id,
        kind: String::from_utf8_lossy(line.kind).into_owned(),
        source: String::from_utf8_lossy(&line.source).into_owned(),
        device: line.device.to_owned(),
        number: line.device_number().map_or(0, |(major, minor)| libc::makedev(major, minor)),
        is_ours: (line.is_volume(), line.is_volume_on_loop()),
        whole: line.inner == Path::new("/") && is_writable,
        mount_point: line.point,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let line =
            b"36 35 0:52 / /mnt/with\\040space rw,nosuid shared:5 master:1 - fuse.hayloft farm1:7440/v rw";
        let entry = parse(line).unwrap();
        assert_eq!(entry.mount_point, Path::new("/mnt/with space"));
        assert_eq!(entry.source, "farm1:7440/v");
        assert!(entry.is_ours());
        assert_eq!((entry.id, entry.target().device), (36, libc::makedev(0, 52)));
        assert_eq!((entry.device.as_str(), entry.volume()), ("0:52", "farm1:7440/v".to_owned()));
        assert!(entry.whole);
        for part in [
            "36 35 0:52 /sub /mnt rw - fuse.hayloft farm1:7440/v rw",
            "36 35 0:52 / /mnt ro,nosuid - fuse.hayloft farm1:7440/v rw",
            "36 35 0:52 / /mnt rw - fuse.hayloft farm1:7440/v ro,user_id=0",
        ] {
            assert!(!parse(part.as_bytes()).unwrap().whole, "{part}");
        }
        let line = b"36 35 7:900000 / /mnt rw - fuseblk.hayloft /dev/loop900000 rw";
        let entry = parse(line).unwrap();
        assert!(entry.is_ours() && entry.volume() == "/dev/loop900000");
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn this_machine_has_a_root() {
        assert!(all().unwrap().iter().any(|entry| entry.mount_point == Path::new("/")));
    }
}
