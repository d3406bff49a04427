//! Mounts as descriptors (fsopen(2), open_tree(2), move_mount(2)): made first, then put in their place.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};

use crate::sys;

/// A new instance of a file system that is made from options.
pub(crate) fn new_file_system(
    kind: &str,
    options: &[(&str, &str)],
    attributes: u64,
) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        match value.is_empty() {
            true => rustix::mount::fsconfig_set_flag(context.as_fd(), *key)?,
            false => rustix::mount::fsconfig_set_string(context.as_fd(), *key, *value)?,
        }
    }
    rustix::mount::fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::from_bits_retain(attributes as _);
    rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Mounts on a folder or file.
pub(crate) fn attach(mount: &OwnedFd, folder: impl AsFd) -> rustix::io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(mount.as_fd(), "", folder.as_fd(), "", flags)
}

/// Names what is at a path, without opening it for anything.
pub(crate) fn open_path(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

/// What a view is: another mount of the same, with everything that is mounted below it.
const VIEW: OpenTreeFlags =
    OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC).union(OpenTreeFlags::AT_RECURSIVE);

/// A second view of what is at a path, with everything that is mounted below it.
pub(crate) fn view(path: &Path, attributes: u64, recursive: bool) -> io::Result<OwnedFd> {
    let mount = rustix::mount::open_tree(CWD, path, VIEW)?;
    sys::set_mount_attributes(mount.as_fd(), attributes, 0, recursive)?;
    Ok(mount)
}

/// The same of what a descriptor names.
pub(crate) fn view_of(place: impl AsFd, attributes: u64) -> io::Result<OwnedFd> {
    let mount = rustix::mount::open_tree(place, "", VIEW | OpenTreeFlags::AT_EMPTY_PATH)?;
    sys::set_mount_attributes(mount.as_fd(), attributes, 0, false)?;
    Ok(mount)
}

/// The same of what is at a path on a mount without devices, with its devices.
pub(crate) fn view_with_devices(path: &Path, attributes: u64) -> io::Result<OwnedFd> {
    let mount = rustix::mount::open_tree(CWD, path, VIEW)?;
    sys::set_mount_attributes(mount.as_fd(), attributes, libc::MOUNT_ATTR_NODEV, false)?;
    Ok(mount)
}
