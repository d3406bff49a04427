//! Locks of flock(2) and fcntl(2) that hold on every host: the server decides, this host sees to it that they end
//! with their holders ([`crate::sharing::holders`]).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_model::locks::{Family, LAST_BYTE, Lock, Locks as Table, Mode, Owner};
use hayloft_model::{Ino, SessionId};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{LockAnswer, LockKind, LockMessage, LockRequest};
use parking_lot::{Condvar, Mutex};

use crate::session::link::{CallError, Link};
use crate::sharing::holders::{self, Alarm, Caller, FileId, OpenFiles, Process};

/// How often all holders are looked at while there are any.
const LOOK: Duration = Duration::from_millis(250);

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
}

impl From<CallError> for LockError {
    fn from(error: CallError) -> LockError {
        match error {
            CallError::Interrupted => LockError::Interrupted,
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

/// A process that holds or wants locks of fcntl. The kernel's owner of these is the table of descriptors.
struct Descriptors {
    /// Our number of it, never used again.
    id: u64,
    /// More than one when processes share it (`CLONE_FILES`).
    processes: Vec<Process>,
    files: HashMap<Ino, Hold>,
}

/// A file that somebody holds or wants locks of.
struct Hold {
    file: FileId,
    /// The open files that were locked through.
    open: OpenFiles,
    /// The descriptor of the last call.
    fd: i32,
    /// Calls under way: no end is seen before they are answered.
    pending: usize,
}

/// An open file that holds or wants locks.
struct OpenFile {
    id: u64,
    hold: Hold,
}

#[derive(Default)]
struct State {
    last_id: u64,
    tables: HashMap<u64, Descriptors>,
    open_files: HashMap<u64, OpenFile>,
    watches: HashMap<Ino, i32>,
    /// What this session holds at the server.
    held: Table,
    /// Files of which an end is being told to the server, and how many.
    ending: HashMap<Ino, usize>,
    /// How often the held locks were claimed: an answer from before may be about a lock that is gone.
    claims: u64,
    /// Files of which locks that are held here were lost with a session: others may have had them since.
    lost: HashSet<Ino>,
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

/// Who a request is for: the number that the server knows, and where the kernel's end is kept.
#[derive(Clone, Copy)]
struct Holder {
    id: u64,
    of_file: bool,
}

/// Which session this is does not matter in a table of its own.
const OWN: SessionId = SessionId(0);

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
        self.ask(wanted, holder, false, interrupt)?;
        self.state.lock().drop_idle(wanted.ino, &self.alarm);
        Ok(())
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
        let mut found = self.look_at(Some(ino));
        // Another thread may have seen it, and not yet have told.
        let mut state = self.state.lock();
        while state.ending.contains_key(&ino) && !interrupt.interrupted() {
            found = true;
            self.told.wait_for(&mut state, Duration::from_millis(50));
        }
        found
    }

    /// Looks whether holders are gone, of one file or of all, and gives up what they held; whether there was
    /// something.
    fn look_at(&self, ino: Option<Ino>) -> bool {
        let over = self.state.lock().take_over(ino, &self.alarm);
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

    /// Sleeps without a time limit when nobody holds anything.
    fn run(&self) {
        let mut pause = LOOK;
        while !self.ended.load(Ordering::Acquire) {
            let idle = {
                let state = self.state.lock();
                state.tables.is_empty() && state.open_files.is_empty()
            };
            let rang = self.alarm.wait(if idle { -1 } else { pause.as_millis() as i32 });
            let begun = Instant::now();
            self.look_at(None);
            // Thousands of locks are looked at less often: at most a twentieth of a core is for this.
            pause = LOOK.max(begun.elapsed() * 20);
            for again_ms in LOOK_AGAIN_MS.into_iter().filter(|_| rang) {
                self.alarm.wait(again_ms);
                self.look_at(None);
            }
        }
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

impl Holder {
    fn owner(self) -> Owner {
        Owner { session: OWN, id: self.id }
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn find(&self, wanted: &Wanted) -> Option<Holder> {
        if let Some(found) = self.open_files.get(&wanted.owner) {
            return Some(Holder { id: found.id, of_file: true });
        }
        self.tables.get(&wanted.owner).map(|found| Holder { id: found.id, of_file: false })
    }

    /// Makes the holder that `hold` finds.
    fn enter(
        &mut self,
        wanted: &Wanted,
        process: Option<Process>,
        of_file: bool,
        alarm: &Alarm,
    ) -> std::io::Result<Holder> {
        let new_hold = || {
            let file = FileId::default();
            Ok::<_, std::io::Error>(Hold { file, open: OpenFiles::new()?, fd: -1, pending: 0 })
        };
        let id = match (self.tables.get(&wanted.owner), self.open_files.get(&wanted.owner)) {
            (Some(table), _) if !of_file => table.id,
            (_, Some(open_file)) if of_file => open_file.id,
            _ => self.next_id(),
        };
        match process {
            None => {
                if let Entry::Vacant(vacant) = self.open_files.entry(wanted.owner) {
                    vacant.insert(OpenFile { id, hold: new_hold()? });
                }
            }
            Some(process) => {
                let hold = new_hold()?;
                let fresh = || Descriptors { id, processes: Vec::new(), files: HashMap::new() };
                let table = self.tables.entry(wanted.owner).or_insert_with(fresh);
                if table.processes.iter().all(|other| other.pid != process.pid) {
                    alarm.watch_process(&process);
                    table.processes.push(process);
                }
                table.files.entry(wanted.ino).or_insert(hold);
            }
        }
        Ok(Holder { id, of_file })
    }

    fn hold(&mut self, wanted: &Wanted, holder: Holder) -> Option<&mut Hold> {
        if holder.of_file {
            self.open_files.get_mut(&wanted.owner).map(|open_file| &mut open_file.hold)
        } else {
            self.tables.get_mut(&wanted.owner)?.files.get_mut(&wanted.ino)
        }
    }

    /// Takes out what is held by some, one lock for each owner, family and file.
    fn take_held(&mut self, of: impl Fn(&Lock) -> bool) -> Vec<Lock> {
        let mut over: Vec<Lock> = self.held.held().filter(|lock| of(lock)).copied().collect();
        over.sort_by_key(|lock| (lock.ino, lock.family, lock.owner));
        over.dedup_by_key(|lock| (lock.ino, lock.family, lock.owner));
        for lock in &over {
            self.held.release(lock.ino, lock.family, lock.owner);
            *self.ending.entry(lock.ino).or_default() += 1;
        }
        over
    }

    /// Takes out what those held who are gone.
    fn take_over(&mut self, ino: Option<Ino>, alarm: &Alarm) -> Vec<Lock> {
        let concerns = |hold: &Hold| hold.pending == 0 && ino.is_none_or(|ino| ino.0 == hold.file.ino);
        let mut gone: Vec<(u64, Ino)> = Vec::new();
        for open_file in self.open_files.values().filter(|open_file| concerns(&open_file.hold)) {
            if !open_file.hold.open.any() {
                gone.push((open_file.id, Ino(open_file.hold.file.ino)));
            }
        }
        for table in self.tables.values() {
            let ended = table.processes.iter().all(Process::has_ended);
            for hold in table.files.values().filter(|hold| concerns(hold)) {
                let has_open = |process: &Process| process.has_open(hold.file, hold.fd);
                if ended || !hold.open.any() || !table.processes.iter().any(has_open) {
                    gone.push((table.id, Ino(hold.file.ino)));
                }
            }
        }
        for table in self.tables.values_mut().filter(|table| table.processes.len() > 1) {
            // Of processes that share their descriptors, the last one counts.
            let some_left = table.processes.iter().any(|process| !process.has_ended());
            table.processes.retain(|process| {
                let stays = !some_left || !process.has_ended();
                if !stays {
                    alarm.forget_process(process);
                }
                stays
            });
        }
        if gone.is_empty() {
            return Vec::new();
        }
        let over = self.take_held(|lock| gone.contains(&(lock.owner.id, lock.ino)));
        let mut files: Vec<Ino> = gone.iter().map(|(_, ino)| *ino).collect();
        files.sort_unstable();
        files.dedup();
        files.into_iter().for_each(|ino| self.drop_idle(ino, alarm));
        over
    }

    /// Forgets whoever holds nothing of a file and has no call under way.
    fn drop_idle(&mut self, ino: Ino, alarm: &Alarm) {
        let State { held, open_files, tables, watches, lost, .. } = self;
        if lost.contains(&ino) && !held.held().any(|lock| lock.ino == ino) {
            lost.remove(&ino);
        }
        let holds = |id: u64| {
            let owner = Owner { session: OWN, id };
            held.holds(ino, Family::Posix, owner) || held.holds(ino, Family::Flock, owner)
        };
        open_files.retain(|_, of| of.hold.file.ino != ino.0 || of.hold.pending > 0 || holds(of.id));
        let mut used = open_files.values().any(|of| of.hold.file.ino == ino.0);
        tables.retain(|_, table| {
            if let Some(hold) = table.files.get(&ino) {
                if hold.pending > 0 || holds(table.id) {
                    used = true;
                } else {
                    table.files.remove(&ino);
                }
            }
            if table.files.is_empty() {
                table.processes.iter().for_each(|process| alarm.forget_process(process));
            }
            !table.files.is_empty()
        });
        if !used && let Some(watch) = watches.remove(&ino) {
            alarm.unwatch_closes(watch);
        }
    }
}
