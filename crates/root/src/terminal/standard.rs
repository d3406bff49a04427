//! The caller's standard descriptors, as a command in a root may have them.
//!
//! `/proc/self/fd/N` leads a program to the very file that it has open, on the mount that it was opened on: root in the root
//! could open it once more, for writing. So a file that the caller has open for reading only is opened again through a
//! read-only view of its mount, or where that is not to be had comes through a pipe. A folder would lead to
//! everything on its mount, and is refused.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use rustix::fs::{CWD, FileType, OFlags, SeekFrom, StatVfsMountFlags};
use rustix::mount::OpenTreeFlags;
use rustix::process::Signal;

use crate::error::{Error, Result, Trying};
use crate::sys::{self, Child, Forked};

/// Copied at a time.
const CHUNK: usize = 64 << 10;
const NAMES: [&str; 3] = ["standard input", "standard output", "standard error"];

/// What the command gets instead of some of the caller's descriptors. Dropped, it ends the copying to pipes.
#[derive(Debug, Default)]
pub(crate) struct Standard {
    replaced: Vec<(i32, OwnedFd)>,
    feeders: Vec<Child>,
}

impl Standard {
    /// Looks at the descriptors 0, 1 and 2 of this process and prepares what a command is to have instead.
    ///
    /// # Errors
    /// When one of them would lead out of the root.
    pub(crate) fn prepare() -> Result<Standard> {
        let mut standard = Standard::default();
        let descriptors = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
        for (number, descriptor) in (0..).zip(descriptors) {
            let name = NAMES[number as usize];
            if !needs_view(descriptor, name)? {
                continue;
            }
            let replacement = match read_only(descriptor) {
                Ok(file) => file.into(),
                Err(_) => standard.feed(descriptor).trying(|| format!("pass on {name}"))?,
            };
            standard.replaced.push((number, replacement));
        }
        Ok(standard)
    }

    /// Called in the new process: from now on they are its descriptors.
    ///
    /// # Errors
    /// As dup2(2) says.
    pub(crate) fn take(&self) -> Result<()> {
        let mut all = self.replaced.iter();
        all.try_for_each(|(number, file)| sys::replace_standard(file, *number))
            .trying(|| "pass on the standard descriptors".to_owned())
    }

    /// In the caller, when the new process has them: nobody else keeps a pipe open then.
    pub(crate) fn let_go(&mut self) {
        self.replaced.clear();
    }

    /// A pipe through which a process of its own passes on what is in a file, from where it stands.
    fn feed(&mut self, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let start = rustix::fs::seek(file, SeekFrom::Current(0)).unwrap_or(0);
        let file = File::from(file.try_clone_to_owned()?);
        let (reader, writer) = io::pipe()?;
        match sys::fork(0)? {
            Forked::Child => {
                let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
                // It keeps nobody's pipe open but its own.
                let _ = File::open("/dev/null")
                    .and_then(|null| (0..=2).try_for_each(|number| sys::replace_standard(&null, number)));
                sys::close_all_but(&mut [file.as_raw_fd(), writer.as_raw_fd()]);
                let _ = pass_on(&file, start, writer);
                sys::exit_now(0);
            }
            Forked::Parent(child) => self.feeders.push(child),
        }
        Ok(reader.into())
    }
}

impl Drop for Standard {
    fn drop(&mut self) {
        for feeder in &self.feeders {
            let _ = sys::pidfd_kill(feeder.pidfd.as_fd(), libc::SIGKILL);
            let _ = sys::wait(Some(feeder.pid), true);
        }
    }
}

/// Whether a descriptor gives less than what it leads to: one that is open for reading only.
///
/// # Errors
/// When it leads to more than a file.
fn needs_view(descriptor: BorrowedFd<'_>, name: &str) -> Result<bool> {
    let what = || format!("look at {name}");
    let flags = rustix::fs::fcntl_getfl(descriptor).trying(what)?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(descriptor).trying(what)?.st_mode);
    if kind.is_dir() {
        return Err(Error::Usage(format!(
            "{name} is a folder, which would lead out of the root: redirect it, as in </dev/null, and name the folder with --bind"
        )));
    }
    if flags.contains(OFlags::PATH) {
        return Err(Error::Usage(format!(
            "{name} is open neither for reading nor for writing (O_PATH): redirect it, as in </dev/null"
        )));
    }
    // Of other kinds opening one again does something, or gives nothing: terminals, devices, pipes, sockets.
    let is_kind = kind.is_file() || kind.is_block_device();
    Ok(is_kind && flags & OFlags::ACCMODE == OFlags::RDONLY && !is_shut(descriptor, kind))
}

/// Whether it can be read and no more on the mount that it was opened on.
fn is_shut(descriptor: BorrowedFd<'_>, kind: FileType) -> bool {
    // A device is written to all the same.
    kind.is_file()
        && rustix::fs::fstatvfs(descriptor).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// The same file at the same place, on a mount of its own where nothing can be changed and no device opens.
fn read_only(descriptor: BorrowedFd<'_>) -> io::Result<File> {
    let path =
        |descriptor: BorrowedFd<'_>| PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let view = rustix::mount::open_tree(CWD, path(descriptor), flags)?;
    let set = |attributes| sys::set_mount_attributes(view.as_fd(), attributes, 0, false);
    set(libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID)?;
    let kept = rustix::fs::fcntl_getfl(descriptor)? & (OFlags::NONBLOCK | OFlags::DIRECT);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(kept.bits() as i32 | libc::O_NOCTTY)
        .open(path(view.as_fd()))?;
    // Only now, or a block device would not open here either.
    set(libc::MOUNT_ATTR_NODEV)?;
    let at = rustix::fs::seek(descriptor, SeekFrom::Current(0))?;
    rustix::fs::seek(&file, SeekFrom::Start(at))?;
    Ok(file)
}

/// Copies a file to a pipe, until either ends. The descriptor's own place in the file stays.
fn pass_on(file: &File, mut at: u64, mut pipe: PipeWriter) -> io::Result<()> {
    let mut bytes = vec![0; CHUNK];
    loop {
        let read = match file.read_at(&mut bytes, at) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        pipe.write_all(&bytes[..read])?;
        at += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_protected_and_a_folder_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let written = File::create(&path).unwrap();
        assert!(!needs_view(written.as_fd(), NAMES[1]).unwrap());
        assert!(needs_view(File::open(&path).unwrap().as_fd(), NAMES[0]).unwrap());
        assert!(!needs_view(File::open("/dev/null").unwrap().as_fd(), NAMES[0]).unwrap());
        let (reader, _writer) = io::pipe().unwrap();
        assert!(!needs_view(reader.as_fd(), NAMES[0]).unwrap());
        for (path, flags) in [(dir.path(), 0), (&path, libc::O_PATH), (dir.path(), libc::O_PATH)] {
            let opened = OpenOptions::new().read(true).custom_flags(flags).open(path).unwrap();
            assert!(matches!(needs_view(opened.as_fd(), NAMES[0]), Err(Error::Usage(_))), "{flags}");
        }
    }

    #[test]
    fn a_view_is_at_the_same_place_and_cannot_be_changed() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "0123456789").unwrap();
        let file = File::open(&path).unwrap();
        rustix::fs::seek(&file, SeekFrom::Start(4)).unwrap();
        let view = read_only(file.as_fd()).unwrap();
        assert_eq!(io::read_to_string(&view).unwrap(), "456789");
        let again = format!("/proc/self/fd/{}", view.as_raw_fd());
        let error = OpenOptions::new().write(true).open(again).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        assert!(!needs_view(view.as_fd(), NAMES[0]).unwrap());
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Current(0)).unwrap(), 4);
    }
}
