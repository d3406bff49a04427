//! Why mounting fails.

use std::io;
use std::path::PathBuf;

/// Why mounting failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The kernel module is missing.
    #[error(
        "/dev/fuse does not exist: load the kernel module (modprobe fuse), or give the container the device"
    )]
    NoDevice,
    /// Opening the device failed otherwise.
    #[error(
        "cannot open /dev/fuse: check its permissions (0666, as udev sets them, lets ordinary users mount)"
    )]
    Device(#[source] io::Error),
    /// The mount point does not exist.
    #[error("mount point {0} does not exist: create the directory first")]
    NotFound(PathBuf),
    /// The mount point is no directory.
    #[error("mount point {0} is not a directory: choose a directory")]
    NotDirectory(PathBuf),
    /// The mount point is a mount whose file system has died.
    #[error("mount point {0} is a mount whose daemon has died: unmount it first (umount -l {0})")]
    Dead(PathBuf),
    /// The mount point is in use.
    #[error("mount point {0} is busy: unmount what is there, or choose another directory")]
    Busy(PathBuf),
    /// The system does not let this user mount.
    #[error(
        "not permitted to mount on {0}: run as root, or use a mount point owned by this user and fusermount3"
    )]
    NotPermitted(PathBuf),
    /// An option holds a character that cannot be passed on.
    #[error("mount option {0:?} contains a NUL byte: remove it")]
    InvalidOption(String),
    /// The helper is missing.
    #[error("fusermount3 was not found: install the package fuse3, or mount as root")]
    NoFusermount,
    /// The helper refused.
    #[error("fusermount3 refused to mount on {point}: {message}")]
    Fusermount {
        /// The mount point.
        point: PathBuf,
        /// What it said.
        message: String,
    },
    /// `syncfs` was asked for by somebody who may not have it.
    #[error("the mount option syncfs needs root: mount as root, or without it")]
    SyncfsNotPermitted,
    /// There are no loop devices, which `syncfs` needs.
    #[error(
        "no loop devices, which the mount option syncfs needs: load the kernel module (modprobe loop), give the container /dev/loop-control and /dev/loop*, or mount without it"
    )]
    NoLoop,
    /// A loop device for `syncfs` could not be made.
    #[error(
        "cannot use {device} for the mount option syncfs: give the container the loop devices and the right to use them, or mount without it"
    )]
    Loop {
        /// The device.
        device: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The kernel cannot mount a FUSE file system from a block device.
    #[error("this kernel has no file system type fuseblk: mount without the option syncfs")]
    NoFuseblk,
    /// Anything else.
    #[error("cannot mount on {point}")]
    Io {
        /// The mount point.
        point: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}
