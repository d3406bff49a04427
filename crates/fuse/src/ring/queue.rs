//! The queue of one core.
//!
//! The kernel (6.14 to 6.18 at least) puts a request into a slot when it comes and a slot is free, else
//! it waits; waiting requests are looked at when an answer is committed, but not when a slot is registered.
//! So while requests with the pool take their slots away, a waiting request could wait for one of their
//! answers, and for ever if these depend on it. Therefore, after a request went to the pool, the queue has
//! the kernel send it a request that can be answered at once (the reply to a RETRIEVE of nothing): with
//! the commit of that answer the waiting requests move on.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use io_uring::squeue::Entry128;
use io_uring::{IoUring, opcode, types};

use super::slot::Slot;
use super::{Ring, Wake};
use crate::abi::{self, notify, out_header};
use crate::counters::Shard;
use crate::engine::{Engine, Verdict};
use crate::filesystem::{FileSystem, Pace};
use crate::sys;

/// `FUSE_IO_URING_CMD_REGISTER`: a new slot, to be filled with a request.
const REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`: an answer; the slot is to be filled with the next request.
const COMMIT_AND_FETCH: u32 = 2;

/// The mark of the completion that says that a pool thread gave a slot back; other marks are slots.
const WAKE: u64 = u64::MAX;

/// Requests that make waiting requests move on have even numbers from here on, beyond what the kernel counts to.
const KICK: u64 = 1 << 62;
/// The inode it is about, one which the kernel always knows.
const ROOT: u64 = 1;

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
    /// How many slots are with the pool, or broken.
    absent: usize,
    /// Requests may be waiting in the kernel for a slot registered just now.
    kick_wanted: bool,
    /// How many requests which make them move on were asked for.
    kicks: u64,
}

impl<F: FileSystem> Queue<F> {
    pub(super) fn new(
        core: usize,
        ring: Ring,
        engine: Arc<Engine<F>>,
        fd: Arc<OwnedFd>,
        shard: Arc<Shard>,
    ) -> Queue<F> {
        let Ring { uring, wake } = ring;
        let (kick_wanted, kicks) = (false, 0);
        Queue { core, uring, wake, engine, fd, shard, slots: Vec::new(), absent: 0, kick_wanted, kicks }
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
        loop {
            match self.uring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => return Err(error),
            }
            loop {
                let next = self.uring.completion().next();
                let Some(done) = next else { break };
                if self.completion(done.user_data(), done.result()).is_err() {
                    return Ok(());
                }
            }
            if self.kick_wanted {
                self.uring.submit()?;
                self.kick();
            }
        }
    }

    /// Has the kernel send this queue a request. The thread runs on the queue's core, so it is this queue.
    ///
    /// If others took all free slots meanwhile, it waits too; but each of these others ends in a commit,
    /// or on the pool and so in the next kick.
    fn kick(&mut self) {
        self.kick_wanted = false;
        self.kicks += 1;
        let words = [KICK + 2 * self.kicks, ROOT, 0, 0].map(u64::to_ne_bytes).concat();
        let header = out_header(0, notify::RETRIEVE, words.len());
        if let Err(error) = sys::write_pieces(self.fd.as_raw_fd(), &[&header, &words]) {
            tracing::debug!(core = self.core, %error, "cannot kick the queue");
        }
    }

    fn completion(&mut self, mark: u64, result: i32) -> Result<(), Gone> {
        if mark == WAKE {
            if self.wake.stopped() {
                return Err(Gone);
            }
            self.listen();
            for slot in self.wake.take() {
                self.absent -= 1;
                self.commit(slot);
            }
            return Ok(());
        }
        match -result {
            ..=0 => self.request(mark as u32),
            libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV => return Err(Gone),
            error => {
                tracing::warn!(core = self.core, error, "a slot is lost");
                self.replace_absent();
            }
        }
        Ok(())
    }

    /// Handles the request in a slot.
    fn request(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        // SAFETY: the slot's command is complete, so it holds a request and is this thread's alone.
        let Some(header) = (unsafe { slot.request() }) else { return };
        if header.opcode != abi::opcode::NOTIFY_REPLY {
            self.shard.count(header.opcode);
        }
        let engine = &self.engine;
        // SAFETY: as above.
        if unsafe { slot.handle(|message, reply| engine.serve(message, reply, Pace::Fast)) } {
            self.commit_request(index, header.unique);
            return;
        }
        let (slot, wake) = (Arc::clone(slot), Arc::clone(&self.wake));
        self.engine.submit(&header, move |engine, token| {
            // SAFETY: the queue's thread leaves the slot alone until it is given back.
            unsafe {
                slot.handle(|message, reply| Verdict::Answer(engine.serve_patiently(message, reply, token)))
            };
            wake.answered(index);
        });
        self.replace_absent();
        self.kick_wanted = true;
    }

    /// Makes up for a slot that is away.
    fn replace_absent(&mut self) {
        self.absent += 1;
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
        let event = types::Fd(self.wake.event.as_raw_fd());
        let poll = opcode::PollAdd::new(event, libc::POLLIN as u32).build().user_data(WAKE);
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
