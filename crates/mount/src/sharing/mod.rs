//! Sharing the volume with other hosts: what they change, what they need, and what is asked of the server for it.
//! The rules are in `docs/sharing.md`.

pub(crate) mod abandoned;
pub(crate) mod ahead;
pub(crate) mod appends;
pub(crate) mod change;
pub(crate) mod contents;
pub(crate) mod fault;
pub(crate) mod heard;
pub(crate) mod holders;
pub(crate) mod kept;
pub(crate) mod locks;
pub(crate) mod quiet;
pub(crate) mod recalls;

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use hayloft_fuse::Interrupt;
use hayloft_model::grants::Object;
use hayloft_model::tree::Stale;
use hayloft_model::{FileKind, Ino, Name, Record, Sequence};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::event::Body as Told;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Ack, Acquire, Apply, Claim, Entry, Event, Failed, InvalidMessage, LetGo, ObjectMessage, Release, Welcome,
};

use crate::cache::data::Base;
use crate::core::{Client, Core, CoreGuard};
use crate::kernel::Word;
use crate::kernel::bases::LEFT_MAX;
use crate::kernel::foreword::Announced;
use crate::session::link::{Arrival, CallError, Line, Receiver as LinkReceiver};
use crate::sharing::fault::FaultError;
use crate::sharing::recalls::{Recalled, Wanted};

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

impl LinkReceiver for Client {
    fn receive(&self, at: Arrival, body: Answer) {
        let received = match body {
            Answer::Event(event) => self.receive_event(at.connection, event),
            Answer::Listings(listings) => self.receive_listings(at.request, listings, at.mark),
            Answer::Inode(answer) => self.receive_inode(&answer, at.mark),
            Answer::Ship(ship) => {
                let _ = self.recalls.send(Wanted::All { connection: at.connection, number: ship.number });
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = received {
            tracing::error!(%error, "the server said something without sense; connecting anew");
            self.link.abandon(at.connection);
        }
    }

    fn all_heard(&self, changes: &[u64]) {
        self.core().tree.heard(changes);
    }

    fn nameless(&self, inos: &[u64]) {
        let numbers = {
            let core = self.core();
            let known = inos.iter().map(|ino| Ino(*ino)).filter(|ino| core.is_handed_out(*ino));
            core.nodes.each(known.collect())
        };
        if !numbers.is_empty() {
            self.tell_kernel(Word::Nameless(numbers));
        }
    }

    fn received_all(&self, connection: u64) {
        self.acknowledge_heard(connection);
    }

    fn tick(&self) {
        self.give_back_quiet();
    }

    fn lost(&self, connection: u64) {
        self.partial.lock().clear();
        let mut core = self.core();
        core.cut_off = connection;
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

    fn replace(&self, failed: &Failed) -> Sequence {
        self.leave_session(failed)
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
    pub(crate) fn drop_data(&self, core: &mut Core, stale: &Stale) {
        for was in &stale.files {
            if !core.is_handed_out(was.ino) {
                continue;
            }
            if self.lookers.can_look() {
                core.sizes.changes(was.ino, was.size);
            }
            if !was.content.is_empty() && !core.files.contains_key(&was.ino) {
                core.bases.left(was.ino, Base::inline(&was.content));
            }
        }
        for ino in &stale.data {
            let data = self.take_file(core, *ino);
            let data = data.filter(|data| core.is_handed_out(*ino) && data.held_bytes() <= LEFT_MAX);
            data.and_then(|data| data.base(0, u64::MAX))
                .into_iter()
                .for_each(|base| core.bases.left(*ino, base));
        }
    }

    fn receive_event(&self, connection: u64, event: Event) -> Result<(), FaultError> {
        let ack = (connection, event.number);
        match event.body {
            Some(Told::Apply(apply)) => self.apply(ack, &apply),
            Some(Told::Drop(drop)) => {
                let inos: Vec<Ino> = drop.inos.into_iter().map(Ino).collect();
                let core = self.core();
                // Who waits for a row that is not here waits for whoever the others make way for.
                let is_here = |ino: &Ino| core.tree.has_inode(*ino) && !core.tree.is_left_out(*ino);
                if !(inos.iter().all(is_here) && self.kept.keeps(ack, &inos)) {
                    self.drop_rows(core, ack, &inos);
                }
                Ok(())
            }
            Some(Told::Recall(recall)) => {
                let object = Object::try_from(&recall.object.unwrap_or_default())?;
                let recalled =
                    Recalled { connection, event: event.number, object, keep_read: recall.keep_read };
                self.stats.recalls.add(1);
                let _ = self.recalls.send(Wanted::Object(recalled));
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
        if apply.change != 0 {
            core.tree.unheard(apply.change, &records);
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

    /// Somebody else is going to own these files.
    fn drop_rows(&self, mut core: CoreGuard<'_>, ack: (u64, u64), inos: &[Ino]) {
        if ack.0 <= core.cut_off {
            // All rows went with the connection, and others may have come since.
            return;
        }
        // What was kept for calls may be this host's by now: whoever wanted it is gone.
        let others: Vec<Ino> = inos.iter().copied().filter(|ino| !core.tree.owns(*ino)).collect();
        let stale = core.tree.drop_rows(&others);
        self.finish_event(core, stale, Vec::new(), ack);
    }

    /// Acknowledges an event that the kernel need not be told of, unless that is done.
    fn acknowledge_one(&self, ack: (u64, u64)) {
        let heard = {
            let mut heard = self.heard.lock();
            heard.iter().position(|heard| heard.ack == ack).map(|at| heard.remove(at))
        };
        if let Some(Heard { ack, in_use }) = heard {
            self.acknowledge(ack, in_use);
        }
    }

    /// `more`: names that the kernel has to let go of as well.
    fn finish_event(
        &self,
        mut core: CoreGuard<'_>,
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
            self.tell_kernel(Word::Stale {
                names: Vec::new(),
                attributes,
                data,
                in_use,
                ack: Some(ack),
                bases: Vec::new(),
            });
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

    /// Waits until the kernel has heard everything that it was told.
    pub(crate) fn await_heard(&self) {
        let (done, wait) = std::sync::mpsc::channel();
        self.tell_kernel(Word::Heard(done));
        let _ = wait.recv();
    }
}
