//! Random histories: the tree against a plain reference that stores names only and counts everything
//! anew, with cuts applied to the rows of a pretended server, and evicted rows fetched back from there.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use proptest::prelude::*;

use super::super::*;
use crate::{Record, Rows, Timestamp};

const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", b"long-name", b"\xff"];

#[derive(Clone, Debug)]
enum Step {
    Create { dir: usize, name: usize, kind: FileKind },
    Link { file: usize, dir: usize, name: usize },
    Unlink { dir: usize, name: usize },
    Rmdir { dir: usize, name: usize },
    Rename { from: (usize, usize), to: (usize, usize), flags: RenameFlags },
    Write { file: usize, end: u64 },
    Chmod { file: usize, mode: u32 },
    Cut,
    FailedCut,
    Evict,
    Forget { file: usize },
    List { dir: usize, entries: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = || (0..6usize, 0..NAMES.len());
    let kind = prop_oneof![Just(FileKind::Regular), Just(FileKind::Directory), Just(FileKind::Symlink)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(no_replace, exchange, whiteout)| {
        let exchange = exchange && !no_replace;
        RenameFlags { no_replace, exchange, whiteout: whiteout && !exchange }
    });
    let step = prop_oneof![
        6 => (place(), kind).prop_map(|((dir, name), kind)| Step::Create { dir, name, kind }),
        2 => (0..12usize, place()).prop_map(|(file, (dir, name))| Step::Link { file, dir, name }),
        3 => place().prop_map(|(dir, name)| Step::Unlink { dir, name }),
        2 => place().prop_map(|(dir, name)| Step::Rmdir { dir, name }),
        5 => (place(), place(), flags).prop_map(|(from, to, flags)| Step::Rename { from, to, flags }),
        2 => (0..12usize, 0..100_000u64).prop_map(|(file, end)| Step::Write { file, end }),
        1 => (0..12usize, 0..0o7777u32).prop_map(|(file, mode)| Step::Chmod { file, mode }),
        2 => Just(Step::Cut),
        1 => Just(Step::FailedCut),
        1 => Just(Step::Evict),
        1 => (0..12usize).prop_map(|file| Step::Forget { file }),
        4 => (0..6usize, 1..3usize).prop_map(|(dir, entries)| Step::List { dir, entries }),
    ];
    proptest::collection::vec(step, 1..120)
}

/// Names and kinds, nothing else: what a directory holds and how many links a file has is counted.
#[derive(Default)]
struct Reference {
    kinds: BTreeMap<Ino, FileKind>,
    names: BTreeMap<(Ino, Vec<u8>), Ino>,
}

impl Reference {
    fn get(&self, dir: Ino, name: &[u8]) -> Option<Ino> {
        self.names.get(&(dir, name.to_vec())).copied()
    }
    fn is_dir(&self, ino: Ino) -> bool {
        self.kinds[&ino] == FileKind::Directory
    }
    fn is_empty(&self, dir: Ino) -> bool {
        !self.names.keys().any(|(parent, _)| *parent == dir)
    }
    fn parent(&self, dir: Ino) -> Option<Ino> {
        self.names.iter().find(|(_, ino)| **ino == dir).map(|((parent, _), _)| *parent)
    }
    fn alive(&self, dir: Ino) -> bool {
        dir == Ino::ROOT || self.parent(dir).is_some()
    }
    fn is_below(&self, mut dir: Ino, top: Ino) -> bool {
        loop {
            if dir == top {
                return true;
            }
            match self.parent(dir) {
                Some(parent) => dir = parent,
                None => return false,
            }
        }
    }
    fn links(&self, ino: Ino) -> u32 {
        let names = self.names.values().filter(|named| **named == ino).count() as u32;
        if !self.is_dir(ino) {
            return names;
        }
        if ino != Ino::ROOT && names == 0 {
            return 0;
        }
        2 + self.names.iter().filter(|((dir, _), child)| *dir == ino && self.is_dir(**child)).count() as u32
    }

    fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: RenameFlags) -> Result<(), TreeError> {
        let source = self.get(from.0, from.1).ok_or(TreeError::NotFound)?;
        let target = self.get(to.0, to.1);
        if !self.alive(to.0) {
            return Err(TreeError::NotFound);
        }
        if self.is_dir(source) && from.0 != to.0 && self.is_below(to.0, source) {
            return Err(TreeError::Invalid);
        }
        match target {
            Some(_) if flags.no_replace => return Err(TreeError::Exists),
            None if flags.exchange => return Err(TreeError::NotFound),
            Some(target) if flags.exchange => {
                if self.is_dir(target) && from.0 != to.0 && self.is_below(from.0, target) {
                    return Err(TreeError::Invalid);
                }
                self.names.insert((from.0, from.1.to_vec()), target);
                self.names.insert((to.0, to.1.to_vec()), source);
                return Ok(());
            }
            Some(target) if target == source => return Ok(()),
            Some(target) => match (self.is_dir(source), self.is_dir(target)) {
                (true, false) => return Err(TreeError::NotDirectory),
                (false, true) => return Err(TreeError::IsDirectory),
                (true, true) if !self.is_empty(target) => return Err(TreeError::NotEmpty),
                _ => {}
            },
            None => {}
        }
        self.names.remove(&(from.0, from.1.to_vec()));
        self.names.insert((to.0, to.1.to_vec()), source);
        Ok(())
    }
}

/// A listing that is read a few entries at a time.
struct Listing {
    dir: Ino,
    cookie: u64,
    seen: Vec<Vec<u8>>,
    /// What was there at each moment since it began.
    lasting: BTreeSet<Vec<u8>>,
}

struct World {
    tree: Tree,
    server: Rows,
    reference: Reference,
    sequence: Sequence,
    clock: i128,
    dirs: Vec<Ino>,
    files: Vec<Ino>,
    usage: Usage,
    listing: Option<Listing>,
}

pub(super) fn root_row() -> InodeRow {
    InodeRow::new(0o040755, 2, Ino::ROOT)
}

impl World {
    fn new() -> World {
        let mut server = Rows::default();
        server.inodes.insert(Ino::ROOT, root_row());
        let mut reference = Reference::default();
        reference.kinds.insert(Ino::ROOT, FileKind::Directory);
        let mut tree = Tree::new(Usage::default(), Usage::default());
        tree.add_numbers(InoRange { next: Ino::FIRST.0, end: 1 << 20 });
        World {
            tree,
            server,
            reference,
            sequence: Sequence(0),
            clock: 0,
            dirs: vec![Ino::ROOT],
            files: vec![],
            usage: Usage::default(),
            listing: None,
        }
    }

    /// Repeats `operation` until nothing that it needs is missing.
    fn run<T>(
        &mut self,
        operation: impl Fn(&mut Tree, Timestamp) -> Result<T, TreeError>,
    ) -> Result<T, TreeError> {
        self.clock += 1;
        let now = Timestamp::from_nanos(self.clock);
        loop {
            let before = format!("{:?}", self.tree.changes);
            match operation(&mut self.tree, now) {
                Err(TreeError::Missing(missing)) => {
                    assert_eq!(
                        format!("{:?}", self.tree.changes),
                        before,
                        "a missing row must change nothing"
                    );
                    self.fetch(missing);
                }
                result => return result,
            }
        }
    }

    fn fetch(&mut self, missing: Missing) {
        match missing {
            Missing::Inode(ino) => self.tree.add_inode(ino, self.server.inodes[&ino].clone()),
            Missing::Directory(dir) => {
                let inodes = &self.server.inodes;
                let listing = self.server.listing(dir).into_iter();
                let with_row =
                    listing.map(|(name, dentry)| (name, dentry, Some(inodes[&dentry.ino].clone())));
                self.tree.add_listing(dir, with_row);
            }
            Missing::Numbers => panic!("there are enough numbers"),
            Missing::Own(_)
            | Missing::Executor
            | Missing::Names(_)
            | Missing::Listing(_)
            | Missing::Heard(_) => panic!("the tree is not shared"),
        }
    }

    fn cut(&mut self) {
        self.sequence = self.sequence.next();
        let cut = self.tree.cut(self.sequence, false);
        let mut puts = BTreeSet::new();
        for record in &cut.batch.records {
            if let Record::PutInode(ino, _) = record {
                assert!(puts.insert(*ino), "one record a row");
            }
            self.server.apply(record);
        }
        self.usage = self.usage.after(cut.batch.usage);
    }

    fn dir(&self, index: usize) -> Ino {
        self.dirs[index % self.dirs.len()]
    }

    fn file(&self, index: usize) -> Option<Ino> {
        (!self.files.is_empty()).then(|| self.files[index % self.files.len()])
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Create { dir, name, kind } => self.create(self.dir(dir), NAMES[name], kind),
            Step::Link { file, dir, name } => {
                let (Some(file), dir, name) = (self.file(file), self.dir(dir), NAMES[name]) else { return };
                if self.reference.links(file) == 0 {
                    return;
                }
                let expected = match self.reference.get(dir, name) {
                    _ if !self.known(dir) => return,
                    Some(_) => Err(TreeError::Exists),
                    None if !self.reference.alive(dir) => Err(TreeError::NotFound),
                    None => Ok(()),
                };
                assert_eq!(self.run(|tree, now| tree.link(file, dir, name, now)), expected);
                if expected.is_ok() {
                    self.reference.names.insert((dir, name.to_vec()), file);
                }
            }
            Step::Unlink { dir, name } => self.remove(self.dir(dir), NAMES[name], false),
            Step::Rmdir { dir, name } => self.remove(self.dir(dir), NAMES[name], true),
            Step::Rename { from, to, flags } => {
                let (from, to) = ((self.dir(from.0), NAMES[from.1]), (self.dir(to.0), NAMES[to.1]));
                if !self.known(from.0) || !self.known(to.0) {
                    return;
                }
                let expected = self.reference.rename(from, to, flags);
                let result = self.run(|tree, now| tree.rename(from, to, flags, now));
                assert_eq!(result, expected, "{from:?} {to:?} {flags:?}");
                self.adopt_whiteout(from);
            }
            Step::Write { file, end } => {
                let Some(file) = self.file(file).filter(|file| self.is_regular(*file)) else { return };
                let before = self.run(|tree, _| tree.inode(file).cloned()).unwrap().size;
                self.run(|tree, now| tree.wrote(file, end, end.max(before), false, now)).unwrap();
                assert_eq!(self.tree.inode(file).unwrap().size, end.max(before));
            }
            Step::Chmod { file, mode } => {
                let Some(file) = self.file(file).filter(|file| self.reference.links(*file) > 0) else {
                    return;
                };
                let change = AttributeChange { mode: Some(mode), ..AttributeChange::default() };
                self.run(|tree, now| tree.set_attributes(file, change, now)).unwrap();
            }
            Step::Cut => self.cut(),
            Step::FailedCut => {
                let cut = self.tree.cut(self.sequence.next(), false);
                self.tree.undo_cut(cut);
            }
            Step::Evict => {
                self.tree.evict(2, self.sequence, |_| false);
            }
            Step::Forget { file } => {
                if let Some(file) = self.file(file) {
                    self.tree.remember(file);
                    self.tree.forget(file, 1);
                }
            }
            Step::List { dir, entries } => self.list(self.dir(dir), entries),
        }
        let reference = &self.reference;
        if let Some(Listing { dir, lasting, .. }) = &mut self.listing {
            lasting.retain(|name| reference.get(*dir, name).is_some());
        }
    }

    /// Goes on with the listing under way, or begins one. What was there all the time comes once.
    fn list(&mut self, dir: Ino, entries: usize) {
        let Listing { dir, cookie, mut seen, lasting } = self.listing.take().unwrap_or_else(|| {
            let there = self.reference.names.keys().filter(|(parent, _)| *parent == dir);
            let lasting = there.map(|(_, name)| name.clone()).collect();
            Listing { dir, cookie: 0, seen: Vec::new(), lasting }
        });
        if !self.known(dir) {
            return;
        }
        let part = self.run(|tree, _| {
            let entries = tree.entries(dir, cookie)?.take(entries);
            Ok(entries.map(|(name, dentry)| (name.as_bytes().to_vec(), dentry.cookie)).collect::<Vec<_>>())
        });
        let part = part.unwrap();
        match part.last() {
            Some((_, cookie)) => {
                let cookie = *cookie;
                seen.extend(part.into_iter().map(|(name, _)| name));
                self.listing = Some(Listing { dir, cookie, seen, lasting });
            }
            None => {
                for name in lasting {
                    let times = seen.iter().filter(|seen| **seen == name).count();
                    assert_eq!(times, 1, "{:?} was there all the time", String::from_utf8_lossy(&name));
                }
            }
        }
    }

    /// A directory that is deleted has no row anywhere once nobody uses it.
    fn known(&self, dir: Ino) -> bool {
        self.reference.alive(dir)
    }

    fn is_regular(&self, file: Ino) -> bool {
        self.reference.kinds[&file] == FileKind::Regular && self.reference.links(file) > 0
    }

    fn create(&mut self, dir: Ino, name: &[u8], kind: FileKind) {
        if !self.known(dir) {
            return;
        }
        let target = (kind == FileKind::Symlink).then(|| Bytes::from_static(b"target"));
        let new = NewNode { mode: kind.bits() | 0o644, target, ..NewNode::default() };
        let result = self.run(|tree, now| tree.create(dir, name, new.clone(), now));
        match self.reference.get(dir, name) {
            Some(_) => assert_eq!(result, Err(TreeError::Exists)),
            None => {
                let ino = result.unwrap();
                self.reference.kinds.insert(ino, kind);
                self.reference.names.insert((dir, name.to_vec()), ino);
                if kind == FileKind::Directory { self.dirs.push(ino) } else { self.files.push(ino) }
            }
        }
    }

    fn remove(&mut self, dir: Ino, name: &[u8], directory: bool) {
        if !self.known(dir) {
            return;
        }
        let expected = match self.reference.get(dir, name) {
            None => Err(TreeError::NotFound),
            Some(ino) if directory && !self.reference.is_dir(ino) => Err(TreeError::NotDirectory),
            Some(ino) if directory && !self.reference.is_empty(ino) => Err(TreeError::NotEmpty),
            Some(ino) if !directory && self.reference.is_dir(ino) => Err(TreeError::IsDirectory),
            Some(ino) => Ok(ino),
        };
        let result =
            self.run(
                |tree, now| {
                    if directory { tree.rmdir(dir, name, now) } else { tree.unlink(dir, name, now) }
                },
            );
        assert_eq!(result, expected);
        if expected.is_ok() {
            self.reference.names.remove(&(dir, name.to_vec()));
        }
    }

    fn adopt_whiteout(&mut self, from: (Ino, &[u8])) {
        if self.reference.get(from.0, from.1).is_none()
            && let Some(dentry) = self.run(|tree, _| tree.lookup(from.0, from.1)).unwrap()
        {
            assert_eq!(dentry.kind, FileKind::CharDevice);
            self.reference.kinds.insert(dentry.ino, dentry.kind);
            self.reference.names.insert((from.0, from.1.to_vec()), dentry.ino);
            self.files.push(dentry.ino);
        }
    }

    /// Everything that has a name is where the reference has it, in memory and, after a cut, at the server.
    fn check(&mut self) {
        self.cut();
        let named: BTreeSet<Ino> = self.reference.names.values().copied().collect();
        assert_eq!(self.tree.usage().inodes, named.len() as u64);
        assert_eq!(self.usage, self.tree.usage(), "the deltas add up");
        let server: BTreeMap<(Ino, Vec<u8>), Ino> = self
            .server
            .dentries
            .iter()
            .map(|((dir, name), dentry)| ((*dir, name.as_bytes().to_vec()), dentry.ino))
            .collect();
        assert_eq!(server, self.reference.names);
        let stored: BTreeSet<Ino> =
            self.server.inodes.keys().copied().filter(|ino| *ino != Ino::ROOT).collect();
        assert_eq!(stored, named, "no row is left behind, none is missing");
        for (ino, row) in self.server.inodes.clone() {
            assert_eq!(row.nlink, self.reference.links(ino), "links of {ino}");
            assert_eq!(row.kind(), self.reference.kinds[&ino]);
            if row.kind() == FileKind::Directory && ino != Ino::ROOT {
                assert_eq!(Some(row.parent), self.reference.parent(ino));
            }
            let here = self.run(|tree, _| tree.inode(ino).cloned()).unwrap();
            assert_eq!(here, row);
        }
        let bytes: u64 = self.server.inodes.values().map(|row| row.allocated).sum();
        assert_eq!(bytes, self.usage.bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, max_shrink_iters: 20_000, ..ProptestConfig::default() })]
    #[test]
    fn histories_end_as_the_reference_does(steps in steps()) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
        }
        world.check();
    }
}
