//! Dropping rows that the server has, so that a tree larger than memory can be walked.

use super::Tree;
use crate::{FileKind, Ino, Sequence};

impl Tree {
    /// Drops listings not used for longest, with the rows of their entries, until at most `inodes_max`
    /// inodes are in memory or nothing more can go. `durable` is the last batch that the server is known
    /// to hold: what later cuts took, and what no cut took yet, stays, and so does what `in_use` says.
    /// Returns the inodes dropped.
    pub fn evict(&mut self, inodes_max: usize, durable: Sequence, in_use: impl Fn(Ino) -> bool) -> Vec<Ino> {
        let mut dropped = Vec::new();
        if self.nodes.len() <= inodes_max {
            return dropped;
        }
        let mut oldest: Vec<(u64, Ino)> = self
            .dirs
            .iter()
            .filter(|(_, directory)| directory.dirty_names == 0 && directory.cut <= durable)
            .map(|(ino, directory)| (directory.used, *ino))
            .collect();
        oldest.sort_unstable();
        for (_, dir) in oldest {
            if self.nodes.len() <= inodes_max {
                break;
            }
            let Some(directory) = self.dirs.remove(&dir) else { continue };
            for dentry in directory.by_name.values() {
                let clean =
                    self.nodes.get(&dentry.ino).is_some_and(|node| !node.dirty && node.cut <= durable);
                // A directory's row goes when its own listing is gone already: parents are dropped later.
                let listed = dentry.kind == FileKind::Directory && self.dirs.contains_key(&dentry.ino);
                if clean && !listed && !in_use(dentry.ino) {
                    self.nodes.remove(&dentry.ino);
                    dropped.push(dentry.ino);
                }
            }
        }
        dropped
    }
}
