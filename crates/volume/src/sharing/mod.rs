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
pub(crate) mod restore;
mod siblings;
pub(crate) mod split;
mod telling;
pub(crate) mod uses;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hayloft_model::grants::{Grants, Object, Order, Outcome, Output, Request, Ticket};
use hayloft_model::{Estates, Ino, Record, SessionId};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Apply, Changed, DropRows, Entry, Event, GiveBack, InvalidMessage, MANY_SLOTS, Recall, RecordMessage,
    event::Body as EventBody,
};
use tokio::sync::mpsc;

use crate::error::VolumeError;
use crate::replies::{Replies, failure};
use crate::sharing::foreign::Walked;
use crate::sharing::heard::Hearer;
use crate::sharing::siblings::Siblings;
use crate::sharing::uses::Uses;
use crate::volume::Volume;

/// What a request that waits is told.
enum Signal {
    Ready(Outcome),
    Settled,
}

struct Waiter {
    session: SessionId,
    /// Its turn has come; it goes on even if its session ends.
    ready: bool,
    signals: mpsc::UnboundedSender<Signal>,
}

/// The way to a session that has claimed what it owns.
pub(crate) struct Stream {
    pub(crate) connection: u64,
    pub(crate) replies: Replies,
    /// Recalls that it has not acknowledged.
    recalls: HashSet<u64>,
    /// Events that it has not acknowledged.
    sent: BTreeMap<u64, Sent>,
    /// The first of them as it was looked at last.
    late: Option<Late>,
    /// Directories whose listing it was sent.
    pub(crate) listed: HashSet<Ino>,
    /// What its walks have read last.
    siblings: Vec<Siblings>,
    /// How it walks.
    walked: Walked,
}

/// An event on its way.
struct Sent {
    /// When, milliseconds after the server's start.
    at_ms: u64,
    /// What was said before it, and itself: [`Replies::queued`].
    queued: u64,
}

/// An event that is with its session, and not acknowledged.
#[derive(Clone, Copy)]
struct Late {
    event: u64,
    /// Since when it is known to be written out.
    since_ms: u64,
    /// The session's last batch then.
    batch: u64,
}

/// What is known of a session's work.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    /// When something of a batch came last, or was worked on: milliseconds after the server's start.
    pub(crate) at_ms: u64,
    /// The last batch that was applied.
    pub(crate) batch: u64,
    /// The one after it was refused, and will come again.
    pub(crate) is_refused: bool,
}

/// Whoever has shipped so many batches since an event has shipped all that the event was about many times over.
const BATCHES_MAX: u64 = 32;

/// How often to look whether all have claimed.
const CLAIMS_PAUSE: Duration = Duration::from_millis(5);

/// How long a client may wait before it sends a refused batch again.
const REFUSED_PATIENCE_MS: u64 = 10_000;

impl Stream {
    /// Whether the first event that it has not acknowledged has been with it for a lease, and nothing comes of it: what
    /// it has to ship before may take as long as it does, but it has to come.
    pub(crate) fn is_stuck(&mut self, now_ms: u64, lease_ms: u64, work: Work) -> bool {
        let Some((event, sent)) = self.sent.first_key_value() else { return false };
        if !self.replies.is_written(sent.queued) {
            return false;
        }
        let seen = self.late.filter(|late| late.event == *event);
        let late =
            *self.late.insert(seen.unwrap_or(Late { event: *event, since_ms: now_ms, batch: work.batch }));
        let patience_ms = if work.is_refused { lease_ms + REFUSED_PATIENCE_MS } else { lease_ms };
        let is_idle = now_ms.saturating_sub(work.at_ms.max(late.since_ms)) > patience_ms;
        is_idle || (now_ms - late.since_ms > lease_ms && work.batch.saturating_sub(late.batch) > BATCHES_MAX)
    }
}

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

/// A request that the grant machine knows. When it is dropped unfinished it is given up.
pub(crate) struct Pass {
    volume: Arc<Volume>,
    session: SessionId,
    pub(crate) ticket: Ticket,
    signals: mpsc::UnboundedReceiver<Signal>,
    open: bool,
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

    /// Waits until all sessions have claimed, or are ended: until then they may bring back what is not to be found.
    pub(crate) async fn all_claimed(self: &Arc<Self>) -> Result<(), VolumeError> {
        if self.sharing.lock().grants.all_claimed() {
            return Ok(());
        }
        self.sharing.lock().claims_awaited += 1;
        let _awaited = ClaimsAwaited(self);
        loop {
            {
                let sharing = self.sharing.lock();
                if sharing.closed {
                    return Err(VolumeError::ShuttingDown);
                }
                if sharing.grants.all_claimed() {
                    return Ok(());
                }
            }
            tokio::time::sleep(CLAIMS_PAUSE).await;
        }
    }

    /// Puts a request into the line for its objects.
    pub(crate) fn request(
        self: &Arc<Self>,
        session: SessionId,
        request: Request,
    ) -> Result<Pass, VolumeError> {
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        if sharing.closed {
            return Err(VolumeError::ShuttingDown);
        }
        if !sharing.grants.knows(session) {
            return Err(VolumeError::SessionEnded(session));
        }
        let (sender, signals) = mpsc::unbounded_channel();
        let ticket = sharing.grants.request(session, request);
        let waiter = Waiter { session, ready: false, signals: sender };
        sharing.waiters.insert(ticket, waiter);
        sharing.drive(now_ms);
        Ok(Pass { volume: Arc::clone(self), session, ticket, signals, open: true })
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

/// Somebody waits until all have claimed.
struct ClaimsAwaited<'a>(&'a Volume);

impl Drop for ClaimsAwaited<'_> {
    fn drop(&mut self) {
        self.0.sharing.lock().claims_awaited -= 1;
    }
}

impl Pass {
    async fn signal(&mut self) -> Result<Signal, VolumeError> {
        // Nobody will tell any more: the session has ended, or the volume is closed.
        let gone = || VolumeError::SessionEnded(self.session);
        match self.signals.recv().await {
            Some(signal) => Ok(signal),
            None if self.volume.sharing.lock().closed => Err(VolumeError::ShuttingDown),
            None => Err(gone()),
        }
    }

    /// Waits for its turn. Rows of directories that have become whole by it are as they are shown then.
    pub(crate) async fn ready(&mut self) -> Result<Outcome, VolumeError> {
        loop {
            if let Signal::Ready(outcome) = self.signal().await? {
                Box::pin(self.volume.settle_whole()).await?;
                return Ok(outcome);
            }
        }
    }

    /// Waits again, for more objects.
    pub(crate) fn extend(&mut self, more: Vec<Object>) -> Result<(), VolumeError> {
        let now_ms = self.volume.shared.uptime_ms();
        let mut sharing = self.volume.sharing.lock();
        if !sharing.grants.knows(self.session) {
            return Err(VolumeError::SessionEnded(self.session));
        }
        if let Some(waiter) = sharing.waiters.get_mut(&self.ticket) {
            waiter.ready = false;
        }
        sharing.grants.extend(self.ticket, more);
        sharing.drive(now_ms);
        Ok(())
    }

    /// It is carried out, and what it has to say is in the streams.
    pub(crate) fn finish(mut self) {
        let now_ms = self.volume.shared.uptime_ms();
        self.finish_under(&mut self.volume.sharing.lock(), now_ms);
        self.open = false;
    }

    fn finish_under(&self, sharing: &mut Sharing, now_ms: u64) {
        sharing.grants.finish(self.ticket);
        sharing.drive(now_ms);
    }

    /// As [`Pass::finish`], by somebody who has the lock; [`Pass::settled`] is to follow.
    pub(crate) fn finished(&mut self, sharing: &mut Sharing, now_ms: u64) {
        self.open = false;
        self.finish_under(sharing, now_ms);
    }

    /// Waits until everybody has acknowledged what was published.
    pub(crate) async fn settled(&mut self) -> Result<(), VolumeError> {
        loop {
            if let Signal::Settled = self.signal().await? {
                return Ok(());
            }
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.open {
            let now_ms = self.volume.shared.uptime_ms();
            let mut sharing = self.volume.sharing.lock();
            sharing.waiters.remove(&self.ticket);
            sharing.grants.cancel(self.ticket);
            sharing.drive(now_ms);
        }
    }
}
