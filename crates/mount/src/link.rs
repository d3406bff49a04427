//! The session stream: one connection to the server, kept up. Requests survive a broken connection: they
//! are sent again on the next one, and their callers just wait.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{ClientMessage, Failed, FailureCode, Hello, ServerMessage, Welcome, frame};
use parking_lot::{Condvar, Mutex};

use crate::clock::host_nanos;
use crate::error::MountError;
use crate::reader::Reader;
use crate::stats::Stats;
use crate::{clock::Clock, host};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the server may take to end a session that says goodbye.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(5);
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_millis(500);
/// How often a waiting caller looks whether it was interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The server refused.
    #[error("{}", .0.message)]
    Failed(Failed),
    /// The caller gave up (a signal).
    #[error("interrupted")]
    Interrupted,
    /// The session is over: the server ended it, or the mount is being closed.
    #[error("the session has ended: {0}")]
    Ended(String),
    /// The connection broke under a message that is not sent again by itself.
    #[error("the connection broke")]
    Broken,
}

struct Waiting {
    message: ClientMessage,
    answers: Vec<Answer>,
    done: bool,
    /// Sent again by itself on the next connection; if not, it fails with `Broken`.
    repeat: bool,
}

#[derive(Default)]
struct State {
    connection: u64,
    connected: bool,
    next_request: u64,
    waiting: HashMap<u64, Waiting>,
    ended: Option<String>,
    last_sequence: u64,
}

/// The client's end of a session.
pub(crate) struct Link {
    address: String,
    hello: Hello,
    state: Mutex<State>,
    changed: Condvar,
    /// Lock order: after `state` is released, or alone; writing may block.
    writer: Mutex<Option<(u64, TcpStream)>>,
    stats: Arc<Stats>,
    clock: Arc<Clock>,
}

/// What the server said when the session began.
pub(crate) struct Opened {
    pub(crate) link: Arc<Link>,
    pub(crate) welcome: Welcome,
}

impl Link {
    /// Connects and begins a session. A thread keeps the connection up from then on.
    ///
    /// # Errors
    /// Unreachable, refused, no such volume, in use.
    pub(crate) fn open(
        address: &str,
        volume: &str,
        mount_point: &str,
        read_only: bool,
        stats: Arc<Stats>,
        clock: Arc<Clock>,
    ) -> Result<Opened, MountError> {
        let mut hello = Hello {
            protocol: hayloft_wire::PROTOCOL,
            volume: volume.to_string(),
            session: host::random(),
            resume: false,
            host_id: host::id(),
            host_name: host::name(),
            pid: std::process::id(),
            takes_over: 0,
            read_only,
            mount_point: mount_point.to_string(),
        };
        let unreachable = |source| MountError::Unreachable { address: address.to_string(), source };
        let mut attempt = 0;
        let (reader, welcome) = loop {
            let stream = connect(address).map_err(unreachable)?;
            match greet(stream, &hello, &stats, &clock).map_err(unreachable)? {
                Greeting::Welcome(reader, welcome) => break (*reader, *welcome),
                Greeting::Refused(failed) => {
                    let dead = failed.holder_host_id == hello.host_id && host::is_dead(failed.holder_pid);
                    if failed.code() == FailureCode::Busy && dead && attempt < 20 {
                        attempt += 1;
                        hello.takes_over = failed.holder_session;
                        std::thread::sleep(Duration::from_millis(if attempt == 1 { 0 } else { 100 }));
                        continue;
                    }
                    return Err(refused(address, volume, &failed));
                }
            }
        };
        hello.resume = true;
        hello.takes_over = 0;
        let writer = reader.stream().try_clone().map_err(unreachable)?;
        let state = State { connection: 1, connected: true, next_request: 1, ..State::default() };
        let link = Arc::new(Link {
            address: address.to_string(),
            hello,
            state: Mutex::new(state),
            changed: Condvar::new(),
            writer: Mutex::new(Some((1, writer))),
            stats,
            clock,
        });
        let keeper = Arc::clone(&link);
        std::thread::Builder::new()
            .name("hayloft-link".to_string())
            .spawn(move || keeper.keep_up(reader))
            .map_err(unreachable)?;
        Ok(Opened { link, welcome })
    }

    /// Asks and waits for the whole answer, over as many connections as it takes.
    pub(crate) fn call(&self, ask: Ask, interrupt: Option<&Interrupt>) -> Result<Vec<Answer>, CallError> {
        self.call_with(ask, interrupt, None)
    }

    /// Asks and waits; fails with [`CallError::Broken`] when the connection breaks, or when the connection is
    /// another one than `connection` already.
    pub(crate) fn call_once(&self, ask: Ask, connection: u64) -> Result<Vec<Answer>, CallError> {
        self.call_with(ask, None, Some(connection))
    }

    /// `only_on`: the one connection that the question belongs to; it is not asked on another one.
    fn call_with(
        &self,
        ask: Ask,
        interrupt: Option<&Interrupt>,
        only_on: Option<u64>,
    ) -> Result<Vec<Answer>, CallError> {
        self.stats.count_request(&ask);
        let (request, connected) = {
            let mut state = self.state.lock();
            if let Some(reason) = &state.ended {
                return Err(CallError::Ended(reason.clone()));
            }
            if only_on.is_some_and(|connection| !state.connected || state.connection != connection) {
                return Err(CallError::Broken);
            }
            let request = state.next_request;
            state.next_request += 1;
            let message = ClientMessage { request, body: Some(ask) };
            let repeat = only_on.is_none();
            state.waiting.insert(request, Waiting { message, answers: Vec::new(), done: false, repeat });
            (request, state.connected)
        };
        if connected {
            self.send_waiting(request, only_on);
        }
        self.await_answer(request, interrupt)
    }

    fn send_waiting(&self, request: u64, only_on: Option<u64>) {
        let Some(message) = self.state.lock().waiting.get(&request).map(|waiting| waiting.message.clone())
        else {
            return;
        };
        // An error here shows on the reading side as well, which reconnects and sends again.
        let _ = self.write(&message, only_on);
    }

    fn write(&self, message: &ClientMessage, only_on: Option<u64>) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame::encode(message, &mut bytes);
        let mut writer = self.writer.lock();
        let (connection, stream) =
            writer.as_mut().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
        if only_on.is_some_and(|only_on| only_on != *connection) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let result = stream.write_all(&bytes);
        self.stats.bytes_sent.add(bytes.len() as u64);
        if result.is_err() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        result
    }

    /// The server behind this connection cannot go on with the session: looks for it anew.
    pub(crate) fn abandon(&self, connection: u64) {
        if let Some((current, stream)) = &*self.writer.lock()
            && *current == connection
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn await_answer(&self, request: u64, interrupt: Option<&Interrupt>) -> Result<Vec<Answer>, CallError> {
        let mut state = self.state.lock();
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
            if interrupt.is_some_and(Interrupt::interrupted) {
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
        if self.connection()? != connection {
            return Err(CallError::Broken);
        }
        self.stats.count_request(&body);
        self.write(&ClientMessage { request: 0, body: Some(body) }, Some(connection))
            .map_err(|_| CallError::Broken)
    }

    /// Which connection is up; waits for one.
    pub(crate) fn connection(&self) -> Result<u64, CallError> {
        let mut state = self.state.lock();
        loop {
            if let Some(reason) = &state.ended {
                return Err(CallError::Ended(reason.clone()));
            }
            if state.connected {
                return Ok(state.connection);
            }
            self.changed.wait(&mut state);
        }
    }

    /// The last batch that the server said to have when the present connection began.
    pub(crate) fn last_sequence(&self) -> u64 {
        self.state.lock().last_sequence
    }

    /// Whether there is a connection at this moment.
    pub(crate) fn is_connected(&self) -> bool {
        self.state.lock().connected
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

    fn end(&self, reason: &str) {
        let mut state = self.state.lock();
        state.ended.get_or_insert_with(|| reason.to_string());
        self.changed.notify_all();
    }

    /// Reads answers; connects again when the connection breaks; ends with the session.
    fn keep_up(self: &Arc<Self>, mut reader: Reader) {
        loop {
            self.read_answers(&mut reader);
            {
                let mut state = self.state.lock();
                state.connected = false;
                state.waiting.retain(|_, waiting| waiting.repeat || waiting.done);
                self.changed.notify_all();
                if state.ended.is_some() {
                    return;
                }
            }
            *self.writer.lock() = None;
            tracing::warn!(server = %self.address, "the connection broke, connecting again");
            match self.reconnect() {
                Some(next) => reader = next,
                None => return,
            }
            self.stats.reconnects.add(1);
            tracing::info!(server = %self.address, "connected again");
        }
    }

    fn read_answers(&self, reader: &mut Reader) {
        loop {
            let message: ServerMessage = match reader.next(&self.stats) {
                Ok(Some(message)) => message,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot read from the server");
                    return;
                }
            };
            let Some(body) = message.body else { continue };
            let more = matches!(&body, Answer::Listings(listings) if listings.more);
            let mut state = self.state.lock();
            if let Answer::Failed(failed) = &body
                && failed.code() == FailureCode::SessionEnded
            {
                state.ended.get_or_insert_with(|| failed.message.clone());
                self.changed.notify_all();
            }
            // An answer that nobody waits for any more belongs to an interrupted caller.
            if let Some(waiting) = state.waiting.get_mut(&message.request) {
                waiting.answers.push(body);
                waiting.done = !more;
                if waiting.done {
                    self.changed.notify_all();
                }
            }
        }
    }

    fn reconnect(self: &Arc<Self>) -> Option<Reader> {
        let mut pause = RETRY_MIN;
        let mut reported = Instant::now();
        loop {
            if self.ended().is_some() {
                return None;
            }
            let greeting = connect(&self.address)
                .and_then(|stream| greet(stream, &self.hello, &self.stats, &self.clock));
            match greeting {
                Ok(Greeting::Welcome(reader, welcome)) => {
                    if self.resume(&reader, &welcome).is_ok() {
                        return Some(*reader);
                    }
                }
                Ok(Greeting::Refused(failed))
                    if matches!(failed.code(), FailureCode::SessionEnded | FailureCode::NotFound) =>
                {
                    tracing::error!(reason = failed.message, "the server ended the session");
                    self.end(&failed.message);
                    return None;
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

    /// The new connection carries the session: requests without an answer go out again.
    fn resume(self: &Arc<Self>, reader: &Reader, welcome: &Welcome) -> io::Result<()> {
        let stream = reader.stream().try_clone()?;
        let next = self.state.lock().connection + 1;
        *self.writer.lock() = Some((next, stream));
        let again: Vec<u64> = {
            let mut state = self.state.lock();
            state.connection = next;
            state.connected = true;
            state.last_sequence = welcome.last_sequence;
            for waiting in state.waiting.values_mut().filter(|waiting| !waiting.done) {
                waiting.answers.clear();
            }
            self.changed.notify_all();
            state.waiting.iter().filter(|(_, waiting)| !waiting.done).map(|(request, _)| *request).collect()
        };
        // From another thread: the server may have to be read from before it takes all of them.
        let link = Arc::clone(self);
        std::thread::Builder::new()
            .name("hayloft-resend".to_string())
            .spawn(move || again.into_iter().for_each(|request| link.send_waiting(request, Some(next))))?;
        Ok(())
    }
}

fn refused(address: &str, volume: &str, failed: &Failed) -> MountError {
    match failed.code() {
        FailureCode::NotFound => {
            MountError::NoSuchVolume { volume: volume.to_string(), address: address.to_string() }
        }
        FailureCode::Busy => MountError::Busy { volume: volume.to_string(), holder: failed.message.clone() },
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
    let sent_nanos = host_nanos();
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(&bytes)?;
    let mut reader = Reader::new(stream);
    let message: Option<ServerMessage> = reader.next(stats).map_err(io::Error::other)?;
    reader.stream().set_read_timeout(None)?;
    match message.and_then(|message| message.body) {
        Some(Answer::Welcome(welcome)) => {
            clock.set(welcome.server_time_nanos, sent_nanos);
            Ok(Greeting::Welcome(Box::new(reader), Box::new(welcome)))
        }
        Some(Answer::Failed(failed)) => Ok(Greeting::Refused(failed)),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is not Hayloft's")),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
