//! Commits: a batch of records has its place in the order, exactly once, and is answered when it is durable, or when its
//! client keeps what it takes to bring it back.

mod arriving;
mod records;
mod tree;

use std::collections::HashSet;
use std::sync::Arc;

use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::grants::{Object, STRAY};
use hayloft_model::{ContentHash, Ino, SessionId, Usage, UsageDelta};
use hayloft_wire::{BatchCheck, Commit, Committed, RecordMessage};
use prost::Message;

use crate::commit::records::Subjects;
use crate::content::reserve::COMMIT_ROOM;
use crate::content::{Pending, Ready};
use crate::database::rows::Rows;
use crate::database::small;
use crate::database::{Db, tables};
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::order::entry::Doing;
use crate::session::ended::End;
use crate::volume::Volume;

/// Rows that are looked up at a time.
const LOOKUPS: usize = 16;

impl Volume {
    /// Applies the next batch of a session; answers one that is applied already when it is durable. Gives the answer, and
    /// what the client has to keep entries of.
    pub(crate) async fn commit(
        self: &Arc<Self>,
        id: SessionId,
        connection: u64,
        mut commit: Commit,
        mut pending: Pending,
    ) -> Result<(Committed, Vec<Ino>), VolumeError> {
        let mut records = pending.take_records(commit.sequence);
        let _room = pending.take_room();
        records.append(&mut commit.records);
        commit.records = records;
        // Before the turn is taken: packs of this commit are written while other changes go on.
        let pressing = pending.is_pressing();
        let ready = match pending.has_failed() || is_as_cut(&commit) {
            true => pending.finish(&commit.records).await,
            false => Err(VolumeError::BatchDamaged),
        };
        let (sequence, durable) = (commit.sequence, commit.durable);
        let reclaimed = match commit.restores != 0 && self.is_next(id, sequence)? {
            true => Some(self.reclaim(id, &commit.records).await?),
            false => None,
        };
        hayloft_crash::point("commit.content-durable");
        let turn = self.turn.lock().await;
        self.check_connection(id, connection)?;
        let packs = ready.as_ref().map_or(0, Ready::pack_bytes);
        let mut deleted = Vec::new();
        let ordered = match (self.is_next(id, sequence)?, ready) {
            (false, _) => self.ordered_before(),
            (true, Ok(ready)) => self.apply(id, commit, ready, pressing, &mut deleted).await,
            (true, Err(error)) => Err(error),
        };
        reclaimed.into_iter().for_each(|pass| self.restored(id, pass));
        if let Err(VolumeError::NotOwned(ino)) = ordered {
            // Nothing of it can ever be applied: others have changed what it builds on, or will.
            tracing::error!(volume = self.name, session = %id, %ino, "changes what it does not own: ended");
            self.end_session(&self.db()?, id, End::Lost).await?;
            return Err(VolumeError::NotOwned(ino));
        }
        let place = self.judge(id, ordered)?;
        drop(turn);
        hayloft_crash::point("commit.ordered");
        if place.early && !durable {
            self.forget_deleted(&deleted);
            return Ok((Committed { sequence, status: Some(self.status()) }, place.subjects));
        }
        if let Err(error) = self.durable(&place).await {
            // It counts as applied until the database is open again; if it was not, its packs are dead.
            let uncertain = VolumeError::Uncertain(Box::new(error));
            let mut state = self.state.lock();
            state.dead_bytes += packs as i64;
            if let Some(session) = state.sessions.get_mut(&id) {
                session.failed = Some(uncertain.code());
            }
            return Err(uncertain);
        }
        hayloft_crash::point("commit.durable");
        self.forget_deleted(&deleted);
        Ok((Committed { sequence, status: Some(self.status()) }, Vec::new()))
    }

    /// What is deleted, and comes back by itself or is durable, nobody owns any more. A batch that was lost comes again, from
    /// who owns it still.
    fn forget_deleted(&self, deleted: &[Ino]) {
        let mut sharing = self.sharing.lock();
        deleted.iter().for_each(|ino| sharing.grants.forget(*ino));
    }

    /// A batch that was applied before is durable when all that was is.
    fn ordered_before(&self) -> Result<Ordered, VolumeError> {
        let uncertain = |error| VolumeError::Uncertain(Box::new(error));
        self.db().map(|db| self.order.last(db)).map_err(uncertain)
    }

    /// Remembers how a batch has ended. While nobody knows whether it was applied, nothing else is said
    /// of it: the client would take any other failure for a refusal, and use its number for another batch.
    fn judge(&self, id: SessionId, applied: Result<Ordered, VolumeError>) -> Result<Ordered, VolumeError> {
        let mut state = self.state.lock();
        if applied.as_ref().is_err_and(VolumeError::wants_room) {
            state.wants_room = true;
            self.shared.room_wanted.notify_one();
        }
        let Some(session) = state.sessions.get_mut(&id) else { return applied };
        let judged = applied.map_err(|error| match error {
            error @ VolumeError::Uncertain(_) => error,
            error if session.uncertain => VolumeError::Uncertain(Box::new(error)),
            error => error,
        });
        session.uncertain |= matches!(judged, Err(VolumeError::Uncertain(_)));
        session.failed = judged.as_ref().err().map(VolumeError::code);
        judged
    }

    /// Whether the batch is the next one; `false` when it is applied already.
    fn is_next(&self, id: SessionId, sequence: u64) -> Result<bool, VolumeError> {
        let state = self.state.lock();
        let session = state.sessions.get(&id).ok_or(VolumeError::SessionEnded(id))?;
        let last = session.row.last_sequence;
        match session.failed {
            _ if sequence == last + 1 => Ok(true),
            _ if sequence <= last && sequence > 0 => Ok(false),
            Some(code) => Err(VolumeError::After(code)),
            None => Err(VolumeError::Gap { sequence, last }),
        }
    }

    async fn apply(
        self: &Arc<Self>,
        id: SessionId,
        commit: Commit,
        ready: Ready,
        pressing: bool,
        deleted: &mut Vec<Ino>,
    ) -> Result<Ordered, VolumeError> {
        let db = self.db()?;
        let delta = UsageDelta { bytes: commit.bytes, inodes: commit.inodes };
        let restores = SessionId(commit.restores);
        if commit.restores != 0 {
            self.check_estate(restores, &commit.records).await?;
        }
        let mut batch = Rows::new();
        let mut subjects = self.put_rows(&db, &mut batch, id, (&commit.records, &ready.small)).await?;
        self.touch_directories(&db, &mut batch, &commit.records).await?;
        let doing =
            Doing { session: id, sequence: commit.sequence, usage: delta, waits: commit.restores != 0 };
        match self.check_grants(id, &subjects, &commit.records) {
            Err(VolumeError::NotOwned(ino)) if commit.restores != 0 => {
                return Err(VolumeError::Contradicted(ino));
            }
            checked => checked?,
        }
        self.check_numbers(&db, id, &commit.records).await?;
        tree::check(&db, (&self.packed, &subjects.taken), &mut subjects.sound).await?;
        let usage = match pressing {
            // It was accepted before it was known that there is no room, and somebody else needs what it is about.
            true => self.state.lock().usage.after(delta),
            false => self.check_usage(delta)?,
        };
        subjects.sound.usage(delta)?;
        // Deleting has to be possible on a full store: it may use the reserve.
        if delta.bytes > 0 || delta.inodes > 0 || !ready.places.is_empty() {
            // The rows are written twice soon: to the log, and to a table file.
            let room = 2 * (ready.row_bytes + subjects.row_bytes) + COMMIT_ROOM;
            let reserve = &self.shared.reserve;
            if delta.bytes < 0 || pressing { reserve.admit_to_free(room)? } else { reserve.admit(room)? }
        }
        self.check_content(&db, &subjects.named, &ready).await?;
        for (hash, place) in &ready.places {
            batch.put(tables::chunk(*hash), place.encode());
        }
        for (pack, size) in &ready.packs {
            batch.put(tables::pack(*pack), self.homes.row(*size).encode());
        }
        let orphans: HashSet<Ino> = commit.orphans.iter().map(|ino| Ino(*ino)).collect();
        let forgotten = self.put_session(&mut batch, id, &commit, usage, &subjects, &orphans)?;
        self.sharing.lock().strike(&commit.records)?;
        ready.flying.iter().for_each(|flying| flying.will_be_named());
        let place = match self.order_entry(&db, batch, doing).await {
            Ok(place) => place,
            Err(error) => {
                self.state.lock().dead_bytes += ready.pack_bytes() as i64;
                return Err(VolumeError::Uncertain(Box::new(error)));
            }
        };
        self.applied(id, commit.sequence, usage, delta, &subjects, &orphans, &ready);
        {
            let mut sharing = self.sharing.lock();
            sharing.estates.forget(restores);
            sharing.forgot(id, &forgotten);
            sharing.uses.look_at(&orphans);
        }
        *deleted = subjects.deleted;
        self.settle_uses();
        Ok(place)
    }

    /// Everything that changes must be the session's own: owned before, or brought by it. A file is covered by its
    /// home.
    fn check_grants(
        &self,
        id: SessionId,
        subjects: &Subjects,
        records: &[RecordMessage],
    ) -> Result<(), VolumeError> {
        let read_only = self.state.lock().sessions.get(&id).is_none_or(|session| session.row.read_only);
        if read_only && !records.is_empty() {
            return Err(VolumeError::Invalid("a change by a read-only session"));
        }
        let mut sharing = self.sharing.lock();
        let grants = &mut sharing.grants;
        for dir in &subjects.directories {
            if grants.owner(*dir) != Some(id) && !grants.adopt(id, Object::Directory(*dir)) {
                return Err(VolumeError::NotOwned(*dir));
            }
        }
        if let Some(slot) = subjects.slots.iter().find(|slot| grants.owner(**slot) != Some(id)) {
            return Err(VolumeError::NotOwned(slot.or_directory()));
        }
        for (ino, home) in subjects.files.iter().copied() {
            let own = grants.owner(ino) == Some(id);
            // Of one that it owns already, this notes the home.
            let covered = match home {
                _ if own => grants.adopt(id, Object::File { ino, home }),
                STRAY => grants.adopt(id, Object::File { ino, home }),
                // Made there: it is its maker's by itself.
                home if grants.is_split(home) => grants.adopt(id, Object::File { ino, home }),
                home => grants.owner(home) == Some(id),
            };
            if !covered {
                return Err(VolumeError::NotOwned(ino));
            }
        }
        Ok(())
    }

    /// The usage after the batch; refused when it would grow over the quota.
    pub(crate) fn check_usage(&self, delta: UsageDelta) -> Result<Usage, VolumeError> {
        let usage = self.state.lock().usage.after(delta);
        let registered = self.registered.lock();
        let over = |used: u64, quota: u64, change: i64| quota != 0 && change > 0 && used > quota;
        if over(usage.bytes, registered.quota_bytes, delta.bytes) {
            return Err(VolumeError::Quota { what: "bytes" });
        }
        if over(usage.inodes, registered.quota_inodes, delta.inodes) {
            return Err(VolumeError::Quota { what: "inodes" });
        }
        Ok(usage)
    }

    /// All content that the rows name must have come with this commit or be stored already.
    async fn check_content(
        &self,
        db: &Db,
        named: &HashSet<ContentHash>,
        ready: &Ready,
    ) -> Result<(), VolumeError> {
        let unknown: Vec<ContentHash> = {
            let state = self.state.lock();
            let is_known = |hash: &&ContentHash| {
                ready.places.contains_key(hash) || state.known.contains(hash) || small::is_lost(hash)
            };
            named.iter().filter(|hash| !is_known(hash)).copied().collect()
        };
        stream::iter(unknown.iter().copied())
            .map(|hash| async move {
                match db.get(tables::chunk(hash)).await? {
                    Some(_) => Ok(()),
                    None => Err(VolumeError::NoContent(hash)),
                }
            })
            .buffer_unordered(LOOKUPS)
            .try_collect::<()>()
            .await?;
        let mut state = self.state.lock();
        unknown.into_iter().for_each(|hash| state.remember(hash));
        Ok(())
    }

    /// Adds what else goes with a batch; gives the outcomes of changes that it deletes.
    fn put_session(
        &self,
        batch: &mut Rows,
        id: SessionId,
        commit: &Commit,
        usage: Usage,
        subjects: &Subjects,
        orphans: &HashSet<Ino>,
    ) -> Result<Vec<u64>, VolumeError> {
        let (sharing, state) = (self.sharing.lock(), self.state.lock());
        let session = state.sessions.get(&id).ok_or(VolumeError::SessionEnded(id))?;
        let forgotten = sharing.forgotten.get(&id).cloned().unwrap_or_default();
        forgotten.iter().for_each(|request| batch.delete(tables::change(id, *request)));
        let row = tables::SessionRow { last_sequence: commit.sequence, ..session.row.clone() };
        batch.put_unnoted(tables::session(id), row.encode_to_vec());
        let row = tables::VolumeRow { bytes: usage.bytes, inodes: usage.inodes, ..state.volume_row() };
        batch.put_unnoted(tables::VOLUME, row.encode_to_vec());
        for ino in subjects.settled.iter().filter(|ino| session.orphans.contains(ino)) {
            batch.delete(tables::orphan(id, *ino));
        }
        for ino in orphans {
            batch.put(tables::orphan(id, *ino), vec![1]);
        }
        for (ino, users) in &subjects.kept {
            users.iter().for_each(|user| batch.put(tables::orphan(*user, *ino), vec![1]));
        }
        Ok(forgotten)
    }

    #[allow(clippy::too_many_arguments)] // all that a batch consists of
    fn applied(
        &self,
        id: SessionId,
        sequence: u64,
        usage: Usage,
        delta: UsageDelta,
        subjects: &Subjects,
        orphans: &HashSet<Ino>,
        ready: &Ready,
    ) {
        let mut state = self.state.lock();
        state.usage = usage;
        state.commits += 1;
        state.packs += ready.packs.len() as u64;
        state.pack_bytes += ready.pack_bytes();
        state.dead_bytes = (state.dead_bytes + ready.content_bytes as i64 - delta.bytes).max(0);
        state.dead_rows += subjects.deleted.len() as u64;
        ready.places.keys().for_each(|hash| state.remember(*hash));
        if let Some(touched) = &mut state.touched {
            touched.extend(&subjects.named);
            touched.extend(ready.places.keys());
        }
        for (ino, users) in &subjects.kept {
            for user in users {
                state.sessions.get_mut(user).map(|session| session.orphans.insert(*ino));
            }
        }
        if let Some(session) = state.sessions.get_mut(&id) {
            session.row.last_sequence = sequence;
            subjects.settled.iter().for_each(|ino| {
                session.orphans.remove(ino);
            });
            session.orphans.extend(orphans);
        }
    }
}

/// Whether the batch is the one that its client has cut from its log.
fn is_as_cut(commit: &Commit) -> bool {
    let mut check = BatchCheck::default();
    check.add(&commit.records);
    commit.check == Some(check.of(commit))
}
