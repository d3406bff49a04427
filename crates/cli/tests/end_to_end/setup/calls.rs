//! System calls that the standard library lacks, for the tests.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whether this is Linux of that version, or a newer one.
pub(crate) fn is_linux_since(version: (u32, u32)) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (parts.next().unwrap(), parts.next().unwrap()) >= version
}

pub(crate) fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn check(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The errno of a failed call.
pub(crate) fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("the call should fail").raw_os_error().expect("an error of the system")
}

pub(crate) fn open(path: &Path, flags: i32, mode: u32) -> io::Result<File> {
    // SAFETY: the string lives until the call returns; the new descriptor is ours.
    unsafe {
        let fd = check(libc::open(c_path(path).as_ptr(), flags | libc::O_CLOEXEC, mode).into())?;
        Ok(File::from_raw_fd(fd as i32))
    }
}

pub(crate) fn fallocate(file: &File, mode: i32, offset: i64, len: i64) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) }.into()).map(drop)
}

pub(crate) fn syncfs(file: &File) -> io::Result<()> {
    // SAFETY: a plain number.
    check(unsafe { libc::syncfs(file.as_raw_fd()) }.into()).map(drop)
}

pub(crate) fn seek(file: &File, offset: i64, whence: i32) -> io::Result<i64> {
    // SAFETY: plain numbers.
    check(unsafe { libc::lseek(file.as_raw_fd(), offset, whence) })
}

pub(crate) fn rename(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    let (from, to) = (c_path(from), c_path(to));
    // SAFETY: both strings live until the call returns.
    let result = unsafe {
        libc::syscall(libc::SYS_renameat2, libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags)
    };
    check(result).map(drop)
}

/// The places in a directory from which a listing goes on behind each of its names (`d_off`).
pub(crate) fn places(dir: &Path) -> Vec<i64> {
    // SAFETY: the path ends with a zero; the stream is closed below; each entry is valid until the next is read.
    unsafe {
        let stream = libc::opendir(c_path(dir).as_ptr());
        assert!(!stream.is_null(), "{}", io::Error::last_os_error());
        let mut places = Vec::new();
        while let Some(entry) = libc::readdir(stream).as_ref() {
            places.push(entry.d_off);
        }
        libc::closedir(stream);
        places
    }
}

/// The names in a directory, read so many bytes at a time.
pub(crate) fn list(dir: &File, bytes: usize) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    loop {
        let more = list_once(dir, bytes);
        if more.is_empty() {
            return names;
        }
        names.extend(more);
    }
}

/// The names that one call brings of at most so many bytes.
pub(crate) fn list_once(dir: &File, bytes: usize) -> Vec<Vec<u8>> {
    // Where the name begins in a `linux_dirent64`, and where the entry's length stands.
    const NAME: usize = 19;
    const LENGTH: usize = 16;
    let mut buffer = vec![0u8; bytes];
    // SAFETY: the buffer is as long as is said.
    let read =
        unsafe { libc::syscall(libc::SYS_getdents64, dir.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) };
    let mut entries = &buffer[..check(read).unwrap() as usize];
    let mut names = Vec::new();
    while !entries.is_empty() {
        let length = usize::from(u16::from_ne_bytes([entries[LENGTH], entries[LENGTH + 1]]));
        let name = &entries[NAME..length];
        let end = name.iter().position(|byte| *byte == 0).unwrap();
        names.push(name[..end].to_vec());
        entries = &entries[length..];
    }
    names
}

pub(crate) fn set_xattr(path: &Path, name: &str, value: &[u8], flags: i32) -> io::Result<()> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    // SAFETY: all pointers are valid for the lengths given.
    let result =
        unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags) };
    check(result.into()).map(drop)
}

pub(crate) fn get_xattr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    let mut value = vec![0; 65_536];
    // SAFETY: all pointers are valid for the lengths given.
    let result =
        unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    value.truncate(check(result as i64)? as usize);
    Ok(value)
}

pub(crate) fn remove_xattr(path: &Path, name: &str) -> io::Result<()> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    // SAFETY: both strings live until the call returns.
    check(unsafe { libc::lremovexattr(path.as_ptr(), name.as_ptr()) }.into()).map(drop)
}

pub(crate) fn list_xattr(path: &Path) -> io::Result<Vec<String>> {
    let path = c_path(path);
    let mut names = vec![0u8; 65_536];
    // SAFETY: all pointers are valid for the lengths given.
    let result = unsafe { libc::llistxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    names.truncate(check(result as i64)? as usize);
    let mut names: Vec<String> = names
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect();
    names.sort();
    Ok(names)
}

pub(crate) fn mknod(path: &Path, mode: u32, device: u64) -> io::Result<()> {
    // SAFETY: the string lives until the call returns.
    check(unsafe { libc::mknod(c_path(path).as_ptr(), mode, device) }.into()).map(drop)
}

pub(crate) fn chown(path: &Path, uid: u32, gid: u32) {
    std::os::unix::fs::lchown(path, Some(uid), Some(gid)).unwrap();
}

pub(crate) fn chmod(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Access and modification time, seconds and nanoseconds each.
pub(crate) fn set_times(path: &Path, times: [(i64, i64); 2]) -> io::Result<()> {
    let times = times.map(|(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec });
    // SAFETY: the string and both times live until the call returns.
    let result = unsafe {
        libc::utimensat(libc::AT_FDCWD, c_path(path).as_ptr(), times.as_ptr(), libc::AT_SYMLINK_NOFOLLOW)
    };
    check(result.into()).map(drop)
}

/// The calling thread runs when nobody else on its processors wants to, or as before.
pub(crate) fn be_idle(idle: bool) {
    let policy = if idle { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives until the call returns.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const priority) };
    assert_eq!(result, 0);
}

pub(crate) fn statfs(path: &Path) -> libc::statvfs {
    // SAFETY: zero is a valid statvfs; the call fills it.
    unsafe {
        let mut out = std::mem::zeroed();
        assert_eq!(libc::statvfs(c_path(path).as_ptr(), &raw mut out), 0);
        out
    }
}

/// Gives an O_TMPFILE file a name.
pub(crate) fn link_fd(file: &File, to: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let to = c_path(to);
    // SAFETY: both strings live until the call returns.
    let result = unsafe {
        libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
    };
    check(result.into()).map(drop)
}

/// A file in memory.
pub(crate) struct Map {
    address: *mut u8,
    len: usize,
}

impl Map {
    pub(crate) fn new(file: &File, len: usize, flags: i32) -> Map {
        // SAFETY: a new mapping at an address of the kernel's choice; the result is checked.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Map { address: address.cast(), len }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is ours and as long as said.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }

    pub(crate) fn sync(&self) {
        // SAFETY: the mapping is ours.
        assert_eq!(unsafe { libc::msync(self.address.cast(), self.len, libc::MS_SYNC) }, 0);
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and not used afterwards.
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}
