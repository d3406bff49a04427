//! A loop device for one mount.
//!
//! Linux hands syncfs(2) on to a FUSE file system of the type `fuseblk` only (`fc->sync_fs` in
//! `fs/fuse/inode.c`, from Linux 6.18), and such a file system has to be mounted from a block device. This one holds
//! nothing: it is there to be mounted from, and the kernel takes it away with the mount (loop(4), `LO_FLAGS_AUTOCLEAR`).
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};

use crate::mounting::error::MountError;

const LOOP_CONTROL: &str = "/dev/loop-control";

// `include/uapi/linux/loop.h`.
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// Size of the device, and of its one block.
pub(crate) const BLOCK_SIZE: u32 = 4096;
/// Longest name of a file made by memfd_create(2).
const NAME_MAX: usize = 249;
/// How often another program may be faster in taking the device that was free.
const ATTEMPTS: usize = 100;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// A loop device over an unnamed file in memory. Gone when neither this nor a mount uses it any more, also when the
/// process is killed.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    /// Keeps it until the mount does.
    _open: File,
    path: PathBuf,
}

impl LoopDevice {
    /// Makes one; `name` is what losetup(8) shows as its file.
    pub(crate) fn new(name: &str) -> Result<LoopDevice, MountError> {
        let control = open(Path::new(LOOP_CONTROL)).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => MountError::NoLoop,
            _ => MountError::Loop { device: LOOP_CONTROL.into(), source: error },
        })?;
        let content =
            memory_file(name).map_err(|source| MountError::Loop { device: LOOP_CONTROL.into(), source })?;
        let mut attempts = ATTEMPTS;
        loop {
            // SAFETY: this ioctl takes no pointers.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                let source = io::Error::last_os_error();
                return Err(MountError::Loop { device: LOOP_CONTROL.into(), source });
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            attempts -= 1;
            match open(&path).and_then(|device| configure(&device, &content).map(|()| device)) {
                Ok(device) => return Ok(LoopDevice { _open: device, path }),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && attempts > 0 => {}
                Err(source) => return Err(MountError::Loop { device: path, source }),
            }
        }
    }

    /// `/dev/loopN`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// A file without a place in any folder, a block long. It takes no memory as long as nobody writes to it.
fn memory_file(name: &str) -> io::Result<File> {
    let name = CString::new(&name.as_bytes()[..name.len().min(NAME_MAX)])?;
    // SAFETY: the name ends in NUL and lives until the call returns.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and nobody else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(BLOCK_SIZE.into())?;
    Ok(file)
}

/// Puts the file behind the device; EBUSY when the device has one already.
fn configure(device: &File, content: &File) -> io::Result<()> {
    // SAFETY: plain numbers, for which all zeroes are valid.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = content.as_raw_fd() as u32;
    config.block_size = BLOCK_SIZE;
    config.info.flags = LO_FLAGS_AUTOCLEAR;
    // SAFETY: the ioctl reads a `struct loop_config`, which lives until the call returns.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_as_long_as_the_kernels() {
        assert_eq!((size_of::<LoopInfo>(), size_of::<LoopConfig>()), (232, 304));
    }

    #[test]
    fn a_device_goes_with_its_last_user() {
        let name = format!("test-of-loop-device-{}", std::process::id());
        let device = match LoopDevice::new(&name) {
            Ok(device) => device,
            Err(error) => return println!("skipped: {error}"),
        };
        let number = device.path().file_name().unwrap().to_str().unwrap().to_owned();
        let shown = || std::fs::read_to_string(format!("/sys/block/{number}/loop/backing_file"));
        assert_eq!(shown().unwrap(), format!("/memfd:{name} (deleted)\n"));
        assert_eq!(std::fs::read(device.path()).unwrap(), vec![0; BLOCK_SIZE as usize]);
        drop(device);
        // Another program may have opened it to see what is in it.
        for _ in 0..500 {
            if !shown().is_ok_and(|file| file.contains(&name)) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("{number} is still there");
    }
}
