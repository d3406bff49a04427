//! What others have changed and not all hosts have heard of yet: it is shown to nobody before they have. Else a program
//! could see it here, tell another one, and that would look for it in vain on a host that does not know yet.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

use super::{Map, Tree};
use crate::{FileKind, Ino, InodeRow, Missing, Name, Record, TreeError};

type Names = HashMap<Name, u64, FxBuildHasher>;

/// Names and inodes that were changed, and by which changes.
#[derive(Debug, Default)]
pub(super) struct Unheard {
    /// Names, with the last change of each.
    names: Map<Ino, Names>,
    /// Inodes, and directories with all their names.
    inodes: Map<Ino, Vec<u64>>,
    /// What each change was about.
    changes: Map<u64, About>,
}

#[derive(Debug, Default)]
struct About {
    names: Vec<(Ino, Name)>,
    inodes: Vec<Ino>,
}

impl Unheard {
    pub(super) fn clear(&mut self) {
        *self = Unheard::default();
    }

    /// Nobody else knows anything of the object: there is nobody to hear of it.
    pub(super) fn forget(&mut self, ino: Ino) {
        self.names.remove(&ino);
        self.inodes.remove(&ino);
    }

    fn add(&mut self, ino: Ino, change: u64) {
        self.inodes.entry(ino).or_default().push(change);
        self.changes.entry(change).or_default().inodes.push(ino);
    }

    fn check(&self, ino: Ino) -> Result<(), TreeError> {
        match self.inodes.get(&ino).and_then(|changes| changes.first()) {
            Some(change) => Err(TreeError::Missing(Missing::Heard(*change))),
            None => Ok(()),
        }
    }
}

impl Tree {
    /// These records, which are about to be applied, are of a change that others have not heard of yet: what they change is
    /// not shown ([`Missing::Heard`]) until [`Tree::heard`] names it.
    pub fn unheard(&mut self, change: u64, records: &[Record]) {
        for record in records {
            match record {
                // Who lacks the listing asks for it, and is told of the change again.
                Record::PutDentry(dir, name, _) | Record::DeleteDentry(dir, name)
                    if self.dirs.contains_key(dir) =>
                {
                    self.unheard.names.entry(*dir).or_default().insert(name.clone(), change);
                    self.unheard.changes.entry(change).or_default().names.push((*dir, name.clone()));
                }
                Record::PutInode(ino, row)
                    if self.nodes.get(ino).is_some_and(|node| !is_shown_alike(&node.row, row)) =>
                {
                    self.unheard.add(*ino, change);
                }
                _ => {}
            }
        }
    }

    /// What is about to be added of an inode, or of a directory with its names, is as these changes have left it, of which others
    /// have not heard yet. As [`Tree::unheard`].
    pub fn unheard_of(&mut self, ino: Ino, changes: &[u64]) {
        if !self.owned.as_ref().is_some_and(|owned| owned.contains(&ino)) {
            changes.iter().for_each(|change| self.unheard.add(ino, *change));
        }
    }

    /// Everybody has heard of these changes.
    pub fn heard(&mut self, changes: &[u64]) {
        for change in changes {
            let Some(about) = self.unheard.changes.remove(change) else { continue };
            for (dir, name) in about.names {
                let Some(names) = self.unheard.names.get_mut(&dir) else { continue };
                if names.get(&name) == Some(change) {
                    names.remove(&name);
                }
                if names.is_empty() {
                    self.unheard.names.remove(&dir);
                }
            }
            for ino in about.inodes {
                let Some(changes) = self.unheard.inodes.get_mut(&ino) else { continue };
                changes.retain(|of| of != change);
                if changes.is_empty() {
                    self.unheard.inodes.remove(&ino);
                }
            }
        }
    }

    /// The row of an inode, for a program.
    ///
    /// # Errors
    /// [`TreeError::Missing`] when it is not in memory, or others have not heard of it.
    pub fn shown(&self, ino: Ino) -> Result<&InodeRow, TreeError> {
        let row = self.inode(ino)?;
        self.unheard.check(ino)?;
        if row.kind() != FileKind::Directory {
            self.unheard.check(row.parent)?;
        }
        Ok(row)
    }

    pub(super) fn check_heard(&self, dir: Ino, name: &[u8]) -> Result<(), TreeError> {
        self.unheard.check(dir)?;
        match self.unheard.names.get(&dir).and_then(|names| names.get(name)) {
            Some(change) => Err(TreeError::Missing(Missing::Heard(*change))),
            None => Ok(()),
        }
    }

    /// The same for all names of a directory.
    pub(super) fn check_all_heard(&self, dir: Ino) -> Result<(), TreeError> {
        self.unheard.check(dir)?;
        match self.unheard.names.get(&dir).and_then(|names| names.values().max()) {
            Some(change) => Err(TreeError::Missing(Missing::Heard(*change))),
            None => Ok(()),
        }
    }
}

/// Whether two states of an inode differ in nothing but what changes with each change of a directory, or of a file's names:
/// that may be seen here before it is seen elsewhere.
fn is_shown_alike(before: &InodeRow, after: &InodeRow) -> bool {
    let is_dir = after.kind() == FileKind::Directory;
    (before.mode, before.uid, before.gid, before.rdev) == (after.mode, after.uid, after.gid, after.rdev)
        && before.xattrs == after.xattrs
        && match is_dir {
            true => before.parent == after.parent,
            false => (before.nlink, before.size) == (after.nlink, after.size),
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dentry, Usage};

    const DIR: Ino = Ino(20);

    fn name(name: &str) -> Name {
        Name::new(name.as_bytes())
    }

    fn put(at: &str, ino: u64) -> Record {
        let dentry = Dentry { ino: Ino(ino), kind: FileKind::Regular, cookie: ino };
        Record::PutDentry(DIR, name(at), dentry)
    }

    fn tree() -> Tree {
        let mut tree = Tree::new(Usage::default(), Usage::default());
        tree.share();
        tree.add_inode(DIR, InodeRow::new(FileKind::Directory.bits() | 0o755, 2, Ino::ROOT));
        tree.add_listing(DIR, []);
        tree
    }

    fn change(tree: &mut Tree, number: u64, records: &[Record]) {
        tree.unheard(number, records);
        tree.apply(records, &[], &[]);
    }

    fn missing(number: u64) -> TreeError {
        TreeError::Missing(Missing::Heard(number))
    }

    #[test]
    fn a_name_is_shown_when_all_have_heard_of_its_last_change() {
        let mut tree = tree();
        change(&mut tree, 1, &[put("a", 100)]);
        assert_eq!(tree.lookup(DIR, b"a"), Err(missing(1)));
        assert!(tree.entries(DIR, 0).is_err_and(|error| error == missing(1)));
        assert_eq!(tree.lookup(DIR, b"b"), Ok(None));
        change(&mut tree, 2, &[Record::DeleteDentry(DIR, name("a"))]);
        tree.heard(&[1]);
        assert_eq!(tree.lookup(DIR, b"a"), Err(missing(2)));
        tree.heard(&[2]);
        assert_eq!(tree.lookup(DIR, b"a"), Ok(None));
        assert!(tree.unheard.names.is_empty() && tree.unheard.changes.is_empty());
    }

    #[test]
    fn attributes_are_shown_when_all_have_heard_but_times_at_once() {
        let mut tree = tree();
        let mut row = tree.inode(DIR).unwrap().clone();
        (row.mtime.secs, row.next_cookie) = (7, 9);
        change(&mut tree, 1, &[Record::PutInode(DIR, Box::new(row.clone()))]);
        assert!(tree.shown(DIR).is_ok());
        row.mode = FileKind::Directory.bits() | 0o700;
        change(&mut tree, 2, &[Record::PutInode(DIR, Box::new(row))]);
        assert_eq!(tree.shown(DIR).err(), Some(missing(2)));
        tree.heard(&[2]);
        assert_eq!(tree.shown(DIR).unwrap().mode & 0o777, 0o700);
    }

    #[test]
    fn a_listing_is_shown_when_all_have_heard_of_what_it_is_made_of() {
        let mut tree = tree();
        let dir = Ino(30);
        tree.add_inode(dir, InodeRow::new(FileKind::Directory.bits() | 0o755, 2, Ino::ROOT));
        tree.unheard_of(dir, &[3, 4]);
        tree.add_listing(dir, []);
        tree.heard(&[3]);
        assert_eq!(tree.lookup(dir, b"a"), Err(missing(4)));
        assert_eq!(tree.shown(dir).err(), Some(missing(4)));
        tree.heard(&[4]);
        assert_eq!(tree.lookup(dir, b"a"), Ok(None));
        assert!(tree.unheard.inodes.is_empty());
    }

    #[test]
    fn who_owns_a_directory_is_the_only_one_to_hear_and_a_new_connection_forgets_all() {
        let mut tree = tree();
        change(&mut tree, 1, &[put("a", 100)]);
        tree.own(DIR);
        assert!(tree.lookup(DIR, b"a").is_ok());
        tree.disown(DIR);
        change(&mut tree, 2, &[put("b", 101)]);
        tree.uncover_all();
        assert!(tree.unheard.names.is_empty() && tree.unheard.changes.is_empty());
    }
}
