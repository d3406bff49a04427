//! The system calls that `rustix` lacks, each behind a safe signature.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub(crate) use hayloft_process::{
    Child, Ended, Forked, Mask, become_user, check_single_thread, close_all_but, close_on_exec_from, exec,
    exec_file, exit_now, fork, kill, next_signal, pending_signal, pidfd_kill, replace_standard,
    reset_signals, restore_signals, signals_by_descriptor, wait,
};

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_long(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// When a process was started, in ticks since the machine was: with its number it means one process for ever.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, which may have anything in it, is in parentheses; the time is the twentieth field after it.
    text.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// Gives this process a mount namespace of its own, a copy of the one it had; and, where the kernel knows them, a
/// namespace of control groups in which its own group is the top.
///
/// # Errors
/// As unshare(2) says.
pub(crate) fn new_mount_namespace() -> io::Result<()> {
    // SAFETY: plain numbers; file descriptors stay shared with nobody, since this process has one thread.
    let unshare = |flags| check(unsafe { libc::unshare(flags) }).map(drop);
    unshare(libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP).or_else(|_| unshare(libc::CLONE_NEWNS))
}

/// Sends the calling thread a signal.
#[cfg(test)]
pub(crate) fn signal_this_thread(signal: i32) {
    // SAFETY: the thread is there.
    assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), signal) }, 0);
}

/// Changes the flags of a mount: `MOUNT_ATTR_*` of mount_setattr(2).
///
/// # Errors
/// As mount_setattr(2) says.
pub(crate) fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    set: u64,
    clear: u64,
    recursive: bool,
) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: path and structure live until the call returns, and the size is the structure's.
    check_long(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Whether there is mount_setattr(2), the newest of the calls that roots need.
///
/// # Errors
/// ENOSYS when there is not; what a filter of system calls says otherwise.
pub(crate) fn mount_setattr_is_there() -> io::Result<()> {
    // SAFETY: a structure of no bytes is refused before anything is looked at.
    let refused = check_long(unsafe { libc::syscall(libc::SYS_mount_setattr, -1, c"".as_ptr(), 0, 0, 0) });
    match refused {
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

/// Bounds how many processes this user may have in this user namespace, for this process and what it makes.
///
/// # Errors
/// Never, when the bound is below the one before.
pub(crate) fn bound_processes(most: u64) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nproc);
    let most = before.maximum.map_or(most, |before| before.min(most));
    Ok(setrlimit(Resource::Nproc, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Installs a seccomp filter on this process.
///
/// # Errors
/// EACCES without CAP_SYS_ADMIN and no_new_privs.
pub(crate) fn install_filter(program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, which lives until the call returns, and changes nothing in it.
    check_long(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    })
    .map(drop)
}

/// Swaps to a device from now on, with the lowest priority.
///
/// # Errors
/// As swapon(2) says.
pub(crate) fn swap_on(device: &Path) -> io::Result<()> {
    let device = c_path(device)?;
    // SAFETY: the string lives until the call returns.
    check(unsafe { libc::swapon(device.as_ptr(), 0) }).map(drop)
}

/// Brings back what is swapped to a device, and stops swapping to it.
///
/// # Errors
/// As swapoff(2) says: EINVAL when it is not used for swapping, ENOMEM when memory has no room for it.
pub(crate) fn swap_off(device: &Path) -> io::Result<()> {
    let device = c_path(device)?;
    // SAFETY: the string lives until the call returns.
    check(unsafe { libc::swapoff(device.as_ptr()) }).map(drop)
}

const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;

/// The device goes when its last user does.
pub(crate) const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Nothing is written to the file.
pub(crate) const LO_FLAGS_READ_ONLY: u32 = 1;
/// The file's pages are not cached a second time.
pub(crate) const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    numbers: [u64; 5],
    number: u32,
    encrypt: [u32; 2],
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

/// The number of a loop device that was free a moment ago.
///
/// # Errors
/// When none can be made.
pub(crate) fn free_loop_device(control: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: the ioctl takes no argument.
    check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })
}

/// Sets a file behind an open loop device.
///
/// # Errors
/// EBUSY when somebody else has taken the device.
pub(crate) fn configure_loop(device: BorrowedFd<'_>, file: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    // SAFETY: zero is a valid value of every field.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = file.as_raw_fd() as u32;
    config.info.flags = flags;
    // SAFETY: the ioctl reads a `struct loop_config`, which lives until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) }).map(drop)
}

/// Brings the loopback interface of this network namespace up.
///
/// # Errors
/// As netdevice(7) says.
pub(crate) fn loopback_up() -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: zero is a valid ifreq; the kernel reads the name and the flags, which are set.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = *from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)).map(drop)
    }
}

/// Waits until this process is killed.
pub(crate) fn wait_for_ever() -> ! {
    loop {
        // SAFETY: takes nothing.
        unsafe { libc::pause() };
    }
}

/// From now on no other process of this user may look into this one: what it has open, its program, its memory. The
/// next exec ends that.
///
/// # Errors
/// Never, on Linux.
pub(crate) fn hide_from_others() -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernel() {
        assert_eq!((size_of::<LoopInfo>(), size_of::<LoopConfig>()), (232, 304));
        assert_eq!(size_of::<libc::mount_attr>(), 32);
    }

    #[test]
    fn processes_have_a_start_time() {
        let own = std::process::id() as i32;
        assert!(start_time(own).is_some_and(|time| time > 0));
        assert_eq!(start_time(own), start_time(own));
        assert_eq!(start_time(i32::MAX), None);
    }
}
