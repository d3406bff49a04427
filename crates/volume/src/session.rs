//! Sessions: one client per volume at a time, found again after any restart.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hayloft_model::{Ino, InoRange, SessionId};
use hayloft_wire::{FailureCode, Hello, InodeRowMessage, PROTOCOL, Welcome};
use prost::Message;
use slatedb::{Db, WriteBatch};
use tokio::sync::Notify;

use crate::database;
use crate::error::VolumeError;
use crate::tables::{self, SessionRow};
use crate::volume::Volume;

/// Inode numbers that a session gets at its start.
const FIRST_NUMBERS: u64 = 1 << 16;

/// Most inode numbers handed out at once.
const NUMBERS_MAX: u64 = 1 << 24;

/// How long a hello that takes over waits for the dead client's connection to be seen as closed.
const EOF_PATIENCE: Duration = Duration::from_millis(1000);

/// A session that has not ended.
pub(crate) struct Session {
    pub(crate) row: SessionRow,
    pub(crate) orphans: HashSet<Ino>,
    /// The connection that speaks for it.
    pub(crate) connection: Option<u64>,
    /// When it was last heard of, milliseconds after the server's start.
    pub(crate) heard: Arc<AtomicU64>,
    /// Why the batch after the last one failed, if it did.
    pub(crate) failed: Option<FailureCode>,
    /// Whether the batch after the last one was applied is not known; until the database is open again.
    pub(crate) uncertain: bool,
    /// Ends the connection that speaks for it.
    hang_up: Arc<Notify>,
}

impl Session {
    /// A session found in the tables: as if heard of when the server started.
    pub(crate) fn found(row: &SessionRow) -> Session {
        Session {
            row: row.clone(),
            orphans: HashSet::new(),
            connection: None,
            heard: Arc::default(),
            failed: None,
            uncertain: false,
            hang_up: Arc::default(),
        }
    }

    /// Ends its connection, after what has arrived there is answered.
    pub(crate) fn hang_up(&self) {
        self.hang_up.notify_one();
    }
}

impl Volume {
    /// Starts or resumes a session for a connection.
    pub(crate) async fn hello(
        self: &Arc<Self>,
        hello: &Hello,
        connection: u64,
        hang_up: &Arc<Notify>,
    ) -> Result<(Welcome, Arc<AtomicU64>), VolumeError> {
        if hello.protocol != PROTOCOL {
            return Err(VolumeError::Protocol { client: hello.protocol, server: PROTOCOL });
        }
        if hello.session == 0 {
            return Err(VolumeError::Invalid("session number 0"));
        }
        let id = SessionId(hello.session);
        if hello.takes_over != 0 {
            self.wait_for_eof(SessionId(hello.takes_over)).await;
        }
        let _turn = self.turn.lock().await;
        let db = self.db()?;
        let known = self.state.lock().sessions.contains_key(&id);
        if hello.resume && !known {
            return Err(VolumeError::SessionEnded(id));
        }
        for other in self.others_to_end(id, hello)? {
            self.end_session(&db, other).await?;
        }
        let inos = self.begin(&db, id, hello).await?;
        let row = db.get(tables::inode(Ino::ROOT)).await?.ok_or(VolumeError::NoInode(Ino::ROOT))?;
        let root = database::decode::<InodeRowMessage>(row, "inode")?;
        let (last_sequence, heard) = {
            let mut state = self.state.lock();
            let session = state.sessions.get_mut(&id).ok_or(VolumeError::SessionEnded(id))?;
            let old = std::mem::replace(&mut session.hang_up, Arc::clone(hang_up));
            if session.connection.replace(connection).is_some() {
                old.notify_one();
            }
            session.failed = None;
            session.heard.store(self.shared.uptime_ms(), Relaxed);
            (session.row.last_sequence, Arc::clone(&session.heard))
        };
        let welcome = Welcome {
            last_sequence,
            server_time_nanos: self.shared.now().as_nanos() as i64,
            status: Some(self.status()),
            inos: Some(inos.into()),
            lease_ms: self.shared.config.lease.as_millis() as u64,
            root: Some(root),
            volume_id: self.id.clone(),
        };
        Ok((welcome, heard))
    }

    /// Which sessions are over when `id` begins; `Busy` when one of them is not.
    fn others_to_end(&self, id: SessionId, hello: &Hello) -> Result<Vec<SessionId>, VolumeError> {
        let now = self.shared.uptime_ms();
        let lease = self.shared.config.lease.as_millis() as u64;
        let state = self.state.lock();
        let mut over = Vec::new();
        for (other, session) in state.sessions.iter().filter(|(other, _)| **other != id) {
            let silent = now.saturating_sub(session.heard.load(Relaxed));
            // A client with nothing to say is silent; one whose host is gone loses its connection.
            let expired = session.connection.is_none() && silent > lease;
            let proved_dead = hello.takes_over == other.0
                && !hello.host_id.is_empty()
                && hello.host_id == session.row.host_id
                && session.connection.is_none();
            if !expired && !proved_dead {
                return Err(VolumeError::Busy {
                    session: *other,
                    host_id: session.row.host_id.clone(),
                    host: session.row.host_name.clone(),
                    pid: session.row.pid,
                    mount_point: session.row.mount_point.clone(),
                });
            }
            over.push(*other);
        }
        Ok(over)
    }

    /// `Busy` while any session is connected or within its lease.
    pub(crate) fn refuse_when_mounted(&self) -> Result<(), VolumeError> {
        self.others_to_end(SessionId(0), &Hello::default()).map(|_| ())
    }

    async fn wait_for_eof(&self, session: SessionId) {
        let started = tokio::time::Instant::now();
        while started.elapsed() < EOF_PATIENCE {
            let connected =
                self.state.lock().sessions.get(&session).is_some_and(|found| found.connection.is_some());
            if !connected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Makes the session's row durable, together with numbers for it.
    async fn begin(self: &Arc<Self>, db: &Db, id: SessionId, hello: &Hello) -> Result<InoRange, VolumeError> {
        let (session_row, volume_row, range) = {
            let mut state = self.state.lock();
            let last_sequence = state.sessions.get(&id).map_or(0, |session| session.row.last_sequence);
            let range = InoRange { next: state.next_ino, end: state.next_ino + FIRST_NUMBERS };
            state.next_ino = range.end;
            let row = SessionRow {
                last_sequence,
                host_id: hello.host_id.clone(),
                host_name: hello.host_name.clone(),
                pid: hello.pid,
                mount_point: hello.mount_point.clone(),
                read_only: hello.read_only,
            };
            (row, state.volume_row(), range)
        };
        let mut batch = WriteBatch::new();
        batch.put(tables::session(id), session_row.encode_to_vec());
        batch.put(tables::VOLUME, volume_row.encode_to_vec());
        self.write(db, batch).await?;
        let mut state = self.state.lock();
        let session = state.sessions.entry(id).or_insert_with(|| Session::found(&session_row));
        session.row = session_row;
        Ok(range)
    }

    /// More inode numbers for a session.
    pub(crate) async fn allocate(self: &Arc<Self>, count: u64) -> Result<InoRange, VolumeError> {
        let _turn = self.turn.lock().await;
        let db = self.db()?;
        let (row, range) = {
            let mut state = self.state.lock();
            let range = InoRange { next: state.next_ino, end: state.next_ino + count.clamp(1, NUMBERS_MAX) };
            state.next_ino = range.end;
            (state.volume_row(), range)
        };
        let mut batch = WriteBatch::new();
        batch.put(tables::VOLUME, row.encode_to_vec());
        self.write(&db, batch).await?;
        Ok(range)
    }

    /// Ends a session: what it had open without a name is deleted, what it held is free. The caller has
    /// the turn.
    async fn end_session(self: &Arc<Self>, db: &Db, id: SessionId) -> Result<(), VolumeError> {
        let orphans: Vec<Ino> = match self.state.lock().sessions.get(&id) {
            Some(session) => session.orphans.iter().copied().collect(),
            None => return Ok(()),
        };
        let mut batch = WriteBatch::new();
        let (mut bytes, mut inodes) = (0, 0);
        for ino in orphans {
            batch.delete(tables::orphan(id, ino));
            let Some(row) = db.get(tables::inode(ino)).await? else { continue };
            let row = database::decode::<InodeRowMessage>(row, "inode")?;
            if row.nlink == 0 {
                // It left the usage when it lost its name.
                batch.delete(tables::inode(ino));
                bytes += row.allocated;
                inodes += 1;
            }
        }
        batch.delete(tables::session(id));
        self.write(db, batch).await?;
        let mut state = self.state.lock();
        state.dead_bytes += bytes as i64;
        state.sessions.remove(&id);
        state.grants.end(id);
        tracing::info!(volume = self.name, session = %id, orphans = inodes, "the session has ended");
        Ok(())
    }

    /// The client leaves.
    pub(crate) async fn goodbye(self: &Arc<Self>, id: SessionId, connection: u64) -> Result<(), VolumeError> {
        let _turn = self.turn.lock().await;
        self.check_connection(id, connection)?;
        let db = self.db()?;
        self.end_session(&db, id).await
    }

    /// The connection is gone; the session stays for its lease.
    pub(crate) fn disconnected(&self, id: SessionId, connection: u64) {
        let now = self.shared.uptime_ms();
        if let Some(session) = self.state.lock().sessions.get_mut(&id)
            && session.connection == Some(connection)
        {
            session.connection = None;
            session.heard.store(now, Relaxed);
        }
    }

    /// Refuses a connection that no longer speaks for its session.
    pub(crate) fn check_connection(&self, id: SessionId, connection: u64) -> Result<(), VolumeError> {
        match self.state.lock().sessions.get(&id) {
            Some(session) if session.connection == Some(connection) => Ok(()),
            Some(_) => Err(VolumeError::Superseded),
            None => Err(VolumeError::SessionEnded(id)),
        }
    }
}
