//! What the server says, in the order of the stream.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, ServerMessage};

use crate::session::link::{Arrival, Condition, Link, Owed, Receiver};
use crate::session::reader::Reader;

/// A longer round trip is one of a machine that had no time.
const ROUND_TRIP_MAX: Duration = Duration::from_millis(40);

impl Link {
    pub(super) fn read_answers(&self, reader: &mut Reader, receiver: &dyn Receiver) {
        let connection = self.state.lock().connection;
        while self.read_one(reader, connection, receiver) {}
    }

    /// Receives the next message. `false`: there is none, the connection is over.
    pub(super) fn read_one(&self, reader: &mut Reader, connection: u64, receiver: &dyn Receiver) -> bool {
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
        if let Answer::Failed(failed) = &body
            && message.request == 0
            && matches!(failed.code(), FailureCode::Damaged | FailureCode::Unavailable)
        {
            tracing::warn!(reason = failed.message, "the server ended the connection");
            self.state.lock().damaged += u32::from(failed.code() == FailureCode::Damaged);
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
        if !message.heard.is_empty() {
            receiver.all_heard(&message.heard);
        }
        let mut body = match body {
            body @ (Answer::Event(_) | Answer::Listings(_) | Answer::Inode(_) | Answer::Ship(_)) => {
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
        let mut nameless = Vec::new();
        if let Answer::Pong(pong) = &mut body {
            nameless = std::mem::take(&mut pong.nameless);
            self.clock.hear(pong.server_time_nanos, waiting.sent.instant());
            let micros = waiting.sent.elapsed().min(ROUND_TRIP_MAX).as_micros() as u64;
            self.round_trip_micros.store(micros, Ordering::Relaxed);
        }
        waiting.answers.push(body);
        waiting.done = !more;
        let (done, unattended) = (waiting.done, waiting.unattended);
        let (sent, work) = (waiting.sent, waiting.work);
        let wake = Arc::clone(&waiting.wake);
        if done {
            if unattended {
                state.waiting.remove(&message.request);
            }
            state.answered(sent, work);
            self.lease_changed(&state);
            self.relive(&mut state);
            // For who waits for the lease.
            self.changed.notify_all();
            wake.notify_all();
        }
        drop(state);
        if !nameless.is_empty() {
            receiver.nameless(&nameless);
        }
        true
    }
}
