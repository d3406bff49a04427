//! Messages go to where they are handled.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{ClientMessage, LockKind, Pong};
use prost::Message;

use crate::admin;
use crate::admin::stats::type_of;
use crate::connection::Connection;
use crate::connection::answers::UNKNOWN_REQUEST;
use crate::connection::frames::Taken;
use crate::connection::intake::Ordered;
use crate::error::VolumeError;
use crate::replies::failure;
use crate::room::{BATCHES_BYTES, Held, units};
use crate::words;

/// How long a part of a batch waits for room; then the batch has to be sent anew, and gives its own back.
const BATCH_PATIENCE: Duration = Duration::from_secs(15);

impl Connection {
    /// Sends a message to where it is handled; an error ends the connection.
    pub(super) async fn dispatch(
        &mut self,
        message: ClientMessage,
        held: Held,
        is_crowded: bool,
    ) -> Result<(), ()> {
        let started = Instant::now();
        let request = message.request;
        let Some(body) = message.body else {
            self.replies.answer(request, Err(VolumeError::Invalid(UNKNOWN_REQUEST))).await;
            return Ok(());
        };
        while self.tasks.try_join_next().is_some() {}
        match (body, &mut self.mounted) {
            (Body::Hello(hello), None) => {
                match words::fit(hello) {
                    // Boxed, as all that takes much: a connection that waits shall take little.
                    Ok(hello) => Box::pin(self.hello(request, &hello)).await?,
                    Err(error) => self.replies.answer(request, Err(error)).await,
                }
                self.shared.stats.count("HELLO", started.elapsed());
                Ok(())
            }
            (Body::Claim(claim), Some(mounted)) if !mounted.claimed => {
                let (volume, session, number) = (&mounted.volume, mounted.session, self.number);
                // What it brings may take the store long: it is not silent meanwhile.
                mounted.heard.store(u64::MAX, Relaxed);
                let claimed = volume.claim(session, number, &claim, request, &self.replies);
                let claimed = Box::pin(claimed).await;
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
            (body, Some(_)) => self.dispatch_mounted(request, body, started, (held, is_crowded)).await,
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
    async fn dispatch_mounted(
        &mut self,
        request: u64,
        body: Body,
        started: Instant,
        (held, is_crowded): (Held, bool),
    ) -> Result<(), ()> {
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
            body @ (Body::Content(_) | Body::Records(_) | Body::Commit(_)) => {
                if matches!(body, Body::Commit(_)) {
                    mounted.of_all.store(0, Relaxed);
                }
                let ordered = Ordered { held, is_crowded, ..Ordered::new(request, body, started) };
                return mounted.ordered.send(ordered).await.map_err(|_| ());
            }
            body @ (Body::BeginBatch(_) | Body::AllocateInos(_) | Body::Goodbye(_)) => {
                if matches!(body, Body::BeginBatch(_)) {
                    mounted.of_all.store(0, Relaxed);
                }
                return mounted.ordered.send(Ordered::new(request, body, started)).await.map_err(|_| ());
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
                    let added = volume.add_uses(session, &ack.in_use);
                    added.map_err(|error| self.end_for(&error))?;
                    if volume.sharing.lock().is_recall(session, &ack.events) {
                        let ordered = Ordered::new(request, Body::Ack(ack), started);
                        return mounted.ordered.send(ordered).await.map_err(|_| ());
                    }
                    volume.acknowledge(session, &ack.events);
                }
            }
            Body::LetGo(let_go) => {
                if volume.check_connection(session, self.number).is_ok() {
                    let removed = volume.remove_uses(session, &let_go.inos);
                    removed.map_err(|error| self.end_for(&error))?;
                }
            }
            Body::Shipped(shipped) => {
                if volume.check_connection(session, self.number).is_ok() {
                    volume.shipped(session, shipped);
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
                let held = self.shared.room.to_ask(&self.asked, change.encoded_len());
                let taken = held.map_err(|_| VolumeError::Crowded).and_then(|held| {
                    volume.check_connection(session, self.number)?;
                    volume.change((session, request), &change, started, held)
                });
                if let Err(error) = taken {
                    self.replies.answer(request, Err(error)).await;
                }
                return Ok(());
            }
            Body::Ping(_) => {
                let server_time_nanos = self.shared.now().as_nanos() as i64;
                let nameless = volume.nameless(session);
                // Who does not read the answers has to wait with the next one.
                self.replies.send(request, Answer::Pong(Pong { server_time_nanos, nameless })).await;
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

    /// The client said more than is kept for it: it hears so, and the connection is ended.
    fn end_for(&self, error: &VolumeError) {
        let (peer, address) = (&self.peer.identity, &self.peer.address);
        tracing::warn!(connection = self.number, %peer, %address, %error, "the connection is ended");
        self.replies.push(0, failure(0, error));
    }

    /// Room for a part of a batch: of the connection's own, else of all. `true`: there is none for too long.
    pub(super) async fn room_for(&self, taken: &Taken) -> (Held, bool) {
        let Some(mounted) = self.mounted.as_ref().filter(|_| taken.weight.is_of_batch) else {
            return (None, false);
        };
        let units = units(taken.weight.bytes);
        if let Ok(own) = Arc::clone(&mounted.free).try_acquire_many_owned(units) {
            return (Some(own), false);
        }
        // Records stay until their commit: the largest batch of them goes on, as it would wait for itself.
        let has_records = taken.has_records();
        if has_records && mounted.of_all.load(Relaxed) > BATCHES_BYTES / 2 {
            return (None, false);
        }
        let of_all = Arc::clone(&self.shared.room.batches).acquire_many_owned(units);
        let of_all = tokio::time::timeout(BATCH_PATIENCE, of_all).await.ok().and_then(Result::ok);
        let is_crowded = of_all.is_none();
        if has_records && !is_crowded {
            mounted.of_all.fetch_add(taken.weight.bytes, Relaxed);
        }
        (of_all, is_crowded)
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
