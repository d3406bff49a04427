//! The way back to a client: one queue, in order, and a task that writes it out.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hayloft_transport::Outgoing;
use hayloft_wire::frame::{self, Sealer};
use hayloft_wire::{Entry, Failed, ServerMessage, server_message::Body};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};

use crate::database::ownership::Ownership;
use crate::error::VolumeError;
use crate::room::{FREE_BYTES, Held, Room, UNREAD, UNREAD_FREE, UNREAD_MAX, units};

/// Answers that wait to be written; who has another one waits. Answers are cut at about 1 MiB, so this also bounds
/// the memory. What must not wait (events) is not counted: clients acknowledge it, or are ended.
const QUEUE: usize = 32;

/// Bytes that an answer may have.
const ANSWER: usize = 1 << 20;

/// Answers are gathered up to this many bytes before they are written.
const GATHER: usize = 256 * 1024;

/// What is kept of the memory for that while nothing waits, bytes.
const KEPT: usize = 4096;

/// How often it is looked whether others need the room of answers that are not read.
const LOOK: Duration = Duration::from_secs(1);

/// How long a client may take nothing then.
const STANDSTILL: Duration = Duration::from_secs(3);

/// Room for an answer.
pub(crate) struct Place {
    _own: OwnedSemaphorePermit,
    of_all: Held,
}

impl Place {
    /// An answer of so many bytes needs no more room than that.
    fn shrink(&mut self, bytes: usize) {
        if let Some(of_all) = &mut self.of_all
            && let Some(excess) = of_all.num_permits().checked_sub(units(bytes) as usize)
        {
            drop(of_all.split(excess));
        }
    }
}

struct Queued {
    /// Boxed: queues have room for some of them from their beginning, and most connections wait for nothing.
    message: Box<ServerMessage>,
    /// In the framing of earlier versions, and the last one.
    plain: bool,
    place: Option<Place>,
}

/// Nobody waits any more for a client to which nothing can be said.
struct Over([Arc<Semaphore>; 2]);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.iter().for_each(|of| of.close());
    }
}

/// The end of a connection.
pub(crate) struct Ending {
    volume: Arc<OnceLock<Standing>>,
    over: [Arc<Semaphore>; 2],
}

impl Ending {
    /// Gives up what cannot be said now: the client asks again on another connection. Whether it was so.
    pub(crate) fn give_up_what_waits(&self) -> bool {
        let waits = self.volume.get().is_some_and(|volume| !volume.is_certain());
        if waits {
            self.over.iter().for_each(|of| of.close());
        }
        waits
    }
}

/// Where answers go. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Replies {
    queue: mpsc::UnboundedSender<Queued>,
    places: Arc<Semaphore>,
    /// Without permits; closed when the client has gone.
    life: Arc<Semaphore>,
    said: Arc<Said>,
    room: Arc<Room>,
    /// The volume that the session is of.
    volume: Arc<OnceLock<Standing>>,
    /// Changes of which all have heard since something was said last.
    heard: Arc<Mutex<Vec<u64>>>,
}

/// What is known of a volume where its server speaks for it.
struct Standing {
    /// How far its history is: everything that is said tells it.
    mark: Arc<AtomicU64>,
    ownership: Arc<Ownership>,
    tenure: u64,
}

impl Standing {
    fn is_certain(&self) -> bool {
        self.ownership.is_certain_in(self.tenure)
    }

    /// Returns when what was queued may be said; `false`: it never may, or others need the room that it takes.
    async fn may_be_said(volume: &OnceLock<Standing>, life: &Semaphore, room: &Room) -> bool {
        let Some(volume) = volume.get().filter(|volume| !volume.is_certain()) else { return true };
        loop {
            tokio::select! {
                certain = volume.ownership.certain_in(volume.tenure) => return certain,
                _ = life.acquire() => return false,
                () = tokio::time::sleep(STANDSTILL) => if room.is_short_for_answers() { return false },
            }
        }
    }
}

/// How many messages were queued, and written out.
#[derive(Default)]
struct Said {
    queued: AtomicU64,
    written: AtomicU64,
}

impl Replies {
    /// The queue, and the task that writes it out until all clones are gone or the client is. `patience`: how long the client may take
    /// nothing; `None` where the kernel looks after that. Then the connection is told to `hang_up`.
    pub(crate) fn start(
        mut socket: Outgoing,
        room: &Arc<Room>,
        hang_up: &Arc<Notify>,
        patience: Option<Duration>,
    ) -> (Replies, tokio::task::JoinHandle<()>) {
        let (queue, mut waiting) = mpsc::unbounded_channel::<Queued>();
        let places = Arc::new(Semaphore::new(QUEUE));
        let said = Arc::new(Said::default());
        let (written, of_all) = (Arc::clone(&said), Arc::clone(room));
        let hang_up = Arc::clone(hang_up);
        let life = Arc::new(Semaphore::new(0));
        let volume: Arc<OnceLock<Standing>> = Arc::default();
        let (spoken_of, living) = (Arc::clone(&volume), Arc::clone(&life));
        let over = Over([Arc::clone(&places), Arc::clone(&life)]);
        let writer = tokio::spawn(async move {
            let _over = over;
            let (mut bytes, mut sealer, mut held) = (Vec::new(), Sealer::default(), Vec::new());
            while let Some(queued) = waiting.recv().await {
                of_all.unread.fetch_sub(1, Relaxed);
                // What others that can run now have to say goes along.
                tokio::task::yield_now().await;
                bytes.clear();
                let mut count = 1;
                if queued.plain {
                    frame::encode_plain(&*queued.message, &mut bytes);
                    let _ = write_out(&mut socket, &bytes, &of_all, patience).await;
                    break;
                }
                frame::encode(&*queued.message, &mut bytes);
                held.extend(queued.place);
                drop(queued.message);
                while bytes.len() < GATHER
                    && let Ok(queued) = waiting.try_recv()
                {
                    of_all.unread.fetch_sub(1, Relaxed);
                    frame::encode(&*queued.message, &mut bytes);
                    held.extend(queued.place);
                    count += 1;
                }
                sealer.seal(&mut bytes);
                if !Standing::may_be_said(&spoken_of, &living, &of_all).await {
                    hang_up.notify_one();
                    break;
                }
                let written_out = write_out(&mut socket, &bytes, &of_all, patience).await;
                if let Err(error) = written_out {
                    if error.kind() == io::ErrorKind::TimedOut {
                        tracing::warn!("a connection is closed: it does not read its answers");
                        hang_up.notify_one();
                    }
                    break;
                }
                // Only now: what is not read takes room.
                held.clear();
                written.written.fetch_add(count, Relaxed);
                if bytes.capacity() > 2 * GATHER || bytes.capacity() > KEPT && waiting.is_empty() {
                    bytes = Vec::new();
                }
            }
            waiting.close();
            while waiting.try_recv().is_ok() {
                of_all.unread.fetch_sub(1, Relaxed);
            }
        });
        (Replies { queue, places, life, said, room: Arc::clone(room), volume, heard: Arc::default() }, writer)
    }

    /// The client has gone: nothing waits for room to answer it any more.
    pub(crate) fn give_up(&self) {
        self.places.close();
        self.life.close();
    }

    /// Returns when the client has gone, or nothing more can be said to it.
    pub(crate) async fn given_up(&self) {
        let _ = self.life.acquire().await;
    }

    /// Counts messages that were queued up to now; [`Replies::is_written`] says when they are all written out.
    pub(crate) fn queued(&self) -> u64 {
        self.said.queued.load(Relaxed)
    }

    pub(crate) fn is_written(&self, queued: u64) -> bool {
        self.said.written.load(Relaxed) >= queued
    }

    fn queue(&self, message: ServerMessage, place: Option<Place>) {
        self.said.queued.fetch_add(1, Relaxed);
        self.send_off(Queued { message: Box::new(message), plain: false, place });
    }

    fn send_off(&self, queued: Queued) {
        self.room.unread.fetch_add(1, Relaxed);
        if self.queue.send(queued).is_err() {
            self.room.unread.fetch_sub(1, Relaxed);
        }
    }

    /// Whether too much waits for the client to read it.
    pub(crate) fn is_choked(&self) -> bool {
        let own = self.said.queued.load(Relaxed).saturating_sub(self.said.written.load(Relaxed)) as usize;
        own > UNREAD_MAX || own > UNREAD_FREE && self.room.unread.load(Relaxed) > UNREAD
    }

    /// From now on the connection is about a volume whose history is so far: what is said waits while it may be another server's.
    pub(crate) fn speak_for(&self, mark: Arc<AtomicU64>, ownership: &Arc<Ownership>, tenure: u64) {
        let _ = self.volume.set(Standing { mark, ownership: Arc::clone(ownership), tenure });
    }

    /// What is left of it when the connection ends.
    pub(crate) fn ending(&self) -> Ending {
        let [places, life] = [&self.places, &self.life].map(Arc::clone);
        Ending { volume: Arc::clone(&self.volume), over: [places, life] }
    }

    /// All have heard of a change that the client was told of: it learns so with what is said next.
    pub(crate) fn heard(&self, change: u64) {
        self.heard.lock().push(change);
    }

    fn message(&self, request: u64, body: Body, entries: Vec<Entry>) -> ServerMessage {
        let mark = self.volume.get().map_or(0, |volume| volume.mark.load(Acquire));
        let heard = std::mem::take(&mut *self.heard.lock());
        ServerMessage { request, body: Some(body), mark, entries, heard }
    }

    /// Queues a message at once. When the client is gone it is dropped: the client will ask again.
    pub(crate) fn push(&self, request: u64, body: Body) {
        self.push_with(request, body, Vec::new());
    }

    /// As [`Replies::push`], with what the client has to keep.
    pub(crate) fn push_with(&self, request: u64, body: Body, entries: Vec<Entry>) {
        self.queue(self.message(request, body, entries), None);
    }

    /// Queues an answer when there is room.
    pub(crate) async fn send(&self, request: u64, body: Body) {
        if let Some(place) = self.place().await {
            self.push_at(place, request, body, Vec::new());
        }
    }

    /// Waits until there is room for an answer. `None`: the client is gone.
    pub(crate) async fn place(&self) -> Option<Place> {
        self.place_for(0).await
    }

    /// The same, for an answer of about so many bytes. What waits beside it, and is large, takes of the room of all.
    pub(crate) async fn place_for(&self, bytes: usize) -> Option<Place> {
        let own = Arc::clone(&self.places).acquire_owned().await.ok()?;
        let is_first = self.places.available_permits() == QUEUE - 1;
        let wanted = if is_first && bytes <= FREE_BYTES { 0 } else { bytes.max(ANSWER) };
        let of_all = match wanted {
            0 => None,
            _ => tokio::select! {
                biased;
                () = self.given_up() => return None,
                of_all = Arc::clone(&self.room.answers).acquire_many_owned(units(wanted)) => of_all.ok(),
            },
        };
        Some(Place { _own: own, of_all })
    }

    /// Queues an answer where there is room for it, with what the client has to keep.
    pub(crate) fn push_at(&self, mut place: Place, request: u64, body: Body, entries: Vec<Entry>) {
        let message = self.message(request, body, entries);
        place.shrink(message.encoded_len());
        self.queue(message, Some(place));
    }

    /// Waits until the client has taken most of what it asked for.
    pub(crate) async fn room(&self) {
        let _ = self.places.acquire().await;
    }

    /// Queues why a client of an earlier version is refused, in its framing. Nothing can be said after it.
    pub(crate) fn refuse_plain(&self, request: u64, error: &VolumeError) {
        let message = self.message(request, failure(request, error), Vec::new());
        self.send_off(Queued { message: Box::new(message), plain: true, place: None });
    }

    /// Queues the answer to a request, or why there is none.
    pub(crate) async fn answer(&self, request: u64, answer: Result<Body, VolumeError>) {
        match answer {
            Ok(body) => self.send(request, body).await,
            Err(error) => self.send(request, failure(request, &error)).await,
        }
    }
}

/// Writes it out. Who takes nothing of it for too long is given up (`TimedOut`).
async fn write_out(
    socket: &mut Outgoing,
    mut bytes: &[u8],
    room: &Room,
    patience: Option<Duration>,
) -> io::Result<()> {
    let mut taken = Instant::now();
    while !bytes.is_empty() {
        match tokio::time::timeout(LOOK, socket.write(bytes)).await {
            Ok(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => (bytes, taken) = (&bytes[written?..], Instant::now()),
            Err(_) => look(taken.elapsed(), room, patience)?,
        }
    }
    loop {
        match tokio::time::timeout(LOOK, socket.flush()).await {
            Ok(flushed) => return flushed,
            Err(_) => look(taken.elapsed(), room, patience)?,
        }
    }
}

/// Whether a client may go on to take nothing, after so long.
fn look(stands_still: Duration, room: &Room, patience: Option<Duration>) -> io::Result<()> {
    let is_over = patience.is_some_and(|patience| stands_still >= patience);
    match is_over || stands_still >= STANDSTILL && room.is_short_for_answers() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(()),
    }
}

/// What a client is told when a request is refused or fails.
pub(crate) fn failure(request: u64, error: &VolumeError) -> Body {
    tracing::debug!(request, %error, "refused or failed");
    Body::Failed(Failed::from(error))
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    /// The way to a client that reads nothing.
    fn deaf(room: &Arc<Room>) -> (UnixStream, Replies) {
        let (client, server) = UnixStream::pair().unwrap();
        let (_, outgoing) = server.into_split();
        let (replies, _) = Replies::start(Outgoing::Unix(outgoing), room, &Arc::default(), None);
        (client, replies)
    }

    fn say(replies: &Replies, messages: usize) {
        for _ in 0..messages {
            replies.push(0, Body::Done(hayloft_wire::Done {}));
        }
    }

    #[tokio::test]
    async fn what_is_not_read_is_bounded_for_each_connection_and_for_all() {
        let room: Arc<Room> = Arc::default();
        let (_client, one) = deaf(&room);
        say(&one, UNREAD_MAX);
        assert!(!one.is_choked());
        say(&one, 1);
        assert!(one.is_choked());
        let (_client, two) = deaf(&room);
        say(&two, UNREAD_FREE + 1);
        assert!(!two.is_choked(), "there is room");
        let (_client, three) = deaf(&room);
        say(&three, UNREAD_FREE);
        room.unread.store(UNREAD + 1, Relaxed);
        assert!(two.is_choked() && !three.is_choked(), "who has little unread stays");
    }
}
