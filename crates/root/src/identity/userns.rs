//! An ordinary user's work on the files of his subordinate users (subuid(5)), which layers consist of.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::error::{Error, Result};
use crate::identity::mapping;
use crate::sys::{self, Forked};

/// What the exit code is when the work has panicked.
const PANICKED: i32 = 101;

/// Does `work` in a new process that is root in a user namespace, where this user is root and his subordinate users are the
/// others, as in his build roots: their files it may make, change and remove. Gives the work's exit code, or 128+N when signal
/// N ended it. `None`, and nothing is done, where this is not needed or cannot be had: for root, without ranges in
/// /etc/subuid and /etc/subgid, and without newuidmap(1).
///
/// # Errors
/// When this process has more than one thread, or no namespace can be made.
pub fn with_subordinate_users(work: impl FnOnce() -> u8) -> Result<Option<u8>> {
    if rustix::process::geteuid().is_root() || !mapping::has_ranges() {
        return Ok(None);
    }
    let failed = |error| Error::system("make a user namespace", error);
    sys::check_single_thread().map_err(failed)?;
    let (mut ours, mut theirs) = UnixStream::pair().map_err(failed)?;
    let us = rustix::process::getpid();
    let child = match sys::fork(libc::CLONE_NEWUSER as u64).map_err(failed)? {
        Forked::Child => {
            drop(ours);
            // Until the users are mapped this process is nobody.
            if theirs.read_exact(&mut [0]).is_err() {
                sys::exit_now(PANICKED);
            }
            // What the work has started ends with it.
            let asked = set_parent_process_death_signal(Some(Signal::TERM));
            if asked.is_err() || getppid() != Some(us) {
                sys::exit_now(PANICKED);
            }
            // A panic must not run what belongs to the process that this one is a copy of.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            let _ = std::io::stdout().flush();
            sys::exit_now(done.map_or(PANICKED, i32::from));
        }
        Forked::Parent(child) => child,
    };
    drop(theirs);
    let mapped = mapping::map_ranges(child.pid);
    if mapped {
        ours.write_all(&[1]).map_err(failed)?;
    }
    drop(ours);
    let ended = sys::wait(Some(child.pid), true).map_err(failed)?;
    Ok(ended.filter(|_| mapped).map(|ended| ended.code as u8))
}
