//! What ends by a batch: nothing may lead to it afterwards, and no name may lie in it.

use std::collections::{HashMap, HashSet};

use super::{Unsound, require};
use crate::grants::STRAY;
use crate::{FileKind, Ino, Name};

pub(super) const NAMED: &str = "it is deleted, and has a name still";
pub(super) const FULL: &str = "it is deleted, and names lie in it still";

/// An inode that ends.
#[derive(Clone, Copy, Debug)]
struct End {
    /// Names that it has after what is known so far.
    names: u32,
    /// The directory that all its names are in; [`STRAY`]: they may be anywhere.
    home: Ino,
}

/// What ends by a batch. Whoever knows what is stored tells it of the rows, then of what lies in the directories, then of
/// the names that the batch changes, until [`Ends::wanted`] wants nothing more.
#[derive(Debug)]
pub struct Ends {
    inodes: HashMap<Ino, Option<End>>,
    /// Names that the batch takes, and such that it gives; both may have led to what ends.
    changed: HashMap<Ino, HashMap<Name, bool>>,
    directories: HashSet<Ino>,
    /// Names that were told of are not counted again.
    told: HashSet<(Ino, Name)>,
}

impl Ends {
    pub(super) fn new(inodes: HashSet<Ino>, names: Vec<(Ino, Name, bool)>) -> Ends {
        let mut changed: HashMap<Ino, HashMap<Name, bool>> = HashMap::new();
        for (dir, name, is_there) in names {
            changed.entry(dir).or_default().insert(name, is_there);
        }
        let inodes = inodes.into_iter().map(|ino| (ino, None)).collect();
        Ends { inodes, changed, directories: HashSet::new(), told: HashSet::new() }
    }

    /// The inodes whose stored rows are to be told to [`Ends::has`], if they have one.
    pub fn inodes(&self) -> impl Iterator<Item = Ino> {
        self.inodes.keys().copied()
    }

    /// The row that is stored of one of them.
    pub fn has(&mut self, ino: Ino, kind: FileKind, nlink: u32, parent: Ino) {
        let is_directory = kind == FileKind::Directory;
        let names = if is_directory { nlink.min(1) } else { nlink };
        if is_directory {
            self.directories.insert(ino);
        }
        if let Some(end) = self.inodes.get_mut(&ino) {
            *end = Some(End { names, home: parent });
        }
    }

    /// The directories among them: whatever is stored in these is to be told to [`Ends::was`]. With how many names that can be at
    /// most: those that the batch takes.
    pub fn directories(&self) -> (Vec<Ino>, usize) {
        let taken = self.directories.iter().filter_map(|dir| self.changed.get(dir)).map(HashMap::len).sum();
        (self.directories.iter().copied().collect(), taken)
    }

    /// There are more names in the directories than the batch takes.
    pub fn too_many(&self) -> Unsound {
        let ino = self.directories.iter().min().copied().unwrap_or(Ino::ROOT);
        Unsound { ino, what: FULL }
    }

    /// A name that is stored, and leads to `ino`.
    ///
    /// # Errors
    /// It lies in a directory that ends, and stays.
    pub fn was(&mut self, dir: Ino, name: &[u8], ino: Ino) -> Result<(), Unsound> {
        let changes = self.changed.get(&dir).is_some_and(|names| names.contains_key(name));
        require(changes || !self.directories.contains(&dir), dir, FULL)?;
        if changes
            && self.told.insert((dir, Name::new(name)))
            && let Some(Some(end)) = self.inodes.get_mut(&ino)
        {
            end.names = end.names.saturating_sub(1);
        }
        Ok(())
    }

    /// Names that the batch takes (`given`: that it gives, which may replace others), and that may have led to what has
    /// names still: by directories.
    pub fn wanted(&self, given: bool) -> Vec<(Ino, Vec<Name>)> {
        let left = || self.inodes.values().flatten().filter(|end| end.names > 0);
        let anywhere = left().any(|end| end.home == STRAY);
        let homes: HashSet<Ino> = left().map(|end| end.home).collect();
        // A directory that has ended before its parent in the same batch was told with that.
        let dirs = self
            .changed
            .iter()
            .filter(|(dir, _)| (anywhere || homes.contains(dir)) && !self.directories.contains(dir));
        dirs.map(|(dir, names)| {
            let of_kind = names.iter().filter(|(_, is_there)| **is_there == given);
            (*dir, of_kind.map(|(name, _)| name.clone()).collect())
        })
        .filter(|(_, names): &(Ino, Vec<Name>)| !names.is_empty())
        .collect()
    }

    /// Whether nothing leads to what ends, when all has been told.
    ///
    /// # Errors
    /// Something does.
    pub fn finish(self) -> Result<(), Unsound> {
        let mut named = self.inodes.iter().filter(|(_, end)| end.is_some_and(|end| end.names > 0));
        named.next().map_or(Ok(()), |(ino, _)| Err(Unsound { ino: *ino, what: NAMED }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Batch, NUMBERS};
    use super::*;
    use crate::{Dentry, InodeRow, Record};

    /// What is stored: rows with kind, links and parent, and names.
    const ROWS: [(u64, FileKind, u32, u64); 6] = [
        (20, FileKind::Directory, 2, 1),
        (30, FileKind::Regular, 1, 20),
        (31, FileKind::Regular, 2, 20),
        (32, FileKind::Regular, 2, 0),
        (33, FileKind::Regular, 0, 0),
        (40, FileKind::Directory, 2, 1),
    ];
    const NAMES: [(u64, &str, u64); 7] = [
        (1, "dir", 20),
        (20, "a", 30),
        (20, "b", 31),
        (20, "c", 31),
        (20, "d", 32),
        (1, "d", 32),
        (1, "empty", 40),
    ];

    fn judge(records: &[Record]) -> Result<(), Unsound> {
        let mut batch = Batch::new(NUMBERS);
        records.iter().try_for_each(|record| batch.add(record))?;
        let Some(mut ends) = batch.ends()? else { return Ok(()) };
        for (ino, kind, nlink, parent) in ROWS {
            if ends.inodes().any(|end| end == Ino(ino)) {
                ends.has(Ino(ino), kind, nlink, Ino(parent));
            }
        }
        let (dirs, _) = ends.directories();
        for (dir, name, ino) in NAMES.into_iter().filter(|(dir, ..)| dirs.contains(&Ino(*dir))) {
            ends.was(Ino(dir), name.as_bytes(), Ino(ino))?;
        }
        for given in [false, true] {
            for (dir, names) in ends.wanted(given) {
                let is_wanted = |name: &str| names.iter().any(|wanted| wanted.as_bytes() == name.as_bytes());
                for (_, name, ino) in NAMES.iter().filter(|(at, name, _)| Ino(*at) == dir && is_wanted(name))
                {
                    ends.was(dir, name.as_bytes(), Ino(*ino))?;
                }
            }
        }
        ends.finish()
    }

    fn take(dir: u64, name: &str) -> Record {
        Record::DeleteDentry(Ino(dir), Name::new(name.as_bytes()))
    }

    fn give(dir: u64, name: &str, ino: u64) -> Record {
        let dentry = Dentry { ino: Ino(ino), kind: FileKind::Regular, cookie: 9 };
        Record::PutDentry(Ino(dir), Name::new(name.as_bytes()), dentry)
    }

    fn end(ino: u64) -> Record {
        Record::DeleteInode(Ino(ino))
    }

    fn unlinked(ino: u64) -> Record {
        Record::PutInode(Ino(ino), Box::new(InodeRow::new(FileKind::Regular.bits(), 0, STRAY)))
    }

    #[test]
    fn what_ends_has_lost_all_its_names() {
        for good in [
            vec![take(20, "a"), end(30)],
            vec![take(20, "a"), unlinked(30)],
            // Replaced.
            vec![give(20, "a", 34), end(30)],
            vec![take(20, "b"), give(20, "c", 34), end(31)],
            vec![take(20, "d"), take(1, "d"), end(32)],
            vec![end(33), unlinked(33)],
            vec![take(1, "empty"), end(40)],
            // It was never stored.
            vec![end(99)],
            vec![
                take(1, "dir"),
                take(20, "a"),
                take(20, "b"),
                take(20, "c"),
                take(20, "d"),
                end(20),
                end(30),
                end(31),
            ],
        ] {
            assert_eq!(judge(&good), Ok(()), "{good:?}");
        }
        for bad in [
            vec![end(30)],
            vec![unlinked(30)],
            vec![take(20, "b"), end(30)],
            vec![take(20, "b"), end(31)],
            vec![take(20, "d"), end(32)],
            vec![take(20, "a"), give(1, "x", 30), end(30)],
            vec![take(1, "dir"), end(20)],
            vec![take(1, "dir"), take(20, "a"), take(20, "b"), take(20, "c"), end(20), end(30), end(31)],
            vec![take(1, "empty"), give(40, "x", 34), end(40)],
            vec![end(40)],
        ] {
            assert!(judge(&bad).is_err(), "{bad:?}");
        }
    }
}
