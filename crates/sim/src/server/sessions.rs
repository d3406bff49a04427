//! Sessions end: by themselves, or because others wait for them.

use super::opening::REPLACED_FOR;
use super::*;

impl Live {
    /// Whether it was not heard of for its lease; and as long as another server may go on that had the volume before.
    fn is_silent(&self, now: u64, counts_at_once: bool) -> bool {
        let grace = if self.may_bring && !counts_at_once { REPLACED_FOR } else { 0 };
        now - self.heard > LEASE + grace
    }
}

impl World {
    /// Whether a session does not do what it was told, for longer than its lease, and ships nothing for it either.
    fn is_stuck(&mut self, session: SessionId) -> bool {
        let now = self.now;
        let last = self.server.stored.sessions.get(&session).map(|stored| stored.last).unwrap_or_default();
        let Some(live) = self.server.live.get_mut(&session) else { return false };
        let Some(event) = live.sent.first().copied() else { return false };
        let late = live.late.filter(|(seen, ..)| *seen == event).unwrap_or((event, now, last));
        live.late = Some(late);
        let (_, since, batch) = late;
        now - since > LEASE && (now - live.worked > LEASE || last.0 - batch.0 > BATCHES_MAX)
    }

    /// Sessions that somebody waits for, and that have been silent for longer than their lease, or stuck.
    pub(crate) fn check_sessions(&mut self) {
        if !self.server.up {
            return;
        }
        let now = self.now;
        // An answer that waits for all claims waits for those who have not.
        let replays = !self.server.replays.is_empty() || !self.server.early.is_empty();
        let unclaimed =
            self.server.live.iter().filter(|(_, live)| replays && live.awaited).map(|(session, _)| *session);
        let mut waited_for = self.server.grants.waited_for();
        waited_for.extend(self.waited_for_to_hear());
        waited_for.extend(unclaimed);
        let never_overdue = self.is_broken(Rule::NeverOverdue);
        let counts_at_once = self.is_broken(Rule::CountFromOpening);
        let late: Vec<SessionId> = waited_for
            .into_iter()
            .filter(|session| {
                let is_stuck = !never_overdue && self.is_stuck(*session);
                is_stuck
                    || self.server.live.get(session).is_some_and(|live| live.is_silent(now, counts_at_once))
            })
            .collect();
        for session in late {
            trace!(self, "{session} is evicted");
            self.end_session(session);
        }
        self.pump();
    }

    pub(crate) fn end_session(&mut self, session: SessionId) {
        let last = self.server.stored.sessions.get(&session).map(|stored| stored.last);
        let ended = last.map(|last| Put::Ended(session, last));
        self.write(ended.into_iter().chain([Put::Session(session, None)]).collect(), None);
        if !self.flush_now() {
            return;
        }
        let verdict = self.reference.ended(session);
        self.judge(&format!("{session} ends"), verdict);
        let live = self.server.live.remove(&session);
        let owned = self.server.grants.owned_by(session);
        self.server.estates.leave(session, owned);
        self.server.unanswered.retain(|(of, _), _| *of != session);
        self.server.tickets.retain(|_, pending| pending.session != session || pending.executed);
        // What it had without a name goes first: who waits to read that would be given it.
        self.collect();
        self.server.grants.end(session);
        self.collect();
        if let Some(connection) = live.and_then(|live| live.connection) {
            self.send_to_client(connection, ToClient::Ended { last });
        }
        self.pump();
    }

    /// Sessions in the store.
    pub(crate) fn sessions(&self) -> Vec<SessionId> {
        self.server.stored.sessions.keys().copied().collect()
    }

    /// Deletes inodes that have neither a name nor a user.
    pub(super) fn collect(&mut self) {
        let server = &mut self.server;
        let rows = server.stored.rows.inodes.iter();
        let unnamed: Vec<Ino> = rows.filter(|(_, row)| row.nlink == 0).map(|(ino, _)| *ino).collect();
        let unused: Vec<Ino> = unnamed.into_iter().filter(|ino| !server.is_used(*ino)).collect();
        if !unused.is_empty() {
            unused.iter().for_each(|ino| server.grants.forget(*ino));
            let puts = unused.into_iter().map(|ino| Put::Row(Record::DeleteInode(ino))).collect();
            self.write(puts, None);
        }
    }
}
