//! From a mount to a file system that answers.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::handling::config::{Config, Transport};
use crate::handling::counters::Counters;
use crate::handling::engine::Engine;
use crate::handling::error::SessionError;
use crate::handling::filesystem::FileSystem;
use crate::handling::init::{self, InitIn, KernelInfo};
use crate::handling::settle::{Turn, Turns};
use crate::mounting::{Channel, unmount};
use crate::protocol::abi::{IN_HEADER_SIZE, InHeader, MAJOR, PAGE_SIZE};
use crate::sys::{self, Memory};
use crate::transport::control::Control;
use crate::transport::device::{self, Device};
use crate::transport::notify::Notifier;
use crate::transport::ring::{self, Ring};

/// A connection that is set up: the kernel's requests wait until it is run.
pub struct Session<F> {
    engine: Arc<Engine<F>>,
    control: Control,
    rings: Option<Vec<Ring>>,
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
