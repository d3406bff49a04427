//! Connecting, again and again, going on with the session there, or beginning another one.

use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hayloft_model::slot::Width;
use hayloft_model::{Ino, Sequence};
use hayloft_transport::{ConnectError, Dial};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Claim, ClientMessage, Entry, Failed, FailureCode, Hello, MANY_SLOTS, Spoken, Welcome};
use parking_lot::{Condvar, Mutex};

use crate::error::MountError;
use crate::host;
use crate::host::clock::Clock;
use crate::host::moment::Moment;
use crate::session::link::greeting::{
    GREETING_TIMEOUT, Greeting, await_answers, greet, is_closed, not_connected, refused, with_cause,
};
use crate::session::link::line::Line;
use crate::session::link::{Condition, Link, Opened, Receiver, State, Waiting};
use crate::session::reader::Reader;
use crate::session::writer::Writer;
use crate::stats::Stats;

const RETRY_MAX: Duration = Duration::from_millis(500);
const RETRY_MIN: Duration = Duration::from_millis(20);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For how long it is tried again to mount from a server that closes the connection without a word, and how often.
const CLOSED_PATIENCE: Duration = Duration::from_secs(5);
const CLOSED_PAUSE: Duration = Duration::from_millis(100);

impl Link {
    /// Connects and begins a session; [`Link::start`] has to follow.
    ///
    /// # Errors
    /// Unreachable, refused, no such volume.
    pub(crate) fn open(
        (address, dial): (&str, &Dial),
        volume: &str,
        mount_point: &str,
        read_only: bool,
        stats: Arc<Stats>,
        clock: Arc<Clock>,
    ) -> Result<Opened, MountError> {
        let ours = Spoken::ours();
        let hello = Hello {
            protocol: ours.newest,
            oldest: ours.oldest,
            features: ours.features,
            needs: ours.needs,
            release: ours.release.to_string(),
            volume: volume.to_string(),
            session: host::random(),
            host_id: host::id(),
            host_name: host::name(),
            pid: std::process::id(),
            read_only,
            mount_point: mount_point.to_string(),
            token: [host::random(), host::random()].map(u64::to_le_bytes).concat().into(),
            ..Hello::default()
        };
        let not_connected = |error| not_connected(address, dial.by_own_clock(error));
        let begun = Instant::now();
        let (writer, reader, welcome) = loop {
            let connection = dial.connect(address, CONNECT_TIMEOUT).map_err(not_connected)?;
            let greeting = match greet(connection, &hello, &stats, &clock) {
                // A server that has too much to do with others closes connections before it has read what they say.
                Err(ConnectError::Unreachable(error))
                    if is_closed(&error) && begun.elapsed() < CLOSED_PATIENCE =>
                {
                    std::thread::sleep(CLOSED_PAUSE);
                    continue;
                }
                greeting => greeting.map_err(not_connected)?,
            };
            match greeting {
                Greeting::Welcome(greeted) => break *greeted,
                Greeting::Refused(failed) => return Err(refused(address, volume, &failed)),
            }
        };
        let unreachable = |source| MountError::Unreachable { address: address.to_string(), source };
        let breaker = reader.socket().try_clone().map_err(unreachable)?;
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
            dial: dial.clone(),
            hello,
            state: Mutex::new(state),
            changed: Condvar::new(),
            writer: Mutex::new(Some((1, writer))),
            breaker: Mutex::new(Some((1, breaker))),
            came_through_no_more: AtomicBool::new(false),
            stats,
            clock,
            round_trip_micros: AtomicU64::new(0),
            lease: Duration::from_millis(welcome.lease_ms.max(1000)),
            condition: AtomicU8::new(Condition::Live as u8),
            relived: AtomicU64::new(0),
            deadline: AtomicU64::new(u64::MAX),
            kept: OnceLock::new(),
        });
        Ok(Opened { link, welcome, reader })
    }

    /// The same with another volume of the server, to read from it.
    ///
    /// # Errors
    /// As [`Link::open`].
    pub(crate) fn open_other(
        &self,
        volume: &str,
        stats: Arc<Stats>,
        clock: Arc<Clock>,
    ) -> Result<Opened, MountError> {
        Link::open((&self.address, &self.dial), volume, &self.hello.mount_point, true, stats, clock)
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
    pub(super) fn claim(&self, connection: u64, claim: Claim) -> io::Result<()> {
        let request = self.enlist(Ask::Claim(Claim::default()), true);
        self.write(&ClientMessage { request, body: Some(Ask::Claim(claim)) }, Some(connection))
    }

    /// Reads answers; connects again when the connection breaks; ends with the session.
    pub(super) fn keep_up(self: &Arc<Self>, mut reader: Reader, receiver: &dyn Receiver) {
        loop {
            self.read_answers(&mut reader, receiver);
            let _ = reader.socket().shutdown(Shutdown::Both);
            let connection = {
                let mut state = self.state.lock();
                state.connected = false;
                self.wake_all(&state);
                state.waiting.retain(|_, waiting| waiting.repeat || waiting.done);
                if state.ended.is_some() {
                    drop(state);
                    receiver.ended();
                    return;
                }
                state.connection
            };
            *self.writer.lock() = None;
            *self.breaker.lock() = None;
            tracing::warn!(server = %self.address, "the connection broke, connecting again");
            // Before the server is spoken to again: others wait for this host until it has claimed.
            receiver.lost(connection);
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

    pub(super) fn reconnect(self: &Arc<Self>, receiver: &dyn Receiver) -> Option<Reader> {
        let mut pause = RETRY_MIN;
        let (mut reported, mut told) = (Instant::now(), false);
        // Each other time, while connections are made and nothing comes of them: a way that loses large packets lets all else through.
        let mut is_narrow = self.came_through_no_more.swap(false, Ordering::Relaxed);
        loop {
            if self.ended().is_some() {
                return None;
            }
            let hello = self.hello();
            let connected = match is_narrow {
                true => self.dial.connect_narrow(&self.address, CONNECT_TIMEOUT),
                false => self.dial.connect(&self.address, CONNECT_TIMEOUT),
            };
            let greeting = connected.and_then(|both| greet(both, &hello, &self.stats, &self.clock));
            let greeting = greeting.map_err(|error| self.dial.by_own_clock(error));
            let is_stuck = match &greeting {
                Ok(Greeting::Welcome(_)) => true,
                Ok(Greeting::Refused(_)) => false,
                Err(error) => error.is_silence(),
            };
            match greeting {
                Ok(Greeting::Welcome(greeted)) => {
                    let (writer, mut reader, welcome) = *greeted;
                    let resumed = self.resume(writer, &mut reader, &welcome, receiver);
                    self.state.lock().restoring = false;
                    match resumed {
                        Ok(()) => {
                            if is_narrow {
                                tracing::warn!(
                                    "on this connection packets are small, since nothing came through on the last one: where \
                                     that helps, the network loses large ones (look at its MTU)"
                                );
                            }
                            self.came_through_no_more.store(false, Ordering::Relaxed);
                            receiver.resumed();
                            return Some(reader);
                        }
                        Err(_) if self.ended().is_some() => return None,
                        Err(error) => {
                            tracing::debug!(%error, "not resumed yet");
                            // It may have claimed already, and been told something.
                            let connection = self.state.lock().connection;
                            receiver.lost(connection);
                        }
                    }
                }
                Ok(Greeting::Refused(failed))
                    if matches!(
                        failed.code(),
                        FailureCode::NotFound
                            | FailureCode::Evicted
                            | FailureCode::OtherHistory
                            | FailureCode::Denied
                            | FailureCode::AtRest
                    ) =>
                {
                    self.end_for_good(&failed.message);
                    return None;
                }
                Ok(Greeting::Refused(failed)) if failed.code() == FailureCode::SessionEnded => {
                    self.replace(&failed, receiver);
                }
                // A server of a version that this one does not understand among them: it may be set back.
                Ok(Greeting::Refused(failed)) if !told || reported.elapsed() > Duration::from_secs(10) => {
                    (reported, told) = (Instant::now(), true);
                    tracing::warn!(reason = failed.message, server = %self.address, "the server does not take the session");
                }
                Ok(Greeting::Refused(failed)) => tracing::debug!(reason = failed.message, "not resumed yet"),
                Err(error) if error.is_final() => {
                    self.end_for_good(&error.to_string());
                    return None;
                }
                Err(error) if reported.elapsed() > Duration::from_secs(10) => {
                    reported = Instant::now();
                    tracing::warn!(error = with_cause(&error), server = %self.address, "still no connection");
                }
                Err(_) => {}
            }
            is_narrow ^= is_stuck;
            std::thread::sleep(pause);
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// What a new connection begins with.
    pub(super) fn hello(&self) -> Hello {
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
    pub(super) fn end_for_good(&self, reason: &str) {
        let reason = format!("{reason}; unmount, and mount again");
        tracing::error!("{reason}");
        self.end(&reason);
    }

    /// The server has ended the session, which nobody wanted but the clock: another one takes its place.
    pub(super) fn replace(&self, failed: &Failed, receiver: &dyn Receiver) {
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
            let opening = state.history.0;
            state.kept.durable(opening, failed.durable);
            self.wake_all(&state);
        }
        let base = receiver.replace(failed).0;
        let mut state = self.state.lock();
        (state.base, state.last_sequence) = (base, base);
        self.stats.sessions_replaced.add(1);
    }

    /// Changes that were asked for in a session of which the server knows nothing any more: whether they were executed
    /// cannot be told, and they are not done twice.
    pub(super) fn fail_changes(state: &mut State) {
        let message = "the session was ended, and nobody knows whether this was done".to_string();
        let failed = Failed { code: FailureCode::Invalid as i32, message, ..Failed::default() };
        let is_change = |of: &&mut Waiting| matches!(of.message.body, Some(Ask::Change(_)));
        for waiting in state.waiting.values_mut().filter(is_change) {
            (waiting.answers, waiting.done) = (vec![Answer::Failed(failed.clone())], true);
        }
    }

    /// What the claim on a new connection brings back. Nothing, for a session that takes the place of an ended one: others
    /// may have looked for it since.
    pub(super) fn entries_to_bring(&self, opening: u64, is_new: bool, receiver: &dyn Receiver) -> Vec<Entry> {
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
    pub(super) fn resume(
        self: &Arc<Self>,
        writer: Writer,
        reader: &mut Reader,
        welcome: &Welcome,
        receiver: &dyn Receiver,
    ) -> io::Result<()> {
        let breaker = reader.socket().try_clone()?;
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
        if welcome.features & MANY_SLOTS == 0 {
            // An older server takes these for something else. What was changed in them it refuses: it comes back with another session.
            claim.own.retain(|object| Ino(object.ino).width() == Width::Few);
        }
        claim.entries = self.entries_to_bring(welcome.opening, is_new, receiver);
        *self.writer.lock() = Some((next, writer));
        *self.breaker.lock() = Some((next, breaker));
        let known = {
            let mut state = self.state.lock();
            (state.connection, state.restoring) = (next, true);
            // What was not acknowledged on the last connection counts as acknowledged.
            state.owed.clear();
            (state.work, state.arrived, state.refused) = (None, None, false);
            let known = if state.begun { state.last_sequence } else { last };
            state.begun = true;
            state.last_sequence = last;
            state.history = (welcome.opening, welcome.mark);
            known
        };
        // There may be nothing else by which it shows that a part of what is said was lost.
        await_answers(&reader.socket(), Some(GREETING_TIMEOUT))?;
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
        await_answers(&line.reader.socket(), None)?;
        let again: Vec<u64> = {
            let mut state = self.state.lock();
            (state.connected, state.restoring) = (true, false);
            state.connected_at = Some(Instant::now());
            self.relive(&mut state);
            let again = |of: &Waiting| !of.done && of.repeat;
            for waiting in state.waiting.values_mut().filter(|of| again(of)) {
                waiting.answers.clear();
                waiting.sends_again = matches!(waiting.message.body, Some(Ask::Change(_)));
            }
            self.wake_all(&state);
            let all = state.waiting.iter().filter(|(_, of)| again(of) && !of.sends_again);
            all.map(|(request, _)| *request).collect()
        };
        // From another thread: the server may have to be read from before it takes all of them.
        let link = Arc::clone(self);
        std::thread::Builder::new()
            .name("hayloft-resend".to_string())
            .spawn(move || again.into_iter().for_each(|request| link.send_waiting(request, next)))?;
        Ok(())
    }
}
