//! What changed since the last cut, and the cut itself.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

use super::Tree;
use crate::grants::STRAY;
use crate::{Batch, Ino, Missing, Name, Record, Sequence, TreeError, UsageDelta};

/// Changes since the last cut. What was made and removed between two cuts leaves nothing here.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Inodes whose node is marked dirty; may hold ones that are gone since.
    pub(super) inodes: Vec<Ino>,
    /// Inodes that the server knows and that are gone.
    pub(super) deleted: Vec<Ino>,
    /// Names, and whether the server has (or will have, by cuts already made) each of them.
    names: HashMap<(Ino, Name), bool, FxBuildHasher>,
    /// How the usage has changed since the last cut. Counted by itself: others change the volume's usage as well, so
    /// that what is known of it here may be too low to subtract from.
    pub(super) usage: UsageDelta,
}

/// A cut of the log: the batch that brings the server to the state of this moment. Rows of files whose
/// data changed still name the content that was stored before; who keeps the data mends them before it
/// sends the batch.
#[derive(Debug)]
pub struct Cut {
    /// The batch.
    pub batch: Batch,
    /// Inodes that the server had no row of before.
    fresh: Vec<Ino>,
    /// Files of which the server learns that they have lost their home.
    homeless: Vec<Ino>,
    /// The names, and whether the server had each of them.
    names: Vec<(Ino, Name, bool)>,
}

impl Changes {
    /// Gives back what is kept for more changes than there are.
    pub(super) fn shrink(&mut self) {
        self.inodes.shrink_to_fit();
        self.deleted.shrink_to_fit();
        self.names.shrink_to_fit();
    }
}

impl Tree {
    /// A name of `dir` is about to change; `present` says whether it exists before the change.
    pub(super) fn note_name(&mut self, dir: Ino, name: &Name, present: bool) -> Result<(), TreeError> {
        let place = self.place(dir, name.as_bytes());
        let directory = self.dirs.get_mut(&place).ok_or(TreeError::Missing(Missing::Directory(dir)))?;
        self.changes.names.entry((dir, name.clone())).or_insert_with(|| {
            directory.dirty_names += 1;
            present
        });
        Ok(())
    }

    /// Whether a cut would hold anything that a crash must not lose.
    pub fn is_dirty(&self) -> bool {
        !self.changes.inodes.is_empty() || !self.changes.deleted.is_empty() || !self.changes.names.is_empty()
    }

    /// How many rows changed since the last cut, about.
    pub fn dirty_rows(&self) -> usize {
        self.changes.inodes.len() + self.changes.deleted.len() + self.changes.names.len()
    }

    /// Takes everything that changed since the last cut. Files without a name that the server does not
    /// know are left out (they end with their user) unless `with_unnamed` says that their data has to go
    /// to the server for want of memory.
    pub fn cut(&mut self, sequence: Sequence, with_unnamed: bool) -> Cut {
        let mut records = Vec::with_capacity(self.dirty_rows());
        let mut orphans = Vec::new();
        let mut kept = Vec::new();
        let mut fresh = Vec::new();
        let mut homeless = Vec::new();
        let mut names = Vec::with_capacity(self.changes.names.len());
        for ino in std::mem::take(&mut self.changes.inodes) {
            let Some(node) = self.nodes.get_mut(&ino) else { continue };
            if !node.dirty {
                continue;
            }
            if node.row.nlink == 0 {
                if !node.stored && !with_unnamed {
                    kept.push(ino);
                    continue;
                }
                orphans.push(ino);
            }
            node.dirty = false;
            if !std::mem::replace(&mut node.stored, true) {
                fresh.push(ino);
            }
            node.cut = sequence;
            if self.homeless.remove(&ino) {
                homeless.push(ino);
            }
            records.push(Record::PutInode(ino, Box::new(node.row.clone())));
        }
        self.changes.inodes = kept;
        for ino in std::mem::take(&mut self.changes.deleted) {
            if let Some((_, cut)) = self.dying.get_mut(&ino) {
                *cut = Some(sequence);
            }
            records.push(Record::DeleteInode(ino));
        }
        for ((dir, name), stored) in std::mem::take(&mut self.changes.names) {
            let place = self.place(dir, name.as_bytes());
            let directory = self.dirs.get_mut(&place);
            let dentry = directory.and_then(|directory| {
                directory.dirty_names = 0;
                directory.cut = sequence;
                directory.by_name.get(&name).copied()
            });
            match dentry {
                Some(dentry) => records.push(Record::PutDentry(dir, name.clone(), dentry)),
                None if stored => records.push(Record::DeleteDentry(dir, name.clone())),
                None => {}
            }
            names.push((dir, name, stored));
        }
        let usage = std::mem::take(&mut self.changes.usage);
        Cut { batch: Batch { sequence, records, usage, orphans }, fresh, homeless, names }
    }

    /// The server has refused the last cut, and nothing of it was applied: what it held is part of the
    /// next one again, less what has been removed since.
    pub fn undo_cut(&mut self, cut: Cut) {
        for ino in cut.fresh {
            if let Some(node) = self.nodes.get_mut(&ino) {
                node.stored = false;
            } else {
                // It has ended since then, and the server never knew it.
                self.changes.deleted.retain(|deleted| *deleted != ino);
                self.disown(ino);
            }
        }
        for ino in cut.homeless {
            match self.nodes.get(&ino).map(|node| node.row.parent) {
                Some(STRAY) if self.owns(ino) => drop(self.homeless.insert(ino)),
                // Made in a split directory.
                Some(parent) if self.is_split(parent) && self.owns(ino) => drop(self.homeless.insert(ino)),
                // It has a home again, and the server does not know that it had none.
                Some(parent) if parent != STRAY => self.disown(ino),
                _ => {}
            }
        }
        for record in &cut.batch.records {
            match record {
                Record::PutInode(ino, _) => {
                    if let Some(node) = self.nodes.get_mut(ino).filter(|node| !node.dirty) {
                        node.dirty = true;
                        self.changes.inodes.push(*ino);
                    }
                }
                Record::DeleteInode(ino) => {
                    if let Some((_, cut)) = self.dying.get_mut(ino) {
                        *cut = None;
                    }
                    self.changes.deleted.push(*ino);
                }
                _ => {}
            }
        }
        for (dir, name, stored) in cut.names {
            let place = self.place(dir, name.as_bytes());
            if let Some(directory) = self.dirs.get_mut(&place)
                && !self.changes.names.contains_key(&(dir, name.clone()))
            {
                directory.dirty_names += 1;
            }
            // What the server had before the refused cut counts, not what it would have had after it.
            self.changes.names.insert((dir, name), stored);
        }
        self.changes.usage.bytes += cut.batch.usage.bytes;
        self.changes.usage.inodes += cut.batch.usage.inodes;
    }
}
