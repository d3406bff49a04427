//! What a tree is, by what it was and what is known to have changed since: nothing else of it is read.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use hayloft_tree::{Kind, Progress, WalkError, split};

use crate::cutter::Cutter;
use crate::far::Far;
use crate::manifest::{Entry, Manifest};

/// Something that has changed, as a server tells it. What lies in a folder that has another path is not told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// Where it was; none: it was not there.
    pub old: Option<Vec<u8>>,
    /// Where it is.
    pub new: Option<Vec<u8>>,
    /// Whether what is in the file may be something else.
    pub content: bool,
    /// Whether it is, or was, a folder.
    pub folder: bool,
}

fn joined(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

/// Entries of files of which it is known, or was just read, which names they have.
#[derive(Default)]
struct Links {
    /// Inode numbers.
    inodes: HashSet<u64>,
    /// Of those that were read: how many names there have to be.
    counts: HashMap<u64, usize>,
}

impl Links {
    /// Says which names are of one file, of entries in their order. `false`: not all are there, or too many.
    fn settle(&self, entries: &mut [Entry], read: &HashSet<Vec<u8>>) -> bool {
        let mut names: HashMap<u64, Vec<usize>> = HashMap::new();
        for (at, entry) in entries.iter_mut().enumerate() {
            entry.same_as = Vec::new();
            if entry.inode != 0 && self.inodes.contains(&entry.inode) {
                names.entry(entry.inode).or_default().push(at);
            }
        }
        for (inode, names) in names {
            if self.counts.get(&inode).is_some_and(|count| *count != names.len()) {
                return false;
            }
            // Only one name of a file is told, and what has changed is so for all.
            let told = names.iter().find(|at| read.contains(&entries[**at].path)).unwrap_or(&names[0]);
            let told = entries[*told].clone();
            let first = entries[names[0]].path.clone();
            for (number, at) in names.into_iter().enumerate() {
                let same_as = if number == 0 { Vec::new() } else { first.clone() };
                entries[at] = Entry { path: entries[at].path.clone(), same_as, ..told.clone() };
            }
        }
        true
    }
}

impl Manifest {
    /// The entries with the paths that they have after what was moved and removed.
    fn moved(&self, changes: &[Change]) -> Vec<Entry> {
        let told = changes.iter().filter_map(|change| Some((change.old.as_deref()?, change.new.as_deref())));
        let told: HashMap<&[u8], Option<&[u8]>> = told.filter(|(old, new)| Some(*old) != *new).collect();
        let mut directories: HashMap<&[u8], Vec<u8>> = HashMap::new();
        let mut entries = Vec::with_capacity(self.entries.len());
        // What a directory is in comes before it.
        for entry in &self.entries {
            let (dir, name) = split(&entry.path);
            let path = match told.get(entry.path.as_slice()) {
                Some(new) => new.map(<[u8]>::to_vec),
                None if entry.path.is_empty() => Some(Vec::new()),
                None => directories.get(dir).map(|dir| joined(dir, name)),
            };
            let Some(path) = path else { continue };
            if entry.kind() == Kind::Directory {
                directories.insert(&entry.path, path.clone());
            }
            entries.push(Entry { path, ..entry.clone() });
        }
        entries
    }

    /// What a folder is that was this, and in which has changed what is told: only that is read; what is large is cut by `far`. `None`: it does not fit together.
    /// Whether all was told the result's name says.
    ///
    /// # Errors
    /// As [`hayloft_tree::read`].
    pub fn after(
        &self,
        changes: &[Change],
        folder: &Path,
        far: Option<&dyn Far>,
        progress: &Progress,
    ) -> Result<Option<Manifest>, WalkError> {
        // A manifest that came from a mirror knows no inodes: other names of a file that has changed would not be found.
        if self.entries.iter().any(|entry| !entry.same_as.is_empty() && entry.inode == 0) {
            return Ok(None);
        }
        let mut entries = self.moved(changes);
        let told: HashSet<&[u8]> = changes.iter().filter_map(|change| change.new.as_deref()).collect();
        let had_content = changes.iter().filter(|change| change.old.is_some() && !change.content);
        let known = entries.iter().map(|entry| (entry.path.as_slice(), entry));
        let mut known: HashMap<&[u8], &Entry> = known.filter(|(path, _)| told.contains(path)).collect();
        // A file that has taken the place of another one mostly has much of it.
        for entry in self.entries.iter().filter(|entry| told.contains(entry.path.as_slice())) {
            known.entry(&entry.path).or_insert(entry);
        }
        let trusted = had_content.filter_map(|change| change.new.as_deref()).collect();
        let cutter = Cutter::new(known, trusted, far);
        let found = hayloft_tree::read(folder, told.iter().copied(), &cutter, progress)?;
        let mut cuts = cutter.cuts();
        entries.retain(|entry| !told.contains(entry.path.as_slice()));
        let mut links = Links::default();
        let linked = self.entries.iter().filter(|entry| !entry.same_as.is_empty());
        links.inodes.extend(linked.map(|entry| entry.inode));
        let mut read = HashSet::with_capacity(found.len());
        for found in found {
            let (is_linked, count) = (found.is_linked(), found.links as usize);
            let cut = cuts.remove(&found.path).unwrap_or_default();
            read.insert(found.path.clone());
            let entry = Entry::of(found, cut);
            if is_linked {
                links.inodes.insert(entry.inode);
            }
            if entry.inode != 0 {
                links.counts.insert(entry.inode, count);
            }
            entries.push(entry);
        }
        entries.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        if !links.settle(&mut entries, &read) {
            return Ok(None);
        }
        let named = hayloft_tree::named(entries.iter().map(Entry::to_tree).collect());
        Ok(Some(Manifest { entries, tree: named.name }))
    }
}

impl Manifest {
    /// What is at some paths of a folder, with the directories that they are in; of files that `known` has cut, and that have not
    /// changed since, nothing is read. `None`: one of them has other names, which may be anywhere.
    ///
    /// # Errors
    /// As [`hayloft_tree::read`].
    pub fn of_paths(
        top: &Path,
        paths: &BTreeSet<Vec<u8>>,
        known: Option<&Manifest>,
    ) -> Result<Option<Manifest>, WalkError> {
        let mut wanted: BTreeSet<&[u8]> = BTreeSet::from([&[][..]]);
        for path in paths {
            let mut at = path.as_slice();
            while wanted.insert(at) {
                at = split(at).0;
            }
        }
        let known = known.map_or(&[][..], |known| &known.entries);
        let known = known.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
        let cutter = Cutter::new(known, HashSet::new(), None);
        let found = hayloft_tree::read(top, wanted, &cutter, &Progress::default())?;
        let mut cuts = cutter.cuts();
        if found.iter().any(hayloft_tree::Entry::is_linked) {
            return Ok(None);
        }
        let of = |found: hayloft_tree::Entry| {
            let cut = cuts.remove(&found.path).unwrap_or_default();
            Entry::of(found, cut)
        };
        let mut entries: Vec<Entry> = found.into_iter().map(of).collect();
        entries.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        let named = hayloft_tree::named(entries.iter().map(Entry::to_tree).collect());
        Ok(Some(Manifest { entries, tree: named.name }))
    }

    /// The paths where two trees differ, but for times.
    pub fn differing(&self, other: &Manifest) -> BTreeSet<Vec<u8>> {
        let of = |manifest: &Manifest| {
            let entries = manifest.entries.iter().map(|entry| (entry.path.clone(), entry.timeless()));
            entries.collect::<BTreeMap<_, _>>()
        };
        let (one, other) = (of(self), of(other));
        let paths = one.keys().chain(other.keys());
        paths.filter(|path| one.get(*path) != other.get(*path)).cloned().collect()
    }
}
