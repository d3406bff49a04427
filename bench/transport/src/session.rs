//! The workloads, over any transport.

use bytes::Bytes;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::message::{Answer, Envelope};
use crate::{Shape, Workload};

/// Messages that may wait between a caller and the connection.
pub(crate) const QUEUE_MESSAGES: usize = 256;

/// One open connection.
pub(crate) trait Session {
    /// Sends `messages` messages and returns when the last answer is there.
    fn run(&mut self, workload: &Workload, messages: u64);
}

/// A connection as a plain thread sees it.
pub(crate) trait ThreadSession {
    /// May keep the message back until [`ThreadSession::receive`] is called.
    fn send(&mut self, message: Envelope);
    /// Waits for the next message from the peer.
    fn receive(&mut self) -> Envelope;
}

/// A connection as a task sees it: a queue to the connection, and messages from it.
pub(crate) struct AsyncSession<R> {
    pub(crate) runtime: Runtime,
    pub(crate) to_peer: mpsc::Sender<Envelope>,
    pub(crate) from_peer: R,
}

/// The receiving half of an [`AsyncSession`].
pub(crate) trait AsyncReceiver {
    /// Waits for the next message from the peer.
    fn receive(&mut self) -> impl Future<Output = Envelope>;
}

impl<R: AsyncReceiver> Session for AsyncSession<R> {
    fn run(&mut self, workload: &Workload, messages: u64) {
        let mut plan = Plan::new(workload, messages);
        let Self { runtime, to_peer, from_peer } = self;
        runtime.block_on(async {
            while !plan.finished() {
                while let Some(message) = plan.next() {
                    to_peer.send(message).await.expect("the connection stays open");
                }
                plan.answered(from_peer.receive().await);
            }
        });
    }
}

impl<T: ThreadSession> Session for T {
    fn run(&mut self, workload: &Workload, messages: u64) {
        let mut plan = Plan::new(workload, messages);
        while !plan.finished() {
            while let Some(message) = plan.next() {
                self.send(message);
            }
            plan.answered(self.receive());
        }
    }
}

/// What to send next, given what has been answered.
struct Plan {
    shape: Shape,
    payload: Bytes,
    messages: u64,
    sent: u64,
    answered: u64,
}

impl Plan {
    fn new(workload: &Workload, messages: u64) -> Self {
        let payload: Bytes = (0..workload.payload_bytes).map(|n| n as u8).collect();
        Plan { shape: workload.shape, payload, messages, sent: 0, answered: 0 }
    }

    fn finished(&self) -> bool {
        self.answered == self.messages
    }

    fn next(&mut self) -> Option<Envelope> {
        let (ack_every, window, answer) = match self.shape {
            Shape::PingPong => (1, 1, Answer::Echo),
            Shape::Pipelined { ack_every, window } => (ack_every, window, Answer::Ack),
        };
        if self.sent == self.messages || self.sent - self.answered >= window {
            return None;
        }
        self.sent += 1;
        let wanted = self.sent.is_multiple_of(ack_every) || self.sent == self.messages;
        let answer = if wanted { answer } else { Answer::Nothing };
        Some(Envelope { sequence: self.sent, answer: answer as i32, payload: self.payload.clone() })
    }

    fn answered(&mut self, message: Envelope) {
        assert!(message.sequence > self.answered, "answers come in order");
        if matches!(self.shape, Shape::PingPong) {
            assert_eq!(message.payload, self.payload, "the echo differs");
        }
        self.answered = message.sequence;
    }
}
