//! Inodes that sessions use though their names are gone, or what covered them: they stay until nobody does.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hayloft_model::{Ino, SessionId};
use hayloft_wire::InodeRowMessage;

use crate::database;
use crate::database::rows::Rows;
use crate::database::tables;
use crate::error::VolumeError;
use crate::volume::Volume;

/// Inodes that are settled with one batch.
const SLICE: usize = 256;

/// Inodes without a name, or cover, that one session may say it uses; and those of all that may wait to be looked at.
pub(crate) const USES_MAX: usize = 1 << 20;

/// An inode that a `CHANGE` took the last name of. Until all have said whether they use it, the asker's orphan row
/// keeps it, or those of others when the asker has ended.
struct Unnamed {
    asker: SessionId,
    keepers: Vec<SessionId>,
    /// The asker's own event of it, until that is acknowledged.
    event: Option<u64>,
    /// All others have acknowledged.
    settled: bool,
}

/// Who uses what.
#[derive(Default)]
pub(crate) struct Uses {
    by: HashMap<Ino, BTreeSet<SessionId>>,
    /// How many of these each session uses.
    counts: HashMap<SessionId, usize>,
    unnamed: HashMap<Ino, Unnamed>,
    /// Orphan rows that are not needed any more.
    released: HashSet<(SessionId, Ino)>,
    /// To be looked at: a row may have to go, or to be kept for somebody.
    due: BTreeSet<Ino>,
    settling: bool,
}

impl Uses {
    /// Sessions other than `but` that use an inode.
    pub(crate) fn others(&self, but: SessionId, ino: Ino) -> Vec<SessionId> {
        self.by.get(&ino).into_iter().flatten().filter(|user| **user != but).copied().collect()
    }

    /// A session says that its kernel knows these.
    pub(crate) fn add(&mut self, session: SessionId, inos: &[u64]) {
        for ino in inos.iter().map(|ino| Ino(*ino)) {
            if self.by.entry(ino).or_default().insert(session) {
                *self.counts.entry(session).or_default() += 1;
            }
            self.released.remove(&(session, ino));
            self.due.insert(ino);
        }
    }

    /// A session says, on a new connection, all that its kernel knows: word of others that it let go may be lost.
    pub(crate) fn claim(&mut self, session: SessionId, inos: &[u64]) {
        let known: HashSet<u64> = inos.iter().copied().collect();
        let used = self.by.iter().filter(|(_, users)| users.contains(&session)).map(|(ino, _)| ino.0);
        let gone: Vec<u64> = used.filter(|ino| !known.contains(ino)).collect();
        self.remove(session, &gone);
        self.add(session, inos);
    }

    /// These have no name any more; who uses them has to be kept in the tables.
    pub(crate) fn look_at(&mut self, unnamed: &HashSet<Ino>) {
        self.due.extend(unnamed.iter().filter(|ino| self.by.contains_key(ino)));
    }

    /// A session's kernel has forgotten these.
    pub(crate) fn remove(&mut self, session: SessionId, inos: &[u64]) {
        for ino in inos.iter().map(|ino| Ino(*ino)) {
            self.drop_use(session, ino);
            self.released.insert((session, ino));
        }
    }

    fn drop_use(&mut self, session: SessionId, ino: Ino) {
        if let Some(users) = self.by.get_mut(&ino) {
            let was_used = users.remove(&session);
            if users.is_empty() {
                self.by.remove(&ino);
            }
            if was_used {
                self.used_less(session);
            }
        }
        self.due.insert(ino);
    }

    fn used_less(&mut self, session: SessionId) {
        if let Some(count) = self.counts.get_mut(&session) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&session);
            }
        }
    }

    /// Nobody uses an inode that is gone.
    fn forget(&mut self, ino: Ino) {
        self.by.remove(&ino).into_iter().flatten().for_each(|user| self.used_less(user));
    }

    /// Whether so many more are too many for a session, or for all together.
    fn is_too_much(&self, session: SessionId, more: usize) -> bool {
        let of_session = self.counts.get(&session).copied().unwrap_or_default();
        of_session + more > USES_MAX || self.due.len() + more > USES_MAX
    }

    /// A `CHANGE` has taken the last name of these; `event` is what the asker is told of it.
    pub(crate) fn unnamed(&mut self, asker: SessionId, inos: &[Ino], event: Option<u64>) {
        for ino in inos {
            self.unnamed.insert(*ino, Unnamed { asker, keepers: vec![asker], event, settled: false });
        }
    }

    /// Everybody but the asker has said whether they use these.
    pub(crate) fn settled(&mut self, inos: &[Ino]) {
        for ino in inos {
            if let Some(unnamed) = self.unnamed.get_mut(ino) {
                unnamed.settled = true;
                self.close(*ino);
            }
        }
    }

    /// A session has acknowledged an event.
    pub(crate) fn told(&mut self, session: SessionId, event: u64) {
        self.told_if(session, |waited| waited == event);
    }

    /// What a session has not acknowledged counts as acknowledged.
    pub(crate) fn told_all(&mut self, session: SessionId) {
        self.told_if(session, |_| true);
    }

    fn told_if(&mut self, session: SessionId, is_told: impl Fn(u64) -> bool) {
        let mut told = Vec::new();
        for (ino, unnamed) in self.unnamed.iter_mut().filter(|(_, unnamed)| unnamed.asker == session) {
            if unnamed.event.is_some_and(&is_told) {
                unnamed.event = None;
                told.push(*ino);
            }
        }
        told.into_iter().for_each(|ino| self.close(ino));
    }

    /// When all have said what they know, orphan rows are for those who do.
    fn close(&mut self, ino: Ino) {
        let is_closed = |unnamed: &&Unnamed| unnamed.settled && unnamed.event.is_none();
        if self.unnamed.get(&ino).filter(is_closed).is_some()
            && let Some(unnamed) = self.unnamed.remove(&ino)
        {
            self.released.extend(unnamed.keepers.into_iter().map(|keeper| (keeper, ino)));
            self.due.insert(ino);
        }
    }

    /// Whether not all have said yet whether they use an inode that has lost its last name.
    pub(crate) fn is_open(&self, ino: Ino) -> bool {
        self.unnamed.contains_key(&ino)
    }

    /// The asker ends: these sessions' orphan rows keep the inode now.
    pub(crate) fn keep(&mut self, ino: Ino, keepers: &[SessionId]) {
        if let Some(unnamed) = self.unnamed.get_mut(&ino) {
            unnamed.keepers = keepers.to_vec();
        }
    }

    pub(crate) fn end(&mut self, session: SessionId) {
        self.told_all(session);
        let used: Vec<Ino> =
            self.by.iter().filter(|(_, users)| users.contains(&session)).map(|(ino, _)| *ino).collect();
        used.into_iter().for_each(|ino| self.drop_use(session, ino));
        self.released.retain(|(of, _)| *of != session);
    }
}

/// What is said to who uses too many.
pub(crate) const TOO_MANY: VolumeError =
    VolumeError::Limit { what: "inodes in use without a name", limit: USES_MAX };

impl Volume {
    /// A session has done what events told it.
    pub(crate) fn acknowledge(self: &Arc<Self>, session: SessionId, events: &[u64]) {
        let now_ms = self.shared.uptime_ms();
        self.sharing.lock().acknowledge(session, events, now_ms);
        self.settle_uses();
    }

    /// A session's kernel knows these, though their names or cover are gone.
    ///
    /// # Errors
    /// There are too many: the connection is to be ended.
    pub(crate) fn add_uses(self: &Arc<Self>, session: SessionId, inos: &[u64]) -> Result<(), VolumeError> {
        if !inos.is_empty() {
            let mut sharing = self.sharing.lock();
            if sharing.uses.is_too_much(session, inos.len()) {
                return Err(TOO_MANY);
            }
            sharing.uses.add(session, inos);
            drop(sharing);
            self.settle_uses();
        }
        Ok(())
    }

    /// A session's kernel has forgotten these.
    ///
    /// # Errors
    /// More than can be looked at: the connection is to be ended. What the session uses is in its next claim.
    pub(crate) fn remove_uses(self: &Arc<Self>, session: SessionId, inos: &[u64]) -> Result<(), VolumeError> {
        let mut sharing = self.sharing.lock();
        if sharing.uses.due.len() + inos.len() > USES_MAX {
            return Err(TOO_MANY);
        }
        sharing.uses.remove(session, inos);
        drop(sharing);
        self.settle_uses();
        Ok(())
    }

    /// Inodes that a session uses and that have no name any more: a kernel keeps what it has once looked up, whether anybody needs it or not.
    pub(crate) fn nameless(&self, session: SessionId) -> Vec<u64> {
        let now_ms = self.shared.uptime_ms();
        self.state
            .lock()
            .sessions
            .get_mut(&session)
            .map(|session| session.nameless(now_ms))
            .unwrap_or_default()
    }

    /// Deletes rows that nobody uses any more, and makes it durable who uses the others; on a task of its own.
    pub(crate) fn settle_uses(self: &Arc<Self>) {
        {
            let mut sharing = self.sharing.lock();
            if sharing.uses.settling || sharing.uses.due.is_empty() {
                return;
            }
            sharing.uses.settling = true;
        }
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            while let Some(due) = volume.take_due() {
                let Err(error) = volume.settle(&due).await else { continue };
                volume.note(&error);
                volume.sharing.lock().uses.due.extend(&due);
                if !volume.is_usable() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
    }

    fn take_due(&self) -> Option<Vec<Ino>> {
        let mut sharing = self.sharing.lock();
        let uses = &mut sharing.uses;
        let due: Vec<Ino> = uses.due.iter().take(SLICE).copied().collect();
        for ino in &due {
            uses.due.remove(ino);
        }
        uses.settling = !due.is_empty();
        (!due.is_empty()).then_some(due)
    }

    async fn settle(self: &Arc<Self>, due: &[Ino]) -> Result<(), VolumeError> {
        let _turn = self.turn.lock().await;
        let db = self.db()?;
        let mut batch = Rows::new();
        let mut rows = Vec::new();
        for ino in due {
            let row = db.get(tables::inode(*ino)).await?;
            rows.push((*ino, row.map(|row| database::decode::<InodeRowMessage>(row, "inode")).transpose()?));
        }
        let (mut kept, mut gone, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
        let considered: Vec<(SessionId, Ino)>;
        {
            let (sharing, state) = (self.sharing.lock(), self.state.lock());
            let uses = &sharing.uses;
            let is_due = |(_, ino): &&(SessionId, Ino)| due.contains(ino) && !uses.unnamed.contains_key(ino);
            considered = uses.released.iter().filter(is_due).copied().collect();
            for (ino, row) in rows {
                let has: Vec<SessionId> = state
                    .sessions
                    .iter()
                    .filter(|(_, session)| session.orphans.contains(&ino))
                    .map(|(id, _)| *id)
                    .collect();
                let Some(row) = row else {
                    dropped.extend(has.into_iter().map(|id| (id, ino)));
                    continue;
                };
                if row.nlink > 0 {
                    continue;
                }
                let mut users = uses.by.get(&ino).cloned().unwrap_or_default();
                users.retain(|id| state.sessions.contains_key(id));
                let is_over = |id: &SessionId| considered.contains(&(*id, ino)) && !users.contains(id);
                dropped.extend(has.iter().filter(|id| is_over(id)).map(|id| (*id, ino)));
                let needed =
                    uses.unnamed.contains_key(&ino) || !users.is_empty() || has.iter().any(|id| !is_over(id));
                kept.extend(users.iter().filter(|id| !has.contains(id)).map(|id| (*id, ino)));
                if !needed {
                    gone.push((ino, row.allocated));
                }
            }
        }
        kept.iter().for_each(|(session, ino)| batch.put(tables::orphan(*session, *ino), vec![1]));
        dropped.iter().for_each(|(session, ino)| batch.delete(tables::orphan(*session, *ino)));
        gone.iter().for_each(|(ino, _)| batch.delete(tables::inode(*ino)));
        if !kept.is_empty() || !dropped.is_empty() || !gone.is_empty() {
            // Nobody waits for it to be durable.
            self.order(&db, batch).await?;
        }
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        for (ino, _) in &gone {
            sharing.grants.forget(*ino);
            sharing.uses.forget(*ino);
        }
        for released in considered {
            sharing.uses.released.remove(&released);
        }
        sharing.drive(now_ms);
        let mut state = self.state.lock();
        state.dead_bytes += gone.iter().map(|(_, allocated)| *allocated as i64).sum::<i64>();
        for (session, ino) in dropped {
            state.sessions.get_mut(&session).map(|session| session.orphans.remove(&ino));
        }
        for (session, ino) in kept {
            state.sessions.get_mut(&session).map(|session| session.orphans.insert(ino));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_session_uses_is_counted_and_bounded() {
        let mut uses = Uses::default();
        let (one, two) = (SessionId(1), SessionId(2));
        uses.add(one, &[5, 6, 6]);
        uses.add(two, &[6]);
        assert_eq!((uses.counts[&one], uses.counts[&two]), (2, 1));
        uses.forget(Ino(6));
        uses.remove(one, &[5, 5]);
        assert!(uses.counts.is_empty() && uses.by.is_empty());
        uses.due.clear();
        uses.add(one, &(0..USES_MAX as u64).collect::<Vec<_>>());
        assert!(uses.is_too_much(two, 1), "so many have to be looked at first");
        uses.due.clear();
        assert!(uses.is_too_much(one, 1) && !uses.is_too_much(two, 1));
        uses.end(one);
        assert!(uses.counts.is_empty());
    }
}
