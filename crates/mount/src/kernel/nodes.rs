//! The numbers by which the kernel knows inodes, and where it has its directories.
//!
//! The kernel's number of a file is its inode number, and so is a directory's as a rule. For each directory number the
//! kernel has one place in its tree of names. When an answer says that it is elsewhere, the kernel moves it there, for
//! which it only tries to get locks that calls under way in the parents may have: then whoever asked gets ESTALE
//! (`d_splice_alias`), for as long as these calls wait for the server. Within one parent it needs no locks.
//!
//! So what somebody else has moved to another parent is told under another number: the kernel takes that for one more
//! directory. All requests about it come to the same inode, and what is said about the inode is said for all its
//! numbers. Who has the directory open, or works in it, goes on with the old number; what is below gets new ones as well,
//! when it is looked up. Where this host moves a directory itself, the kernel takes the number along.
//!
//! Which number that is the kernel does not say. Who looks up a name that the kernel has an entry for holds no lock, and an answer with
//! another number is given back: the entry has the old one still when a rename under way moves it. So what the kernel was told of a
//! place before counts until it is forgotten. Where there are several, and they may have gone to another parent, nobody knows which one has: they are
//! not told any more, but by new numbers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hayloft_model::{Ino, Name};
use rustc_hash::FxBuildHasher;

/// Marks a number that is no inode number, which is in its lower bits then.
const OTHER: u64 = 1 << 63;
const INO_BITS: u32 = 48;
/// Other numbers of one directory at the same time, at most.
const OTHERS_MAX: u64 = (OTHER >> INO_BITS) - 1;

/// The kernel's number of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct NodeId(pub(crate) u64);

impl NodeId {
    /// No number: it is not known where the kernel has a directory.
    const NOWHERE: NodeId = NodeId(0);
    /// No number: the kernel has a directory at one of several places. (No inode has this number, and no other number this serial.)
    const UNSURE: NodeId = NodeId(1 << 63);

    /// The inode.
    pub(crate) fn ino(self) -> Ino {
        Ino(if self.0 & OTHER == 0 { self.0 } else { self.0 & ((1 << INO_BITS) - 1) })
    }

    /// Of anything but a directory.
    pub(crate) fn of_file(ino: Ino) -> NodeId {
        NodeId(ino.0)
    }

    fn own(ino: Ino) -> NodeId {
        NodeId(ino.0)
    }

    fn other(ino: Ino, serial: u64) -> NodeId {
        NodeId(OTHER | serial << INO_BITS | ino.0)
    }
}

/// A place where the kernel has a directory that others have moved away.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Left {
    number: NodeId,
    pub(crate) parent: NodeId,
    pub(crate) name: Name,
}

/// A directory that the kernel knows.
#[derive(Debug)]
struct Node {
    /// Where the kernel has it; the name may be another one's by now.
    parent: NodeId,
    name: Name,
    /// References that the kernel has been given and has not given back.
    lookups: u64,
}

/// Directories as the kernel knows them.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    known: HashMap<NodeId, Node, FxBuildHasher>,
    /// What the kernel found last at each place.
    places: HashMap<(NodeId, Name), NodeId, FxBuildHasher>,
    /// What it was told of the place before, and may have there still, the latest last.
    older: HashMap<(NodeId, Name), Vec<NodeId>, FxBuildHasher>,
    /// Directories with numbers that are not their own, and all that are known of them, the latest last.
    moved: HashMap<Ino, Vec<NodeId>, FxBuildHasher>,
    /// Whether there are any.
    any_moved: Arc<AtomicBool>,
    /// Files of trees that were replaced: references that the kernel has, and of which tree.
    replaced: HashMap<NodeId, (u64, u32), FxBuildHasher>,
    /// Whether there are any.
    any_replaced: Arc<AtomicBool>,
    /// How many each tree has, and those that have none any more.
    trees: HashMap<u32, usize>,
    ended: Vec<u32>,
    /// Files of the present tree of which the kernel is told under other numbers, since it has replaced ones by theirs.
    files: HashMap<Ino, NodeId, FxBuildHasher>,
    /// Numbers of files that were told apart, see [`Nodes::hand_out_apart`]: references that the kernel has.
    apart: HashMap<NodeId, u64, FxBuildHasher>,
}

impl Nodes {
    /// The number under which the kernel is to find a directory at a place.
    pub(crate) fn number(&self, parent: NodeId, name: &[u8], ino: Ino) -> NodeId {
        let own = NodeId::own(ino);
        let is_here = |node: &Node| node.parent == parent || node.parent == NodeId::NOWHERE;
        let Some(numbers) = self.moved.get(&ino) else {
            let stays = self.known.get(&own).is_none_or(is_here) || ino.0 >> INO_BITS != 0;
            return if stays { own } else { NodeId::other(ino, 1) };
        };
        let at = |number: &&NodeId| self.known.get(*number).filter(|node| is_here(node));
        let here = || numbers.iter().rev().filter(|number| at(number).is_some());
        let by_name = here().find(|number| at(number).is_some_and(|node| node.name.as_bytes() == name));
        if let Some(number) = by_name.or_else(|| here().next()) {
            return *number;
        }
        let is_free = |number: &NodeId| !self.known.contains_key(number);
        let others = (1..=OTHERS_MAX).map(|serial| NodeId::other(ino, serial));
        std::iter::once(own).chain(others).find(is_free).unwrap_or(own)
    }

    /// The kernel is told of a directory at a place, once more, under the number that [`Nodes::number`] says. Returns that, and where it
    /// has the directory still and nobody finds it any more.
    pub(crate) fn hand_out(&mut self, parent: NodeId, name: &[u8], ino: Ino) -> (NodeId, Vec<Left>) {
        self.hand_out_as(self.number(parent, name, ino), parent, name, ino)
    }

    /// The kernel is told of an inode under a number that it has nothing by: it does not take it for what it has at another name.
    pub(crate) fn hand_out_apart(
        &mut self,
        parent: NodeId,
        name: &[u8],
        ino: Ino,
        is_directory: bool,
    ) -> (NodeId, Vec<Left>) {
        let mut others = (1..=OTHERS_MAX).map(|serial| NodeId::other(ino, serial));
        let is_free = |number: &NodeId| {
            !self.known.contains_key(number)
                && !self.replaced.contains_key(number)
                && !self.apart.contains_key(number)
                && self.files.get(&ino) != Some(number)
        };
        let number = others.find(is_free).filter(|_| ino.0 >> INO_BITS == 0);
        match number {
            Some(number) if is_directory => self.hand_out_as(number, parent, name, ino),
            Some(number) => {
                *self.apart.entry(number).or_default() += 1;
                (number, Vec::new())
            }
            None if is_directory => self.hand_out(parent, name, ino),
            None => (self.hand_out_file(ino), Vec::new()),
        }
    }

    fn hand_out_as(&mut self, number: NodeId, parent: NodeId, name: &[u8], ino: Ino) -> (NodeId, Vec<Left>) {
        let is_new = !self.known.contains_key(&number);
        let mut left = Vec::new();
        if is_new && (number != NodeId::own(ino) || self.moved.contains_key(&ino)) {
            let own = NodeId::own(ino);
            let own = self.known.contains_key(&own).then_some(own);
            self.any_moved.store(true, Ordering::Release);
            let numbers = self.moved.entry(ino).or_insert_with(|| own.into_iter().collect());
            let older = numbers.iter().filter_map(|number| Some((*number, self.known.get(number)?)));
            for (number, node) in older {
                if node.parent.ino() != parent.ino() {
                    left.push(Left { number, parent: node.parent, name: node.name.clone() });
                }
            }
            numbers.push(number);
            left.retain(|left| self.is_left(left));
        }
        let node = self.known.entry(number).or_insert_with(|| Node {
            parent: NodeId::NOWHERE,
            name: Name::new(name),
            lookups: 0,
        });
        node.lookups += 1;
        let is_there = node.parent == parent && node.name.as_bytes() == name;
        if !is_there || self.places.get(&(parent, node.name.clone())) != Some(&number) {
            self.place(number, (parent, Name::new(name)));
        }
        (number, left)
    }

    /// Whether the kernel has a directory there still.
    pub(crate) fn is_left(&self, left: &Left) -> bool {
        self.places.get(&(left.parent, left.name.clone())) == Some(&left.number)
    }

    /// The kernel has it there now.
    fn place(&mut self, number: NodeId, (parent, name): (NodeId, Name)) {
        let Some(node) = self.known.get_mut(&number) else { return };
        let before = (node.parent, std::mem::replace(&mut node.name, name.clone()));
        node.parent = parent;
        self.leave(&before, number);
        let at = (parent, name);
        if let Some(other) = self.places.insert(at.clone(), number)
            && self.known.get(&other).is_some_and(|node| (node.parent, &node.name) == (at.0, &at.1))
        {
            self.older.entry(at).or_default().push(other);
        }
    }

    /// The kernel does not have it there. What it was told of the place before counts again.
    fn leave(&mut self, at: &(NodeId, Name), number: NodeId) {
        let older = self.older.get_mut(at);
        if self.places.get(at) == Some(&number) {
            match older.and_then(Vec::pop) {
                Some(before) => drop(self.places.insert(at.clone(), before)),
                None => drop(self.places.remove(at)),
            }
        } else if let Some(older) = older {
            older.retain(|known| *known != number);
        }
        if self.older.get(at).is_some_and(Vec::is_empty) {
            self.older.remove(at);
        }
    }

    /// All that the kernel may have at a place, the latest last; it has none of it there any more.
    fn take_all(&mut self, at: &(NodeId, Name)) -> Vec<NodeId> {
        let mut all = self.older.remove(at).unwrap_or_default();
        all.extend(self.places.remove(at));
        all
    }

    /// The kernel has moved one of these.
    fn place_one_of(&mut self, numbers: Vec<NodeId>, from: NodeId, to: &(NodeId, Name)) {
        let is_sure = numbers.len() == 1 || from == to.0;
        for number in numbers {
            if is_sure {
                self.place(number, to.clone());
            } else if let Some(node) = self.known.get_mut(&number) {
                node.parent = NodeId::UNSURE;
            }
        }
    }

    /// The kernel has asked for a directory by its number: one more reference. `is_lost`: it has no place for it.
    pub(crate) fn hand_out_lone(&mut self, number: NodeId, is_lost: bool) {
        let nowhere = || Node { parent: NodeId::NOWHERE, name: Name::new(b""), lookups: 0 };
        let node = self.known.entry(number).or_insert_with(nowhere);
        node.lookups += 1;
        if is_lost {
            let before = (std::mem::replace(&mut node.parent, NodeId::NOWHERE), node.name.clone());
            self.leave(&before, number);
        }
        let (ino, own) = (number.ino(), NodeId::own(number.ino()));
        if number != own || self.moved.contains_key(&ino) {
            let own = self.known.contains_key(&own).then_some(own);
            self.any_moved.store(true, Ordering::Release);
            let numbers = self.moved.entry(ino).or_insert_with(|| own.into_iter().collect());
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
    }

    /// The number of a directory's parent, of which the kernel has asked by number.
    pub(crate) fn parent(&self, number: NodeId, parent: Ino) -> NodeId {
        let known = self.known.get(&number).map(|node| node.parent).filter(|known| known.ino() == parent);
        known.unwrap_or_else(|| self.numbers(parent).last().unwrap_or(NodeId::own(parent)))
    }

    /// This host's kernel has moved a name, or exchanged two: what it has there goes along.
    pub(crate) fn renamed(&mut self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        let (from, to) = ((from.0, Name::new(from.1)), (to.0, Name::new(to.1)));
        let (source, target) = (self.take_all(&from), self.take_all(&to));
        self.place_one_of(source, from.0, &to);
        if exchange {
            self.place_one_of(target, to.0, &from);
        }
    }

    /// The kernel has given back so many references. Whether it has none any more.
    pub(crate) fn forget(&mut self, number: NodeId, count: u64) -> bool {
        let Some(node) = self.known.get_mut(&number) else { return false };
        node.lookups = node.lookups.saturating_sub(count);
        if node.lookups > 0 {
            return false;
        }
        let node = self.known.remove(&number).expect("just seen");
        self.leave(&(node.parent, node.name), number);
        let ino = number.ino();
        if let Some(numbers) = self.moved.get_mut(&ino) {
            numbers.retain(|known| *known != number);
            if numbers.iter().all(|number| *number == NodeId::own(ino)) {
                self.moved.remove(&ino);
                self.any_moved.store(!self.moved.is_empty(), Ordering::Release);
            }
        }
        true
    }

    /// All numbers of an inode, the latest last.
    pub(crate) fn numbers(&self, ino: Ino) -> impl Iterator<Item = NodeId> + '_ {
        let numbers = self.moved.get(&ino);
        let own = numbers.is_none().then(|| self.file(ino));
        numbers.into_iter().flatten().copied().chain(own)
    }

    /// Inodes by all their numbers, as the kernel is told of them.
    pub(crate) fn each(&self, inos: Vec<Ino>) -> Vec<Ino> {
        if self.moved.is_empty() && self.files.is_empty() {
            return inos;
        }
        inos.into_iter().flat_map(|ino| self.numbers(ino)).map(|number| Ino(number.0)).collect()
    }

    /// The same for names of directories.
    pub(crate) fn each_name(&self, names: Vec<(Ino, Name)>) -> Vec<(Ino, Name)> {
        if self.moved.is_empty() {
            return names;
        }
        let each = |(dir, name): (Ino, Name)| {
            self.numbers(dir).map(move |number| (Ino(number.0), name.clone())).collect::<Vec<_>>()
        };
        names.into_iter().flat_map(each).collect()
    }

    /// Whether any directory has another number than its own, for who looks without the lock.
    pub(crate) fn any_moved(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.any_moved)
    }

    /// Whether this one has.
    pub(crate) fn has_moved(&self, ino: Ino) -> bool {
        self.moved.contains_key(&ino)
    }

    /// Whether the kernel has a directory of that number.
    pub(crate) fn is_directory(&self, ino: Ino) -> bool {
        self.moved.contains_key(&ino) || self.known.contains_key(&NodeId::own(ino))
    }

    /// The number of anything but a directory: its own, unless the kernel has it by that as it was in another tree.
    pub(crate) fn file(&self, ino: Ino) -> NodeId {
        let own = NodeId::of_file(ino);
        if let Some(number) = self.files.get(&ino) {
            return *number;
        }
        if !self.replaced.contains_key(&own) {
            return own;
        }
        let mut others = (1..=OTHERS_MAX).map(|serial| NodeId::other(ino, serial));
        let is_free =
            |number: &NodeId| !self.replaced.contains_key(number) && !self.apart.contains_key(number);
        others.find(is_free).unwrap_or(own)
    }

    /// The kernel is told of it by that number.
    pub(crate) fn hand_out_file(&mut self, ino: Ino) -> NodeId {
        let number = self.file(ino);
        if number != NodeId::of_file(ino) {
            self.files.insert(ino, number);
        }
        number
    }

    /// The kernel has it no more.
    pub(crate) fn forget_file(&mut self, ino: Ino) {
        self.files.remove(&ino);
    }

    /// The kernel has given back so many references of a file that it was told of apart. Whether it has none any more.
    pub(crate) fn forget_apart(&mut self, number: NodeId, count: u64) -> bool {
        let Some(left) = self.apart.get_mut(&number) else { return false };
        *left = left.saturating_sub(count);
        let is_last = *left == 0;
        if is_last {
            self.apart.remove(&number);
        }
        is_last
    }

    /// The numbers that the kernel was told of a file apart, with its references, as it goes to a tree that was replaced.
    pub(crate) fn take_apart(&mut self, ino: Ino) -> Vec<(NodeId, u64)> {
        if self.apart.is_empty() {
            return Vec::new();
        }
        self.apart.extract_if(|number, _| number.ino() == ino).collect()
    }

    /// What the kernel has by a number, with so many references, is of a tree that was replaced.
    pub(crate) fn replace(&mut self, number: NodeId, count: u64, tree: u32) {
        self.files.remove(&number.ino());
        if count > 0 && self.replaced.insert(number, (count, tree)).is_none() {
            *self.trees.entry(tree).or_default() += 1;
            self.any_replaced.store(true, Ordering::Release);
        }
    }

    /// Whether the kernel has files of a tree that was replaced.
    pub(crate) fn has_of(&self, tree: u32) -> bool {
        self.trees.contains_key(&tree)
    }

    /// The tree of a number, if that was replaced.
    pub(crate) fn replaced(&self, number: NodeId) -> Option<u32> {
        self.replaced.get(&number).map(|(_, tree)| *tree)
    }

    /// The kernel has given back so many references. Whether these were of a file of a tree that was replaced.
    pub(crate) fn forget_replaced(&mut self, number: NodeId, count: u64) -> bool {
        let Some((left, tree)) = self.replaced.get_mut(&number) else { return false };
        *left = left.saturating_sub(count);
        let tree = *tree;
        if *left == 0 {
            self.replaced.remove(&number);
            self.any_replaced.store(!self.replaced.is_empty(), Ordering::Release);
            if let Some(files) = self.trees.get_mut(&tree) {
                *files -= 1;
                if *files == 0 {
                    self.trees.remove(&tree);
                    self.ended.push(tree);
                }
            }
        }
        true
    }

    /// Trees of which the kernel has nothing any more since this was asked last.
    pub(crate) fn take_ended(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.ended)
    }

    /// Whether there are files of any, for who looks without the lock.
    pub(crate) fn any_replaced(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.any_replaced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: NodeId = NodeId(1);

    #[test]
    fn files_of_a_tree_that_was_replaced_keep_their_numbers_until_they_are_forgotten() {
        let (file, mut nodes) = (Ino(7), Nodes::default());
        let own = nodes.hand_out_file(file);
        assert_eq!(own, NodeId(7));
        nodes.replace(own, 3, 1);
        let other = nodes.hand_out_file(file);
        assert!(other != own && other.ino() == file);
        assert_eq!((nodes.replaced(own), nodes.replaced(other)), (Some(1), None));
        assert_eq!(nodes.each(vec![file, Ino(8)]), [Ino(other.0), Ino(8)]);
        // Once more, while the kernel has the first one still.
        nodes.replace(other, 1, 2);
        let third = nodes.hand_out_file(file);
        assert!(third != other && third != own && third.ino() == file);
        assert!(nodes.forget_replaced(own, 2) && nodes.take_ended().is_empty());
        assert!(nodes.forget_replaced(own, 1) && !nodes.forget_replaced(own, 1));
        assert_eq!(nodes.take_ended(), [1]);
        // What it is known by stays, also when its own number is free.
        assert_eq!(nodes.file(file), third);
        nodes.forget_file(file);
        assert_eq!(nodes.file(file), own);
        assert!(nodes.any_replaced().load(Ordering::Acquire));
        assert!(nodes.forget_replaced(other, 1) && nodes.take_ended() == [2]);
        assert!(!nodes.any_replaced().load(Ordering::Acquire));
    }

    fn told(nodes: &mut Nodes, parent: NodeId, name: &[u8], ino: u64) -> NodeId {
        nodes.hand_out(parent, name, Ino(ino)).0
    }

    /// The directories `a` and `b` of the root, and `dir` in `a`.
    fn tree() -> (Nodes, NodeId, NodeId, NodeId) {
        let mut nodes = Nodes::default();
        let (a, b) = (told(&mut nodes, ROOT, b"a", 10), told(&mut nodes, ROOT, b"b", 11));
        let dir = told(&mut nodes, a, b"dir", 12);
        (nodes, a, b, dir)
    }

    #[test]
    fn a_directory_keeps_its_number_within_its_parent() {
        let (mut nodes, a, _, dir) = tree();
        assert_eq!([a, dir], [NodeId(10), NodeId(12)]);
        assert_eq!(told(&mut nodes, a, b"other", 12), dir);
        assert_eq!(told(&mut nodes, a, b"dir", 12), dir);
        assert!(!nodes.any_moved().load(Ordering::Acquire));
    }

    #[test]
    fn what_others_move_gets_another_number_and_all_lead_to_the_inode() {
        let (mut nodes, a, b, dir) = tree();
        let below = told(&mut nodes, dir, b"below", 13);
        let (there, left) = nodes.hand_out(b, b"dir", Ino(12));
        assert_ne!(there, dir);
        assert_eq!(left, [Left { number: dir, parent: a, name: Name::new(b"dir") }]);
        assert!(nodes.is_left(&left[0]));
        let (below_there, left) = nodes.hand_out(there, b"below", Ino(13));
        assert_ne!(below_there, below);
        assert!(left.is_empty(), "it is found by both");
        assert_eq!([there.ino(), below_there.ino()], [Ino(12), Ino(13)]);
        assert_eq!(nodes.numbers(Ino(12)).collect::<Vec<_>>(), [dir, there]);
        assert_eq!(nodes.each(vec![Ino(11), Ino(12)]), [Ino(11), Ino(12), Ino(there.0)]);
        // Back again, it is where the kernel has the first one still.
        assert_eq!(told(&mut nodes, a, b"dir", 12), dir);
        nodes.forget(dir, 2);
        assert_eq!(nodes.numbers(Ino(12)).collect::<Vec<_>>(), [there]);
        // Its own number is free again.
        assert_eq!(told(&mut nodes, ROOT, b"dir", 12), dir);
        nodes.forget(there, 1);
        nodes.forget(dir, 1);
        nodes.forget(below_there, 1);
        assert_eq!((nodes.moved.len(), nodes.known.len(), nodes.places.len()), (0, 3, 3));
    }

    #[test]
    fn what_this_host_moves_keeps_its_number() {
        let (mut nodes, a, b, dir) = tree();
        nodes.renamed((a, b"dir"), (b, b"moved"), false);
        assert_eq!(told(&mut nodes, b, b"moved", 12), dir);
        let other = told(&mut nodes, a, b"other", 14);
        nodes.renamed((a, b"other"), (b, b"moved"), true);
        assert_eq!(told(&mut nodes, a, b"other", 12), dir);
        assert_eq!(told(&mut nodes, b, b"moved", 14), other);
        assert!(nodes.moved.is_empty());
    }

    #[test]
    fn what_others_are_told_while_this_host_exchanges_does_not_count() {
        for is_forgotten in [false, true] {
            let (mut nodes, a, b, dir) = tree();
            let other = told(&mut nodes, b, b"other", 14);
            // The kernel is about to exchange them, and somebody looks without the lock: what he is told is given back.
            let unused = told(&mut nodes, a, b"dir", 14);
            assert_ne!(unused, other);
            if is_forgotten {
                nodes.forget(unused, 1);
            }
            nodes.renamed((a, b"dir"), (b, b"other"), true);
            // Where the kernel has the first one now is told by its number, or by a new one: never as if it were in `a` still.
            let there = told(&mut nodes, b, b"other", 12);
            assert_eq!(there == dir, is_forgotten);
            assert_eq!(told(&mut nodes, a, b"dir", 14), other);
            assert_ne!(told(&mut nodes, a, b"again", 12), dir);
            assert!(is_forgotten || nodes.forget(unused, 1));
            for (number, count) in [(dir, if is_forgotten { 2 } else { 1 }), (other, 2)] {
                assert!(nodes.forget(number, count));
            }
            assert!(nodes.older.is_empty());
        }
    }

    #[test]
    fn of_one_place_the_kernel_may_have_any_that_it_was_told() {
        let (mut nodes, a, _, dir) = tree();
        let second = told(&mut nodes, a, b"dir", 14);
        let third = told(&mut nodes, a, b"dir", 15);
        assert_eq!(nodes.take_all(&(a, Name::new(b"dir"))), [dir, second, third]);
        let (mut nodes, a, _, dir) = tree();
        let second = told(&mut nodes, a, b"dir", 14);
        // Within one parent it makes no difference.
        nodes.renamed((a, b"dir"), (a, b"moved"), false);
        assert_eq!([12, 14].map(|ino| told(&mut nodes, a, b"moved", ino)), [dir, second]);
        nodes.forget(second, 2);
        nodes.forget(dir, 2);
        assert!(nodes.older.is_empty() && nodes.take_all(&(a, Name::new(b"moved"))).is_empty());
    }

    #[test]
    fn what_is_told_apart_is_nothing_that_the_kernel_has() {
        let (mut nodes, a, _, dir) = tree();
        let (there, left) = nodes.hand_out_apart(a, b"new", Ino(12), true);
        assert!(there != dir && there.ino() == Ino(12) && left.is_empty());
        // By either it goes on from there.
        assert_eq!(told(&mut nodes, a, b"new", 12), there);
        let file = nodes.hand_out_file(Ino(7));
        let told = [(); 2].map(|()| nodes.hand_out_apart(a, b"file", Ino(7), false).0);
        assert!(told[0] != file && told[1] != file && told[0] != told[1]);
        assert_eq!(nodes.file(Ino(7)), file);
        assert!(
            nodes.forget_apart(told[0], 1) && !nodes.forget_apart(told[0], 1) && !nodes.forget_apart(file, 1)
        );
        assert_eq!(nodes.hand_out_apart(a, b"file", Ino(7), false).0, told[0]);
        let mut taken = nodes.take_apart(Ino(7));
        taken.sort_by_key(|(number, _)| number.0);
        assert_eq!(taken, [(told[0], 1), (told[1], 1)]);
        assert!(nodes.apart.is_empty());
    }

    #[test]
    fn numbers_beyond_those_that_can_be_marked_stay_as_they_are() {
        let mut nodes = Nodes::default();
        let ino = 1 << INO_BITS;
        assert_eq!(told(&mut nodes, ROOT, b"a", ino), told(&mut nodes, NodeId(10), b"b", ino));
    }

    #[test]
    fn what_is_asked_for_by_number_may_be_anywhere() {
        let (mut nodes, a, b, dir) = tree();
        nodes.hand_out_lone(dir, true);
        assert_eq!(nodes.parent(dir, Ino(11)), b);
        assert_eq!(told(&mut nodes, b, b"dir", 12), dir);
        assert_ne!(told(&mut nodes, a, b"dir", 12), dir);
    }
}
