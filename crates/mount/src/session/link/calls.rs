//! What is said to the server, and waiting for what it answers.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Ack, CancelLock, ClientMessage, frame};
use parking_lot::MutexGuard;
use rustix::event::{PollFd, PollFlags, Timespec};
use socket2::Socket;

use crate::host::moment::Moment;
use crate::session::link::{CallError, INTERRUPT_POLL, Link, Waiting};
use crate::session::writer::Writer;

/// How long the server's word on a request for a lock that was given up is waited for when the caller is being ended.
const CANCEL_PATIENCE: Duration = Duration::from_millis(200);

impl Link {
    /// Notes a message that is not repeated. `unattended`: nobody waits for the answer.
    pub(super) fn enlist(&self, ask: Ask, unattended: bool) -> u64 {
        let mut state = self.state.lock();
        let request = state.next_request;
        state.next_request += 1;
        let waiting = Waiting {
            message: ClientMessage { request, body: Some(ask) },
            answers: Vec::new(),
            done: false,
            wake: Arc::default(),
            repeat: false,
            sends_again: false,
            unattended,
            sent: Moment::now(),
            work: state.work,
            mark: 0,
        };
        state.waiting.insert(request, waiting);
        request
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
    pub(super) fn call_with(
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
                wake: Arc::default(),
                repeat: only_on.is_none(),
                sends_again: false,
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

    pub(super) fn send_waiting(&self, request: u64, connection: u64) {
        let Some(message) = self.state.lock().waiting.get(&request).map(|waiting| waiting.message.clone())
        else {
            return;
        };
        // An error here shows on the reading side as well, which reconnects and sends again.
        let _ = self.write(&message, Some(connection));
    }

    pub(super) fn write(&self, message: &ClientMessage, only_on: Option<u64>) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame::encode(message, &mut bytes);
        self.write_to(&mut self.writer.lock(), &mut bytes, only_on)
    }

    pub(super) fn write_to(
        &self,
        writer: &mut Option<(u64, Writer)>,
        bytes: &mut [u8],
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
            let _ = stream.socket().shutdown(Shutdown::Both);
        }
        result
    }

    pub(super) fn await_answer(
        &self,
        request: u64,
        interrupt: Option<&Interrupt>,
    ) -> Result<Vec<Answer>, CallError> {
        let mut state = self.state.lock();
        let (mut cancelled_on, mut cancelled_at) = (None, Instant::now());
        let mut wake;
        loop {
            let sends_again = match state.waiting.get_mut(&request) {
                None => return Err(CallError::Broken),
                Some(waiting) if waiting.done => break,
                Some(waiting) => {
                    wake = Arc::clone(&waiting.wake);
                    std::mem::take(&mut waiting.sends_again)
                }
            };
            if let Some(reason) = &state.ended {
                let reason = reason.clone();
                state.waiting.remove(&request);
                return Err(CallError::Ended(reason));
            }
            if sends_again {
                let connection = state.connection;
                // What it was to change may have been done elsewhere since.
                let is_over = MutexGuard::unlocked(&mut state, || {
                    let is_over = interrupt.is_some_and(Interrupt::abandoned_now);
                    if !is_over {
                        self.send_waiting(request, connection);
                    }
                    is_over
                });
                if is_over {
                    state.waiting.remove(&request);
                    return Err(CallError::Interrupted);
                }
                continue;
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
                Some(_) => drop(wake.wait_for(&mut state, INTERRUPT_POLL)),
                None => wake.wait(&mut state),
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
            self.state.lock().worked(begun);
        }
        Ok(())
    }

    /// What became of a batch on a connection: whether there was no room for it.
    pub(crate) fn was_refused(&self, connection: u64, is_full: bool) {
        let mut state = self.state.lock();
        if state.connection == connection {
            state.refused = is_full;
        }
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
        let has_room = |stream: &Socket| {
            let mut polled = [PollFd::new(stream, PollFlags::OUT)];
            matches!(rustix::event::poll(&mut polled, Some(&Timespec::default())), Ok(1))
        };
        match writer.as_ref() {
            Some((of, stream)) if *of == connection && self.can_be_used(connection) => {
                if !has_room(&stream.socket()) {
                    return None;
                }
            }
            _ => return Some(false),
        }
        self.stats.count_request(&body);
        let mut bytes = Vec::new();
        frame::encode(&ClientMessage { request: 0, body: Some(body) }, &mut bytes);
        Some(self.write_to(&mut writer, &mut bytes, Some(connection)).is_ok())
    }

    /// They are written. Only now: an answer to what is said from here on proves that they have arrived.
    pub(super) fn acknowledged(&self, events: &[u64]) {
        let mut state = self.state.lock();
        for event in events {
            if let Some(owed) = state.owed.get_mut(event) {
                owed.acknowledged = Some(Moment::now());
            }
        }
    }

    pub(super) fn can_be_used(&self, connection: u64) -> bool {
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
}
