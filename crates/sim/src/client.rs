//! The model client: a tree, a log that is shipped in batches, and a stream whose messages are applied in order. What
//! `mount` does with input and output.

use std::collections::{BTreeMap, BTreeSet};

use hayloft_model::grants::Object;
use hayloft_model::tree::{Cut, Stale, Tree};
use hayloft_model::{Batch, FileKind, Ino, Missing, Record, Sequence, SessionId, Timestamp, Usage};

use crate::Rule;
use crate::kernel::Kernel;
use crate::messages::{Ask, Body, Listing, ToClient, ToServer};
use crate::operation::{Op, Process};
use crate::reference::{Attributes, Register, Value};
use crate::world::{LEASE, What, World, trace};

/// How long a name's directory lock is waited for before the epoch is raised.
const EXPIRY_PATIENCE: u64 = 10;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Link {
    Down,
    /// Said hello.
    Greeting,
    /// Has claimed.
    Claiming,
    Up,
}

#[derive(Debug)]
pub(crate) struct Outstanding {
    ask: Ask,
    sent: u64,
    /// The batch that was durable when it was sent.
    durable: Sequence,
}

#[derive(Debug)]
struct Recall {
    event: u64,
    object: Object,
    keep_read: bool,
    owned: bool,
    /// The batch that ships what was changed until then.
    until: Sequence,
}

#[derive(Debug)]
struct Expiry {
    names: Vec<(Ino, u8)>,
    in_use: Vec<Ino>,
    since: u64,
}

/// An event that is applied late, which is wrong.
#[derive(Debug)]
pub(crate) enum Late {
    Body(Body),
}

pub(crate) struct Client {
    pub(crate) life: u64,
    pub(crate) session: SessionId,
    pub(crate) tree: Tree,
    pub(crate) kernel: Kernel,
    pub(crate) connection: Option<u64>,
    link: Link,
    greeted: bool,
    hello_sent: u64,
    claim_sent: u64,
    lease_until: u64,
    pub(crate) lapsed: bool,
    last_sent: u64,
    next_request: u64,
    pub(crate) outstanding: BTreeMap<u64, Outstanding>,
    /// What is fetched, by request.
    fetches: BTreeMap<u64, Missing>,
    /// Answers to changes, until the operation takes them.
    pub(crate) answers: BTreeMap<u64, (Result<Option<Ino>, hayloft_model::TreeError>, bool)>,
    pub(crate) durable: Sequence,
    last_cut: Sequence,
    ship_to: Sequence,
    in_flight: Option<(Option<Cut>, Batch)>,
    commit_sent: u64,
    recalls: Vec<Recall>,
    expiries: BTreeMap<u64, Expiry>,
    /// Directories whose names are handed out for a moment only.
    pub(crate) hot: BTreeSet<Ino>,
    /// Names that the kernel was given without a limit.
    pub(crate) unlimited: BTreeSet<(Ino, u8)>,
    /// How far its clock is off.
    skew: i64,
    pub(crate) processes: Vec<Process>,
}

impl Client {
    pub(crate) fn is_idle(&self) -> bool {
        self.processes.iter().all(|process| process.op.is_none())
    }

    pub(crate) fn oldest_call(&self) -> Option<u64> {
        self.processes.iter().filter_map(|process| process.op.as_ref().map(|op| op.call)).min()
    }

    pub(crate) fn waits_for(&self) -> String {
        let ops: Vec<&Op> = self.processes.iter().filter_map(|process| process.op.as_ref()).collect();
        format!(
            "{ops:?}; link {:?}, lapsed {}, outstanding {:?}, recalls {:?}, expiries {:?}, durable {:?}, cut {:?}, \
             to ship {:?}",
            self.link,
            self.lapsed,
            self.outstanding,
            self.recalls,
            self.expiries,
            self.durable,
            self.last_cut,
            self.ship_to,
        )
    }

    fn is_at_rest(&self) -> bool {
        self.link == Link::Up
            && self.outstanding.values().all(|outstanding| matches!(outstanding.ask, Ask::Ping))
            && self.recalls.is_empty()
            && self.expiries.is_empty()
            && self.in_flight.is_none()
            && !self.tree.is_dirty()
    }

    /// The log up to here brings everything that was changed until now.
    pub(crate) fn everything(&self) -> Sequence {
        if self.tree.is_dirty() { self.last_cut.next() } else { self.last_cut }
    }
}

impl World {
    pub(crate) fn new_client(&mut self, _at: usize, life: u64) -> Client {
        let mut tree = Tree::new(Usage::default(), Usage::default());
        tree.share();
        tree.remember(Ino::ROOT);
        let mut kernel = Kernel::default();
        kernel.known.insert(Ino::ROOT, 1);
        let processes = (0..self.rng.between(1, 3)).map(|_| Process::default()).collect();
        Client {
            life,
            session: self.new_session(),
            tree,
            kernel,
            connection: None,
            link: Link::Down,
            greeted: false,
            hello_sent: 0,
            claim_sent: 0,
            lease_until: 0,
            lapsed: true,
            last_sent: 0,
            next_request: 1,
            outstanding: BTreeMap::new(),
            fetches: BTreeMap::new(),
            answers: BTreeMap::new(),
            durable: Sequence(0),
            last_cut: Sequence(0),
            ship_to: Sequence(0),
            in_flight: None,
            commit_sent: 0,
            recalls: Vec::new(),
            expiries: BTreeMap::new(),
            hot: BTreeSet::new(),
            unlimited: BTreeSet::new(),
            skew: self.rng.between(0, 20) as i64 - 10,
            processes,
        }
    }

    pub(crate) fn start_client(&mut self, at: usize, delay: u64) {
        let life = self.clients[at].life;
        self.after(delay, What::Connect(at, life));
        self.after(delay + 50, What::Ship(at, life));
        self.after(delay + LEASE / 3, What::Ping(at, life));
        self.after(delay + 40, What::Upkeep(at, life));
        for process in 0..self.clients[at].processes.len() {
            self.wake(at, process, delay);
        }
    }

    /// The client is gone, and somebody mounts the volume anew.
    pub(crate) fn restart_client(&mut self, at: usize) {
        if let Some(connection) = self.clients[at].connection.take() {
            let session = self.clients[at].session;
            self.connections.remove(&connection);
            self.server_loses(connection, session);
        }
        let life = self.clients[at].life + 1;
        self.clients[at] = self.new_client(at, life);
        let delay = self.rng.below(100);
        self.start_client(at, delay);
    }

    pub(crate) fn client_now(&self, at: usize) -> Timestamp {
        Timestamp::from_nanos(i128::from(self.now as i64 + self.clients[at].skew))
    }

    pub(crate) fn connect(&mut self, at: usize) {
        let client = &self.clients[at];
        if client.connection.is_some() {
            return;
        }
        let (life, session) = (client.life, client.session);
        if !self.server.up {
            return self.after(20, What::Connect(at, life));
        }
        let number = self.open(at, life, session);
        let now = self.now;
        let client = &mut self.clients[at];
        client.connection = Some(number);
        client.link = Link::Greeting;
        client.hello_sent = now;
        let resume = client.greeted;
        self.say(at, ToServer::Hello { session, resume });
    }

    pub(crate) fn client_loses(&mut self, at: usize) {
        let client = &mut self.clients[at];
        client.connection = None;
        client.link = Link::Down;
        // What was not given back is still its own: changes of it may be in the log.
        for recall in client.recalls.drain(..).filter(|recall| recall.owned) {
            client.tree.own(recall.object.ino());
        }
        client.expiries.clear();
        let life = client.life;
        let delay = self.rng.below(60);
        self.after(delay, What::Connect(at, life));
    }

    fn say(&mut self, at: usize, message: ToServer) {
        let now = self.now;
        self.clients[at].last_sent = now;
        if let Some(connection) = self.clients[at].connection {
            self.to_server(connection, message);
        }
    }

    fn heard(&mut self, at: usize, sent: u64) {
        let life = self.clients[at].life;
        let until = sent + LEASE;
        let now = self.now;
        let client = &mut self.clients[at];
        if until <= client.lease_until && !client.lapsed {
            return;
        }
        client.lease_until = client.lease_until.max(until);
        if client.lapsed && client.link == Link::Up && client.lease_until > now {
            client.lapsed = false;
            self.wake_all(at);
        }
        let wait = self.clients[at].lease_until.saturating_sub(now);
        self.after(wait, What::Lease(at, life));
    }

    pub(crate) fn check_lease(&mut self, at: usize) {
        let now = self.now;
        let no_lease = self.is_broken(Rule::NoLease);
        let client = &mut self.clients[at];
        if now >= client.lease_until && !client.lapsed && !no_lease {
            client.lapsed = true;
            client.kernel.expire_all();
            client.unlimited.clear();
            trace!(self, "the lease of c{at} has run out");
        }
    }

    pub(crate) fn ping(&mut self, at: usize) {
        let life = self.clients[at].life;
        self.after(LEASE / 6, What::Ping(at, life));
        if self.clients[at].link == Link::Up && self.now - self.clients[at].last_sent >= LEASE / 6 {
            self.ask(at, Ask::Ping);
        }
    }

    /// Asks the server; an answer wakes everybody.
    pub(crate) fn ask(&mut self, at: usize, ask: Ask) -> u64 {
        let now = self.now;
        let client = &mut self.clients[at];
        let request = client.next_request;
        client.next_request += 1;
        let outstanding = Outstanding { ask: ask.clone(), sent: now, durable: client.durable };
        client.outstanding.insert(request, outstanding);
        if client.link == Link::Up {
            self.send_ask(at, request, ask);
        }
        request
    }

    fn send_ask(&mut self, at: usize, request: u64, ask: Ask) {
        let client = &self.clients[at];
        let first = client.outstanding.keys().next().copied().unwrap_or(request);
        self.say(at, ToServer::Ask { request, forget_below: first, ask });
    }

    /// Fetches what is missing, unless that is under way.
    pub(crate) fn fetch(&mut self, at: usize, missing: Missing) -> u64 {
        let under_way =
            self.clients[at].fetches.iter().find(|(_, of)| **of == missing).map(|(request, _)| *request);
        if let Some(request) = under_way {
            return request;
        }
        let ask = match missing {
            Missing::Inode(ino) => Ask::Fetch(ino),
            Missing::Directory(dir) => Ask::Enter(dir),
            Missing::Own(object) => Ask::Acquire(object),
            Missing::Numbers | Missing::Executor => Ask::Numbers,
        };
        let request = self.ask(at, ask);
        self.clients[at].fetches.insert(request, missing);
        request
    }

    fn answered(&mut self, at: usize, request: u64) -> Option<Outstanding> {
        let client = &mut self.clients[at];
        client.fetches.remove(&request);
        let outstanding = client.outstanding.remove(&request)?;
        self.heard(at, outstanding.sent);
        self.wake_all(at);
        Some(outstanding)
    }

    pub(crate) fn client_receives(&mut self, at: usize, message: ToClient) {
        match message {
            ToClient::Welcome { last, numbers } => self.welcome(at, last, numbers),
            ToClient::Ended => {
                trace!(self, "c{at} was evicted");
                if let Some(connection) = self.clients[at].connection.take() {
                    self.connections.remove(&connection);
                }
                self.restart_client(at);
            }
            ToClient::Claimed => self.claimed(at),
            ToClient::Listings { request, listings } => {
                if self.answered(at, request).is_some() {
                    listings.into_iter().for_each(|listing| self.add_listing(at, listing));
                }
            }
            ToClient::Row { request, ino, row, own } => {
                if self.answered(at, request).is_some()
                    && let Some(row) = row
                {
                    let tree = &mut self.clients[at].tree;
                    tree.add_inode(ino, *row);
                    if own {
                        tree.own(ino);
                    }
                }
            }
            ToClient::Acquired { request, owned } => {
                trace!(self, "c{at} acquires: {owned}");
                self.answered(at, request);
            }
            ToClient::Changed { request, result, yours } => {
                if self.answered(at, request).is_some() {
                    self.clients[at].answers.insert(request, (result, yours));
                }
            }
            ToClient::Numbers { request, range } => {
                if self.answered(at, request).is_some() {
                    self.clients[at].tree.add_numbers(range);
                }
            }
            ToClient::Pong { request } => drop(self.answered(at, request)),
            ToClient::Committed(sequence) => {
                let sent = self.clients[at].commit_sent;
                if self.clients[at].in_flight.as_ref().is_some_and(|(_, batch)| batch.sequence == sequence) {
                    self.heard(at, sent);
                    self.shipped(at);
                }
            }
            ToClient::Refused(sequence) => self.refused(at, sequence),
            ToClient::Uncertain => {
                // The batch stays as it is, and goes out again.
                if let Some((_, batch)) = &self.clients[at].in_flight {
                    let batch = batch.clone();
                    self.say(at, ToServer::Commit(batch));
                }
            }
            ToClient::Event { number, body } => self.event_at_client(at, number, body),
        }
    }

    fn welcome(&mut self, at: usize, last: Sequence, numbers: hayloft_model::InoRange) {
        let now = self.now;
        let client = &mut self.clients[at];
        client.greeted = true;
        client.link = Link::Claiming;
        client.claim_sent = now;
        let stale = client.tree.uncover_all();
        client.tree.add_numbers(numbers);
        stale.attributes.iter().chain(&stale.data).for_each(|ino| client.kernel.invalidate(*ino));
        client.kernel.raise_epoch();
        client.unlimited.clear();
        let in_use = if self.is_broken(Rule::ForgetInUse) {
            Vec::new()
        } else {
            self.clients[at].tree.in_use().collect()
        };
        if self.clients[at].in_flight.as_ref().is_some_and(|(_, batch)| batch.sequence <= last) {
            self.shipped(at);
        }
        let own = self.clients[at].tree.owned();
        self.say(at, ToServer::Claim { own, in_use });
    }

    fn claimed(&mut self, at: usize) {
        self.clients[at].link = Link::Up;
        let sent = self.clients[at].claim_sent;
        self.heard(at, sent);
        self.check_lease(at);
        let now = self.now;
        if let Some((_, batch)) = &self.clients[at].in_flight {
            let batch = batch.clone();
            self.clients[at].commit_sent = now;
            self.say(at, ToServer::Commit(batch));
        }
        let again: Vec<(u64, Ask)> = self.clients[at]
            .outstanding
            .iter_mut()
            .map(|(request, outstanding)| {
                outstanding.sent = now;
                (*request, outstanding.ask.clone())
            })
            .collect();
        again.into_iter().for_each(|(request, ask)| self.send_ask(at, request, ask));
        self.let_go(at);
        self.wake_all(at);
    }

    fn add_listing(&mut self, at: usize, listing: Listing) {
        let client = &mut self.clients[at];
        listing.rows.into_iter().for_each(|(ino, row)| client.tree.add_inode(ino, row));
        client.tree.add_listing(listing.dir, listing.entries);
        for dir in listing.own {
            client.tree.own(dir);
            client.hot.remove(&dir);
        }
    }

    /// The log up to `until` is to be shipped.
    pub(crate) fn flush(&mut self, at: usize) -> Sequence {
        let until = self.clients[at].everything();
        let client = &mut self.clients[at];
        client.ship_to = client.ship_to.max(until);
        self.start_batch(at);
        until
    }

    pub(crate) fn ship(&mut self, at: usize) {
        let life = self.clients[at].life;
        let wait = self.rng.between(20, 300);
        self.after(wait, What::Ship(at, life));
        if self.clients[at].tree.is_dirty() {
            self.flush(at);
        }
        self.start_batch(at);
    }

    fn start_batch(&mut self, at: usize) {
        let now = self.now;
        let client = &mut self.clients[at];
        if client.link != Link::Up || client.in_flight.is_some() || client.last_cut >= client.ship_to {
            return;
        }
        let sequence = client.last_cut.next();
        let cut = client.tree.cut(sequence, false);
        client.last_cut = sequence;
        client.commit_sent = now;
        let batch = cut.batch.clone();
        client.in_flight = Some((Some(cut), batch.clone()));
        let session = client.session;
        self.reference.cut(session, sequence.0);
        self.say(at, ToServer::Commit(batch));
    }

    fn shipped(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let Some((_, batch)) = client.in_flight.take() else { return };
        client.durable = batch.sequence;
        let durable = client.durable;
        client.tree.shipped(durable);
        let (ready, rest) =
            std::mem::take(&mut client.recalls).into_iter().partition(|recall| recall.until <= durable);
        client.recalls = rest;
        let ready: Vec<Recall> = ready;
        ready.into_iter().for_each(|recall| self.give_back(at, recall));
        self.let_go(at);
        self.start_batch(at);
        self.wake_all(at);
    }

    fn refused(&mut self, at: usize, sequence: Sequence) {
        let client = &mut self.clients[at];
        let Some((cut, _)) = client.in_flight.take_if(|(_, batch)| batch.sequence == sequence) else {
            return;
        };
        if let Some(cut) = cut {
            client.tree.undo_cut(cut);
        }
        client.last_cut = Sequence(sequence.0 - 1);
        let session = client.session;
        self.reference.undo_cut(session, sequence.0);
        self.start_batch(at);
    }

    fn event_at_client(&mut self, at: usize, number: u64, body: Body) {
        if self.clients[at].link != Link::Up {
            // Cannot be: events go out after the claim was answered.
            return self.fail(format!("c{at} gets an event before its claim is answered"));
        }
        if self.is_broken(Rule::AckBeforeApply) && !matches!(body, Body::Recall { .. }) {
            let (life, wait) = (self.clients[at].life, self.rng.between(5, 60));
            self.after(wait, What::Late(at, life, Late::Body(body)));
            return self.say(at, ToServer::Ack { event: number, in_use: Vec::new() });
        }
        match body {
            Body::Apply { records, own, forget } => {
                let stale = self.apply(at, &records, &own, &forget);
                self.acknowledge(at, number, stale);
            }
            Body::Drop(ino) => {
                let stale = self.clients[at].tree.drop_rows(&[ino]);
                self.acknowledge(at, number, stale);
            }
            Body::Recall { object, keep_read } => {
                let tree = &mut self.clients[at].tree;
                let owned = tree.owned().iter().any(|own| own.ino() == object.ino());
                tree.disown(object.ino());
                let until =
                    if self.is_broken(Rule::RecallWithoutShip) { Sequence(0) } else { self.flush(at) };
                let recall = Recall { event: number, object, keep_read, owned, until };
                if recall.until <= self.clients[at].durable {
                    self.give_back(at, recall);
                } else {
                    self.clients[at].recalls.push(recall);
                }
            }
        }
    }

    fn apply(&mut self, at: usize, records: &[Record], own: &[Object], forget: &[Ino]) -> Stale {
        let client = &mut self.clients[at];
        for object in own {
            client.hot.remove(&object.ino());
        }
        client.tree.apply(records, own, forget)
    }

    pub(crate) fn apply_late(&mut self, at: usize, late: Late) {
        let stale = match late {
            Late::Body(Body::Apply { records, own, forget }) => self.apply(at, &records, &own, &forget),
            Late::Body(Body::Drop(ino)) => self.clients[at].tree.drop_rows(&[ino]),
            Late::Body(Body::Recall { .. }) => return,
        };
        let client = &mut self.clients[at];
        stale.attributes.iter().chain(&stale.data).for_each(|ino| client.kernel.invalidate(*ino));
        stale.names.iter().for_each(|(dir, name)| client.kernel.drop_name(*dir, name.as_bytes()[0]));
    }

    /// What was recalled is shipped.
    fn give_back(&mut self, at: usize, recall: Recall) {
        let mut stale = Stale::default();
        if !recall.keep_read {
            stale = self.clients[at].tree.uncover(recall.object);
            if let Object::Directory(_) = recall.object {
                // Names that it does not have were handed out as well.
                self.clients[at].kernel.raise_epoch();
                self.clients[at].unlimited.clear();
                stale.names.clear();
            }
        }
        let ino = recall.object.ino();
        if self.clients[at].tree.in_use().any(|used| used == ino) && !stale.in_use.contains(&ino) {
            // It has no name: whether it stays is the server's business from now on.
            stale.in_use.push(ino);
        }
        self.acknowledge(at, recall.event, stale);
    }

    /// The kernel is told what is stale, then the server.
    fn acknowledge(&mut self, at: usize, event: u64, stale: Stale) {
        let unlimited = self.is_broken(Rule::UnlimitedWhileChanging);
        let client = &mut self.clients[at];
        stale.attributes.iter().chain(&stale.data).for_each(|ino| client.kernel.invalidate(*ino));
        let names = stale
            .names
            .iter()
            .map(|(dir, name)| (*dir, name.as_bytes()[0]))
            .filter(|place| client.unlimited.contains(place))
            .filter(|(dir, _)| !unlimited || !client.hot.contains(dir))
            .collect();
        let since = self.now;
        client.expiries.insert(event, Expiry { names, in_use: stale.in_use, since });
        self.expire_names(at, event);
    }

    pub(crate) fn expire_names(&mut self, at: usize, event: u64) {
        let wait_for_locks = self.is_broken(Rule::WaitForLocks);
        let now = self.now;
        let client = &mut self.clients[at];
        let Some(expiry) = client.expiries.get_mut(&event) else { return };
        let (kernel, unlimited) = (&mut client.kernel, &mut client.unlimited);
        expiry.names.retain(|(dir, name)| {
            let blocked = kernel.is_locked(*dir);
            if !blocked {
                kernel.drop_name(*dir, *name);
                unlimited.remove(&(*dir, *name));
            }
            blocked
        });
        if !expiry.names.is_empty() && (now - expiry.since < EXPIRY_PATIENCE || wait_for_locks) {
            let life = client.life;
            return self.after(3, What::Expire(at, life, event));
        }
        if !expiry.names.is_empty() {
            trace!(self, "c{at} raises the epoch");
            let client = &mut self.clients[at];
            client.kernel.raise_epoch();
            client.unlimited.clear();
        }
        let client = &mut self.clients[at];
        let Some(Expiry { mut in_use, .. }) = client.expiries.remove(&event) else { return };
        // The kernel may have forgotten some while names were expired: the server was told, if it knew.
        let used: BTreeSet<Ino> = self.clients[at].tree.in_use().collect();
        in_use.retain(|ino| used.contains(ino));
        if self.is_broken(Rule::ForgetInUse) {
            in_use.clear();
        }
        self.say(at, ToServer::Ack { event, in_use });
    }

    /// Whether operations are answered.
    pub(crate) fn answers(&self, at: usize) -> bool {
        !self.clients[at].lapsed
    }

    pub(crate) fn upkeep(&mut self, at: usize) {
        let life = self.clients[at].life;
        let wait = self.rng.between(10, 200);
        self.after(wait, What::Upkeep(at, life));
        if self.rng.permille(300) {
            let inos: Vec<Ino> = self.clients[at].kernel.known.keys().copied().collect();
            let ino = *self.rng.pick(&inos);
            self.kernel_forgets(at, ino);
        }
        if self.rng.permille(300) {
            let client = &mut self.clients[at];
            // A fetch that is under way may bring what was so before a later batch.
            let durable = client.outstanding.values().map(|out| out.durable).min().unwrap_or(client.durable);
            let dropped = client.tree.evict(2, durable, |_| false);
            trace!(self, "c{at} evicts {dropped:?}");
        }
    }

    /// The kernel forgets an inode, if nothing uses it.
    pub(crate) fn kernel_forgets(&mut self, at: usize, ino: Ino) {
        let client = &mut self.clients[at];
        let pinned = client.processes.iter().any(|process| process.pins(ino));
        if ino == Ino::ROOT || pinned {
            return;
        }
        let count = client.kernel.forget(ino);
        client.tree.forget(ino, count);
        client.tree.take_ended();
        trace!(self, "the kernel of c{at} forgets {ino}");
        self.let_go(at);
    }

    /// Tells what is not in use any more; a claim tells what is.
    fn let_go(&mut self, at: usize) {
        let client = &mut self.clients[at];
        // A batch on its way may say that they are in use.
        if client.link != Link::Up || client.in_flight.is_some() {
            return;
        }
        let mut released = client.tree.take_released();
        let used: BTreeSet<Ino> = client.tree.in_use().collect();
        released.retain(|ino| !used.contains(ino));
        if !released.is_empty() {
            self.say(at, ToServer::LetGo(released));
        }
    }

    /// Everything comes to an end: connections heal, dead sessions are ended, logs are shipped.
    pub(crate) fn drain(&mut self) {
        self.server.fault = None;
        self.server.drain_until = self.now + 20_000;
        for at in 0..self.clients.len() {
            self.clients[at].processes.iter_mut().for_each(|process| process.open.clear());
        }
    }

    pub(crate) fn is_quiet(&mut self) -> bool {
        if !self.server.up || !self.server.is_idle() {
            return false;
        }
        let dead: Vec<SessionId> = self
            .sessions()
            .into_iter()
            .filter(|session| self.clients.iter().all(|client| client.session != *session))
            .collect();
        dead.into_iter().for_each(|session| self.end_session(session));
        for at in 0..self.clients.len() {
            if self.clients[at].link == Link::Up && self.clients[at].tree.is_dirty() {
                self.flush(at);
            }
        }
        self.clients.iter().all(Client::is_at_rest)
            && self.connections.values().all(|connection| connection.is_empty())
    }

    /// At rest: all views are one, and nothing is left over.
    pub(crate) fn check_end(&mut self) {
        let mut wrong = Vec::new();
        for (at, client) in self.clients.iter().enumerate() {
            for ((dir, name), target) in client.kernel.cached_names() {
                let verdict = self.reference.observed(
                    Register::Name(dir.0, name),
                    &Value::Name(target.map(|ino| ino.0)),
                    self.now,
                );
                if let Err(why) = verdict {
                    wrong.push(format!("the kernel of c{at}: {why}"));
                }
            }
            for (ino, attributes) in client.kernel.cached_attributes() {
                if self.reference.attributes(ino.0).is_some_and(|known| known != attributes) {
                    wrong.push(format!("the kernel of c{at}: {ino} is {attributes:?}"));
                }
            }
        }
        for at in 0..self.clients.len() {
            let inos: Vec<Ino> = self.clients[at].kernel.known.keys().copied().collect();
            inos.into_iter().for_each(|ino| self.kernel_forgets(at, ino));
        }
        let rows = self.server.stored.rows.clone();
        for (at, client) in self.clients.iter_mut().enumerate() {
            for (ino, row) in &rows.inodes {
                if let Ok(here) = client.tree.inode(*ino)
                    && here != row
                {
                    wrong.push(format!("c{at} has {ino} as {here:?}, stored is {row:?}"));
                }
                if row.kind() == FileKind::Directory
                    && client.tree.is_listed(*ino)
                    && client.tree.has_inode(*ino)
                {
                    let here: Vec<_> = client
                        .tree
                        .entries(*ino, 0)
                        .map(|all| all.map(|(name, dentry)| (name.clone(), *dentry)).collect())
                        .unwrap_or_default();
                    if here != rows.listing(*ino) {
                        wrong.push(format!(
                            "c{at} has {ino} with {here:?}, stored is {:?}",
                            rows.listing(*ino)
                        ));
                    }
                }
            }
        }
        let stored: BTreeMap<(u64, u8), u64> = rows
            .dentries
            .iter()
            .map(|((dir, name), dentry)| ((dir.0, name.as_bytes()[0]), dentry.ino.0))
            .collect();
        if stored != *self.reference.names() {
            wrong.push(format!("stored names are {stored:?}, not {:?}", self.reference.names()));
        }
        for (ino, row) in &rows.inodes {
            let known = self.reference.attributes(ino.0);
            if known != Some(Attributes::of(row)) && row.nlink > 0 {
                wrong.push(format!("{ino} is stored as {row:?}, not {known:?}"));
            }
            let data = match &row.content {
                hayloft_model::Content::Inline(data) => data.to_vec(),
                _ => Vec::new(),
            };
            if row.kind() == FileKind::Regular && row.nlink > 0 && data != self.reference.data(ino.0) {
                wrong.push(format!("the data of {ino} is {data:?}, not {:?}", self.reference.data(ino.0)));
            }
        }
        let named = rows.inodes.iter().filter(|(ino, row)| row.nlink > 0 && **ino != Ino::ROOT);
        let usage =
            Usage { inodes: named.clone().count() as u64, bytes: named.map(|(_, row)| row.allocated).sum() };
        if usage != self.server.stored.usage {
            wrong.push(format!("the usage is {usage:?}, and counted as {:?}", self.server.stored.usage));
        }
        if let Some(wrong) = wrong.into_iter().next() {
            return self.fail(format!("at the end: {wrong}"));
        }
        self.check_unused();
    }

    /// With all kernels empty, no inode without a name may be left.
    fn check_unused(&mut self) {
        let until = self.now + 4 * LEASE;
        self.server.drain_until = until + 1;
        while self.outcome.failure.is_none() {
            if !self.one_more_before(until) {
                break;
            }
        }
        let left: Vec<Ino> = self
            .server
            .stored
            .rows
            .inodes
            .iter()
            .filter(|(_, row)| row.nlink == 0)
            .map(|(ino, _)| *ino)
            .collect();
        if !left.is_empty() && self.outcome.failure.is_none() {
            self.fail(format!("inodes {left:?} have neither a name nor a user, and are left"));
        }
    }
}
