//! Sessions that others wait for, and that are not heard of, or do not do what they were told.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hayloft_model::{Ino, SessionId};

use crate::error::VolumeError;
use crate::session::ended::End;
use crate::sharing::stream::Work;
use crate::volume::{State, Volume};

/// Who has lost so many connections, and shipped nothing on them, is cut off. One is lost by who gets another address.
const LOST_MIN: u64 = 2;

/// What a session was told to give back first, and has not. On each connection it is told so anew, and what it has not acknowledged on the
/// last one counts for nothing: who loses each connection before it has shipped would be waited for for ever.
#[derive(Clone, Copy)]
pub(super) struct Owed {
    ino: Ino,
    /// Since when it has been seen without a pause, milliseconds after the server's start.
    since_ms: u64,
    /// How many connections the session had had then.
    connections: u64,
    /// The session's last batch then.
    batch: u64,
}

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
        self.note_owed(&waited_for);
        let why_of = |volume: &Volume, session: SessionId| match session {
            _ if !volume.was_certain(session) => None,
            _ if volume.is_silent(session) => Some("silent for its lease, and others wait for it: ended"),
            _ if waited_for.contains(&session) && volume.is_stuck(session) => {
                Some("does not acknowledge for its lease, and others wait for it: ended")
            }
            _ if volume.is_cut_off(session) => {
                Some("has lost one connection after the other for its lease, and others wait for it: ended")
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
            self.note_troubles(&gone);
            self.end_all(&self.db()?, &gone, End::Lost).await?;
            self.sharing.lock().counts.evictions += gone.len() as u64;
            Ok::<bool, VolumeError>(!gone.is_empty())
        };
        ended.await.unwrap_or_else(|error| {
            tracing::warn!(volume = self.name, %error, "sessions cannot be ended yet");
            false
        })
    }

    /// Notes what the sessions that somebody waits for have to give back. To be called often: it is to be seen that they owe it without a pause.
    fn note_owed(&self, waited_for: &BTreeSet<SessionId>) {
        let now_ms = self.shared.uptime_ms();
        let (sharing, mut state) = (self.sharing.lock(), self.state.lock());
        for (id, session) in &mut state.sessions {
            let recalled = waited_for.contains(id).then(|| sharing.grants.first_recalled(*id)).flatten();
            let (connections, batch) = (session.connections, session.row.last_sequence);
            session.owed = recalled.map(|ino| {
                let before = session.owed.filter(|owed| owed.ino == ino && owed.batch == batch);
                before.unwrap_or(Owed { ino, since_ms: now_ms, connections, batch })
            });
        }
    }

    /// Whether a session has had to give the same back for its lease, on one connection after the other, and has shipped nothing.
    fn is_cut_off(&self, id: SessionId) -> bool {
        let now_ms = self.shared.uptime_ms();
        let (sharing, state) = (self.sharing.lock(), self.state.lock());
        let Some(session) = state.sessions.get(&id) else { return false };
        let is_owed = |owed: &Owed| {
            sharing.grants.first_recalled(id) == Some(owed.ino) && session.row.last_sequence == owed.batch
        };
        let Some(owed) = session.owed.filter(is_owed) else { return false };
        let lease_ms = session.lease_ms(&self.shared.config);
        // The last one may be of use still.
        let is_new = now_ms.saturating_sub(session.connected_ms) < lease_ms / 2;
        let lost = session.connections - owed.connections;
        now_ms.saturating_sub(owed.since_ms) > lease_ms && lost >= LOST_MIN + u64::from(is_new)
    }

    /// Others have waited for these, until now.
    fn note_troubles(&self, gone: &[SessionId]) {
        let now_ms = self.shared.uptime_ms();
        let mut state = self.state.lock();
        let State { sessions, troubles, .. } = &mut *state;
        let found = gone.iter().filter_map(|id| Some((id, sessions.get(id)?)));
        found.for_each(|(id, session)| troubles.note(*id, session, now_ms));
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
