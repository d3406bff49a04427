//! What is asked of this machine. Here: who this client is, and whether another client on the same host is dead.

#![allow(unsafe_code)]

pub(crate) mod caller;
pub(crate) mod clock;
pub(crate) mod moment;
pub(crate) mod thread;

use std::fs;
use std::mem::MaybeUninit;

/// Identifies the host as long as it runs: machine, boot, and the PID namespace in which process numbers mean
/// something.
pub(crate) fn id() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_string();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!(
        "{}/{}/{}",
        read("/etc/machine-id"),
        read("/proc/sys/kernel/random/boot_id"),
        namespace.to_string_lossy()
    )
}

/// The host's name, for people.
pub(crate) fn name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string()
}

/// The kernel's version, major and minor: 0 where it cannot be read.
pub(crate) fn kernel() -> (u32, u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Whether this process is root's: it may mount by itself, and the others with what fusermount3 grants.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}

/// Whether no process of that number runs on this host any more.
pub(crate) fn is_dead(pid: u32) -> bool {
    // A zombie has ended too: its files and connections are closed.
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// A random number for a session.
pub(crate) fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is valid for its length; getrandom fills it or fails.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, 8, "getrandom gives eight bytes at once");
    u64::from_ne_bytes(bytes).max(1)
}

/// Lets the kernel prefer others to the calling thread: shipping the log gives way to the builds it is for.
pub(crate) fn lower_priority() {
    // SAFETY: setpriority takes numbers only; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 5) };
}

/// Less is not worth a call.
const POPULATE_MIN: usize = 8 * PAGE;
const PAGE: usize = 4096;

/// Has the kernel back memory that is about to be written with pages, all at once instead of one by one at their first
/// touch. Where that cannot be done (before Linux 5.14) nothing happens.
pub(crate) fn populate(memory: &mut [MaybeUninit<u8>]) {
    let unaligned = memory.as_ptr().align_offset(PAGE);
    let len = memory.len().saturating_sub(unaligned) / PAGE * PAGE;
    if len >= POPULATE_MIN {
        // SAFETY: the range lies within memory that is borrowed for writing; populating does not change what it holds.
        unsafe { libc::madvise(memory.as_mut_ptr().add(unaligned).cast(), len, libc::MADV_POPULATE_WRITE) };
    }
}
