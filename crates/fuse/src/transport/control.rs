//! What is kept of a session while it runs: for who mounts, and for the transports.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::handling::config::Transport;
use crate::handling::counters::Counters;
use crate::handling::init::KernelInfo;
use crate::handling::settle::Turns;
use crate::mounting::unmount;
use crate::sys;
use crate::transport::notify::Notifier;

/// The parts of a session that others may hold on to.
#[derive(Debug, Clone)]
pub struct Control {
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) info: KernelInfo,
    pub(crate) ring_in_use: Arc<AtomicBool>,
    pub(crate) counters: Counters,
    pub(crate) turns: Turns,
    pub(crate) point: PathBuf,
    /// Unknown when it cannot be told, which is never so on Linux 4.11 or newer.
    pub(crate) device: Option<u64>,
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

    /// Whether the kernel hands syncfs(2) on as a request: found out by a call, which waits for its answer: of another process, since
    /// one that is killed while it waits for itself never ends. A session that does not run yet would never give one. Never on a
    /// mount that is read-only.
    pub fn hears_syncfs(&self, call: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<bool> {
        let before = self.counters.get("SYNCFS");
        let synced = call(&self.point);
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
