//! The database as all rooms see it: SlateDB's own handles, except that an inode's row is read with its content wherever
//! that lies.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hayloft_wire::InodeRowMessage;
use prost::Message;
use slatedb::config::{CloseOptions, FlushOptions, FlushType};

use crate::database;
use crate::database::ledger::Ledger;
use crate::database::small::Contents;
use crate::database::tables;
use crate::error::VolumeError;

/// How long a close waits for a table file. Without it the next start replays the log.
const TABLE_FILE_PATIENCE: Duration = Duration::from_secs(3);

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
        let closed = close(&self.db, TABLE_FILE_PATIENCE).await;
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

/// Closes a database, with a table file of what is in the log only, if that can be had in time: there is no room for one when a
/// compaction is awaited, which none can begin for half a minute after a server was killed that had begun one.
async fn close(db: &slatedb::Db, patience: Duration) -> Result<(), slatedb::Error> {
    let table_file = db.flush_with_options(FlushOptions { flush_type: FlushType::MemTable });
    // What is wrong with the database the close tells.
    let _ = tokio::time::timeout(patience, table_file).await;
    db.close_with_options(CloseOptions::default().with_flush_type(Some(FlushType::Wal))).await
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use slatedb::config::Settings;

    use super::*;

    #[tokio::test]
    async fn a_close_does_not_wait_for_a_compaction_that_does_not_come() {
        let objects = Arc::new(InMemory::new());
        // Nobody compacts.
        let settings = Settings { l0_max_ssts: 2, compactor_options: None, ..Settings::default() };
        let open =
            || slatedb::Db::builder("db", Arc::clone(&objects) as _).with_settings(settings.clone()).build();
        let db = open().await.unwrap();
        for row in 0..3_u8 {
            db.put([row], [row]).await.unwrap();
            if row < 2 {
                db.flush_with_options(FlushOptions { flush_type: FlushType::MemTable }).await.unwrap();
            }
        }
        let closed = tokio::time::timeout(Duration::from_secs(60), close(&db, Duration::from_millis(50)));
        closed.await.expect("it waits").unwrap();
        let again = open().await.unwrap();
        for row in 0..3_u8 {
            assert_eq!(again.get([row]).await.unwrap().unwrap(), [row].as_slice());
        }
    }
}
