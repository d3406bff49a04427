//! The side of the commands: asking a mount's client.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

use super::{answer_with, socket};
use crate::host;

/// How long a client may take for what it answers at once.
const AT_ONCE: Duration = Duration::from_secs(5);
/// How often is looked whether a client that does not answer is alive.
const LOOK: Duration = Duration::from_millis(200);

/// Why a mount's client could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No client of this user's has such a mount.
    #[error("no client of this user's serves {path}", path = .0.display())]
    NotAMount(PathBuf),
    /// The client has ended without unmounting.
    #[error("the client of {path} is gone; take the mount away with `hayloft umount --force {path}`", path = .0.display())]
    Gone(PathBuf),
    /// The client is there and says nothing.
    #[error("the client of {path} (process {pid}) does not answer; `hayloft umount --force {path}` takes the mount away", path = path.display())]
    Silent {
        /// The mount point.
        path: PathBuf,
        /// Its process, 0 when that cannot be seen from here.
        pid: u32,
    },
    /// The client's socket cannot be used.
    #[error("cannot reach the client of {path}: {source}", path = path.display())]
    Io {
        /// The mount point.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The client answered with an error.
    #[error("{0}")]
    Failed(String),
}

/// Whose client is asked.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where it is mounted; only said to people.
    pub path: PathBuf,
    /// The device number of its file system, as stat(2) has it.
    pub device: u64,
}

/// A connection to the client of a mount, for one question.
#[derive(Debug)]
pub struct Visit {
    path: PathBuf,
    stream: UnixStream,
    pid: u32,
    read: Vec<u8>,
}

/// What becomes of a client whose mount point was taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// It has ended.
    Ended,
    /// Others keep its file system: another mount point, another namespace, or users of one that was taken away.
    GoesOn,
}

impl Visit {
    /// Connects. The question may follow when the mount point is gone, and its device number another mount's.
    ///
    /// # Errors
    /// There is no client, or it takes nothing.
    pub fn begin(target: &Target) -> Result<Visit, ControlError> {
        let path = target.path.clone();
        let stream = match connect(&socket(target.device)) {
            Ok(stream) => stream,
            Err(source) => {
                return Err(match source.kind() {
                    io::ErrorKind::NotFound => ControlError::NotAMount(path),
                    io::ErrorKind::ConnectionRefused => ControlError::Gone(path),
                    io::ErrorKind::WouldBlock => ControlError::Silent { path, pid: 0 },
                    _ => ControlError::Io { path, source },
                });
            }
        };
        let peer = socket_peercred(&stream).map_err(io::Error::from);
        match peer.and_then(|peer| stream.set_read_timeout(Some(LOOK)).map(|()| peer)) {
            Ok(peer) => {
                let pid = u32::try_from(peer.pid.as_raw_pid()).unwrap_or(0);
                Ok(Visit { path, stream, pid, read: Vec::new() })
            }
            Err(source) => Err(ControlError::Io { path, source }),
        }
    }

    /// The client's process, 0 when that cannot be seen from here.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the client has ended, perhaps but for threads that wait in the kernel.
    pub fn is_over(&self) -> bool {
        self.pid != 0 && host::is_dead(self.pid)
    }

    fn ask(&mut self, request: &Value, limit: Option<Duration>) -> Result<Value, ControlError> {
        match answer_with(&self.stream, request) {
            Ok(()) => self.answer(limit),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                Err(ControlError::Gone(self.path.clone()))
            }
            Err(source) => Err(ControlError::Io { path: self.path.clone(), source }),
        }
    }

    /// The next line of the answer; waits as long as the client lives when there is no limit.
    fn answer(&mut self, limit: Option<Duration>) -> Result<Value, ControlError> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let is_late = || deadline.is_some_and(|deadline| Instant::now() > deadline);
        let line = loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                break self.read.drain(..=end).collect::<Vec<u8>>();
            }
            let path = || self.path.clone();
            let mut part = [0; 4096];
            match self.stream.read(&mut part).map_err(|error| (error.kind(), error)) {
                Ok(0) | Err((io::ErrorKind::ConnectionReset, _)) => return Err(ControlError::Gone(path())),
                Ok(count) => self.read.extend_from_slice(&part[..count]),
                // A killed client keeps its sockets as long as one of its threads waits in the kernel.
                Err((io::ErrorKind::WouldBlock, _)) if self.is_over() => {
                    return Err(ControlError::Gone(path()));
                }
                Err((io::ErrorKind::WouldBlock, _)) if is_late() => {
                    return Err(ControlError::Silent { path: path(), pid: self.pid });
                }
                Err((io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted, _)) => {}
                Err((_, source)) => return Err(ControlError::Io { path: path(), source }),
            }
        };
        let answer: Value =
            serde_json::from_slice(&line).map_err(|error| ControlError::Failed(error.to_string()))?;
        match answer["error"].as_str() {
            Some(problem) => Err(ControlError::Failed(problem.to_string())),
            None => Ok(answer),
        }
    }

    /// After the mount point was taken away: waits for the end of the client if that was the last.
    ///
    /// # Errors
    /// It does not answer, or has ended with changes that it could not ship.
    pub fn leave(mut self) -> Result<Leave, ControlError> {
        let answer = match self.ask(&json!({"command": "leave"}), Some(AT_ONCE)) {
            // It is ending, and ships the rest.
            Err(ControlError::Silent { .. }) => self.answer(None),
            answer => answer,
        };
        match answer {
            Ok(answer) if answer["goes_on"] == json!(true) => Ok(Leave::GoesOn),
            // It was faster.
            Ok(_) | Err(ControlError::Gone(_)) => Ok(Leave::Ended),
            Err(error) => Err(error),
        }
    }

    /// Has the client end its session at once: it keeps what the store does not have in a folder, and waits for nobody.
    /// Returns when it has begun.
    ///
    /// # Errors
    /// It is gone, or does not answer within some seconds.
    pub fn give_up(&mut self) -> Result<(), ControlError> {
        self.ask(&json!({"command": "give_up"}), Some(AT_ONCE)).map(drop)
    }

    /// After [`Visit::give_up`]: waits for the end, up to the limit. What it says of changes that were not sent.
    ///
    /// # Errors
    /// It has not ended by then.
    pub fn end(&mut self, limit: Duration) -> Result<Option<String>, ControlError> {
        match self.answer(Some(limit)) {
            Ok(_) | Err(ControlError::Gone(_)) => Ok(None),
            Err(ControlError::Failed(problem)) => Ok(Some(problem)),
            Err(error) => Err(error),
        }
    }
}

/// Does not wait for room for ever, which a client has none of that is stopped and was asked very often.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(AT_ONCE))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// The statistics of a mount.
///
/// # Errors
/// Its client is gone, or does not answer within some seconds.
pub fn stats(target: &Target) -> Result<Value, ControlError> {
    Visit::begin(target)?.ask(&json!({"command": "stats"}), Some(AT_ONCE))
}

/// Waits until everything that was changed on the mount is durable.
///
/// # Errors
/// Its client is gone, or the store is full or does not work.
pub fn flush(target: &Target) -> Result<(), ControlError> {
    Visit::begin(target)?.ask(&json!({"command": "flush"}), None).map(drop)
}
