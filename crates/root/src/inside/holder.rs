//! The first process of a root: it builds the tree, starts the command, passes signals on, reaps what is orphaned and
//! holds the root as long as it lives. When it ends, however it ends, the kernel ends every other process in the
//! root, and the mounts and the memory go with the last of them.

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use crate::error::{Error, Result, Trying};
use crate::inside::task;
use crate::report::{Failure, Link, Order, Said, TaskEnd, Terminal};
use crate::spec::{Network, Task};
use crate::sys::{self, Forked};
use crate::terminal::standard::Standard;
use crate::tree;

/// Code of a process that ended before it became what it was to be; nobody sees it.
const FAILED: i32 = 125;

/// What the first process needs to know.
#[derive(Debug)]
pub(crate) struct Holding {
    pub plan: tree::Plan,
    pub task: Task,
    pub host_name: String,
    pub network: Network,
    /// How many processes each user may have, where no control group bounds them together.
    pub processes_per_user: Option<u64>,
    /// The locked descriptor that says that the root is alive, and those that say what it uses.
    pub locks: Vec<i32>,
}

/// The whole life of the first process.
pub(crate) fn run(link: Link, holding: &Holding, standard: &Standard) -> i32 {
    let taken = standard.take();
    // What the caller has open besides is nothing to this process, which may stay longer.
    sys::close_all_but(&mut with(&holding.locks, &[link.as_fd()]));
    let mut early = Vec::new();
    let outcome = taken.and_then(|()| set_up(&link, holding, &mut early)).and_then(|terminal| {
        let Some(terminal) = terminal else { return Ok(()) };
        let how = Supervised {
            network: holding.network,
            processes_per_user: holding.processes_per_user,
            is_first: true,
            early,
        };
        supervise(&link, &holding.task, terminal.as_ref(), &how)?;
        // What the command left running ends with it.
        end_all_others();
        // A signal that came too late for the command is nobody's.
        hold(next_order(&link, &mut Vec::new()).ok().flatten(), &link, &holding.locks)
    });
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            let _ = link.send(&Said::Failed(Failure::from(error)));
            FAILED
        }
    }
}

fn with(locks: &[i32], more: &[BorrowedFd<'_>]) -> Vec<i32> {
    locks.iter().copied().chain(more.iter().map(AsRawFd::as_raw_fd)).collect()
}

/// The next order that is not a signal; signals are kept. Nothing when the other side has ended.
///
/// # Errors
/// When it is not understood.
pub(crate) fn next_order(link: &Link, early: &mut Vec<i32>) -> io::Result<Option<Order>> {
    loop {
        match link.receive()? {
            Some(Order::Signal(signal)) => early.push(signal),
            other => return Ok(other),
        }
    }
}

/// Builds the root. Gives the terminal to start the command on; nothing when the other side has ended.
fn set_up(link: &Link, holding: &Holding, early: &mut Vec<i32>) -> Result<Option<Option<Terminal>>> {
    let what = || "set up the root's first process".to_owned();
    // Away from the terminal's signals: they are passed on to the command, and end nothing here.
    rustix::process::setsid().trying(what)?;
    if holding.plan.in_user_namespace {
        if next_order(link, early).trying(what)?.is_none() {
            return Ok(None);
        }
        sys::become_user(0, 0, None).trying(|| "become root in the user namespace".to_owned())?;
    }
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).trying(what)?;
    // From here on the end of the other side is this one's; if it came before, the next send() fails.
    rustix::system::sethostname(holding.host_name.as_bytes()).trying(|| "set the host name".to_owned())?;
    if holding.network == Network::None {
        sys::loopback_up().trying(|| "bring the loopback interface up".to_owned())?;
    }
    tree::build(&holding.plan)?;
    link.send(&Said::Built).trying(what)?;
    match next_order(link, early).trying(what)? {
        Some(Order::Start(terminal)) => Ok(Some(terminal)),
        _ => Ok(None),
    }
}

/// What [`supervise`] needs to know besides the command.
pub(crate) struct Supervised {
    pub network: Network,
    /// As in [`Holding`].
    pub processes_per_user: Option<u64>,
    /// Whether it is the root's first process that calls.
    pub is_first: bool,
    /// Signals that were sent before there was a command.
    pub early: Vec<i32>,
}

/// Starts a command in the root whose stage is this process's root folder, and stays until it has ended: passes
/// signals on and reaps. Tells the other side of start and end.
///
/// # Errors
/// When the command could not be started.
pub(crate) fn supervise(
    link: &Link,
    task: &Task,
    terminal: Option<&Terminal>,
    how: &Supervised,
) -> Result<()> {
    let is_first = how.is_first;
    let what = || "start the command".to_owned();
    let (signals, _) = sys::signals_by_descriptor(&[libc::SIGCHLD]).trying(what)?;
    let (reader, mut writer) = io::pipe().trying(what)?;
    let child = match sys::fork(0).trying(what)? {
        Forked::Child => {
            sys::close_all_but(&mut [writer.as_raw_fd()]);
            let error = task::become_command(task, terminal, how);
            let text = serde_json::to_vec(&Failure::from(error)).unwrap_or_default();
            let _ = writer.write_all(&text);
            sys::exit_now(FAILED);
        }
        Forked::Parent(child) => child,
    };
    drop(writer);
    let mut end = TaskEnd::default();
    if let Some(failure) = failure_of(reader)? {
        sys::wait(Some(child.pid), true).trying(what)?;
        return Err(failure);
    }
    if is_first {
        let _ = leave_standard_descriptors();
    }
    let _ = link.send(&Said::Started);
    for signal in &how.early {
        let _ = sys::kill(-child.pid, *signal);
    }
    loop {
        let mut ready = [PollFd::new(&signals, PollFlags::IN), PollFd::new(link, PollFlags::IN)];
        match rustix::event::poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => (),
            Err(error) => return Err(error).trying(|| "wait for the command".to_owned()),
        }
        let asked = !ready[1].revents().is_empty();
        while sys::next_signal(signals.as_fd()).is_some() {}
        if reap(child.pid, &mut end) {
            break;
        }
        if asked {
            match link.receive() {
                // To the command and what belongs to it, as a terminal would.
                Ok(Some(Order::Signal(signal))) => drop(sys::kill(-child.pid, signal)),
                Ok(Some(_)) => (),
                // The other side has ended: so does this one.
                Ok(None) | Err(_) => {
                    let _ = sys::kill(-child.pid, libc::SIGKILL);
                    return Ok(());
                }
            }
        }
    }
    if is_first {
        end_all_others();
        while let Ok(Some(ended)) = sys::wait(None, true) {
            add(&mut end, &ended);
        }
    }
    let _ = link.send(&Said::Ended(end));
    Ok(())
}

/// What kept the command from running, as its process has written it before it ended; an exec closes the pipe.
fn failure_of(mut reader: PipeReader) -> Result<Option<Error>> {
    let mut text = Vec::new();
    reader.read_to_end(&mut text).trying(|| "see the command start".to_owned())?;
    if text.is_empty() {
        return Ok(None);
    }
    let failure: Failure =
        serde_json::from_slice(&text).map_err(io::Error::from).trying(|| "start the command".to_owned())?;
    Ok(Some(failure.into()))
}

fn add(end: &mut TaskEnd, ended: &sys::Ended) {
    end.cpu_user_us += ended.user.as_micros() as u64;
    end.cpu_system_us += ended.system.as_micros() as u64;
    end.major_faults += ended.major_faults;
}

/// Reaps every child that has ended. Whether the command was among them.
fn reap(command: i32, end: &mut TaskEnd) -> bool {
    let mut is_over = false;
    while let Ok(Some(ended)) = sys::wait(None, false) {
        add(end, &ended);
        if ended.pid == command {
            (end.exit_code, end.signal) = (ended.code, ended.signal);
            is_over = true;
        }
    }
    is_over
}

/// Ends every other process of this PID namespace. Only ever its first process may do that: in any other, -1 would
/// mean more than the root.
fn end_all_others() {
    if rustix::process::getpid().as_raw_nonzero().get() == 1 {
        let _ = sys::kill(-1, libc::SIGKILL);
    }
}

/// Lets go of the caller's descriptors, so that nobody waits for this process when the command's output ends.
fn leave_standard_descriptors() -> io::Result<()> {
    // The root's: on the stage no device opens.
    let null = Path::new("/").join(tree::MERGED).join("dev/null");
    let null =
        std::fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(null)?;
    (0..=2).try_for_each(|number| sys::replace_standard(null.as_fd(), number))
}

/// Holds the root without the command: until it is killed when it is to be kept, else not at all.
fn hold(order: Option<Order>, link: &Link, locks: &[i32]) -> Result<()> {
    let Some(Order::Keep) = order else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(None).trying(|| "keep the root".to_owned())?;
    let (signals, _) = sys::signals_by_descriptor(&[libc::SIGCHLD]).trying(|| "keep the root".to_owned())?;
    let _ = link.send(&Said::Kept);
    // The caller's pipes among them: whoever waits for their end must not wait for this process.
    sys::close_all_but(&mut with(locks, &[signals.as_fd()]));
    loop {
        let mut ready = [PollFd::new(&signals, PollFlags::IN)];
        let _ = rustix::event::poll(&mut ready, None);
        while sys::next_signal(signals.as_fd()).is_some() {}
        // What was entered and has left orphans behind.
        while let Ok(Some(_)) = sys::wait(None, false) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_no_answer() {
        let (caller, first) = Link::pair().unwrap();
        let mut early = Vec::new();
        for order in [Order::Signal(2), Order::Signal(15), Order::Start(None), Order::Signal(10), Order::Keep]
        {
            caller.send(&order).unwrap();
        }
        assert!(matches!(next_order(&first, &mut early).unwrap(), Some(Order::Start(None))));
        assert!(matches!(next_order(&first, &mut early).unwrap(), Some(Order::Keep)));
        assert_eq!(early, [2, 15, 10]);
        drop(caller);
        assert!(next_order(&first, &mut early).unwrap().is_none());
    }
}
