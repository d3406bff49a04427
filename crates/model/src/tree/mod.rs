//! The tree: answers file-system operations on the rows that are in memory, and records what changed
//! until the next cut of the log.
//!
//! A tree holds a part of its volume: operations that need a row which is not here say so with
//! [`TreeError::Missing`] and change nothing; the caller fetches the row, adds it and repeats. Rows that
//! are durable at the server can be dropped at any time ([`Tree::evict`]).

mod attributes;
mod evict;
mod log;
mod names;
mod room;
mod share;
mod split;
mod tables;
mod times;
mod unheard;

use std::collections::{HashMap, HashSet};

use rustc_hash::FxBuildHasher;

pub use attributes::{AttributeChange, has_privileges};
pub use log::Cut;
pub use names::{NewNode, RenameFlags};
pub use share::{Stale, Was};

use crate::grants::Object;
use crate::{
    Content, Dentry, FileKind, Ino, InoRange, InodeRow, Missing, Name, Sequence, Timestamp, TreeError, Usage,
};

type Map<K, V> = HashMap<K, V, FxBuildHasher>;

/// Cookie of the first entry of a directory; 1 and 2 stand for `.` and `..`.
pub const FIRST_COOKIE: u64 = 3;

#[derive(Debug)]
struct Node {
    row: InodeRow,
    /// The server has a row of this inode, or will by a batch that is cut already.
    stored: bool,
    /// The row differs from what the last cut took.
    dirty: bool,
    /// How often the kernel has been given it and not forgotten it, see [`tables::Nodes::lookups`].
    lookups: u32,
    /// The last cut that took this row; it may be dropped once that is durable.
    cut: Sequence,
}

#[derive(Debug, Default)]
struct Directory {
    by_name: tables::Names,
    /// The last cut that took one of its names.
    cut: Sequence,
    /// Names changed since then.
    dirty_names: usize,
    /// When it was last used, in operations.
    used: u64,
    /// The latest change that is known of a file that is at home in it.
    latest: Timestamp,
}

impl Directory {
    fn insert(&mut self, name: Name, dentry: Dentry) {
        self.by_name.insert(name, dentry);
    }

    fn remove(&mut self, name: &[u8]) -> Option<Dentry> {
        self.by_name.remove(name)
    }
}

/// An inode that has ended, with what it took: to give that back takes a while, which others need not wait for.
#[derive(Debug)]
pub struct Ended {
    /// Which.
    pub ino: Ino,
    _row: Box<Node>,
}

/// Who keeps account of the inodes that the kernel knows.
pub trait Known: std::fmt::Debug + Send {
    /// The kernel knows the inode from now on.
    fn insert(&mut self, ino: Ino);
    /// It has forgotten the inode.
    fn remove(&mut self, ino: Ino);
}

/// A volume's tree as one client knows it. See the module's documentation.
#[derive(Debug, Default)]
pub struct Tree {
    nodes: tables::Nodes,
    dirs: Map<Ino, Directory>,
    /// Who is told of the first and the last reference that the kernel has to an inode.
    known: Option<Box<dyn Known>>,
    numbers: Vec<InoRange>,
    changes: log::Changes,
    usage: Usage,
    quota: Usage,
    operations: u64,
    ended: Vec<Ended>,
    /// Objects that may be changed here; `None`: all.
    owned: Option<HashSet<Ino, FxBuildHasher>>,
    /// Of those, files that have lost their home here, which no cut has told the server yet.
    homeless: HashSet<Ino, FxBuildHasher>,
    /// Of those, objects that are gone here, and that the server has still; with the cut that deletes them.
    dying: Map<Ino, (Object, Option<Sequence>)>,
    /// The last batch that the server is known to hold, see [`Tree::shipped`].
    durable: Sequence,
    /// Inodes that the server was told to be in use, though their name or cover is gone.
    in_use: HashSet<Ino, FxBuildHasher>,
    released: Vec<Ino>,
    /// Inodes without name and use that were given back, until their last change is shipped.
    lingering: Vec<Ino>,
    /// Split directories.
    splits: split::Splits,
    /// What not all hosts have heard of.
    unheard: unheard::Unheard,
    /// The latest change that is known of, see [`Tree::stamp`].
    newest: Timestamp,
    times_go_back: bool,
    times_repeat: bool,
    links_revive: bool,
    owners_move_directories: bool,
    replaced_names_move: bool,
}

impl Tree {
    /// A tree that knows nothing but how full its volume is; zeros in `quota` mean no limit.
    pub fn new(usage: Usage, quota: Usage) -> Tree {
        Tree { usage, quota, ..Tree::default() }
    }

    /// From now on what has lost its last name gets another one: only for the simulator, which shows that it notices.
    pub fn let_links_revive(&mut self) {
        self.links_revive = true;
    }

    /// From now on a change may be earlier than one that is known: only for the simulator, which shows that it notices.
    pub fn let_times_go_back(&mut self) {
        self.times_go_back = true;
    }

    /// From now on a change may have the time of the one before: only for the simulator, which shows that it notices.
    pub fn let_times_repeat(&mut self) {
        self.times_repeat = true;
    }

    /// From now on directories that are owned get another parent here: only for the simulator, which shows that it notices.
    pub fn let_owners_move_directories(&mut self) {
        self.owners_move_directories = true;
    }

    /// From now on a name that is replaced gets another place in listings: only for the simulator, which shows that it notices.
    pub fn let_replaced_names_move(&mut self) {
        self.replaced_names_move = true;
    }

    /// From now on this is told of what the kernel knows.
    pub fn tell_known(&mut self, mut known: Box<dyn Known>) {
        self.nodes.known().for_each(|ino| known.insert(ino));
        self.known = Some(known);
    }

    /// The kernel knows a directory by another number than its own as well, or does so no more.
    pub fn note_other(&mut self, ino: Ino, number: Ino, is_known: bool) {
        match &mut self.known {
            Some(known) if number != ino && is_known => known.insert(number),
            Some(known) if number != ino => known.remove(number),
            _ => {}
        }
    }

    /// Adds inode numbers to make new inodes with.
    pub fn add_numbers(&mut self, range: InoRange) {
        self.numbers.push(range);
    }

    /// How many inode numbers are left.
    pub fn numbers_left(&self) -> u64 {
        self.numbers.iter().map(InoRange::left).sum()
    }

    fn next_ino(&mut self) -> Result<Ino, TreeError> {
        while let Some(range) = self.numbers.first_mut() {
            match range.take() {
                Some(ino) => return Ok(ino),
                None => drop(self.numbers.remove(0)),
            }
        }
        Err(TreeError::Missing(Missing::Numbers))
    }

    /// Adds an inode's row as fetched from the server; a row that is here already stays, since it is newer. Content that
    /// was left out of that is added.
    pub fn add_inode(&mut self, ino: Ino, row: InodeRow) {
        self.saw(&row);
        self.nodes.add(ino, row);
    }

    /// Whether the content of a small file was left out of its row.
    pub fn is_left_out(&self, ino: Ino) -> bool {
        self.nodes.get(&ino).is_some_and(|node| node.row.content == Content::LeftOut)
    }

    /// Adds a directory's whole listing as fetched from the server, unless it is here already, and the rows that came
    /// with it. It may be older than what is here: rows are added only of what has its name still, and nothing of a
    /// directory whose row is not here.
    pub fn add_listing(
        &mut self,
        dir: Ino,
        entries: impl IntoIterator<Item = (Name, Dentry, Option<InodeRow>)>,
    ) {
        let Some(node) = self.nodes.get(&dir) else { return };
        let ended = node.row.nlink == 0;
        let here = self.dirs.remove(&dir);
        let is_new = here.is_none() && !ended;
        self.splits.leave(dir);
        let mut directory =
            here.unwrap_or_else(|| Directory { used: self.operations, ..Directory::default() });
        let entries = entries.into_iter();
        if is_new {
            directory.by_name.reserve(entries.size_hint().0);
        }
        for (name, dentry, row) in entries {
            let leads_there =
                is_new || directory.by_name.get(&name).is_some_and(|here| here.ino == dentry.ino);
            if is_new {
                directory.insert(name, dentry);
            }
            let node = match row.filter(|_| leads_there) {
                Some(row) => {
                    self.newest = self.newest.max(row.ctime);
                    Some(self.nodes.add(dentry.ino, row))
                }
                None => self.nodes.get(&dentry.ino),
            };
            if let Some(node) = node.filter(|_| dentry.kind != FileKind::Directory) {
                directory.latest = directory.latest.max(node.row.ctime);
            }
        }
        self.dirs.insert(dir, directory);
    }

    /// The directory is about to be used: it is the last one to be evicted.
    pub fn touch(&mut self, dir: Ino) {
        self.operations += 1;
        if let Some(directory) = self.dirs.get_mut(&dir) {
            directory.used = self.operations;
        }
    }

    /// Whether the directory's listing is in memory.
    pub fn is_listed(&self, dir: Ino) -> bool {
        self.dirs.contains_key(&dir)
    }

    /// How many names of the directory are in memory.
    pub fn names_in_memory(&self, dir: Ino) -> usize {
        self.all_names(dir).count()
    }

    /// The row of an inode.
    ///
    /// # Errors
    /// [`TreeError::Missing`] when it is not in memory.
    pub fn inode(&self, ino: Ino) -> Result<&InodeRow, TreeError> {
        self.node(ino).map(|node| &node.row)
    }

    /// Whether the row is in memory.
    pub fn has_inode(&self, ino: Ino) -> bool {
        self.nodes.contains_key(&ino)
    }

    fn node(&self, ino: Ino) -> Result<&Node, TreeError> {
        self.nodes.get(&ino).ok_or(TreeError::Missing(Missing::Inode(ino)))
    }

    /// The row for a change: it is part of the next cut.
    fn change(&mut self, ino: Ino) -> Result<&mut InodeRow, TreeError> {
        let node = self.nodes.get_mut(&ino).ok_or(TreeError::Missing(Missing::Inode(ino)))?;
        if !node.dirty {
            node.dirty = true;
            self.changes.inodes.push(ino);
        }
        Ok(&mut node.row)
    }

    fn directory(&mut self, dir: Ino) -> Result<&mut Directory, TreeError> {
        if self.node(dir)?.row.kind() != FileKind::Directory {
            return Err(TreeError::NotDirectory);
        }
        if self.is_split(dir) {
            return Err(TreeError::Missing(Missing::Listing(dir)));
        }
        self.operations += 1;
        let directory = self.dirs.get_mut(&dir).ok_or(TreeError::Missing(Missing::Directory(dir)))?;
        directory.used = self.operations;
        Ok(directory)
    }

    /// Which inode a name leads to; `None` when there is no such name.
    ///
    /// # Errors
    /// Not a directory, name too long, or something missing.
    pub fn lookup(&mut self, dir: Ino, name: &[u8]) -> Result<Option<Dentry>, TreeError> {
        check_name(name)?;
        let found = self.names(dir, name)?.by_name.get(name).copied();
        self.check_heard(dir, name)?;
        Ok(found)
    }

    /// Which inode a name leads to as far as it is known here, whoever else has heard of it; for what no program sees.
    pub fn leads_to(&mut self, dir: Ino, name: &[u8]) -> Option<Dentry> {
        self.names(dir, name).ok()?.by_name.get(name).copied()
    }

    /// The entries of a directory after `cookie` (0 for all), in order.
    ///
    /// # Errors
    /// Not a directory, or something missing.
    pub fn entries(
        &mut self,
        dir: Ino,
        cookie: u64,
    ) -> Result<impl Iterator<Item = (&Name, &Dentry)>, TreeError> {
        self.directory(dir)?;
        self.check_all_heard(dir)?;
        let directory: &Directory = self.directory(dir)?;
        Ok(directory.by_name.behind(cookie))
    }

    /// The kernel has been told about the inode once more.
    pub fn remember(&mut self, ino: Ino) {
        if self.nodes.look_up(ino) == 1
            && let Some(known) = &mut self.known
        {
            known.insert(ino);
        }
    }

    /// The kernel has forgotten the inode `count` times. An inode without a name that nothing knows any
    /// more ends here; returns whether it did.
    pub fn forget(&mut self, ino: Ino, count: u64) -> bool {
        if self.nodes.forget(ino, count) != Some(0) {
            return false;
        }
        if let Some(known) = &mut self.known {
            known.remove(ino);
        }
        if self.in_use.remove(&ino) && !self.lingers(ino) {
            self.released.push(ino);
        }
        self.end_if_unused(ino)
    }

    /// Deletes the inode when it has neither a name nor a user.
    fn end_if_unused(&mut self, ino: Ino) -> bool {
        let Some(node) = self.nodes.get(&ino).filter(|node| node.row.nlink == 0) else { return false };
        if self.nodes.is_known(ino) {
            return false;
        }
        let owned = self.owns_row(ino, &node.row);
        if !owned && self.is_unshipped(node) {
            self.lingering.push(ino);
            return false;
        }
        let node = self.nodes.remove(&ino).expect("just seen");
        if node.row.kind() == FileKind::Directory {
            self.dirs.remove(&ino);
        }
        // What others own, or nobody, is the server's to delete.
        if node.stored && owned {
            self.changes.deleted.push(ino);
            self.keep_until_deleted(Object::of(ino, &node.row));
        } else {
            self.disown(ino);
        }
        self.ended.push(Ended { ino, _row: node });
        true
    }

    /// Whether an inode that was given back without a name has changes that are not shipped: others may use it.
    fn lingers(&self, ino: Ino) -> bool {
        let unshipped = |node: &Node| node.row.nlink == 0 && self.is_unshipped(node);
        !self.owns(ino) && self.nodes.get(&ino).is_some_and(unshipped)
    }

    fn is_unshipped(&self, node: &Node) -> bool {
        node.dirty || node.cut > self.durable
    }

    /// The inodes that have ended since this was asked last: whatever is kept for them can go.
    pub fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// Paths below the root, `/`-separated, of everything that can be reached through listings in memory, from the root
    /// or from what has a path in `known`: all directories, and the `wanted` others. A file with several names is there with
    /// one of them.
    pub fn paths(
        &self,
        known: &HashMap<Ino, Vec<u8>>,
        wanted: impl Fn(Ino) -> bool,
    ) -> HashMap<Ino, Vec<u8>> {
        let mut paths = known.clone();
        paths.insert(Ino::ROOT, Vec::new());
        // From the root first: that is how things are now.
        let mut todo: Vec<Ino> = known.keys().copied().chain([Ino::ROOT]).collect();
        let mut seen = HashSet::new();
        while let Some(dir) = todo.pop() {
            if !seen.insert(dir) {
                continue;
            }
            let Some(path) = paths.get(&dir).cloned() else { continue };
            for (name, dentry) in self.all_names(dir) {
                if dentry.kind != FileKind::Directory && !wanted(dentry.ino) {
                    continue;
                }
                let mut below = path.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(name.as_bytes());
                if dentry.kind == FileKind::Directory {
                    if seen.contains(&dentry.ino) {
                        continue;
                    }
                    todo.push(dentry.ino);
                }
                paths.insert(dentry.ino, below);
            }
        }
        paths
    }

    /// How many inodes and directory listings are in memory.
    pub fn in_memory(&self) -> (usize, usize) {
        (self.nodes.len(), self.dirs.len())
    }

    /// The directory in memory with the most names, and how many they are. A listing is in memory whole or not at all.
    pub fn largest_directory(&self) -> Option<(Ino, usize)> {
        self.dirs
            .iter()
            .map(|(ino, directory)| (*ino, directory.by_name.len()))
            .max_by_key(|(_, names)| *names)
    }
}

fn check_name(name: &[u8]) -> Result<(), TreeError> {
    match name.len() {
        0 => Err(TreeError::NotFound),
        1..=crate::NAME_MAX => Ok(()),
        _ => Err(TreeError::NameTooLong),
    }
}

#[cfg(test)]
mod tests;
