//! What a task opens: the kernel tells whoever marks a mount of every file that is closed there (fanotify(7)), and a task's mounts are
//! its own. So nothing of what others do is heard, and nothing has to be asked of the mount, whose files the kernel mostly opens by itself.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use hayloft_layer::{MountLine, mount_over};

use crate::execution::sys;
use crate::protocol::Record;

/// File systems of this host. Others may not answer: of those only the task's volume is looked at.
const LOCAL: [&[u8]; 13] = [
    b"ext2",
    b"ext3",
    b"ext4",
    b"xfs",
    b"btrfs",
    b"bcachefs",
    b"f2fs",
    b"zfs",
    b"overlay",
    b"tmpfs",
    b"ramfs",
    b"squashfs",
    b"erofs",
];
/// What the kernel says of a file of which it knows no name.
const DELETED: &[u8] = b" (deleted)";
/// When so many bytes of events wait they are taken while the task runs; before that at its end, when files have their last names.
const WAITING: usize = 8192 * size_of::<libc::fanotify_event_metadata>();

#[derive(Debug, Clone, Copy, Default)]
struct Access {
    read: bool,
    written: bool,
    deleted: bool,
}

/// Hears what is opened in this process's mount namespace.
#[derive(Debug)]
pub(super) struct Recorder {
    events: OwnedFd,
    seen: BTreeMap<Vec<u8>, Access>,
    lost: u64,
}

impl Recorder {
    /// Of a task in this folder, on whose volume it is.
    ///
    /// # Errors
    /// Without the right to it, or when the table of mounts cannot be read.
    pub(super) fn begin(directory: &Path) -> io::Result<Recorder> {
        let events = sys::file_events()?;
        let table = std::fs::read("/proc/self/mountinfo")?;
        let lines = || table.split(|byte| *byte == b'\n').filter_map(MountLine::read);
        let own = mount_over(lines(), directory, |line| &line.point).map(|line| line.id);
        let mut marked = false;
        for line in lines().filter(|line| Some(line.id) == own || LOCAL.contains(&line.kind)) {
            let point = CString::new(line.point.as_os_str().as_bytes()).map_err(io::Error::other)?;
            match sys::hear_closed_files(&events, &point) {
                Ok(()) => marked |= Some(line.id) == own,
                Err(error) if Some(line.id) == own => return Err(error),
                // Below a folder that is covered, for one.
                Err(_) => {}
            }
        }
        match marked {
            true => Ok(Recorder { events, seen: BTreeMap::new(), lost: 0 }),
            false => Err(io::Error::other("the task's folder is on no mount")),
        }
    }

    /// Takes what waits, if that is much.
    pub(super) fn relieve(&mut self) {
        if sys::bytes_to_read(&self.events) >= WAITING {
            self.take();
        }
    }

    fn take(&mut self) {
        loop {
            match sys::closed_files(&self.events) {
                Ok(files) if files.is_empty() => return,
                Ok(files) => {
                    files.into_iter().for_each(|(file, written, read)| self.note(&file, written, read))
                }
                // It has gone, or this process may not open it.
                Err(_) => self.lost += 1,
            }
        }
    }

    fn note(&mut self, file: &OwnedFd, written: bool, read: bool) {
        let Ok(path) = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) else {
            self.lost += 1;
            return;
        };
        let mut path = path.into_os_string().into_vec();
        // The kernel says so as well of a name that it has forgotten, since another host has changed something there.
        let is_nameless = path.ends_with(DELETED);
        if is_nameless {
            path.truncate(path.len() - DELETED.len());
        }
        let deleted = is_nameless && rustix::fs::fstat(file).is_ok_and(|found| found.st_nlink == 0);
        let access = self.seen.entry(path).or_default();
        access.read |= read;
        access.written |= written;
        access.deleted = deleted;
    }

    /// All that the task has opened; the next one begins with nothing.
    pub(super) fn finish(&mut self) -> Record {
        self.take();
        let seen = std::mem::take(&mut self.seen);
        // Of what a task has made and removed nobody else has anything.
        let files = seen.into_iter().filter(|(_, access)| !(access.deleted && access.written));
        let files = files.map(|(path, access)| (path, access.read, access.written));
        Record::of(files, std::mem::take(&mut self.lost))
    }
}
