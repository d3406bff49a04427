//! The first process of a task: it starts the command, passes signals on, adopts what the command leaves behind, and ends
//! with all of it when the command ends.
//!
//! Where that is permitted it is the first process of a PID namespace: the kernel then kills whatever it leaves, also when
//! it is killed itself. Else it is a subreaper that kills its descendants until there are none.
//!
//! Namespaces cost more than a small command does. So one in which a task has left nothing, no process and no mount, has the next
//! task as well.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use hayloft_process::{self as process, Stack};
use prost::Message;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags};
use rustix::time::Timespec;

use crate::execution::command::Command;
use crate::execution::message_in;
use crate::execution::record::Recorder;
use crate::execution::sys;

/// What is to be run, with everything looked up.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Execution {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub command: Vec<Vec<u8>>,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub environment: Vec<Vec<u8>>,
    #[prost(bytes = "vec", tag = "3")]
    pub directory: Vec<u8>,
    #[prost(uint32, tag = "4")]
    pub umask: u32,
    /// Becomes this user, if it says so.
    #[prost(bool, tag = "5")]
    pub switches: bool,
    #[prost(uint32, tag = "6")]
    pub uid: u32,
    #[prost(uint32, tag = "7")]
    pub gid: u32,
    #[prost(uint32, repeated, tag = "8")]
    pub groups: Vec<u32>,
    /// A folder that is seen at another place, the next one.
    #[prost(bytes = "vec", tag = "9")]
    pub bind_from: Vec<u8>,
    #[prost(bytes = "vec", tag = "10")]
    pub bind_to: Vec<u8>,
    /// The command runs another one. This argument of it, if not 0, becomes the path of a file in which it says why that did not run.
    #[prost(uint32, tag = "11")]
    pub failure_at: u32,
    /// The working directory when that folder could be shown there: it cannot be where nothing is to be covered.
    #[prost(bytes = "vec", tag = "12")]
    pub bound_directory: Vec<u8>,
    /// What it opens is recorded: in the file that says what to run, in place of that. Tasks of one namespace are all recorded, or none.
    #[prost(bool, tag = "13")]
    pub records: bool,
}

/// What the first process says of the command.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Report {
    /// It was not run, for this reason.
    #[prost(string, tag = "1")]
    pub failure: String,
    /// The error's number, with a failure.
    #[prost(int32, tag = "2")]
    pub errno: i32,
    /// The failure is that of the command: no such program, not executable.
    #[prost(bool, tag = "3")]
    pub is_own: bool,
    #[prost(int32, tag = "4")]
    pub code: i32,
    #[prost(int32, tag = "5")]
    pub signal: i32,
    /// Written last: a report without it is none.
    #[prost(bool, tag = "6")]
    pub is_whole: bool,
    /// Processor time of the command and all that it has waited for, milliseconds.
    #[prost(uint64, tag = "7")]
    pub cpu: u64,
    /// Nothing is left of the task: this process may be given another one.
    #[prost(bool, tag = "8")]
    pub goes_on: bool,
    /// Most memory that any of its processes had resident, bytes.
    #[prost(uint64, tag = "9")]
    pub peak: u64,
}

impl Report {
    /// The command has run, and has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_empty() && (self.signal != 0 || self.code != 0)
    }
}

/// Descriptors of a task: what to run, standard input, output and error.
pub(crate) type Descriptors = [OwnedFd; 4];

/// Longest report.
pub(crate) const REPORT_MAX: usize = 8 << 10;
/// So much of a failure fits into it, whatever its characters are.
const FAILURE_CHARS: usize = 1_500;

/// Signals that are passed on to the command's process group.
const PASSED: [i32; 10] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
    libc::SIGTSTP,
    libc::SIGALRM,
    libc::SIGWINCH,
];

/// Runs tasks that come on the socket, one after the other, as long as nothing is left of them; the process ends with the socket.
pub(crate) fn run(socket: OwnedFd, has_namespace: bool) -> ! {
    process::close_all_but(&mut [socket.as_raw_fd()]);
    let mut init = Err(("begin", io::Error::other("nothing has come")));
    while let Some(fds) = next_task(&socket) {
        // What could not be done for the first task is told then.
        if init.is_err() {
            init = Init::new(has_namespace);
        }
        let said = init
            .as_mut()
            .map_err(|(what, error)| failure(what, error, false))
            .and_then(|init| init.supervise(fds).map_err(|(what, error)| failure(what, &error, false)));
        let said = said.unwrap_or_else(|failed| failed);
        let goes_on = init.as_mut().is_ok_and(|init| init.goes_on());
        let failure = said.failure.chars().take(FAILURE_CHARS).collect();
        let said = Report { failure, is_whole: true, goes_on, ..said }.encode_to_vec();
        if rustix::net::send(&socket, &said, SendFlags::NOSIGNAL).is_err() || !goes_on {
            break;
        }
    }
    process::exit_now(0)
}

/// The next task; None when nobody has one any more.
fn next_task(socket: &OwnedFd) -> Option<Descriptors> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let message = loop {
        match rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            message => break message.ok()?,
        }
    };
    if message.bytes == 0 {
        return None;
    }
    sys::descriptors(&mut control).try_into().ok()
}

/// What the first process has for all of its tasks.
struct Init {
    signals: OwnedFd,
    has_namespace: bool,
    /// The mounts of its namespace: it is told of changes.
    mounts: Option<File>,
    /// A folder is seen at another place than on the host, for all of its tasks.
    is_bound: bool,
    recorder: Option<Recorder>,
    /// Commands begin on it.
    stack: Stack,
}

pub(super) fn failure(what: &str, error: &io::Error, is_own: bool) -> Report {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    Report { failure: format!("{what}: {error}"), errno, is_own, ..Report::default() }
}

type Trouble = (&'static str, io::Error);

impl Init {
    fn new(has_namespace: bool) -> Result<Init, Trouble> {
        let _ = rustix::process::setsid();
        sys::die_with_parent(if has_namespace { libc::SIGKILL } else { sys::end_all_signal() });
        // Commands have them from here.
        process::default_actions();
        let mut all = PASSED.to_vec();
        all.extend([libc::SIGCHLD, sys::end_all_signal()]);
        let signals = sys::all_signals_by_descriptor(&all).map_err(|error| ("catch signals", error))?;
        let mut mounts = None;
        if has_namespace {
            set_up_namespace()?;
            mounts = File::open("/proc/self/mountinfo").ok();
        } else {
            sys::adopt_orphans();
        }
        Ok(Init { signals, has_namespace, mounts, is_bound: false, recorder: None, stack: Stack::default() })
    }

    /// Whether the next task finds everything as the first one has.
    fn goes_on(&mut self) -> bool {
        let Some(mounts) = &self.mounts else { return false };
        !sys::have_mounts_changed(mounts)
    }

    fn supervise(&mut self, [execution, input, output, error]: Descriptors) -> Result<Report, Trouble> {
        // Those of the task before have come too late.
        while process::next_signal(self.signals.as_fd()).is_some() {}
        let standard = [input, output, error];
        let mut memory = File::from(execution);
        let mut execution: Execution = message_in(&memory).map_err(|error| ("read what to run", error))?;
        let failure = failure_file(&mut execution).map_err(|error| ("make a file in memory", error))?;
        // Who gives it tasks gives it those that have the same folder at the same place.
        if self.has_namespace && !execution.bind_to.is_empty() {
            if !self.is_bound && bind(&execution)? {
                self.is_bound = true;
                self.mounts.as_ref().map(sys::have_mounts_changed);
            }
            if self.is_bound {
                execution.directory = std::mem::take(&mut execution.bound_directory);
            }
        }
        if execution.records && self.recorder.is_none() {
            let directory = Path::new(OsStr::from_bytes(&execution.directory));
            self.recorder =
                Some(Recorder::begin(directory).map_err(|error| ("record what it opens", error))?);
        }
        let command = match Command::new(&execution, &standard, failure.as_ref()) {
            Ok(command) => command,
            Err(error) => return Ok(self::failure("name the command", &error, true)),
        };
        let pid = command.begin(&mut self.stack).map_err(|error| ("make a process", error))?;
        // Both sides do it: a signal that comes at once finds the group.
        let _ = rustix::process::setpgid(rustix::process::Pid::from_raw(pid), None);
        drop(standard);
        let ended = watch(&self.signals, pid, self.recorder.as_mut());
        if self.has_namespace {
            end_all();
        } else {
            end_descendants();
        }
        if let Some(recorder) = &mut self.recorder {
            let record = recorder.finish().encode_to_vec();
            write_anew(&mut memory, &record).map_err(|error| ("record what it has opened", error))?;
        }
        if let Some(failed) = command.failure() {
            return Ok(failed);
        }
        let mut text = String::new();
        if let Some(mut file) = failure {
            let _ = file.rewind().and_then(|()| file.read_to_string(&mut text));
        }
        Ok(match (text.is_empty(), ended.code) {
            (true, _) => ended,
            // As shells have it: there is no such command, or it cannot be run.
            (false, 127) => Report { failure: text, errno: libc::ENOENT, is_own: true, ..Report::default() },
            (false, 126) => Report { failure: text, errno: libc::EACCES, is_own: true, ..Report::default() },
            (false, _) => Report { failure: text, errno: libc::EIO, ..Report::default() },
        })
    }
}

fn failure_file(execution: &mut Execution) -> io::Result<Option<File>> {
    let Some(argument) = execution.command.get_mut(execution.failure_at as usize) else { return Ok(None) };
    if execution.failure_at == 0 {
        return Ok(None);
    }
    let file = File::from(rustix::fs::memfd_create(c"failure", rustix::fs::MemfdFlags::CLOEXEC)?);
    *argument = format!("/proc/self/fd/{}", file.as_raw_fd()).into_bytes();
    Ok(Some(file))
}

fn write_anew(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(bytes)
}

/// Passes signals on until the command ends; says how it has.
fn watch(signals: &OwnedFd, command: i32, mut recorder: Option<&mut Recorder>) -> Report {
    let pause = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
    loop {
        let mut ends = [PollFd::new(signals, PollFlags::IN)];
        let _ = poll(&mut ends, recorder.is_some().then_some(&pause));
        recorder.iter_mut().for_each(|recorder| recorder.relieve());
        while let Some(signal) = process::next_signal(signals.as_fd()) {
            if signal == sys::end_all_signal() {
                end_descendants();
                return Report { signal: libc::SIGKILL, ..Report::default() };
            }
            if signal != libc::SIGCHLD {
                let _ = process::kill(-command, signal);
            }
        }
        while let Ok(Some(ended)) = process::wait(None, false) {
            if ended.pid == command {
                let cpu = (ended.user + ended.system).as_millis() as u64;
                let report = Report { cpu, peak: ended.peak, ..Report::default() };
                return match ended.signal {
                    Some(signal) => Report { signal, ..report },
                    None => Report { code: ended.code, ..report },
                };
            }
        }
    }
}

/// Kills everything else in this process's namespace, until nothing is left.
fn end_all() {
    loop {
        while let Ok(Some(_)) = process::wait(None, false) {}
        // Of init's namespace that is everything but init.
        if process::kill(-1, libc::SIGKILL).is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH)) {
            return;
        }
        let pause = Timespec { tv_sec: 0, tv_nsec: 500_000 };
        let _ = poll(&mut [], Some(&pause));
    }
}

/// Kills everything below this process. What loses its parent comes here, so that in the end nothing is left.
fn end_descendants() {
    while sys::has_children() {
        let own = rustix::process::getpid().as_raw_nonzero();
        let children = std::fs::read_to_string(format!("/proc/self/task/{own}/children")).unwrap_or_default();
        let children = children.split_ascii_whitespace().filter_map(|child| child.parse().ok());
        children.for_each(|child: i32| drop(process::kill(child, libc::SIGKILL)));
        while let Ok(Some(_)) = process::wait(None, false) {}
        let pause = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let _ = poll(&mut [], Some(&pause));
    }
}

fn set_up_namespace() -> Result<(), Trouble> {
    // What is unmounted on the host goes here as well; nothing goes the other way.
    sys::mount(c"none", c"/", None, libc::MS_REC | libc::MS_SLAVE)
        .map_err(|error| ("have mounts of its own", error))?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    sys::mount(c"proc", c"/proc", Some(c"proc"), flags).map_err(|error| ("mount /proc", error))
}

/// False when there is no such folder at that place.
fn bind(execution: &Execution) -> Result<bool, Trouble> {
    let path = |bytes: &[u8]| CString::new(bytes).map_err(|error| ("name a folder", error.into()));
    let (from, to) = (path(&execution.bind_from)?, path(&execution.bind_to)?);
    match sys::mount(&from, &to, None, libc::MS_BIND | libc::MS_REC) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(false),
        Err(error) => Err(("show the volume where the submitting host has it", error)),
    }
}
