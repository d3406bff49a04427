//! Account of the log: what is dirty, on its way, and at the server, and who waits for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_model::{Ino, Sequence};
use parking_lot::{Condvar, Mutex};

use crate::host::caller::{process_of, started};
use crate::host::moment::Moment;

/// Why something cannot be made durable now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FlushError {
    /// The store is full, or the quota used up; everything is kept here and tried again.
    NoSpace,
    /// The store does not work at present; everything is kept here and tried again.
    Store(String),
    /// The caller gave up.
    Interrupted,
    /// The session is over.
    Ended(String),
    /// The server has ended the session, and what was not durable by then could not be applied: where it is kept.
    Lost(String),
    /// The server has ended the session, and another one begins.
    Replaced,
}

#[derive(Debug, Default)]
struct Account {
    /// When the oldest change was made that is in no cut.
    dirty_since: Option<Instant>,
    /// When the oldest change in the cut under way was made.
    shipping_since: Option<Instant>,
    /// Flushes asked for, and up to which of them the server has everything.
    asked: u64,
    arrived: u64,
    /// The next batch is to be answered when it is durable.
    wants_durable: bool,
    /// Up to which flush the last attempt went, and why it failed.
    failed: Option<(u64, FlushError)>,
    /// Flushes of changes that could not be applied: from, up to, and what has become of the changes.
    lost: Option<(u64, u64, Option<String>)>,
    /// The same, for who asks for everything next.
    untold: Option<String>,
    /// Inodes of which fsync has just told that something is lost.
    told: HashMap<Ino, Told>,
    kicked: bool,
    /// Somebody else waits for what was refused for want of room.
    pressed: bool,
    /// The committer is at work.
    busy: bool,
    stop: bool,
    stopped: bool,
    sequence: Sequence,
    durable_sequence: Sequence,
}

/// Who was told by fsync of an inode that something is lost.
#[derive(Debug)]
struct Told {
    /// When the first one was.
    at: Moment,
    /// Threads.
    to: Vec<u32>,
    /// Processes of these.
    processes: Vec<u32>,
    kept: String,
}

impl Told {
    fn add(&mut self, tid: u32) {
        self.to.push(tid);
        self.processes.extend(process_of(tid));
    }

    /// Whether a thread has to be told still.
    fn is_for(&self, tid: u32) -> bool {
        if self.at.elapsed() < BEHIND {
            // Threads of other PID namespaces are all the same one: there may be another one.
            let most = if tid == 0 { 2 } else { 1 };
            return self.to.iter().filter(|known| **known == tid).count() < most;
        }
        // Whether it has the file open since before is not known here.
        let is_new = |process: &u32| !self.processes.contains(process);
        process_of(tid).filter(is_new).and_then(started).is_some_and(|started| started < self.at)
    }
}

/// How soon an fsync of an inode comes that has waited in the kernel for one that was told of a loss.
const BEHIND: Duration = Duration::from_millis(200);
/// For how long, and of how many inodes, it is known who was told.
const TOLD_FOR: Duration = Duration::from_secs(600);
const TOLD_MAX: usize = 4096;

/// Account of the log: what is dirty, under way, and at the server.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    account: Mutex<Account>,
    /// Wakes the committer.
    work: Condvar,
    /// Wakes those who wait for what is shipped, or for room.
    progress: Condvar,
    dirty: AtomicBool,
    full: AtomicBool,
}

impl Ledger {
    /// Something has changed.
    pub(crate) fn touch(&self) {
        if !self.dirty.swap(true, Ordering::AcqRel) {
            self.account.lock().dirty_since.get_or_insert_with(Instant::now);
            self.work.notify_one();
        }
    }

    /// Ships what there is without waiting for its time.
    pub(crate) fn kick(&self) {
        let mut account = self.account.lock();
        if !account.kicked {
            account.kicked = true;
            self.work.notify_one();
        }
    }

    /// What was refused for want of room is tried again at once, and may take what is reserved: somebody else waits for
    /// it than its writer.
    pub(crate) fn press(&self) {
        self.account.lock().pressed = true;
        self.work.notify_one();
    }

    pub(crate) fn await_progress(&self, timeout: Duration) {
        let mut account = self.account.lock();
        self.progress.wait_for(&mut account, timeout);
    }

    pub(crate) fn durable_sequence(&self) -> Sequence {
        self.account.lock().durable_sequence
    }

    /// Whether the server refused the last batch for want of room.
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// Whether a batch is under way: the server's account of the usage may have it, or not.
    pub(crate) fn is_shipping(&self) -> bool {
        self.account.lock().shipping_since.is_some()
    }

    /// Age of the oldest change that the server is not known to have.
    pub(crate) fn oldest_age(&self) -> Duration {
        let account = self.account.lock();
        account.shipping_since.or(account.dirty_since).map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Somebody waits until everything up to now is durable.
    pub(crate) fn want_durable(&self) {
        self.account.lock().wants_durable = true;
    }

    /// Somebody asks for everything up to now: the number of that, for [`Ledger::flush_from`].
    pub(crate) fn ask(&self) -> u64 {
        let mut account = self.account.lock();
        account.asked += 1;
        account.asked
    }

    /// Waits until the server has everything up to now, or an attempt has failed.
    pub(crate) fn flush(&self, interrupt: Option<&Interrupt>) -> Result<(), FlushError> {
        self.flush_from(self.ask(), interrupt)
    }

    /// The same, up to when that was asked.
    pub(crate) fn flush_from(&self, ticket: u64, interrupt: Option<&Interrupt>) -> Result<(), FlushError> {
        let mut account = self.account.lock();
        account.kicked = true;
        self.work.notify_one();
        loop {
            if let Some((from, upto, kept)) = &account.lost
                // What becomes of it is not known yet: then everybody waits.
                && (*from < ticket && (kept.is_none() || ticket <= *upto))
            {
                if let Some(kept) = kept {
                    return Err(FlushError::Lost(kept.clone()));
                }
                self.progress.wait_for(&mut account, Duration::from_millis(100));
                continue;
            }
            if account.arrived >= ticket {
                return Ok(());
            }
            if let Some((upto, error)) = &account.failed
                && *upto >= ticket
            {
                return Err(error.clone());
            }
            if account.stopped {
                // Whoever asks later is told as well what has become of the changes.
                if let Some((_, error @ FlushError::Ended(_))) = &account.failed {
                    return Err(error.clone());
                }
                return Err(FlushError::Ended("the mount is closed".to_string()));
            }
            if interrupt.is_some_and(Interrupt::interrupted) {
                return Err(FlushError::Interrupted);
            }
            self.progress.wait_for(&mut account, Duration::from_millis(100));
        }
    }

    /// A thread is told that something is lost which fsync(2) of this inode was to make durable.
    pub(crate) fn told_of(&self, ino: Ino, tid: u32, kept: &str) {
        let mut account = self.account.lock();
        // What is lost later is told to everybody anew.
        account.told.retain(|of, told| told.at.elapsed() < if *of == ino { BEHIND } else { TOLD_FOR });
        if account.told.len() < TOLD_MAX {
            let new = || {
                let kept = kept.to_owned();
                Told { at: Moment::now(), to: Vec::new(), processes: Vec::new(), kept }
            };
            account.told.entry(ino).or_insert_with(new).add(tid);
        }
    }

    /// What others have been told of this inode, and this thread is now: just now (the kernel lets one fsync of an inode through at a time:
    /// this one may have been asked for before that was lost, and have waited there), or to another process than this thread's, which was
    /// there by then: what is lost may be what it had written by a descriptor of its own.
    pub(crate) fn told_before(&self, ino: Ino, tid: u32) -> Option<String> {
        let mut account = self.account.lock();
        if account.told.get(&ino)?.at.elapsed() >= TOLD_FOR {
            account.told.remove(&ino);
        }
        let told = account.told.get_mut(&ino).filter(|told| told.is_for(tid))?;
        told.add(tid);
        Some(told.kept.clone())
    }

    /// What has become of changes that could not be applied, if nobody has been told; it is told now.
    pub(crate) fn take_untold(&self) -> Option<String> {
        self.account.lock().untold.take()
    }

    /// Something is lost: whoever asks for everything next is told.
    pub(crate) fn tell_lost(&self, message: &str) {
        self.account.lock().untold = Some(message.to_string());
    }

    /// Whether a batch is being made, or under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.account.lock().busy
    }

    /// The session is over, and what it has not shipped, if there is anything, is about to be kept elsewhere: whoever
    /// waits for that waits until it is. Returns the last batch.
    pub(crate) fn lose(&self, is_lost: bool) -> Sequence {
        let mut account = self.account.lock();
        if is_lost {
            let from = match account.lost {
                // What another one has left is not kept yet.
                Some((from, _, None)) => from,
                _ => account.arrived,
            };
            account.lost = Some((from, account.asked, None));
            account.kicked = true;
            self.work.notify_one();
        }
        account.sequence
    }

    /// The server has it after all, by this batch.
    pub(crate) fn restored(&self, sequence: Sequence) {
        let mut account = self.account.lock();
        (account.sequence, account.durable_sequence) = (sequence, sequence);
        account.lost = None;
        self.progress.notify_all();
    }

    /// The number of the next batch.
    pub(crate) fn next_sequence(&self) -> Sequence {
        self.account.lock().sequence.next()
    }

    /// It is kept.
    pub(super) fn kept(&self, message: &str) {
        let mut account = self.account.lock();
        if let Some((_, _, kept)) = &mut account.lost {
            *kept = Some(message.to_string());
        }
        account.untold = Some(message.to_string());
        self.progress.notify_all();
    }

    /// The committer ends as soon as nothing is under way.
    pub(crate) fn stop(&self) {
        self.account.lock().stop = true;
        self.work.notify_one();
    }

    /// Waits before a refused batch is tried again, unless somebody else waits for it.
    pub(super) fn pause(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut account = self.account.lock();
        while !account.pressed && !account.stop && !self.work.wait_until(&mut account, until).timed_out() {}
    }

    /// Waits until there is something to ship; `None` to end.
    pub(super) fn await_work(&self, commit: Duration) -> Option<Work> {
        let mut account = self.account.lock();
        loop {
            if account.stop {
                account.stopped = true;
                self.progress.notify_all();
                return None;
            }
            let due = account.dirty_since.map(|since| since + commit);
            if account.kicked || account.pressed || due.is_some_and(|due| due <= Instant::now()) {
                (account.kicked, account.busy) = (false, true);
                let pressing = std::mem::take(&mut account.pressed);
                let durable = std::mem::take(&mut account.wants_durable);
                account.shipping_since = account.dirty_since.take();
                self.dirty.store(false, Ordering::Release);
                return Some(Work { ticket: account.asked, pressing, durable });
            }
            match due {
                Some(due) => drop(self.work.wait_until(&mut account, due)),
                None => self.work.wait(&mut account),
            }
        }
    }

    pub(super) fn succeeded(&self, ticket: u64, sequence: Option<Sequence>) {
        let mut account = self.account.lock();
        (account.arrived, account.busy) = (account.arrived.max(ticket), false);
        account.failed = None;
        account.pressed = false;
        account.shipping_since = None;
        if let Some(sequence) = sequence {
            account.sequence = sequence;
            account.durable_sequence = sequence;
        }
        self.full.store(false, Ordering::Relaxed);
        self.progress.notify_all();
    }

    /// What was refused goes out at once again, without what was set aside.
    pub(super) fn again(&self) {
        let mut account = self.account.lock();
        (account.pressed, account.busy) = (true, false);
        account.dirty_since = account.shipping_since.take().or(account.dirty_since);
        self.dirty.store(true, Ordering::Release);
    }

    /// Nothing was shipped, since another session begins: it is tried again with that one.
    pub(super) fn put_off(&self) {
        let mut account = self.account.lock();
        let since = account.shipping_since.take().or(account.dirty_since);
        account.dirty_since = since.or_else(|| Some(Instant::now()));
        (account.kicked, account.busy) = (true, false);
        self.dirty.store(true, Ordering::Release);
    }

    pub(super) fn failed(&self, ticket: u64, error: FlushError) {
        let mut account = self.account.lock();
        self.full.store(error == FlushError::NoSpace, Ordering::Relaxed);
        (account.failed, account.busy) = (Some((ticket, error)), false);
        let since = account.shipping_since.take().or(account.dirty_since);
        // Without a time nothing would ever be due.
        account.dirty_since = since.or_else(|| Some(Instant::now()));
        self.dirty.store(true, Ordering::Release);
        self.progress.notify_all();
    }
}

/// What is to be shipped.
pub(super) struct Work {
    /// Up to which flush it will be.
    pub(super) ticket: u64,
    /// Others wait for what was refused.
    pub(super) pressing: bool,
    /// Somebody waits until it is durable.
    pub(super) durable: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_after_a_loss_was_told_is_told_no_more() {
        let (ledger, ino) = (Ledger::default(), Ino(7));
        ledger.told_of(ino, 0, "kept");
        std::thread::sleep(BEHIND);
        // A program that comes, syncs and ends.
        let mut program = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(ledger.told_before(ino, program.id()), None);
        program.kill().unwrap();
        program.wait().unwrap();
        // One that was there before, by whatever thread of it.
        let own = std::process::id();
        assert_eq!(ledger.told_before(Ino(8), own), None, "nothing of that is lost");
        assert_eq!(ledger.told_before(ino, own).as_deref(), Some("kept"));
        assert_eq!(ledger.told_before(ino, own), None);
    }

    #[test]
    fn who_has_waited_is_told_whoever_it_is() {
        let (ledger, ino) = (Ledger::default(), Ino(7));
        ledger.told_of(ino, u32::MAX, "kept");
        assert!(ledger.told_before(ino, u32::MAX - 1).is_some());
        assert_eq!(ledger.told_before(ino, u32::MAX - 1), None);
    }
}
