//! What has to be handled in its order: content, records, commits, and acknowledgements that follow them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hayloft_model::SessionId;
use hayloft_wire::FailureCode;
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use tokio::sync::{Notify, mpsc};

use crate::admin::stats::type_of;
use crate::content::Pending;
use crate::error::VolumeError;
use crate::replies::Replies;
use crate::room::Held;
use crate::volume::Volume;

/// How often it is looked whether others need the room that a batch takes which does not go on.
const LOOK: Duration = Duration::from_secs(1);

/// How long such a batch may stand still then.
const STANDSTILL: Duration = Duration::from_secs(10);

/// A message that has its turn.
pub(crate) struct Ordered {
    pub(crate) request: u64,
    pub(crate) body: Body,
    pub(crate) started: Instant,
    /// The room that it takes.
    pub(crate) held: Held,
    /// There was none.
    pub(crate) is_crowded: bool,
}

impl Ordered {
    /// One that needs no room.
    pub(crate) fn new(request: u64, body: Body, started: Instant) -> Ordered {
        Ordered { request, body, started, held: None, is_crowded: false }
    }
}

/// Handles what has to be handled in its order.
pub(crate) struct Intake {
    pub(crate) volume: Arc<Volume>,
    pub(crate) session: SessionId,
    pub(crate) connection: u64,
    pub(crate) replies: Replies,
    pub(crate) hang_up: Arc<Notify>,
    /// See [`crate::session::Session::worked`].
    pub(crate) worked: Arc<AtomicU64>,
}

/// While something is worked on, it is not its session that others wait for.
struct Work<'a> {
    intake: &'a Intake,
    /// It came to nothing: when the first one ended that did so since the last that did not. That one counts, as its client may
    /// have heard what was said behind it.
    useless_since: Option<u64>,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        let ended = self.useless_since.unwrap_or_else(|| self.intake.volume.shared.uptime_ms());
        self.intake.worked.store(ended, Relaxed);
    }
}

impl Intake {
    fn works(&self) -> Work<'_> {
        self.worked.store(u64::MAX, Relaxed);
        Work { intake: self, useless_since: None }
    }

    /// The next message. While a batch waits for it, and others need its room, what can be in the store goes there.
    async fn next(&self, queue: &mut mpsc::Receiver<Ordered>, pending: &mut Pending) -> Option<Ordered> {
        let begun = Instant::now();
        while !pending.is_empty() {
            match tokio::time::timeout(LOOK, queue.recv()).await {
                Ok(next) => return next,
                Err(_) if self.volume.shared.room.is_short_for_batches() => {
                    pending.spill().await;
                    if begun.elapsed() > STANDSTILL {
                        tracing::warn!(session = %self.session, "a batch stands still, and others need its room: it is dropped");
                        pending.crowded();
                    }
                }
                Err(_) => {}
            }
        }
        queue.recv().await
    }

    pub(crate) async fn run(self, mut queue: mpsc::Receiver<Ordered>) {
        let mut pending = Pending::new(Arc::clone(&self.volume));
        let mut useless_since = None;
        while let Some(ordered) = self.next(&mut queue, &mut pending).await {
            let Ordered { request, body, started, held, is_crowded } = ordered;
            let kind = type_of(&body);
            let mut work = self.works();
            let answer = match body {
                Body::Content(chunk) => {
                    match is_crowded {
                        true => pending.crowded(),
                        false => pending.push(chunk, held).await,
                    }
                    self.volume.shared.stats.count(kind, started.elapsed());
                    continue;
                }
                Body::Records(records) => {
                    match is_crowded {
                        true => pending.crowded(),
                        false => pending.push_records(records.records, held),
                    }
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
                    let is_pressing = content.is_pressing();
                    let done = self.volume.commit(self.session, self.connection, commit, content).await;
                    drop(held);
                    // Whom others wait for can send it as one that they wait for, which is not refused.
                    match &done {
                        Err(error) if error.code() == FailureCode::NoSpace && !is_pressing => {
                            let now = self.volume.shared.uptime_ms();
                            work.useless_since = Some(*useless_since.get_or_insert(now));
                        }
                        _ => useless_since = None,
                    }
                    if let Ok((committed, about)) = done {
                        self.volume.shared.stats.count(kind, started.elapsed());
                        let sharing = self.volume.sharing.lock();
                        let entries =
                            self.volume.entries_for(&sharing, (self.session, self.connection), about);
                        self.replies.push_with(request, Answer::Committed(committed), entries);
                        continue;
                    }
                    done.map(|(committed, _)| Answer::Committed(committed))
                }
                Body::AllocateInos(allocate) => self
                    .volume
                    .allocate(self.session, allocate.count)
                    .await
                    .map(|range| Answer::Inos(range.into())),
                Body::Ack(ack) => {
                    // A recall: what was shipped before is applied now.
                    if self.volume.check_connection(self.session, self.connection).is_ok() {
                        self.volume.acknowledge(self.session, &ack.events);
                    }
                    self.volume.shared.stats.count(kind, started.elapsed());
                    continue;
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
                useless = self.volume.is_fenced()
                    || matches!(error, VolumeError::Superseded | VolumeError::NotOwned(_));
            }
            self.volume.shared.stats.count(kind, started.elapsed());
            self.replies.answer(request, answer).await;
            if useless {
                self.hang_up.notify_one();
            }
        }
    }
}
