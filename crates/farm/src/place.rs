//! Where the volumes are: a folder of the submitter's host, found on another one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hayloft_layer::{MountLine, mount_over};

use crate::execution::sys::have_mounts_changed;

/// So many folders are remembered.
const FOLDERS_MAX: usize = 10_000;

/// The extended attribute in which a mount tells which volume it is of.
const VOLUME_XATTR: &str = "hayloft.volume";

/// A mount of a volume, or of a folder of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeMount {
    /// The volume's id.
    pub volume: String,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Which folder of the volume that is; `/` for all of it.
    pub inner: PathBuf,
}

/// A folder on a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The mount that it is on.
    pub mount: VolumeMount,
    /// The folder, as its host has it.
    pub directory: PathBuf,
}

impl Place {
    /// The place of a folder; None when it is not on a volume.
    ///
    /// # Errors
    /// When the table of mounts cannot be read, or the folder is not there.
    pub fn of(directory: &Path) -> io::Result<Option<Place>> {
        let device = std::fs::metadata(directory)?.dev();
        let entries = entries(&std::fs::read("/proc/self/mountinfo")?);
        let Some(entry) = mount_over(entries, directory, |entry| &entry.mounted.point) else {
            return Ok(None);
        };
        if !entry.is_ours || entry.mounted.device != device {
            return Ok(None);
        }
        Ok(entry.mounted.volume().map(|mount| Place { mount, directory: directory.to_owned() }))
    }

    /// Where the folder is in the volume.
    pub fn in_volume(&self) -> Option<PathBuf> {
        let below = self.directory.strip_prefix(&self.mount.point).ok()?;
        Some(self.mount.inner.join(below))
    }
}

/// Places of folders, found out once as long as mounts stay as they are.
#[derive(Debug)]
pub(crate) struct Places {
    /// Where the kernel tells of changes; without it nothing is remembered.
    mounts: Option<File>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    places: BTreeMap<PathBuf, Option<Place>>,
    /// How often all was forgotten.
    changes: u64,
}

impl Default for Places {
    fn default() -> Places {
        Places { mounts: File::open("/proc/self/mountinfo").ok(), known: Mutex::default() }
    }
}

impl Places {
    /// As [`Place::of`].
    pub(crate) async fn of(&self, directory: PathBuf) -> io::Result<Option<Place>> {
        let changes = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if self.mounts.as_ref().is_none_or(have_mounts_changed) || known.places.len() >= FOLDERS_MAX {
                known.places.clear();
                known.changes += 1;
            }
            if let Some(place) = known.places.get(&directory) {
                return Ok(place.clone());
            }
            known.changes
        };
        // The table of mounts and the volume are asked: that may take a while.
        let asked = tokio::task::spawn_blocking(move || Ok((Place::of(&directory)?, directory)));
        let (found, directory) = asked.await.unwrap_or_else(|error| Err(io::Error::other(error)))?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.changes == changes {
            known.places.insert(directory, found.clone());
        }
        Ok(found)
    }
}

/// Something that is mounted, as the table of mounts has it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mounted {
    /// The kernel's number of the mount.
    pub id: u64,
    /// Its device, as stat(2) has it.
    pub device: u64,
    /// Which folder of its file system that is.
    pub inner: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
}

impl Mounted {
    /// Which volume it is of, as the mount itself says; None when that fails. It waits while the volume's server is away.
    pub fn volume(&self) -> Option<VolumeMount> {
        let mut value = [0; 128];
        let length = rustix::fs::getxattr(&self.point, VOLUME_XATTR, &mut value[..]).ok()?;
        let volume = String::from_utf8(value[..length].to_vec()).ok()?;
        Some(VolumeMount { volume, point: self.point.clone(), inner: self.inner.clone() })
    }
}

/// The mounts of volumes that this host has; with `only`, those at these points. None of them is asked for anything.
///
/// # Errors
/// When the table of mounts cannot be read.
pub fn mounted(only: &[PathBuf]) -> io::Result<Vec<Mounted>> {
    let ours = entries(&std::fs::read("/proc/self/mountinfo")?).into_iter().filter(|entry| entry.is_ours);
    Ok(ours
        .map(|entry| entry.mounted)
        .filter(|mounted| only.is_empty() || only.contains(&mounted.point))
        .collect())
}

/// Where a task's folder is on this host, and what has to be shown elsewhere for its paths to be as they are at the
/// submitter's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The folder.
    pub directory: PathBuf,
    /// A folder of this host, and the path at which the submitter has it: when these differ.
    pub bind: Option<(PathBuf, PathBuf)>,
}

/// Finds a submitter's folder among the mounts of this host.
pub fn find(mounts: &[VolumeMount], theirs: &Place) -> Option<Found> {
    let wanted = theirs.in_volume()?;
    let ours = mounts.iter().filter(|mount| mount.volume == theirs.mount.volume);
    // The submitter's whole mount if we have it, its folder at least.
    let holds = |mount: &&VolumeMount, folder: &Path| folder.starts_with(&mount.inner);
    let mut all: Vec<&VolumeMount> = ours.filter(|mount| holds(mount, &wanted)).collect();
    all.sort_by_key(|mount| {
        let is_same = mount.point == theirs.mount.point && mount.inner == theirs.mount.inner;
        (!is_same, !holds(mount, &theirs.mount.inner), mount.inner.components().count())
    });
    let mount = all.first()?;
    let at_ours = |folder: &Path| Some(mount.point.join(folder.strip_prefix(&mount.inner).ok()?));
    let directory = at_ours(&wanted)?;
    let (from, to) = match at_ours(&theirs.mount.inner) {
        Some(from) => (from, theirs.mount.point.clone()),
        None => (directory.clone(), theirs.directory.clone()),
    };
    // Joining an empty path leaves a slash at the end, which compares as equal.
    Some(Found { directory, bind: (from != to).then_some((from, to)) })
}

#[derive(Debug)]
struct Entry {
    mounted: Mounted,
    is_ours: bool,
}

/// proc_pid_mountinfo(5).
fn entries(text: &[u8]) -> Vec<Entry> {
    let entry = |line| {
        let line = MountLine::read(line)?;
        let (major, minor) = line.device_number()?;
        let (device, is_ours) = (libc::makedev(major, minor), line.is_volume());
        let mounted = Mounted { id: line.id, device, inner: line.inner, point: line.point };
        Some(Entry { mounted, is_ours })
    };
    text.split(|byte| *byte == b'\n').filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(volume: &str, point: &str, inner: &str) -> VolumeMount {
        VolumeMount { volume: volume.into(), point: point.into(), inner: inner.into() }
    }

    fn found(mounts: &[VolumeMount], theirs: VolumeMount, directory: &str) -> Option<(String, String)> {
        let found = find(mounts, &Place { mount: theirs, directory: directory.into() })?;
        let bind = found.bind.map(|(from, to)| format!("{} at {}", from.display(), to.display()));
        Some((found.directory.display().to_string(), bind.unwrap_or_default()))
    }

    #[test]
    fn a_folder_is_found_where_this_host_has_the_volume() {
        let all = [mount("w", "/w", "/"), mount("v", "/a b", "/"), mount("v", "/part", "/x/y")];
        let some = |directory: &str, bind: &str| Some((directory.to_owned(), bind.to_owned()));
        assert_eq!(found(&all, mount("v", "/a b", "/"), "/a b/c"), some("/a b/c", ""));
        assert_eq!(found(&all, mount("v", "/m", "/"), "/m/x/y"), some("/a b/x/y", "/a b/ at /m"));
        assert_eq!(found(&all, mount("v", "/m", "/x"), "/m/q"), some("/a b/x/q", "/a b/x at /m"));
        assert_eq!(
            found(&all[2..], mount("v", "/m", "/"), "/m/x/y/z"),
            some("/part/z", "/part/z at /m/x/y/z")
        );
        assert_eq!(found(&all[2..], mount("v", "/m", "/"), "/m/x"), None);
        assert_eq!(found(&all, mount("u", "/m", "/"), "/m"), None);
    }

    #[test]
    fn lines_of_the_table_are_understood() {
        let text = br"36 35 0:52 /in\040side /mnt/a\040b rw,nosuid shared:1 - fuse.hayloft h:1/v rw
37 35 8:1 / / rw - ext4 /dev/sda1 rw
broken
";
        let entries = entries(text);
        assert_eq!(entries.len(), 2);
        let first = &entries[0].mounted;
        assert_eq!((&*first.inner, &*first.point), (Path::new("/in side"), Path::new("/mnt/a b")));
        assert_eq!((entries[0].is_ours, first.device, first.id), (true, libc::makedev(0, 52), 36));
        assert!(!entries[1].is_ours);
    }
}
