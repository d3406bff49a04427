//! The process of a task.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::FlockOperation;

use super::key::{ARGUMENT, Key};
use super::wire::{self, Hand, Told};
use crate::submit::{Outcome, Task};

/// So often a relay that is just ending is met.
const TRIES: u32 = 5;

/// A task for a relay.
#[derive(Debug)]
pub struct Handed {
    hand: Hand,
    streams: [File; 3],
}

impl Handed {
    /// Everything of a task. `again` names where those of the same command line are taken from then on ([`again::name`](super::again::name)).
    ///
    /// # Errors
    /// When there is no `/dev/null`, or too many files are open.
    pub fn new(task: Task, again: Option<String>) -> io::Result<Handed> {
        let Task { spec, need, input, output, error, may_run_here, .. } = task;
        let hand = Hand {
            spec: Some(spec),
            need: Some(need),
            has_input: input.is_some(),
            merged: error.is_none(),
            may_run_here,
            again: again.unwrap_or_default(),
        };
        let input = input.map_or_else(|| File::open("/dev/null"), Ok)?;
        let error = error.map_or_else(|| output.try_clone(), Ok)?;
        Ok(Handed { hand, streams: [input, output, error] })
    }
}

/// Has a task run by way of the relay, which is started if it is not there: `start` starts a command in a session of its own. `passes`
/// is given where to write the numbers of signals to, as bytes; 0 ends the task at once.
///
/// # Errors
/// When no relay can be started.
pub fn run(
    key: &Key,
    task: &Handed,
    start: impl Fn(Command) -> io::Result<()>,
    passes: impl FnOnce(UnixStream),
) -> io::Result<Outcome> {
    let socket = key.socket()?;
    let mut passes = Some(passes);
    for _ in 0..TRIES {
        let mut stream = match UnixStream::connect(&socket) {
            Ok(stream) => stream,
            Err(_) => begin(key, &socket, &start)?,
        };
        let [input, output, error] = task.streams.each_ref().map(AsFd::as_fd);
        let handed = wire::send(&mut stream, &task.hand)
            .and_then(|()| wire::send_descriptors(&stream, &[input, output, error]));
        if handed.is_err() {
            continue;
        }
        let Ok(Told { is_taken: true, .. }) = wire::receive(&mut stream) else { continue };
        if let Some(passes) = passes.take() {
            passes(stream.try_clone()?);
        }
        return Ok(match wire::receive::<Told>(&mut stream) {
            Ok(told) => told.into(),
            Err(_) => ended(),
        });
    }
    Err(io::Error::other("the processes that submit for this build end at once"))
}

/// What becomes of a task whose relay has gone.
pub(super) fn ended() -> Outcome {
    Outcome::FarmFailed("the process that submits for this build has ended".to_owned())
}

/// Starts a relay, unless somebody else just has.
fn begin(key: &Key, socket: &Path, start: impl Fn(Command) -> io::Result<()>) -> io::Result<UnixStream> {
    let lock =
        File::options().create(true).truncate(false).write(true).open(socket.with_extension("lock"))?;
    while let Err(error) = rustix::fs::flock(&lock, FlockOperation::LockExclusive) {
        if error != rustix::io::Errno::INTR {
            return Err(error.into());
        }
    }
    if let Ok(stream) = UnixStream::connect(socket) {
        return Ok(stream);
    }
    // It listens before it is to be found, so that nobody finds it deaf.
    let fresh = socket.with_extension("new");
    let _ = std::fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh)?;
    std::fs::rename(&fresh, socket)?;
    let mut command = Command::new("/proc/self/exe");
    let (name, value) = key.variable();
    command.arg(ARGUMENT).env(name, value).current_dir("/");
    command.stdin(OwnedFd::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
    start(command)?;
    UnixStream::connect(socket)
}
