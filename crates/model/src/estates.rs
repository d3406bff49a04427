//! What sessions owned that were ended while their hosts were away.
//!
//! Such a host may come back with changes that it had made before. They can be applied as long as nobody else has changed
//! what they are about: then it is as if they had come in time.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::grants::Object;
use crate::slot::Width;
use crate::{FileKind, Ino, InodeRow, Record, SessionId};

/// By session: what it owned at its end, and whether somebody has changed it since.
#[derive(Debug, Default)]
pub struct Estates {
    by: BTreeMap<SessionId, HashMap<Ino, bool>>,
}

impl Estates {
    /// A session is ended that owned these. Of one that has not said so since the server's start nothing is known.
    pub fn leave(&mut self, session: SessionId, owned: Vec<Ino>) {
        if !owned.is_empty() {
            self.by.insert(session, owned.into_iter().map(|ino| (ino, false)).collect());
        }
    }

    /// Nothing of a session is remembered any more.
    pub fn forget(&mut self, session: SessionId) {
        self.by.remove(&session);
    }

    /// Somebody changes these rows.
    pub fn strike(&mut self, records: &[Record]) {
        for estate in self.by.values_mut() {
            let mut strike = |ino: &Ino| {
                if let Some(is_struck) = estate.get_mut(ino) {
                    *is_struck = true;
                }
            };
            for record in records {
                strike(&subject(record));
                // Whoever owned the slot of a name could change it.
                if let Some(slot) = slot_of(record) {
                    strike(&slot);
                }
                // Whoever owned the home of a file could change it.
                if let Record::PutInode(_, row) = record
                    && row.kind() != FileKind::Directory
                {
                    strike(&row.parent);
                }
            }
        }
    }

    /// Whether there is nothing to strike.
    pub fn is_empty(&self) -> bool {
        self.by.is_empty()
    }

    /// What of these records a session did not own at its end, or somebody has changed since. `stored` gives the rows of
    /// their subjects as they are now.
    pub fn contradicted(
        &self,
        session: SessionId,
        records: &[Record],
        stored: impl Fn(Ino) -> Option<InodeRow>,
    ) -> Option<Ino> {
        let estate = self.by.get(&session);
        let is_struck = |ino: Ino| estate.and_then(|estate| estate.get(&ino)) == Some(&true);
        let is_left = |ino: Ino| estate.and_then(|estate| estate.get(&ino)) == Some(&false);
        let may = |record: &&Record| {
            let ino = subject(record);
            let has_slot = slot_of(record).is_some_and(is_left);
            match stored(ino) {
                Some(row) if has_slot => row.nlink > 0,
                // It was removed, or is brought along.
                None if has_slot => {
                    records.iter().any(|other| matches!(other, Record::PutInode(of, _) if *of == ino))
                }
                Some(row) => is_left(ino) || Object::of(ino, &row).home().is_some_and(is_left),
                // Nobody else has heard of it. Or it is gone: then it was struck, or what covered it.
                None => {
                    let home = if let Record::PutInode(_, row) = record { Some(row.parent) } else { None };
                    estate.is_some() && !is_struck(ino) && !home.is_some_and(is_struck)
                }
            }
        };
        records.iter().find(|record| !may(record)).map(subject)
    }
}

fn subject(record: &Record) -> Ino {
    match record {
        Record::PutInode(ino, _)
        | Record::DeleteInode(ino)
        | Record::PutPage(ino, ..)
        | Record::DeletePages(ino, _) => *ino,
        Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => *dir,
    }
}

/// The slot that a record about a name is in, if its directory is split.
fn slot_of(record: &Record) -> Option<Ino> {
    match record {
        Record::PutDentry(dir, name, _) | Record::DeleteDentry(dir, name) => {
            Some(dir.slot(name.as_bytes(), Width::Many))
        }
        _ => None,
    }
}

/// The inodes that records are about.
pub fn subjects(records: &[Record]) -> HashSet<Ino> {
    records.iter().map(subject).collect()
}

/// The directories, and the files without a home, that a session has to own for these records to be applied; `stored`
/// gives the rows of their subjects.
pub fn objects(records: &[Record], stored: impl Fn(Ino) -> Option<InodeRow>) -> (Vec<Object>, Vec<Object>) {
    let mut all: HashSet<Object> = HashSet::new();
    for ino in subjects(records) {
        all.extend(stored(ino).map(|row| Object::of(ino, &row)));
    }
    for record in records {
        match record {
            Record::PutInode(ino, row) => drop(all.insert(Object::of(*ino, row))),
            Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => {
                all.insert(Object::Directory(*dir));
            }
            _ => {}
        }
    }
    let homes: Vec<Object> = all.iter().filter_map(|of| of.home()).map(Object::Directory).collect();
    all.extend(homes);
    let is_directory = |object: &Object| matches!(object, Object::Directory(_));
    let (mut directories, mut strays): (Vec<Object>, Vec<Object>) = all.into_iter().partition(is_directory);
    // The others are covered by their homes.
    strays.retain(|object| object.home().is_none());
    directories.sort_unstable();
    strays.sort_unstable();
    (directories, strays)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dentry, Name};

    const OLD: SessionId = SessionId(7);
    const DIR: Ino = Ino(10);
    const FILE: Ino = Ino(11);

    fn row(kind: FileKind) -> InodeRow {
        InodeRow::new(kind.bits() | 0o755, 1, Ino::ROOT)
    }

    fn put(ino: Ino, kind: FileKind, parent: Ino) -> Record {
        Record::PutInode(ino, Box::new(InodeRow { parent, ..row(kind) }))
    }

    fn named(dir: Ino, ino: Ino) -> Record {
        Record::PutDentry(dir, Name::new(b"name"), Dentry { ino, kind: FileKind::Regular, cookie: 9 })
    }

    /// The directory and the file in it are stored, and the session owned the directory.
    fn left() -> (Estates, impl Fn(Ino) -> Option<InodeRow>) {
        let mut estates = Estates::default();
        estates.leave(OLD, vec![DIR]);
        let stored = |ino| match ino {
            DIR => Some(InodeRow { parent: Ino::ROOT, ..row(FileKind::Directory) }),
            FILE => Some(InodeRow { parent: DIR, ..row(FileKind::Regular) }),
            _ => None,
        };
        (estates, stored)
    }

    #[test]
    fn what_was_owned_or_is_new_may_be_changed_late() {
        let (estates, stored) = left();
        let new = Ino(12);
        let records = [named(DIR, new), put(new, FileKind::Regular, DIR), put(FILE, FileKind::Regular, DIR)];
        assert_eq!(estates.contradicted(OLD, &records, &stored), None);
        assert_eq!(
            estates.contradicted(OLD, &[named(Ino::ROOT, new)], |_| Some(row(FileKind::Directory))),
            Some(Ino::ROOT)
        );
        assert_eq!(estates.contradicted(SessionId(8), &records, &stored), Some(DIR), "nobody knows of it");
    }

    #[test]
    fn what_others_have_changed_may_not() {
        for change in [
            named(DIR, Ino(99)),
            put(FILE, FileKind::Regular, DIR),
            Record::DeleteDentry(DIR, Name::new(b"name")),
        ] {
            let (mut estates, stored) = left();
            estates.strike(&[change]);
            for record in [named(DIR, Ino(12)), put(FILE, FileKind::Regular, DIR)] {
                assert!(estates.contradicted(OLD, &[record], &stored).is_some());
            }
        }
    }

    #[test]
    fn what_others_have_deleted_is_not_new() {
        let (mut estates, _) = left();
        estates.strike(&[
            Record::DeleteDentry(DIR, Name::new(b"name")),
            Record::DeleteInode(FILE),
            Record::DeleteInode(DIR),
        ]);
        for record in
            [named(DIR, Ino(12)), put(FILE, FileKind::Regular, DIR), put(DIR, FileKind::Directory, Ino::ROOT)]
        {
            assert!(estates.contradicted(OLD, &[record], |_| None).is_some());
        }
    }
}
