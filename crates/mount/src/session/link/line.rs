//! A connection that has claimed, before anybody else here can use it.

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;

use crate::session::link::{CallError, Link, Receiver};
use crate::session::reader::Reader;

/// A connection that is not used by anybody else yet.
pub(crate) struct Line<'a> {
    pub(super) link: &'a Link,
    pub(super) reader: &'a mut Reader,
    pub(super) connection: u64,
    pub(super) receiver: &'a dyn Receiver,
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
