//! A second command in a root that is there, and a root's removal.

use std::os::fd::AsFd;
use std::panic::AssertUnwindSafe;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use rustix::thread::ThreadNameSpaceType;

use crate::command::sweep;
use crate::error::{Error, Result, Trying};
use crate::inside::holder;
use crate::inside::holder::Supervised;
use crate::kernel;
use crate::memory::cgroup;
use crate::report::{Failure, Link, Order, Said, TaskEnd};
use crate::spec::Task;
use crate::state::{RootInfo, RootState, Roots};
use crate::sys::{self, Forked};
use crate::terminal::Joined;
use crate::terminal::standard::Standard;
use crate::terminal::watch::Watch;

/// Runs a command in a root and waits for its end. What it leaves running stays until the root ends, unless the task says
/// otherwise.
///
/// # Errors
/// When there is no such root, or the command cannot be run.
pub fn enter(roots: &Roots, name: &str, task: &Task) -> Result<TaskEnd> {
    sys::check_single_thread().trying(|| "make a process from one with several threads".to_owned())?;
    kernel::check()?;
    let info = roots.load(name)?;
    let holder = open_holder(&info)?;
    let mut watch = Watch::new()?;
    let mut standard = Standard::prepare()?;
    let terminal = Joined::open(&info.merged)?;
    let (mut joined, terminal) = terminal.unzip();
    let (ours, theirs) = Link::pair()?;
    let child = match sys::fork(0).trying(|| "make a process".to_owned())? {
        Forked::Child => {
            drop(ours);
            tell_failure(&theirs, || {
                standard.take()?;
                go_in(&info, holder.as_fd())?;
                let mut early = Vec::new();
                let order =
                    holder::next_order(&theirs, &mut early).trying(|| "start the command".to_owned())?;
                let Some(Order::Start(terminal)) = order else { return Ok(()) };
                let how = Supervised {
                    network: info.network,
                    processes_per_user: info.processes.filter(|_| info.processes_per_user),
                    is_first: false,
                    early,
                };
                let supervise = || holder::supervise(&theirs, task, terminal.as_ref(), &how);
                if !task.ends_all {
                    return supervise();
                }
                // Only who is in a PID namespace makes one below it, and it takes a new process to be in the root's.
                in_process(0, &theirs, || in_process(libc::CLONE_NEWPID, &theirs, supervise))
            });
            sys::exit_now(0);
        }
        Forked::Parent(child) => child,
    };
    drop(theirs);
    standard.let_go();
    let _ = ours.send(&Order::Start(terminal));
    if let Some(joined) = &mut joined {
        joined.join()?;
    }
    let outcome = watch
        .wait_started(&ours, &child, joined.as_mut())
        .and_then(|()| watch.wait_ended(&ours, &child, joined.as_mut()));
    drop(joined);
    drop(ours);
    let _ = sys::wait(Some(child.pid), true);
    let asked = watch.asked().unwrap_or(libc::SIGKILL);
    Ok(outcome?.unwrap_or(TaskEnd { exit_code: 128 + asked, signal: Some(asked), ..TaskEnd::default() }))
}

/// Does something; the other side is told why it could not be done.
fn tell_failure(link: &Link, something: impl FnOnce() -> Result<()>) {
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(something));
    if let Ok(Err(error)) = outcome {
        let _ = link.send(&Said::Failed(Failure::from(error)));
    }
}

/// Does something in a process of its own, in the new namespaces that `flags` say, and waits for its end. That of the first process of a
/// PID namespace is the end of all others there.
fn in_process(flags: i32, link: &Link, something: impl FnOnce() -> Result<()>) -> Result<()> {
    let what = || "make a process of the root".to_owned();
    match sys::fork(flags as u64).trying(what)? {
        Forked::Child => {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            tell_failure(link, something);
            sys::exit_now(0);
        }
        Forked::Parent(child) => sys::wait(Some(child.pid), true).trying(what).map(drop),
    }
}

/// The root's first process: what it was written down as, as long as the root's lock is held.
pub(crate) fn open_holder(info: &RootInfo) -> Result<std::os::fd::OwnedFd> {
    let pid = Pid::from_raw(info.pid)
        .filter(|_| !info.merged.as_os_str().is_empty())
        .ok_or_else(|| Error::Busy(format!("the root '{}' is just being made: try again", info.name)))?;
    let gone = || Error::NotFound(format!("the root '{}' has just ended", info.name));
    let holder = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Err(gone()),
        other => other.trying(|| format!("reach the root '{}'", info.name))?,
    };
    // Numbers are given anew: this process, which the descriptor keeps from that, is the one that was written down.
    if sys::start_time(info.pid) != Some(info.pid_started) {
        return Err(gone());
    }
    Ok(holder)
}

fn go_in(info: &RootInfo, holder: std::os::fd::BorrowedFd<'_>) -> Result<()> {
    let what = || format!("go into the root '{}'", info.name);
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).trying(what)?;
    // From outside: the files of control groups are not to be seen inside.
    cgroup::join(&info.cgroups, rustix::process::getpid().as_raw_nonzero().get())?;
    let mut kinds = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::NETWORK;
    if info.userxattr {
        kinds |= ThreadNameSpaceType::USER;
    }
    rustix::thread::move_into_thread_name_spaces(holder, kinds).trying(what)?;
    if info.userxattr {
        sys::become_user(0, 0, None).trying(what)?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).trying(what)?;
    }
    rustix::process::chdir("/").trying(what)
}

/// Removes a root with everything in it; one whose command still runs only with `force`.
///
/// # Errors
/// When there is no such root, or it is in use.
pub fn remove(roots: &Roots, name: &str, force: bool) -> Result<()> {
    let info = roots.load(name)?;
    if info.state == RootState::Running && !force {
        return Err(Error::Busy(format!("a command runs in the root '{name}': --force ends it")));
    }
    let holder = open_holder(&info)?;
    sys::pidfd_kill(holder.as_fd(), libc::SIGKILL).trying(|| format!("end the root '{name}'"))?;
    sweep::finish(roots, name)
}

/// Removes what roots have left that were killed; this also happens whenever a root is made.
///
/// # Errors
/// When the state folder cannot be read.
pub fn sweep_dead(roots: &Roots) -> Result<()> {
    if !roots.folder().exists() {
        return Ok(());
    }
    let held = sweep::lock(roots)?;
    sweep::sweep(roots, &held)
}
