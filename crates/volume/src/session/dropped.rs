//! Sessions that nobody goes on with: there are not too many of them, and of all.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hayloft_model::SessionId;

use crate::database::Db;
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::session::Session;
use crate::volume::Volume;

/// Sessions without a connection that own nothing: so many are kept beyond their lease, those that were heard of last. The
/// mount of one that is not goes on with another one by itself.
const DROPPED_MAX: usize = 64;

/// Sessions that are ended in a turn: nobody else changes anything meanwhile.
const ENDED_IN_A_TURN: usize = 32;

/// Turns for it, one after the other. In all more sessions are ended than begin in a second: else they would come to the most that
/// there may be, and whoever begins one would wait for the end of others.
const TURNS: usize = 16;

impl Volume {
    /// Makes room for one more session: those that were dropped, and own nothing, have to go for it. The caller has the turn.
    pub(crate) async fn make_room(self: &Arc<Self>, db: &Db, id: SessionId) -> Result<(), VolumeError> {
        let most = self.shared.config.sessions_max;
        let has_room = || {
            let state = self.state.lock();
            state.sessions.len() < most || state.sessions.contains_key(&id)
        };
        if has_room() {
            return Ok(());
        }
        self.end_some(db, 0, 0).await?;
        match has_room() {
            true => Ok(()),
            false => Err(VolumeError::Limit { what: "sessions of a volume", limit: most }),
        }
    }

    /// Ends sessions that were dropped, and are of no more use: those that have never said what they own, and the oldest of those that
    /// own nothing.
    pub(crate) async fn end_dropped(self: &Arc<Self>) {
        let patience = 2 * self.shared.config.lease.as_millis() as u64;
        if !self.ownership.is_certain_for(self.shared.config.lease) {
            return;
        }
        if self.dropped(patience, DROPPED_MAX).is_empty() {
            return;
        }
        let (mut all, mut last) = (0, None);
        let ordered = async {
            for _ in 0..TURNS {
                // Who waits for the turn has it before the next of these.
                let _turn = self.turn.lock().await;
                let Some((count, place)) = self.end_some(&self.db()?, patience, DROPPED_MAX).await? else {
                    break;
                };
                (all, last) = (all + count, Some(place));
            }
            Ok(())
        };
        let ordered = ordered.await;
        let durable = match last {
            Some(place) => {
                tracing::info!(volume = self.name, count = all, "nobody goes on with these sessions: ended");
                self.durable(&place).await
            }
            None => Ok(()),
        };
        if let Err(error) = ordered.and(durable) {
            tracing::warn!(volume = self.name, %error, "sessions cannot be ended yet");
        }
    }

    /// Ends some of the sessions that are to be ended, if there are any, and says how many, and the place of that in the order. The caller has
    /// the turn.
    async fn end_some(
        self: &Arc<Self>,
        db: &Db,
        patience_ms: u64,
        kept: usize,
    ) -> Result<Option<(u64, Ordered)>, VolumeError> {
        let mut dropped = self.dropped(patience_ms, kept);
        dropped.truncate(ENDED_IN_A_TURN);
        if dropped.is_empty() {
            return Ok(None);
        }
        let place = self.end_bare(db, &dropped).await?;
        let count = dropped.len() as u64;
        self.sharing.lock().counts.evictions += count;
        Ok(Some((count, place)))
    }

    /// Sessions that are to be ended: without a connection for so long, all that have not claimed, and of the others all but those
    /// that were heard of last.
    fn dropped(&self, patience_ms: u64, kept: usize) -> Vec<SessionId> {
        let now = self.shared.uptime_ms();
        // Without a reason to stay, but for what they hold.
        let is_left = |found: &Session, heard: u64| {
            found.connection.is_none()
                && !found.may_bring
                && found.orphans.is_empty()
                && now.saturating_sub(heard) >= patience_ms
        };
        // Who may still answer from what it has read.
        let mut answering = HashSet::new();
        let mut left: Vec<(u64, SessionId, bool)> = {
            let state = self.state.lock();
            let all = state.sessions.iter().map(|(id, found)| (*id, found, found.heard.load(Relaxed)));
            let left = all.filter(|(_, found, heard)| is_left(found, *heard));
            let left = left.inspect(|(id, found, _)| {
                if !found.is_silent(now, &self.shared.config) {
                    answering.insert(*id);
                }
            });
            left.map(|(id, found, heard)| (heard, id, found.has_claimed)).collect()
        };
        if left.is_empty() {
            return Vec::new();
        }
        let mut holders = self.sharing.lock().grants.owners();
        if !answering.is_empty() {
            let readers = self.sharing.lock().grants.readers();
            holders.extend(readers.intersection(&answering));
        }
        left.retain(|(_, id, _)| !holders.contains(id) && self.locks.count(*id) == 0);
        left.sort_unstable();
        let excess = left.len().saturating_sub(kept);
        let over = left.iter().enumerate().filter(|(at, (.., has_claimed))| *at < excess || !has_claimed);
        over.map(|(_, (_, id, _))| *id).collect()
    }
}
