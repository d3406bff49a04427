//! Dropping rows that the server has, so that a tree larger than memory can be walked.

use std::collections::HashSet;

use super::{Node, Tree};
use crate::{FileKind, Ino, InodeRow, Sequence};

/// So many listings that were used last stay, when there is room for a hundred inodes for each.
const NEWEST_KEPT: usize = 8;

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
            .filter(|(ino, directory)| {
                let is_there = |node: &Node| node.stored && node.cut <= durable;
                let can_be_fetched = self.nodes.get(ino).is_none_or(is_there);
                directory.dirty_names == 0 && directory.cut <= durable && can_be_fetched
            })
            .map(|(ino, directory)| (directory.used, *ino))
            .collect();
        oldest.sort_unstable();
        // Whoever has just fetched the newest is about to use them; some operations need several.
        let mut used: Vec<u64> = self.dirs.values().map(|directory| directory.used).collect();
        used.sort_unstable();
        let kept = (inodes_max / 100).clamp(1, NEWEST_KEPT);
        let newest = used.iter().rev().take(kept).next_back().copied();
        oldest.retain(|(used, _)| newest.is_none_or(|newest| *used < newest));
        for (_, dir) in oldest {
            if self.nodes.len() <= inodes_max {
                break;
            }
            let Some(directory) = self.dirs.remove(&dir) else { continue };
            self.splits.forget(dir);
            for dentry in directory.by_name.values() {
                self.leave_to_home(dir, dentry.ino);
                let clean = self.nodes.get(&dentry.ino).is_some_and(|node| {
                    !node.dirty && node.cut <= durable && !self.owns_alone(dentry.ino, &node.row)
                });
                // A directory's row goes when its own listing is gone already: parents are dropped later.
                let listed = dentry.kind == FileKind::Directory && self.dirs.contains_key(&dentry.ino);
                if clean && !listed && !in_use(dentry.ino) {
                    self.nodes.remove(&dentry.ino);
                    dropped.push(dentry.ino);
                }
            }
        }
        if self.nodes.len() > inodes_max {
            self.evict_lone(inodes_max, durable, &in_use, &mut dropped);
        }
        dropped
    }

    /// Gives back what tables keep for more entries than they have.
    pub fn shrink(&mut self) {
        fn fit<K: std::hash::Hash + Eq, V>(map: &mut super::Map<K, V>) {
            if map.capacity() / 4 > map.len() {
                map.shrink_to_fit();
            }
        }
        self.nodes.shrink(fit, fit);
        self.splits.shrink();
        fit(&mut self.dirs);
        fit(&mut self.dying);
        self.dirs.values_mut().for_each(|directory| directory.by_name.shrink());
        for set in self.owned.iter_mut().chain([&mut self.homeless, &mut self.in_use]) {
            if set.capacity() / 4 > set.len() {
                set.shrink_to_fit();
            }
        }
        self.changes.shrink();
        self.ended.shrink_to_fit();
        self.released.shrink_to_fit();
        self.lingering.shrink_to_fit();
    }

    /// A file that is owned by itself, and by its home as well: that is enough to go on changing it. The server may know it
    /// as owned by itself still; it is given back when it is recalled.
    fn leave_to_home(&mut self, dir: Ino, file: Ino) {
        let at_home = |row: &InodeRow| self.owns_alone(file, row) && row.parent == dir && row.nlink > 0;
        let is_at_home = self.nodes.get(&file).is_some_and(|node| at_home(&node.row));
        if is_at_home && self.owns_itself(dir) && !self.homeless.contains(&file) {
            self.disown(file);
        }
    }

    /// Files owned by themselves that could be evicted if they were not: at most `count`, first those at home in
    /// directories not used for longest. Whoever is told that they are not wanted recalls them.
    pub fn releasable(&self, count: usize, durable: Sequence, in_use: impl Fn(Ino) -> bool) -> Vec<Ino> {
        let mut files: Vec<(u64, Ino)> = self
            .owned
            .iter()
            .flatten()
            .filter_map(|ino| Some((*ino, self.nodes.get(ino)?)))
            .filter(|(ino, node)| {
                let has_gone = !node.dirty && node.stored && node.cut <= durable;
                has_gone
                    && node.row.kind() != FileKind::Directory
                    && node.row.nlink > 0
                    && !self.owns_itself(node.row.parent)
                    && !self.homeless.contains(ino)
                    && !in_use(*ino)
            })
            .map(|(ino, node)| (self.dirs.get(&node.row.parent).map_or(0, |home| home.used), ino))
            .collect();
        if files.len() > count {
            files.select_nth_unstable(count);
            files.truncate(count);
        }
        files.into_iter().map(|(_, ino)| ino).collect()
    }

    /// Drops rows that no listing in memory leads to: those of directories whose parent's listing went before
    /// their own, and those fetched by number.
    fn evict_lone(
        &mut self,
        inodes_max: usize,
        durable: Sequence,
        in_use: &impl Fn(Ino) -> bool,
        dropped: &mut Vec<Ino>,
    ) {
        let named: HashSet<Ino> = self
            .dirs
            .values()
            .flat_map(|directory| directory.by_name.values().map(|dentry| dentry.ino))
            .collect();
        let mut lone: Vec<Ino> = self
            .nodes
            .iter()
            .filter(|(ino, node)| {
                // Without a name it is the owner's to end, or was fetched when it had just lost its last one.
                let ends_here = node.row.nlink == 0 && self.owns(**ino);
                let clean = !node.dirty && node.cut <= durable && !ends_here;
                clean
                    && **ino != Ino::ROOT
                    && !named.contains(ino)
                    && !self.dirs.contains_key(ino)
                    && !in_use(**ino)
                    && !self.owns_alone(**ino, &node.row)
            })
            .map(|(ino, _)| *ino)
            .collect();
        lone.truncate(self.nodes.len() - inodes_max);
        lone.iter().for_each(|ino| drop(self.nodes.remove(ino)));
        dropped.append(&mut lone);
    }
}
