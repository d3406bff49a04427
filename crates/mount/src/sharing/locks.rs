//! Locks of flock(2) and fcntl(2) that hold on every host: the server decides, this host sees to it that they end
//! with their holders ([`crate::sharing::holders`]).

mod state;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_model::Ino;
use hayloft_model::locks::{Family, LAST_BYTE, Lock, Mode};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, LockAnswer, LockKind, LockMessage, LockRequest};
use parking_lot::{Condvar, Mutex};

use crate::session::link::{CallError, Link};
use crate::sharing::holders::{self, Alarm, Caller, FileId, Process};
use crate::sharing::locks::state::{Holder, State};

/// How often all holders are looked at while there are any.
const LOOK: Duration = Duration::from_millis(250);
/// The same where there are thousands.
const LOOK_AT_LEAST: Duration = Duration::from_secs(5);

/// When to look again after an alarm, milliseconds: it rings shortly before a file is closed for good.
const LOOK_AGAIN_MS: [i32; 4] = [1, 2, 5, 20];

/// Most requests that wait for a lock at a time. Each takes a thread, and one of the places of a core's queue, which
/// has to keep some for the requests that end the waiting.
pub(crate) const WAITS_MAX: usize = 900;

/// Why a lock is not to be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    /// Somebody else has it.
    #[error("somebody else holds it")]
    Held,
    /// Waiting for it would never end.
    #[error("it would deadlock")]
    Deadlock,
    /// The caller gave up.
    #[error("interrupted")]
    Interrupted,
    /// Nobody could tell when it ends, or too many wait.
    #[error("no lock can be kept for this program: {0}")]
    NoLocks(String),
    /// The session is over, or the server refused.
    #[error("{0}")]
    Failed(String),
    /// The host may only read the volume.
    #[error("{0}")]
    Denied(String),
}

impl From<CallError> for LockError {
    fn from(error: CallError) -> LockError {
        match error {
            CallError::Interrupted => LockError::Interrupted,
            CallError::Failed(failed) if failed.code() == FailureCode::Denied => {
                LockError::Denied(failed.message)
            }
            error => LockError::Failed(error.to_string()),
        }
    }
}

/// What a program asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) ino: Ino,
    /// As the kernel names the owner: an address in disguise, used again when what was there is gone.
    pub(crate) owner: u64,
    pub(crate) flock: bool,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// None: to give up.
    pub(crate) mode: Option<Mode>,
    /// The calling thread.
    pub(crate) tid: u32,
    /// Its process.
    pub(crate) pid: u32,
}

/// The locks of a mount.
pub(crate) struct Locks {
    link: Arc<Link>,
    /// A leaf: nothing is taken under it, and the server is not called.
    state: Mutex<State>,
    /// The server knows of an end.
    told: Condvar,
    alarm: Alarm,
    waiting: AtomicUsize,
    running: AtomicBool,
    ended: AtomicBool,
    /// Some file has lost locks.
    any_lost: AtomicBool,
}

impl Locks {
    pub(crate) fn new(link: Arc<Link>) -> std::io::Result<Locks> {
        Ok(Locks {
            link,
            state: Mutex::default(),
            told: Condvar::new(),
            alarm: Alarm::new()?,
            waiting: AtomicUsize::new(0),
            running: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            any_lost: AtomicBool::new(false),
        })
    }

    /// All locks that programs hold, to be claimed on a new connection.
    pub(crate) fn claims(&self) -> Vec<LockMessage> {
        let mut state = self.state.lock();
        state.claims += 1;
        let State { held, lost, .. } = &*state;
        held.held()
            .filter(|lock| !lost.contains(&lock.ino))
            .map(|lock| LockMessage::new(lock, LockKind::of(lock.mode)))
            .collect()
    }

    /// The session is over, and others may have had since what programs here believe to hold: their files are of no use
    /// until they have let go.
    pub(crate) fn lose_all(&self) {
        let mut state = self.state.lock();
        let files: Vec<Ino> = state.held.held().map(|lock| lock.ino).collect();
        state.lost.extend(files);
        self.any_lost.store(!state.lost.is_empty(), Ordering::Release);
        if !state.lost.is_empty() {
            tracing::warn!(
                files = state.lost.len(),
                "locks were lost: their files give errors until they are let go"
            );
        }
    }

    /// Whether programs hold locks of a file that were lost.
    pub(crate) fn is_lost(&self, ino: Ino) -> bool {
        self.any_lost.load(Ordering::Acquire) && self.state.lock().lost.contains(&ino)
    }

    /// The mount is gone: nobody looks after its locks any more.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.alarm.ring();
    }

    /// What would be in the way (F_GETLK).
    pub(crate) fn test(
        &self,
        wanted: &Wanted,
        interrupt: &Interrupt,
    ) -> Result<Option<LockMessage>, LockError> {
        let holder = {
            let mut state = self.state.lock();
            match state.find(wanted) {
                Some(holder) => holder,
                None => Holder { id: state.next_id(), of_file: false },
            }
        };
        let lock = wanted.lock(holder, wanted.mode.unwrap_or(Mode::Exclusive));
        let request = LockRequest {
            lock: Some(LockMessage::new(&lock, LockKind::of(lock.mode))),
            wait: false,
            test: true,
        };
        let answer = self.call(request, interrupt)?;
        if answer.conflict.is_some() && self.look_at_file(wanted.ino, interrupt) {
            return Ok(self.call(request, interrupt)?.conflict);
        }
        Ok(answer.conflict)
    }

    /// Gives up what the owner holds of a range. What it does not hold costs nothing.
    pub(crate) fn unset(&self, wanted: &Wanted, interrupt: &Interrupt) -> Result<(), LockError> {
        let holder = {
            let state = self.state.lock();
            match state.find(wanted) {
                Some(holder) if state.held.holds(wanted.ino, wanted.family(), holder.owner()) => holder,
                _ => return Ok(()),
            }
        };
        // What was stored through a map is written first, as by msync, so whoever locks next sees it: that is what the kernel does when
        // a descriptor is closed, be it a copy. Who closes its own, or ends, has done that.
        let unlocks = Caller::that_unlocks(wanted.tid);
        let written = match unlocks.map(|caller| caller.open_file()) {
            Some(Ok(copy)) => holders::close(copy),
            Some(Err(error)) => {
                tracing::warn!(pid = wanted.tid, ino = %wanted.ino, %error, "an unlock writes nothing that was stored through a map");
                Ok(())
            }
            None => Ok(()),
        };
        let asked = self.ask(wanted, holder, false, interrupt);
        if asked.is_ok() {
            self.state.lock().drop_idle(wanted.ino, &self.alarm);
        }
        // Nobody hears of it later.
        written.map_err(|error| {
            tracing::warn!(pid = wanted.tid, ino = %wanted.ino, %error, "what was stored through a map is not written at an unlock");
            LockError::Failed(error.to_string())
        })?;
        asked
    }

    /// Sets a lock. The caller waits in the system call for this; not to be called on a transport thread.
    pub(crate) fn set(
        self: &Arc<Self>,
        wanted: &Wanted,
        wait: bool,
        interrupt: &Interrupt,
    ) -> Result<(), LockError> {
        let holder = self.register(wanted)?;
        let result = self.set_for(wanted, holder, wait, interrupt);
        if matches!(result, Err(LockError::Interrupted)) && interrupt.abandoned() {
            // The server may have set it by now, and may be away.
            let (locks, lock) = (Arc::clone(self), wanted.lock(holder, Mode::Shared));
            let end = move || locks.tell_end(&lock);
            if let Err(error) = std::thread::Builder::new().name("hayloft-unlock".to_string()).spawn(end) {
                tracing::warn!(%error, "no thread to give up a lock whose caller was ended");
            }
        }
        let mut state = self.state.lock();
        if let Some(hold) = state.hold(wanted, holder) {
            hold.pending -= 1;
        }
        state.drop_idle(wanted.ino, &self.alarm);
        let is_used = !state.tables.is_empty() || !state.open_files.is_empty();
        if is_used {
            state.unseen.insert(wanted.ino);
        }
        drop(state);
        if is_used {
            self.start_looking();
            // What ended meanwhile was not looked at.
            self.alarm.ring();
        }
        result
    }

    fn set_for(
        &self,
        wanted: &Wanted,
        holder: Holder,
        wait: bool,
        interrupt: &Interrupt,
    ) -> Result<(), LockError> {
        match self.ask(wanted, holder, false, interrupt) {
            Err(LockError::Held) => {}
            done => return done,
        }
        // Perhaps whoever had it is gone, and we just have not seen it yet.
        if self.look_at_file(wanted.ino, interrupt) || wait {
            if !wait {
                return self.ask(wanted, holder, false, interrupt);
            }
            if self.waiting.fetch_add(1, Ordering::Relaxed) >= WAITS_MAX {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                return Err(LockError::NoLocks(format!("{WAITS_MAX} requests wait already")));
            }
            let result = self.ask(wanted, holder, true, interrupt);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return result;
        }
        Err(LockError::Held)
    }

    /// Asks the server, and notes what it did.
    fn ask(
        &self,
        wanted: &Wanted,
        holder: Holder,
        wait: bool,
        interrupt: &Interrupt,
    ) -> Result<(), LockError> {
        let lock = wanted.lock(holder, wanted.mode.unwrap_or(Mode::Shared));
        let kind = wanted.mode.map_or(LockKind::Unlock, LockKind::of);
        let request = LockRequest { lock: Some(LockMessage::new(&lock, kind)), wait, test: false };
        let mut gave_up = false;
        loop {
            let claims = {
                let mut state = self.state.lock();
                // What is being given up is claimed no more. This comes first: the next owner, of this host too, may
                // have its answer before we have ours. Changing a lock of flock gives up the old one, even in vain.
                let held = &mut state.held;
                let changes = |held: &&Lock| {
                    (held.ino, held.family, held.owner) == (lock.ino, lock.family, lock.owner)
                        && held.mode != lock.mode
                };
                if wanted.mode.is_none() || (wanted.flock && held.held().any(|other| changes(&other))) {
                    gave_up = true;
                    held.unset(&lock);
                }
                state.claims
            };
            let answer = self.call(request, interrupt)?;
            let mut state = self.state.lock();
            if state.claims != claims {
                // The server may have forgotten it since: it was not claimed.
                continue;
            }
            if answer.deadlock {
                return Err(LockError::Deadlock);
            }
            if let Some(conflict) = answer.conflict {
                drop(state);
                if conflict.ino != 0 {
                    return Err(LockError::Held);
                }
                // The request was given up, perhaps before the server had looked at it.
                if gave_up {
                    self.tell_end(&lock);
                }
                return Err(LockError::Interrupted);
            }
            if wanted.mode.is_some() {
                state.held.note(lock);
            }
            return Ok(());
        }
    }

    fn call(&self, request: LockRequest, interrupt: &Interrupt) -> Result<LockAnswer, LockError> {
        match self.link.call(Ask::Lock(request), Some(interrupt))?.pop() {
            Some(Answer::Locked(answer)) => Ok(answer),
            _ => Err(LockError::Failed("the server answered something else".to_owned())),
        }
    }

    /// Finds out who the caller is and keeps an eye on it, before anything is held for it.
    fn register(&self, wanted: &Wanted) -> Result<Holder, LockError> {
        let untold = |error: std::io::Error| {
            tracing::warn!(pid = wanted.tid, ino = %wanted.ino, %error, "cannot tell who asks for a lock");
            LockError::NoLocks(error.to_string())
        };
        if wanted.tid == 0 {
            return Err(untold(std::io::Error::other("a process of another PID namespace")));
        }
        let caller = Caller::of(wanted.tid).map_err(untold)?;
        let file = caller.open_file().map_err(untold)?;
        let id = FileId::of(&file).map_err(untold)?;
        if id.ino != wanted.ino.0 {
            return Err(untold(std::io::Error::other("its descriptor is of another file")));
        }
        let of_file = wanted.flock || caller.of_file;
        let process = if of_file { None } else { Some(Process::of(wanted.tid).map_err(untold)?) };
        let over = self.supersede(wanted, process.as_ref());
        over.into_iter().for_each(|lock| self.give_up(&lock));
        let mut state = self.state.lock();
        let holder = state.enter(wanted, process, of_file, &self.alarm).map_err(untold)?;
        let Some(hold) = state.hold(wanted, holder) else {
            return Err(untold(std::io::Error::other("nobody holds it")));
        };
        (hold.file, hold.fd) = (id, caller.fd);
        hold.pending += 1;
        if let Err(error) = hold.open.add(&file) {
            hold.pending -= 1;
            state.drop_idle(wanted.ino, &self.alarm);
            return Err(untold(error));
        }
        let is_watched = state.watches.contains_key(&wanted.ino);
        drop(state);
        // The kernel may ask us for the inode's attributes first: not under a lock. While a call is pending, nobody
        // takes the watch away.
        if !is_watched && let Some(watch) = self.alarm.watch_closes(&file) {
            self.state.lock().watches.insert(wanted.ino, watch);
        }
        // Closing a file may write out its pages, to us: not under a lock.
        drop(file);
        Ok(holder)
    }

    /// The kernel names owners by their addresses: one that is gone leaves its name to another one. Returns what
    /// the old one held.
    fn supersede(&self, wanted: &Wanted, process: Option<&Process>) -> Vec<Lock> {
        let mut state = self.state.lock();
        let mut over = Vec::new();
        if let Some(found) = state.open_files.get(&wanted.owner)
            && found.hold.pending == 0
            && (process.is_some() || !found.hold.open.any())
        {
            let id = found.id;
            state.open_files.remove(&wanted.owner);
            over.extend(state.take_held(|lock| lock.owner.id == id));
        }
        if let Some(found) = state.tables.get(&wanted.owner) {
            let is_same = process.is_some_and(|process| {
                let alive = |other: &&Process| !other.has_ended();
                let mut processes = found.processes.iter().filter(alive);
                processes.any(|other| {
                    other.pid == process.pid || holders::share_descriptors(other.pid, wanted.tid)
                })
            });
            if !is_same && found.files.values().all(|hold| hold.pending == 0) {
                let id = found.id;
                if let Some(old) = state.tables.remove(&wanted.owner) {
                    old.processes.iter().for_each(|process| self.alarm.forget_process(process));
                }
                over.extend(state.take_held(|lock| lock.owner.id == id));
            } else if let Some(hold) = found.files.get(&wanted.ino)
                && hold.pending == 0
                && !hold.open.any()
            {
                // The process has closed what it locked, and opened the file again.
                let id = found.id;
                over.extend(state.take_held(|lock| lock.owner.id == id && lock.ino == wanted.ino));
            }
        }
        over
    }

    /// Tells the server that a lock has ended. It is in no claim any more, and was noted by `take_held`.
    fn give_up(&self, lock: &Lock) {
        self.tell_end(lock);
        let mut state = self.state.lock();
        if let Some(count) = state.ending.get_mut(&lock.ino) {
            *count -= 1;
            if *count == 0 {
                state.ending.remove(&lock.ino);
                self.told.notify_all();
            }
        }
    }

    fn tell_end(&self, lock: &Lock) {
        let whole = Lock { start: 0, end: LAST_BYTE, ..*lock };
        let message = LockMessage::new(&whole, LockKind::Unlock);
        let request = LockRequest { lock: Some(message), wait: false, test: false };
        if let Err(error) = self.link.call(Ask::Lock(request), None) {
            tracing::debug!(ino = %lock.ino, %error, "a lock ends with the session");
        }
    }

    /// Looks whether holders of a file are gone; whether the server knows of an end now that it may not have known
    /// when it refused.
    fn look_at_file(&self, ino: Ino, interrupt: &Interrupt) -> bool {
        let mut found = self.look_at(&HashSet::from([ino]));
        // Another thread may have seen it, and not yet have told.
        let mut state = self.state.lock();
        while state.ending.contains_key(&ino) && !interrupt.interrupted() {
            found = true;
            self.told.wait_for(&mut state, Duration::from_millis(50));
        }
        found
    }

    /// Looks whether holders of some files are gone, and gives up what they held; whether there was something.
    fn look_at(&self, files: &HashSet<Ino>) -> bool {
        let over = self.state.lock().take_over(Some(files), &self.alarm);
        over.iter().for_each(|lock| self.give_up(lock));
        !over.is_empty()
    }

    fn start_looking(self: &Arc<Self>) {
        if self.running.swap(true, Ordering::AcqRel) {
            return;
        }
        let locks = Arc::clone(self);
        let spawned =
            std::thread::Builder::new().name("hayloft-locks".to_string()).spawn(move || locks.run());
        if let Err(error) = spawned {
            // The next lock tries again; until then they end when somebody is refused.
            tracing::error!(%error, "no thread to look after locks");
            self.running.store(false, Ordering::Release);
        }
    }

    /// Sleeps without a time limit when nobody holds anything. Of files that were closed, and those of processes that have ended, the holders
    /// are looked at at once, all of them from time to time.
    fn run(&self) {
        let mut next = Instant::now();
        while !self.ended.load(Ordering::Acquire) {
            let idle = {
                let state = self.state.lock();
                state.tables.is_empty() && state.open_files.is_empty()
            };
            let pause = next.saturating_duration_since(Instant::now());
            let mut files = self.wait(if idle { -1 } else { pause.as_millis() as i32 + 1 });
            self.look_at(&files);
            let again = if files.is_empty() { &[][..] } else { &LOOK_AGAIN_MS };
            for again_ms in again {
                files.extend(self.wait(*again_ms));
                self.look_at(&files);
            }
            let begun = Instant::now();
            if begun >= next {
                let over = self.state.lock().take_over(None, &self.alarm);
                // Thousands of locks are looked at less often: at most a twentieth of a core is for this, as long as that is often enough.
                next = begun + (begun.elapsed() * 20).clamp(LOOK, LOOK_AT_LEAST);
                over.iter().for_each(|lock| self.give_up(lock));
            }
        }
    }

    /// Waits until something is to be looked at; which files.
    fn wait(&self, timeout_ms: i32) -> HashSet<Ino> {
        let rang = self.alarm.wait(timeout_ms);
        self.state.lock().rung_for(&rang)
    }
}

impl Wanted {
    fn family(&self) -> Family {
        if self.flock { Family::Flock } else { Family::Posix }
    }

    fn lock(&self, holder: Holder, mode: Mode) -> Lock {
        let (family, owner) = (self.family(), holder.owner());
        let (start, end) = if self.flock { (0, LAST_BYTE) } else { (self.start, self.end.min(LAST_BYTE)) };
        Lock { ino: self.ino, family, owner, start, end, mode, pid: self.pid, of_file: holder.of_file }
    }
}
