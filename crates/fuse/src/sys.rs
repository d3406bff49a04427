//! Calls into the kernel which the standard library lacks.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr::NonNull;

use rustix::fs::{AtFlags, StatxFlags};

/// `FUSE_DEV_IOC_CLONE`: `_IOR(229, 0, uint32_t)`.
const FUSE_DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;

/// Page-aligned anonymous memory, zeroed, resident only where it was used.
pub(crate) struct Memory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the value alone and has no tie to a thread.
unsafe impl Send for Memory {}
// SAFETY: shared references give access only through `pointer`, whose users uphold exclusion themselves.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(len: usize) -> io::Result<Memory> {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Memory { start, len })
    }

    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `len` bytes long, initialized (zeroes), and borrowed exclusively through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Gives the pages from this byte on back to the host; they read as zeros afterwards.
    pub(crate) fn release(&self, from: usize) {
        // SAFETY: the range lies within the mapping, which is private and anonymous; `pointer` says who sees to it that
        // nobody has a reference into it.
        unsafe {
            libc::madvise(self.start.as_ptr().add(from).cast(), self.len - from, libc::MADV_DONTNEED);
        }
    }

    /// The start, for memory that is shared with the kernel.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length and nothing borrows it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A further descriptor for the same connection, with a queue of its own for the answers outstanding.
pub(crate) fn clone_device(device: &OwnedFd) -> io::Result<OwnedFd> {
    let clone = File::options().read(true).write(true).open("/dev/fuse")?;
    let mut source = device.as_raw_fd() as u32;
    // SAFETY: the ioctl reads the u32 behind the pointer, which lives until the call returns.
    let result = unsafe { libc::ioctl(clone.as_raw_fd(), FUSE_DEV_IOC_CLONE, &raw mut source) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(clone.into()) }
}

/// read(2).
pub(crate) fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid for writes of its length.
    let count = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// writev(2) of up to four pieces as one message.
pub(crate) fn write_pieces(fd: RawFd, pieces: &[&[u8]]) -> io::Result<()> {
    const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut vectors = [EMPTY; 4];
    let mut count = 0;
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        vectors[count] = libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
        count += 1;
    }
    // SAFETY: each vector describes a live slice, and writev only reads from it.
    let written = unsafe { libc::writev(fd, vectors.as_ptr(), count as libc::c_int) };
    if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A counter to wake a ring by; reading it never blocks.
pub(crate) fn event_descriptor() -> io::Result<OwnedFd> {
    // SAFETY: eventfd takes no pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether a read would not wait.
pub(crate) fn is_readable(fd: RawFd) -> bool {
    let mut found = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives until the call returns.
    unsafe { libc::poll(&raw mut found, 1, 0) > 0 }
}

/// Ties the calling thread to a core.
pub(crate) fn pin_to_core(core: usize) -> io::Result<()> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if core >= 8 * std::mem::size_of::<libc::cpu_set_t>() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: `core` is within the set, checked above.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the set lives until the call returns and its size is given.
    let result = unsafe { libc::sched_setaffinity(0, std::mem::size_of_val(&set), &raw const set) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The kernel's number of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: gettid has no preconditions and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// statfs(2), for the sake of the request that it makes.
pub(crate) fn touch_file_system(path: &CStr) -> io::Result<()> {
    // SAFETY: an all-zero statfs is valid; plain numbers.
    let mut figures: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends in NUL, and the figures live until the call returns.
    let result = unsafe { libc::statfs(path.as_ptr(), &raw mut figures) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The device number of the file system at a path, which is not asked for anything.
pub(crate) fn device_of(path: &Path) -> io::Result<u64> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT | AtFlags::SYMLINK_NOFOLLOW;
    let found = rustix::fs::statx(rustix::fs::CWD, path, flags, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor))
}

/// The process's effective user.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

/// The process's effective group.
pub(crate) fn effective_gid() -> u32 {
    // SAFETY: getegid has no preconditions and cannot fail.
    unsafe { libc::getegid() }
}
