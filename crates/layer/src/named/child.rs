//! Programs that end with this one, and leave no mount.
#![allow(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::process::{Signal, geteuid, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Has a program get SIGTERM when the thread that starts it ends, however it does: prctl(2), PR_SET_PDEATHSIG. What
/// root's programs mount is in a namespace of their own, and gone with them.
pub fn ends_with_us(command: &mut Command) {
    let us = getpid();
    let mounts = geteuid().is_root();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        if mounts {
            // SAFETY: the process has one thread, and none of its descriptors is of the namespace.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS)? };
            mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        }
        // It may have ended just before.
        if getppid() == Some(us) { Ok(()) } else { Err(Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec this makes system calls only; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(ask) };
}
