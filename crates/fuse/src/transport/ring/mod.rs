//! The transport over io_uring: a queue and a thread per core.
//!
//! A queue has slots, each registered with the kernel as a place for one request. The kernel puts a request
//! of a process on the same core into a free slot and completes the slot's command; the thread answers in
//! place and gives the slot back with the command that commits the answer and fetches the next request. A
//! slot cannot be given back without an answer, so a request that goes to the pool takes its slot along; the
//! queue then registers a further slot in its stead, up to a bound.
//!
//! FORGETs, INTERRUPTs and what came before the rings were ready come over /dev/fuse.

mod kick;
mod queue;
mod slot;
mod stay;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use io_uring::IoUring;
use io_uring::squeue::Entry128;
use parking_lot::Mutex;

use crate::handling::config::{Config, RING_PARAMETER};
use crate::handling::engine::Engine;
use crate::handling::filesystem::FileSystem;
use crate::handling::settle::Turn;
use crate::sys;
use crate::transport::control::Control;
use crate::transport::device::Device;
use kick::Kicker;
use queue::Queue;
use stay::{Stay, Trace};

/// Whether the kernel allows FUSE over io_uring, for mounts to come.
pub fn enabled() -> bool {
    std::fs::read_to_string(RING_PARAMETER).is_ok_and(|value| value.starts_with('Y'))
}

/// Allows FUSE over io_uring on this machine; needs root.
pub fn enable() -> io::Result<()> {
    if enabled() {
        return Ok(());
    }
    if !Path::new(RING_PARAMETER).exists() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    std::fs::write(RING_PARAMETER, "Y")
}

/// The ring of one core, made before the kernel is told that there will be rings.
pub(crate) struct Ring {
    uring: IoUring<Entry128>,
    wake: Arc<Wake>,
}

/// Makes the rings, one for each core that the machine could have.
pub(crate) fn prepare(config: &Config) -> io::Result<Vec<Ring>> {
    (0..possible_cores()?).map(|_| Ring::new(config)).collect()
}

impl Ring {
    fn new(config: &Config) -> io::Result<Ring> {
        // Every slot can have a completion, and so can the wake-up.
        let completions = (config.queue_depth_max + 1).next_power_of_two();
        let uring = IoUring::<Entry128>::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_submit_all()
            // The thread which enables it becomes the single issuer.
            .setup_r_disabled()
            .setup_cqsize(completions)
            .build(64.min(completions))?;
        Ok(Ring { uring, wake: Arc::new(Wake::new()?) })
    }
}

/// How pool threads give slots back to the thread of their queue.
pub(crate) struct Wake {
    event: OwnedFd,
    done: Mutex<Vec<u32>>,
    stop: AtomicBool,
}

impl Wake {
    fn new() -> io::Result<Wake> {
        let event = sys::event_descriptor()?;
        Ok(Wake { event, done: Mutex::default(), stop: AtomicBool::new(false) })
    }

    /// The answer in this slot is ready.
    fn answered(&self, slot: u32) {
        let first = {
            let mut done = self.done.lock();
            done.push(slot);
            done.len() == 1
        };
        if first {
            self.signal();
        }
    }

    /// Whether it was signalled since [`Wake::take`].
    fn is_signalled(&self) -> bool {
        sys::is_readable(self.event.as_raw_fd())
    }

    /// The slots answered since the last call.
    fn take(&self) -> Vec<u32> {
        // An empty counter is an error that says nothing new.
        let _ = sys::read(self.event.as_raw_fd(), &mut [0; 8]);
        std::mem::take(&mut *self.done.lock())
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.signal();
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn signal(&self) {
        if let Err(error) = sys::write_pieces(self.event.as_raw_fd(), &[&1u64.to_ne_bytes()]) {
            tracing::error!(%error, "cannot wake a queue");
        }
    }
}

/// Why [`run`] ended early.
pub(crate) enum RunError {
    /// Before any request was served; /dev/fuse still works.
    Setup(io::Error),
    /// Later.
    Connection(io::Error),
}

/// Serves until the connection ends.
pub(crate) fn run<F: FileSystem>(
    engine: &Arc<Engine<F>>,
    control: &Control,
    rings: Vec<Ring>,
) -> Result<(), RunError> {
    let wakes: Vec<_> = rings.iter().map(|ring| Arc::clone(&ring.wake)).collect();
    let kicker = Arc::new(Kicker::new(&control.point, rings.len(), &engine.config).map_err(RunError::Setup)?);
    let mut queues = Queues { wakes, threads: Vec::new(), kicker };
    queues.start(engine, control, rings).map_err(RunError::Setup)?;
    let device = Device {
        engine: Arc::clone(engine),
        fd: Arc::clone(&control.fd),
        shard: control.counters.shard(),
        turn: control.turns.add(Turn::default()),
        gather: true,
    };
    device.run().map_err(RunError::Connection)
}

/// The running queues; dropping them ends their threads.
struct Queues {
    wakes: Vec<Arc<Wake>>,
    threads: Vec<JoinHandle<()>>,
    kicker: Arc<Kicker>,
}

impl Queues {
    fn start<F: FileSystem>(
        &mut self,
        engine: &Arc<Engine<F>>,
        control: &Control,
        rings: Vec<Ring>,
    ) -> io::Result<()> {
        let (report, reports) = mpsc::channel();
        let (trace, cores) = (Arc::new(Trace::new()), rings.len());
        for (core, ring) in rings.into_iter().enumerate() {
            let (engine, fd, kicker) =
                (Arc::clone(engine), Arc::clone(&control.fd), Arc::clone(&self.kicker));
            let wake = Arc::clone(&ring.wake);
            let turn = control.turns.add(Turn::gathering(move || wake.signal()));
            let stay = Stay::new(&trace, core, cores);
            let queue = Queue::new(core, ring, engine, fd, control.counters.shard(), kicker, stay, turn);
            let report = report.clone();
            let name = format!("fuse-ring-{core}");
            let thread = std::thread::Builder::new().name(name).spawn(move || queue.run(&report))?;
            self.threads.push(thread);
        }
        drop(report);
        for _ in 0..self.threads.len() {
            reports.recv().unwrap_or_else(|_| Err(io::Error::other("a queue's thread panicked")))?;
        }
        Ok(())
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        self.wakes.iter().for_each(|wake| wake.stop());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a queue's thread panicked");
            }
        }
        self.kicker.close();
    }
}

/// How many queues the kernel wants.
fn possible_cores() -> io::Result<usize> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    count_cores(list.trim()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, list))
}

/// Counts a list of ranges, like `0-3,8`.
fn count_cores(list: &str) -> Option<usize> {
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(last.checked_sub(first)? + 1)
    };
    list.split(',').map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_counted() {
        assert_eq!(count_cores("0"), Some(1));
        assert_eq!(count_cores("0-1"), Some(2));
        assert_eq!(count_cores("0-3,8,10-11"), Some(7));
        assert_eq!(count_cores("3-0"), None);
        assert_eq!(count_cores(""), None);
    }

    #[test]
    fn slots_come_back_through_the_wake() {
        let wake = Wake::new().unwrap();
        assert!(wake.take().is_empty() && !wake.is_signalled());
        wake.answered(3);
        wake.answered(1);
        assert!(wake.is_signalled());
        assert_eq!(wake.take(), [3, 1]);
        assert!(!wake.is_signalled());
        assert!(!wake.stopped());
        wake.stop();
        assert!(wake.stopped() && wake.take().is_empty());
    }
}
