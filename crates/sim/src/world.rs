//! The world: time, streams, faults, and the run from a seed to its end.

use std::collections::{BTreeMap, VecDeque};

use hayloft_model::grants::{Outcome as Turn, Ticket};
use hayloft_model::{Ino, SessionId};

use crate::Rule;
use crate::client::{Client, Late};
use crate::history::Fate;
use crate::messages::{Ask, ToClient, ToServer};
use crate::reference::{Reference, Verdict};
use crate::rng::Rng;
use crate::server::{Fault, Send, Server};

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
    ServerCheck,
    ServerStart,
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
    /// Broken: an event is applied after it was acknowledged.
    Late(usize, u64, Late),
    /// The kernel forgets, rows are evicted.
    Upkeep(usize, u64),
    /// A client gets stuck, in its first life; then its user gives it up.
    Stick(usize),
    /// The store is copied, and put back later.
    Copy,
    PutBack,
    /// A client that has ended is mounted anew.
    Remount(usize, u64),
    /// The quota is so much more than is used, of bytes or of inodes.
    Quota {
        bytes: bool,
        room: u64,
    },
    NoQuota,
    Fault,
}

/// A connection: two streams.
pub(crate) struct Connection {
    pub(crate) client: usize,
    pub(crate) life: u64,
    pub(crate) session: SessionId,
    pub(crate) up: bool,
    to_server: VecDeque<ToServer>,
    /// With the mark of the store.
    to_client: VecDeque<(u64, ToClient)>,
    last_to_server: u64,
    last_to_client: u64,
    stalled_until: u64,
}

impl Connection {
    /// Whether nothing is on its way but keep-alives.
    pub(crate) fn is_empty(&self) -> bool {
        let ping = |message: &ToServer| matches!(message, ToServer::Ask { ask: Ask::Ping, .. });
        let pong = |(_, message): &(u64, ToClient)| matches!(message, ToClient::Pong { .. });
        self.to_server.iter().all(ping) && self.to_client.iter().all(pong)
    }
}

pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) now: u64,
    pub(crate) rng: Rng,
    /// When and how clocks are set. Of its own: the rest of a world is as it is without.
    clocks: Rng,
    queue: BTreeMap<(u64, u64), What>,
    queued: u64,
    pub(crate) connections: BTreeMap<u64, Connection>,
    next_connection: u64,
    next_session: u64,
    next_op: u64,
    pub(crate) ops_left: u64,
    pub(crate) server: Server,
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
    last_fault: u64,
    pub(crate) fate: Fate,
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
        let mut world = World {
            config,
            now: 1,
            rng,
            clocks: Rng::new(!config.seed),
            queue: BTreeMap::new(),
            queued: 0,
            connections: BTreeMap::new(),
            next_connection: 1,
            next_session: 1,
            next_op: 1,
            ops_left: config.ops,
            server,
            clients: Vec::new(),
            reference: Reference::new(&root),
            outcome: Outcome::default(),
            trace: VecDeque::new(),
            faults,
            delay,
            busy,
            deep,
            restores: Rng::new(config.seed ^ RESTORES).permille(120),
            last_fault: 0,
            fate: Fate::default(),
            draining: false,
        };
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
        match what {
            What::ToServer(connection) => self.deliver_to_server(connection),
            What::ToClient(connection) => self.deliver_to_client(connection),
            What::Work(life, ticket, turn) => {
                if self.server.life == life && self.server.up {
                    self.work(ticket, turn);
                }
            }
            What::Send(life, ticket, send) => {
                if self.server.life == life && self.server.up {
                    self.send_read(ticket, send);
                }
            }
            What::ServerCheck => {
                self.check_sessions();
                self.check_patience();
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
            What::Remount(client, life) => {
                if self.clients[client].life == life {
                    self.restart_client(client);
                }
            }
            What::Quota { bytes, room } => self.set_quota(bytes, room),
            What::NoQuota => self.end_quota(),
            What::Fault => self.fault(),
        }
    }

    fn delay(&mut self) -> u64 {
        let usual = 1 + self.rng.below(self.delay);
        if self.rng.permille(30) { usual * 4 } else { usual }
    }

    pub(crate) fn open(&mut self, client: usize, life: u64, session: SessionId) -> u64 {
        let number = self.next_connection;
        self.next_connection += 1;
        let connection = Connection {
            client,
            life,
            session,
            up: true,
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            last_to_server: 0,
            last_to_client: 0,
            stalled_until: 0,
        };
        self.connections.insert(number, connection);
        number
    }

    pub(crate) fn send_to_server(&mut self, number: u64, message: ToServer) {
        let delay = self.delay();
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        let at = (now + delay).max(connection.last_to_server).max(connection.stalled_until);
        connection.last_to_server = at;
        connection.to_server.push_back(message);
        self.after(at - now, What::ToServer(number));
    }

    pub(crate) fn send_to_client(&mut self, number: u64, message: ToClient) {
        let delay = self.delay();
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        let at = (now + delay).max(connection.last_to_client).max(connection.stalled_until);
        connection.last_to_client = at;
        connection.to_client.push_back((self.server.stored.history.mark, message));
        self.after(at - now, What::ToClient(number));
    }

    fn deliver_to_server(&mut self, number: u64) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        if connection.stalled_until > now {
            let wait = connection.stalled_until - now;
            return self.after(wait, What::ToServer(number));
        }
        let Some(message) = connection.to_server.pop_front() else { return };
        let session = connection.session;
        trace!(self, "c{} -> server: {message:?}", self.connections[&number].client);
        self.server_receives(number, session, message);
    }

    fn deliver_to_client(&mut self, number: u64) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        if connection.stalled_until > now {
            let wait = connection.stalled_until - now;
            return self.after(wait, What::ToClient(number));
        }
        let Some((mark, message)) = connection.to_client.pop_front() else { return };
        let (client, life) = (connection.client, connection.life);
        if self.clients[client].life == life && self.clients[client].connection == Some(number) {
            trace!(self, "server -> c{client}: {message:?}");
            self.clients[client].hears(mark, &message);
            self.client_receives(client, message);
        }
    }

    /// A connection breaks: what is under way is lost, and both ends notice.
    pub(crate) fn cut_connection(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        trace!(self, "the connection of c{} breaks", connection.client);
        self.server_loses(number, connection.session);
        let client = &self.clients[connection.client];
        if client.life == connection.life && client.connection == Some(number) {
            self.client_loses(connection.client);
        }
    }

    /// Some clock is an hour wrong from now on, or right again.
    fn set_a_clock(&mut self) {
        let skew = *self.clocks.pick(&[0, 0, HOUR, -HOUR]);
        match self.clocks.below(2 * self.clients.len() as u64) as usize {
            at if at < self.clients.len() => {
                trace!(self, "the clock of c{at} is {skew} off");
                self.clients[at].skew = skew;
            }
            _ => {
                trace!(self, "the server's clock is {skew} off");
                self.server.skew = skew;
            }
        }
    }

    fn fault(&mut self) {
        if self.draining || self.ops_left == 0 {
            return;
        }
        self.last_fault = self.now;
        let next = 1 + self.rng.below(2 * self.faults);
        self.after(next, What::Fault);
        self.set_a_clock();
        let client = self.rng.below(self.clients.len() as u64) as usize;
        match self.rng.below(10) {
            0 | 1 => {
                if let Some(connection) = self.clients[client].connection {
                    self.cut_connection(connection);
                }
            }
            2..=4 => {
                let until = self.now + self.rng.between(LEASE / 4, 4 * LEASE);
                trace!(self, "the connection of c{client} stalls until {until}");
                if let Some(number) = self.clients[client].connection
                    && let Some(connection) = self.connections.get_mut(&number)
                {
                    connection.stalled_until = until;
                }
            }
            5 if self.rng.permille(400) => {
                trace!(self, "c{client} unmounts");
                self.clients[client].leaving = true;
            }
            5 => {
                trace!(self, "c{client} crashes");
                self.restart_client(client);
            }
            6 => self.stop_server(),
            _ => {
                let fault = *self.rng.pick(&[Fault::Refuse, Fault::UncertainApplied, Fault::UncertainLost]);
                self.server.fault = Some(fault);
            }
        }
    }

    pub(crate) fn has_fault(&mut self) {
        self.last_fault = self.now;
    }

    fn stick(&mut self, at: usize) {
        if self.clients[at].life > 1 || self.draining {
            return;
        }
        self.last_fault = self.now;
        if std::mem::replace(&mut self.clients[at].stuck, true) {
            trace!(self, "the stuck c{at} is given up");
            self.restart_client(at);
        } else {
            trace!(self, "c{at} is stuck");
            self.after(STUCK_FOR, What::Stick(at));
        }
    }

    fn check_patience(&mut self) {
        let (now, last_fault) = (self.now, self.last_fault);
        let late =
            self.clients.iter().enumerate().filter(|(_, client)| !client.stuck).find_map(|(at, client)| {
                client.oldest_call().filter(|call| now - (*call).max(last_fault) > PATIENCE).map(|_| at)
            });
        if let Some(at) = late {
            let about = self.clients[at].waits_for();
            self.fail(format!("c{at} waits for ever: {about}; grants: {:#?}", self.server.grants));
        }
        if self.draining && now > self.server.drain_until {
            let waits: Vec<String> = self.clients.iter().map(|client| client.waits_for()).collect();
            self.fail(format!("it does not come to rest: {waits:#?}; {:#?}", self.server.grants));
        }
    }
}
