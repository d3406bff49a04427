//! Frames as they arrive, and how much of them, for how long.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hayloft_transport::Incoming;
use hayloft_wire::ClientMessage;
use hayloft_wire::frame::{self, FrameError, HEADER, Opener};
use hayloft_wire::weight::{self, Weight};
use tokio::time::Instant;

use crate::room::{FREE_BYTES, Held, Room, units};

/// Most bytes of a message of who has no session.
pub(crate) const FIRST_MAX: usize = 64 << 10;

/// Bytes that are read at a time from a session, and from who has none.
const READ_BUFFER: usize = 64 << 10;
const READ_FIRST: usize = 4 << 10;

/// Why no more is read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Over {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("a message was begun, and not ended within {} s", .0.as_secs())]
    Unfinished(Duration),
    #[error("nothing was said within {} s", .0.as_secs())]
    Silent(Duration),
    #[error("nothing was said for too long")]
    Idle,
    #[error("the connection broke")]
    Broken,
}

/// A message that is not decoded yet.
pub(crate) struct Taken {
    bytes: Bytes,
    /// What it takes, decoded.
    pub(crate) weight: Weight,
    /// The room that it took when it arrived.
    _held: Held,
}

impl Taken {
    /// Whether there are records in it, which take more than their bytes.
    pub(crate) fn has_records(&self) -> bool {
        self.weight.bytes > self.bytes.len()
    }

    /// Decodes it. There has to be room for it: it may take far more than its bytes.
    pub(crate) async fn decode(self, room: &Room) -> Result<ClientMessage, Over> {
        let _one = match self.weight.bytes > FREE_BYTES {
            true => room.decoding.acquire().await.ok(),
            false => None,
        };
        Ok(decode(self.bytes)?)
    }
}

/// What arrives on a connection.
pub(crate) struct Frames {
    incoming: Incoming,
    buffer: BytesMut,
    opener: Opener,
    /// Room for a large one that arrives.
    held: Held,
    /// When the one that arrives has to be there.
    due: Option<Instant>,
    has_session: bool,
    /// How long one may take.
    time: Duration,
}

impl Frames {
    /// `time`: how long a message may take.
    pub(crate) fn new(incoming: Incoming, time: Duration) -> Frames {
        Frames {
            incoming,
            buffer: BytesMut::new(),
            opener: Opener::with_limit(FIRST_MAX),
            held: None,
            due: Some(Instant::now() + time / 3),
            has_session: false,
            time,
        }
    }

    /// It is a session's from now on: larger messages are taken.
    pub(crate) fn session_begins(&mut self) {
        self.has_session = true;
        self.opener.set_limit(weight::LIST_MAX);
    }

    /// Takes the next message that is there.
    pub(crate) fn take(&mut self) -> Result<Option<Taken>, Over> {
        let Some(bytes) = self.opener.take_bytes(&mut self.buffer)? else { return Ok(None) };
        self.due = (!self.buffer.is_empty()).then(|| Instant::now() + self.time);
        let weight = weight::check(&bytes)?;
        Ok(Some(Taken { bytes, weight, _held: self.held.take() }))
    }

    /// Returns when the client has gone. Nothing is lost when it is dropped before.
    pub(crate) async fn gone(&mut self, room: &Room) {
        // What it says before it has an answer is little.
        while self.buffer.len() < FIRST_MAX {
            if self.read_some(room).await.is_err() {
                return;
            }
        }
        std::future::pending().await
    }

    /// Takes a first message in the framing of earlier versions; `None` when more has to come.
    pub(crate) fn take_plain(&mut self) -> Result<Option<ClientMessage>, FrameError> {
        frame::take_plain(&mut self.buffer, FIRST_MAX)
    }

    /// Reads more. Nothing is lost when it is dropped before it is done.
    pub(crate) async fn read(&mut self, room: &Room) -> Result<(), Over> {
        let due = self.due;
        let is_first = self.opener.taken() == 0 && self.buffer.is_empty();
        match due {
            None => self.read_some(room).await?,
            Some(due) => match tokio::time::timeout_at(due, self.read_some(room)).await {
                Ok(read) => read?,
                Err(_) if is_first => return Err(Over::Silent(self.time / 3)),
                Err(_) => return Err(Over::Unfinished(self.time)),
            },
        }
        if is_first {
            self.due = None;
        }
        let time = self.time;
        self.due.get_or_insert_with(|| Instant::now() + time);
        Ok(())
    }

    async fn read_some(&mut self, room: &Room) -> Result<(), Over> {
        let wanted = match self.opener.length(&self.buffer) {
            Ok(Some(len)) if len > FREE_BYTES => {
                if self.held.is_none() {
                    self.held = Arc::clone(&room.frames).acquire_many_owned(units(len)).await.ok();
                }
                (HEADER + len).saturating_sub(self.buffer.len())
            }
            _ => 0,
        };
        let at_a_time = if self.has_session { READ_BUFFER } else { READ_FIRST };
        if self.buffer.capacity() - self.buffer.len() < at_a_time.min(4096) {
            self.buffer.reserve(at_a_time.max(wanted));
        }
        match self.incoming.read_buf(&mut self.buffer).await {
            Ok(1..) => Ok(()),
            _ => Err(Over::Broken),
        }
    }

    /// Lets the client read the last word, for a moment: who has more to say than is read gets a reset, which may overtake it.
    pub(crate) async fn farewell(&mut self) {
        let draining = async {
            loop {
                self.buffer.clear();
                self.buffer.reserve(READ_FIRST);
                if !matches!(self.incoming.read_buf(&mut self.buffer).await, Ok(1..)) {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), draining).await;
    }
}

fn decode(bytes: Bytes) -> Result<ClientMessage, FrameError> {
    Ok(prost::Message::decode(bytes)?)
}
