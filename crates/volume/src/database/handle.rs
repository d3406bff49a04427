//! The database as all rooms see it: SlateDB's own handles, except that an inode's row is read with its content wherever
//! that lies.

use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;
use hayloft_wire::InodeRowMessage;
use prost::Message;

use crate::database;
use crate::database::ledger::Ledger;
use crate::database::small::Contents;
use crate::database::tables;
use crate::error::VolumeError;

/// An open database.
#[derive(Clone)]
pub(crate) struct Db {
    db: slatedb::Db,
    contents: Arc<Contents>,
    ledger: Arc<Ledger>,
}

/// A volume's rows as they were at one moment.
pub(crate) struct DbSnapshot {
    snapshot: Arc<slatedb::DbSnapshot>,
    now: Db,
}

impl Db {
    pub(crate) fn new(db: slatedb::Db, contents: Contents, ledger: Arc<Ledger>) -> Db {
        Db { db, contents: Arc::new(contents), ledger }
    }

    pub(crate) fn snapshot(&self) -> Result<Arc<DbSnapshot>, slatedb::Error> {
        Ok(Arc::new(DbSnapshot { snapshot: self.db.snapshot()?, now: self.clone() }))
    }

    /// A row; an inode's with its content.
    pub(crate) async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Bytes>, VolumeError> {
        let row = self.db.get(key.as_ref()).await?;
        self.whole(key.as_ref(), row).await
    }

    /// Closes it; with it, what it has written down.
    pub(crate) async fn close(&self) -> Result<(), slatedb::Error> {
        let closed = self.db.close().await;
        self.ledger.sync().await;
        closed
    }

    /// What is done from time to time.
    pub(crate) async fn tidy(&self) {
        self.ledger.shorten(self.db.manifest().replay_after_wal_id()).await;
    }

    /// The packs beside it.
    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    async fn whole(&self, key: &[u8], row: Option<Bytes>) -> Result<Option<Bytes>, VolumeError> {
        let row = match row {
            Some(row) if key.first() == Some(&tables::INODES) => row,
            other => return Ok(other),
        };
        let mut message = database::decode::<InodeRowMessage>(row.clone(), "inode")?;
        if message.placed.is_none() {
            return Ok(Some(row));
        }
        self.contents.fill(&self.db, [&mut message]).await?;
        Ok(Some(message.encode_to_vec().into()))
    }
}

impl Deref for Db {
    type Target = slatedb::Db;

    fn deref(&self) -> &slatedb::Db {
        &self.db
    }
}

impl DbSnapshot {
    /// As [`Db::get`].
    pub(crate) async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Bytes>, VolumeError> {
        let row = self.snapshot.get(key.as_ref()).await?;
        self.now.whole(key.as_ref(), row).await
    }

    /// See [`Contents::fill`].
    pub(crate) async fn fill<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a mut InodeRowMessage>,
    ) -> Result<(), VolumeError> {
        self.now.contents.fill(&self.now.db, rows).await
    }
}

impl Deref for DbSnapshot {
    type Target = slatedb::DbSnapshot;

    fn deref(&self) -> &slatedb::DbSnapshot {
        &self.snapshot
    }
}
