//! One connection: requests come in, content and batches are handled in their order, reads beside them.

mod dispatch;
mod frames;
pub(crate) mod intake;
pub(crate) mod silent;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hayloft_model::grants::Ticket;
use hayloft_model::{BLOCK_SIZE, ContentHash, Ino, SessionId};
use hayloft_transport::{Caller, Peer};
use hayloft_wire::client_message::Body;
use hayloft_wire::frame::FrameError;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Contents, Differences, Done, Hello, Pages, Spoken};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use crate::admin;
use crate::admin::stats::type_of;
use crate::connection::frames::{Frames, Over};
use crate::connection::intake::{Intake, Ordered};
use crate::connection::silent::Newcomer;
use crate::content::message_of;
use crate::database::listing;
use crate::error::VolumeError;
use crate::replies::{Replies, failure};
use crate::rights::{Right, denied};
use crate::room::{FREE_BYTES, units};
use crate::server::Shared;
use crate::session::Begun;
use crate::versions::{is_version, view};
use crate::volume::Volume;

/// Content and batches that wait for their turn; then the socket is not read any more.
const ORDERED_QUEUE: usize = 64;

/// Reads that are worked on at a time; then the socket is not read any more.
const READS_MAX: usize = 32;

/// Most pieces of content in one request: 32 MiB of blocks, half a frame.
const CONTENT_MAX: usize = 512;

/// The last protocol without checks in its frames.
const PLAIN_PROTOCOL: u32 = 7;

/// What is said to a request that this version does not know.
const UNKNOWN_REQUEST: &str = "this server does not know it; if it is older than who asks, install the newer version at the server first";

/// What a connection is once its session is open.
struct Mounted {
    volume: Arc<Volume>,
    session: SessionId,
    /// It is read-only, and so is its peer's right.
    reads_only: (bool, bool),
    /// What it owns is known.
    claimed: bool,
    /// The opening of the volume's database that it was welcomed in.
    opening: u64,
    heard: Arc<AtomicU64>,
    ordered: mpsc::Sender<Ordered>,
    /// What of a batch needs no room of all.
    free: Arc<Semaphore>,
    /// Bytes that the batch which is coming has taken of the room of all.
    of_all: AtomicUsize,
    intake: JoinHandle<()>,
}

struct Connection {
    shared: Arc<Shared>,
    peer: Peer,
    number: u64,
    replies: Replies,
    reads: Arc<Semaphore>,
    tasks: JoinSet<()>,
    mounted: Option<Mounted>,
    /// Told when the connection is of no more use: it ends when all that has come is answered.
    hang_up: Arc<Notify>,
}

/// A client without anything to say sends nothing, for days. That its host is gone is for the kernels to
/// notice, within a lease.
fn notice_dead_peers(socket: &TcpStream, lease: Duration) {
    let socket = SockRef::from(socket);
    let probes = TcpKeepalive::new()
        .with_time((lease / 2).max(Duration::from_secs(1)))
        .with_interval((lease / 6).max(Duration::from_secs(1)))
        .with_retries(3);
    if let Err(error) = socket.set_tcp_keepalive(&probes).and(socket.set_tcp_user_timeout(Some(lease))) {
        tracing::warn!(%error, "a client whose host vanishes will be noticed late");
    }
}

/// How long a connection may say nothing while nothing of it is worked on: without a session, and with one that has not said what it
/// owns. `None`: a session sends nothing for as long as it likes; others end it when they need what it holds.
fn idle_time(claimed: Option<bool>, frame_time: Duration) -> Option<Duration> {
    match claimed {
        None => Some(10 * frame_time),
        Some(false) => Some(2 * frame_time),
        Some(true) => None,
    }
}

async fn idle_since(spoke: Instant, idle: Option<Duration>) {
    match idle {
        Some(idle) => tokio::time::sleep_until((spoke + idle).into()).await,
        None => std::future::pending().await,
    }
}

/// Differences in one message: paths may have 4 KiB each.
const DIFFERENCES_MAX: usize = 4096;

/// An answer in as many messages as it takes.
fn parts(answer: Result<Answer, VolumeError>) -> Vec<Result<Answer, VolumeError>> {
    let Ok(Answer::Differences(mut all)) = answer else { return vec![answer] };
    let mut parts = Vec::new();
    while all.differences.len() > DIFFERENCES_MAX {
        let rest = all.differences.split_off(DIFFERENCES_MAX);
        let differences = std::mem::replace(&mut all.differences, rest);
        parts.push(Ok(Answer::Differences(Differences {
            differences,
            more: true,
            ..Differences::default()
        })));
    }
    parts.push(Ok(Answer::Differences(all)));
    parts
}

/// How often it is looked whether a client has gone for which something waits.
const GONE_CHECK: Duration = Duration::from_secs(1);

/// Returns when the client has gone, and nothing waits any more for room to answer it.
async fn noticed(frames: &Frames, replies: &Replies) {
    loop {
        tokio::time::sleep(GONE_CHECK).await;
        if frames.has_hung_up() {
            return replies.give_up();
        }
    }
}

/// Serves a connection to its end.
pub(crate) async fn serve(shared: Arc<Shared>, socket: Caller, number: u64) {
    let (address, patience) = match &socket {
        Caller::Tcp(socket) => {
            // Latency over throughput: requests are small and somebody waits for each.
            let _ = socket.set_nodelay(true);
            notice_dead_peers(socket, shared.config.lease);
            (socket.peer_addr().ok(), None)
        }
        Caller::Unix(_) => (None, Some(shared.config.lease)),
    };
    let newcomer = shared.silent.enter(number, socket.as_fd());
    let accepted = tokio::select! {
        accepted = Box::pin(shared.acceptor.accept(socket)) => accepted,
        () = newcomer.must_go() => return,
    };
    let (incoming, outgoing, peer) = match accepted {
        Ok(accepted) => accepted,
        Err(error) => {
            let reason = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(?address, %error, reason, "a connection is refused");
            return;
        }
    };
    tracing::debug!(peer = %peer.identity, address = %peer.address, connection = number, "let in");
    let hang_up: Arc<Notify> = Arc::default();
    let (replies, writer) = Replies::start(outgoing, &shared.room, &hang_up, patience);
    shared.peers.enter(number, peer.clone(), &hang_up);
    let mut connection = Connection {
        shared: Arc::clone(&shared),
        peer,
        number,
        replies,
        reads: Arc::new(Semaphore::new(READS_MAX)),
        tasks: JoinSet::new(),
        mounted: None,
        hang_up,
    };
    let mut frames = Frames::new(incoming, connection.shared.config.frame_time);
    connection.read(&mut frames, newcomer).await;
    drop(frames);
    shared.peers.leave(number);
    let Connection { mut tasks, mounted, replies, .. } = connection;
    if let Some(Mounted { volume, session, ordered, intake, .. }) = mounted {
        // What has arrived is applied; the client will ask about it when it is back.
        drop(ordered);
        let _ = intake.await;
        volume.disconnected(session, number);
        // What waits for others need not be answered any more.
        tasks.abort_all();
    }
    while tasks.join_next().await.is_some() {}
    drop(replies);
    let _ = writer.await;
    tracing::debug!(connection = number, "closed");
}

impl Connection {
    async fn read(&mut self, frames: &mut Frames, newcomer: Newcomer<'_>) {
        let mut stopping = self.shared.stopping();
        let mut newcomer = Some(newcomer);
        let mut spoke = Instant::now();
        let replies = self.replies.clone();
        loop {
            loop {
                let taken = match frames.take() {
                    Ok(Some(taken)) => taken,
                    Ok(None) => break,
                    Err(error) => return self.refuse(frames, &error).await,
                };
                newcomer = None;
                // While it waits here, what the client says is not read: it is not silent.
                self.hear(u64::MAX);
                let (held, is_crowded) = tokio::select! {
                    biased;
                    room = self.room_for(&taken) => room,
                    () = noticed(frames, &replies) => return,
                };
                let message = match taken.decode(&self.shared.room).await {
                    Ok(message) => message,
                    Err(error) => return self.refuse(frames, &error).await,
                };
                // Who begins a session and goes at once costs nothing, and keeps nobody waiting.
                let room = Arc::clone(&self.shared.room);
                let _one_of_few = match &message.body {
                    Some(Body::Hello(_)) => tokio::select! {
                        permit = room.hellos.acquire() => permit.ok(),
                        () = frames.gone(&room) => return,
                    },
                    _ => None,
                };
                // What waits in there for room ends when the client has gone.
                let done = tokio::select! {
                    biased;
                    done = self.dispatch(message, held, is_crowded) => done,
                    never = async { noticed(frames, &replies).await; std::future::pending().await } => never,
                };
                self.hear(self.shared.uptime_ms());
                spoke = Instant::now();
                if done.is_err() {
                    return;
                }
                if self.mounted.is_some() {
                    frames.session_begins();
                }
                if self.replies.is_choked() {
                    tracing::warn!(connection = self.number, peer = %self.peer.identity, "the connection is closed: it does not read what it is told");
                    return;
                }
            }
            while self.tasks.try_join_next().is_some() {}
            let gives_way = async {
                match &newcomer {
                    Some(newcomer) => newcomer.must_go().await,
                    None => std::future::pending().await,
                }
            };
            let claimed = self.mounted.as_ref().map(|mounted| mounted.claimed);
            let idle = idle_time(claimed, self.shared.config.frame_time);
            let read = tokio::select! {
                read = frames.read(&self.shared.room) => read,
                _ = stopping.wait_for(|stop| *stop) => return,
                () = self.hang_up.notified() => return,
                () = gives_way => return,
                // It is idle from then on.
                Some(_) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    spoke = Instant::now();
                    continue;
                }
                () = idle_since(spoke, idle), if self.tasks.is_empty() => Err(Over::Idle),
            };
            if let Err(error) = read {
                return self.refuse(frames, &error).await;
            }
            self.hear(self.shared.uptime_ms());
        }
    }

    /// Nothing more is read, and why.
    async fn refuse(&mut self, frames: &mut Frames, error: &Over) {
        match error {
            Over::Broken => return self.replies.give_up(),
            Over::Frame(FrameError::Plain) => loop {
                match frames.take_plain() {
                    Ok(Some(message)) => return self.refuse_plain(message.request),
                    Ok(None) if frames.read(&self.shared.room).await.is_ok() => {}
                    _ => break,
                }
            },
            Over::Frame(error) => {
                self.shared.stats.frames_damaged.fetch_add(u64::from(error.is_damage()), Relaxed);
            }
            Over::Unfinished(_) | Over::Silent(_) | Over::Idle => {}
        }
        let (peer, address) = (&self.peer.identity, &self.peer.address);
        tracing::warn!(connection = self.number, %peer, %address, %error, "the connection is closed");
        let reason = match error {
            Over::Frame(error) if error.is_damage() => VolumeError::FrameDamaged,
            error => VolumeError::Ended(error.to_string()),
        };
        self.replies.push(0, failure(0, &reason));
        frames.farewell().await;
    }

    /// Tells a client of an earlier version, in its framing, that it has to be of this one.
    fn refuse_plain(&self, request: u64) {
        let client = Spoken { newest: PLAIN_PROTOCOL, oldest: 0, features: 0, needs: 0, release: "" };
        let Err(mismatch) = hayloft_wire::agree(&client, &Spoken::ours()) else { return };
        let error = VolumeError::from(mismatch);
        tracing::warn!(connection = self.number, peer = %self.peer.identity, %error, "refused");
        self.replies.refuse_plain(request, &error);
    }

    /// The session was heard of at this time, milliseconds after the server's start.
    fn hear(&self, at_ms: u64) {
        if let Some(mounted) = self.mounted.as_ref().filter(|mounted| mounted.claimed) {
            mounted.heard.store(at_ms, Relaxed);
        }
    }

    async fn hello(&mut self, request: u64, hello: &Hello) -> Result<(), ()> {
        let begun = async {
            let needed = if hello.read_only { Right::Read } else { Right::Write };
            if is_version(&hello.volume) && !hello.read_only {
                return Err(VolumeError::Denied("a snapshot does not change: mount it read-only".to_owned()));
            }
            // Before the volume is opened for somebody who may not even know of it.
            let registered = view::registered(&self.shared, &hello.volume).await?;
            let right = self.shared.right_of(&self.peer, &registered);
            if right < needed {
                tracing::warn!(peer = %self.peer.identity, address = %self.peer.address, volume = hello.volume, %right, "a mount is refused");
                return Err(denied(&self.peer, &hello.volume, right, needed));
            }
            let volume = self.shared.volume(&hello.volume).await?;
            self.shared.peers.mounted(self.number, &hello.volume, needed);
            let begun = volume
                .hello(hello, &self.peer, self.number, &self.hang_up)
                .await
                .inspect_err(|error| volume.note(error))?;
            // It may have been taken away since it was looked for.
            let right = self.shared.right_of(&self.peer, &volume.registered.lock());
            if right < needed {
                return Err(denied(&self.peer, &hello.volume, right, needed));
            }
            Ok((volume, begun, right))
        };
        match begun.await {
            Ok((volume, Begun { welcome, heard, worked, mark }, right)) => {
                let session = SessionId(hello.session);
                let (ordered, queue) = mpsc::channel(ORDERED_QUEUE);
                let intake = Intake {
                    volume: Arc::clone(&volume),
                    session,
                    connection: self.number,
                    replies: self.replies.clone(),
                    hang_up: Arc::clone(&self.hang_up),
                    worked,
                };
                let intake = tokio::spawn(intake.run(queue));
                self.replies.tell_mark(&mark);
                let opening = welcome.opening;
                self.mounted = Some(Mounted {
                    volume,
                    session,
                    reads_only: (hello.read_only, right == Right::Read),
                    claimed: false,
                    opening,
                    heard,
                    ordered,
                    of_all: AtomicUsize::new(0),
                    free: Arc::new(Semaphore::new(units(FREE_BYTES) as usize)),
                    intake,
                });
                self.replies.send(request, Answer::Welcome(welcome)).await;
            }
            Err(error) => {
                let error = self.shared.told(error).await;
                self.replies.answer(request, Err(error)).await;
            }
        }
        Ok(())
    }

    /// Handles a request on a task of its own, at most so many at a time.
    async fn beside(
        &mut self,
        request: u64,
        body: Body,
        started: Instant,
        mounted: Option<(Arc<Volume>, SessionId)>,
    ) -> Result<(), ()> {
        let permit = Arc::clone(&self.reads).acquire_owned().await.map_err(|_| ())?;
        let (shared, replies) = (Arc::clone(&self.shared), self.replies.clone());
        let (hang_up, connection, peer) = (Arc::clone(&self.hang_up), self.number, self.peer.clone());
        self.tasks.spawn(async move {
            let kind = type_of(&body);
            match mounted {
                Some((volume, session)) => {
                    let Some(place) = replies.place_for(bytes_of(&body)).await else { return };
                    let about = if let Body::FetchPages(fetch) = &body { Some(Ino(fetch.ino)) } else { None };
                    let answer = Box::pin(answer_read(&volume, session, body)).await;
                    let answer = answer.inspect_err(|error| volume.failed(error, &hang_up));
                    let answer = answer.unwrap_or_else(|error| failure(request, &error));
                    let sharing = volume.sharing.lock();
                    let entries = volume.entries_for(&sharing, (session, connection), about);
                    replies.push_at(place, request, answer, entries);
                }
                None => {
                    let answer = Box::pin(admin::answer(&shared, &peer, body)).await;
                    for part in parts(answer) {
                        replies.answer(request, part).await;
                    }
                }
            }
            shared.stats.count(kind, started.elapsed());
            drop(permit);
        });
        Ok(())
    }
}

impl Connection {
    /// Handles a request that may have to wait for other sessions, on a task of its own. What it has to say is in the
    /// stream before its objects are free.
    fn wait_for_others(&mut self, request: u64, body: Body, started: Instant) {
        let Some(mounted) = &self.mounted else { return };
        let of_all = match self.shared.room.place_to_wait(self.tasks.len()) {
            Ok(of_all) => of_all,
            Err(limit) => {
                let error = VolumeError::Limit { what: "requests at a time", limit };
                self.replies.push(request, failure(request, &error));
                return;
            }
        };
        let (volume, session) = (Arc::clone(&mounted.volume), mounted.session);
        let (replies, hang_up) = (self.replies.clone(), Arc::clone(&self.hang_up));
        let (asked, opening) = ((self.number, request), mounted.opening);
        self.tasks.spawn(async move {
            let kind = type_of(&body);
            let answered = match body {
                Body::Enter(enter) => volume.enter(session, &enter, &replies, asked).await,
                Body::FetchInode(fetch) => volume.fetch_inode(session, Ino(fetch.ino), &replies, asked).await,
                Body::Sync(sync) => {
                    let synced = volume.sync(opening, (sync.opening, sync.mark)).await;
                    synced.map(|()| replies.push(request, Answer::Done(Done {})))
                }
                Body::Acquire(acquire) => volume.acquire(session, &acquire, &replies, request).await,
                Body::Hear(hear) => {
                    let inos: Vec<Ino> = hear.inos.into_iter().map(Ino).collect();
                    volume.heard(session, [Ticket(hear.change)]).await;
                    volume.heard_about(session, &inos).await;
                    replies.push(request, Answer::Done(Done {}));
                    Ok(())
                }
                _ => Err(VolumeError::Invalid(UNKNOWN_REQUEST)),
            };
            if let Err(error) = answered {
                volume.failed(&error, &hang_up);
                // It may say that something is gone.
                let durable = match error {
                    VolumeError::NoInode(ino) | VolumeError::NotDirectory(ino) => {
                        volume.heard_about(session, &[ino]).await;
                        volume.all_durable().await
                    }
                    _ => Ok(()),
                };
                let error = durable.err().unwrap_or(error);
                replies.answer(request, Err(error)).await;
            }
            volume.shared.stats.count(kind, started.elapsed());
            drop(of_all);
        });
    }
}

/// Bytes of content that the answer may have.
fn bytes_of(body: &Body) -> usize {
    match body {
        Body::FetchContent(fetch) => (fetch.hashes.len() / 32).min(CONTENT_MAX) * BLOCK_SIZE as usize,
        _ => 0,
    }
}

impl Volume {
    /// A read has failed; when it is because another server has the volume, the client is to look for that one.
    fn failed(self: &Arc<Self>, error: &VolumeError, hang_up: &Notify) {
        self.note(error);
        if self.is_fenced() {
            hang_up.notify_one();
        }
    }
}

/// Answers a request that waits for nobody.
async fn answer_read(volume: &Arc<Volume>, session: SessionId, body: Body) -> Result<Answer, VolumeError> {
    Ok(match body {
        Body::Bury(bury) => {
            volume.bury(session, SessionId(bury.session)).await?;
            Answer::Done(Done {})
        }
        Body::FetchPages(fetch) => {
            let snapshot = volume.db()?.snapshot()?;
            listing::inode(&snapshot, Ino(fetch.ino)).await?;
            Answer::Pages(Pages { pages: listing::pages(&snapshot, Ino(fetch.ino)).await? })
        }
        Body::FetchContent(fetch) => {
            if fetch.hashes.len() % 32 != 0 || fetch.hashes.len() / 32 > CONTENT_MAX {
                return Err(VolumeError::Invalid("a list of hashes of a wrong length"));
            }
            let hashes: Vec<ContentHash> = fetch
                .hashes
                .chunks_exact(32)
                .map(|hash| ContentHash(hash.try_into().expect("32 bytes")))
                .collect();
            let chunks = volume.read_chunks(&hashes).await?;
            Answer::Contents(Contents { chunks: chunks.into_iter().map(message_of).collect() })
        }
        _ => Answer::Status(volume.status()),
    })
}
