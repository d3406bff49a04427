//! The world: time, streams, faults, and the run from a seed to its end.

mod faults;
mod streams;

use std::collections::{BTreeMap, VecDeque};

use hayloft_model::grants::{Outcome as Turn, Ticket};
use hayloft_model::{Ino, SessionId};

use crate::Rule;
use crate::client::{Client, Late};
use crate::history::Fate;
use crate::messages::{Ask, Entry, ToClient, ToServer};
use crate::reference::{Reference, Verdict};
use crate::rng::Rng;
use crate::server::{AtRest, Fault, LateStore, Put, Send, Server, Then};
use crate::trees::{Trees, replaces_trees};
use streams::Connection;

/// How long a session may be silent.
pub(crate) const LEASE: u64 = 400;
/// How far off a clock that is wrong is, in ticks: they are nanoseconds.
const HOUR: i64 = 3_600_000_000_000;
/// No operation takes longer after the last fault.
pub(crate) const PATIENCE: u64 = 8_000;
/// How long a stuck client is looked at before it is given up: longer than anybody waits for it.
const STUCK_FOR: u64 = PATIENCE + 4 * LEASE;
/// Where the choice of stuck clients begins.
const STICKY: u64 = 0x0057_0c4b;
/// The same of worlds in which hosts come back with what they had not shipped.
const RESTORES: u64 = 0x0e57_04e5;
/// The same of windows, and of how soon things are durable.
const STORES: u64 = 0x0003_1d03;
/// The same of worlds in which directories are split.
const SPLITS: u64 = 0x0005_911d;
/// Worlds whose seeds are from here on clear a directory that hosts share, if directories are split there; and what a change is refused for
/// is claimed.
pub(crate) const CLEARS_FROM: u64 = 1 << 36;
/// Steps of a world, at most.
const STEPS_MAX: u64 = 4_000_000;

/// What kind of world.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Everything follows from it.
    pub seed: u64,
    /// Operations of all clients together.
    pub ops: u64,
    /// A rule that is left out.
    pub broken: Option<Rule>,
    /// Whether to keep a trace.
    pub trace: bool,
}

/// How a world has ended.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What is wrong, if anything.
    pub failure: Option<Failure>,
    /// Steps taken.
    pub steps: u64,
    /// Operations completed.
    pub ops: u64,
    /// Operations that were executed by the server.
    pub executed: u64,
    /// Recalls sent.
    pub recalls: u64,
    /// Entries that were brought back.
    pub brought: u64,
    /// Operations that were lost with the server and all who knew of them.
    pub lost: u64,
    /// Directories that were split.
    pub splits: u64,
    /// How often the volume got another tree.
    pub replaced: u64,
}

/// What is wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// In words.
    pub what: String,
    /// The last steps before it.
    pub trace: Vec<String>,
}

/// Something that happens at a time.
#[derive(Debug)]
pub(crate) enum What {
    ToServer(u64),
    ToClient(u64),
    /// The work of a request whose turn has come.
    Work(u64, Ticket, Turn),
    /// What a request has read goes out.
    Send(u64, Ticket, Send),
    /// What has gathered is flushed; that has ended; what comes after.
    Flush(u64),
    Flushed(u64),
    Then(u64, Then),
    ServerCheck,
    ServerStart,
    /// A server that another one has taken the place of knows.
    EndReplaced(u64),
    /// A process goes on.
    Process(usize, u64, usize, u64),
    /// A client tries to connect.
    Connect(usize, u64),
    /// A client ships what there is to ship.
    Ship(usize, u64),
    Ping(usize, u64),
    Lease(usize, u64),
    /// Names are expired in the kernel.
    Expire(usize, u64, u64),
    /// What another host has changed is applied, when the kernel has let go of it.
    Foreword(usize, u64),
    /// A row goes that was kept for calls, as an event of a connection says.
    DropKept(usize, u64, (u64, u64), Ino),
    /// Broken: an event is applied after it was acknowledged.
    Late(usize, u64, Late),
    /// The kernel forgets, rows are evicted.
    Upkeep(usize, u64),
    /// A client gets stuck, in its first life; then its user gives it up.
    Stick(usize),
    /// The store is copied, and put back later.
    Copy,
    PutBack,
    /// What had timed out arrives at the store.
    LateWrite(Vec<(u64, Vec<Put>)>),
    /// A client that has ended is mounted anew.
    Remount(usize, u64),
    /// The quota is so much more than is used, of bytes or of inodes.
    Quota {
        bytes: bool,
        room: u64,
    },
    NoQuota,
    /// A snapshot is made, or the volume gets another tree.
    Tree,
    /// It is looked whether hosts have shipped that were asked to.
    Shipping,
    Fault,
}

pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) now: u64,
    pub(crate) rng: Rng,
    /// When and how clocks are set. Of its own: the rest of a world is as it is without.
    clocks: Rng,
    pub(crate) at_rest: AtRest,
    pub(crate) late_store: Option<LateStore>,
    queue: BTreeMap<(u64, u64), What>,
    queued: u64,
    pub(crate) connections: BTreeMap<u64, Connection>,
    next_connection: u64,
    next_session: u64,
    next_op: u64,
    pub(crate) ops_left: u64,
    pub(crate) server: Server,
    /// The server before it, which goes on for a while.
    pub(crate) replaced: Option<Box<Server>>,
    /// For how long something is answered while what came before it is not durable; 0: not at all.
    pub(crate) window: u64,
    /// How long what nobody waits for gathers before it is flushed, at most.
    pub(crate) gather: u64,
    /// Much is answered before it is durable, and the server is lost often.
    pub(crate) lossy: bool,
    /// Clients give files back that they ask for a change of.
    pub(crate) gives_back: bool,
    pub(crate) clients: Vec<Client>,
    pub(crate) reference: Reference,
    pub(crate) outcome: Outcome,
    trace: VecDeque<String>,
    /// How often faults happen; 0: never.
    faults: u64,
    delay: u64,
    /// One client that works while the others only look in now and then: it is alone with a directory for a while.
    pub(crate) busy: Option<usize>,
    /// Directories lie deeper, and are moved into each other.
    pub(crate) deep: bool,
    /// Who finds its session ended comes back with what it had not shipped.
    pub(crate) restores: bool,
    /// After how many turns directories are split, if they are. Their times are not looked at then.
    pub(crate) splits: Option<u32>,
    last_fault: u64,
    pub(crate) fate: Fate,
    pub(crate) trees: Trees,
    /// No more operations and faults.
    pub(crate) draining: bool,
}

/// Adds a line to the trace, if there is one.
macro_rules! trace {
    ($world:expr, $($arg:tt)*) => {
        if $world.config.trace {
            let line = format!($($arg)*);
            $world.note(line);
        }
    };
}
pub(crate) use trace;

/// Runs the world of a seed.
pub fn run(config: Config) -> Outcome {
    let mut world = World::new(config);
    world.live();
    let trace = std::mem::take(&mut world.trace);
    if let Some(failure) = &mut world.outcome.failure {
        failure.trace = trace.into();
    }
    world.outcome
}

impl World {
    fn new(config: Config) -> World {
        let mut rng = Rng::new(config.seed);
        let server = Server::new();
        let root = server.stored.rows.inodes[&Ino::ROOT].clone();
        let clients = rng.between(2, 8).min(rng.between(2, 8));
        let faults = *rng.pick(&[0, 400, 200, 100, 50]);
        let delay = *rng.pick(&[1, 4, 12, 40]);
        let busy = rng.permille(500).then_some(0);
        let deep = rng.permille(250);
        let mut other = Rng::new(config.seed ^ STORES);
        let lossy = other.permille(300);
        let (window, gather) = match lossy {
            true => *other.pick(&[(400, 300), (1000, 800), (2000, 1000)]),
            false => *other.pick(&[(40, 25), (40, 10), (20, 100), (100, 100), (400, 25), (0, 25)]),
        };
        let gives_back = other.permille(500);
        let mut world = World {
            config,
            now: 1,
            rng,
            clocks: Rng::new(!config.seed),
            at_rest: AtRest::new(config.seed),
            late_store: LateStore::new(config.seed),
            queue: BTreeMap::new(),
            queued: 0,
            connections: BTreeMap::new(),
            next_connection: 1,
            next_session: 1,
            next_op: 1,
            ops_left: config.ops,
            server,
            replaced: None,
            window,
            gather,
            lossy,
            gives_back,
            clients: Vec::new(),
            reference: Reference::new(&root),
            outcome: Outcome::default(),
            trace: VecDeque::new(),
            faults,
            delay,
            busy,
            deep,
            restores: Rng::new(config.seed ^ RESTORES).permille(120),
            splits: None,
            last_fault: 0,
            fate: Fate::default(),
            trees: Trees::new(config.seed),
            draining: false,
        };
        let mut other = Rng::new(config.seed ^ SPLITS);
        if other.permille(250) {
            world.splits = Some(*other.pick(&[1, 1, 2, 4]));
            world.reference.ignore_directory_times();
        }
        world.set_splits();
        for at in 0..clients as usize {
            let client = world.new_client(at, 1);
            world.clients.push(client);
            let start = world.rng.below(100);
            world.start_client(at, start);
        }
        world.after(20, What::ServerCheck);
        // From another source: the other worlds stay as they are.
        let mut other = Rng::new(config.seed ^ STICKY);
        if other.permille(60) {
            let (at, when) = (other.below(clients) as usize, other.between(100, 4 * LEASE));
            world.after(when, What::Stick(at));
        }
        world.plan_quota();
        world.plan_copy();
        if replaces_trees(config.seed) {
            world.plan_trees();
        }
        if world.faults > 0 {
            let first = world.rng.below(2 * world.faults);
            world.after(first, What::Fault);
        }
        world
    }

    pub(crate) fn note(&mut self, line: String) {
        if self.trace.len() >= 600 {
            self.trace.pop_front();
        }
        self.trace.push_back(format!("{:>6} {line}", self.now));
    }

    pub(crate) fn new_session(&mut self) -> SessionId {
        self.next_session += 1;
        SessionId(self.next_session - 1)
    }

    pub(crate) fn new_op(&mut self) -> u64 {
        self.next_op += 1;
        self.next_op - 1
    }

    pub(crate) fn after(&mut self, delay: u64, what: What) {
        self.queued += 1;
        self.queue.insert((self.now + delay, self.queued), what);
    }

    pub(crate) fn fail(&mut self, what: String) {
        if self.outcome.failure.is_none() {
            trace!(self, "FAILED: {what}");
            self.outcome.failure = Some(Failure { what, trace: Vec::new() });
        }
    }

    pub(crate) fn judge(&mut self, who: &str, verdict: Verdict) {
        if let Err(why) = verdict {
            self.fail(format!("at {}, {who}: {why}", self.now));
        }
    }

    /// Lets one more thing happen, if it does before `until`.
    pub(crate) fn one_more_before(&mut self, until: u64) -> bool {
        let next = self.queue.first_key_value().map(|((at, _), _)| *at);
        if next.is_none_or(|at| at > until) {
            return false;
        }
        if let Some(((at, _), what)) = self.queue.pop_first() {
            self.now = at;
            self.outcome.steps += 1;
            self.happen(what);
        }
        true
    }

    fn live(&mut self) {
        while self.outcome.failure.is_none() {
            if self.ops_left == 0 && !self.draining && self.clients.iter().all(Client::is_idle) {
                trace!(self, "all operations are done");
                self.draining = true;
                self.drain();
            }
            if self.draining && self.is_quiet() {
                self.check_end();
                return;
            }
            let Some(((at, _), what)) = self.queue.pop_first() else {
                return self.fail("nothing more happens, and not everything is done".into());
            };
            self.now = at;
            self.outcome.steps += 1;
            if self.outcome.steps > STEPS_MAX {
                return self.fail("no end".into());
            }
            self.happen(what);
        }
    }

    fn happen(&mut self, what: What) {
        match self.host_of(&what) {
            Some(at) => self.on_tree(at, |world| world.happens(what)),
            None => self.happens(what),
        }
    }

    /// The host that something happens to.
    fn host_of(&self, what: &What) -> Option<usize> {
        match what {
            What::ToClient(connection) => {
                self.connections.get(connection).map(|connection| connection.client)
            }
            What::Process(at, ..)
            | What::Connect(at, _)
            | What::Ship(at, _)
            | What::Ping(at, _)
            | What::Lease(at, _)
            | What::Expire(at, ..)
            | What::Foreword(at, _)
            | What::DropKept(at, ..)
            | What::Late(at, ..)
            | What::Upkeep(at, _)
            | What::Stick(at)
            | What::Remount(at, _) => Some(*at),
            _ => None,
        }
    }

    fn happens(&mut self, what: What) {
        match what {
            What::ToServer(connection) => self.deliver_to_server(connection),
            What::ToClient(connection) => self.deliver_to_client(connection),
            What::Work(life, ticket, turn) => {
                self.on_server(life, |world| world.work(ticket, turn));
            }
            What::Send(life, ticket, send) => {
                self.on_server(life, |world| world.send_read(ticket, send));
            }
            What::Flush(life) => drop(self.on_server(life, World::gathered)),
            What::Flushed(life) => drop(self.on_server(life, World::flushed)),
            What::Then(life, then) => drop(self.on_server(life, |world| world.then(then))),
            What::EndReplaced(life) => {
                if self.replaced.as_ref().is_some_and(|replaced| replaced.life == life) {
                    self.end_replaced();
                }
            }
            What::ServerCheck => {
                self.check_sessions();
                self.check_patience();
                self.rest();
                self.after(20, What::ServerCheck);
            }
            What::ServerStart => {
                if !self.is_away() {
                    self.start_server();
                }
            }
            What::Process(client, life, process, token) => {
                if self.clients[client].life == life {
                    self.step(client, process, token);
                }
            }
            What::Connect(client, life) => {
                if self.clients[client].life == life {
                    self.connect(client);
                }
            }
            What::Ship(client, life) => {
                if self.clients[client].life == life {
                    self.ship(client);
                }
            }
            What::Ping(client, life) => {
                if self.clients[client].life == life {
                    self.ping(client);
                }
            }
            What::Lease(client, life) => {
                if self.clients[client].life == life {
                    self.check_lease(client);
                }
            }
            What::Expire(client, life, event) => {
                if self.clients[client].life == life {
                    self.expire_names(client, event);
                }
            }
            What::Foreword(client, life) => {
                if self.clients[client].life == life {
                    self.go_on(client);
                }
            }
            What::DropKept(client, life, (connection, event), ino) => {
                if self.clients[client].life == life && self.clients[client].connection == Some(connection) {
                    self.drop_kept(client, event, ino);
                }
            }
            What::Late(client, life, late) => {
                if self.clients[client].life == life {
                    self.apply_late(client, late);
                }
            }
            What::Upkeep(client, life) => {
                if self.clients[client].life == life {
                    self.upkeep(client);
                }
            }
            What::Stick(client) => self.stick(client),
            What::Copy => self.copy_store(),
            What::PutBack => self.take_away(),
            What::LateWrite(puts) => self.late_write(&puts),
            What::Remount(client, life) => {
                if self.clients[client].life == life {
                    self.restart_client(client);
                }
            }
            What::Quota { bytes, room } => self.set_quota(bytes, room),
            What::NoQuota => self.end_quota(),
            What::Tree => self.next_tree(),
            What::Shipping => self.look_at_shipping(),
            What::Fault => self.fault(),
        }
    }
}
