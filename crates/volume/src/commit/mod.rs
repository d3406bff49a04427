//! Commits: a batch of records has its place in the order, exactly once, and is answered when it is durable, or when its
//! client keeps what it takes to bring it back.

mod arriving;
mod tree;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::grants::{Object, STRAY};
use hayloft_model::slot::Width;
use hayloft_model::{
    BlockRef, Content, ContentHash, FileKind, Ino, Name, Record, SessionId, Usage, UsageDelta, sound,
};
use hayloft_wire::{BatchCheck, Commit, Committed, InodeRowMessage, RecordMessage, record_message::Body};
use prost::Message;

use crate::commit::arriving::Arriving;
use crate::content::reserve::COMMIT_ROOM;
use crate::content::{Pending, Ready};
use crate::database::rows::Rows;
use crate::database::small::{self, SmallPlace};
use crate::database::tables;
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::order::entry::Doing;
use crate::session::Session;
use crate::session::ended::End;
use crate::volume::Volume;

/// Rows that are looked up at a time.
const LOOKUPS: usize = 16;

/// What the records of a batch are about, besides their rows.
#[derive(Default)]
pub(crate) struct Subjects {
    /// Directories of which names or the row change.
    directories: HashSet<Ino>,
    /// How many names of which are deleted.
    taken: HashMap<Ino, usize>,
    /// Slots of split directories in which names change.
    slots: HashSet<Ino>,
    /// Files of which the row changes, with their homes.
    files: Vec<(Ino, Ino)>,
    /// Inodes that are deleted.
    deleted: Vec<Ino>,
    /// Inodes that have to stay, without a name, since these sessions use them.
    kept: Vec<(Ino, Vec<SessionId>)>,
    /// Inodes that are put with or without links, or deleted.
    settled: Vec<Ino>,
    /// Content that the rows name.
    named: HashSet<ContentHash>,
    /// What was looked at to see that the rows can be.
    sound: sound::Batch,
    /// Bytes of rows.
    pub(crate) row_bytes: u64,
}

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

    /// Adds the records' rows to the batch, and gathers what they are about.
    pub(crate) async fn put_records(
        &self,
        db: &Db,
        batch: &mut Rows,
        id: SessionId,
        records: &[RecordMessage],
    ) -> Result<Subjects, VolumeError> {
        let mut subjects = self.put_rows(db, batch, id, (records, &HashMap::new())).await?;
        tree::check(db, (&self.packed, &subjects.taken), &mut subjects.sound).await?;
        Ok(subjects)
    }

    /// As [`Volume::put_records`]; the content of some lies in packs.
    async fn put_rows(
        &self,
        db: &Db,
        batch: &mut Rows,
        id: SessionId,
        (records, small): (&[RecordMessage], &HashMap<usize, SmallPlace>),
    ) -> Result<Subjects, VolumeError> {
        let mut subjects = Subjects { sound: sound::Batch::new(sound::NUMBERS), ..Subjects::default() };
        let split = self.sharing.lock().split_in(records);
        let mut users = self.other_users(id, records);
        let mut arriving = Arriving::of(records);
        for (at, message) in records.iter().enumerate() {
            // The conversion is the check; what is stored is the message.
            let record = Record::try_from(message)?;
            subjects.sound.add(&record)?;
            match (&record, message.body.as_ref()) {
                (Record::PutInode(ino, row), Some(Body::PutInode(message))) => {
                    let row_bytes = match (small.get(&at), &row.content) {
                        (Some(place), _) => {
                            let (inline, placed) = (None, Some(place.encode()));
                            InodeRowMessage { inline, placed, ..message.clone() }.encode_to_vec()
                        }
                        (None, Content::LeftOut) => with_data(db, message).await?,
                        (None, _) => message.encode_to_vec(),
                    };
                    let row_bytes = Bytes::from(row_bytes);
                    subjects.row_bytes += row_bytes.len() as u64;
                    arriving.file(*ino, row.parent, &row_bytes);
                    batch.put(tables::inode(*ino), row_bytes);
                    subjects.settled.push(*ino);
                    match row.kind() {
                        FileKind::Directory => {
                            subjects.directories.insert(*ino);
                        }
                        _ => subjects.files.push((*ino, row.parent)),
                    }
                    if let Content::Blocks(blocks) = &row.content {
                        subjects.name(blocks);
                    }
                }
                (Record::DeleteInode(ino), _) => {
                    // Page rows of an inode that is gone are dropped by the sweep: numbers never return.
                    subjects.settled.push(*ino);
                    subjects.deleted.push(*ino);
                    let users = users.remove(ino).unwrap_or_default();
                    // To read a row costs far more than to delete it.
                    let row = match users.is_empty() {
                        true => None,
                        false => db.get(tables::inode(*ino)).await?,
                    };
                    match row {
                        Some(row) => {
                            let mut row = database::decode::<InodeRowMessage>(row, "inode")?;
                            (row.nlink, row.parent) = (0, STRAY.0);
                            batch.put(tables::inode(*ino), row.encode_to_vec());
                            subjects.kept.push((*ino, users));
                        }
                        None => batch.delete(tables::inode(*ino)),
                    }
                }
                (Record::PutDentry(parent, name, dentry), Some(Body::PutDentry(put))) => {
                    let row =
                        Bytes::from(put.dentry.as_ref().map(Message::encode_to_vec).unwrap_or_default());
                    arriving.name(*parent, name, dentry, &row);
                    subjects.row_bytes += (row.len() + name.as_bytes().len()) as u64;
                    let key = tables::dentry(*parent, name.as_bytes());
                    subjects.put_name(batch, (*parent, name, &split), key, Some(row));
                }
                (Record::DeleteDentry(parent, name), _) => {
                    let key = tables::dentry(*parent, name.as_bytes());
                    subjects.put_name(batch, (*parent, name, &split), key, None);
                }
                (Record::PutPage(ino, page, blocks), Some(Body::PutPage(put))) => {
                    subjects.row_bytes += put.blocks.len() as u64;
                    batch.put(tables::page(*ino, *page), Bytes::copy_from_slice(&put.blocks));
                    subjects.name(blocks);
                }
                (Record::DeletePages(ino, from), _) => {
                    let snapshot = db.snapshot()?;
                    let mut scan = database::scan_range(
                        &snapshot,
                        tables::page(*ino, *from),
                        tables::page(*ino, u64::MAX),
                    )
                    .await?;
                    while let Some(found) = scan.next().await? {
                        batch.delete(found.key);
                    }
                }
                _ => return Err(VolumeError::Invalid("a record of two kinds")),
            }
        }
        subjects.row_bytes += arriving.pack(&self.packed, batch);
        Ok(subjects)
    }

    /// Other sessions that use inodes which are deleted, by these.
    fn other_users(&self, id: SessionId, records: &[RecordMessage]) -> HashMap<Ino, Vec<SessionId>> {
        let (sharing, state) = (self.sharing.lock(), self.state.lock());
        let with_orphans =
            |(other, session): &(&SessionId, &Session)| **other != id && !session.orphans.is_empty();
        let others: Vec<(&SessionId, &Session)> = state.sessions.iter().filter(with_orphans).collect();
        let mut all = HashMap::new();
        for message in records {
            let Some(Body::DeleteInode(ino)) = message.body else { continue };
            let ino = Ino(ino);
            let mut users = sharing.uses.others(id, ino);
            users.retain(|user| state.sessions.contains_key(user));
            for (other, session) in &others {
                if session.orphans.contains(&ino) && !users.contains(other) {
                    users.push(**other);
                }
            }
            if !users.is_empty() {
                all.insert(ino, users);
            }
        }
        all
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

impl Subjects {
    /// A name changes: in its directory, or in a slot of that.
    fn put_name(
        &mut self,
        batch: &mut Rows,
        (dir, name, split): (Ino, &Name, &HashMap<Ino, Width>),
        key: Bytes,
        value: Option<Bytes>,
    ) {
        if let Some(width) = split.get(&dir) {
            let slot = dir.slot(name.as_bytes(), *width);
            self.slots.insert(slot);
            return batch.set_in(slot, key, value);
        }
        self.directories.insert(dir);
        match value {
            Some(value) => batch.put(key, value),
            None => {
                *self.taken.entry(dir).or_default() += 1;
                batch.delete(key);
            }
        }
    }

    fn name(&mut self, blocks: &[Option<BlockRef>]) {
        self.named.extend(blocks.iter().flatten().map(|block| block.hash));
    }
}

/// Whether the batch is the one that its client has cut from its log.
fn is_as_cut(commit: &Commit) -> bool {
    let mut check = BatchCheck::default();
    check.add(&commit.records);
    commit.check == Some(check.of(commit))
}

/// A row of which the data was left out, with the data that is stored, or where that is.
async fn with_data(db: &Db, message: &InodeRowMessage) -> Result<Vec<u8>, VolumeError> {
    let stored = (**db).get(tables::inode(Ino(message.ino))).await?;
    let stored = stored.ok_or(VolumeError::Invalid("data was left out of a row that is not there"))?;
    let InodeRowMessage { inline, placed, .. } = database::decode(stored, "inode")?;
    Ok(InodeRowMessage { inline, placed, left_out: false, ..message.clone() }.encode_to_vec())
}
