//! The model server: the grant machine, with rows in memory for a store. What `volume::sharing` does with input and
//! output.

mod answers;
mod asked;
mod at_rest;
mod claims;
mod execute;
mod heard;
mod late;
mod opening;
mod order;
mod sessions;

use std::collections::{BTreeMap, BTreeSet};

use hayloft_model::grants::{
    Grant, Grants, NOT_TOLD, Object, Order as Command, Outcome as Turn, Output, Request, STRAY, Ticket,
};
use hayloft_model::replay::BroughtBack;
use hayloft_model::{
    Batch, Change, Content, Estates, Executed, Execution, FileKind, Ino, InoRange, InodeRow, Name, Record,
    Refused, Rows, Sequence, SessionId, Timestamp, TreeError, Usage, UsageDelta, Wants, estates,
};

use crate::Rule;
use crate::history::{Heard, History};
use crate::messages::{Ask, Body, Doing as Who, Listing, ToClient, ToServer};
use crate::quota::Quota;
use crate::reference::Attributes;
use crate::world::{LEASE, What, World, trace};

pub(crate) use at_rest::AtRest;
pub(crate) use late::LateStore;
use late::MANY_FROM;
use order::{Doing, Place};

pub(crate) use order::{Order, Put, Then};

/// Who has shipped so many batches since an event has shipped all that it was about.
const BATCHES_MAX: u64 = 32;

/// What happens to the next batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Fault {
    Refuse,
    /// Written, but nobody knows.
    UncertainApplied,
    /// Not written, and nobody knows.
    UncertainLost,
}

/// A session as the store has it.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoredSession {
    pub(crate) last: Sequence,
    outcomes: BTreeMap<u64, Option<Ino>>,
    /// It is of a tree that was replaced.
    pub(crate) moved: bool,
}

/// What a store holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) rows: Rows,
    pub(crate) usage: Usage,
    pub(crate) next_ino: u64,
    pub(crate) sessions: BTreeMap<SessionId, StoredSession>,
    /// The last batches of ended sessions: these are remembered.
    pub(crate) ended: BTreeMap<SessionId, Sequence>,
    brought: BroughtBack,
    pub(crate) history: History,
}

#[derive(Debug, Default)]
struct Live {
    connection: Option<u64>,
    /// Its connection has claimed: events go out.
    claimed: bool,
    /// It was there when the volume was opened, and has not claimed since: nobody is served before.
    awaited: bool,
    /// It may bring back what was lost when the volume was opened.
    may_bring: bool,
    heard: u64,
    /// When a batch of it came last.
    worked: u64,
    /// There was no room for the last one on this connection, and nobody waited for it.
    refused: bool,
    /// Events that it was sent and has not acknowledged.
    sent: BTreeSet<u64>,
    /// The first of them as it was looked at last: since when it is there, and the last batch then.
    late: Option<(u64, u64, Sequence)>,
    /// Inodes that it uses, whether they have names or not.
    uses: BTreeSet<Ino>,
    /// Changes that it was told of before others had heard of them, and of which all have heard since.
    heard_by_all: Vec<u64>,
}

#[derive(Debug)]
struct Pending {
    session: SessionId,
    connection: u64,
    request: u64,
    ask: Ask,
    objects: Vec<Object>,
    /// It has its place in the order.
    executed: bool,
    /// It has changed nothing.
    says_how_things_are: bool,
    /// And has been told; what is to be answered.
    done: Option<Option<Ino>>,
    unnamed: Vec<Ino>,
    /// What the answer is about.
    about: BTreeSet<Ino>,
}

/// What a request has read and sends.
#[derive(Debug)]
pub(crate) enum Send {
    Listings(Vec<Listing>),
    Row(Option<Box<InodeRow>>),
}

pub(crate) struct Server {
    pub(crate) up: bool,
    /// How far its clock is off.
    pub(crate) skew: i64,
    pub(crate) life: u64,
    /// As it is in memory, which is what everybody reads.
    pub(crate) stored: Stored,
    /// As much of it as is durable.
    pub(crate) durable: Stored,
    pub(crate) order: Order,
    /// Numbers for what changes make.
    births: InoRange,
    pub(crate) grants: Grants,
    live: BTreeMap<SessionId, Live>,
    tickets: BTreeMap<Ticket, Pending>,
    /// Inodes that lost their name by an event which a session has not acknowledged: it may use them.
    unanswered: BTreeMap<(SessionId, u64), Vec<Ino>>,
    /// Changes that were carried out before, to be answered when everybody has claimed.
    replays: Vec<(u64, u64, Option<Ino>)>,
    /// What was asked for before all had claimed, by connection, session and request.
    early: Vec<(u64, SessionId, u64, Ask)>,
    hearers: Vec<heard::Waits>,
    /// All who could bring something back have done so, or are ended.
    settled: bool,
    estates: Estates,
    pub(crate) quota: Quota,
    pub(crate) fault: Option<Fault>,
    /// The next flush fails.
    pub(crate) flush_fails: bool,
    pub(crate) drain_until: u64,
}

impl Server {
    pub(crate) fn new() -> Server {
        let mut stored = Stored { next_ino: Ino::FIRST.0, ..Stored::default() };
        let root = InodeRow::new(FileKind::Directory.bits() | 0o755, 2, Ino::ROOT);
        stored.rows.inodes.insert(Ino::ROOT, root);
        Server::opened(stored, 1)
    }

    /// A server that has just opened a store.
    fn opened(stored: Stored, life: u64) -> Server {
        Server {
            up: true,
            skew: 0,
            life,
            order: Order::new(stored.history.mark),
            durable: stored.clone(),
            stored,
            births: InoRange { next: 0, end: 0 },
            grants: Grants::default(),
            live: BTreeMap::new(),
            tickets: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            replays: Vec::new(),
            early: Vec::new(),
            hearers: Vec::new(),
            settled: false,
            estates: Estates::default(),
            quota: Quota::default(),
            fault: None,
            flush_fails: false,
            drain_until: u64::MAX,
        }
    }

    fn object(&self, ino: Ino) -> Option<Object> {
        self.stored.rows.inodes.get(&ino).map(|row| Object::of(ino, row))
    }

    pub(crate) fn all_claimed(&self) -> bool {
        !self.live.values().any(|live| live.awaited)
    }

    /// Whether an inode without a name has to stay.
    fn is_used(&self, ino: Ino) -> bool {
        !self.all_claimed()
            || self.grants.owner(ino).is_some_and(|owner| self.live.contains_key(&owner))
            || self.live.values().any(|live| live.uses.contains(&ino))
            || self.unanswered.values().any(|inos| inos.contains(&ino))
            || self.tickets.values().any(|pending| pending.executed && pending.unnamed.contains(&ino))
    }

    /// The connection on which a session has claimed.
    pub(crate) fn claimed_on(&self, session: SessionId) -> Option<u64> {
        self.live.get(&session).filter(|live| live.claimed).and_then(|live| live.connection)
    }

    /// Whether all who could bring something back have done so, or are ended.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Whether nothing waits for the store.
    pub(crate) fn is_all_durable(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether nothing is asked for. What sessions without a client wait for does not count: the real server drops it
    /// with the connection, and nobody ends a session for what only it waits for.
    pub(crate) fn is_idle(&self, has_client: impl Fn(SessionId) -> bool) -> bool {
        self.replays.is_empty()
            && self.early.is_empty()
            && self.tickets.values().all(|pending| !pending.executed && !has_client(pending.session))
    }
}

impl World {
    pub(crate) fn is_broken(&self, rule: Rule) -> bool {
        self.config.broken == Some(rule)
    }

    pub(crate) fn server_receives(&mut self, connection: u64, session: SessionId, message: ToServer) {
        if !self.server.up {
            return self.cut_connection(connection);
        }
        if let ToServer::Hello { session, resume, heard, replaces } = message {
            return self.hello((connection, session), resume, heard, replaces);
        }
        let now = self.now;
        let known = self.server.live.get_mut(&session).filter(|live| live.connection == Some(connection));
        let Some(live) = known else { return self.cut_connection(connection) };
        live.heard = now;
        match message {
            ToServer::Hello { .. } => {}
            ToServer::Claim { own, in_use, entries } => {
                self.claim(connection, session, (own, in_use), &entries);
            }
            ToServer::Ask { request, forget_below, ask } => {
                if let Some(stored) = self.server.stored.sessions.get_mut(&session) {
                    stored.outcomes.retain(|request, _| *request >= forget_below);
                }
                self.asked(connection, session, request, ask);
            }
            ToServer::Commit(batch, pressing) => {
                self.commit(connection, session, &batch, pressing);
            }
            ToServer::Ack { event, in_use } => {
                live.sent.remove(&event);
                live.uses.extend(in_use);
                let unnamed = self.server.unanswered.remove(&(session, event)).is_some();
                self.server.grants.acknowledge(session, event);
                if unnamed {
                    self.collect();
                }
            }
            ToServer::LetGo(inos) => {
                inos.iter().for_each(|ino| {
                    live.uses.remove(ino);
                });
                self.collect();
            }
            ToServer::Release(files) => self.server.grants.release(session, &files),
            ToServer::GiveBack(files, seen) => self.server.grants.give_back(session, &files, seen),
            ToServer::Shipped(number) => self.has_shipped(session, number),
            ToServer::Goodbye => {
                self.end_session(session);
                self.connections.remove(&connection);
            }
        }
        self.pump();
    }

    fn changed(
        &mut self,
        (session, connection, request): (SessionId, u64, u64),
        result: Result<Option<Ino>, TreeError>,
        doing: Who,
        about: impl IntoIterator<Item = Ino>,
    ) {
        self.send_about(session, connection, about, ToClient::Changed { request, result, doing });
    }

    /// How soon directories are split.
    pub(crate) fn set_splits(&mut self) {
        self.server.grants.split_after(self.splits.unwrap_or(u32::MAX));
        if self.is_broken(Rule::TellUnheard) {
            self.server.grants.let_all_be_shown();
        }
        if self.is_broken(Rule::WholeWithSlots) {
            self.server.grants.let_slots_be();
        }
    }

    /// Directories in which nothing was done by slots are whole again.
    pub(crate) fn rest(&mut self) {
        if self.server.up {
            self.server.grants.rest();
            self.pump();
        }
    }

    /// Carries out what the grant machine says.
    pub(crate) fn pump(&mut self) {
        if self.server.all_claimed() {
            if !std::mem::replace(&mut self.server.settled, true) {
                self.settle_lost();
                self.tree_is_served();
            }
            for (connection, request, made) in std::mem::take(&mut self.server.replays) {
                let answer = ToClient::Changed { request, result: Ok(made), doing: Who::Server };
                self.when_durable(Then::Say(connection, answer));
            }
            for (connection, session, request, ask) in std::mem::take(&mut self.server.early) {
                if self.server.live.get(&session).is_some_and(|live| live.connection == Some(connection)) {
                    self.asked(connection, session, request, ask);
                }
            }
        }
        for output in self.server.grants.take_outputs() {
            match output {
                Output::Order { to, event, order } => {
                    let body = match order {
                        Command::Drop(ino) => Body::Drop(ino),
                        Command::Recall { object, keep_read } => Body::Recall { object, keep_read },
                    };
                    self.outcome.recalls += u64::from(matches!(body, Body::Recall { .. }));
                    self.event(to, event, body, []);
                }
                Output::Ready { ticket, outcome } => {
                    let (life, delay) = (self.server.life, self.rng.below(3));
                    self.after(delay, What::Work(life, ticket, outcome));
                }
                Output::Whole(dir) => {
                    trace!(self, "{dir} is whole");
                    // What was done by slots is durable before anything builds on it as on the whole.
                    if !self.flush_now() {
                        return;
                    }
                }
                Output::Heard { change, to } => self.server.heard_by_others(change, &to),
                Output::Settled(ticket) => self.settled(ticket),
            }
        }
        self.say_heard();
        self.check_owners();
    }

    /// Tells a session, and gives it what it has to keep that is told of these.
    fn event(&mut self, to: SessionId, number: u64, body: Body, about: impl IntoIterator<Item = Ino>) {
        let live = self.server.live.get_mut(&to).filter(|live| live.claimed);
        if let Some(live) = live
            && let Some(connection) = live.connection
        {
            live.sent.insert(number);
            self.send_about(to, connection, about, ToClient::Event { number, body });
        }
    }

    fn settled(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.remove(&ticket) else { return };
        if let Some(made) = pending.done {
            let (asker, request) = ((pending.session, pending.connection), pending.request);
            let message = ToClient::Changed { request, result: Ok(made), doing: Who::Server };
            match pending.says_how_things_are {
                true => self.say_when_heard(asker, pending.about, message),
                false => self.send_about(asker.0, asker.1, pending.about, message),
            }
        }
        if !pending.unnamed.is_empty() {
            self.collect();
        }
    }

    fn finish(&mut self, ticket: Ticket) {
        self.server.grants.finish(ticket);
        self.pump();
    }

    fn give_up(&mut self, ticket: Ticket) -> Option<Pending> {
        let pending = self.server.tickets.remove(&ticket);
        self.server.grants.cancel(ticket);
        pending
    }

    /// Nobody believes to own what the server has given to somebody else.
    fn check_owners(&mut self) {
        let mut wrong = None;
        for (at, client) in self.clients.iter().enumerate() {
            if !self.server.live.get(&client.session).is_some_and(|live| live.claimed) || client.lapsed {
                continue;
            }
            for object in client.tree.owned() {
                let (ino, rows) = (object.ino(), &self.server.stored.rows.inodes);
                let is_deleted = || rows.get(&ino).is_none_or(|row| row.nlink == 0);
                if ino.of_slot().is_none() && !client.tree.has_inode(ino) && is_deleted() {
                    // Deleted there, which it does not know to be durable yet.
                    continue;
                }
                let owner = self.server.grants.owner(ino);
                if owner.is_some_and(|owner| owner != client.session) {
                    wrong = Some(format!("c{at} owns {object:?}, and so does {owner:?}"));
                }
            }
        }
        if let Some(wrong) = wrong {
            self.fail(wrong);
        }
    }
}
