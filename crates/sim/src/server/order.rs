//! The order of what is written: in memory at once, durable in groups, a prefix at a time (`docs/adr/0017`).

use std::collections::VecDeque;
use std::rc::Rc;

use hayloft_model::replay::{BroughtBack, Undurable};

use super::*;
use crate::messages::{Entry, Written};
use crate::server::late::Ending;

/// How long a flush takes, mostly, and now and then.
const FLUSH: u64 = 12;
const FLUSH_SLOW: u64 = 200;

/// A change of what is stored.
#[derive(Clone, Debug)]
pub(crate) enum Put {
    Row(Record),
    Usage(Usage),
    NextIno(u64),
    /// `None`: it is gone.
    Session(SessionId, Option<StoredSession>),
    Ended(SessionId, Sequence),
    Brought(BroughtBack),
}

impl Stored {
    pub(crate) fn put(&mut self, put: &Put) {
        match put {
            Put::Row(record) => self.rows.apply(record),
            Put::Usage(usage) => self.usage = *usage,
            Put::NextIno(next) => self.next_ino = *next,
            Put::Session(session, Some(row)) => drop(self.sessions.insert(*session, row.clone())),
            Put::Session(session, None) => drop(self.sessions.remove(session)),
            Put::Ended(session, last) => drop(self.ended.insert(*session, *last)),
            Put::Brought(brought) => self.brought = brought.clone(),
        }
    }
}

/// What is done by what is written.
#[derive(Debug)]
pub(super) struct Doing {
    pub(super) session: SessionId,
    /// The number of a batch; 0: a change.
    pub(super) sequence: Sequence,
    pub(super) usage: UsageDelta,
    pub(super) records: Vec<Record>,
    pub(super) outcome: Option<(u64, Option<Ino>)>,
    /// It builds on more than its rows say: it waits for the store.
    pub(super) waits: bool,
}

/// A place in the order.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) at: (u64, u64),
    /// It is answered before it is durable.
    pub(super) early: bool,
    pub(super) about: BTreeSet<Ino>,
}

/// What is done when something is durable.
#[derive(Debug)]
pub(crate) enum Then {
    Say(u64, ToClient),
    /// The turn of a request has come, once more.
    Work(Ticket, Turn),
    Send(Ticket, Send),
    /// A change that was executed.
    Publish(Ticket, Box<Executed>, BTreeSet<Ino>),
    Claim {
        connection: u64,
        session: SessionId,
        own: Vec<Object>,
        in_use: Vec<Ino>,
    },
}

#[derive(Default)]
pub(crate) struct Order {
    /// The last mark that was given.
    pub(super) last: u64,
    /// What is not durable.
    log: VecDeque<(u64, Vec<Put>)>,
    pub(super) undurable: Undurable<Entry>,
    /// Since when what could be answered is not.
    ages: VecDeque<(u64, u64)>,
    waits: Vec<(u64, Then)>,
    /// What batches have deleted that their sessions owned, by their marks: it is theirs again when that is lost.
    pub(super) forgotten: Vec<(u64, SessionId, Vec<Object>)>,
    gathers: bool,
    /// What the flush under way makes durable.
    flushing: Option<u64>,
    /// Another server has opened the volume: nothing becomes durable here.
    pub(crate) fenced: bool,
    /// It knows.
    pub(crate) doomed: bool,
}

impl Order {
    pub(crate) fn new(last: u64) -> Order {
        Order { last, ..Order::default() }
    }

    /// What a flush up to this mark writes.
    pub(super) fn log_upto(&self, upto: u64) -> Vec<(u64, Vec<Put>)> {
        self.log.iter().filter(|(mark, _)| *mark <= upto).cloned().collect()
    }

    /// A flush up to this mark is under way, or may have been.
    pub(super) fn set_flushing(&mut self, upto: u64) {
        self.flushing = Some(upto);
    }

    /// Whether all is durable.
    pub(super) fn is_empty(&self) -> bool {
        self.log.is_empty() && self.waits.is_empty()
    }
}

/// What is changed: rows of inodes, names in directories, or in slots of those that are split.
fn about(records: &[Record], grants: &Grants) -> BTreeSet<Ino> {
    let of = |record: &Record| match record {
        Record::PutDentry(dir, name, _) | Record::DeleteDentry(dir, name) => {
            vec![grants.width(*dir).map_or(*dir, |width| dir.slot(name.as_bytes(), width))]
        }
        record => estates::subjects(std::slice::from_ref(record)).into_iter().collect(),
    };
    records.iter().flat_map(of).collect()
}

impl World {
    /// Gives what is written the next place: readers find it.
    pub(super) fn write(&mut self, puts: Vec<Put>, doing: Option<Doing>) -> Place {
        let cannot_come_back =
            self.window == 0 || doing.is_some() && self.rng.permille(if self.lossy { 10 } else { 40 });
        let (now, window) = (self.now, self.window);
        let no_window = self.is_broken(Rule::NoWindow);
        let nothing_early = self.is_broken(Rule::NothingEarly);
        let server = &mut self.server;
        puts.iter().for_each(|put| server.stored.put(put));
        let order = &mut server.order;
        order.last += 1;
        let at = (server.stored.history.opening(), order.last);
        server.stored.history.mark = order.last;
        order.log.push_back((order.last, puts));
        let mut place = Place { at, early: false, about: BTreeSet::new() };
        if let Some(doing) = doing {
            place.about = about(&doing.records, &server.grants);
            let Doing { session, sequence, usage, records, outcome, waits } = doing;
            let written = Written {
                opening: at.0,
                mark: at.1,
                session,
                sequence,
                usage,
                records,
                outcome,
                about: place.about.clone(),
                total: server.stored.usage,
            };
            // Nobody is told of what is about nothing.
            let waits = waits || place.about.is_empty() && !nothing_early;
            let entry = (!waits && !cannot_come_back).then(|| Rc::new(written));
            let comes_back = order.undurable.add(at.1, place.about.iter().copied(), entry);
            order.ages.push_back((at.1, now));
            let oldest = order.ages.front().map_or(now, |(_, since)| *since);
            place.early = comes_back && (now - oldest <= window || no_window);
        }
        self.flush_soon();
        place
    }

    fn flush_soon(&mut self) {
        let order = &mut self.server.order;
        if order.log.is_empty() || order.flushing.is_some() {
            return;
        }
        if !order.waits.is_empty() {
            return self.begin_flush();
        }
        if !std::mem::replace(&mut order.gathers, true) {
            let (life, wait) = (self.server.life, self.rng.between(1, self.gather));
            self.after(wait, What::Flush(life));
        }
    }

    /// What has gathered is flushed.
    pub(crate) fn gathered(&mut self) {
        self.server.order.gathers = false;
        if self.server.order.flushing.is_none() && !self.server.order.log.is_empty() {
            self.begin_flush();
        }
    }

    fn begin_flush(&mut self) {
        let order = &mut self.server.order;
        let Some(upto) = order.log.back().map(|(mark, _)| *mark) else { return };
        order.flushing = Some(upto);
        if self.is_broken(Rule::NoteEarly) && !self.server.order.fenced {
            self.note_log_end(upto);
        }
        let is_slow = self.rng.permille(80);
        let takes = self.rng.between(1, if is_slow { FLUSH_SLOW } else { FLUSH });
        let takes = self.late_flush().unwrap_or(takes);
        let life = self.server.life;
        self.after(takes, What::Flushed(life));
    }

    /// The flush under way has ended.
    pub(crate) fn flushed(&mut self) {
        let Some(upto) = self.server.order.flushing.take() else { return };
        let ending = self.late_ending();
        if self.server.order.fenced {
            self.server.order.doomed = true;
        } else if let Some(ending) = ending {
            match ending {
                Ending::TimedOut => self.time_out(upto),
                Ending::Doubled => self.done_twice(upto),
            }
        } else if std::mem::take(&mut self.server.flush_fails) {
            self.server.order.flushing = Some(upto);
            self.reopen();
        } else {
            self.durable_to(upto);
        }
        self.flush_soon();
    }

    /// Makes all durable at once. `false`: it cannot be, the volume is another server's.
    pub(crate) fn flush_now(&mut self) -> bool {
        let order = &mut self.server.order;
        if order.fenced {
            order.doomed = true;
            return false;
        }
        let last = order.last;
        self.durable_to(last);
        true
    }

    pub(super) fn durable_to(&mut self, upto: u64) {
        self.make_durable(upto);
        let (ready, rest) =
            std::mem::take(&mut self.server.order.waits).into_iter().partition(|(mark, _)| *mark <= upto);
        self.server.order.waits = rest;
        let (life, ready): (u64, Vec<(u64, Then)>) = (self.server.life, ready);
        ready.into_iter().for_each(|(_, then)| self.after(0, What::Then(life, then)));
    }

    /// The store has it; the server may not know.
    pub(super) fn make_durable(&mut self, upto: u64) {
        self.log_grows();
        let server = &mut self.server;
        let order = &mut server.order;
        while let Some((mark, puts)) = order.log.front().filter(|(mark, _)| *mark <= upto) {
            puts.iter().for_each(|put| server.durable.put(put));
            server.durable.history.mark = *mark;
            order.log.pop_front();
        }
        order.undurable.durable(upto);
        order.ages.retain(|(mark, _)| *mark > upto);
        order.forgotten.retain(|(mark, ..)| *mark > upto);
        let noted = server.durable.history.mark;
        let opening = server.durable.history.opening();
        self.note_log_end(noted);
        self.reference.durable((opening, upto));
    }

    /// Does something when all that is written is durable.
    pub(super) fn when_durable(&mut self, then: Then) {
        let order = &mut self.server.order;
        match order.log.back().map(|(mark, _)| *mark) {
            None => {
                let life = self.server.life;
                self.after(0, What::Then(life, then));
            }
            Some(mark) => {
                order.waits.push((mark, then));
                self.flush_soon();
            }
        }
    }

    /// What the store holds: the flush under way may have come to something, which the server does not know.
    pub(super) fn store_as_found(&mut self) -> Stored {
        let order = &self.server.order;
        let mut store = self.server.durable.clone();
        let Some(upto) = order.flushing.filter(|_| !order.fenced) else { return store };
        let flushed: Vec<&(u64, Vec<Put>)> = order.log.iter().filter(|(mark, _)| *mark <= upto).collect();
        let come_to = self.rng.below(flushed.len() as u64 + 1) as usize;
        for (mark, puts) in &flushed[..come_to] {
            puts.iter().for_each(|put| store.put(put));
            store.history.mark = *mark;
        }
        self.reference.durable((store.history.opening(), store.history.mark));
        store
    }

    /// What is not durable is lost. Gives these marks.
    pub(super) fn lose_suffix(&mut self) -> Vec<u64> {
        let store = self.store_as_found();
        let mark = store.history.mark;
        let server = &mut self.server;
        (server.stored, server.durable) = (store.clone(), store);
        server.order.flushing = None;
        server.order.undurable.durable(mark);
        server.order.log.drain(..).map(|(mark, _)| mark).filter(|lost| *lost > mark).collect()
    }

    /// The database has failed, and is opened again in this server, which writes once more what it has entries of.
    pub(super) fn reopen(&mut self) {
        self.has_fault();
        let lost = self.lose_suffix();
        trace!(self, "the database is opened again without {lost:?}");
        self.compare_with_notes(self.server.stored.history.mark);
        let entries = self.server.order.undurable.take();
        self.server.order.ages.clear();
        let opening = self.server.stored.history.opening();
        for mark in lost.iter().rev().filter(|mark| !entries.iter().any(|entry| entry.mark == **mark)) {
            let verdict = self.reference.lost_place((opening, *mark));
            self.judge("the database is opened again", verdict);
        }
        let kept: BTreeSet<u64> = entries.iter().map(|entry| entry.mark).collect();
        for (mark, session, objects) in std::mem::take(&mut self.server.order.forgotten) {
            let is_lost = lost.contains(&mark) && !kept.contains(&mark);
            for object in objects.into_iter().filter(|_| is_lost) {
                self.server.grants.adopt(session, object);
            }
        }
        let puts = self.written_again(&entries);
        let place = self.write(puts, None);
        entries.iter().for_each(|entry| self.reference.brought((entry.opening, entry.mark), place.at));
        self.make_durable(place.at.1);
        let life = self.server.life;
        for (mark, then) in std::mem::take(&mut self.server.order.waits) {
            let then = match then {
                Then::Say(connection, ToClient::Committed(_)) => Then::Say(connection, ToClient::Uncertain),
                Then::Claim { connection, .. } => {
                    self.cut_connection(connection);
                    continue;
                }
                Then::Publish(ticket, executed, _) if !kept.contains(&mark) && lost.contains(&mark) => {
                    executed.births.iter().for_each(|birth| self.server.grants.forget(birth.ino()));
                    if let Some(pending) = self.server.tickets.get_mut(&ticket) {
                        (pending.executed, pending.unnamed) = (false, Vec::new());
                    }
                    Then::Work(ticket, Turn::Execute)
                }
                then => then,
            };
            self.after(0, What::Then(life, then));
        }
        self.collect();
        self.pump();
    }

    /// What comes after something is durable.
    pub(crate) fn then(&mut self, then: Then) {
        match then {
            Then::Say(connection, message) => self.send_to_client(connection, message),
            Then::Work(ticket, turn) => self.work(ticket, turn),
            Then::Send(ticket, send) => self.send_read(ticket, send),
            Then::Publish(ticket, executed, about) => self.published(ticket, *executed, about),
            Then::Claim { connection, session, own, in_use } => {
                self.claimed_by(connection, session, &own, in_use);
            }
        }
        self.pump();
    }

    /// Entries that a session has to keep which is told of these inodes as they are now.
    pub(super) fn entries_for(
        &mut self,
        session: SessionId,
        connection: u64,
        inos: impl IntoIterator<Item = Ino>,
    ) -> Vec<Entry> {
        let alone = self.is_broken(Rule::TellAlone);
        let server = &mut self.server;
        // On another connection what is sent here does not arrive.
        if server.live.get(&session).is_none_or(|live| live.connection != Some(connection) || !live.claimed) {
            return Vec::new();
        }
        let inos: BTreeSet<Ino> = inos.into_iter().collect();
        let mut entries = server.order.undurable.tell(session, inos.iter().copied());
        if alone {
            let last = |ino: &Ino| {
                entries.iter().rev().find(|entry| entry.about.contains(ino)).map(|entry| entry.mark)
            };
            let marks: BTreeSet<u64> = inos.iter().filter_map(last).collect();
            entries.retain(|entry| marks.contains(&entry.mark));
        }
        entries
    }

    /// Sends what tells of these inodes.
    pub(super) fn send_about(
        &mut self,
        session: SessionId,
        connection: u64,
        inos: impl IntoIterator<Item = Ino>,
        message: ToClient,
    ) {
        let entries = self.entries_for(session, connection, inos);
        self.send_with(connection, entries, message);
    }

    /// Whether somebody who hears of these has to wait for the store.
    pub(super) fn is_stuck_about(&self, inos: impl IntoIterator<Item = Ino>) -> bool {
        self.server.order.undurable.stuck(inos).is_some()
    }
}
