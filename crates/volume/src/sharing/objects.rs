//! Requests about single objects: an inode's row, and owning it.

use std::sync::Arc;

use hayloft_model::grants::{Grant, Object, Outcome, Request};
use hayloft_model::{Ino, InodeRow, SessionId};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Acquire, Acquired, InodeAnswer, InodeRowMessage, RecordMessage, record_message};

use crate::database::tables;
use crate::database::{self, DbSnapshot};
use crate::error::VolumeError;
use crate::replies::Replies;
use crate::volume::Volume;

impl Volume {
    /// Sends an inode's row.
    pub(crate) async fn fetch_inode(
        self: &Arc<Self>,
        session: SessionId,
        ino: Ino,
        replies: &Replies,
        (connection, request): (u64, u64),
    ) -> Result<(), VolumeError> {
        self.all_claimed().await?;
        loop {
            let stored = row_of(&*self.db()?.snapshot()?, ino).await?;
            let object = Object::of(ino, &stored.ok_or(VolumeError::NoInode(ino))?.1);
            let mut pass = self.request(session, Request::Read(vec![object]))?;
            pass.ready().await?;
            let stored = row_of(&*self.db()?.snapshot()?, ino).await?;
            let (message, row) = stored.ok_or(VolumeError::NoInode(ino))?;
            if Object::of(ino, &row) != object {
                // It was moved meanwhile: another directory covers it.
                continue;
            }
            self.await_stuck([ino]).await?;
            {
                // Together: a recall is in the stream before this, or behind it.
                let mut sharing = self.sharing.lock();
                let own = matches!(object, Object::Directory(_))
                    && sharing.grants.held(session, ino) == Some(Grant::Own);
                // As long as the request is under way it is not made whole.
                let split = sharing.grants.is_split(ino);
                let entries = self.entries_for(&sharing, (session, connection), [ino]);
                let unheard = sharing.tell_unheard(session, ino);
                let answer = InodeAnswer { inode: Some(message), own, split, unheard };
                replies.push_with(request, Answer::Inode(answer), entries);
            }
            pass.finish();
            return Ok(());
        }
    }

    /// Makes a session the owner of an object, unless others use it as well.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        session: SessionId,
        acquire: &Acquire,
        replies: &Replies,
        request: u64,
    ) -> Result<(), VolumeError> {
        if self.state.lock().sessions.get(&session).is_none_or(|found| found.row.read_only) {
            return Err(VolumeError::Invalid("a read-only session owns nothing"));
        }
        let asked = acquire.object.as_ref().ok_or(VolumeError::Invalid("no object"))?;
        let asked = Object::try_from(asked)?;
        let ino = asked.ino();
        self.all_claimed().await?;
        if ino.of_slot().is_some() {
            return self.acquire_slot(session, asked, replies, request).await;
        }
        loop {
            let stored = row_of(&*self.db()?.snapshot()?, ino).await?;
            let object = stored.map_or(asked, |(_, row)| Object::of(ino, &row));
            let mut pass = self.request(session, Request::Own(object))?;
            let owned = pass.ready().await? == Outcome::Granted;
            if owned {
                let stored = row_of(&*self.db()?.snapshot()?, ino).await?;
                let stored = stored.map(|(message, row)| (message, Object::of(ino, &row)));
                let Some((message, _)) = stored.as_ref().filter(|(_, now)| *now == object) else {
                    // It has another home meanwhile, or is gone.
                    self.sharing.lock().grants.forget(ino);
                    drop(pass);
                    if stored.is_none() {
                        return Err(VolumeError::NoInode(ino));
                    }
                    continue;
                };
                let body = Some(record_message::Body::PutInode(message.clone()));
                self.await_stuck([ino]).await?;
                if !self.tell_own(session, vec![RecordMessage { body }], &[object]) {
                    // The session has a new connection, and asks again.
                    return Ok(());
                }
            }
            replies.push(request, Answer::Acquired(Acquired { owned }));
            pass.finish();
            return Ok(());
        }
    }

    /// Makes a session the owner of a slot, unless its directory is not split.
    async fn acquire_slot(
        self: &Arc<Self>,
        session: SessionId,
        slot: Object,
        replies: &Replies,
        request: u64,
    ) -> Result<(), VolumeError> {
        let mut pass = self.request(session, Request::Own(slot))?;
        let owned = pass.ready().await? == Outcome::Granted;
        if owned {
            self.await_stuck([slot.ino()]).await?;
            if !self.tell_own(session, Vec::new(), &[slot]) {
                return Ok(());
            }
        }
        replies.push(request, Answer::Acquired(Acquired { owned }));
        pass.finish();
        Ok(())
    }
}

/// A row as it is stored, and as a value.
pub(crate) async fn row_of(
    snapshot: &DbSnapshot,
    ino: Ino,
) -> Result<Option<(InodeRowMessage, InodeRow)>, VolumeError> {
    let Some(row) = Box::pin(snapshot.get(tables::inode(ino))).await? else { return Ok(None) };
    let message = database::decode::<InodeRowMessage>(row, "inode")?;
    let row = InodeRow::try_from(&message)?;
    Ok(Some((message, row)))
}
