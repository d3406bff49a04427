//! A volume's rows in memory: the reference for what a server must hold.

use std::collections::BTreeMap;

use crate::{BlockRef, Dentry, Ino, InodeRow, Name, Record};

/// All rows of a volume, in memory.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Rows {
    /// Inode rows.
    pub inodes: BTreeMap<Ino, InodeRow>,
    /// Dentry rows by directory and name.
    pub dentries: BTreeMap<(Ino, Name), Dentry>,
    /// Page rows by file and page.
    pub pages: BTreeMap<(Ino, u64), Vec<Option<BlockRef>>>,
}

impl Rows {
    /// Applies one record.
    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::PutInode(ino, row) => {
                self.inodes.insert(*ino, (**row).clone());
            }
            Record::DeleteInode(ino) => {
                self.inodes.remove(ino);
                self.pages.retain(|(file, _), _| file != ino);
            }
            Record::PutDentry(parent, name, dentry) => {
                self.dentries.insert((*parent, name.clone()), *dentry);
            }
            Record::DeleteDentry(parent, name) => {
                self.dentries.remove(&(*parent, name.clone()));
            }
            Record::PutPage(ino, page, blocks) => {
                self.pages.insert((*ino, *page), blocks.clone());
            }
            Record::DeletePages(ino, from) => {
                self.pages.retain(|(file, page), _| file != ino || page < from);
            }
        }
    }

    /// The entries of a directory, in the order of their cookies.
    pub fn listing(&self, dir: Ino) -> Vec<(Name, Dentry)> {
        let mut entries: Vec<_> = self
            .dentries
            .range((dir, Name::new(b""))..(Ino(dir.0 + 1), Name::new(b"")))
            .map(|((_, name), dentry)| (name.clone(), *dentry))
            .collect();
        entries.sort_by_key(|(_, dentry)| dentry.cookie);
        entries
    }
}
