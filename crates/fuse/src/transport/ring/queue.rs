//! The queue of one core.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use io_uring::squeue::Entry128;
use io_uring::{IoUring, opcode, types};

use super::kick::Kicker;
use super::slot::Slot;
use super::stay::Stay;
use super::{Ring, Wake};
use crate::handling::counters::Shard;
use crate::handling::engine::{Engine, Verdict};
use crate::handling::filesystem::{FileSystem, Pace};
use crate::handling::settle::Turn;
use crate::protocol::reply::Statfs;
use crate::sys;

/// `FUSE_IO_URING_CMD_REGISTER`: a new slot, to be filled with a request.
const REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`: an answer; the slot is to be filled with the next request.
const COMMIT_AND_FETCH: u32 = 2;

/// Marks from here on are of the completion that says that a pool thread gave a slot back; other marks are slots.
const WAKE: u64 = 1 << 32;

/// How long to wait for completions before looking whether a wake-up was lost: Linux 6.18 has been seen to forget the poll of
/// an event descriptor while slots were with the pool, and the calls in them never ended.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same when no slot is with the pool, so that no call waits for it.
const PATIENCE_IDLE: Duration = Duration::from_secs(10);

/// The connection is gone.
struct Gone;

pub(super) struct Queue<F> {
    core: usize,
    uring: IoUring<Entry128>,
    wake: Arc<Wake>,
    engine: Arc<Engine<F>>,
    fd: Arc<OwnedFd>,
    shard: Arc<Shard>,
    slots: Vec<Arc<Slot>>,
    /// Which of them are with the pool, or broken.
    away: Vec<bool>,
    /// How many these are.
    absent: usize,
    /// Some have gone to the pool since the last wait.
    deferred: bool,
    /// All slots may have been taken at once since the last time that none was absent.
    crowded: bool,
    kicker: Arc<Kicker>,
    stay: Stay,
    turn: Arc<Turn>,
    /// How often it has listened: completions of earlier listening say nothing new.
    listened: u64,
}

impl<F: FileSystem> Queue<F> {
    #[allow(clippy::too_many_arguments)] // all that a queue consists of
    pub(super) fn new(
        core: usize,
        ring: Ring,
        engine: Arc<Engine<F>>,
        fd: Arc<OwnedFd>,
        shard: Arc<Shard>,
        kicker: Arc<Kicker>,
        stay: Stay,
        turn: Arc<Turn>,
    ) -> Queue<F> {
        let Ring { uring, wake } = ring;
        let (slots, away, absent, deferred, crowded, listened) = (Vec::new(), Vec::new(), 0, false, false, 0);
        Queue {
            core,
            uring,
            wake,
            engine,
            fd,
            shard,
            slots,
            away,
            absent,
            deferred,
            crowded,
            kicker,
            stay,
            turn,
            listened,
        }
    }

    /// Registers the slots, reports how that went, and serves until the connection ends.
    pub(super) fn run(mut self, report: &Sender<io::Result<()>>) {
        if let Err(error) = sys::pin_to_core(self.core) {
            // A core that is not there now; the queue must exist all the same.
            tracing::debug!(core = self.core, %error, "a queue's thread is not tied to its core");
        }
        let started = self.start();
        let go_on = started.is_ok();
        // The receiver waits for all reports unless one of them was a failure.
        let _ = report.send(started.map(|_| ()));
        if go_on && let Err(error) = self.serve() {
            tracing::error!(core = self.core, %error, "a queue has failed");
        }
        self.turn.end();
    }

    fn start(&mut self) -> io::Result<()> {
        self.uring.submitter().register_enable_rings()?;
        self.listen();
        for _ in 0..self.engine.config.queue_depth {
            self.add_slot()?;
        }
        self.uring.submit()?;
        // Requests come only when the thread waits for them, so what is complete by now has failed.
        match self.uring.completion().find(|done| done.result() < 0) {
            Some(failed) => Err(io::Error::from_raw_os_error(-failed.result())),
            None => Ok(()),
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        // Of the pass before: how many slots the kernel had, and how many of them came with a request.
        let (mut given_before, mut taken_before) = (self.slots.len(), 0);
        loop {
            let given = self.slots.len() - self.absent;
            if let Some(wanted) = self.turn.wanted() {
                self.uring.submit()?;
                self.turn.submitted(wanted);
            }
            if self.turn.is_spare_wanted() {
                self.release_memory()?;
            }
            match self.stay.awake(&mut self.uring).and_then(|()| self.wait()) {
                Ok(true) => {}
                Ok(false) => {
                    if self.has_lost_wake() && self.completion(WAKE + self.listened, 0).is_err() {
                        return Ok(());
                    }
                }
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => return Err(error),
            }
            let mut taken = 0;
            loop {
                let next = self.uring.completion().next();
                let Some(done) = next else { break };
                taken += usize::from(done.user_data() < WAKE);
                if self.completion(done.user_data(), done.result()).is_err() {
                    return Ok(());
                }
            }
            // What was taken during the pass before shows up in this one.
            self.crowded = self.absent > 0 && (self.crowded || taken_before + taken >= given_before);
            if std::mem::take(&mut self.deferred) && self.crowded {
                self.uring.submit()?;
                self.kicker.kick(self.core);
            }
            (given_before, taken_before) = (given, taken);
        }
    }

    /// Waits for completions; `false` when none has come for long.
    fn wait(&self) -> io::Result<bool> {
        let patience = types::Timespec::from(if self.absent > 0 { PATIENCE } else { PATIENCE_IDLE });
        let waited =
            self.uring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&patience));
        match waited {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Somebody has signalled, and nobody has said so.
    fn has_lost_wake(&mut self) -> bool {
        let is_lost = self.uring.completion().is_empty() && self.wake.is_signalled();
        if is_lost {
            tracing::warn!(core = self.core, "the kernel has lost a wake-up");
        }
        is_lost
    }

    fn completion(&mut self, mark: u64, result: i32) -> Result<(), Gone> {
        if mark >= WAKE {
            if self.wake.stopped() {
                return Err(Gone);
            }
            if mark == WAKE + self.listened {
                self.listen();
            }
            for slot in self.wake.take() {
                self.absent -= 1;
                self.away[slot as usize] = false;
                self.commit(slot);
            }
            return Ok(());
        }
        match -result {
            ..=0 => self.request(mark as u32),
            libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV => return Err(Gone),
            error => {
                tracing::warn!(core = self.core, error, "a slot is lost");
                self.replace_absent(mark as u32);
            }
        }
        Ok(())
    }

    /// Handles the request in a slot.
    fn request(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        // SAFETY: the slot's command is complete, so it holds a request and is this thread's alone.
        let Some(header) = (unsafe { slot.request() }) else { return };
        if self.kicker.made(&header) {
            // SAFETY: as above.
            unsafe {
                slot.handle(|_, reply| {
                    reply.statfs(&Statfs::default());
                    Verdict::Answer(0)
                })
            };
            self.commit_request(index, header.unique);
            return;
        }
        self.shard.count(header.opcode);
        self.stay.note(header.pid);
        let engine = &self.engine;
        // SAFETY: as above.
        if unsafe { slot.handle(|message, reply| engine.serve(message, reply, Pace::Fast)) } {
            self.commit_request(index, header.unique);
            return;
        }
        let (slot, wake, unique) = (Arc::clone(slot), Arc::clone(&self.wake), header.unique);
        self.engine.submit(&header, move |engine, token| {
            // SAFETY: the queue's thread leaves the slot alone until it is given back.
            unsafe {
                slot.handle(|message, reply| Verdict::Answer(engine.serve_patiently(message, reply, token)))
            };
            wake.answered(index);
            engine.answered(unique);
        });
        self.replace_absent(index);
        self.deferred = true;
    }

    /// Gives the memory of slots back that the kernel has and that no request is in.
    fn release_memory(&mut self) -> io::Result<()> {
        // The kernel takes the answers out of the slots, and may put further requests into them. It does both only while
        // this thread is in a call, and then there are completions.
        self.uring.submit()?;
        if !self.uring.completion().is_empty() {
            self.turn.want_spare();
            return Ok(());
        }
        for (slot, _) in self.slots.iter().zip(&self.away).filter(|(_, is_away)| !**is_away) {
            // SAFETY: all answers are submitted, no request is complete, and the pool does not have the slot.
            unsafe { slot.release() };
        }
        Ok(())
    }

    /// Makes up for a slot that is away.
    fn replace_absent(&mut self, index: u32) {
        self.absent += 1;
        self.away[index as usize] = true;
        let config = &self.engine.config;
        let (depth, depth_max) = (config.queue_depth as usize, config.queue_depth_max as usize);
        if self.slots.len() - self.absent < depth
            && self.slots.len() < depth_max
            && let Err(error) = self.add_slot()
        {
            tracing::warn!(core = self.core, %error, "no further slot");
        }
    }

    fn add_slot(&mut self) -> io::Result<()> {
        let index = self.slots.len() as u32;
        let slot = Arc::new(Slot::new(self.engine.content_max())?);
        let mut entry = self.command(REGISTER, index, 0, Some(slot.vectors()));
        set_len(&mut entry, 2);
        self.slots.push(slot);
        self.away.push(false);
        self.push(&entry);
        Ok(())
    }

    /// Gives an answered slot back to the kernel.
    fn commit(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        // SAFETY: the pool thread is done with the slot, so it is this thread's alone again.
        if let Some(unique) = unsafe { slot.answered() } {
            self.commit_request(index, unique);
        }
    }

    fn commit_request(&mut self, index: u32, unique: u64) {
        let entry = self.command(COMMIT_AND_FETCH, index, unique, None);
        self.push(&entry);
    }

    /// A command with its `fuse_uring_cmd_req`.
    fn command(&self, command: u32, index: u32, unique: u64, vectors: Option<u64>) -> Entry128 {
        let mut request = [0; 80];
        request[8..16].copy_from_slice(&unique.to_ne_bytes());
        request[16..18].copy_from_slice(&(self.core as u16).to_ne_bytes());
        opcode::UringCmd80::new(types::Fd(self.fd.as_raw_fd()), command)
            .cmd(request)
            .addr(vectors)
            .build()
            .user_data(u64::from(index))
    }

    /// Asks for a completion when a slot comes back from the pool.
    fn listen(&mut self) {
        self.listened += 1;
        let event = types::Fd(self.wake.event.as_raw_fd());
        let poll = opcode::PollAdd::new(event, libc::POLLIN as u32).build().user_data(WAKE + self.listened);
        self.push(&poll.into());
    }

    fn push(&mut self, entry: &Entry128) {
        loop {
            // SAFETY: slots and descriptors that an entry names live as long as the queue, which owns the ring.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                return;
            }
            if let Err(error) = self.uring.submit() {
                tracing::debug!(core = self.core, %error, "the ring is full");
            }
        }
    }
}

/// Sets `len` of a submission entry, for which the builder of commands has no method.
fn set_len(entry: &mut Entry128, len: u32) {
    const LEN_AT: usize = 24;
    const { assert!(std::mem::size_of::<Entry128>() == 128) };
    // SAFETY: an entry is the kernel's `struct io_uring_sqe`, where `len` is 32 bits wide at offset 24.
    unsafe { (&raw mut *entry).cast::<u8>().add(LEN_AT).cast::<u32>().write(len) };
}
