//! The model server: the grant machine, with rows in memory for a store. What `volume::sharing` does with input and
//! output.

mod answers;
mod execute;

use std::collections::{BTreeMap, BTreeSet};

use hayloft_model::grants::{Grant, Grants, Object, Order, Outcome as Turn, Output, Request, STRAY, Ticket};
use hayloft_model::{
    Batch, Change, Content, Estates, Executed, Execution, FileKind, Ino, InoRange, InodeRow, Record, Rows,
    Sequence, SessionId, Timestamp, TreeError, Usage, Wants, estates,
};

use crate::Rule;
use crate::history::{Heard, History};
use crate::messages::{Ask, Body, Listing, ToClient, ToServer};
use crate::quota::Quota;
use crate::reference::Attributes;
use crate::world::{LEASE, What, World, trace};

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
}

/// What is durable.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) rows: Rows,
    pub(crate) usage: Usage,
    pub(crate) next_ino: u64,
    pub(crate) sessions: BTreeMap<SessionId, StoredSession>,
    pub(crate) history: History,
}

#[derive(Debug, Default)]
struct Live {
    connection: Option<u64>,
    /// Its connection has claimed: events go out.
    claimed: bool,
    ever_claimed: bool,
    heard: u64,
    /// When a batch of it came last.
    worked: u64,
    /// Events that it was sent and has not acknowledged.
    sent: BTreeSet<u64>,
    /// The first of them as it was looked at last: since when it is there, and the last batch then.
    late: Option<(u64, u64, Sequence)>,
    /// Inodes that it uses, whether they have names or not.
    uses: BTreeSet<Ino>,
}

#[derive(Debug)]
struct Pending {
    session: SessionId,
    connection: u64,
    request: u64,
    ask: Ask,
    objects: Vec<Object>,
    /// It has been carried out; what is to be answered.
    done: Option<Option<Ino>>,
    unnamed: Vec<Ino>,
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
    pub(crate) stored: Stored,
    pub(crate) grants: Grants,
    live: BTreeMap<SessionId, Live>,
    tickets: BTreeMap<Ticket, Pending>,
    /// Inodes that lost their name by an event which a session has not acknowledged: it may use them.
    unanswered: BTreeMap<(SessionId, u64), Vec<Ino>>,
    /// Changes that were carried out before, to be answered when everybody has claimed.
    replays: Vec<(u64, u64, Option<Ino>)>,
    /// The last batches of ended sessions: these are remembered.
    pub(crate) ended: BTreeMap<SessionId, Sequence>,
    estates: Estates,
    pub(crate) quota: Quota,
    pub(crate) fault: Option<Fault>,
    pub(crate) drain_until: u64,
}

impl Server {
    pub(crate) fn new() -> Server {
        let mut stored = Stored { next_ino: Ino::FIRST.0, ..Stored::default() };
        let root = InodeRow::new(FileKind::Directory.bits() | 0o755, 2, Ino::ROOT);
        stored.rows.inodes.insert(Ino::ROOT, root);
        Server {
            up: true,
            skew: 0,
            life: 1,
            stored,
            grants: Grants::default(),
            live: BTreeMap::new(),
            tickets: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            replays: Vec::new(),
            ended: BTreeMap::new(),
            estates: Estates::default(),
            quota: Quota::default(),
            fault: None,
            drain_until: u64::MAX,
        }
    }

    fn object(&self, ino: Ino) -> Option<Object> {
        self.stored.rows.inodes.get(&ino).map(|row| object_of(ino, row))
    }

    fn all_claimed(&self) -> bool {
        self.live.values().all(|live| live.ever_claimed)
    }

    /// Whether an inode without a name has to stay.
    fn is_used(&self, ino: Ino) -> bool {
        !self.all_claimed()
            || self.grants.owner(ino).is_some_and(|owner| self.live.contains_key(&owner))
            || self.live.values().any(|live| live.uses.contains(&ino))
            || self.unanswered.values().any(|inos| inos.contains(&ino))
            || self.tickets.values().any(|pending| pending.done.is_some() && pending.unnamed.contains(&ino))
    }

    /// Deletes inodes that have neither a name nor a user.
    fn collect(&mut self) {
        let unnamed: Vec<Ino> =
            self.stored.rows.inodes.iter().filter(|(_, row)| row.nlink == 0).map(|(ino, _)| *ino).collect();
        for ino in unnamed {
            if !self.is_used(ino) {
                self.stored.history.mark += 1;
                self.stored.rows.apply(&Record::DeleteInode(ino));
                self.grants.forget(ino);
            }
        }
    }

    /// Whether nothing is asked for. What sessions without a client wait for does not count: the real server drops it
    /// with the connection, and nobody ends a session for what only it waits for.
    pub(crate) fn is_idle(&self, has_client: impl Fn(SessionId) -> bool) -> bool {
        self.replays.is_empty()
            && self.tickets.values().all(|pending| pending.done.is_none() && !has_client(pending.session))
    }
}

fn object_of(ino: Ino, row: &InodeRow) -> Object {
    match row.kind() {
        FileKind::Directory => Object::Directory(ino),
        _ => Object::File { ino, home: if row.nlink == 0 { STRAY } else { row.parent } },
    }
}

impl World {
    pub(crate) fn is_broken(&self, rule: Rule) -> bool {
        self.config.broken == Some(rule)
    }

    pub(crate) fn server_loses(&mut self, connection: u64, session: SessionId) {
        if let Some(live) = self.server.live.get_mut(&session)
            && live.connection == Some(connection)
        {
            (live.connection, live.claimed) = (None, false);
        }
    }

    pub(crate) fn stop_server(&mut self) {
        trace!(self, "the server stops");
        self.server.up = false;
        let connections: Vec<u64> = self.connections.keys().copied().collect();
        connections.into_iter().for_each(|connection| self.cut_connection(connection));
        let server = &mut self.server;
        server.life += 1;
        server.grants = Grants::default();
        server.live.clear();
        server.tickets.clear();
        server.unanswered.clear();
        server.replays.clear();
        server.estates = Estates::default();
        let pause = self.rng.between(5, LEASE / 2);
        self.after(pause, What::ServerStart);
    }

    pub(crate) fn start_server(&mut self) {
        if self.server.up {
            return;
        }
        trace!(self, "the server starts");
        self.open_store();
        let sessions: Vec<SessionId> = self.server.stored.sessions.keys().copied().collect();
        for session in sessions {
            self.server.grants.join(session, false);
            let mut live = Live { heard: self.now, ..Live::default() };
            if self.is_broken(Rule::NoClaimGrace) {
                drop(self.server.grants.claim(session, &[]));
                live.ever_claimed = true;
            }
            self.server.live.insert(session, live);
        }
        self.server.up = true;
        self.server.collect();
    }

    pub(crate) fn server_receives(&mut self, connection: u64, session: SessionId, message: ToServer) {
        if !self.server.up {
            return self.cut_connection(connection);
        }
        if let ToServer::Hello { session, resume, heard } = message {
            return self.hello(connection, session, resume, heard);
        }
        let now = self.now;
        let known = self.server.live.get_mut(&session).filter(|live| live.connection == Some(connection));
        let Some(live) = known else { return self.cut_connection(connection) };
        live.heard = now;
        match message {
            ToServer::Hello { .. } => {}
            ToServer::Claim { own, in_use } => self.claim(connection, session, &own, in_use),
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
                    self.server.collect();
                }
            }
            ToServer::LetGo(inos) => {
                inos.iter().for_each(|ino| {
                    live.uses.remove(ino);
                });
                self.server.collect();
            }
            ToServer::Release(files) => self.server.grants.release(session, &files),
            ToServer::Goodbye => {
                self.end_session(session);
                self.connections.remove(&connection);
            }
        }
        self.pump();
    }

    fn hello(&mut self, connection: u64, session: SessionId, resume: bool, heard: Heard) {
        if self.is_astray(heard) {
            return self.send_to_client(connection, ToClient::OtherHistory);
        }
        let known = self.server.stored.sessions.contains_key(&session);
        if resume && !known {
            let last = self.server.ended.get(&session).copied();
            return self.send_to_client(connection, ToClient::Ended { last });
        }
        if !known {
            self.server.stored.history.mark += 1;
            self.server.stored.sessions.insert(session, StoredSession::default());
            self.server.grants.join(session, false);
            self.server.live.insert(session, Live::default());
        }
        // Requests come again; what is carried out already is answered from its outcome.
        let void: Vec<Ticket> = self
            .server
            .tickets
            .iter()
            .filter(|(_, pending)| pending.session == session && pending.done.is_none())
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in void {
            self.server.tickets.remove(&ticket);
            self.server.grants.cancel(ticket);
        }
        let now = self.now;
        let live = self.server.live.entry(session).or_default();
        let old = live.connection.replace(connection);
        (live.claimed, live.heard) = (false, now);
        (live.sent, live.late) = (BTreeSet::new(), None);
        if let Some(old) = old {
            self.connections.remove(&old);
        }
        let numbers = self.numbers();
        let last = self.server.stored.sessions[&session].last;
        let opening = self.server.stored.history.opening();
        self.send_to_client(connection, ToClient::Welcome { last, numbers, opening });
        self.pump();
    }

    fn numbers(&mut self) -> InoRange {
        let next = self.server.stored.next_ino;
        self.server.stored.next_ino += 20;
        self.server.stored.history.mark += 1;
        InoRange { next, end: next + 20 }
    }

    fn claim(&mut self, connection: u64, session: SessionId, own: &[Object], in_use: Vec<Ino>) {
        self.server.unanswered.retain(|(of, _), _| *of != session);
        if let Some(live) = self.server.live.get_mut(&session) {
            (live.claimed, live.ever_claimed) = (true, true);
            live.uses = in_use.into_iter().collect();
        }
        if let Err(refused) = self.server.grants.claim(session, own) {
            self.fail(format!("{session} claims what it does not own: {refused:?}"));
        }
        self.server.collect();
        self.send_to_client(connection, ToClient::Claimed);
    }

    fn asked(&mut self, connection: u64, session: SessionId, request: u64, ask: Ask) {
        let objects = match &ask {
            Ask::Ping => return self.send_to_client(connection, ToClient::Pong { request }),
            Ask::Numbers => {
                let range = self.numbers();
                return self.send_to_client(connection, ToClient::Numbers { request, range });
            }
            Ask::Enter(dir) => match self.server.object(*dir) {
                Some(Object::Directory(dir)) => vec![Object::Directory(dir)],
                _ => {
                    return self
                        .send_to_client(connection, ToClient::Listings { request, listings: Vec::new() });
                }
            },
            Ask::Fetch(ino) => match self.server.object(*ino) {
                Some(object) => vec![object],
                None => {
                    return self.send_to_client(
                        connection,
                        ToClient::Row { request, ino: *ino, row: None, own: false },
                    );
                }
            },
            Ask::Acquire(object) => match self.server.object(object.ino()) {
                Some(object) => vec![object],
                None => return self.send_to_client(connection, ToClient::Acquired { request, owned: false }),
            },
            Ask::Change { change, .. } => {
                let outcome = self.server.stored.sessions[&session].outcomes.get(&request).copied();
                if let Some(made) = outcome.filter(|_| !self.is_broken(Rule::ReplayTwice)) {
                    return self.replay(connection, session, request, made);
                }
                let mut objects: Vec<Object> =
                    change.directories().into_iter().map(Object::Directory).collect();
                if let Some(ino) = change.inode() {
                    match self.server.object(ino) {
                        Some(object) => objects.push(object),
                        None => return self.changed(connection, request, Err(TreeError::Stale), false),
                    }
                }
                objects.dedup();
                objects
            }
            Ask::Restore { batch, .. } => {
                let rows = &self.server.stored.rows.inodes;
                let (directories, strays) = estates::objects(&batch.records, |ino| rows.get(&ino).cloned());
                // The strays one after the other, then all directories at once.
                strays.into_iter().chain(directories).collect()
            }
        };
        self.request(Pending { session, connection, request, ask, objects, done: None, unnamed: Vec::new() });
    }

    fn request(&mut self, pending: Pending) {
        let objects = pending.objects.clone();
        let request = match &pending.ask {
            Ask::Acquire(_) => Request::Own(objects[0]),
            Ask::Change { execute, .. } => Request::Change { objects, local: !execute },
            Ask::Restore { .. } if self.is_broken(Rule::RestoreUnheard) => Request::Read(Vec::new()),
            Ask::Restore { .. } => match objects.first() {
                Some(stray @ Object::File { .. }) => Request::Own(*stray),
                _ => Request::Reclaim(objects),
            },
            _ => Request::Read(objects),
        };
        let ticket = self.server.grants.request(pending.session, request);
        self.server.tickets.insert(ticket, pending);
    }

    /// A change that was carried out before is answered when everybody has seen it.
    fn replay(&mut self, connection: u64, session: SessionId, request: u64, made: Option<Ino>) {
        let settling = self
            .server
            .tickets
            .values_mut()
            .find(|pending| pending.session == session && pending.request == request);
        if let Some(pending) = settling {
            pending.connection = connection;
            return;
        }
        match self.server.all_claimed() {
            true => self.changed(connection, request, Ok(made), false),
            false => self.server.replays.push((connection, request, made)),
        }
    }

    fn changed(
        &mut self,
        connection: u64,
        request: u64,
        result: Result<Option<Ino>, TreeError>,
        yours: bool,
    ) {
        self.send_to_client(connection, ToClient::Changed { request, result, yours });
    }

    /// Carries out what the grant machine says.
    pub(crate) fn pump(&mut self) {
        if self.server.all_claimed() {
            for (connection, request, made) in std::mem::take(&mut self.server.replays) {
                self.changed(connection, request, Ok(made), false);
            }
        }
        for output in self.server.grants.take_outputs() {
            match output {
                Output::Order { to, event, order } => {
                    let body = match order {
                        Order::Drop(ino) => Body::Drop(ino),
                        Order::Recall { object, keep_read } => Body::Recall { object, keep_read },
                    };
                    self.outcome.recalls += u64::from(matches!(body, Body::Recall { .. }));
                    self.event(to, event, body);
                }
                Output::Ready { ticket, outcome } => {
                    let (life, delay) = (self.server.life, self.rng.below(3));
                    self.after(delay, What::Work(life, ticket, outcome));
                }
                Output::Settled(ticket) => self.settled(ticket),
            }
        }
        self.check_owners();
    }

    fn event(&mut self, to: SessionId, number: u64, body: Body) {
        let live = self.server.live.get_mut(&to).filter(|live| live.claimed);
        if let Some(live) = live
            && let Some(connection) = live.connection
        {
            live.sent.insert(number);
            self.send_to_client(connection, ToClient::Event { number, body });
        }
    }

    fn settled(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.remove(&ticket) else { return };
        if let Some(made) = pending.done {
            self.changed(pending.connection, pending.request, Ok(made), false);
        }
        if !pending.unnamed.is_empty() {
            self.server.collect();
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

    /// Whether a session does not do what it was told, for longer than its lease, and ships nothing for it either.
    fn is_stuck(&mut self, session: SessionId) -> bool {
        let now = self.now;
        let last = self.server.stored.sessions.get(&session).map(|stored| stored.last).unwrap_or_default();
        let Some(live) = self.server.live.get_mut(&session) else { return false };
        let Some(event) = live.sent.first().copied() else { return false };
        let late = live.late.filter(|(seen, ..)| *seen == event).unwrap_or((event, now, last));
        live.late = Some(late);
        let (_, since, batch) = late;
        now - since > LEASE && (now - live.worked > LEASE || last.0 - batch.0 > BATCHES_MAX)
    }

    /// Sessions that somebody waits for, and that have been silent for longer than their lease, or stuck.
    pub(crate) fn check_sessions(&mut self) {
        if !self.server.up {
            return;
        }
        let now = self.now;
        // An answer that waits for all claims waits for those who have not.
        let replays = !self.server.replays.is_empty();
        let unclaimed = self
            .server
            .live
            .iter()
            .filter(|(_, live)| replays && !live.ever_claimed)
            .map(|(session, _)| *session);
        let mut waited_for = self.server.grants.waited_for();
        waited_for.extend(unclaimed);
        let never_overdue = self.is_broken(Rule::NeverOverdue);
        let late: Vec<SessionId> = waited_for
            .into_iter()
            .filter(|session| {
                let is_stuck = !never_overdue && self.is_stuck(*session);
                is_stuck || self.server.live.get(session).is_some_and(|live| now - live.heard > LEASE)
            })
            .collect();
        for session in late {
            trace!(self, "{session} is evicted");
            self.end_session(session);
        }
        self.pump();
    }

    pub(crate) fn end_session(&mut self, session: SessionId) {
        let verdict = self.reference.ended(session);
        self.judge(&format!("{session} ends"), verdict);
        let live = self.server.live.remove(&session);
        self.server.stored.history.mark += 1;
        let last = self.server.stored.sessions.remove(&session).map(|stored| stored.last);
        self.server.ended.extend(last.map(|last| (session, last)));
        let owned = self.server.grants.owned_by(session);
        self.server.estates.leave(session, owned);
        self.server.unanswered.retain(|(of, _), _| *of != session);
        self.server.tickets.retain(|_, pending| pending.session != session || pending.done.is_some());
        // What it had without a name goes first: who waits to read that would be given it.
        self.server.collect();
        self.server.grants.end(session);
        self.server.collect();
        if let Some(connection) = live.and_then(|live| live.connection) {
            self.send_to_client(connection, ToClient::Ended { last });
        }
        self.pump();
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
                if !client.tree.has_inode(ino) && rows.get(&ino).is_none_or(|row| row.nlink == 0) {
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

    /// Sessions in the store.
    pub(crate) fn sessions(&self) -> Vec<SessionId> {
        self.server.stored.sessions.keys().copied().collect()
    }
}
