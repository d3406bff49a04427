//! The way to a session, and whether it acknowledges what it is told.

use std::collections::{BTreeMap, HashSet};

use hayloft_model::Ino;

use crate::replies::Replies;
use crate::sharing::foreign::Walked;
use crate::sharing::siblings::Siblings;

/// Whoever has shipped so many batches since an event has shipped all that the event was about many times over.
const BATCHES_MAX: u64 = 32;

/// How long a client may wait before it sends a refused batch again.
const REFUSED_PATIENCE_MS: u64 = 10_000;

/// The way to a session that has claimed what it owns.
pub(crate) struct Stream {
    pub(crate) connection: u64,
    pub(crate) replies: Replies,
    /// Recalls that it has not acknowledged.
    pub(super) recalls: HashSet<u64>,
    /// Events that it has not acknowledged.
    pub(super) sent: BTreeMap<u64, Sent>,
    /// The first of them as it was looked at last.
    pub(super) late: Option<Late>,
    /// Directories whose listing it was sent.
    pub(crate) listed: HashSet<Ino>,
    /// What its walks have read last.
    pub(super) siblings: Vec<Siblings>,
    /// How it walks.
    pub(super) walked: Walked,
}

/// An event on its way.
pub(super) struct Sent {
    /// When, milliseconds after the server's start.
    pub(super) at_ms: u64,
    /// What was said before it, and itself: [`Replies::queued`].
    pub(super) queued: u64,
}

/// An event that is with its session, and not acknowledged.
#[derive(Clone, Copy)]
pub(super) struct Late {
    event: u64,
    /// Since when it is known to be written out.
    since_ms: u64,
    /// The session's last batch then.
    batch: u64,
}

/// What is known of a session's work.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    /// When something of a batch came last, or was worked on: milliseconds after the server's start.
    pub(crate) at_ms: u64,
    /// The last batch that was applied.
    pub(crate) batch: u64,
    /// The one after it was refused, and will come again.
    pub(crate) is_refused: bool,
}

impl Stream {
    /// Whether the first event that it has not acknowledged has been with it for a lease, and nothing comes of it: what
    /// it has to ship before may take as long as it does, but it has to come.
    pub(crate) fn is_stuck(&mut self, now_ms: u64, lease_ms: u64, work: Work) -> bool {
        let Some((event, sent)) = self.sent.first_key_value() else { return false };
        if !self.replies.is_written(sent.queued) {
            return false;
        }
        let seen = self.late.filter(|late| late.event == *event);
        let late =
            *self.late.insert(seen.unwrap_or(Late { event: *event, since_ms: now_ms, batch: work.batch }));
        let patience_ms = if work.is_refused { lease_ms + REFUSED_PATIENCE_MS } else { lease_ms };
        let is_idle = now_ms.saturating_sub(work.at_ms.max(late.since_ms)) > patience_ms;
        is_idle || (now_ms - late.since_ms > lease_ms && work.batch.saturating_sub(late.batch) > BATCHES_MAX)
    }
}
