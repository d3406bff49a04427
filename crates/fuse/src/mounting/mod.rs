//! Mounting and unmounting: by mount(2), by fusermount3 for ordinary users, on a loop device for syncfs(2).
#![allow(unsafe_code)]

pub(crate) mod abort;
mod error;
mod fusermount;
mod loop_device;

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::sys;
pub use error::MountError;
use loop_device::LoopDevice;

/// How to mount.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// Shown as the source in the table of mounts.
    pub fsname: String,
    /// The type shown is `fuse.` and this.
    pub subtype: String,
    /// No writing.
    pub read_only: bool,
    /// Other users have access too. Without it only the user who mounts has, not even root.
    pub allow_other: bool,
    /// The kernel checks permissions by mode, owner and group.
    pub default_permissions: bool,
    /// setuid and setgid bits work (root only).
    pub suid: bool,
    /// Device files work (root only).
    pub dev: bool,
    /// Programs may be run.
    pub exec: bool,
    /// Access times are kept.
    pub atime: bool,
    /// syncfs(2) and sync(1) come as requests of their own, which needs root and Linux 6.18. The mount is then of the
    /// type `fuseblk.`, its source is a loop device made for it, named after `fsname`, and its device number is that
    /// one's. [`Control::hears_syncfs`](crate::Control::hears_syncfs) tells whether the kernel does it.
    pub syncfs: bool,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions {
            fsname: "hayloft".into(),
            subtype: "hayloft".into(),
            read_only: false,
            allow_other: false,
            default_permissions: true,
            suid: false,
            dev: false,
            exec: true,
            atime: false,
            syncfs: false,
        }
    }
}

/// A mount which waits for its file system: the connection to the kernel and where it is mounted. When
/// it is dropped, the mount point answers every call with ENOTCONN until it is unmounted.
#[derive(Debug)]
pub struct Channel {
    pub(crate) fd: OwnedFd,
    pub(crate) point: PathBuf,
}

/// Mounts on a directory: as root by mount(2), else by the helper fusermount3.
pub fn mount(point: &Path, options: &MountOptions) -> Result<Channel, MountError> {
    let metadata = std::fs::metadata(point).map_err(|error| point_error(point, error))?;
    if !metadata.is_dir() {
        return Err(MountError::NotDirectory(point.into()));
    }
    let point = point.canonicalize().map_err(|error| point_error(point, error))?;
    let fd = if sys::effective_uid() == 0 {
        mount_as_root(&point, metadata.mode(), options)?
    } else if options.syncfs {
        return Err(MountError::SyncfsNotPermitted);
    } else {
        fusermount::mount(&point, &fusermount_options(options))?
    };
    Ok(Channel { fd, point })
}

fn point_error(point: &Path, error: io::Error) -> MountError {
    let point = point.to_path_buf();
    match error.raw_os_error() {
        Some(libc::ENOENT) => MountError::NotFound(point),
        Some(libc::ENOTDIR) => MountError::NotDirectory(point),
        Some(libc::ENOTCONN | libc::ECONNABORTED) => MountError::Dead(point),
        Some(libc::EBUSY) => MountError::Busy(point),
        Some(libc::EPERM | libc::EACCES) => MountError::NotPermitted(point),
        _ => MountError::Io { point, source: error },
    }
}

fn mount_as_root(point: &Path, mode: u32, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device = File::options().read(true).write(true).open("/dev/fuse").map_err(|error| {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => MountError::NoDevice,
            _ => MountError::Device(error),
        }
    })?;
    // The mount keeps it from then on.
    let block_device = options.syncfs.then(|| LoopDevice::new(&options.fsname)).transpose()?;
    let source =
        block_device.as_ref().map_or(OsStr::new(&options.fsname), |device| device.path().as_os_str());
    let source = c_string(source)?;
    let kind = if options.syncfs { "fuseblk" } else { "fuse" };
    let kind = c_string(OsStr::new(&format!("{kind}.{}", options.subtype)))?;
    let target = c_string(point.as_os_str())?;
    let data = c_string(OsStr::new(&kernel_options(device.as_raw_fd(), mode, options)))?;
    let flags = mount_flags(options);
    // SAFETY: the four strings end in NUL and live until the call returns.
    let result =
        unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast()) };
    if result < 0 {
        let error = io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::ENODEV) if options.syncfs => MountError::NoFuseblk,
            Some(libc::ENODEV) => MountError::NoDevice,
            _ => point_error(point, error),
        });
    }
    Ok(device.into())
}

fn kernel_options(fd: i32, mode: u32, options: &MountOptions) -> String {
    let mut data = format!(
        "fd={fd},rootmode={:o},user_id={},group_id={}",
        mode & libc::S_IFMT,
        sys::effective_uid(),
        sys::effective_gid()
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    if options.default_permissions {
        data.push_str(",default_permissions");
    }
    if options.syncfs {
        data.push_str(&format!(",blksize={}", loop_device::BLOCK_SIZE));
    }
    data
}

fn mount_flags(options: &MountOptions) -> libc::c_ulong {
    let flags = [
        (options.read_only, libc::MS_RDONLY),
        (!options.suid, libc::MS_NOSUID),
        (!options.dev, libc::MS_NODEV),
        (!options.exec, libc::MS_NOEXEC),
        (!options.atime, libc::MS_NOATIME),
    ];
    flags.iter().filter(|flag| flag.0).fold(0, |all, flag| all | flag.1)
}

/// The options for fusermount3, in which commas and backslashes of a value are escaped.
fn fusermount_options(options: &MountOptions) -> OsString {
    let escape = |value: &str| value.replace('\\', "\\\\").replace(',', "\\,");
    let mut words = vec![
        format!("fsname={}", escape(&options.fsname)),
        format!("subtype={}", escape(&options.subtype)),
        if options.read_only { "ro" } else { "rw" }.into(),
    ];
    let flags = [
        (options.allow_other, "allow_other"),
        (options.default_permissions, "default_permissions"),
        (options.suid, "suid"),
        (options.dev, "dev"),
        (!options.exec, "noexec"),
        (!options.atime, "noatime"),
    ];
    words.extend(flags.iter().filter(|flag| flag.0).map(|flag| flag.1.into()));
    words.join(",").into()
}

fn c_string(text: &OsStr) -> Result<CString, MountError> {
    CString::new(text.as_bytes()).map_err(|_| MountError::InvalidOption(text.to_string_lossy().into()))
}

/// Unmounts. `lazy` takes the mount out of the tree at once and ends it when its last user is gone;
/// otherwise EBUSY is the answer as long as there are users.
pub fn unmount(point: &Path, lazy: bool) -> io::Result<()> {
    let target = CString::new(point.as_os_str().as_bytes())?;
    let flags = if lazy { libc::MNT_DETACH } else { 0 } | libc::UMOUNT_NOFOLLOW;
    // SAFETY: the string ends in NUL and lives until the call returns.
    if unsafe { libc::umount2(target.as_ptr(), flags) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EPERM) && sys::effective_uid() != 0 {
        return fusermount::unmount(point, lazy);
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_spelled_as_the_kernel_and_the_helper_want_them() {
        let mut options = MountOptions { allow_other: true, ..MountOptions::default() };
        let data = kernel_options(7, 0o040_755, &options);
        assert!(data.starts_with("fd=7,rootmode=40000,user_id="));
        assert!(data.ends_with(",allow_other,default_permissions"));
        let with_syncfs = MountOptions { syncfs: true, ..options.clone() };
        assert!(kernel_options(7, 0o040_755, &with_syncfs).ends_with(",default_permissions,blksize=4096"));
        let safe = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOATIME;
        assert_eq!(mount_flags(&options), safe);
        options.read_only = true;
        options.fsname = "a,b\\c".into();
        assert_eq!(mount_flags(&options), safe | libc::MS_RDONLY);
        assert_eq!(
            fusermount_options(&options),
            "fsname=a\\,b\\\\c,subtype=hayloft,ro,allow_other,default_permissions,noatime"
        );
    }

    #[test]
    fn errors_say_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let missing = mount(&folder.path().join("none"), &MountOptions::default()).unwrap_err();
        assert!(matches!(&missing, MountError::NotFound(_)));
        assert!(missing.to_string().ends_with("does not exist: create the directory first"));
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        assert!(matches!(mount(&file, &MountOptions::default()), Err(MountError::NotDirectory(_))));
        assert!(matches!(mount(&file.join("x"), &MountOptions::default()), Err(MountError::NotDirectory(_))));
    }
}
