//! How a tree keeps rows and names: in as little memory as lookups and listings allow, since a build host holds millions.

use std::collections::hash_map::Entry;
use std::hash::BuildHasher;

use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;

use super::{Map, Node};
use crate::{Content, Dentry, Ino, InodeRow, Name, Sequence};

/// Rows by their inodes, and how often the kernel knows each. Each row has memory of its own: a table that has grown is half empty. For
/// that reason there is one table, and not a second one with counts.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    rows: Map<Ino, Box<Node>>,
    /// Of inodes without a row here; and what is more than a row can count.
    lookups: Map<Ino, u64>,
}

impl Nodes {
    pub(super) fn get(&self, ino: &Ino) -> Option<&Node> {
        self.rows.get(ino).map(|node| &**node)
    }

    pub(super) fn get_mut(&mut self, ino: &Ino) -> Option<&mut Node> {
        self.rows.get_mut(ino).map(|node| &mut **node)
    }

    pub(super) fn contains_key(&self, ino: &Ino) -> bool {
        self.rows.contains_key(ino)
    }

    /// Adds a row as it is here.
    pub(super) fn insert(&mut self, ino: Ino, row: InodeRow, stored: bool) {
        let node = Node { row, stored, dirty: !stored, lookups: 0, cut: Sequence(0) };
        let node = self.rows.entry(ino).insert_entry(Box::new(node)).into_mut();
        node.lookups = taken(&mut self.lookups, ino);
    }

    pub(super) fn remove(&mut self, ino: &Ino) -> Option<Box<Node>> {
        let node = self.rows.remove(ino)?;
        if node.lookups > 0 {
            *self.lookups.entry(*ino).or_default() += u64::from(node.lookups);
        }
        Some(node)
    }

    /// Adds a row as the server has it. What is here already stays, since it is newer; content that was left out of it is
    /// added: nobody changes what is not here.
    pub(super) fn add(&mut self, ino: Ino, row: InodeRow) -> &Node {
        match self.rows.entry(ino) {
            Entry::Occupied(here) => {
                let here = here.into_mut();
                if here.row.content == Content::LeftOut {
                    here.row.content = row.content;
                }
                here
            }
            Entry::Vacant(free) => {
                let lookups = taken(&mut self.lookups, ino);
                free.insert(Box::new(Node { row, stored: true, dirty: false, lookups, cut: Sequence(0) }))
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &Ino> {
        self.rows.keys()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Ino, &Node)> {
        self.rows.iter().map(|(ino, node)| (ino, &**node))
    }

    /// Drops all rows; what the kernel knows it goes on knowing.
    pub(super) fn clear(&mut self) {
        for (ino, node) in self.rows.drain().filter(|(_, node)| node.lookups > 0) {
            *self.lookups.entry(ino).or_default() += u64::from(node.lookups);
        }
    }

    /// Gives back what is kept for more than there are.
    pub(super) fn shrink(
        &mut self,
        fit: impl Fn(&mut Map<Ino, Box<Node>>),
        fit_lookups: impl Fn(&mut Map<Ino, u64>),
    ) {
        fit(&mut self.rows);
        fit_lookups(&mut self.lookups);
    }

    /// How often the kernel has been given an inode and not forgotten it.
    pub(super) fn lookups(&self, ino: Ino) -> u64 {
        let here = self.rows.get(&ino).map_or(0, |node| u64::from(node.lookups));
        here + self.lookups.get(&ino).copied().unwrap_or(0)
    }

    pub(super) fn is_known(&self, ino: Ino) -> bool {
        self.lookups(ino) > 0
    }

    /// The kernel has been given an inode once more. Gives how often it has been by now.
    pub(super) fn look_up(&mut self, ino: Ino) -> u64 {
        match self.rows.get_mut(&ino) {
            Some(node) if node.lookups < u32::MAX => node.lookups += 1,
            _ => *self.lookups.entry(ino).or_default() += 1,
        }
        self.lookups(ino)
    }

    /// The kernel has forgotten an inode so often. Gives what is left; `None`: it did not know it.
    pub(super) fn forget(&mut self, ino: Ino, count: u64) -> Option<u64> {
        let left = Some(self.lookups(ino)).filter(|known| *known > 0)?.saturating_sub(count);
        self.lookups.remove(&ino);
        let here = match self.rows.get_mut(&ino) {
            Some(node) => {
                node.lookups = left.min(u64::from(u32::MAX)) as u32;
                u64::from(node.lookups)
            }
            None => 0,
        };
        if left > here {
            self.lookups.insert(ino, left - here);
        }
        Some(left)
    }

    /// All inodes that the kernel knows.
    pub(super) fn known(&self) -> impl Iterator<Item = Ino> {
        let here = self.rows.iter().filter(|(_, node)| node.lookups > 0).map(|(ino, _)| *ino);
        here.chain(self.known_alone())
    }

    /// Those of them that have no row here.
    pub(super) fn known_alone(&self) -> impl Iterator<Item = Ino> {
        self.lookups.keys().copied().filter(|ino| !self.rows.contains_key(ino))
    }
}

/// Takes what a row can count of this out of a table.
fn taken(lookups: &mut Map<Ino, u64>, ino: Ino) -> u32 {
    let Entry::Occupied(mut found) = lookups.entry(ino) else { return 0 };
    let taken = u32::try_from(*found.get()).unwrap_or(u32::MAX);
    *found.get_mut() -= u64::from(taken);
    if *found.get() == 0 {
        found.remove();
    }
    taken
}

/// Names of a directory: by name, and in the order of their cookies.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// In the order of the cookies. What was removed stays as a gap, which has its cookie and no inode.
    slots: Vec<(Name, Dentry)>,
    gaps: usize,
    /// Where each name is.
    index: HashTable<u32>,
}

/// No inode has this number.
const GAP: Ino = Ino(0);

fn hash(name: &[u8]) -> u64 {
    FxBuildHasher.hash_one(name)
}

impl Names {
    fn find(&self, name: &[u8]) -> Option<u32> {
        self.index.find(hash(name), |at| self.slots[*at as usize].0.as_bytes() == name).copied()
    }

    pub(super) fn get(&self, name: &(impl AsRef<[u8]> + ?Sized)) -> Option<&Dentry> {
        self.find(name.as_ref()).map(|at| &self.slots[at as usize].1)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.gaps
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Room for so many names more, and not for more than that.
    pub(super) fn reserve(&mut self, more: usize) {
        self.slots.reserve_exact(more);
        let slots = &self.slots;
        self.index.reserve(more, |at| hash(slots[*at as usize].0.as_bytes()));
    }

    /// Adds a name, or gives one that is there another inode and place.
    pub(super) fn insert(&mut self, name: Name, dentry: Dentry) {
        self.remove(name.as_bytes());
        let is_last = self.slots.last().is_none_or(|(_, last)| last.cookie < dentry.cookie);
        let at = if is_last { self.slots.len() } else { self.place(dentry.cookie) };
        if self.slots.get(at).is_some_and(|(_, here)| here.cookie == dentry.cookie && here.ino == GAP) {
            self.slots[at] = (name, dentry);
            self.gaps -= 1;
        } else {
            self.slots.insert(at, (name, dentry));
            if at + 1 < self.slots.len() {
                // All behind it are somewhere else now.
                return self.reindex();
            }
        }
        let slots = &self.slots;
        let hash_at = |at: &u32| hash(slots[*at as usize].0.as_bytes());
        self.index.insert_unique(hash_at(&(at as u32)), at as u32, hash_at);
    }

    pub(super) fn remove(&mut self, name: &[u8]) -> Option<Dentry> {
        let slots = &self.slots;
        let found = self.index.find_entry(hash(name), |at| slots[*at as usize].0.as_bytes() == name).ok()?;
        let at = found.remove().0 as usize;
        let before = self.slots[at].1;
        self.slots[at] = (Name::new(b""), Dentry { ino: GAP, ..before });
        self.gaps += 1;
        if at + 1 == self.slots.len() || self.gaps > self.slots.len() / 2 {
            self.close_gaps();
        }
        Some(before)
    }

    /// The first place with this cookie, or a later one.
    fn place(&self, cookie: u64) -> usize {
        self.slots.partition_point(|(_, dentry)| dentry.cookie < cookie)
    }

    fn close_gaps(&mut self) {
        while self.slots.last().is_some_and(|(_, dentry)| dentry.ino == GAP) {
            self.slots.pop();
            self.gaps -= 1;
        }
        if self.gaps > self.slots.len() / 2 {
            self.slots.retain(|(_, dentry)| dentry.ino != GAP);
            self.gaps = 0;
            self.reindex();
        }
    }

    fn reindex(&mut self) {
        self.index.clear();
        let slots = &self.slots;
        let hash_at = |at: &u32| hash(slots[*at as usize].0.as_bytes());
        for at in (0..slots.len() as u32).filter(|at| slots[*at as usize].1.ino != GAP) {
            self.index.insert_unique(hash_at(&at), at, hash_at);
        }
    }

    /// Gives back what is kept for more names than there are.
    pub(super) fn shrink(&mut self) {
        if self.slots.capacity() / 4 > self.slots.len() {
            self.slots.shrink_to_fit();
        }
        if self.index.capacity() / 4 > self.index.len() {
            let slots = &self.slots;
            self.index.shrink_to_fit(|at| hash(slots[*at as usize].0.as_bytes()));
        }
    }

    /// All names behind a cookie, in order.
    pub(super) fn behind(&self, cookie: u64) -> impl Iterator<Item = (&Name, &Dentry)> {
        present(&self.slots[self.place(cookie.saturating_add(1))..])
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Name, &Dentry)> {
        present(&self.slots)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Dentry> {
        self.iter().map(|(_, dentry)| dentry)
    }
}

fn present(slots: &[(Name, Dentry)]) -> impl Iterator<Item = (&Name, &Dentry)> {
    slots.iter().filter(|(_, dentry)| dentry.ino != GAP).map(|(name, dentry)| (name, dentry))
}

impl<'a> IntoIterator for &'a Names {
    type Item = (&'a Name, &'a Dentry);
    type IntoIter = Box<dyn Iterator<Item = (&'a Name, &'a Dentry)> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        Box::new(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::FileKind;

    fn dentry(ino: u64, cookie: u64) -> Dentry {
        Dentry { ino: Ino(ino), kind: FileKind::Regular, cookie }
    }

    proptest! {
        /// Against two maps.
        #[test]
        fn names_are_found_by_name_and_in_order(
            steps in proptest::collection::vec((0..24u8, 0..4u8, 0..40u64), 1..200),
        ) {
            let mut names = Names::default();
            let mut model: BTreeMap<Vec<u8>, Dentry> = BTreeMap::new();
            for (at, (name, what, cookie)) in steps.into_iter().enumerate() {
                // Some of them too long to be kept in place.
                let name = vec![b'a' + name; 1 + usize::from(name) * 2];
                // Mostly what comes is new and last.
                let cookie = if what == 0 { cookie } else { 100 + at as u64 };
                if what == 3 {
                    prop_assert_eq!(names.remove(&name), model.remove(&name));
                } else if model.iter().all(|(other, here)| *other == name || here.cookie != cookie) {
                    let dentry = dentry(1 + at as u64, cookie);
                    names.insert(Name::new(&name), dentry);
                    model.insert(name, dentry);
                }
                names.shrink();
                prop_assert_eq!(names.len(), model.len());
                for name in (0..24u8).map(|name| vec![b'a' + name; 1 + usize::from(name) * 2]) {
                    prop_assert_eq!(names.get(&name[..]), model.get(&name));
                }
                let mut ordered: Vec<_> = model.iter().map(|(name, dentry)| (name.clone(), *dentry)).collect();
                ordered.sort_by_key(|(_, dentry)| dentry.cookie);
                for from in [0, 20, 101] {
                    let behind: Vec<_> = names.behind(from).map(|(name, dentry)| (name.as_bytes().to_vec(), *dentry)).collect();
                    let expected: Vec<_> = ordered.iter().filter(|(_, dentry)| dentry.cookie > from).cloned().collect();
                    prop_assert_eq!(behind, expected);
                }
            }
        }
    }

    #[test]
    fn what_is_removed_leaves_no_room_behind() {
        let mut names = Names::default();
        for at in 0..1000u64 {
            names.insert(Name::new(format!("name-{at}").as_bytes()), dentry(at + 1, at + 3));
        }
        for at in 0..990u64 {
            assert!(names.remove(format!("name-{at}").as_bytes()).is_some());
        }
        names.shrink();
        assert!(names.slots.capacity() < 100 && names.index.capacity() < 100);
        assert_eq!(names.iter().count(), 10);
    }
}
