//! Sessions that others wait for, and that are not heard of, or do not do what they were told.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hayloft_model::SessionId;

use crate::session::ended::End;
use crate::sharing::Work;
use crate::volume::Volume;

impl Volume {
    /// Ends sessions that somebody waits for and that have been silent for their lease, or have not done for as long
    /// what they were told. Who gets what one of them has had may be as silent: then it is that one's turn at once.
    pub(crate) async fn end_silent(self: &Arc<Self>) {
        while self.end_some_silent().await {}
    }

    /// Whether there was one.
    async fn end_some_silent(self: &Arc<Self>) -> bool {
        let waited_for = {
            let sharing = self.sharing.lock();
            let mut waited_for = sharing.grants.waited_for();
            waited_for.extend(sharing.waited_for_to_hear());
            if sharing.claims_awaited > 0 {
                waited_for.extend(sharing.grants.unclaimed());
            }
            waited_for
        };
        let needed = self.locks.take_needed();
        let why_of = |volume: &Volume, session: SessionId| match session {
            _ if volume.is_silent(session) => Some("silent for its lease, and others wait for it: ended"),
            _ if waited_for.contains(&session) && volume.is_stuck(session) => {
                Some("does not acknowledge for its lease, and others wait for it: ended")
            }
            _ => None,
        };
        let all: HashSet<SessionId> = waited_for.iter().copied().chain(needed).collect();
        let mut any = false;
        for session in all.into_iter().filter(|session| why_of(self, *session).is_some()) {
            let has_to_go = |volume: &Volume| {
                let why = why_of(volume, session);
                if let Some(why) = why {
                    tracing::warn!(volume = volume.name, %session, why);
                }
                why.is_some()
            };
            match self.evict_if(session, End::Lost, has_to_go).await {
                Ok(ended) => any |= ended,
                Err(error) => {
                    tracing::warn!(volume = self.name, %session, %error, "a session cannot be ended yet");
                }
            }
        }
        any
    }

    /// Whether a session does not do what it was told, for its lease: see [`Stream::is_stuck`].
    fn is_stuck(&self, session: SessionId) -> bool {
        let (now, lease) = (self.shared.uptime_ms(), self.shared.config.lease.as_millis() as u64);
        let mut sharing = self.sharing.lock();
        let work = self.state.lock().sessions.get(&session).map(|found| Work {
            at_ms: found.worked.load(Relaxed),
            batch: found.row.last_sequence,
            is_refused: found.failed.is_some(),
        });
        let stream = sharing.streams.get_mut(&session);
        stream.zip(work).is_some_and(|(stream, work)| stream.is_stuck(now, lease, work))
    }

    /// Whether a session was not heard of for its lease.
    fn is_silent(&self, session: SessionId) -> bool {
        let (now, lease) = (self.shared.uptime_ms(), self.shared.config.lease.as_millis() as u64);
        let state = self.state.lock();
        let found = state.sessions.get(&session);
        found.is_none_or(|found| now.saturating_sub(found.heard.load(Relaxed)) > lease)
    }
}
