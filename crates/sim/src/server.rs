//! The model server: the grant machine, with rows in memory for a store. What `volume::sharing` does with input and
//! output.

use std::collections::{BTreeMap, BTreeSet};

use hayloft_model::grants::{Grant, Grants, Object, Order, Outcome as Turn, Output, Request, STRAY, Ticket};
use hayloft_model::tree::FIRST_COOKIE;
use hayloft_model::{
    Batch, Change, Content, Executed, Execution, FileKind, Ino, InoRange, InodeRow, Record, Rows, Sequence,
    SessionId, Timestamp, TreeError, Usage, Wants,
};

use crate::Rule;
use crate::messages::{Ask, Body, Listing, ToClient, ToServer};
use crate::reference::Attributes;
use crate::world::{LEASE, What, World, trace};

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
#[derive(Debug, Default)]
pub(crate) struct Stored {
    pub(crate) rows: Rows,
    pub(crate) usage: Usage,
    next_ino: u64,
    pub(crate) sessions: BTreeMap<SessionId, StoredSession>,
}

#[derive(Debug, Default)]
struct Live {
    connection: Option<u64>,
    /// Its connection has claimed: events go out.
    claimed: bool,
    ever_claimed: bool,
    heard: u64,
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
    pub(crate) life: u64,
    pub(crate) stored: Stored,
    pub(crate) grants: Grants,
    live: BTreeMap<SessionId, Live>,
    tickets: BTreeMap<Ticket, Pending>,
    /// Inodes that lost their name by an event which a session has not acknowledged: it may use them.
    unanswered: BTreeMap<(SessionId, u64), Vec<Ino>>,
    /// Changes that were carried out before, to be answered when everybody has claimed.
    replays: Vec<(u64, u64, Option<Ino>)>,
    pub(crate) fault: Option<Fault>,
    pub(crate) drain_until: u64,
}

impl Server {
    pub(crate) fn new() -> Server {
        let mut stored = Stored { next_ino: Ino::FIRST.0, ..Stored::default() };
        let root = InodeRow {
            mode: FileKind::Directory.bits() | 0o755,
            uid: 0,
            gid: 0,
            nlink: 2,
            rdev: 0,
            size: 0,
            allocated: 0,
            atime: Timestamp::default(),
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
            btime: Timestamp::default(),
            parent: Ino::ROOT,
            next_cookie: FIRST_COOKIE,
            xattrs: BTreeMap::default(),
            content: Content::None,
        };
        stored.rows.inodes.insert(Ino::ROOT, root);
        Server {
            up: true,
            life: 1,
            stored,
            grants: Grants::default(),
            live: BTreeMap::new(),
            tickets: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            replays: Vec::new(),
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
            || self.grants.owner(ino).is_some()
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
                self.stored.rows.apply(&Record::DeleteInode(ino));
                self.grants.forget(ino);
            }
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.tickets.is_empty() && self.replays.is_empty()
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
        let pause = self.rng.between(5, LEASE / 2);
        self.after(pause, What::ServerStart);
    }

    pub(crate) fn start_server(&mut self) {
        if self.server.up {
            return;
        }
        trace!(self, "the server starts");
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
        if let ToServer::Hello { session, resume } = message {
            return self.hello(connection, session, resume);
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
            ToServer::Commit(batch) => self.commit(connection, session, &batch),
            ToServer::Ack { event, in_use } => {
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
            ToServer::Goodbye => self.end_session(session),
        }
        self.pump();
    }

    fn hello(&mut self, connection: u64, session: SessionId, resume: bool) {
        let known = self.server.stored.sessions.contains_key(&session);
        if resume && !known {
            return self.to_client(connection, ToClient::Ended);
        }
        if !known {
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
        if let Some(old) = old {
            self.connections.remove(&old);
        }
        let numbers = self.numbers();
        let last = self.server.stored.sessions[&session].last;
        self.to_client(connection, ToClient::Welcome { last, numbers });
        self.pump();
    }

    fn numbers(&mut self) -> InoRange {
        let next = self.server.stored.next_ino;
        self.server.stored.next_ino += 20;
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
        self.to_client(connection, ToClient::Claimed);
    }

    fn asked(&mut self, connection: u64, session: SessionId, request: u64, ask: Ask) {
        let objects = match &ask {
            Ask::Ping => return self.to_client(connection, ToClient::Pong { request }),
            Ask::Numbers => {
                let range = self.numbers();
                return self.to_client(connection, ToClient::Numbers { request, range });
            }
            Ask::Enter(dir) => match self.server.object(*dir) {
                Some(Object::Directory(dir)) => vec![Object::Directory(dir)],
                _ => return self.to_client(connection, ToClient::Listings { request, listings: Vec::new() }),
            },
            Ask::Fetch(ino) => match self.server.object(*ino) {
                Some(object) => vec![object],
                None => {
                    return self
                        .to_client(connection, ToClient::Row { request, ino: *ino, row: None, own: false });
                }
            },
            Ask::Acquire(object) => match self.server.object(object.ino()) {
                Some(object) => vec![object],
                None => return self.to_client(connection, ToClient::Acquired { request, owned: false }),
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
        };
        self.request(Pending { session, connection, request, ask, objects, done: None, unnamed: Vec::new() });
    }

    fn request(&mut self, pending: Pending) {
        let objects = pending.objects.clone();
        let request = match &pending.ask {
            Ask::Acquire(_) => Request::Own(objects[0]),
            Ask::Change { execute, .. } => Request::Change { objects, local: !execute },
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
        self.to_client(connection, ToClient::Changed { request, result, yours });
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
        let live = self.server.live.get(&to).filter(|live| live.claimed);
        if let Some(connection) = live.and_then(|live| live.connection) {
            self.to_client(connection, ToClient::Event { number, body });
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

    /// The turn of a request has come.
    pub(crate) fn work(&mut self, ticket: Ticket, turn: Turn) {
        let Some(pending) = self.server.tickets.get(&ticket) else {
            // Its session is over, or has a new connection.
            self.server.grants.cancel(ticket);
            return self.pump();
        };
        if !self.server.live.contains_key(&pending.session) {
            self.give_up(ticket);
            return self.pump();
        }
        match (&pending.ask, turn) {
            (Ask::Enter(dir), _) => {
                let dir = *dir;
                let send = Send::Listings(self.read_directories(ticket, dir));
                self.read_done(ticket, send);
            }
            (Ask::Fetch(ino), _) => {
                let ino = *ino;
                match self.server.object(ino).filter(|object| !pending.objects.contains(object)) {
                    Some(object) => self.extend(ticket, vec![object]),
                    None => {
                        let row = self.server.stored.rows.inodes.get(&ino).cloned().map(Box::new);
                        self.read_done(ticket, Send::Row(row));
                    }
                }
            }
            (Ask::Acquire(_), Turn::Granted) => self.acquired(ticket),
            (Ask::Acquire(_), _) => {
                let (connection, request) = (pending.connection, pending.request);
                self.to_client(connection, ToClient::Acquired { request, owned: false });
                self.finish(ticket);
            }
            (Ask::Change { .. }, Turn::Yours(own)) => self.yours(ticket, &own),
            (Ask::Change { .. }, _) => self.execute(ticket),
            (Ask::Numbers | Ask::Ping, _) => {}
        }
    }

    fn extend(&mut self, ticket: Ticket, more: Vec<Object>) {
        trace!(self, "{ticket:?} also needs {more:?}");
        if let Some(pending) = self.server.tickets.get_mut(&ticket) {
            pending.objects.extend(more.iter().copied());
        }
        self.server.grants.extend(ticket, more);
        self.pump();
    }

    fn read_done(&mut self, ticket: Ticket, send: Send) {
        let (life, delay) = (self.server.life, self.rng.below(4));
        self.after(delay, What::Send(life, ticket, send));
    }

    pub(crate) fn send_read(&mut self, ticket: Ticket, send: Send) {
        let Some(pending) = self.server.tickets.get(&ticket) else {
            self.server.grants.cancel(ticket);
            return self.pump();
        };
        let (connection, request) = (pending.connection, pending.request);
        let message = match send {
            Send::Listings(mut listings) => {
                // A recall may have gone into the stream since they were read.
                let (grants, session) = (&self.server.grants, pending.session);
                for listing in &mut listings {
                    listing.own.retain(|dir| grants.held(session, *dir) == Some(Grant::Own));
                }
                ToClient::Listings { request, listings }
            }
            Send::Row(row) => {
                let Ask::Fetch(ino) = pending.ask else { return };
                let own = self.server.grants.held(pending.session, ino) == Some(Grant::Own);
                ToClient::Row { request, ino, row, own }
            }
        };
        self.to_client(connection, message);
        self.finish(ticket);
    }

    /// A directory, and some below it.
    fn read_directories(&mut self, ticket: Ticket, dir: Ino) -> Vec<Listing> {
        let mut listings = Vec::new();
        if !self.server.stored.rows.inodes.contains_key(&dir) {
            return listings;
        }
        let Some(session) = self.server.tickets.get(&ticket).map(|pending| pending.session) else {
            return listings;
        };
        let mut todo = vec![dir];
        while let Some(dir) = todo.pop() {
            let listing = self.read_directory(ticket, session, dir);
            for (child, row) in &listing.rows {
                if row.kind() == FileKind::Directory && *child != dir && self.rng.permille(300) {
                    todo.push(*child);
                }
            }
            listings.push(listing);
        }
        listings
    }

    fn read_directory(&mut self, ticket: Ticket, session: SessionId, dir: Ino) -> Listing {
        let uncovered = self.is_broken(Rule::ListUncovered);
        let server = &mut self.server;
        let entries = server.stored.rows.listing(dir);
        let mut rows = Vec::new();
        let mut own = Vec::new();
        if server.grants.held(session, dir) == Some(Grant::Own) {
            own.push(dir);
        }
        rows.extend(server.stored.rows.inodes.get(&dir).map(|row| (dir, row.clone())));
        for (_, dentry) in &entries {
            let Some(row) = server.stored.rows.inodes.get(&dentry.ino) else { continue };
            let visible = match object_of(dentry.ino, row) {
                Object::Directory(child) => match server.grants.read_along(ticket, child) {
                    Some(Grant::Own) => {
                        own.push(child);
                        true
                    }
                    held => held.is_some(),
                },
                // Nobody has claimed a stray for this: it may change while the answer is made. What the session owns by
                // itself it has, and may be told to give back meanwhile.
                object => {
                    object.home().is_some()
                        && server.grants.covers(session, object)
                        && server.grants.owner(object.ino()).is_none()
                }
            };
            if visible || uncovered {
                rows.push((dentry.ino, row.clone()));
            }
        }
        Listing { dir, entries, rows, own }
    }

    fn acquired(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let granted = pending.objects[0];
        let object = self.server.object(granted.ino());
        if object != Some(granted) {
            // It is something else by now: another home, or nothing at all.
            self.server.grants.forget(granted.ino());
            let pending = self.give_up(ticket);
            match (object, pending) {
                (Some(object), Some(pending)) => self.request(Pending { objects: vec![object], ..pending }),
                _ => self.to_client(connection, ToClient::Acquired { request, owned: false }),
            }
            return self.pump();
        }
        let row = self.server.stored.rows.inodes[&granted.ino()].clone();
        let records = vec![Record::PutInode(granted.ino(), Box::new(row))];
        if let Some(event) = self.server.grants.tell(session) {
            self.event(session, event, Body::Apply { records, own: vec![granted], forget: Vec::new() });
        }
        self.to_client(connection, ToClient::Acquired { request, owned: true });
        self.finish(ticket);
    }

    fn yours(&mut self, ticket: Ticket, own: &[Object]) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let rows = &self.server.stored.rows.inodes;
        if own.iter().any(|object| !rows.contains_key(&object.ino())) {
            own.iter()
                .filter(|object| !rows.contains_key(&object.ino()))
                .for_each(|object| self.server.grants.forget(object.ino()));
            self.give_up(ticket);
            self.changed(connection, request, Err(TreeError::Stale), false);
            return self.pump();
        }
        let records = own
            .iter()
            .map(|object| Record::PutInode(object.ino(), Box::new(rows[&object.ino()].clone())))
            .collect();
        if let Some(event) = self.server.grants.tell(session) {
            self.event(session, event, Body::Apply { records, own: own.to_vec(), forget: Vec::new() });
        }
        self.changed(connection, request, Ok(None), true);
        self.finish(ticket);
    }

    fn run_change(&mut self, change: &Change) -> Result<Executed, TreeError> {
        let mut execution = Execution::new(change.clone(), self.server.stored.usage, Usage::default());
        let now = Timestamp::from_nanos(i128::from(self.now));
        let server = &mut self.server;
        loop {
            match execution.run(now) {
                Ok(result) => return result,
                Err(Wants::Inode(ino)) => {
                    execution.give_inode(ino, server.stored.rows.inodes.get(&ino).cloned());
                }
                Err(Wants::Names(dir, names)) => {
                    let all = server.stored.rows.listing(dir);
                    execution.give_names(dir, all.into_iter().filter(|(name, _)| names.contains(name)));
                }
                Err(Wants::AnyName(dir)) => {
                    execution.give_names(dir, server.stored.rows.listing(dir).into_iter().take(1));
                }
                Err(Wants::Numbers) => {
                    let next = server.stored.next_ino;
                    server.stored.next_ino += 1;
                    execution.give_numbers(InoRange { next, end: next + 1 });
                }
            }
        }
    }

    fn execute(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let Ask::Change { change, .. } = pending.ask.clone() else { return };
        let claimed = pending.objects.clone();
        let mut executed = match self.run_change(&change) {
            Ok(executed) => executed,
            Err(error) => {
                self.give_up(ticket);
                self.changed(connection, request, Err(error), false);
                return self.pump();
            }
        };
        let mut more: Vec<Object> =
            executed.objects.iter().filter(|object| !claimed.contains(object)).copied().collect();
        if !more.is_empty() {
            more.dedup();
            return self.extend(ticket, more);
        }
        let Some(session_row) = self.server.stored.sessions.get_mut(&session) else {
            self.give_up(ticket);
            return self.pump();
        };
        session_row.outcomes.insert(request, executed.made);
        self.outcome.executed += 1;
        let stored = &mut self.server.stored;
        executed.records.iter().for_each(|record| stored.rows.apply(record));
        stored.usage = stored.usage.after(executed.usage);
        self.judge_execution(session, request, &change, &executed);
        for birth in &executed.births {
            self.server.grants.adopt(session, *birth);
        }
        self.publish(ticket, session, &mut executed);
        if let Some(pending) = self.server.tickets.get_mut(&ticket) {
            (pending.done, pending.unnamed) = (Some(executed.made), executed.unnamed);
        }
        self.finish(ticket);
    }

    fn judge_execution(&mut self, session: SessionId, request: u64, change: &Change, executed: &Executed) {
        let Some(op) = self.reference.requests.get(&(session, request)).copied() else {
            return self.fail(format!("a request that nobody made: {session} {request}"));
        };
        let rows = &self.server.stored.rows.inodes;
        let row = |ino: u64| rows.get(&Ino(ino)).map(Attributes::of);
        let made = executed.made.map(|ino| ino.0);
        let verdict = self.reference.change(op, change, made, row, self.now);
        self.judge(&format!("op {op} executed"), verdict);
        let verdict = self.reference.executed(op);
        self.judge(&format!("op {op} executed"), verdict);
    }

    fn publish(&mut self, ticket: Ticket, session: SessionId, executed: &mut Executed) {
        let births: Vec<Ino> = executed.births.iter().map(|object| object.ino()).collect();
        for (to, event) in self.server.grants.publish(ticket, &executed.objects) {
            let asker = to == session;
            let mut records = Vec::new();
            let mut forget = Vec::new();
            for record in &executed.records {
                match record {
                    Record::PutInode(ino, row) => {
                        let visible = row.nlink == 0
                            || (!births.contains(ino) || asker)
                                && self.server.grants.covers(to, object_of(*ino, row));
                        match visible {
                            true => records.push(record.clone()),
                            false if births.contains(ino) => {}
                            false => forget.push(*ino),
                        }
                    }
                    Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => {
                        if self.server.grants.held(to, *dir).is_some() {
                            records.push(record.clone());
                        }
                    }
                    _ => {}
                }
            }
            if !executed.unnamed.is_empty() {
                self.server.unanswered.insert((to, event), executed.unnamed.clone());
            }
            let own = if asker { executed.births.clone() } else { Vec::new() };
            self.event(to, event, Body::Apply { records, own, forget });
        }
    }

    fn commit(&mut self, connection: u64, session: SessionId, batch: &Batch) {
        let last = self.server.stored.sessions[&session].last;
        if batch.sequence <= last && !self.is_broken(Rule::ReplayTwice) {
            return self.to_client(connection, ToClient::Committed(batch.sequence));
        }
        if batch.sequence > last.next() {
            return self.fail(format!("{session} commits {:?} after {last:?}", batch.sequence));
        }
        match self.server.fault.take() {
            Some(Fault::Refuse) => {
                return self.to_client(connection, ToClient::Refused(batch.sequence));
            }
            Some(Fault::UncertainLost) => {
                return self.to_client(connection, ToClient::Uncertain);
            }
            Some(Fault::UncertainApplied) => {
                self.to_client(connection, ToClient::Uncertain);
            }
            None => self.to_client(connection, ToClient::Committed(batch.sequence)),
        }
        let checked = self.check_batch(session, batch);
        self.judge(&format!("{session} commits {}", batch.sequence.0), checked);
        let now = self.now;
        for record in &batch.records {
            let server = &mut self.server;
            match record {
                Record::DeleteInode(ino) => {
                    server.grants.forget(*ino);
                    // Whoever deletes it has it in use no more.
                    server.live.entry(session).or_default().uses.remove(ino);
                    let used = server.is_used(*ino);
                    let row = server.stored.rows.inodes.get_mut(ino).filter(|_| used);
                    match row {
                        Some(row) => {
                            (row.nlink, row.parent) =
                                (0, if row.kind() == FileKind::Directory { row.parent } else { STRAY });
                            let data = match &row.content {
                                Content::Inline(data) => data.to_vec(),
                                _ => Vec::new(),
                            };
                            self.reference.deleted_elsewhere(ino.0, Attributes::of(row), data, now);
                        }
                        None => server.stored.rows.apply(record),
                    }
                }
                record => server.stored.rows.apply(record),
            }
        }
        self.server.stored.usage = self.server.stored.usage.after(batch.usage);
        if let Some(live) = self.server.live.get_mut(&session) {
            live.uses.extend(&batch.orphans);
        }
        if let Some(stored) = self.server.stored.sessions.get_mut(&session) {
            stored.last = batch.sequence;
        }
        self.reference.committed(session, batch.sequence.0);
    }

    /// A session changes only what it owns; what it has made it owns from now on.
    fn check_batch(&mut self, session: SessionId, batch: &Batch) -> Result<(), String> {
        let server = &mut self.server;
        let owns = |grants: &Grants, ino: Ino| grants.owner(ino) == Some(session);
        for record in &batch.records {
            if let Record::PutInode(ino, row) = record
                && row.kind() == FileKind::Directory
                && !owns(&server.grants, *ino)
                && (server.stored.rows.inodes.contains_key(ino)
                    || !server.grants.adopt(session, Object::Directory(*ino)))
            {
                return Err(format!("directory {ino} is not its own"));
            }
        }
        for record in &batch.records {
            let (ino, after) = match record {
                Record::PutInode(ino, row) if row.kind() != FileKind::Directory => (*ino, Some(row)),
                Record::DeleteInode(ino) => (*ino, None),
                Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => {
                    if !owns(&server.grants, *dir) {
                        return Err(format!("the names of {dir} are not its own"));
                    }
                    continue;
                }
                _ => continue,
            };
            let by_itself = owns(&server.grants, ino);
            let before = server.object(ino);
            let by_home = before.and_then(Object::home).is_some_and(|home| owns(&server.grants, home));
            if before.is_some() && !by_itself && !by_home {
                return Err(format!("{ino} is not its own: {before:?}, {:?}", server.grants.owner(ino)));
            }
            let Some(row) = after else { continue };
            let object = object_of(ino, row);
            if (by_itself || object.home().is_none()) && !server.grants.adopt(session, object) {
                return Err(format!("{object:?} cannot be its own"));
            }
        }
        Ok(())
    }

    /// Sessions that somebody waits for, and that have been silent for longer than their lease.
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
        let late: Vec<SessionId> = waited_for
            .into_iter()
            .filter(|session| self.server.live.get(session).is_some_and(|live| now - live.heard > LEASE))
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
        self.server.stored.sessions.remove(&session);
        self.server.unanswered.retain(|(of, _), _| *of != session);
        self.server.tickets.retain(|_, pending| pending.session != session || pending.done.is_some());
        self.server.grants.end(session);
        self.server.collect();
        if let Some(connection) = live.and_then(|live| live.connection) {
            self.to_client(connection, ToClient::Ended);
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
                let owner = self.server.grants.owner(object.ino());
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
