//! Directories that are split, and whole again (`hayloft_model::slot`): what has to be durable, and written, in between.

use std::collections::HashMap;
use std::sync::Arc;

use hayloft_model::slot::Width;
use hayloft_model::{Ino, Timestamp};
use hayloft_wire::record_message::Body;
use hayloft_wire::{Changed, InodeRowMessage, RecordMessage};
use prost::Message;

use crate::database::Db;
use crate::database::rows::Rows;
use crate::database::tables;
use crate::error::VolumeError;
use crate::sharing::Sharing;
use crate::sharing::objects::row_of;
use crate::sharing::pass::Pass;
use crate::volume::Volume;

impl Volume {
    /// A directory is split, and nobody holds anything of it. What was changed in it as a whole is durable before it is changed
    /// by slots: entries of these do not build on it. From now on it does not look as if it never had a name.
    pub(super) async fn split(self: &Arc<Self>, pass: Pass, dir: Ino) -> Result<Changed, VolumeError> {
        {
            let _turn = self.turn.lock().await;
            let db = self.db()?;
            if let Some((mut row, _)) = row_of(&*db.snapshot()?, dir).await? {
                row.next_cookie += 1;
                let mut batch = Rows::new();
                batch.put(tables::inode(dir), row.encode_to_vec());
                self.order(&db, batch).await?;
            }
        }
        self.all_durable().await?;
        self.sharing.lock().counts.splits += 1;
        pass.finish();
        Ok(Changed { split: true, ..Changed::default() })
    }

    /// Directories in which nothing has been done by slots for a while are whole again.
    pub(crate) fn rest(&self) {
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        sharing.grants.rest();
        sharing.drive(now_ms);
    }

    /// Directories that are whole again get the present time, since it was shown as theirs, before anybody reads their rows; and
    /// what was done by slots is durable before anything builds on it as on the whole.
    pub(super) async fn settle_whole(self: &Arc<Self>) -> Result<(), VolumeError> {
        if self.sharing.lock().whole.is_empty() {
            return Ok(());
        }
        let _one = self.settling.lock().await;
        let dirs: Vec<Ino> = self.sharing.lock().whole.iter().copied().collect();
        self.all_durable().await?;
        {
            let _turn = self.turn.lock().await;
            let db = self.db()?;
            let mut batch = Rows::new();
            for dir in &dirs {
                if let Some(row) = self.touched(&db, *dir, Timestamp::default()).await? {
                    batch.put(tables::inode(*dir), row.encode_to_vec());
                }
            }
            self.order(&db, batch).await?;
        }
        self.sharing.lock().whole.retain(|dir| !dirs.contains(dir));
        Ok(())
    }

    /// The row of a directory that is changed now, or at a later time that a file there says. The caller has the turn.
    async fn touched(
        self: &Arc<Self>,
        db: &Db,
        dir: Ino,
        latest: Timestamp,
    ) -> Result<Option<InodeRowMessage>, VolumeError> {
        let Some((_, mut row)) = row_of(&*db.snapshot()?, dir).await? else { return Ok(None) };
        let time = self.shared.now().max(row.ctime.next()).max(latest);
        (row.mtime, row.ctime) = (time, time);
        Ok(Some(InodeRowMessage::from_row(dir, &row)))
    }

    /// Adds the rows of directories in which a batch changes names, and which it does not bring: they are split, or what
    /// the batch restores was done while they were. They are not noted: what has been lost of them is the time. The caller
    /// has the turn.
    pub(crate) async fn touch_directories(
        self: &Arc<Self>,
        db: &Db,
        batch: &mut Rows,
        records: &[RecordMessage],
    ) -> Result<(), VolumeError> {
        for (dir, latest) in named_only(records) {
            let row = self.touched(db, dir, latest).await?.ok_or(VolumeError::NoInode(dir))?;
            if row.nlink == 0 {
                return Err(VolumeError::NotOwned(dir));
            }
            batch.put_unnoted(tables::inode(dir), row.encode_to_vec());
        }
        Ok(())
    }
}

impl Sharing {
    /// Split directories in which records change names, and in how many slots.
    pub(crate) fn split_in(&mut self, records: &[RecordMessage]) -> HashMap<Ino, Width> {
        let dirs = records.iter().filter_map(dir_of);
        let width = |dir| self.grants.width(dir).map(|width| (dir, width));
        let split: HashMap<Ino, Width> = dirs.filter_map(width).collect();
        split.keys().for_each(|dir| self.grants.works_by_slots(*dir));
        split
    }
}

fn dir_of(record: &RecordMessage) -> Option<Ino> {
    match record.body.as_ref()? {
        Body::PutDentry(put) => Some(Ino(put.parent)),
        Body::DeleteDentry(delete) => Some(Ino(delete.parent)),
        _ => None,
    }
}

/// Directories of which names are changed, and the row is neither changed nor deleted; with the latest change of a file there.
fn named_only(records: &[RecordMessage]) -> HashMap<Ino, Timestamp> {
    let mut dirs: HashMap<Ino, Timestamp> =
        records.iter().filter_map(dir_of).map(|dir| (dir, Timestamp::default())).collect();
    for record in records {
        match &record.body {
            Some(Body::PutInode(row)) => {
                dirs.remove(&Ino(row.ino));
                if let Some(latest) = dirs.get_mut(&Ino(row.parent)) {
                    *latest = (*latest).max(row.changed());
                }
            }
            Some(Body::DeleteInode(ino)) => drop(dirs.remove(&Ino(*ino))),
            _ => {}
        }
    }
    dirs
}
