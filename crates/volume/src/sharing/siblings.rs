//! Where a walk goes next: the directories in one directory, in their order.
//!
//! A walk through a directory of a thousand directories asks for them one after the other, or some at a time. What was read for one
//! request is remembered for the next ones, since it only says what may be worth sending: each directory is claimed, and read, before
//! anything of it is sent.

use std::sync::Arc;

use hayloft_model::{Ino, SessionId};

use crate::database::{Db, listing};
use crate::error::VolumeError;
use crate::sharing::enter::directories;
use crate::volume::Volume;

/// How long it is remembered, milliseconds.
const AGE_MS: u64 = 1000;

/// Of so many directories for each session: of one and those above it.
const KEPT: usize = 4;

/// A larger directory is not searched for what follows.
const LARGE: usize = 8192;

/// The directories in a directory.
#[derive(Clone)]
pub(super) struct Siblings {
    parent: Ino,
    pub(super) dirs: Arc<[Ino]>,
    /// What the parent is in.
    pub(super) above: Ino,
    at_ms: u64,
}

impl Volume {
    /// For a session that walks; `None`: there are too many names.
    pub(super) async fn siblings(
        &self,
        db: &Db,
        session: SessionId,
        parent: Ino,
    ) -> Result<Option<Siblings>, VolumeError> {
        let now_ms = self.shared.uptime_ms();
        if let Some(known) = self.known_siblings(session, parent, now_ms) {
            return Ok(Some(known));
        }
        let snapshot = db.snapshot()?;
        let Some(entries) = listing::entries(&snapshot, parent, LARGE).await? else { return Ok(None) };
        let above = Ino(listing::inode(&snapshot, parent).await?.parent);
        let found = Siblings { parent, dirs: directories(&entries).into(), above, at_ms: now_ms };
        if let Some(stream) = self.sharing.lock().streams.get_mut(&session) {
            stream.siblings.retain(|of| of.parent != parent);
            stream.siblings.truncate(KEPT - 1);
            stream.siblings.insert(0, found.clone());
        }
        Ok(Some(found))
    }

    fn known_siblings(&self, session: SessionId, parent: Ino, now_ms: u64) -> Option<Siblings> {
        let sharing = self.sharing.lock();
        let mut known = sharing.streams.get(&session)?.siblings.iter();
        known.find(|of| of.parent == parent && now_ms.saturating_sub(of.at_ms) < AGE_MS).cloned()
    }
}
