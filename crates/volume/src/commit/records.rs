//! The records of a batch: what they put into the database, and what they are about.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use hayloft_model::grants::STRAY;
use hayloft_model::slot::Width;
use hayloft_model::{BlockRef, Content, ContentHash, FileKind, Ino, Name, Record, SessionId, sound};
use hayloft_wire::{InodeRowMessage, RecordMessage, record_message::Body};
use prost::Message;

use crate::commit::arriving::Arriving;
use crate::commit::tree;
use crate::database::rows::Rows;
use crate::database::small::SmallPlace;
use crate::database::{self, Db, tables};
use crate::error::VolumeError;
use crate::session::Session;
use crate::volume::Volume;

/// What the records of a batch are about, besides their rows.
#[derive(Default)]
pub(crate) struct Subjects {
    /// Directories of which names or the row change.
    pub(super) directories: HashSet<Ino>,
    /// How many names of which are deleted.
    pub(super) taken: HashMap<Ino, usize>,
    /// Slots of split directories in which names change.
    pub(super) slots: HashSet<Ino>,
    /// Files of which the row changes, with their homes.
    pub(super) files: Vec<(Ino, Ino)>,
    /// Inodes that are deleted.
    pub(super) deleted: Vec<Ino>,
    /// Inodes that have to stay, without a name, since these sessions use them.
    pub(super) kept: Vec<(Ino, Vec<SessionId>)>,
    /// Inodes that are put with or without links, or deleted.
    pub(super) settled: Vec<Ino>,
    /// Content that the rows name.
    pub(super) named: HashSet<ContentHash>,
    /// What was looked at to see that the rows can be.
    pub(super) sound: sound::Batch,
    /// Bytes of rows.
    pub(crate) row_bytes: u64,
}

impl Volume {
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
    pub(super) async fn put_rows(
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

/// A row of which the data was left out, with the data that is stored, or where that is.
async fn with_data(db: &Db, message: &InodeRowMessage) -> Result<Vec<u8>, VolumeError> {
    let stored = (**db).get(tables::inode(Ino(message.ino))).await?;
    let stored = stored.ok_or(VolumeError::Invalid("data was left out of a row that is not there"))?;
    let InodeRowMessage { inline, placed, .. } = database::decode(stored, "inode")?;
    Ok(InodeRowMessage { inline, placed, left_out: false, ..message.clone() }.encode_to_vec())
}
