//! One connection: requests come in, content and batches are handled in their order, reads beside them.

pub(crate) mod intake;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use hayloft_model::grants::Ticket;
use hayloft_model::{ContentHash, Ino, SessionId};
use hayloft_transport::{Caller, Incoming, Peer};
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{ClientMessage, Contents, Done, Hello, LockKind, Pages, Pong, frame};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use crate::admin;
use crate::admin::stats::type_of;
use crate::connection::intake::Intake;
use crate::content::message_of;
use crate::database::{listing, registry};
use crate::error::VolumeError;
use crate::replies::{Replies, failure};
use crate::rights::{Right, denied};
use crate::server::Shared;
use crate::session::Begun;
use crate::volume::Volume;

/// Content and batches that wait for their turn; then the socket is not read any more.
const ORDERED_QUEUE: usize = 64;

/// Reads that are worked on at a time; then the socket is not read any more.
const READS_MAX: usize = 32;

/// Requests that wait for other sessions at a time; what is beyond is refused. They must not keep the socket from being
/// read: acknowledgements come by it.
const WAITING_MAX: usize = 4096;

/// Most pieces of content in one request: 32 MiB of blocks, half a frame.
const CONTENT_MAX: usize = 512;

/// Bytes that are read at a time.
const READ_BUFFER: usize = 256 * 1024;

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
    ordered: mpsc::Sender<(u64, Body, Instant)>,
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

/// Serves a connection to its end.
pub(crate) async fn serve(shared: Arc<Shared>, socket: Caller, number: u64) {
    let address = match &socket {
        Caller::Tcp(socket) => {
            // Latency over throughput: requests are small and somebody waits for each.
            let _ = socket.set_nodelay(true);
            notice_dead_peers(socket, shared.config.lease);
            socket.peer_addr().ok()
        }
        Caller::Unix(_) => None,
    };
    let (incoming, outgoing, peer) = match shared.acceptor.accept(socket).await {
        Ok(accepted) => accepted,
        Err(error) => {
            let reason = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(?address, %error, reason, "a connection is refused");
            return;
        }
    };
    tracing::debug!(peer = %peer.identity, address = %peer.address, connection = number, "let in");
    let (replies, writer) = Replies::start(outgoing);
    let hang_up: Arc<Notify> = Arc::default();
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
    connection.read(incoming).await;
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
    async fn read(&mut self, mut incoming: Incoming) {
        let mut stopping = self.shared.stopping();
        let mut buffer = BytesMut::with_capacity(READ_BUFFER);
        loop {
            loop {
                match frame::take::<ClientMessage>(&mut buffer) {
                    Ok(Some(message)) => {
                        // While it waits here, what the client says is not read: it is not silent.
                        self.hear(u64::MAX);
                        let done = self.dispatch(message).await;
                        self.hear(self.shared.uptime_ms());
                        if done.is_err() {
                            return;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(connection = self.number, %error, "the connection is closed");
                        return;
                    }
                }
            }
            if buffer.capacity() - buffer.len() < 4096 {
                buffer.reserve(READ_BUFFER);
            }
            let read = tokio::select! {
                read = incoming.read_buf(&mut buffer) => read,
                _ = stopping.wait_for(|stop| *stop) => return,
                () = self.hang_up.notified() => return,
            };
            if !matches!(read, Ok(1..)) {
                return;
            }
            self.hear(self.shared.uptime_ms());
        }
    }

    /// The session was heard of at this time, milliseconds after the server's start.
    fn hear(&self, at_ms: u64) {
        if let Some(mounted) = self.mounted.as_ref().filter(|mounted| mounted.claimed) {
            mounted.heard.store(at_ms, Relaxed);
        }
    }

    /// Sends a message to where it is handled; an error ends the connection.
    async fn dispatch(&mut self, message: ClientMessage) -> Result<(), ()> {
        let started = Instant::now();
        let request = message.request;
        let Some(body) = message.body else {
            self.replies.answer(request, Err(VolumeError::Invalid(UNKNOWN_REQUEST))).await;
            return Ok(());
        };
        while self.tasks.try_join_next().is_some() {}
        match (body, &mut self.mounted) {
            (Body::Hello(hello), None) => {
                let done = self.hello(request, &hello).await;
                self.shared.stats.count("HELLO", started.elapsed());
                done
            }
            (Body::Claim(claim), Some(mounted)) if !mounted.claimed => {
                let (volume, session, number) = (&mounted.volume, mounted.session, self.number);
                // What it brings may take the store long: it is not silent meanwhile.
                mounted.heard.store(u64::MAX, Relaxed);
                let claimed = volume.claim(session, number, &claim, request, &self.replies).await;
                mounted.heard.store(self.shared.uptime_ms(), Relaxed);
                mounted.claimed = claimed.is_ok();
                self.shared.stats.count("CLAIM", started.elapsed());
                let Err(error) = claimed else { return Ok(()) };
                self.replies.answer(request, Err(error)).await;
                Err(())
            }
            (Body::Hello(_) | Body::Claim(_), Some(_)) => {
                self.replies.answer(request, Err(VolumeError::Invalid("a second hello or claim"))).await;
                Err(())
            }
            (_, Some(mounted)) if !mounted.claimed => {
                let error = VolumeError::Invalid("a session says first what it owns");
                if request != 0 {
                    self.replies.answer(request, Err(error)).await;
                }
                Ok(())
            }
            (body, Some(_)) => self.dispatch_mounted(request, body, started).await,
            (body, None) if admin::is_admin(&body) => self.beside(request, body, started, None).await,
            (_, None) => {
                self.replies
                    .answer(request, Err(VolumeError::Invalid("a session begins with a hello")))
                    .await;
                Err(())
            }
        }
    }

    /// Sends a message of a session that has claimed to where it is handled.
    async fn dispatch_mounted(&mut self, request: u64, body: Body, started: Instant) -> Result<(), ()> {
        let Some(mounted) = &self.mounted else { return Err(()) };
        let (volume, session) = (Arc::clone(&mounted.volume), mounted.session);
        let kind = type_of(&body);
        let (is_read_only, may_only_read) = mounted.reads_only;
        if let Some(refused) = refused(&body, is_read_only, may_only_read) {
            if request == 0 {
                tracing::warn!(peer = %self.peer.identity, connection = self.number, "{refused}: the connection is ended");
                return Err(());
            }
            self.replies.answer(request, Err(VolumeError::Denied(refused.to_owned()))).await;
            return Ok(());
        }
        match body {
            body @ (Body::Content(_)
            | Body::Records(_)
            | Body::BeginBatch(_)
            | Body::Commit(_)
            | Body::AllocateInos(_)
            | Body::Goodbye(_)) => {
                return mounted.ordered.send((request, body, started)).await.map_err(|_| ());
            }
            body @ (Body::FetchPages(_) | Body::FetchContent(_) | Body::Status(_) | Body::Bury(_)) => {
                return self.beside(request, body, started, Some((volume, session))).await;
            }
            body @ (Body::Enter(_)
            | Body::FetchInode(_)
            | Body::Acquire(_)
            | Body::Sync(_)
            | Body::Hear(_)) => {
                self.wait_for_others(request, body, started);
                return Ok(());
            }
            Body::Ack(ack) => {
                if volume.check_connection(session, self.number).is_ok() {
                    // Who uses what is noted before anybody acts on the acknowledgement.
                    volume.add_uses(session, &ack.in_use);
                    if volume.sharing.lock().is_recall(session, &ack.events) {
                        let ordered = (request, Body::Ack(ack), started);
                        return mounted.ordered.send(ordered).await.map_err(|_| ());
                    }
                    volume.acknowledge(session, &ack.events);
                }
            }
            Body::LetGo(let_go) => {
                if volume.check_connection(session, self.number).is_ok() {
                    volume.remove_uses(session, &let_go.inos);
                }
            }
            Body::Release(release) => {
                if volume.check_connection(session, self.number).is_ok() {
                    volume.release(session, &release.inos);
                }
            }
            Body::GiveBack(given) => {
                if volume.check_connection(session, self.number).is_ok() {
                    volume.given_back(session, &given);
                }
            }
            Body::Change(change) => {
                let taken = volume
                    .check_connection(session, self.number)
                    .and_then(|()| volume.change(session, request, &change, started));
                if let Err(error) = taken {
                    self.replies.answer(request, Err(error)).await;
                }
                return Ok(());
            }
            Body::Ping(_) => {
                let server_time_nanos = self.shared.now().as_nanos() as i64;
                self.replies.push(request, Answer::Pong(Pong { server_time_nanos }));
            }
            body @ (Body::Lock(_) | Body::CancelLock(_)) => {
                volume.handle_lock(session, self.number, request, body, &self.replies).await;
            }
            _ => {
                let error = VolumeError::Invalid("administration on the connection of a session");
                self.replies.answer(request, Err(error)).await;
            }
        }
        self.shared.stats.count(kind, started.elapsed());
        Ok(())
    }

    async fn hello(&mut self, request: u64, hello: &Hello) -> Result<(), ()> {
        let begun = async {
            let needed = if hello.read_only { Right::Read } else { Right::Write };
            // Before the volume is opened for somebody who may not even know of it.
            let registered = registry::read(&self.shared.store, &hello.volume).await?;
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
                    intake,
                });
                self.replies.send(request, Answer::Welcome(welcome)).await;
            }
            Err(error) => self.replies.answer(request, Err(error)).await,
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
                    let about = if let Body::FetchPages(fetch) = &body { Some(Ino(fetch.ino)) } else { None };
                    let answer = answer_read(&volume, session, body).await;
                    let answer = answer.inspect_err(|error| volume.failed(error, &hang_up));
                    let answer = answer.unwrap_or_else(|error| failure(request, &error));
                    if let Some(place) = replies.place().await {
                        let sharing = volume.sharing.lock();
                        let entries = volume.entries_for(&sharing, (session, connection), about);
                        replies.push_at(place, request, answer, entries);
                    }
                }
                None => replies.answer(request, admin::answer(&shared, &peer, body).await).await,
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
        if self.tasks.len() >= WAITING_MAX {
            self.replies
                .push(request, failure(request, &VolumeError::Invalid("too many requests at a time")));
            return;
        }
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
        });
    }
}

/// Why a session that only reads may not say this; commits and changes are refused where they are carried out.
fn refused(body: &Body, is_read_only: bool, may_only_read: bool) -> Option<&'static str> {
    match body {
        Body::Content(_) | Body::Records(_) | Body::AllocateInos(_) if is_read_only => {
            Some("a session that is read-only brings changes")
        }
        // It would keep others from writing.
        Body::Lock(ask) if may_only_read && !ask.test => {
            let is_exclusive = ask.lock.as_ref().is_some_and(|lock| lock.kind == LockKind::Write as u32);
            is_exclusive.then_some("who may only read a volume takes no exclusive locks")
        }
        _ => None,
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
