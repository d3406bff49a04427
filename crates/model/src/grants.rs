//! The grant machine: which session may cache, or change, which directory without asking.
//!
//! A grant covers one directory: its names, and the attributes and content pointers of its children
//! that are not directories (see `docs/semantics.md`). A directory that a session makes is owned by it
//! from birth.

use std::collections::{BTreeSet, HashMap};

use crate::{Ino, SessionId};

/// How a session holds a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grant {
    /// Shared: may answer lookups and listings itself, and is told of every change.
    Read,
    /// Exclusive: may also change the directory and its files without asking.
    Own,
}

/// What a request for a grant leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Decision {
    /// The session holds the directory like this now.
    Granted(Grant),
    /// These sessions have to give way first: recall, then ask again.
    Recall(Vec<SessionId>),
}

#[derive(Clone, Debug)]
enum Holder {
    Own(SessionId),
    Read(BTreeSet<SessionId>),
}

/// All grants of a volume: a pure table, fed with requests, releases and ended sessions.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    holders: HashMap<Ino, Holder>,
}

impl Grants {
    /// `session` wants `dir`. A directory nobody holds is granted as asked; a reader that is alone may
    /// become the owner, an owner keeps what it has.
    pub fn request(&mut self, session: SessionId, dir: Ino, want: Grant) -> Decision {
        match (self.holders.get_mut(&dir), want) {
            (None, Grant::Own) => {
                self.holders.insert(dir, Holder::Own(session));
                Decision::Granted(Grant::Own)
            }
            (None, Grant::Read) => {
                self.holders.insert(dir, Holder::Read(BTreeSet::from([session])));
                Decision::Granted(Grant::Read)
            }
            (Some(Holder::Own(owner)), _) if *owner == session => Decision::Granted(Grant::Own),
            (Some(Holder::Own(owner)), _) => Decision::Recall(vec![*owner]),
            (Some(Holder::Read(readers)), Grant::Read) => {
                readers.insert(session);
                Decision::Granted(Grant::Read)
            }
            (Some(Holder::Read(readers)), Grant::Own) => {
                let others: Vec<SessionId> =
                    readers.iter().copied().filter(|reader| *reader != session).collect();
                if others.is_empty() {
                    self.holders.insert(dir, Holder::Own(session));
                    Decision::Granted(Grant::Own)
                } else {
                    Decision::Recall(others)
                }
            }
        }
    }

    /// How `session` holds `dir`.
    pub fn held(&self, session: SessionId, dir: Ino) -> Option<Grant> {
        match self.holders.get(&dir)? {
            Holder::Own(owner) => (*owner == session).then_some(Grant::Own),
            Holder::Read(readers) => readers.contains(&session).then_some(Grant::Read),
        }
    }

    /// `session` lets go of `dir` (or answers a recall of it).
    pub fn release(&mut self, session: SessionId, dir: Ino) {
        match self.holders.get_mut(&dir) {
            Some(Holder::Own(owner)) if *owner == session => {
                self.holders.remove(&dir);
            }
            Some(Holder::Read(readers)) => {
                readers.remove(&session);
                if readers.is_empty() {
                    self.holders.remove(&dir);
                }
            }
            _ => {}
        }
    }

    /// `session` is over: everything that it held is free.
    pub fn end(&mut self, session: SessionId) {
        self.holders.retain(|_, holder| match holder {
            Holder::Own(owner) => *owner != session,
            Holder::Read(readers) => {
                readers.remove(&session);
                !readers.is_empty()
            }
        });
    }

    /// The directory is deleted: nobody holds it.
    pub fn forget(&mut self, dir: Ino) {
        self.holders.remove(&dir);
    }

    /// How many directories are held.
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);
    const DIR: Ino = Ino(20);

    #[test]
    fn an_owner_has_to_give_way_before_another_gets_anything() {
        let mut grants = Grants::default();
        assert_eq!(grants.request(A, DIR, Grant::Own), Decision::Granted(Grant::Own));
        assert_eq!(grants.request(B, DIR, Grant::Read), Decision::Recall(vec![A]));
        assert_eq!(grants.held(B, DIR), None);
        grants.release(A, DIR);
        assert_eq!(grants.request(B, DIR, Grant::Read), Decision::Granted(Grant::Read));
    }

    #[test]
    fn readers_share_and_the_last_one_may_own() {
        let mut grants = Grants::default();
        grants.request(A, DIR, Grant::Read);
        grants.request(B, DIR, Grant::Read);
        assert_eq!(grants.request(A, DIR, Grant::Own), Decision::Recall(vec![B]));
        grants.end(B);
        assert_eq!(grants.request(A, DIR, Grant::Own), Decision::Granted(Grant::Own));
        assert_eq!(grants.request(A, DIR, Grant::Read), Decision::Granted(Grant::Own));
        grants.end(A);
        assert!(grants.is_empty());
    }
}
