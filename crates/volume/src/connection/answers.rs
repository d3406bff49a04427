//! Requests that are handled on tasks of their own, beside what comes after them.

use std::sync::Arc;
use std::time::Instant;

use hayloft_model::grants::Ticket;
use hayloft_model::{BLOCK_SIZE, ContentHash, Ino, SessionId};
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Contents, Differences, Done, Pages};
use tokio::sync::Notify;

use crate::admin;
use crate::admin::stats::type_of;
use crate::connection::Connection;
use crate::content::message_of;
use crate::database::listing;
use crate::error::VolumeError;
use crate::replies::failure;
use crate::room::{ASKED_FREE, units};
use crate::volume::Volume;

/// Most pieces of content in one request: 32 MiB of blocks, half a frame.
const CONTENT_MAX: usize = 512;

/// Differences in one message: paths may have 4 KiB each.
const DIFFERENCES_MAX: usize = 4096;

/// What is said to a request that this version does not know.
pub(super) const UNKNOWN_REQUEST: &str = "this server does not know it; if it is older than who asks, install the newer version at the server first";

impl Connection {
    /// Handles a request on a task of its own, at most so many at a time.
    pub(super) async fn beside(
        &mut self,
        request: u64,
        body: Body,
        started: Instant,
        mounted: Option<(Arc<Volume>, SessionId)>,
    ) -> Result<(), ()> {
        if let Body::FetchContent(fetch) = &body
            && (fetch.hashes.len() % 32 != 0 || fetch.hashes.len() / 32 > CONTENT_MAX)
        {
            let error = VolumeError::Invalid("a list of hashes of a wrong length");
            self.replies.answer(request, Err(error)).await;
            return Ok(());
        }
        let permit = Arc::clone(&self.reads).acquire_owned().await.map_err(|_| ())?;
        // Nobody else is waited for here: its own reads give room when they are answered.
        let (own, bytes) = (&self.asked_to_read, kept_bytes(&body));
        let held = match self.shared.room.to_ask(own, bytes) {
            Ok(held) => held,
            Err(_) => {
                let wanted = units(bytes.min(ASKED_FREE));
                Some(Arc::clone(own).acquire_many_owned(wanted).await.map_err(|_| ())?)
            }
        };
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
            drop((permit, held));
        });
        Ok(())
    }

    /// Handles a request that may have to wait for other sessions, on a task of its own. What it has to say is in the
    /// stream before its objects are free.
    pub(super) fn wait_for_others(&mut self, request: u64, body: Body, started: Instant) {
        let Some(mounted) = &self.mounted else { return };
        let place = self.shared.room.place_to_wait(self.tasks.len());
        let place = place.map_err(|limit| VolumeError::Limit { what: "requests at a time", limit });
        let held = place.and_then(|place| {
            let held = self.shared.room.to_ask(&self.asked, kept_bytes(&body));
            Ok((place, held.map_err(|_| VolumeError::Crowded)?))
        });
        let held = match held {
            Ok(held) => held,
            Err(error) => {
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
            drop(held);
        });
    }
}

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

/// Bytes that a request takes as long as it is worked on or waits, beside a few.
fn kept_bytes(body: &Body) -> usize {
    match body {
        Body::FetchContent(fetch) => fetch.hashes.len(),
        Body::Enter(enter) => (enter.files.len() + enter.homes.len()) * size_of::<u64>() + enter.stem.len(),
        Body::Hear(hear) => hear.inos.len() * size_of::<u64>(),
        _ => 0,
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
