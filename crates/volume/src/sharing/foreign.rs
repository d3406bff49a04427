//! Walks through what other sessions own.
//!
//! A directory that somebody else owns does not come along with another one: its owner has to give it back first. Who walks through a
//! tree that another host has just made would so wait for each directory by itself, twice: for its row, and for its names. So a walk
//! claims, with the directory that it asks for, some of those that come next: they are recalled all at once, and their rows come along.
//! What the tables say of owned directories may be old; it is a hint of what to claim, and nothing else.

use hayloft_model::grants::Object;
use hayloft_model::{Ino, SessionId};

use crate::database::listing;
use crate::error::VolumeError;
use crate::sharing::enter::directories;
use crate::volume::Volume;

/// So many are claimed ahead by who goes on for the first time where an answer has ended; then four times as many.
const FIRST: usize = 4;
const MOST: usize = 64;

/// Directories that are looked at for some that others own, and the names of each that are looked at.
const LOOKS: usize = 256;
const NAMES: usize = 4096;

/// How a session walks.
#[derive(Clone, Copy, Default)]
pub(super) struct Walked {
    /// Where the last answer has ended; nowhere: 0.
    next: u64,
    /// How often the walk went on there.
    parts: u32,
}

impl Walked {
    /// An answer for `dir` ends before `next`.
    pub(super) fn goes_on(&mut self, dir: Ino, next: Option<Ino>) {
        self.parts = if self.is_at(dir) { self.parts.saturating_add(1) } else { 0 };
        self.next = next.map_or(0, |next| next.0);
    }

    fn is_at(&self, dir: Ino) -> bool {
        self.next == dir.0
    }

    /// How many directories of others may be claimed with this one.
    fn ahead(&self, dir: Ino) -> usize {
        if self.is_at(dir) { (FIRST << (2 * self.parts.min(2))).min(MOST) } else { 0 }
    }
}

impl Volume {
    /// Of this directory, and of those that come behind it in the session's walk, some that others own.
    pub(super) async fn foreign_ahead(&self, session: SessionId, dir: Ino) -> Result<Vec<Ino>, VolumeError> {
        let most = {
            let sharing = self.sharing.lock();
            // A directory that is split in more slots than it knows of is made whole for who reads that one alone. And where nobody
            // else owns anything, to look for it would take longer than the walk.
            if !sharing.grants.knows_many(session) || sharing.grants.is_alone(session) || self.is_view() {
                return Ok(Vec::new());
            }
            sharing.streams.get(&session).map_or(0, |stream| stream.walked.ahead(dir))
        };
        let mut found = Vec::with_capacity(most + 1);
        found.extend(Some(dir).filter(|dir| self.is_foreign(session, *dir)));
        if most == 0 {
            return Ok(found);
        }
        let db = &self.db()?;
        let row = listing::inode(&*db.snapshot()?, dir).await?;
        let (mut at, mut parent, mut looks) = (dir, Ino(row.parent), 0);
        let mut stack = vec![dir];
        loop {
            while let Some(next) = stack.pop() {
                if next != dir && self.is_foreign(session, next) {
                    found.push(next);
                }
                looks += 1;
                if found.len() > most || looks == LOOKS {
                    return Ok(found);
                }
                let names = self.names(db, &[next], NAMES).await?.remove(&next.0);
                stack.extend(names.iter().flat_map(|names| directories(&names.entries)).rev());
            }
            if at == parent {
                return Ok(found);
            }
            let Some(siblings) = self.siblings(db, session, parent).await? else { return Ok(found) };
            let behind = siblings.dirs.iter().position(|dir| *dir == at).map_or(0, |at| at + 1);
            stack.extend(siblings.dirs[behind..].iter().rev());
            (at, parent) = (parent, siblings.above);
        }
    }

    fn is_foreign(&self, session: SessionId, dir: Ino) -> bool {
        let sharing = self.sharing.lock();
        sharing.grants.owner(dir).is_some_and(|owner| owner != session) && !sharing.grants.is_split(dir)
    }
}

/// The objects of a request for a directory, and for others that are claimed with it.
pub(super) fn objects(dir: Ino, foreign: &[Ino]) -> Vec<Object> {
    let others = foreign.iter().copied().filter(|other| *other != dir);
    std::iter::once(dir).chain(others).map(Object::Directory).collect()
}
