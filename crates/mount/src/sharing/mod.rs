//! Sharing the volume with other hosts: what they change, what they need, and what is asked of the server for it.
//! The rules are in `docs/sharing.md`.

pub(crate) mod abandoned;
pub(crate) mod ahead;
pub(crate) mod appends;
pub(crate) mod contents;
pub(crate) mod fault;
pub(crate) mod holders;
pub(crate) mod locks;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_model::grants::Object;
use hayloft_model::tree::Stale;
use hayloft_model::{Change, FileKind, Ino, Name, Record, Sequence, TreeError};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::event::Body as Told;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Ack, Acquire, Apply, ChangeRequest, Claim, Entry, Event, GiveBack, InvalidMessage, LetGo, ObjectMessage,
    Release, Welcome, error_of,
};

use crate::core::{Client, Core};
use crate::kernel::Word;
use crate::kernel::foreword::Announced;
use crate::log::committer::FlushError;
use crate::session::link::{Arrival, CallError, Line, Receiver as LinkReceiver};
use crate::sharing::fault::FaultError;

/// How long to wait before a log that cannot be shipped is tried again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long to wait for writes under way to reach the tree.
const WRITES_PAUSE: Duration = Duration::from_micros(50);

/// An object that somebody else needs.
#[derive(Debug)]
pub(crate) struct Recalled {
    connection: u64,
    event: u64,
    object: Object,
    keep_read: bool,
}

/// An event that the kernel need not be told of any more.
#[derive(Debug)]
pub(crate) struct Heard {
    /// Connection and event.
    ack: (u64, u64),
    /// For the acknowledgement.
    in_use: Vec<Ino>,
}

/// Events, and inodes in use, that are acknowledged in one message: more may not fit into what the connection takes at once.
const TOGETHER_MAX: usize = 512;
/// How many files a message says to give back.
const RELEASE_AT_ONCE: usize = 4096;
/// How long what is recalled is kept for calls that have waited for it, and how often these are looked at.
const USE_PATIENCE: Duration = Duration::from_millis(50);
const USE_PAUSE: Duration = Duration::from_micros(200);

/// What the server made of a change.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It did it; with the inode that was made.
    Done(Option<Ino>),
    /// The directories are owned now: do it here.
    Yours,
    /// It refused.
    Refused(TreeError),
}

impl LinkReceiver for Client {
    fn receive(&self, at: Arrival, body: Answer) {
        let received = match body {
            Answer::Event(event) => self.receive_event(at.connection, event),
            Answer::Listings(listings) => self.receive_listings(at.request, listings, at.mark),
            Answer::Inode(answer) => self.receive_inode(&answer, at.mark),
            _ => Ok(()),
        };
        if let Err(error) = received {
            tracing::error!(%error, "the server said something without sense; connecting anew");
            self.link.abandon(at.connection);
        }
    }

    fn received_all(&self, connection: u64) {
        self.acknowledge_heard(connection);
    }

    fn lost(&self) {
        self.partial.lock().clear();
        let mut core = self.core();
        core.own_given();
        core.note_ways();
        let mut stale = core.tree.uncover_all();
        self.drop_data(&mut core, &stale);
        stale.in_use.clear();
        let mut names = core.take_all_names(std::mem::take(&mut stale.names));
        if !core.names.epochs {
            // Such a kernel keeps names only of what is owned.
            names.clear();
        }
        let word = core.word(stale, names, None);
        drop(core);
        self.tell_kernel(word);
        self.await_heard();
    }

    fn renew(&self, last: Sequence) -> Claim {
        let mut core = self.core();
        core.shipped(last);
        core.own_given();
        let own = core.tree.owned().into_iter().map(ObjectMessage::from).collect();
        let in_use = core.tree.in_use().map(|ino| ino.0).collect();
        drop(core);
        let locks = self.locks.get().map(|locks| locks.claims()).unwrap_or_default();
        Claim { own, in_use, locks, entries: Vec::new() }
    }

    fn resumed(&self) {
        self.let_go();
    }

    fn replace(&self, reason: &str) -> Sequence {
        self.leave_session(reason)
    }

    fn lose(&self, session: u64, entries: &[Entry]) -> Option<String> {
        self.lose_accepted(session, entries)
    }

    fn begun(&self, welcome: &Welcome) {
        self.begin_session(welcome);
    }

    fn restore(&self, line: &mut Line<'_>) -> Result<(), CallError> {
        self.restore_unsent(line)
    }

    fn ended(&self) {
        // What is left is kept now, not when it would have been shipped.
        self.ledger.kick();
    }

    fn lapse(&self) {
        self.tell_kernel(Word::Everything);
    }
}

impl Client {
    pub(crate) fn tell_kernel(&self, word: Word) {
        // The other end is there as long as the mount.
        let _ = self.words.send(word);
    }

    /// Data of files that have changed elsewhere leaves memory.
    fn drop_data(&self, core: &mut Core, stale: &Stale) {
        stale.data.iter().for_each(|ino| self.drop_file(core, *ino));
    }

    fn receive_event(&self, connection: u64, event: Event) -> Result<(), FaultError> {
        let ack = (connection, event.number);
        match event.body {
            Some(Told::Apply(apply)) => self.apply(ack, &apply),
            Some(Told::Drop(drop)) => {
                let inos: Vec<Ino> = drop.inos.into_iter().map(Ino).collect();
                let mut core = self.core();
                let stale = core.tree.drop_rows(&inos);
                self.finish_event(core, stale, Vec::new(), ack);
                Ok(())
            }
            Some(Told::Recall(recall)) => {
                let object = Object::try_from(&recall.object.unwrap_or_default())?;
                let recalled =
                    Recalled { connection, event: event.number, object, keep_read: recall.keep_read };
                self.stats.recalls.add(1);
                let _ = self.recalls.send(recalled);
                Ok(())
            }
            None => Err(FaultError::Broken("an unknown event".to_string())),
        }
    }

    fn apply(&self, ack: (u64, u64), apply: &Apply) -> Result<(), FaultError> {
        let records: Vec<Record> =
            apply.records.iter().map(Record::try_from).collect::<Result<_, InvalidMessage>>()?;
        let own: Vec<Object> =
            apply.own.iter().map(Object::try_from).collect::<Result<_, InvalidMessage>>()?;
        let forget: Vec<Ino> = apply.forget.iter().copied().map(Ino).collect();
        self.stats.events_applied.add(1);
        self.others_changed.store(true, Ordering::Relaxed);
        // A call of this host has the locks, and others wait for that in the kernel.
        let announced = if apply.asked { Announced::default() } else { self.announce(ack.0, &records) };
        let mut core = self.core();
        core.names.changing.end();
        if !apply.asked {
            core.note_taken(&records);
        }
        let mut stale = core.tree.apply(&records, &own, &forget);
        core.seen = ack;
        announced.shorten(&mut stale);
        // What a rename leaves in its place is not handed out.
        let is_whiteout = |ino: Ino| {
            records.iter().any(|record| match record {
                Record::PutInode(of, row) => {
                    *of == ino && row.kind() == FileKind::CharDevice && row.rdev == 0
                }
                _ => false,
            })
        };
        for object in own.iter().filter(|object| apply.asked && !is_whiteout(object.ino())) {
            if core.made.insert(object.ino()) {
                core.tree.remember(object.ino());
            }
        }
        for object in &own {
            if let Object::Directory(dir) = object {
                core.names.cool(*dir);
            }
        }
        // The kernel makes by itself what it has asked for, unless the caller was ended meanwhile.
        if apply.asked && self.abandoned.load(Ordering::Acquire) == 0 {
            self.drop_data(&mut core, &stale);
            // The kernel drops names and data of its own changes by itself, and attributes; but not for calls of others
            // whose answers are on their way.
            let Stale { attributes, in_use, .. } = stale;
            let stale = Stale { attributes, in_use, ..Stale::default() };
            self.finish_event(core, stale, Vec::new(), ack);
        } else {
            self.finish_event(core, stale, announced.left, ack);
        }
        Ok(())
    }

    /// `more`: names that the kernel has to let go of as well.
    fn finish_event(
        &self,
        mut core: parking_lot::MutexGuard<'_, Core>,
        mut stale: Stale,
        more: Vec<(Ino, Name)>,
        ack: (u64, u64),
    ) {
        self.drop_data(&mut core, &stale);
        let dirs = core.take_directories(&mut stale.attributes);
        let mut word = core.word(stale, more, Some(ack));
        drop(core);
        let Word::Stale { names, attributes, data, in_use, .. } = &mut word else { return };
        // A directory has nothing to write back, which the kernel may wait for when it is on its way out.
        attributes.extend(dirs.into_iter().filter(|dir| !self.drop_attributes(&[*dir])));
        if names.is_empty() && attributes.is_empty() && data.is_empty() {
            let in_use = std::mem::take(in_use);
            self.heard.lock().push(Heard { ack, in_use });
        } else {
            self.tell_kernel(word);
        }
    }

    /// Tells of inodes that are not in use any more, of which the server was told that they are.
    pub(crate) fn let_go(&self) {
        // In the order of the stream: an acknowledgement may say that one of them is in use.
        let _order = self.uses_told.lock();
        let Some(connection) = self.link.connected() else { return };
        let inos = {
            let mut core = self.core();
            if core.in_flight {
                // The batch on its way may say so too.
                return;
            }
            let mut inos = core.tree.take_released();
            let used: HashSet<Ino> = core.tree.in_use().collect();
            inos.retain(|ino| !used.contains(ino));
            inos
        };
        if !inos.is_empty() {
            let inos = inos.into_iter().map(|ino| ino.0).collect();
            // When the connection breaks, the claim of the next one says it.
            let _ = self.link.send_on(connection, Ask::LetGo(LetGo { inos }));
        }
    }

    /// Gives files that are owned by themselves back, so that their rows can leave memory: the server recalls them.
    pub(crate) fn release(&self, files: Vec<Ino>) {
        let Some(connection) = self.link.connected() else { return };
        for some in files.chunks(RELEASE_AT_ONCE) {
            let inos = some.iter().map(|ino| ino.0).collect();
            // What a lost connection has not carried is asked for again.
            let _ = self.link.send_on(connection, Ask::Release(Release { inos }));
        }
    }

    /// Acknowledges an event, with those of these inodes that are in use still.
    pub(crate) fn acknowledge(&self, (connection, event): (u64, u64), in_use: Vec<Ino>) {
        let _order = self.uses_told.lock();
        let in_use = self.used_still(in_use);
        self.link.acknowledge(connection, Ack { events: vec![event], in_use });
    }

    fn used_still(&self, inos: Vec<Ino>) -> Vec<u64> {
        if inos.is_empty() {
            return Vec::new();
        }
        let used: HashSet<Ino> = self.core().tree.in_use().collect();
        inos.into_iter().filter(|ino| used.contains(ino)).map(|ino| ino.0).collect()
    }

    /// Acknowledges events of this connection that the kernel has heard of. This is for the thread that reads the stream,
    /// which waits for nobody: who cannot be spoken to at once is told by the one that speaks to the kernel.
    pub(crate) fn acknowledge_heard(&self, connection: u64) {
        let mut heard = std::mem::take(&mut *self.heard.lock());
        heard.retain(|heard| heard.ack.0 == connection);
        if heard.is_empty() {
            return;
        }
        let in_use: Vec<Ino> = heard.iter().flat_map(|heard| heard.in_use.clone()).collect();
        if heard.len() + in_use.len() <= TOGETHER_MAX
            && let Some(_order) = self.uses_told.try_lock()
        {
            let events = heard.iter().map(|heard| heard.ack.1).collect();
            let in_use = self.used_still(in_use);
            if self.link.try_acknowledge(connection, Ack { events, in_use }) {
                return;
            }
        }
        for Heard { ack, in_use } in heard {
            let (attributes, data) = (Vec::new(), Vec::new());
            self.tell_kernel(Word::Stale { names: Vec::new(), attributes, data, in_use, ack: Some(ack) });
        }
    }

    /// Wants to own an object. Returns whether it is owned; else others use it too.
    pub(crate) fn acquire(&self, object: Object, interrupt: Option<&Interrupt>) -> Result<bool, FaultError> {
        let ask = Ask::Acquire(Acquire { object: Some(object.into()) });
        match self.ask(ask, interrupt)?.into_iter().next() {
            Some(Answer::Acquired(acquired)) => Ok(acquired.owned),
            _ => Err(FaultError::Broken("the server's answer is of another kind than asked for".to_string())),
        }
    }

    /// Has the server execute a change. Its names are handed to the kernel for one use from now on.
    pub(crate) fn change(
        self: &Arc<Self>,
        change: &Change,
        execute: bool,
        interrupt: &Interrupt,
    ) -> Result<Outcome, FaultError> {
        let durable = self.durable();
        let known_there = {
            let mut core = self.core();
            change.directories().into_iter().for_each(|dir| core.heat(dir));
            if let Change::Rename(from, to, flags) = change {
                core.names.moves((from.0, &from.1), (to.0, &to.1), flags.exchange);
            }
            let mut named = Vec::new();
            for (dir, name) in change.places() {
                if let Ok(Some(dentry)) = core.tree.lookup(dir, name.as_bytes()) {
                    named.push(dentry.ino);
                    if dentry.kind == FileKind::Directory {
                        core.spare(dentry.ino);
                    }
                }
            }
            let mut all = change.directories().into_iter().chain(change.inode()).chain(named);
            let known_there = all.all(|ino| core.tree.is_stored(ino, durable));
            // A file without a name goes to the server only when it must.
            self.room_wanted.fetch_or(!known_there, Ordering::Relaxed);
            // What is durable is in the order in which it was done.
            known_there && !core.tree.is_dirty() && !core.in_flight
        };
        if !known_there {
            self.ship_before(interrupt)?;
        }
        self.give_back(change);
        let operation = Some(change.into());
        let ask = Ask::Change(ChangeRequest { forget_below: 0, execute, operation });
        let number = self.link.begin_change();
        let answers = self.ask_change(&ask, number, Some(interrupt));
        if let Err(FaultError::Interrupted) = answers {
            self.take_over(change.clone(), ask, number);
            return Err(FaultError::Interrupted);
        }
        self.link.end_change(number);
        match answers?.into_iter().next() {
            Some(Answer::Changed(changed)) if changed.error != 0 => {
                Ok(Outcome::Refused(error_of(changed.error)?))
            }
            Some(Answer::Changed(changed)) if changed.yours => Ok(Outcome::Yours),
            Some(Answer::Changed(changed)) => {
                // Rows of what is made by request take memory that nothing else looks at: it comes with no listing, and an
                // empty file has no data.
                self.trim();
                Ok(Outcome::Done((changed.ino != 0).then_some(Ino(changed.ino))))
            }
            _ => Err(FaultError::Broken("the server's answer is of another kind than asked for".to_string())),
        }
    }

    /// Gives back the files that a change is about and that are owned by themselves, if all of them is stored: the server
    /// would recall them.
    fn give_back(&self, change: &Change) {
        let Some(connection) = self.link.connected() else { return };
        let durable = self.durable();
        // From looking until it is said nobody here changes one, or asks for it anew.
        let mut core = self.core();
        let named = change.places().into_iter().filter_map(|(dir, name)| {
            core.tree.lookup(dir, name.as_bytes()).ok().flatten().map(|dentry| dentry.ino)
        });
        let mut files: Vec<Ino> = change.inode().into_iter().chain(named).collect();
        files.retain(|ino| core.may_give_back(*ino, durable));
        let (of, event) = core.seen;
        if files.is_empty() || of != connection {
            return;
        }
        let inos = files.iter().map(|ino| ino.0).collect();
        if self.link.try_send_on(connection, Ask::GiveBack(GiveBack { inos, seen: event })) == Some(true) {
            files.into_iter().for_each(|ino| core.tree.disown(ino));
        }
    }

    /// Ships what was changed before a change that the server is asked for.
    fn ship_before(&self, interrupt: &Interrupt) -> Result<(), FaultError> {
        let mut pressed = false;
        loop {
            match self.ledger.flush(Some(interrupt)) {
                Ok(()) => return Ok(()),
                // Whoever changes something else, perhaps to make room, is not the one who has to wait for it.
                Err(FlushError::NoSpace) if !pressed => {
                    pressed = true;
                    self.ledger.press();
                }
                Err(FlushError::NoSpace) => return Err(FaultError::NoSpace),
                Err(FlushError::Interrupted) => return Err(FaultError::Interrupted),
                Err(FlushError::Ended(reason) | FlushError::Lost(reason)) => {
                    return Err(FaultError::Ended(reason));
                }
                Err(FlushError::Replaced) => {}
                Err(FlushError::Store(reason)) => {
                    tracing::warn!(reason, "a change waits for others that cannot be shipped yet");
                    if interrupt.wait_timeout(AGAIN) {
                        return Err(FaultError::Interrupted);
                    }
                }
            }
        }
    }

    /// Waits until writes that were admitted while the object was owned are in the tree.
    fn await_writes(&self, object: Object) {
        let is_written = |file: &Arc<crate::cache::data::File>| file.writes.load(Ordering::Acquire) > 0;
        let files: Vec<Arc<crate::cache::data::File>> = {
            let core = self.core();
            match object {
                Object::File { ino, .. } => {
                    core.files.get(&ino).filter(|file| is_written(file)).cloned().into_iter().collect()
                }
                Object::Directory(dir) => {
                    let at_home = |ino: &Ino| core.tree.inode(*ino).is_ok_and(|row| row.parent == dir);
                    let of_object = core.files.iter().filter(|(ino, file)| is_written(file) && at_home(ino));
                    of_object.map(|(_, file)| Arc::clone(file)).collect()
                }
            }
        };
        for file in files {
            while is_written(&file) {
                std::thread::sleep(WRITES_PAUSE);
            }
        }
    }

    /// Ships whatever was changed so far, however long that takes. `false`: the session is over.
    fn ship_all(&self) -> bool {
        {
            let core = self.core();
            if !core.tree.is_dirty() && !core.in_flight {
                return true;
            }
        }
        let mut pressed = false;
        loop {
            match self.ledger.flush(None) {
                Ok(()) => return true,
                Err(FlushError::Ended(_)) => return false,
                Err(FlushError::NoSpace) if !pressed => {
                    pressed = true;
                    self.ledger.press();
                }
                // What could not be applied is not in anybody's way.
                Err(FlushError::Lost(_) | FlushError::Replaced) => {}
                Err(error) => {
                    tracing::warn!(?error, "another host waits for changes that cannot be shipped yet");
                    pressed = false;
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// Gives back what is recalled, but that which an append has begun in meanwhile: that is returned.
    fn give_way(&self, free: Vec<(Recalled, Instant)>) -> Vec<(Recalled, Instant)> {
        self.expire_before(&free);
        let mut core = self.core();
        let (kept, recalled): (Vec<_>, Vec<_>) =
            free.into_iter().partition(|(recalled, _)| core.is_appending(recalled.object));
        for (recalled, _) in &recalled {
            let ino = recalled.object.ino();
            if core.tree.owns_itself(ino) {
                core.giving.insert(ino);
                core.tree.disown(ino);
            }
        }
        drop(core);
        recalled.iter().for_each(|(recalled, _)| self.await_writes(recalled.object));
        if !self.ship_all() {
            return kept;
        }
        for (Recalled { connection, event, object, keep_read }, _) in &recalled {
            let mut core = self.core();
            let ino = object.ino();
            core.giving.remove(&ino);
            // Owned again: there is another connection.
            let is_held = *keep_read || core.tree.owns_itself(ino);
            let (mut stale, names) = if is_held {
                (Stale::default(), Vec::new())
            } else {
                core.note_uncovered(*object);
                let mut stale = core.tree.uncover(*object);
                let names = std::mem::take(&mut stale.names);
                // A call that has the lock may wait until others have the directory: no name is waited for without need.
                (stale, core.take_names(ino, names))
            };
            if !stale.in_use.contains(&ino) {
                // Without a name: whether it stays is the server's business from now on.
                stale.in_use.push(ino);
            }
            self.drop_data(&mut core, &stale);
            let word = core.word(stale, names, Some((*connection, *event)));
            drop(core);
            match word {
                // Else what was said before has to be heard first: from then on others change the names without a word.
                Word::Stale { names, attributes, data, in_use, ack: Some(ack) }
                    if is_held && names.is_empty() && attributes.is_empty() && data.is_empty() =>
                {
                    self.acknowledge(ack, in_use);
                }
                word => self.tell_kernel(word),
            }
        }
        kept
    }

    /// Names that the kernel keeps only go with their directory's lock: as long as the directory is held nobody has that and
    /// waits for others.
    fn expire_before(&self, free: &[(Recalled, Instant)]) {
        let mut names: Vec<(Ino, Name)> = Vec::new();
        let mut core = self.core();
        for (recalled, _) in free {
            if let Object::Directory(dir) = recalled.object {
                names.extend(core.warm(dir));
            }
        }
        let names = core.nodes.each_name(names);
        drop(core);
        if !names.is_empty() {
            self.expire_now(names);
        }
    }

    /// Waits until the kernel has dropped these names.
    fn expire_now(&self, names: Vec<(Ino, Name)>) {
        let (done, wait) = std::sync::mpsc::channel();
        self.tell_kernel(Word::ExpireNow(names, done));
        // The other end is dropped then.
        let _ = wait.recv();
    }

    /// Waits until the kernel has heard everything that it was told.
    pub(crate) fn await_heard(&self) {
        let (done, wait) = std::sync::mpsc::channel();
        self.tell_kernel(Word::Heard(done));
        let _ = wait.recv();
    }
}

/// Gives way to others, until the mount is gone.
pub(crate) fn run(client: &Client, recalls: &Receiver<Recalled>) {
    let mut waiting: Vec<(Recalled, Instant)> = Vec::new();
    loop {
        let first = if waiting.is_empty() {
            recalls.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            recalls.recv_timeout(USE_PAUSE)
        };
        match first {
            Ok(first) => waiting.push((first, Instant::now())),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        waiting.extend(recalls.try_iter().map(|recalled| (recalled, Instant::now())));
        if waiting.iter().any(|(recalled, _)| recalled.connection == 0) {
            return;
        }
        // Calls that have waited for it are done first: else hosts could take it from each other for ever.
        let (used, free): (Vec<_>, Vec<_>) = {
            let mut core = client.core();
            core.appending.retain(|_, append| append.goes_on());
            let wanted = client.wanted.lock();
            waiting.into_iter().partition(|(recalled, since)| {
                let is_wanted = |ino: &Ino| wanted.contains_key(ino) && since.elapsed() < USE_PATIENCE;
                core.is_appending(recalled.object) || core.covered_by(recalled.object, |ino| is_wanted(&ino))
            })
        };
        waiting = used;
        if !free.is_empty() {
            waiting.extend(client.give_way(free));
        }
    }
}

impl Recalled {
    /// The mark that ends the thread.
    pub(crate) fn end() -> Recalled {
        Recalled { connection: 0, event: 0, object: Object::Directory(Ino::ROOT), keep_read: true }
    }
}
