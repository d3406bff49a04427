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

/// Bytes that are read at a time from who says much, and from all others.
const READ_BUFFER: usize = 64 << 10;
const READ_FIRST: usize = 4 << 10;

/// Smaller messages are copied out of what was read with them: else each that waits would keep all of that.
const COPIED_MAX: usize = READ_BUFFER / 2;

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
    /// The last time there was as much as there was room for: there is more, most likely.
    is_busy: bool,
    /// It may read much at a time.
    eager: Held,
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
            is_busy: false,
            eager: None,
            time,
        }
    }

    /// It is a session's from now on: larger messages are taken.
    pub(crate) fn session_begins(&mut self) {
        self.opener.set_limit(weight::LIST_MAX);
    }

    /// Takes the next message that is there.
    pub(crate) fn take(&mut self) -> Result<Option<Taken>, Over> {
        let Some(bytes) = self.opener.take_bytes(&mut self.buffer)? else { return Ok(None) };
        self.due = (!self.buffer.is_empty()).then(|| Instant::now() + self.time);
        let weight = weight::check(&bytes)?;
        let bytes = if bytes.len() < COPIED_MAX { Bytes::copy_from_slice(&bytes) } else { bytes };
        Ok(Some(Taken { bytes, weight, _held: self.held.take() }))
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
        let rest = match self.opener.length(&self.buffer) {
            Ok(Some(len)) => {
                if len > FREE_BYTES && self.held.is_none() {
                    self.held = Arc::clone(&room.frames).acquire_many_owned(units(len)).await.ok();
                }
                (HEADER + len).saturating_sub(self.buffer.len())
            }
            _ => 0,
        };
        self.make_room(rest, room);
        let free = self.buffer.capacity() - self.buffer.len();
        match self.incoming.read_buf(&mut self.buffer).await {
            Ok(read @ 1..) => {
                self.is_busy = read == free;
                Ok(())
            }
            _ => Err(Over::Broken),
        }
    }

    /// Room for what is read next. What is left of a large frame gets just what it needs, so that content which stays takes no more
    /// than its own; who says little has little.
    fn make_room(&mut self, rest: usize, room: &Room) {
        if !self.is_busy && self.buffer.is_empty() {
            self.eager = None;
        }
        if self.is_busy && self.eager.is_none() {
            self.eager = Arc::clone(&room.eager).try_acquire_owned().ok();
        }
        let at_a_time = if self.is_busy && self.eager.is_some() { READ_BUFFER } else { READ_FIRST };
        let free = self.buffer.capacity() - self.buffer.len();
        if self.buffer.is_empty() && free > READ_FIRST && !self.is_busy {
            self.buffer = BytesMut::with_capacity(READ_FIRST);
        } else if free < rest {
            let wanted = if rest > READ_FIRST { rest } else { at_a_time };
            // `reserve` would double it.
            let mut buffer = BytesMut::with_capacity(self.buffer.len() + wanted);
            buffer.extend_from_slice(&self.buffer);
            self.buffer = buffer;
        } else if rest == 0 && free < READ_FIRST {
            self.buffer.reserve(at_a_time);
        }
    }

    /// Whether the client has gone, seen without reading what it has said before.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.incoming.has_hung_up()
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

#[cfg(test)]
mod tests {
    use hayloft_wire::client_message::Body;
    use hayloft_wire::frame::Sealer;
    use hayloft_wire::{Chunk, Enter, Ping};
    use tokio::io::AsyncWriteExt;
    use tokio::net::tcp::OwnedWriteHalf;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A session's client, and what it says; the other half only has to stay open.
    async fn session() -> (TcpStream, Frames, OwnedWriteHalf) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let (incoming, outgoing) = server.into_split();
        let mut frames = Frames::new(Incoming::Plain(incoming), Duration::from_secs(60));
        frames.session_begins();
        (client, frames, outgoing)
    }

    /// What is sent, as it is taken: without the messages for which `is_kept` is not.
    async fn taken(sent: Vec<Body>, is_kept: fn(&Taken) -> bool) -> Vec<Bytes> {
        let (mut client, mut frames, _outgoing) = session().await;
        let sending = tokio::spawn(async move {
            let (mut bytes, mut sealer) = (Vec::new(), Sealer::default());
            for body in sent {
                frame::encode(&ClientMessage { request: 1, body: Some(body) }, &mut bytes);
            }
            sealer.seal(&mut bytes);
            client.write_all(&bytes).await.unwrap();
        });
        let (mut kept, room) = (Vec::new(), Room::default());
        loop {
            while let Some(taken) = frames.take().unwrap() {
                if is_kept(&taken) {
                    kept.push(taken.bytes);
                }
            }
            if frames.read(&room).await.is_err() {
                sending.await.unwrap();
                return kept;
            }
        }
    }

    fn content(len: usize) -> Body {
        Body::Content(Chunk { payload: vec![7; len].into(), ..Chunk::default() })
    }

    /// Bytes that are kept, and bytes of memory that they keep.
    fn cost(kept: Vec<Bytes>) -> (usize, usize) {
        let bytes = kept.iter().map(Bytes::len).sum();
        let takes = |kept: Bytes| kept.try_into_mut().expect("it shares its memory with another").capacity();
        (bytes, kept.into_iter().map(takes).sum())
    }

    #[tokio::test]
    async fn content_that_is_kept_takes_little_more_than_its_bytes() {
        let (bytes, taken) = cost(taken((0..50).map(|_| content(60_000)).collect(), |_| true).await);
        assert!(bytes > 50 * 60_000 && taken < bytes * 5 / 4, "{bytes} bytes take {taken}");
    }

    #[tokio::test]
    async fn little_that_is_kept_does_not_keep_what_came_with_it() {
        let sent = (0..500).map(|n| if n % 5 == 0 { content(100) } else { content(9000) });
        let (bytes, taken) = cost(taken(sent.collect(), |taken| taken.bytes.len() < 1000).await);
        assert!(bytes > 100 * 100 && taken < 2 * bytes, "{bytes} bytes take {taken}");
    }

    #[tokio::test]
    async fn a_request_that_waits_does_not_keep_what_came_with_it() {
        let stem = Bytes::from_static(b"stem");
        let ask = |n| {
            if n % 50 == 0 {
                Body::Enter(Enter { stem: stem.clone(), ..Enter::default() })
            } else {
                Body::Ping(Ping {})
            }
        };
        let (bytes, taken) = cost(taken((0..20_000).map(ask).collect(), |taken| taken.bytes.len() > 8).await);
        assert!(bytes > 400 * 8 && taken < 2 * bytes, "{bytes} bytes take {taken}");
    }

    #[tokio::test]
    async fn not_everybody_reads_much_at_a_time() {
        let room = Room::default();
        let _all = Arc::clone(&room.eager).try_acquire_many_owned(room.eager.available_permits() as u32);
        let (mut client, mut frames, _outgoing) = session().await;
        let (mut bytes, mut sealer) = (Vec::new(), Sealer::default());
        for _ in 0..10_000 {
            frame::encode(&ClientMessage { request: 1, body: Some(Body::Ping(Ping {})) }, &mut bytes);
        }
        sealer.seal(&mut bytes);
        let sending = tokio::spawn(async move { client.write_all(&bytes).await.map(|()| client) });
        let mut count = 0;
        while count < 10_000 {
            frames.read(&room).await.unwrap();
            assert!(frames.buffer.capacity() <= 4 * READ_FIRST, "{}", frames.buffer.capacity());
            while frames.take().unwrap().is_some() {
                count += 1;
            }
        }
        sending.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn who_has_nothing_to_say_has_no_large_buffer() {
        let (mut client, mut frames, _outgoing) = session().await;
        let (mut sealer, room) = (Sealer::default(), Room::default());
        for body in [content(500_000), Body::Ping(Ping {})] {
            let mut bytes = Vec::new();
            frame::encode(&ClientMessage { request: 1, body: Some(body) }, &mut bytes);
            sealer.seal(&mut bytes);
            client.write_all(&bytes).await.unwrap();
            while frames.take().unwrap().is_none() {
                frames.read(&room).await.unwrap();
            }
        }
        let waits = frames.read(&room);
        assert!(tokio::time::timeout(Duration::from_millis(20), waits).await.is_err());
        assert!(frames.buffer.capacity() <= READ_FIRST, "{}", frames.buffer.capacity());
    }
}
