//! Drives the grant machine of a volume: what it says is put into the sessions' streams, and wakes the requests
//! that wait. `docs/sharing.md` has the rules.

pub(crate) mod change;
pub(crate) mod enter;
mod foreign;
mod heard;
mod listed;
pub(crate) mod lock;
pub(crate) mod objects;
mod packed;
mod pass;
pub(crate) mod restore;
mod siblings;
pub(crate) mod split;
pub(crate) mod stream;
mod telling;
pub(crate) mod uses;

use std::collections::{BTreeMap, HashMap, HashSet};

use hayloft_model::grants::{Grants, Object, Order, Output, Ticket};
use hayloft_model::{Estates, Ino, Record, SessionId};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Apply, Changed, DropRows, Entry, Event, GiveBack, InvalidMessage, MANY_SLOTS, Recall, RecordMessage,
    event::Body as EventBody,
};

use crate::error::VolumeError;
use crate::replies::{Replies, failure};
use crate::sharing::foreign::Walked;
use crate::sharing::heard::Hearer;
use crate::sharing::pass::{Signal, Waiter};
use crate::sharing::stream::{Sent, Stream};
use crate::sharing::uses::Uses;
use crate::volume::Volume;

/// How far a `CHANGE` has come.
pub(crate) enum Progress {
    UnderWay,
    Done(Changed),
}

/// What was done, for the statistics.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) applies: u64,
    pub(crate) drops: u64,
    pub(crate) recalls: u64,
    pub(crate) executed: u64,
    pub(crate) given: u64,
    pub(crate) evictions: u64,
    pub(crate) splits: u64,
}

/// How the sessions of a volume share it. All under one lock, so that the streams have the machine's order.
#[derive(Default)]
pub(crate) struct Sharing {
    pub(crate) grants: Grants,
    pub(crate) streams: HashMap<SessionId, Stream>,
    pub(crate) changes: BTreeMap<(SessionId, u64), Progress>,
    /// Outcomes that can go with the session's next batch.
    pub(crate) forgotten: HashMap<SessionId, Vec<u64>>,
    pub(crate) uses: Uses,
    /// What ended sessions may restore. Not in the tables: after a restart of the server nobody knows.
    pub(crate) estates: Estates,
    pub(crate) counts: Counts,
    /// Directories that are not split any more, and whose rows have not been given the time of that.
    pub(crate) whole: HashSet<Ino>,
    /// How many wait until all sessions have claimed, beside requests.
    pub(crate) claims_awaited: usize,
    waiters: HashMap<Ticket, Waiter>,
    hearers: HashMap<Ticket, Vec<Hearer>>,
    closed: bool,
}

impl Sharing {
    /// Carries out what the machine has said. To be called after everything that may make it say something.
    pub(crate) fn drive(&mut self, now_ms: u64) {
        for output in self.grants.take_outputs() {
            match output {
                Output::Order { to, event, order } => self.order(to, event, order, now_ms),
                Output::Ready { ticket, outcome } => {
                    if let Some(waiter) = self.waiters.get_mut(&ticket) {
                        waiter.ready = true;
                        let _ = waiter.signals.send(Signal::Ready(outcome));
                    }
                }
                Output::Whole(dir) => drop(self.whole.insert(dir)),
                Output::Heard { change, to } => {
                    let streams = to.iter().filter_map(|session| self.streams.get(session));
                    streams.for_each(|stream| stream.replies.heard(change.0));
                }
                Output::Settled(ticket) => {
                    if let Some(waiter) = self.waiters.remove(&ticket) {
                        let _ = waiter.signals.send(Signal::Settled);
                    }
                }
            }
        }
        self.wake_hearers();
    }

    fn order(&mut self, to: SessionId, number: u64, order: Order, now_ms: u64) {
        let body = match order {
            Order::Recall { object, keep_read } => {
                self.counts.recalls += 1;
                if let Some(stream) = self.streams.get_mut(&to) {
                    stream.recalls.insert(number);
                    if !keep_read {
                        stream.listed.remove(&object.ino());
                    }
                }
                EventBody::Recall(Recall { object: Some(object.into()), keep_read })
            }
            Order::Drop(ino) => {
                self.counts.drops += 1;
                EventBody::Drop(DropRows { inos: vec![ino.0] })
            }
        };
        self.send_event(to, number, body, now_ms, Vec::new);
    }

    /// Tells a session of changes, or of what it owns now, and what it has to keep for that.
    pub(crate) fn apply(
        &mut self,
        (to, number): (SessionId, u64),
        apply: Apply,
        now_ms: u64,
        entries: impl FnOnce() -> Vec<Entry>,
    ) {
        self.counts.applies += 1;
        self.send_event(to, number, EventBody::Apply(apply), now_ms, entries);
    }

    /// To a session without a connection nothing is sent: when it is back it knows nothing that it does not own.
    fn send_event(
        &mut self,
        to: SessionId,
        number: u64,
        body: EventBody,
        now_ms: u64,
        entries: impl FnOnce() -> Vec<Entry>,
    ) {
        if let Some(stream) = self.streams.get_mut(&to) {
            stream.replies.push_with(0, Answer::Event(Event { number, body: Some(body) }), entries());
            stream.sent.insert(number, Sent { at_ms: now_ms, queued: stream.replies.queued() });
        }
    }

    /// Answers a request on the session's current connection.
    pub(crate) fn answer(
        &self,
        session: SessionId,
        request: u64,
        answer: Result<Answer, VolumeError>,
        entries: impl FnOnce() -> Vec<Entry>,
    ) {
        if let Some(stream) = self.streams.get(&session) {
            let answer = answer.unwrap_or_else(|error| failure(request, &error));
            stream.replies.push_with(request, answer, entries());
        }
    }

    /// Whether a connection is the one that the session is served on.
    pub(crate) fn is_served_on(&self, session: SessionId, connection: u64) -> bool {
        self.streams.get(&session).is_some_and(|stream| stream.connection == connection)
    }

    /// Whether a recall that was not acknowledged is among the events: what its holder has shipped comes before.
    pub(crate) fn is_recall(&self, session: SessionId, events: &[u64]) -> bool {
        let Some(stream) = self.streams.get(&session) else { return false };
        events.iter().any(|event| stream.recalls.contains(event))
    }

    pub(crate) fn acknowledge(&mut self, session: SessionId, events: &[u64], now_ms: u64) {
        for event in events {
            if let Some(stream) = self.streams.get_mut(&session) {
                stream.recalls.remove(event);
                stream.sent.remove(event);
            }
            self.uses.told(session, *event);
            self.grants.acknowledge(session, *event);
        }
        self.drive(now_ms);
    }

    /// A session was there when the volume was opened: nobody is served until it has claimed.
    pub(crate) fn join(&mut self, session: SessionId, read_only: bool) {
        self.streams.remove(&session);
        self.grants.join(session, read_only);
    }

    /// A session begins, or has a new connection; it is told nothing until it has claimed, and holds up nobody.
    pub(crate) fn begin(&mut self, session: SessionId, read_only: bool, features: u64) {
        self.streams.remove(&session);
        self.grants.begin(session, read_only);
        self.grants.knows_many_slots(session, features & MANY_SLOTS != 0);
    }

    /// A session has said what it owns, on this connection. To be followed by [`Sharing::drive`].
    pub(crate) fn claim(
        &mut self,
        session: SessionId,
        own: &[Object],
        (connection, replies): (u64, &Replies),
    ) -> Result<(), Vec<Object>> {
        self.uses.told_all(session);
        self.grants.claim(session, own)?;
        let stream = Stream {
            connection,
            replies: replies.clone(),
            recalls: HashSet::new(),
            sent: BTreeMap::new(),
            late: None,
            listed: HashSet::new(),
            siblings: Vec::new(),
            walked: Walked::default(),
        };
        self.streams.insert(session, stream);
        Ok(())
    }

    /// The connection is gone; what the session holds stays.
    pub(crate) fn disconnected(&mut self, session: SessionId, connection: u64) {
        if self.streams.get(&session).is_some_and(|stream| stream.connection == connection) {
            self.streams.remove(&session);
        }
    }

    /// The session is over.
    pub(crate) fn end(&mut self, session: SessionId, now_ms: u64) {
        if let Some(stream) = self.streams.remove(&session) {
            stream.replies.push(0, failure(0, &VolumeError::SessionEnded(session)));
        }
        self.grants.end(session);
        self.waiters.retain(|_, waiter| waiter.session != session || waiter.ready);
        self.uses.end(session);
        self.drive(now_ms);
    }

    /// These rows change.
    pub(crate) fn strike(&mut self, messages: &[RecordMessage]) -> Result<(), InvalidMessage> {
        if !self.estates.is_empty() {
            let records: Vec<Record> = messages.iter().map(Record::try_from).collect::<Result<_, _>>()?;
            self.estates.strike(&records);
        }
        Ok(())
    }

    /// Nothing is granted any more: another server has the volume, or this one stops.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.waiters.clear();
        self.hearers.clear();
    }

    /// Age of the oldest event that the session has not acknowledged, milliseconds.
    pub(crate) fn lag_ms(&self, session: SessionId, now_ms: u64) -> u64 {
        let oldest = self.streams.get(&session).and_then(|stream| stream.sent.values().next());
        oldest.map_or(0, |sent| now_ms.saturating_sub(sent.at_ms))
    }
}

impl Volume {
    /// What a session has to keep that is told of these inodes, on this connection. It is in the stream before `sharing` is
    /// let go of: what builds on it follows.
    pub(crate) fn entries_for(
        &self,
        sharing: &Sharing,
        (session, connection): (SessionId, u64),
        inos: impl IntoIterator<Item = Ino>,
    ) -> Vec<Entry> {
        // On another one what is sent here does not arrive.
        let is_served = sharing.is_served_on(session, connection);
        if is_served { self.order.tell(session, inos) } else { Vec::new() }
    }

    /// A session would rather not own these files by themselves.
    pub(crate) fn release(&self, session: SessionId, inos: &[u64]) {
        let files: Vec<Ino> = inos.iter().copied().map(Ino).collect();
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        sharing.grants.release(session, &files);
        sharing.drive(now_ms);
    }

    /// A session does not own these files any more.
    pub(crate) fn given_back(&self, session: SessionId, given: &GiveBack) {
        let files: Vec<Ino> = given.inos.iter().copied().map(Ino).collect();
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        sharing.grants.give_back(session, &files, given.seen);
        sharing.drive(now_ms);
    }
}
