//! Split directories (`crate::slot`): their names are known, and owned, by slots.

use std::collections::HashSet;

use rustc_hash::FxBuildHasher;

use super::{Directory, Map, Stale, Tree};
use crate::grants::Object;
use crate::slot::Width;
use crate::{Dentry, FileKind, Ino, InodeRow, Missing, Name, Timestamp, TreeError, slot};

/// Who has looked for so many names of a split directory, and made none, wants its listing.
const LOOKS_MAX: u32 = 256;

/// The split directories that a tree knows of.
#[derive(Debug, Default)]
pub(super) struct Splits {
    dirs: Map<Ino, Split>,
    /// Stems of which all names are known, by slot.
    stems: Map<Ino, HashSet<Name, FxBuildHasher>>,
    /// Stems that were looked for last, by slot.
    wanted: Map<Ino, Name>,
    /// Slots that are owned, by directory: a recall has to find them among all that is owned.
    owned: Map<Ino, HashSet<Ino, FxBuildHasher>>,
}

#[derive(Debug, Default)]
struct Split {
    /// What the server says of it: known when names of a stem have come.
    width: Width,
    /// Slots of which names are in memory.
    slots: HashSet<Ino, FxBuildHasher>,
    /// Stems that were fetched since something was made.
    looks: u32,
    /// The latest change that is known of what is at home there.
    latest: Timestamp,
}

impl Splits {
    pub(super) fn shrink(&mut self) {
        self.dirs.shrink_to_fit();
        self.stems.shrink_to_fit();
        self.wanted.shrink_to_fit();
        self.owned.shrink_to_fit();
    }

    /// Something is made in a directory: who makes things does not want its listing.
    pub(super) fn makes(&mut self, dir: Ino) {
        if let Some(split) = self.dirs.get_mut(&dir) {
            split.looks = 0;
        }
    }

    pub(super) fn latest(&self, dir: Ino) -> Timestamp {
        self.dirs.get(&dir).map_or(Timestamp::default(), |split| split.latest)
    }

    pub(super) fn latest_in(&mut self, dir: Ino) -> Option<&mut Timestamp> {
        self.dirs.get_mut(&dir).map(|split| &mut split.latest)
    }

    /// Something is owned.
    pub(super) fn owns(&mut self, ino: Ino) {
        if let Some(dir) = ino.of_slot() {
            self.owned.entry(dir).or_default().insert(ino);
        }
    }

    /// Something is not owned any more.
    pub(super) fn disowns(&mut self, ino: Ino) {
        let Some(dir) = ino.of_slot() else { return };
        if let Some(slots) = self.owned.get_mut(&dir) {
            slots.remove(&ino);
            if slots.is_empty() {
                self.owned.remove(&dir);
            }
        }
    }

    /// Names of a slot leave memory.
    pub(super) fn forget(&mut self, slot: Ino) {
        self.stems.remove(&slot);
        self.wanted.remove(&slot);
        if let Some(split) = slot.of_slot().and_then(|dir| self.dirs.get_mut(&dir)) {
            split.slots.remove(&slot);
        }
    }

    /// The directory is not known any more. Names in slots that are owned still, since they are not shipped, are found where
    /// they were.
    pub(super) fn leave(&mut self, dir: Ino) {
        if self.dirs.get(&dir).is_some_and(|split| split.slots.is_empty()) {
            self.dirs.remove(&dir);
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Splits::default();
    }

    /// The same for all of them.
    pub(super) fn leave_all(&mut self) {
        self.dirs.retain(|_, split| !split.slots.is_empty());
    }
}

impl Tree {
    /// Whether a directory is split.
    pub fn is_split(&self, dir: Ino) -> bool {
        self.splits.dirs.contains_key(&dir)
    }

    /// A directory is split: its row has come, without names.
    pub fn add_split(&mut self, dir: Ino, row: InodeRow) {
        self.add_inode(dir, row);
        if !self.dirs.contains_key(&dir) {
            self.splits.dirs.entry(dir).or_default();
        }
    }

    /// All names of one stem, as fetched from the server, unless they are here already. Rows as in [`Tree::add_listing`].
    pub fn add_names(
        &mut self,
        slot: Ino,
        stem: &[u8],
        entries: impl IntoIterator<Item = (Name, Dentry, Option<InodeRow>)>,
    ) {
        let Some(dir) = slot.of_slot() else { return };
        let Some(split) = self.splits.dirs.get_mut(&dir) else { return };
        if split.width != slot.width() {
            self.splits.wanted.remove(&dir.slot(stem, split.width));
            split.width = slot.width();
        }
        split.slots.insert(slot);
        split.looks += 1;
        let is_new = self.splits.stems.entry(slot).or_default().insert(Name::new(stem));
        let mut directory = self
            .dirs
            .remove(&slot)
            .unwrap_or_else(|| Directory { used: self.operations, ..Directory::default() });
        for (name, dentry, row) in entries {
            let leads_there = match directory.by_name.get(&name) {
                Some(here) => here.ino == dentry.ino,
                None => is_new,
            };
            if is_new {
                directory.insert(name, dentry);
            }
            if let Some(row) = row.filter(|_| leads_there) {
                self.add_inode(dentry.ino, row);
            }
        }
        self.dirs.insert(slot, directory);
    }

    /// A directory is not split any more: all that is known of it goes.
    pub fn forget_split(&mut self, dir: Ino) {
        self.splits.leave(dir);
        if !self.is_split(dir) {
            self.drop_row(dir, &mut Stale::default());
        }
    }

    /// The stem that was looked for last in a slot: what [`Missing::Names`] wants.
    pub fn wanted_stem(&self, slot: Ino) -> Option<Name> {
        self.splits.wanted.get(&slot).cloned()
    }

    /// Under which number a name of a directory is kept: that of its slot where it is split, else the directory's own.
    pub fn place(&self, dir: Ino, name: &[u8]) -> Ino {
        self.splits.dirs.get(&dir).map_or(dir, |split| dir.slot(name, split.width))
    }

    /// The same, where it is known whether there is such a name.
    fn known_place(&mut self, dir: Ino, name: &[u8]) -> Result<Ino, TreeError> {
        let Some(split) = self.splits.dirs.get(&dir) else { return Ok(dir) };
        let (slot, stem) = (dir.slot(name, split.width), slot::stem(name));
        if self.splits.stems.get(&slot).is_some_and(|stems| stems.contains(stem)) {
            return Ok(slot);
        }
        if split.looks >= LOOKS_MAX {
            return Err(TreeError::Missing(Missing::Listing(dir)));
        }
        self.splits.wanted.insert(slot, Name::new(stem));
        Err(TreeError::Missing(Missing::Names(slot)))
    }

    /// The names of a directory among which this one is, if it exists.
    pub(super) fn names(&mut self, dir: Ino, name: &[u8]) -> Result<&mut Directory, TreeError> {
        if self.node(dir)?.row.kind() != FileKind::Directory {
            return Err(TreeError::NotDirectory);
        }
        let place = self.known_place(dir, name)?;
        self.operations += 1;
        let directory = self.dirs.get_mut(&place).ok_or(TreeError::Missing(Missing::Directory(dir)))?;
        directory.used = self.operations;
        Ok(directory)
    }

    /// Everything in memory of the names of a directory.
    pub(super) fn all_names(&self, dir: Ino) -> impl Iterator<Item = (&Name, &Dentry)> {
        let slots = self.splits.dirs.get(&dir).into_iter().flat_map(|split| split.slots.iter().copied());
        let places = std::iter::once(dir).chain(slots);
        places.filter_map(|place| self.dirs.get(&place)).flat_map(|directory| &directory.by_name)
    }

    /// The cookie of a new name in a split directory: by a number that nothing else has.
    pub(super) fn split_cookie(number: Ino) -> u64 {
        slot::FIRST_COOKIE + number.0
    }

    /// Slots of a directory of which names are in memory.
    pub(super) fn slots_in_memory(&self, dir: Ino) -> Vec<Ino> {
        self.splits.dirs.get(&dir).into_iter().flat_map(|split| split.slots.iter().copied()).collect()
    }

    /// What is owned of a recalled object: itself, and of a directory that is not to be read any more either, its slots.
    pub fn owned_of(&self, object: Object, keep_read: bool) -> Vec<Ino> {
        let slots =
            self.splits.owned.get(&object.ino()).filter(|_| !keep_read).into_iter().flatten().copied();
        slots.chain([object.ino()]).filter(|ino| self.owns_itself(*ino)).collect()
    }

    /// Only whole directories are changed in this way.
    pub(super) fn need_whole(&self, dir: Ino) -> Result<(), TreeError> {
        match self.owned.is_some() && self.is_split(dir) {
            true => Err(TreeError::Missing(Missing::Executor)),
            false => Ok(()),
        }
    }

    /// The times of a split directory run with the clock: others change it, and nobody tells. Returns whether it is one.
    pub fn run_clock(&mut self, dir: Ino, now: Timestamp) -> bool {
        let (is_split, latest) = (self.is_split(dir), self.splits.latest(dir));
        if let Some(node) = self.nodes.get_mut(&dir).filter(|_| is_split) {
            let time = node.row.ctime.max(now).max(latest);
            (node.row.mtime, node.row.ctime) = (time, time);
        }
        is_split
    }

    /// A slot is no longer held: others may change its names.
    pub(super) fn uncover_slot(&mut self, slot: Ino) -> Stale {
        let mut stale = Stale::default();
        let Some(dir) = slot.of_slot() else { return stale };
        self.splits.forget(slot);
        for (name, dentry) in self.dirs.remove(&slot).iter().flat_map(|directory| &directory.by_name) {
            if self.nodes.is_known(dentry.ino) {
                stale.names.push((dir, name.clone()));
                // Its last name may go without a word.
                if !self.owns_itself(dentry.ino) && dentry.kind != FileKind::Directory {
                    self.report_in_use(dentry.ino, &mut stale);
                }
            }
        }
        if !self.nodes.contains_key(&dir) {
            self.splits.leave(dir);
        }
        stale
    }

    /// Whether a file is at home in a split directory: nobody tells when its names go.
    pub(super) fn is_home_split(&self, file: Ino) -> bool {
        let at_home = |row: &InodeRow| row.kind() != FileKind::Directory && self.is_split(row.parent);
        self.nodes.get(&file).is_some_and(|node| at_home(&node.row))
    }
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
