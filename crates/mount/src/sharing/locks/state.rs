//! Who holds or wants locks on this host, and of what.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use hayloft_model::locks::{Family, Lock, Locks as Table, Owner};
use hayloft_model::{Ino, SessionId};

use crate::sharing::holders::{Alarm, FileId, OpenFiles, Process, Rang};
use crate::sharing::locks::Wanted;

/// A process that holds or wants locks of fcntl. The kernel's owner of these is the table of descriptors.
pub(super) struct Descriptors {
    /// Our number of it, never used again.
    pub(super) id: u64,
    /// More than one when processes share it (`CLONE_FILES`).
    pub(super) processes: Vec<Process>,
    pub(super) files: HashMap<Ino, Hold>,
}

/// A file that somebody holds or wants locks of.
pub(super) struct Hold {
    pub(super) file: FileId,
    /// The open files that were locked through.
    pub(super) open: OpenFiles,
    /// The descriptor of the last call.
    pub(super) fd: i32,
    /// Calls under way: no end is seen before they are answered.
    pub(super) pending: usize,
}

/// An open file that holds or wants locks.
pub(super) struct OpenFile {
    pub(super) id: u64,
    pub(super) hold: Hold,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) last_id: u64,
    pub(super) tables: HashMap<u64, Descriptors>,
    pub(super) open_files: HashMap<u64, OpenFile>,
    pub(super) watches: HashMap<Ino, i32>,
    /// Files whose holders are to be looked at: they were not while a call was pending.
    pub(super) unseen: HashSet<Ino>,
    /// What this session holds at the server.
    pub(super) held: Table,
    /// Files of which an end is being told to the server, and how many.
    pub(super) ending: HashMap<Ino, usize>,
    /// How often the held locks were claimed: an answer from before may be about a lock that is gone.
    pub(super) claims: u64,
    /// Files of which locks that are held here were lost with a session: others may have had them since.
    pub(super) lost: HashSet<Ino>,
}

/// Who a request is for: the number that the server knows, and where the kernel's end is kept.
#[derive(Clone, Copy)]
pub(super) struct Holder {
    pub(super) id: u64,
    pub(super) of_file: bool,
}

/// Which session this is does not matter in a table of its own.
pub(super) const OWN: SessionId = SessionId(0);

impl Holder {
    pub(super) fn owner(self) -> Owner {
        Owner { session: OWN, id: self.id }
    }
}

impl State {
    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn find(&self, wanted: &Wanted) -> Option<Holder> {
        if let Some(found) = self.open_files.get(&wanted.owner) {
            return Some(Holder { id: found.id, of_file: true });
        }
        self.tables.get(&wanted.owner).map(|found| Holder { id: found.id, of_file: false })
    }

    /// Makes the holder that `hold` finds.
    pub(super) fn enter(
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

    pub(super) fn hold(&mut self, wanted: &Wanted, holder: Holder) -> Option<&mut Hold> {
        if holder.of_file {
            self.open_files.get_mut(&wanted.owner).map(|open_file| &mut open_file.hold)
        } else {
            self.tables.get_mut(&wanted.owner)?.files.get_mut(&wanted.ino)
        }
    }

    /// Takes out what is held by some, one lock for each owner, family and file.
    pub(super) fn take_held(&mut self, of: impl Fn(&Lock) -> bool) -> Vec<Lock> {
        let mut over: Vec<Lock> = self.held.held().filter(|lock| of(lock)).copied().collect();
        over.sort_by_key(|lock| (lock.ino, lock.family, lock.owner));
        over.dedup_by_key(|lock| (lock.ino, lock.family, lock.owner));
        for lock in &over {
            self.held.release(lock.ino, lock.family, lock.owner);
            *self.ending.entry(lock.ino).or_default() += 1;
        }
        over
    }

    /// The files that an alarm is about.
    pub(super) fn rung_for(&mut self, rang: &Rang) -> HashSet<Ino> {
        let mut files = std::mem::take(&mut self.unseen);
        let is_closed = |watch: &i32| rang.any_closed || rang.closed.contains(watch);
        files.extend(self.watches.iter().filter(|(_, watch)| is_closed(watch)).map(|(ino, _)| *ino));
        if rang.ended {
            let ended = self.tables.values().filter(|table| table.processes.iter().any(Process::has_ended));
            files.extend(ended.flat_map(|table| table.files.keys()));
        }
        files
    }

    /// Takes out what those held who are gone, of some files or of all.
    pub(super) fn take_over(&mut self, files: Option<&HashSet<Ino>>, alarm: &Alarm) -> Vec<Lock> {
        let concerns =
            |hold: &Hold| hold.pending == 0 && files.is_none_or(|files| files.contains(&Ino(hold.file.ino)));
        let mut gone: HashSet<(u64, Ino)> = HashSet::new();
        for open_file in self.open_files.values().filter(|open_file| concerns(&open_file.hold)) {
            if !open_file.hold.open.any() {
                gone.insert((open_file.id, Ino(open_file.hold.file.ino)));
            }
        }
        for table in self.tables.values() {
            let ended = table.processes.iter().all(Process::has_ended);
            for hold in table.files.values().filter(|hold| concerns(hold)) {
                let has_open = |process: &Process| process.has_open(hold.file, hold.fd);
                if ended || !hold.open.any() || !table.processes.iter().any(has_open) {
                    gone.insert((table.id, Ino(hold.file.ino)));
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
    pub(super) fn drop_idle(&mut self, ino: Ino, alarm: &Alarm) {
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
