//! The session stream: one connection to the server, kept up. Requests survive a broken connection: they
//! are sent again on the next one, and their callers just wait.

mod calls;
mod connect;
mod greeting;
mod lease;
mod line;
mod reading;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hayloft_model::Sequence;
use hayloft_model::replay::Kept;
use hayloft_transport::Dial;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Claim, ClientMessage, Entry, Failed, Hello, Welcome};
use parking_lot::{Condvar, Mutex};
use socket2::Socket;

pub(crate) use self::line::Line;
use crate::host::clock::Clock;
use crate::host::moment::Moment;
use crate::keeper::Shared;
use crate::session::reader::Reader;
use crate::session::writer::Writer;
use crate::stats::Stats;

/// How long the server may take to end a session that says goodbye.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether a waiting call is to be given up.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);

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
    /// All hosts have heard of these changes.
    fn all_heard(&self, changes: &[u64]);
    /// The kernel may let go of these as far as nobody has them open: they have no name any more.
    fn nameless(&self, inos: &[u64]);
    /// All that has come on this connection is received.
    fn received_all(&self, connection: u64);
    /// A connection is lost: what is not owned may change from now on. Returns when nobody here can see it any more.
    fn lost(&self, connection: u64);
    /// A new connection, and the last batch that the server holds without what is brought back. Returns what is owned.
    fn renew(&self, last: Sequence) -> Claim;
    /// The claim is sent: the connection can be used.
    fn resumed(&self);
    /// The server has ended the session, as it says: nothing is owned any more, and another one begins. Returns when nothing of
    /// the old one is left here, with the number that its last batch had.
    fn replace(&self, failed: &Failed) -> Sequence;
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
    /// Some time has passed.
    fn tick(&self);
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
    /// Wakes who waits for it, and nobody else.
    wake: Arc<Condvar>,
    /// Sent again by itself on the next connection; if not, it fails with `Broken`.
    repeat: bool,
    /// There is another connection, and who waits sends it again himself, if he is not being ended.
    sends_again: bool,
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
    /// There was no room for the last batch on this connection: the server does not count what comes of further ones.
    refused: bool,
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
    /// How often the server has said that what arrives there is damaged.
    damaged: u32,
}

impl State {
    /// From when on the lease runs. The server does not let it run from later on for who is heard but does not
    /// acknowledge, unless something of a batch arrives.
    fn lease_from(&self) -> Option<Moment> {
        let owed = self.owed.values().next().map(|owed| owed.since.max(self.arrived));
        owed.map_or(self.heard, |owed| owed.min(self.heard))
    }

    /// Something of a batch was sent.
    fn worked(&mut self, at: Moment) {
        if !self.refused {
            self.work = Some(at);
        }
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
    dial: Dial,
    hello: Hello,
    state: Mutex<State>,
    /// The connection, the session or the lease is not what it was.
    changed: Condvar,
    /// Lock order: after `state` is released, or alone; writing may block.
    writer: Mutex<Option<(u64, Writer)>>,
    /// The same connection, to break it off while somebody writes.
    breaker: Mutex<Option<(u64, Socket)>>,
    /// The last connection was given up, since nothing came through.
    came_through_no_more: AtomicBool,
    stats: Arc<Stats>,
    clock: Arc<Clock>,
    /// How long the last keep-alive took to be answered.
    round_trip_micros: AtomicU64,
    /// How long the server keeps what a silent session holds.
    lease: Duration,
    condition: AtomicU8,
    /// When calls could go on again that had waited for the lease, nanoseconds of [`Moment`]; 0: long ago.
    relived: AtomicU64,
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
    /// The server behind this connection cannot go on with the session: looks for it anew.
    pub(crate) fn abandon(&self, connection: u64) {
        if let Some((current, stream)) = &*self.breaker.lock()
            && *current == connection
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// How often something was lost that the server had applied.
    pub(crate) fn losses(&self) -> u64 {
        self.state.lock().losses
    }

    /// How often the server has said that what arrives there is damaged.
    pub(crate) fn damaged(&self) -> u32 {
        self.state.lock().damaged
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
            let _ = stream.socket().shutdown(Shutdown::Write);
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
        self.wake_all(&state);
        first
    }

    /// The connection, or the session, is another one, or gone: whoever waits for something looks.
    fn wake_all(&self, state: &State) {
        self.changed.notify_all();
        for waiting in state.waiting.values() {
            waiting.wake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_heard_behind_a_batch_counts_unless_the_one_before_it_was_refused() {
        let begun = Moment::now();
        let at = |millis| begun.after(Duration::from_millis(millis));
        let mut state = State::default();
        state.owed.insert(1, Owed { since: Some(begun), acknowledged: None });
        let shipped_and_heard = |state: &mut State, millis| {
            state.worked(at(millis));
            state.answered(at(millis + 1), state.work);
            state.lease_from()
        };
        assert_eq!(shipped_and_heard(&mut state, 10), Some(at(10)));
        state.refused = true;
        assert_eq!(shipped_and_heard(&mut state, 20), Some(at(10)), "the server does not count it");
        state.refused = false;
        assert_eq!(shipped_and_heard(&mut state, 30), Some(at(30)));
    }
}
