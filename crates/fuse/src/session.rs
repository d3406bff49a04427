//! From a mount to a file system that answers.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::abi::{IN_HEADER_SIZE, InHeader, MAJOR, PAGE_SIZE};
use crate::config::{Config, Transport};
use crate::counters::Counters;
use crate::device::{self, Device};
use crate::engine::Engine;
use crate::filesystem::FileSystem;
use crate::init::{self, InitIn, KernelInfo};
use crate::mount::{Channel, unmount};
use crate::notify::Notifier;
use crate::ring::{self, Ring};
use crate::settle::{Turn, Turns};
use crate::sys::{self, Memory};

/// Why a session did not start, or ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The kernel is too old.
    #[error("the kernel speaks FUSE {major}.{minor}, at least 7.31 is needed: use Linux 5.4 or newer")]
    OldKernel {
        /// Major version of its protocol.
        major: u32,
        /// Minor version of its protocol.
        minor: u32,
    },
    /// Settings that cannot be.
    #[error("invalid settings: {0}")]
    Config(&'static str),
    /// The kernel's first message made no sense, or the mount was gone before it came.
    #[error("the kernel did not begin the connection as expected: mount again")]
    Handshake(#[source] io::Error),
    /// io_uring was asked for and the kernel does not allow it.
    #[error(
        "FUSE over io_uring is switched off: as root, write Y to {}, or use another transport",
        ring::PARAMETER
    )]
    RingDisabled,
    /// io_uring was asked for and could not be set up.
    #[error("FUSE over io_uring could not be set up: use another transport")]
    Ring(#[source] io::Error),
    /// The connection broke.
    #[error("the connection to the kernel failed: mount again")]
    Connection(#[source] io::Error),
}

/// A connection that is set up: the kernel's requests wait until it is run.
pub struct Session<F> {
    engine: Arc<Engine<F>>,
    control: Control,
    rings: Option<Vec<Ring>>,
}

/// The parts of a session that others may hold on to.
#[derive(Debug, Clone)]
pub struct Control {
    pub(crate) fd: Arc<OwnedFd>,
    info: KernelInfo,
    ring_in_use: Arc<AtomicBool>,
    pub(crate) counters: Counters,
    pub(crate) turns: Turns,
    pub(crate) point: PathBuf,
    /// Unknown when it cannot be told, which is never so on Linux 4.11 or newer.
    device: Option<u64>,
}

impl Control {
    /// What the kernel offered and what is in use.
    pub fn kernel(&self) -> KernelInfo {
        let ring = self.ring_in_use.load(Ordering::Relaxed);
        KernelInfo { transport: if ring { Transport::IoUring } else { Transport::DevFuse }, ..self.info }
    }

    /// Sends notifications to the kernel.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(Arc::clone(&self.fd), self.info.minor)
    }

    /// Waits until every answer that a handler under [`Pace::Fast`](crate::Pace::Fast) had begun is with the kernel:
    /// what a [`Notifier`] says afterwards is not undone by an answer that knew nothing of it. Not for handlers.
    pub fn settle(&self) {
        self.turns.settle();
    }

    /// Gives memory back to the host that earlier requests have filled and that none is in, a moment later.
    pub fn release_memory(&self) {
        self.turns.release_memory();
    }

    /// Counts of requests.
    pub fn counters(&self) -> Counters {
        self.counters.clone()
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> &Path {
        &self.point
    }

    /// Whether the kernel hands syncfs(2) on as a request: found out by a call, which waits for its answer. A session
    /// that does not run yet would never give one. Never on a mount that is read-only.
    pub fn hears_syncfs(&self) -> io::Result<bool> {
        let before = self.counters.get("SYNCFS");
        let synced = File::open(&self.point).and_then(|top| sys::sync_file_system(&top));
        // What the file system says to it is another matter.
        if self.counters.get("SYNCFS") > before { Ok(true) } else { synced.map(|()| false) }
    }

    /// The device number of the file system.
    pub fn device(&self) -> io::Result<u64> {
        self.device.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Waits until the kernel has given the file system up, since it is mounted and used nowhere any more; whether it
    /// has within the limit.
    pub fn await_end(&self, limit: Duration) -> bool {
        has_ended(&self.fd, limit)
    }

    /// Unmounts, which ends the session; see [`unmount`]. Never takes away what else is mounted in its place by now.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        match (self.device, sys::device_of(&self.point)) {
            (Some(own), Ok(found)) if own != found => Ok(()),
            _ => unmount(&self.point, lazy),
        }
    }
}

impl AsFd for Control {
    /// The connection to the kernel.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until the kernel has given up the file system of a connection, see [`Control::await_end`].
pub fn has_ended(connection: &OwnedFd, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        // Such a connection is an error, whatever was asked for.
        let mut polled = [PollFd::new(connection, PollFlags::empty())];
        let timeout = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(0) => return false,
            Ok(_) => return polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

impl<F: FileSystem> Session<F> {
    /// Agrees with the kernel on the protocol. On an error the mount is taken away again.
    pub fn new(channel: Channel, fs: F, config: Config) -> Result<Session<F>, SessionError> {
        let point = channel.point.clone();
        Session::begin(channel, fs, config).inspect_err(|_| clean_up(&point))
    }

    fn begin(channel: Channel, fs: F, config: Config) -> Result<Session<F>, SessionError> {
        if let Some(fault) = config.fault() {
            return Err(SessionError::Config(fault));
        }
        let rings = prepare_rings(&config)?;
        let info = handshake(&channel.fd, &config, rings.is_some())?;
        let ring = info.transport == Transport::IoUring;
        if !ring && config.transport == Transport::IoUring {
            return Err(SessionError::RingDisabled);
        }
        let control = Control {
            fd: Arc::new(channel.fd),
            info,
            ring_in_use: Arc::new(AtomicBool::new(ring)),
            counters: Counters::default(),
            turns: Turns::default(),
            device: sys::device_of(&channel.point).ok(),
            point: channel.point,
        };
        let engine = Arc::new(Engine::new(fs, config, info));
        Ok(Session { engine, control, rings: rings.filter(|_| ring) })
    }

    /// The parts that others may hold on to.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// The file system.
    pub fn file_system(&self) -> &F {
        &self.engine.fs
    }

    /// Serves until the mount is gone, which is no error. Returns when all threads have ended; so it waits
    /// for handlers that block, whose tokens it sets.
    pub fn run(mut self) -> Result<(), SessionError> {
        let result = self.serve();
        self.engine.close();
        if result.is_err() {
            clean_up(&self.control.point);
        }
        result
    }

    /// Runs in a thread of its own.
    pub fn spawn(self) -> io::Result<SessionHandle> {
        let control = self.control();
        let thread = std::thread::Builder::new().name("fuse".into()).spawn(move || self.run())?;
        Ok(SessionHandle { control, thread })
    }

    fn serve(&mut self) -> Result<(), SessionError> {
        if let Some(rings) = self.rings.take() {
            match ring::run(&self.engine, &self.control, rings) {
                Ok(()) => return Ok(()),
                Err(ring::RunError::Setup(error)) if self.engine.config.transport == Transport::Auto => {
                    tracing::warn!(%error, "no FUSE over io_uring, falling back to /dev/fuse");
                    self.control.ring_in_use.store(false, Ordering::Relaxed);
                }
                Err(ring::RunError::Setup(error)) => return Err(SessionError::Ring(error)),
                Err(ring::RunError::Connection(error)) => return Err(SessionError::Connection(error)),
            }
        }
        self.serve_device().map_err(SessionError::Connection)
    }

    fn serve_device(&self) -> io::Result<()> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let count = self.engine.config.threads.unwrap_or_else(cores);
        let mut threads = Vec::new();
        for number in 1..count {
            let fd = match sys::clone_device(&self.control.fd) {
                Ok(fd) => Arc::new(fd),
                Err(error) => {
                    tracing::warn!(%error, "cannot clone the descriptor, sharing it");
                    Arc::clone(&self.control.fd)
                }
            };
            let device = self.device(fd, false);
            let name = format!("fuse-dev-{number}");
            threads.push(std::thread::Builder::new().name(name).spawn(move || device.run())?);
        }
        let mut result = self.device(Arc::clone(&self.control.fd), false).run();
        for thread in threads {
            result = result.and(thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))));
        }
        result
    }

    fn device(&self, fd: Arc<OwnedFd>, gather: bool) -> Device<F> {
        Device {
            engine: Arc::clone(&self.engine),
            fd,
            shard: self.control.counters.shard(),
            turn: self.control.turns.add(Turn::default()),
            gather,
        }
    }
}

/// A session that runs in the background.
#[derive(Debug)]
pub struct SessionHandle {
    control: Control,
    thread: JoinHandle<Result<(), SessionError>>,
}

impl SessionHandle {
    /// The parts that others may hold on to.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// What the kernel offered and what is in use.
    pub fn kernel(&self) -> KernelInfo {
        self.control.kernel()
    }

    /// Sends notifications to the kernel.
    pub fn notifier(&self) -> Notifier {
        self.control.notifier()
    }

    /// Counts of requests.
    pub fn counters(&self) -> Counters {
        self.control.counters()
    }

    /// Unmounts, which ends the session; see [`unmount`].
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        self.control.unmount(lazy)
    }

    /// Whether all threads have ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the mount is gone and all threads have ended.
    pub fn join(self) -> Result<(), SessionError> {
        let panicked = || Err(SessionError::Connection(io::Error::other("the session's thread panicked")));
        self.thread.join().unwrap_or_else(|_| panicked())
    }
}

fn clean_up(point: &Path) {
    if let Err(error) = unmount(point, true) {
        tracing::debug!(%error, "nothing to unmount");
    }
}

fn prepare_rings(config: &Config) -> Result<Option<Vec<Ring>>, SessionError> {
    match (config.transport, ring::enabled()) {
        (Transport::DevFuse, _) | (Transport::Auto, false) => Ok(None),
        (Transport::IoUring, false) => Err(SessionError::RingDisabled),
        (Transport::IoUring, true) => ring::prepare(config).map(Some).map_err(SessionError::Ring),
        (Transport::Auto, true) => Ok(ring::prepare(config)
            .inspect_err(|error| tracing::warn!(%error, "no io_uring, using /dev/fuse"))
            .ok()),
    }
}

/// Reads INIT and answers it.
fn handshake(fd: &OwnedFd, config: &Config, ring: bool) -> Result<KernelInfo, SessionError> {
    let invalid = |text: &str| SessionError::Handshake(io::Error::new(io::ErrorKind::InvalidData, text));
    let mut memory =
        Memory::new(config.max_write as usize + 32 * PAGE_SIZE).map_err(SessionError::Handshake)?;
    let buffer = memory.as_mut();
    loop {
        let len = match sys::read(fd.as_raw_fd(), buffer) {
            Ok(len) => len,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => continue,
            Err(error) => return Err(SessionError::Handshake(error)),
        };
        let header = InHeader::parse(&buffer[..len]).map_err(|_| invalid("a message without header"))?;
        if !init::is_init(&header) {
            return Err(invalid("another message came before INIT"));
        }
        let body = &buffer[IN_HEADER_SIZE.min(len)..len];
        let kernel = InitIn::parse(body).map_err(|_| invalid("INIT is too short"))?;
        if kernel.major() > MAJOR {
            device::answer(fd, header.unique, 0, &init::major_only(), &[]);
            continue;
        }
        let info = init::negotiate(&kernel, config, ring)
            .inspect_err(|_| device::answer(fd, header.unique, -libc::EPROTO, &[], &[]))?;
        device::answer(fd, header.unique, 0, &init::init_out(&info, config), &[]);
        return Ok(info);
    }
}
