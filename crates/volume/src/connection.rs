//! One connection: requests come in, content and batches are handled in their order, reads beside them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use hayloft_model::{ContentHash, Ino, SessionId};
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{ClientMessage, Contents, Hello, InodeAnswer, Pages, frame};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use crate::admin;
use crate::content::{Pending, message_of};
use crate::error::VolumeError;
use crate::listing;
use crate::replies::Replies;
use crate::server::Shared;
use crate::stats::type_of;
use crate::volume::Volume;

/// Content and batches that wait for their turn; then the socket is not read any more.
const ORDERED_QUEUE: usize = 64;

/// Reads that are worked on at a time; then the socket is not read any more.
const READS_MAX: usize = 32;

/// Most pieces of content in one request: 32 MiB of blocks, half a frame.
const CONTENT_MAX: usize = 512;

/// Bytes that are read at a time.
const READ_BUFFER: usize = 256 * 1024;

/// What a connection is once its session is open.
struct Mounted {
    volume: Arc<Volume>,
    session: SessionId,
    heard: Arc<AtomicU64>,
    ordered: mpsc::Sender<(u64, Body, Instant)>,
    intake: JoinHandle<()>,
}

struct Connection {
    shared: Arc<Shared>,
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
pub(crate) async fn serve(shared: Arc<Shared>, socket: TcpStream, number: u64) {
    // Latency over throughput: requests are small and somebody waits for each.
    let _ = socket.set_nodelay(true);
    notice_dead_peers(&socket, shared.config.lease);
    let (incoming, outgoing) = socket.into_split();
    let (replies, writer) = Replies::start(outgoing);
    let mut connection = Connection {
        shared,
        number,
        replies,
        reads: Arc::new(Semaphore::new(READS_MAX)),
        tasks: JoinSet::new(),
        mounted: None,
        hang_up: Arc::default(),
    };
    connection.read(incoming).await;
    let Connection { mut tasks, mounted, replies, .. } = connection;
    if let Some(Mounted { volume, session, ordered, intake, .. }) = mounted {
        // What has arrived is applied; the client will ask about it when it is back.
        drop(ordered);
        let _ = intake.await;
        volume.disconnected(session, number);
    }
    while tasks.join_next().await.is_some() {}
    drop(replies);
    let _ = writer.await;
    tracing::debug!(connection = number, "closed");
}

impl Connection {
    async fn read(&mut self, mut incoming: OwnedReadHalf) {
        let mut stopping = self.shared.stopping();
        let mut buffer = BytesMut::with_capacity(READ_BUFFER);
        loop {
            loop {
                match frame::take::<ClientMessage>(&mut buffer) {
                    Ok(Some(message)) => {
                        if self.dispatch(message).await.is_err() {
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
            if let Some(mounted) = &self.mounted {
                mounted.heard.store(self.shared.uptime_ms(), Relaxed);
            }
        }
    }

    /// Sends a message to where it is handled; an error ends the connection.
    async fn dispatch(&mut self, message: ClientMessage) -> Result<(), ()> {
        let started = Instant::now();
        let request = message.request;
        let Some(body) = message.body else {
            self.replies.answer(request, Err(VolumeError::Invalid("an unknown request"))).await;
            return Ok(());
        };
        while self.tasks.try_join_next().is_some() {}
        match (body, &self.mounted) {
            (Body::Hello(hello), None) => {
                let done = self.hello(request, &hello).await;
                self.shared.stats.count("HELLO", started.elapsed());
                done
            }
            (Body::Hello(_), Some(_)) => {
                self.replies.answer(request, Err(VolumeError::Invalid("a second hello"))).await;
                Err(())
            }
            (
                body @ (Body::Content(_)
                | Body::Records(_)
                | Body::BeginBatch(_)
                | Body::Commit(_)
                | Body::AllocateInos(_)
                | Body::Goodbye(_)),
                Some(mounted),
            ) => mounted.ordered.send((request, body, started)).await.map_err(|_| ()),
            (
                body @ (Body::Enter(_)
                | Body::FetchInode(_)
                | Body::FetchPages(_)
                | Body::FetchContent(_)
                | Body::Status(_)),
                Some(mounted),
            ) => {
                let (volume, session) = (Arc::clone(&mounted.volume), mounted.session);
                self.beside(request, body, started, Some((volume, session))).await
            }
            (body, None) if admin::is_admin(&body) => self.beside(request, body, started, None).await,
            (_, None) => {
                self.replies
                    .answer(request, Err(VolumeError::Invalid("a session begins with a hello")))
                    .await;
                Err(())
            }
            (_, Some(_)) => {
                let error = VolumeError::Invalid("administration on the connection of a session");
                self.replies.answer(request, Err(error)).await;
                Ok(())
            }
        }
    }

    async fn hello(&mut self, request: u64, hello: &Hello) -> Result<(), ()> {
        let begun = async {
            let volume = self.shared.volume(&hello.volume).await?;
            let (welcome, heard) = volume
                .hello(hello, self.number, &self.hang_up)
                .await
                .inspect_err(|error| volume.note(error))?;
            Ok((volume, welcome, heard))
        };
        match begun.await {
            Ok((volume, welcome, heard)) => {
                let session = SessionId(hello.session);
                let (ordered, queue) = mpsc::channel(ORDERED_QUEUE);
                let intake = Intake {
                    volume: Arc::clone(&volume),
                    session,
                    connection: self.number,
                    replies: self.replies.clone(),
                    hang_up: Arc::clone(&self.hang_up),
                };
                let intake = tokio::spawn(intake.run(queue));
                self.mounted = Some(Mounted { volume, session, heard, ordered, intake });
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
        let hang_up = Arc::clone(&self.hang_up);
        self.tasks.spawn(async move {
            let kind = type_of(&body);
            let answer = match mounted {
                Some((volume, session)) => {
                    let answer = answer_read(&volume, session, request, body, &replies).await;
                    answer.inspect_err(|error| {
                        volume.note(error);
                        if volume.is_fenced() {
                            hang_up.notify_one();
                        }
                    })
                }
                None => admin::answer(&shared, body).await.map(Some),
            };
            match answer {
                Ok(None) => {}
                Ok(Some(answer)) => replies.send(request, answer).await,
                Err(error) => replies.answer(request, Err(error)).await,
            }
            shared.stats.count(kind, started.elapsed());
            drop(permit);
        });
        Ok(())
    }
}

/// Answers a read; `None` when the answer has been sent already.
async fn answer_read(
    volume: &Arc<Volume>,
    session: SessionId,
    request: u64,
    body: Body,
    replies: &Replies,
) -> Result<Option<Answer>, VolumeError> {
    Ok(Some(match body {
        Body::Enter(enter) => {
            volume.enter(session, Ino(enter.dir), enter.budget_bytes, replies, request).await?;
            return Ok(None);
        }
        Body::FetchInode(fetch) => {
            let snapshot = volume.db()?.snapshot()?;
            let inode = listing::inode(&snapshot, Ino(fetch.ino)).await?;
            Answer::Inode(InodeAnswer { inode: Some(inode) })
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
    }))
}

/// Handles what has to be handled in its order.
struct Intake {
    volume: Arc<Volume>,
    session: SessionId,
    connection: u64,
    replies: Replies,
    hang_up: Arc<Notify>,
}

impl Intake {
    async fn run(self, mut queue: mpsc::Receiver<(u64, Body, Instant)>) {
        let mut pending = Pending::new(Arc::clone(&self.volume));
        while let Some((request, body, started)) = queue.recv().await {
            let kind = type_of(&body);
            let answer = match body {
                Body::Content(chunk) => {
                    pending.push(chunk).await;
                    self.volume.shared.stats.count(kind, started.elapsed());
                    continue;
                }
                Body::Records(records) => {
                    pending.push_records(records.records);
                    self.volume.shared.stats.count(kind, started.elapsed());
                    continue;
                }
                Body::BeginBatch(begin) => {
                    pending = Pending::begin(Arc::clone(&self.volume), &begin);
                    self.volume.shared.stats.count(kind, started.elapsed());
                    continue;
                }
                Body::Commit(commit) => {
                    let content = std::mem::replace(&mut pending, Pending::new(Arc::clone(&self.volume)));
                    let done = self.volume.commit(self.session, self.connection, commit, content).await;
                    done.map(Answer::Committed)
                }
                Body::AllocateInos(allocate) => {
                    self.volume.allocate(allocate.count).await.map(|range| Answer::Inos(range.into()))
                }
                _ => {
                    let left = self.volume.goodbye(self.session, self.connection).await;
                    self.volume.shared.stats.count(kind, started.elapsed());
                    if let Err(error) = left {
                        tracing::warn!(session = %self.session, %error, "a goodbye failed");
                    }
                    continue;
                }
            };
            let mut useless = false;
            if let Err(error) = &answer {
                self.volume.note(error);
                useless = self.volume.is_fenced() || matches!(error, VolumeError::Superseded);
            }
            self.volume.shared.stats.count(kind, started.elapsed());
            self.replies.answer(request, answer).await;
            if useless {
                self.hang_up.notify_one();
            }
        }
    }
}
