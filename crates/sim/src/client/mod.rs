//! The model client: a tree, a log that is shipped in batches, and a stream whose messages are applied in order. What
//! `mount` does with input and output.

mod end;
mod events;
mod foreword;
mod link;
mod trees;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hayloft_model::grants::{Object, STRAY};
use hayloft_model::replay::Kept;
use hayloft_model::tree::{Cut, Stale, Tree};
use hayloft_model::{
    Batch, Change, FileKind, Ino, InodeRow, Missing, Name, Record, Sequence, SessionId, Timestamp, Usage,
};

use crate::Rule;
use crate::history::Heard;
use crate::kernel::Kernel;
use crate::messages::{Ask, Body, Doing, Entry, Listing, ToClient, ToServer};
use crate::operation::{Op, Process};
use crate::reference::{Attributes, Register, Value};
use crate::world::{LEASE, What, World, trace};

pub(crate) use end::differs;
use foreword::Foreword;

/// How long a name's directory lock is waited for before the epoch is raised.
const EXPIRY_PATIENCE: u64 = 10;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Link {
    Down,
    /// Said hello.
    Greeting,
    /// Has claimed.
    Claiming,
    /// Brings what the session before it had not shipped.
    Restoring,
    Up,
}

#[derive(Debug)]
pub(crate) struct Outstanding {
    ask: Ask,
    sent: u64,
    /// When a batch was sent last before it.
    work: u64,
    /// The last batch that the server had when it was sent.
    accepted: Sequence,
}

#[derive(Debug)]
struct Recall {
    event: u64,
    object: Object,
    keep_read: bool,
    /// What of it was owned: a directory with its slots.
    owned: Vec<Ino>,
    /// The batch that ships what was changed until then.
    until: Sequence,
}

#[derive(Debug)]
struct Expiry {
    names: Vec<(Ino, u8)>,
    /// Inodes of which an answer is on its way that the kernel would take for what is so.
    unknown: Vec<Ino>,
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
    /// The number of the volume's tree that it knows.
    pub(crate) tree_number: u64,
    /// The session in whose place its own comes.
    replaces: Option<SessionId>,
    pub(crate) session: SessionId,
    pub(crate) tree: Tree,
    pub(crate) kernel: Kernel,
    pub(crate) connection: Option<u64>,
    link: Link,
    greeted: bool,
    hello_sent: u64,
    claim_sent: u64,
    /// When the last message was sent that was answered.
    heard: u64,
    /// Events that the server is not known to have the acknowledgement of, with what had been heard when they came, and
    /// when they were acknowledged.
    owed: BTreeMap<u64, (u64, Option<u64>)>,
    /// When the last batch was sent that has arrived.
    arrived: u64,
    /// There was no room for the last one on this connection: the server does not count further ones.
    refused: bool,
    pub(crate) lapsed: bool,
    /// The store as it knows it.
    pub(crate) history: Heard,
    /// What is not known to be durable.
    pub(crate) kept: Kept<Entry>,
    /// That is another one by now: all calls fail.
    pub(crate) is_over: bool,
    /// It acknowledges nothing, and gives nothing back.
    pub(crate) stuck: bool,
    /// Who is on the way to make a name last is waited for.
    awaits_callers: bool,
    /// Who lists a directory is waited for before the epoch is raised for its names; and names of others that are listed count as held
    /// after that.
    awaits_listings: bool,
    keeps_listed: bool,
    /// Names that somebody may make last are expired also when the epoch was raised.
    keeps_notes: bool,
    /// The last event of the connection that was applied.
    seen: u64,
    last_sent: u64,
    next_request: u64,
    pub(crate) outstanding: BTreeMap<u64, Outstanding>,
    /// What is fetched, by request.
    fetches: BTreeMap<u64, Missing>,
    /// Answers to changes, until the operation takes them.
    pub(crate) answers: BTreeMap<u64, (Result<Option<Ino>, hayloft_model::TreeError>, Doing)>,
    /// The last batch that the server has.
    pub(crate) accepted: Sequence,
    last_cut: Sequence,
    ship_to: Sequence,
    in_flight: Option<(Option<Cut>, Batch)>,
    /// What a session of this host had not shipped that was ended.
    unsent: Option<(Batch, SessionId)>,
    commit_sent: u64,
    /// Its last batch was refused for want of room: it takes no more. How often that was.
    pub(crate) full: bool,
    pub(crate) refusals: u64,
    /// It waits before it tries that again.
    pauses: bool,
    /// Others wait for the batch on its way.
    pressing: bool,
    recalls: Vec<Recall>,
    /// With a rule left out: recalls of a connection that is lost.
    late: Vec<Recall>,
    /// What the server has asked to be shipped, with the batch that ships it.
    ships: Vec<(u64, Sequence)>,
    expiries: BTreeMap<u64, Expiry>,
    /// What is about to be applied.
    foreword: Option<Foreword>,
    /// What has come behind it.
    behind: VecDeque<ToClient>,
    /// Names that the kernel has not let go of in time, and which are not so any more.
    pub(crate) left: BTreeSet<(Ino, u8)>,
    /// Directories whose names are handed out for a moment only.
    pub(crate) hot: BTreeSet<Ino>,
    /// The same of directories that others change, until when: where kernels follow names.
    warm: BTreeMap<Ino, u64>,
    /// Names that the kernel was given without a limit.
    pub(crate) unlimited: BTreeSet<(Ino, u8)>,
    /// How far its clock is off.
    pub(crate) skew: i64,
    /// It begins nothing more, and says goodbye when everything is shipped.
    pub(crate) leaving: bool,
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
            "{ops:?}; link {:?}, lapsed {}, outstanding {:?}, recalls {:?}, expiries {:?}, accepted {:?}, cut {:?}, \
             to ship {:?}",
            self.link,
            self.lapsed,
            self.outstanding,
            self.recalls,
            self.expiries,
            self.accepted,
            self.last_cut,
            self.ship_to,
        )
    }

    /// Until when it may answer: the server lets the lease of a session run no longer that does not acknowledge.
    fn lease_until(&self, relies_on_pings: bool) -> u64 {
        let owed = self.owed.values().next().filter(|_| !relies_on_pings);
        owed.map_or(self.heard, |(since, _)| self.heard.min(self.arrived.max(*since))) + LEASE
    }

    fn is_at_rest(&self) -> bool {
        self.link == Link::Up
            && self.outstanding.values().all(|outstanding| matches!(outstanding.ask, Ask::Ping))
            && self.recalls.is_empty()
            && self.expiries.is_empty()
            && self.foreword.is_none()
            && self.in_flight.is_none()
            && !self.tree.is_dirty()
    }

    /// The store is another one: it is mounted no more.
    pub(crate) fn end(&mut self) {
        (self.is_over, self.lapsed, self.link) = (true, true, Link::Down);
    }

    /// What it has not shipped.
    pub(crate) fn take_unsent(&mut self) -> Batch {
        if let Some((Some(cut), _)) = self.in_flight.take() {
            self.tree.undo_cut(cut);
        }
        self.tree.cut(Sequence(1), false).batch
    }

    /// The batch on its way.
    pub(crate) fn on_its_way(&self) -> Option<u64> {
        self.in_flight.as_ref().map(|(_, batch)| batch.sequence.0)
    }

    /// Whether a server has taken its session.
    pub(crate) fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// Whether somebody waits for it to give something back.
    pub(crate) fn gives_back(&self) -> bool {
        !self.recalls.is_empty()
    }

    /// Whether an operation waits to ask the server for a change, which comes after all older ones.
    pub(crate) fn requests(&self) -> bool {
        self.processes.iter().any(|process| process.op.as_ref().is_some_and(Op::waits_to_request))
    }

    /// All names are looked up anew, because of names of these directories.
    fn drop_names(&mut self, is_meant: impl Fn(Ino) -> bool) {
        if self.awaits_listings {
            let ops = self.processes.iter_mut().filter_map(|process| process.op.as_mut());
            ops.filter(|op| op.lists().is_some_and(&is_meant))
                .for_each(|op| op.comes_to_listing(&mut self.kernel));
        }
        self.kernel.raise_epoch();
        let ops = self.processes.iter().filter_map(|process| process.op.as_ref());
        let listed: BTreeSet<Ino> = ops.filter(|_| self.keeps_listed).filter_map(Op::lists).collect();
        self.unlimited.retain(|(dir, _)| listed.contains(dir));
        self.left.clear();
        // A listing may give what is late the new epoch.
        let ops = self.processes.iter().filter_map(|process| process.op.as_ref());
        let late = ops.filter(|_| self.keeps_notes && self.kernel.follows()).flat_map(Op::late);
        self.unlimited.extend(late);
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
        if self.is_broken(Rule::OwnClock) {
            tree.let_times_go_back();
        }
        if self.is_broken(Rule::RepeatTimes) {
            tree.let_times_repeat();
        }
        if self.is_broken(Rule::ReviveRemoved) {
            tree.let_links_revive();
        }
        if self.is_broken(Rule::MoveByOwners) {
            tree.let_owners_move_directories();
        }
        if self.is_broken(Rule::NewCookie) {
            tree.let_replaced_names_move();
        }
        tree.remember(Ino::ROOT);
        let mut kernel = Kernel::new(self.config.seed);
        kernel.known.insert(Ino::ROOT, 1);
        kernel.inodes.insert(Ino::ROOT);
        let processes = (0..self.rng.between(1, 3)).map(|_| Process::default()).collect();
        Client {
            life,
            tree_number: self.trees.now,
            replaces: None,
            session: self.new_session(),
            tree,
            kernel,
            connection: None,
            link: Link::Down,
            greeted: false,
            hello_sent: 0,
            claim_sent: 0,
            heard: 0,
            owed: BTreeMap::new(),
            arrived: 0,
            refused: false,
            lapsed: true,
            history: Heard::default(),
            kept: Kept::default(),
            is_over: false,
            stuck: false,
            last_sent: 0,
            next_request: 1,
            outstanding: BTreeMap::new(),
            fetches: BTreeMap::new(),
            answers: BTreeMap::new(),
            accepted: Sequence(0),
            last_cut: Sequence(0),
            ship_to: Sequence(0),
            in_flight: None,
            unsent: None,
            commit_sent: 0,
            full: false,
            refusals: 0,
            pauses: false,
            pressing: false,
            recalls: Vec::new(),
            late: Vec::new(),
            ships: Vec::new(),
            expiries: BTreeMap::new(),
            foreword: None,
            seen: 0,
            behind: VecDeque::new(),
            left: BTreeSet::new(),
            hot: BTreeSet::new(),
            warm: BTreeMap::new(),
            unlimited: BTreeSet::new(),
            leaving: false,
            skew: self.rng.between(0, 20) as i64 - 10,
            awaits_callers: !self.is_broken(Rule::ForgetCallers),
            awaits_listings: !self.is_broken(Rule::EpochAmidListing),
            keeps_listed: !self.is_broken(Rule::DropListed),
            keeps_notes: !self.is_broken(Rule::ForgetWithEpoch),
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

    /// The session is over: the next one begins, with what this one had not shipped.
    pub(super) fn come_back(&mut self, at: usize, last: Option<Sequence>) {
        let client = &mut self.clients[at];
        let session = client.session;
        let mut unsent = client.unsent.take();
        let has_arrived = |batch: &Batch| last.is_some_and(|last| batch.sequence <= last);
        if unsent.as_ref().is_some_and(|(batch, _)| has_arrived(batch)) {
            unsent = None;
        }
        if self.restores && unsent.is_none() {
            if let Some((Some(cut), _)) = client.in_flight.take_if(|(_, batch)| !has_arrived(batch)) {
                client.tree.undo_cut(cut);
            }
            let mut batch = client.tree.cut(Sequence(1), false).batch;
            batch.end_unnamed();
            unsent = (!batch.records.is_empty()).then_some((batch, session));
        }
        let history = client.history;
        let kept = std::mem::take(&mut client.kept);
        self.restart_client(at);
        if self.is_broken(Rule::BringAfterEnd) {
            self.clients[at].kept = kept;
        }
        let client = &mut self.clients[at];
        (client.unsent, client.history, client.replaces) = (unsent, history, Some(session));
    }

    /// Whether operations are answered.
    pub(crate) fn answers(&self, at: usize) -> bool {
        !self.clients[at].lapsed
    }

    pub(crate) fn upkeep(&mut self, at: usize) {
        let life = self.clients[at].life;
        let wait = self.rng.between(10, 200);
        self.after(wait, What::Upkeep(at, life));
        if self.clients[at].leaving && self.clients[at].is_idle() {
            return self.leave(at);
        }
        if self.rng.permille(300) {
            let inos: Vec<Ino> = self.clients[at].kernel.known.keys().copied().collect();
            let ino = *self.rng.pick(&inos);
            self.kernel_forgets(at, ino);
        }
        if self.rng.permille(300) {
            let client = &mut self.clients[at];
            // A fetch that is under way may bring what was so before a later batch.
            let accepted =
                client.outstanding.values().map(|out| out.accepted).min().unwrap_or(client.accepted);
            let dropped = client.tree.evict(2, accepted, |_| false);
            trace!(self, "c{at} evicts {dropped:?}");
            let client = &self.clients[at];
            let files = client.tree.releasable(2, client.accepted, |_| false);
            if client.link == Link::Up && !files.is_empty() {
                trace!(self, "c{at} would rather not own {files:?}");
                self.say(at, ToServer::Release(files));
            }
        }
    }

    /// Everything is forgotten and shipped; then the session ends.
    fn leave(&mut self, at: usize) {
        self.clients[at].processes.iter_mut().for_each(Process::close_all);
        let inos: Vec<Ino> = self.clients[at].kernel.known.keys().copied().collect();
        inos.into_iter().for_each(|ino| self.kernel_forgets(at, ino));
        if self.clients[at].tree.is_dirty() {
            self.press(at);
        }
        if self.clients[at].is_at_rest() && !self.clients[at].kept.is_empty() {
            self.ask_to_sync(at);
        } else if self.clients[at].is_at_rest() {
            let (session, now) = (self.clients[at].session, self.now);
            let verdict = self.reference.synced(session, now + 1);
            self.judge(&format!("c{at} says goodbye"), verdict);
            self.say(at, ToServer::Goodbye);
            self.clients[at].connection = None;
            self.restart_client(at);
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
}
