//! The keeper's process.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hayloft_fuse::{Abort, Notifier};

use super::shared::Shared;
use super::{sweep, teach};
use crate::host::moment::Moment;

/// What the kernel sends when the client's thread that has started the keeper has ended, and so the client.
pub(super) const DEATH: libc::c_int = libc::SIGUSR2;
/// Before the client, and most others.
const PRIORITY: libc::c_int = -10;
/// The last to be chosen when memory is short, but for what may not be chosen at all.
const OOM_SCORE: &str = "-900";
/// How soon it is looked again after the caches were emptied.
const AGAIN: Duration = Duration::from_millis(200);
/// Sweeps that wait for locks beside each other.
const SWEEPS_MAX: usize = 8;

/// What a keeper is told when it is started, as its arguments.
#[derive(Debug)]
pub(super) struct Task {
    /// Descriptor of the connection to the kernel.
    pub(super) device: i32,
    /// Of the memory in common.
    pub(super) memory: i32,
    /// The file system's device number.
    pub(super) number: u64,
    /// The client.
    pub(super) client: u32,
}

impl Task {
    pub(super) fn arguments(&self) -> [String; 4] {
        [self.device.to_string(), self.memory.to_string(), self.number.to_string(), self.client.to_string()]
    }

    fn parse(arguments: &[OsString]) -> Option<Task> {
        let [device, memory, number, client] = arguments else { return None };
        let text = |argument: &OsString| argument.to_str().map(str::to_owned);
        Some(Task {
            device: text(device)?.parse().ok().filter(|fd| *fd > 2)?,
            memory: text(memory)?.parse().ok().filter(|fd| *fd > 2)?,
            number: text(number)?.parse().ok()?,
            client: text(client)?.parse().ok()?,
        })
    }
}

/// Says something, if anybody is there to hear it: whose error output is closed goes on, too.
macro_rules! say {
    ($($said:tt)*) => { drop(writeln!(io::stderr(), $($said)*)) };
}

/// Is a keeper until its client or its mount has ended, or does something at its mount point. For a program that was started with
/// [`ARGUMENT`](super::ARGUMENT) and these; its exit code.
pub fn run(arguments: &[OsString]) -> u8 {
    if let Some(answered) = teach::answer(arguments) {
        return match answered {
            Ok(()) => 0,
            Err(error) => {
                say!("{error}");
                1
            }
        };
    }
    let Some(task) = Task::parse(arguments) else {
        say!("hayloft: this is for the process of a mount to call");
        return 2;
    };
    match keep(&task) {
        Ok(()) => 0,
        Err(error) => {
            say!("hayloft: the keeper of a mount cannot work: {error}");
            1
        }
    }
}

/// What wakes a keeper.
struct Wakes {
    signals: OwnedFd,
    timer: OwnedFd,
}

fn keep(task: &Task) -> io::Result<()> {
    // SAFETY: whoever starts a keeper hands these two descriptors over, and nobody else here uses them.
    let (device, memory) = unsafe { (OwnedFd::from_raw_fd(task.device), OwnedFd::from_raw_fd(task.memory)) };
    let connection = device.try_clone()?;
    let notifier = Notifier::over(device);
    let shared = Arc::new(Shared::over(memory)?);
    let wakes = Wakes::new()?;
    // While it is easy to have. A client that is killed early may be gone with its mount, and the number another mount's: not as
    // long as the connection lasts.
    let mut abort = Abort::of(task.number);
    if hayloft_fuse::has_ended(&connection, Duration::ZERO) {
        return Ok(());
    }
    if let Err(error) = &abort {
        say!(
            "hayloft: when this mount's client is killed, calls under way may hang until `hayloft umount --force`: its connection cannot be ended from outside ({error})"
        );
    }
    stand_out();
    // SAFETY: takes nothing.
    let mut is_dead = unsafe { libc::getppid() } as u32 != task.client;
    let mut done_for = 0;
    let sweeps = Arc::new(AtomicUsize::new(0));
    while !is_dead {
        let (deadline, now) = (shared.deadline(), Moment::now().nanos());
        if hayloft_fuse::has_ended(&connection, Duration::ZERO) {
            return Ok(());
        }
        if now >= deadline && deadline != done_for && sweeps.load(Ordering::Acquire) < SWEEPS_MAX {
            done_for = deadline;
            start_sweep(&notifier, &shared, &sweeps);
        }
        touch(&shared);
        is_dead = wakes.wait(deadline.max(now + AGAIN.as_nanos() as u64))?;
    }
    if let Ok(abort) = &mut abort {
        // It may have ended already.
        if abort.abort().is_ok() {
            // Nobody will tell the kernel any more what others change: what it has is not to be read. Calls under way have ended, so
            // nothing is waited for.
            sweep::sweep(&notifier, &shared);
        }
    }
    Ok(())
}

/// On a thread of its own: the keeper has to hear of the client's end all the same.
fn start_sweep(notifier: &Notifier, shared: &Arc<Shared>, sweeps: &Arc<AtomicUsize>) {
    sweeps.fetch_add(1, Ordering::AcqRel);
    let (notifier, shared, running) = (notifier.clone(), Arc::clone(shared), Arc::clone(sweeps));
    let spawned = std::thread::Builder::new().spawn(move || {
        if !sweep::sweep(&notifier, &shared) {
            say!(
                "hayloft: the kernel may still have pages of a mount whose lease is over: too many calls wait"
            );
        }
        running.fetch_sub(1, Ordering::AcqRel);
    });
    if spawned.is_err() {
        sweeps.fetch_sub(1, Ordering::AcqRel);
        say!("hayloft: no thread to empty the kernel's caches with, whose lease is over");
    }
}

/// So that it is there when it is needed: the memory that is locked is what was used.
fn touch(shared: &Shared) {
    // A page of the table holds 64 chunks.
    for at in (0..shared.used()).step_by(64) {
        let _ = std::hint::black_box(shared.chunk(at));
    }
}

/// Runs and stays in memory when others do not, as far as that is permitted.
fn stand_out() {
    // SAFETY: the name ends in NUL; plain numbers otherwise.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"hayloft-keeper".as_ptr());
        libc::setpriority(libc::PRIO_PROCESS, 0, PRIORITY);
        libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT);
    }
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
}

impl Wakes {
    fn new() -> io::Result<Wakes> {
        // What asks the client to end is not for the keeper, which ends after it.
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
            // SAFETY: installs no handler.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        // SAFETY: an all-zero set is valid, the calls initialize it and read it; the descriptors made are new.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, DEATH);
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            let signals = made(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC))?;
            // Time in which the host slept counts.
            let timer = made(libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_CLOEXEC))?;
            Ok(Wakes { signals, timer })
        }
    }

    /// Waits for that moment, nanoseconds of CLOCK_BOOTTIME, or for the client's end: then `true`.
    fn wait(&self, until: u64) -> io::Result<bool> {
        let until = until.min(i64::MAX as u64);
        let value = libc::timespec {
            tv_sec: (until / 1_000_000_000) as libc::time_t,
            tv_nsec: (until % 1_000_000_000) as libc::c_long,
        };
        let once =
            libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        let poll = |fd: &OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut polled = [poll(&self.signals), poll(&self.timer)];
        // SAFETY: the descriptors are open, and the structures live until the calls return.
        let result = unsafe {
            libc::timerfd_settime(
                self.timer.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const once,
                std::ptr::null_mut(),
            );
            libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, -1)
        };
        let error = io::Error::last_os_error();
        if result < 0 && error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        Ok(polled[0].revents != 0)
    }
}

/// A descriptor that a call has made.
fn made(result: libc::c_int) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}
