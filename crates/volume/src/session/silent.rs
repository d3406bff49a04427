//! Sessions that others wait for, and that are not heard of, or do not do what they were told.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hayloft_model::SessionId;

use crate::error::VolumeError;
use crate::session::ended::End;
use crate::sharing::stream::Work;
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
            _ if !volume.was_certain(session) => None,
            _ if volume.is_silent(session) => Some("silent for its lease, and others wait for it: ended"),
            _ if waited_for.contains(&session) && volume.is_stuck(session) => {
                Some("does not acknowledge for its lease, and others wait for it: ended")
            }
            _ => None,
        };
        let all: HashSet<SessionId> = waited_for.iter().copied().chain(needed).collect();
        let silent: Vec<SessionId> =
            all.into_iter().filter(|session| why_of(self, *session).is_some()).collect();
        if silent.is_empty() {
            return false;
        }
        let ended = async {
            let _turn = self.turn.lock().await;
            let mut gone = Vec::new();
            for session in silent {
                // It may have been heard of meanwhile.
                let is_there = self.state.lock().sessions.contains_key(&session);
                if let Some(why) = why_of(self, session).filter(|_| is_there) {
                    tracing::warn!(volume = self.name, %session, why);
                    gone.push(session);
                }
            }
            self.end_all(&self.db()?, &gone, End::Lost).await?;
            self.sharing.lock().counts.evictions += gone.len() as u64;
            Ok::<bool, VolumeError>(!gone.is_empty())
        };
        ended.await.unwrap_or_else(|error| {
            tracing::warn!(volume = self.name, %error, "sessions cannot be ended yet");
            false
        })
    }

    /// Whether a session does not do what it was told, for its lease: see [`Stream::is_stuck`].
    fn is_stuck(&self, session: SessionId) -> bool {
        let now = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        let found = self.state.lock().sessions.get(&session).map(|found| {
            let work = Work {
                at_ms: found.worked.load(Relaxed),
                batch: found.row.last_sequence,
                is_refused: found.failed.is_some(),
            };
            (work, found.lease_ms(&self.shared.config))
        });
        let stream = sharing.streams.get_mut(&session);
        stream.zip(found).is_some_and(|(stream, (work, lease))| stream.is_stuck(now, lease, work))
    }

    /// Whether it was certain for its lease whose the volume is: else nobody could make himself heard of.
    fn was_certain(&self, session: SessionId) -> bool {
        let lease_ms = {
            let state = self.state.lock();
            state.sessions.get(&session).map_or(0, |found| found.lease_ms(&self.shared.config))
        };
        self.ownership.is_certain_for(Duration::from_millis(lease_ms))
    }

    /// See [`Session::is_silent`].
    fn is_silent(&self, session: SessionId) -> bool {
        let now = self.shared.uptime_ms();
        let state = self.state.lock();
        state.sessions.get(&session).is_none_or(|found| found.is_silent(now, &self.shared.config))
    }
}
