//! Loop devices: a file as a block device, gone with its last user.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result, Trying};
use crate::sys;

/// Tries for a device that nobody else takes between the question and the answer.
const TRIES: usize = 64;

/// A file's device: it stays as long as this or another user of it.
pub(crate) struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
    /// Keeps it there.
    _open: File,
}

/// Sets a file behind a free loop device.
///
/// # Errors
/// When this machine has no loop devices, or this user may not use them.
pub(crate) fn attach(file: &File, flags: u32) -> Result<LoopDevice> {
    let writable = flags & sys::LO_FLAGS_READ_ONLY == 0;
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control").map_err(|error| {
        match error.kind() {
            io::ErrorKind::NotFound => Error::Missing(
                "there are no loop devices here: load the module loop (modprobe loop)".to_owned(),
            ),
            _ => Error::system("use loop devices: only root may (/dev/loop-control)", error),
        }
    })?;
    let mut last = io::Error::from_raw_os_error(libc::EBUSY);
    for _ in 0..TRIES {
        let number = sys::free_loop_device(control.as_fd()).trying(|| "get a loop device".to_owned())?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let attached = OpenOptions::new().read(true).write(writable).open(&path).and_then(|device| {
            sys::configure_loop(device.as_fd(), file.as_fd(), flags | sys::LO_FLAGS_AUTOCLEAR)?;
            Ok(device)
        });
        match attached {
            Ok(open) => return Ok(LoopDevice { path, _open: open }),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = error,
            Err(error) => return Err(error).trying(|| format!("set up {}", path.display())),
        }
    }
    Err(last).trying(|| "get a loop device: others took each".to_owned())
}

/// The loop devices that a file is behind.
pub(crate) fn devices_of(file: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| name.starts_with("loop"))
        .filter(|name| {
            fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"))
                .is_ok_and(|backing| Path::new(backing.trim_end()) == file)
        })
        .map(|name| Path::new("/dev").join(name))
        .collect()
}
