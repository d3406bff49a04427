//! Work from outside on the files of a root that is there.

use std::io::Write;
use std::os::fd::AsFd;

use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::ThreadNameSpaceType;

use crate::command::enter::open_holder;
use crate::error::{Error, Result, Trying};
use crate::memory::cgroup;
use crate::state::RootInfo;
use crate::sys::{self, Forked};

/// What the exit code is when the work has panicked.
const PANICKED: i32 = 101;

/// Does `work` in a process of its own, and gives its exit code. What it writes into the root's memory counts as the root's. In an
/// ordinary user's root it is root, with the users that there are in it: it may do with files of his subordinate users what he
/// may not.
///
/// # Errors
/// When the root has ended, or this process has more than one thread.
pub fn beside(info: &RootInfo, work: impl FnOnce() -> u8) -> Result<u8> {
    let what = || format!("reach the root '{}'", info.name);
    sys::check_single_thread().trying(what)?;
    let holder = open_holder(info)?;
    let child = match sys::fork(0).trying(what)? {
        Forked::Child => {
            // A panic must not run what belongs to the process that this one is a copy of.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                match prepare(info, holder.as_fd()) {
                    Ok(()) => i32::from(work()),
                    Err(error) => {
                        let _ = writeln!(std::io::stderr(), "hayloft: {error}");
                        1
                    }
                }
            }));
            let _ = std::io::stdout().flush();
            sys::exit_now(done.unwrap_or(PANICKED));
        }
        Forked::Parent(child) => child,
    };
    let ended = sys::wait(Some(child.pid), true).trying(what)?;
    let code =
        ended.map(|ended| ended.code).ok_or_else(|| Error::Failed("the work was not done".to_owned()))?;
    Ok(u8::try_from(code).unwrap_or(u8::MAX))
}

fn prepare(info: &RootInfo, holder: std::os::fd::BorrowedFd<'_>) -> Result<()> {
    let what = || format!("reach the root '{}'", info.name);
    set_parent_process_death_signal(Some(Signal::TERM)).trying(what)?;
    cgroup::join(&info.cgroups, rustix::process::getpid().as_raw_nonzero().get())?;
    if info.userxattr {
        rustix::thread::move_into_thread_name_spaces(holder, ThreadNameSpaceType::USER).trying(what)?;
        sys::become_user(0, 0, None).trying(what)?;
        set_parent_process_death_signal(Some(Signal::TERM)).trying(what)?;
    }
    Ok(())
}
