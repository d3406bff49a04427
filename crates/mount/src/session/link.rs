//! The session stream: one connection to the server, kept up. Requests survive a broken connection: they
//! are sent again on the next one, and their callers just wait.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_model::Sequence;
use hayloft_model::replay::Kept;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Ack, CancelLock, Claim, ClientMessage, Entry, Failed, FailureCode, Hello, Ping, ServerMessage, Welcome,
    frame,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::error::MountError;
use crate::host::moment::Moment;
use crate::host::{self, clock::Clock};
use crate::keeper::Shared;
use crate::session::reader::Reader;
use crate::stats::Stats;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the server may take to end a session that says goodbye.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(5);
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_millis(500);
/// How often it is looked whether a waiting call is to be given up.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);
/// How long the server's word on a request for a lock that was given up is waited for when the caller is being ended.
const CANCEL_PATIENCE: Duration = Duration::from_millis(200);

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The server refused.
    #[error("{}", .0.message)]
    Failed(Failed),
    /// The call is given up: its caller is being ended, or waits for a lock and had a signal.
    #[error("interrupted")]
    Interrupted,
    /// The session is over: the server ended it, or the mount is being closed.
    #[error("the session has ended: {0}")]
    Ended(String),
    /// The connection broke under a message that is not sent again by itself.
    #[error("the connection broke")]
    Broken,
    /// The server has ended the session, and another one takes its place.
    #[error("the session was ended by the server")]
    Replaced,
}

/// Who keeps what the server tells.
pub(crate) trait Receiver: Send + Sync {
    /// A message that carries state, in the order of the stream: on which connection, for which request (0 for
    /// events), and with what mark of the asker.
    fn receive(&self, at: Arrival, body: Answer);
    /// All that has come on this connection is received.
    fn received_all(&self, connection: u64);
    /// The connection is lost: what is not owned may change from now on. Returns when nobody here can see it any more.
    fn lost(&self);
    /// A new connection, and the last batch that the server holds without what is brought back. Returns what is owned.
    fn renew(&self, last: Sequence) -> Claim;
    /// The claim is sent: the connection can be used.
    fn resumed(&self);
    /// The server has ended the session: nothing is owned any more, and another one begins. Returns when nothing of the
    /// old one is left here, with the number that its last batch had.
    fn replace(&self, reason: &str) -> Sequence;
    /// The server has lost these, and they cannot be brought back, since that session was ended. Returns what is told of
    /// it, if it matters here.
    fn lose(&self, session: u64, entries: &[Entry]) -> Option<String>;
    /// The session that takes the place of another one has begun.
    fn begun(&self, welcome: &Welcome);
    /// It has claimed, and nobody here is served yet: brings what the other one had not shipped, if there is anything.
    ///
    /// # Errors
    /// What the line said: it has to be tried again on another one.
    fn restore(&self, line: &mut Line<'_>) -> Result<(), CallError>;
    /// The session is over.
    fn ended(&self);
    /// The lease has run out: nothing that is known here can be relied upon until there is word from the server.
    fn lapse(&self);
}

/// Where a message belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) connection: u64,
    pub(crate) request: u64,
    pub(crate) mark: u64,
}

/// Whether what is known here holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Condition {
    /// The session's lease runs.
    Live = 0,
    /// It has run out: everybody waits.
    Lapsed = 1,
    /// The session is over.
    Ended = 2,
}

struct Waiting {
    message: ClientMessage,
    answers: Vec<Answer>,
    done: bool,
    /// Sent again by itself on the next connection; if not, it fails with `Broken`.
    repeat: bool,
    /// Nobody waits for the answer.
    unattended: bool,
    sent: Moment,
    /// When something of a batch was sent last before it.
    work: Option<Moment>,
    mark: u64,
}

/// An event that the server is not known to have the acknowledgement of.
struct Owed {
    /// What was known of the lease when it came: it was sent later than that.
    since: Option<Moment>,
    /// When it was acknowledged.
    acknowledged: Option<Moment>,
}

#[derive(Default)]
struct State {
    connection: u64,
    connected: bool,
    /// The connection has claimed, and is not `connected` before what an ended session has left is restored.
    restoring: bool,
    next_request: u64,
    waiting: HashMap<u64, Waiting>,
    ended: Option<String>,
    last_sequence: u64,
    /// Numbers of changes that may be sent again under the same number: they are executed once.
    changes: BTreeSet<u64>,
    /// When the last message was sent that has been answered: the server has heard of the client since.
    heard: Option<Moment>,
    owed: BTreeMap<u64, Owed>,
    /// When something of a batch was sent last, and the same of what has certainly arrived.
    work: Option<Moment>,
    arrived: Option<Moment>,
    /// When the present connection was made, if it is not the first.
    connected_at: Option<Instant>,
    /// The present session.
    session: u64,
    /// The server has it: it is resumed, not begun.
    begun: bool,
    /// The one that was ended and that it takes the place of; 0: none.
    replaces: u64,
    /// Its first batch follows this one: batches are counted on over sessions here.
    base: u64,
    /// The volume's opening and mark that were heard of last, see [`Welcome::opening`].
    history: (u64, u64),
    /// What is not known to be durable.
    kept: Kept<Entry>,
    /// How often something of it was lost, and what was said last.
    losses: u64,
    lost: Option<String>,
}

impl State {
    /// From when on the lease runs. The server does not let it run from later on for who is heard but does not
    /// acknowledge, unless something of a batch arrives.
    fn lease_from(&self) -> Option<Moment> {
        let owed = self.owed.values().next().map(|owed| owed.since.max(self.arrived));
        owed.map_or(self.heard, |owed| owed.min(self.heard))
    }

    /// There is an answer to a message.
    fn answered(&mut self, sent: Moment, work: Option<Moment>) {
        self.heard = self.heard.max(Some(sent));
        self.arrived = self.arrived.max(work);
        self.owed.retain(|_, owed| owed.acknowledged.is_none_or(|at| at > sent));
    }
}

/// The client's end of a session.
pub(crate) struct Link {
    address: String,
    hello: Hello,
    state: Mutex<State>,
    changed: Condvar,
    /// Lock order: after `state` is released, or alone; writing may block.
    writer: Mutex<Option<(u64, TcpStream)>>,
    /// The same connection, to break it off while somebody writes.
    breaker: Mutex<Option<(u64, TcpStream)>>,
    stats: Arc<Stats>,
    clock: Arc<Clock>,
    /// How long the server keeps what a silent session holds.
    lease: Duration,
    condition: AtomicU8,
    /// When nothing that is known here may be answered with any more, nanoseconds of [`Moment`].
    deadline: AtomicU64,
    /// The same for the keeper, which empties the kernel's caches then.
    kept: OnceLock<Arc<Shared>>,
}

/// What the server said when the session began.
pub(crate) struct Opened {
    pub(crate) link: Arc<Link>,
    pub(crate) welcome: Welcome,
    pub(crate) reader: Reader,
}

impl Link {
    /// Connects and begins a session; [`Link::start`] has to follow.
    ///
    /// # Errors
    /// Unreachable, refused, no such volume.
    pub(crate) fn open(
        address: &str,
        volume: &str,
        mount_point: &str,
        read_only: bool,
        stats: Arc<Stats>,
        clock: Arc<Clock>,
    ) -> Result<Opened, MountError> {
        let hello = Hello {
            protocol: hayloft_wire::PROTOCOL,
            volume: volume.to_string(),
            session: host::random(),
            host_id: host::id(),
            host_name: host::name(),
            pid: std::process::id(),
            read_only,
            mount_point: mount_point.to_string(),
            ..Hello::default()
        };
        let unreachable = |source| MountError::Unreachable { address: address.to_string(), source };
        let stream = connect(address).map_err(unreachable)?;
        let (reader, welcome) = match greet(stream, &hello, &stats, &clock).map_err(unreachable)? {
            Greeting::Welcome(reader, welcome) => (*reader, *welcome),
            Greeting::Refused(failed) => return Err(refused(address, volume, &failed)),
        };
        let writer = reader.stream().try_clone().map_err(unreachable)?;
        let breaker = reader.stream().try_clone().map_err(unreachable)?;
        let state = State {
            connection: 1,
            connected: true,
            next_request: 1,
            session: hello.session,
            begun: true,
            history: (welcome.opening, welcome.mark),
            ..State::default()
        };
        let link = Arc::new(Link {
            address: address.to_string(),
            hello,
            state: Mutex::new(state),
            changed: Condvar::new(),
            writer: Mutex::new(Some((1, writer))),
            breaker: Mutex::new(Some((1, breaker))),
            stats,
            clock,
            lease: Duration::from_millis(welcome.lease_ms.max(1000)),
            condition: AtomicU8::new(Condition::Live as u8),
            deadline: AtomicU64::new(u64::MAX),
            kept: OnceLock::new(),
        });
        Ok(Opened { link, welcome, reader })
    }

    /// Claims nothing yet, and keeps the connection and the lease up from now on.
    ///
    /// # Errors
    /// The connection is broken already, or no thread can be had.
    pub(crate) fn start(self: &Arc<Self>, reader: Reader, receiver: Arc<dyn Receiver>) -> io::Result<()> {
        self.heard_at(Moment::now());
        self.claim(1, Claim::default())?;
        let (keeper, keeping) = (Arc::clone(self), Arc::clone(&receiver));
        std::thread::Builder::new()
            .name("hayloft-link".to_string())
            .spawn(move || keeper.keep_up(reader, keeping.as_ref()))?;
        let keeper = Arc::clone(self);
        std::thread::Builder::new().name("hayloft-ping".to_string()).spawn(move || keeper.keep_alive())?;
        let keeper = Arc::clone(self);
        std::thread::Builder::new()
            .name("hayloft-lease".to_string())
            .spawn(move || keeper.watch_lease(receiver.as_ref()))?;
        Ok(())
    }

    /// The first message on a connection.
    fn claim(&self, connection: u64, claim: Claim) -> io::Result<()> {
        let request = self.enlist(Ask::Claim(Claim::default()), true);
        self.write(&ClientMessage { request, body: Some(Ask::Claim(claim)) }, Some(connection))
    }

    /// Notes a message that is not repeated. `unattended`: nobody waits for the answer.
    fn enlist(&self, ask: Ask, unattended: bool) -> u64 {
        let mut state = self.state.lock();
        let request = state.next_request;
        state.next_request += 1;
        let waiting = Waiting {
            message: ClientMessage { request, body: Some(ask) },
            answers: Vec::new(),
            done: false,
            repeat: false,
            unattended,
            sent: Moment::now(),
            work: state.work,
            mark: 0,
        };
        state.waiting.insert(request, waiting);
        request
    }

    /// Says something to the server often enough. It may have to wait for room, or for another writer.
    fn keep_alive(&self) {
        let mut pinged = Instant::now();
        loop {
            std::thread::sleep(self.lease / 20);
            if self.ended().is_some() {
                return;
            }
            if let Some(connection) = self.connected()
                && pinged.elapsed() > self.lease / 4
            {
                pinged = Instant::now();
                self.stats.count_request(&Ask::Ping(Ping {}));
                let request = self.enlist(Ask::Ping(Ping {}), true);
                // An error shows on the reading side as well.
                let _ =
                    self.write(&ClientMessage { request, body: Some(Ask::Ping(Ping {})) }, Some(connection));
            }
        }
    }

    /// Notices when there has been no answer for too long. Waits for nobody who writes.
    fn watch_lease(&self, receiver: &dyn Receiver) {
        let begun = Moment::now();
        let mut told = false;
        loop {
            std::thread::sleep(self.lease / 20);
            let (connection, silence) = {
                let state = self.state.lock();
                if state.ended.is_some() {
                    return;
                }
                let silence = state.lease_from().unwrap_or(begun).elapsed();
                // A new connection has its time to say something.
                let is_new = state.connected_at.is_some_and(|at| at.elapsed() <= self.lease);
                let is_gone = !is_new && state.heard.unwrap_or(begun).elapsed() > self.lease * 2;
                ((state.connected && is_gone).then_some(state.connection), silence)
            };
            if let Some(connection) = connection {
                self.abandon(connection);
            }
            // Some way before the server may give what is held to others.
            let is_over = silence > self.lease / 10 * 7;
            if is_over && !told {
                tracing::warn!(server = %self.address, "no word from the server: calls wait until it is back");
                self.set_condition(Condition::Lapsed);
                receiver.lapse();
            }
            told = is_over;
        }
    }

    /// It may run longer than before.
    fn lease_changed(&self, state: &State) {
        if let Some(from) = state.lease_from() {
            self.heard_at(from);
        }
    }

    /// The lease runs from then on.
    fn heard_at(&self, heard: Moment) {
        // Later than this process notices by itself, if it can; there is time left until the server acts.
        let deadline = heard.after(self.lease / 10 * 8).nanos();
        self.deadline.store(deadline, Ordering::Release);
        if let Some(shared) = self.kept.get() {
            shared.set_deadline(deadline);
        }
    }

    /// From now on the keeper knows until when the lease runs.
    pub(crate) fn keep(&self, shared: Arc<Shared>) {
        let shared = self.kept.get_or_init(|| shared);
        shared.set_deadline(self.deadline.load(Ordering::Acquire));
    }

    /// Whether what is known here holds. It does not after the lease, even if this process was stopped meanwhile and its
    /// threads have not noticed yet.
    pub(crate) fn condition(&self) -> Condition {
        match self.condition.load(Ordering::Acquire) {
            0 if Moment::now().nanos() > self.deadline.load(Ordering::Acquire) => {
                self.set_condition(Condition::Lapsed);
                Condition::Lapsed
            }
            0 => Condition::Live,
            1 => Condition::Lapsed,
            _ => Condition::Ended,
        }
    }

    fn set_condition(&self, condition: Condition) {
        self.condition.fetch_max(condition as u8, Ordering::AcqRel);
    }

    /// Waits until the lease runs again, the session is over, or the call is given up.
    pub(crate) fn await_lease(&self, interrupt: &Interrupt) -> Result<(), CallError> {
        let mut state = self.state.lock();
        while self.condition() == Condition::Lapsed {
            if interrupt.interrupted() {
                return Err(CallError::Interrupted);
            }
            self.changed.wait_for(&mut state, INTERRUPT_POLL);
        }
        Ok(())
    }

    /// Asks and waits for the whole answer, over as many connections as it takes.
    pub(crate) fn call(&self, ask: Ask, interrupt: Option<&Interrupt>) -> Result<Vec<Answer>, CallError> {
        self.call_with(ask, interrupt, None, 0, None)
    }

    /// A number for a change, under which it is sent until there is a certain answer: the server executes it once.
    pub(crate) fn begin_change(&self) -> u64 {
        let mut state = self.state.lock();
        let number = state.next_request;
        state.next_request += 1;
        state.changes.insert(number);
        number
    }

    /// There is a certain answer, or nobody will ask again.
    pub(crate) fn end_change(&self, number: u64) {
        self.state.lock().changes.remove(&number);
    }

    /// As [`Link::call`], under the number of a change. Who gives it up does not know whether it is done.
    pub(crate) fn call_change(
        &self,
        ask: Ask,
        interrupt: Option<&Interrupt>,
        number: u64,
    ) -> Result<Vec<Answer>, CallError> {
        self.call_with(ask, interrupt, None, 0, Some(number))
    }

    /// As [`Link::call`]; the receiver gets `mark` with the answer.
    pub(crate) fn call_marked(
        &self,
        ask: Ask,
        interrupt: Option<&Interrupt>,
        mark: u64,
    ) -> Result<Vec<Answer>, CallError> {
        self.call_with(ask, interrupt, None, mark, None)
    }

    /// Asks and waits; fails with [`CallError::Broken`] when the connection breaks, or when the connection is
    /// another one than `connection` already.
    pub(crate) fn call_once(&self, ask: Ask, connection: u64) -> Result<Vec<Answer>, CallError> {
        self.call_with(ask, None, Some(connection), 0, None)
    }

    /// `only_on`: the one connection that the question belongs to; it is not asked on another one.
    fn call_with(
        &self,
        ask: Ask,
        interrupt: Option<&Interrupt>,
        only_on: Option<u64>,
        mark: u64,
        number: Option<u64>,
    ) -> Result<Vec<Answer>, CallError> {
        self.stats.count_request(&ask);
        let (request, connection) = {
            let mut state = self.state.lock();
            if let Some(reason) = &state.ended {
                return Err(CallError::Ended(reason.clone()));
            }
            if only_on.is_some_and(|connection| !state.connected || state.connection != connection) {
                return Err(CallError::Broken);
            }
            let request = number.unwrap_or(state.next_request);
            state.next_request += u64::from(number.is_none());
            let mut message = ClientMessage { request, body: Some(ask) };
            if let Some(Ask::Change(change)) = &mut message.body {
                change.forget_below = state.changes.first().copied().unwrap_or(request);
            }
            let waiting = Waiting {
                message,
                answers: Vec::new(),
                done: false,
                repeat: only_on.is_none(),
                unattended: false,
                sent: Moment::now(),
                work: state.work,
                mark,
            };
            state.waiting.insert(request, waiting);
            (request, state.connected.then_some(state.connection))
        };
        // On a later one it is sent again by whoever has made that.
        if let Some(connection) = connection {
            self.send_waiting(request, connection);
        }
        self.await_answer(request, interrupt)
    }

    fn send_waiting(&self, request: u64, connection: u64) {
        let Some(message) = self.state.lock().waiting.get(&request).map(|waiting| waiting.message.clone())
        else {
            return;
        };
        // An error here shows on the reading side as well, which reconnects and sends again.
        let _ = self.write(&message, Some(connection));
    }

    fn write(&self, message: &ClientMessage, only_on: Option<u64>) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame::encode(message, &mut bytes);
        self.write_to(&mut self.writer.lock(), &bytes, only_on)
    }

    fn write_to(
        &self,
        writer: &mut Option<(u64, TcpStream)>,
        bytes: &[u8],
        only_on: Option<u64>,
    ) -> io::Result<()> {
        let (connection, stream) =
            writer.as_mut().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
        if only_on.is_some_and(|only_on| only_on != *connection) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let result = stream.write_all(bytes);
        self.stats.bytes_sent.add(bytes.len() as u64);
        if result.is_err() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        result
    }

    /// The server behind this connection cannot go on with the session: looks for it anew.
    pub(crate) fn abandon(&self, connection: u64) {
        if let Some((current, stream)) = &*self.breaker.lock()
            && *current == connection
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn await_answer(&self, request: u64, interrupt: Option<&Interrupt>) -> Result<Vec<Answer>, CallError> {
        let mut state = self.state.lock();
        let (mut cancelled_on, mut cancelled_at) = (None, Instant::now());
        loop {
            match state.waiting.get(&request) {
                None => return Err(CallError::Broken),
                Some(waiting) if waiting.done => break,
                Some(_) => {}
            }
            if let Some(reason) = &state.ended {
                let reason = reason.clone();
                state.waiting.remove(&request);
                return Err(CallError::Ended(reason));
            }
            let is_cancelled = state.connected && cancelled_on == Some(state.connection);
            let is_abandoned = is_cancelled && cancelled_at.elapsed() > CANCEL_PATIENCE;
            if (is_abandoned && interrupt.is_some_and(Interrupt::abandoned))
                || (!is_cancelled && interrupt.is_some_and(Interrupt::interrupted))
            {
                // A lock may have been set by now; without a connection it is lost, since it is not claimed.
                let is_lock = |of: &Waiting| matches!(of.message.body, Some(Ask::Lock(_)));
                if !is_cancelled && state.connected && state.waiting.get(&request).is_some_and(is_lock) {
                    (cancelled_on, cancelled_at) = (Some(state.connection), Instant::now());
                    let cancel = Some(Ask::CancelLock(CancelLock { request }));
                    let message = ClientMessage { request: 0, body: cancel };
                    let _ = MutexGuard::unlocked(&mut state, || self.write(&message, cancelled_on));
                    continue;
                }
                state.waiting.remove(&request);
                return Err(CallError::Interrupted);
            }
            match interrupt {
                Some(_) => drop(self.changed.wait_for(&mut state, INTERRUPT_POLL)),
                None => self.changed.wait(&mut state),
            }
        }
        let mut answers = state.waiting.remove(&request).map(|waiting| waiting.answers).unwrap_or_default();
        drop(state);
        match answers.pop() {
            Some(Answer::Failed(failed)) => Err(CallError::Failed(failed)),
            Some(last) => {
                answers.push(last);
                Ok(answers)
            }
            None => Err(CallError::Broken),
        }
    }

    /// Sends a message that gets no answer, on that very connection.
    pub(crate) fn send_on(&self, connection: u64, body: Ask) -> Result<(), CallError> {
        if !self.can_be_used(connection) {
            return Err(self.ended().map_or(CallError::Broken, CallError::Ended));
        }
        self.stats.count_request(&body);
        let is_work = matches!(body, Ask::Content(_) | Ask::Records(_) | Ask::BeginBatch(_));
        let begun = Moment::now();
        self.write(&ClientMessage { request: 0, body: Some(body) }, Some(connection))
            .map_err(|_| CallError::Broken)?;
        if is_work {
            self.state.lock().work = Some(begun);
        }
        Ok(())
    }

    /// Acknowledges events on the connection that they came on; on another one they count as acknowledged.
    pub(crate) fn acknowledge(&self, connection: u64, ack: Ack) {
        let events = ack.events.clone();
        if self.send_on(connection, Ask::Ack(ack)).is_ok() {
            self.acknowledged(&events);
        }
    }

    /// The same, unless that would have to wait. `false`: it would.
    pub(crate) fn try_acknowledge(&self, connection: u64, ack: Ack) -> bool {
        let events = ack.events.clone();
        match self.try_send_on(connection, Ask::Ack(ack)) {
            Some(is_sent) => {
                if is_sent {
                    self.acknowledged(&events);
                }
                true
            }
            None => false,
        }
    }

    /// Says something that has no answer on a connection, unless that would have to wait (`None`), or it is another one
    /// by now.
    pub(crate) fn try_send_on(&self, connection: u64, body: Ask) -> Option<bool> {
        let mut writer = self.writer.try_lock()?;
        let has_room = |stream: &TcpStream| {
            let mut polled = [PollFd::new(stream, PollFlags::OUT)];
            matches!(rustix::event::poll(&mut polled, Some(&Timespec::default())), Ok(1))
        };
        match writer.as_ref() {
            Some((of, stream)) if *of == connection && self.can_be_used(connection) => {
                if !has_room(stream) {
                    return None;
                }
            }
            _ => return Some(false),
        }
        self.stats.count_request(&body);
        let mut bytes = Vec::new();
        frame::encode(&ClientMessage { request: 0, body: Some(body) }, &mut bytes);
        Some(self.write_to(&mut writer, &bytes, Some(connection)).is_ok())
    }

    /// They are written. Only now: an answer to what is said from here on proves that they have arrived.
    fn acknowledged(&self, events: &[u64]) {
        let mut state = self.state.lock();
        for event in events {
            if let Some(owed) = state.owed.get_mut(event) {
                owed.acknowledged = Some(Moment::now());
            }
        }
    }

    fn can_be_used(&self, connection: u64) -> bool {
        let state = self.state.lock();
        (state.connected || state.restoring) && state.connection == connection
    }

    /// Waits until everything that was heard of up to now is durable.
    pub(crate) fn sync(&self, interrupt: Option<&Interrupt>) -> Result<(), CallError> {
        let (opening, mark) = {
            let state = self.state.lock();
            if state.kept.is_empty() {
                return Ok(());
            }
            let opening = state.history.0;
            // What is of others is brought, and durable, before anything else is answered.
            (opening, state.kept.last(opening).unwrap_or(0))
        };
        self.call(Ask::Sync(hayloft_wire::Sync { opening, mark }), interrupt).map(drop)
    }

    /// How often something was lost that the server had applied.
    pub(crate) fn losses(&self) -> u64 {
        self.state.lock().losses
    }

    /// What was said of it last.
    pub(crate) fn lost(&self) -> Option<String> {
        self.state.lock().lost.clone()
    }

    /// The session that the present one takes the place of; 0: none.
    pub(crate) fn replaced(&self) -> u64 {
        self.state.lock().replaces
    }

    /// Which connection is up; waits for one.
    pub(crate) fn connection(&self) -> Result<u64, CallError> {
        let mut state = self.state.lock();
        loop {
            if let Some(reason) = &state.ended {
                return Err(CallError::Ended(reason.clone()));
            }
            if !state.begun {
                return Err(CallError::Replaced);
            }
            if state.connected {
                return Ok(state.connection);
            }
            self.changed.wait(&mut state);
        }
    }

    /// The last batch that the server said to have when the present connection began, or when it ended the session.
    pub(crate) fn last_sequence(&self) -> u64 {
        self.state.lock().last_sequence
    }

    /// The number of a batch in its session.
    pub(crate) fn number_of(&self, batch: Sequence) -> u64 {
        batch.0 - self.state.lock().base
    }

    /// The connection at this moment.
    pub(crate) fn connected(&self) -> Option<u64> {
        let state = self.state.lock();
        state.connected.then_some(state.connection)
    }

    /// Why the session is over, if it is.
    pub(crate) fn ended(&self) -> Option<String> {
        self.state.lock().ended.clone()
    }

    /// Says goodbye and ends the session, at the server too when it answers; waiting callers fail.
    pub(crate) fn close(&self) {
        let goodbye = ClientMessage { request: 0, body: Some(Ask::Goodbye(hayloft_wire::Goodbye {})) };
        self.end("the volume is unmounted");
        let _ = self.write(&goodbye, None);
        if let Some((_, stream)) = self.writer.lock().take() {
            // The server closes its side when the session has ended there: the volume is free from then on.
            let _ = stream.shutdown(Shutdown::Write);
        }
        let patience = Instant::now() + GOODBYE_PATIENCE;
        let mut state = self.state.lock();
        while state.connected && !self.changed.wait_until(&mut state, patience).timed_out() {}
    }

    /// Ends the session at once. The server may take its time for the goodbye, up to the limit.
    pub(crate) fn give_up(self: &Arc<Self>, reason: &str, limit: Duration) {
        self.end(reason);
        let link = Arc::clone(self);
        std::thread::spawn(move || {
            std::thread::sleep(limit);
            let connection = link.breaker.lock().as_ref().map(|(connection, _)| *connection);
            connection.into_iter().for_each(|connection| link.abandon(connection));
        });
    }

    /// The session is over. False when it was already.
    fn end(&self, reason: &str) -> bool {
        self.set_condition(Condition::Ended);
        let mut state = self.state.lock();
        let first = state.ended.is_none();
        state.ended.get_or_insert_with(|| reason.to_string());
        self.changed.notify_all();
        first
    }

    /// Reads answers; connects again when the connection breaks; ends with the session.
    fn keep_up(self: &Arc<Self>, mut reader: Reader, receiver: &dyn Receiver) {
        loop {
            self.read_answers(&mut reader, receiver);
            let _ = reader.stream().shutdown(Shutdown::Both);
            {
                let mut state = self.state.lock();
                state.connected = false;
                state.waiting.retain(|_, waiting| waiting.repeat || waiting.done);
                self.changed.notify_all();
                if state.ended.is_some() {
                    drop(state);
                    receiver.ended();
                    return;
                }
            }
            *self.writer.lock() = None;
            tracing::warn!(server = %self.address, "the connection broke, connecting again");
            // Before the server is spoken to again: others wait for this host until it has claimed.
            receiver.lost();
            match self.reconnect(receiver) {
                Some(next) => reader = next,
                None => {
                    receiver.ended();
                    return;
                }
            }
            self.stats.reconnects.add(1);
            tracing::info!(server = %self.address, "connected again");
        }
    }

    fn read_answers(&self, reader: &mut Reader, receiver: &dyn Receiver) {
        let connection = self.state.lock().connection;
        while self.read_one(reader, connection, receiver) {}
    }

    /// Receives the next message. `false`: there is none, the connection is over.
    fn read_one(&self, reader: &mut Reader, connection: u64, receiver: &dyn Receiver) -> bool {
        if !reader.has_next() {
            receiver.received_all(connection);
        }
        let mut message: ServerMessage = match reader.next(&self.stats) {
            Ok(Some(message)) => message,
            Ok(None) => return false,
            Err(error) => {
                tracing::warn!(%error, "cannot read from the server");
                return false;
            }
        };
        let Some(body) = message.body else { return true };
        let more = matches!(&body, Answer::Listings(listings) if listings.more);
        if let Answer::Failed(failed) = &body
            && matches!(failed.code(), FailureCode::SessionEnded | FailureCode::Evicted)
        {
            // Whether another one may follow is said to who asks for this one. Until then nothing here holds.
            // The answer to our own goodbye says the same.
            if self.ended().is_none() {
                tracing::warn!(reason = failed.message, "the server ended the session");
                self.set_condition(Condition::Lapsed);
            }
            return false;
        }
        if message.mark > 0 || !message.entries.is_empty() {
            // Before anybody learns what the message says.
            let state = &mut *self.state.lock();
            for entry in std::mem::take(&mut message.entries) {
                state.kept.keep(entry.opening, entry.mark, entry);
            }
            state.history.1 = state.history.1.max(message.mark);
            state.kept.durable(state.history.0, message.mark);
        }
        let body = match body {
            body @ (Answer::Event(_) | Answer::Listings(_) | Answer::Inode(_)) => {
                // What it carries is applied here, in the order of the stream, whoever asked for it.
                let request = message.request;
                let mark = {
                    let mut state = self.state.lock();
                    if let Answer::Event(event) = &body {
                        let owed = Owed { since: state.heard, acknowledged: None };
                        state.owed.insert(event.number, owed);
                    }
                    state.waiting.get(&request).map_or(0, |of| of.mark)
                };
                receiver.receive(Arrival { connection, request, mark }, body);
                Answer::Done(hayloft_wire::Done {})
            }
            body => body,
        };
        let mut state = self.state.lock();
        // An answer that nobody waits for any more belongs to an interrupted caller.
        let Some(waiting) = state.waiting.get_mut(&message.request) else { return true };
        if let Answer::Pong(pong) = &body {
            self.clock.hear(pong.server_time_nanos, waiting.sent.instant());
        }
        waiting.answers.push(body);
        waiting.done = !more;
        let (done, unattended) = (waiting.done, waiting.unattended);
        let (sent, work) = (waiting.sent, waiting.work);
        if done {
            if unattended {
                state.waiting.remove(&message.request);
            }
            state.answered(sent, work);
            self.lease_changed(&state);
            self.relive(&mut state);
            self.changed.notify_all();
        }
        true
    }

    /// There has been word from the server: when it is not too old, the lease runs.
    fn relive(&self, state: &mut State) {
        if !state.restoring && state.lease_from().is_some_and(|from| from.elapsed() < self.lease / 2) {
            let (lapsed, live) = (Condition::Lapsed as u8, Condition::Live as u8);
            let _ = self.condition.compare_exchange(lapsed, live, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    fn reconnect(self: &Arc<Self>, receiver: &dyn Receiver) -> Option<Reader> {
        let mut pause = RETRY_MIN;
        let mut reported = Instant::now();
        loop {
            if self.ended().is_some() {
                return None;
            }
            let hello = self.hello();
            let greeting =
                connect(&self.address).and_then(|stream| greet(stream, &hello, &self.stats, &self.clock));
            match greeting {
                Ok(Greeting::Welcome(reader, welcome)) => {
                    let mut reader = *reader;
                    let resumed = self.resume(&mut reader, &welcome, receiver);
                    self.state.lock().restoring = false;
                    match resumed {
                        Ok(()) => {
                            receiver.resumed();
                            return Some(reader);
                        }
                        Err(_) if self.ended().is_some() => return None,
                        Err(error) => tracing::debug!(%error, "not resumed yet"),
                    }
                }
                Ok(Greeting::Refused(failed))
                    if matches!(
                        failed.code(),
                        FailureCode::NotFound | FailureCode::Evicted | FailureCode::OtherHistory
                    ) =>
                {
                    self.end_for_good(&failed.message);
                    return None;
                }
                Ok(Greeting::Refused(failed)) if failed.code() == FailureCode::SessionEnded => {
                    self.replace(&failed, receiver);
                }
                Ok(Greeting::Refused(failed)) => tracing::debug!(reason = failed.message, "not resumed yet"),
                Err(error) if reported.elapsed() > Duration::from_secs(10) => {
                    reported = Instant::now();
                    tracing::warn!(%error, server = %self.address, "still no connection");
                }
                Err(_) => {}
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// What a new connection begins with.
    fn hello(&self) -> Hello {
        let state = self.state.lock();
        let (opening, mark) = state.history;
        Hello {
            session: state.session,
            resume: state.begun,
            replaces: if state.begun { 0 } else { state.replaces },
            opening,
            mark,
            ..self.hello.clone()
        }
    }

    /// The mount cannot go on, with whatever session.
    fn end_for_good(&self, reason: &str) {
        let reason = format!("{reason}; unmount, and mount again");
        tracing::error!("{reason}");
        self.end(&reason);
    }

    /// The server has ended the session, which nobody wanted but the clock: another one takes its place.
    fn replace(&self, failed: &Failed, receiver: &dyn Receiver) {
        tracing::warn!(reason = failed.message, "the session was ended, another one begins");
        self.set_condition(Condition::Lapsed);
        {
            let mut state = self.state.lock();
            if state.begun {
                (state.replaces, state.session, state.begun) = (state.session, host::random(), false);
            }
            if let Some(last) = failed.last_sequence {
                state.last_sequence = state.base + last;
            }
            self.changed.notify_all();
        }
        let base = receiver.replace(&failed.message).0;
        let mut state = self.state.lock();
        (state.base, state.last_sequence) = (base, base);
        self.stats.sessions_replaced.add(1);
    }

    /// Changes that were asked for in a session of which the server knows nothing any more: whether they were executed
    /// cannot be told, and they are not done twice.
    fn fail_changes(state: &mut State) {
        let message = "the session was ended, and nobody knows whether this was done".to_string();
        let failed = Failed { code: FailureCode::Invalid as i32, message, ..Failed::default() };
        let is_change = |of: &&mut Waiting| matches!(of.message.body, Some(Ask::Change(_)));
        for waiting in state.waiting.values_mut().filter(is_change) {
            (waiting.answers, waiting.done) = (vec![Answer::Failed(failed.clone())], true);
        }
    }

    /// What the claim on a new connection brings back. Nothing, for a session that takes the place of an ended one: others
    /// may have looked for it since.
    fn entries_to_bring(&self, opening: u64, is_new: bool, receiver: &dyn Receiver) -> Vec<Entry> {
        let (entries, replaced) = {
            let state = self.state.lock();
            (state.kept.to_bring(opening), state.replaces)
        };
        if !is_new || entries.is_empty() {
            return entries;
        }
        let lost = receiver.lose(replaced, &entries);
        let mut state = self.state.lock();
        state.kept.brought(opening);
        if lost.is_some() {
            (state.losses, state.lost) = (state.losses + 1, lost);
        }
        Vec::new()
    }

    /// The new connection carries the session: requests without an answer go out again.
    fn resume(
        self: &Arc<Self>,
        reader: &mut Reader,
        welcome: &Welcome,
        receiver: &dyn Receiver,
    ) -> io::Result<()> {
        let (stream, breaker) = (reader.stream().try_clone()?, reader.stream().try_clone()?);
        let (next, last, is_new) = {
            let mut state = self.state.lock();
            let is_new = !state.begun;
            if is_new && !welcome.goes_on {
                Link::fail_changes(&mut state);
            }
            (state.connection + 1, state.base + welcome.last_sequence, is_new)
        };
        if is_new {
            receiver.begun(welcome);
        }
        let mut claim = receiver.renew(Sequence(last));
        claim.entries = self.entries_to_bring(welcome.opening, is_new, receiver);
        *self.writer.lock() = Some((next, stream));
        *self.breaker.lock() = Some((next, breaker));
        let known = {
            let mut state = self.state.lock();
            (state.connection, state.restoring) = (next, true);
            // What was not acknowledged on the last connection counts as acknowledged.
            state.owed.clear();
            (state.work, state.arrived) = (None, None);
            let known = if state.begun { state.last_sequence } else { last };
            state.begun = true;
            state.last_sequence = last;
            state.history = (welcome.opening, welcome.mark);
            known
        };
        let mut line = Line { link: self, reader, connection: next, receiver };
        let claimed = match line.ask(Ask::Claim(claim)).map_err(io::Error::other)? {
            Answer::Claimed(claimed) => claimed,
            _ => return Err(io::Error::other("the answer to a claim is of another kind")),
        };
        {
            let mut state = self.state.lock();
            state.kept.brought(welcome.opening);
            // Others may have brought what was not acknowledged.
            state.last_sequence = state.base + claimed.last_sequence;
            if state.last_sequence < known {
                drop(state);
                self.end_for_good("the server's store holds less than it has acknowledged to this mount");
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        receiver.restore(&mut line).map_err(io::Error::other)?;
        let again: Vec<u64> = {
            let mut state = self.state.lock();
            (state.connected, state.restoring) = (true, false);
            state.connected_at = Some(Instant::now());
            self.relive(&mut state);
            for waiting in state.waiting.values_mut().filter(|waiting| !waiting.done && waiting.repeat) {
                waiting.answers.clear();
            }
            self.changed.notify_all();
            let again = state.waiting.iter().filter(|(_, waiting)| !waiting.done && waiting.repeat);
            again.map(|(request, _)| *request).collect()
        };
        // From another thread: the server may have to be read from before it takes all of them.
        let link = Arc::clone(self);
        std::thread::Builder::new()
            .name("hayloft-resend".to_string())
            .spawn(move || again.into_iter().for_each(|request| link.send_waiting(request, next)))?;
        Ok(())
    }
}

/// A connection that is not used by anybody else yet.
pub(crate) struct Line<'a> {
    link: &'a Link,
    reader: &'a mut Reader,
    connection: u64,
    receiver: &'a dyn Receiver,
}

impl Line<'_> {
    /// Sends a message that gets no answer.
    pub(crate) fn say(&self, ask: Ask) -> Result<(), CallError> {
        self.link.send_on(self.connection, ask)
    }

    /// Asks, and waits for the answer. Whatever comes before it is received as usual.
    pub(crate) fn ask(&mut self, ask: Ask) -> Result<Answer, CallError> {
        let link = self.link;
        link.stats.count_request(&ask);
        let request = link.enlist(ask, false);
        link.send_waiting(request, self.connection);
        let is_done = || link.state.lock().waiting.get(&request).is_some_and(|waiting| waiting.done);
        while !is_done() && link.read_one(self.reader, self.connection, self.receiver) {}
        let waiting = link.state.lock().waiting.remove(&request);
        match waiting.and_then(|mut waiting| waiting.answers.pop()) {
            Some(Answer::Failed(failed)) => Err(CallError::Failed(failed)),
            Some(answer) => Ok(answer),
            None => Err(CallError::Broken),
        }
    }
}

fn refused(address: &str, volume: &str, failed: &Failed) -> MountError {
    match failed.code() {
        FailureCode::NotFound => {
            MountError::NoSuchVolume { volume: volume.to_string(), address: address.to_string() }
        }
        _ => MountError::Refused { address: address.to_string(), message: failed.message.clone() },
    }
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::InvalidInput, "the address has no host");
    for resolved in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&resolved, CONNECT_TIMEOUT) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                notice_dead_peers(&stream);
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A server whose host vanishes without a word is noticed within some ten seconds.
#[allow(unsafe_code)]
fn notice_dead_peers(stream: &TcpStream) {
    let set = |level, name, value: libc::c_int| {
        // SAFETY: the descriptor is open and the value is a c_int of the size given.
        unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        }
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3);
    // Longer: a server that waits for its store takes nothing for a while, and is there all the same.
    set(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 60_000);
}

enum Greeting {
    Welcome(Box<Reader>, Box<Welcome>),
    Refused(Failed),
}

fn greet(mut stream: TcpStream, hello: &Hello, stats: &Stats, clock: &Clock) -> io::Result<Greeting> {
    let ask = Ask::Hello(hello.clone());
    stats.count_request(&ask);
    let mut bytes = Vec::new();
    frame::encode(&ClientMessage { request: u64::MAX, body: Some(ask) }, &mut bytes);
    let sent = Instant::now();
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(&bytes)?;
    let mut reader = Reader::new(stream);
    let message: Option<ServerMessage> = reader.next(stats).map_err(io::Error::other)?;
    reader.stream().set_read_timeout(None)?;
    match message.and_then(|message| message.body) {
        Some(Answer::Welcome(welcome)) => {
            clock.hear(welcome.server_time_nanos, sent);
            Ok(Greeting::Welcome(Box::new(reader), Box::new(welcome)))
        }
        Some(Answer::Failed(failed)) => Ok(Greeting::Refused(failed)),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is not Hayloft's")),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
