//! One connection: requests come in, content and batches are handled in their order, reads beside them.

mod answers;
mod dispatch;
mod frames;
pub(crate) mod intake;
pub(crate) mod silent;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hayloft_model::SessionId;
use hayloft_transport::{Caller, Peer};
use hayloft_wire::client_message::Body;
use hayloft_wire::frame::FrameError;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Hello, Spoken};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use crate::connection::frames::{Frames, Over};
use crate::connection::intake::{Intake, Ordered};
use crate::connection::silent::Newcomer;
use crate::error::VolumeError;
use crate::replies::{Replies, failure};
use crate::rights::{Right, denied};
use crate::room::{ASKED_FREE, FREE_BYTES, units};
use crate::server::Shared;
use crate::session::Begun;
use crate::versions::{is_version, view};
use crate::volume::Volume;

/// Content and batches that wait for their turn; then the socket is not read any more.
const ORDERED_QUEUE: usize = 64;

/// Reads that are worked on at a time; then the socket is not read any more.
const READS_MAX: usize = 32;

/// The last protocol without checks in its frames.
const PLAIN_PROTOCOL: u32 = 7;

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
    /// What its requests may take of the server's memory in any case; and its reads, which wait for nobody else.
    asked: Arc<Semaphore>,
    asked_to_read: Arc<Semaphore>,
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

/// How often it is looked whether a client has gone for which something waits.
const GONE_CHECK: Duration = Duration::from_secs(1);

/// Returns when the client has gone, and nothing waits any more for room to answer it; or the server stops, and must not answer.
async fn noticed(frames: &Frames, replies: &Replies, shared: &Shared) {
    let ending = replies.ending();
    loop {
        tokio::time::sleep(GONE_CHECK).await;
        if frames.has_hung_up() {
            return replies.give_up();
        }
        if shared.is_stopping() && ending.give_up_what_waits() {
            return;
        }
    }
}

/// Serves a connection to its end.
pub(crate) async fn serve(shared: Arc<Shared>, (socket, from): (Caller, String), number: u64) {
    let patience = match &socket {
        Caller::Tcp(socket) => {
            // Latency over throughput: requests are small and somebody waits for each.
            let _ = socket.set_nodelay(true);
            notice_dead_peers(socket, shared.config.lease);
            None
        }
        Caller::Unix(_) => Some(shared.config.lease),
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
            tracing::warn!(from, %error, reason, "a connection is refused");
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
        asked: Arc::new(Semaphore::new(units(ASKED_FREE) as usize)),
        asked_to_read: Arc::new(Semaphore::new(units(ASKED_FREE) as usize)),
        tasks: JoinSet::new(),
        mounted: None,
        hang_up,
    };
    let mut frames = Frames::new(incoming, connection.shared.config.frame_time);
    connection.read(&mut frames, newcomer).await;
    drop(frames);
    shared.peers.leave(number);
    let Connection { mut tasks, mounted, replies, .. } = connection;
    let ending = replies.ending();
    let end = async move {
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
    };
    tokio::pin!(end);
    loop {
        ending.give_up_what_waits();
        tokio::select! {
            () = &mut end => break,
            () = tokio::time::sleep(GONE_CHECK) => {}
        }
    }
    tracing::debug!(connection = number, "closed");
}

impl Connection {
    async fn read(&mut self, frames: &mut Frames, newcomer: Newcomer<'_>) {
        let mut stopping = self.shared.stopping();
        let mut newcomer = Some(newcomer);
        let mut spoke = Instant::now();
        let (replies, shared) = (self.replies.clone(), Arc::clone(&self.shared));
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
                    () = noticed(frames, &replies, &shared) => return,
                };
                let message = match taken.decode(&self.shared.room).await {
                    Ok(message) => message,
                    Err(error) => return self.refuse(frames, &error).await,
                };
                // Who begins a session and goes at once costs nothing, and keeps nobody waiting.
                let room = Arc::clone(&self.shared.room);
                let _one_of_few = match &message.body {
                    Some(Body::Hello(_)) => {
                        let permit = tokio::select! {
                            permit = room.hellos.acquire() => permit.ok(),
                            () = noticed(frames, &replies, &shared) => return,
                        };
                        if frames.has_hung_up() {
                            return;
                        }
                        permit
                    }
                    _ => None,
                };
                // What waits in there for room ends when the client has gone.
                let done = tokio::select! {
                    biased;
                    done = self.dispatch(message, held, is_crowded) => done,
                    never = async { noticed(frames, &replies, &shared).await; std::future::pending().await } => never,
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
            Ok((volume, Begun { welcome, heard, worked, mark, tenure }, right)) => {
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
                self.replies.speak_for(mark, &volume.ownership, tenure);
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
}

impl Connection {}
