//! Whatever is done to a folder: what it was and what has changed since tells what it is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use hayloft_tree::Progress;

use crate::changes::Change;
use crate::manifest::Manifest;

struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most
    }
}

/// What a server knows: each inode with its names, where they lie, and what it is.
#[derive(Default)]
struct Rows {
    names: BTreeMap<(u64, Vec<u8>), u64>,
    inodes: BTreeMap<u64, (Vec<u8>, Vec<i64>)>,
    paths: BTreeMap<(u64, Vec<u8>), Vec<u8>>,
}

impl Rows {
    fn of(top: &Path) -> Rows {
        let mut rows = Rows::default();
        rows.add(top, b"");
        rows
    }

    fn add(&mut self, top: &Path, path: &[u8]) {
        let folder = top.join(std::ffi::OsStr::from_bytes(path));
        let of = |path: &Path| {
            let stat = path.symlink_metadata().unwrap();
            let content = match stat.file_type() {
                kind if kind.is_file() => fs::read(path).unwrap(),
                kind if kind.is_symlink() => {
                    fs::read_link(path).unwrap().into_os_string().into_encoded_bytes()
                }
                _ => Vec::new(),
            };
            (stat.ino(), (content, vec![stat.mode().into(), stat.mtime(), stat.mtime_nsec()]))
        };
        let (dir, row) = of(&folder);
        self.inodes.insert(dir, row);
        for found in fs::read_dir(&folder).unwrap() {
            let found = found.unwrap();
            let name = found.file_name().as_bytes().to_vec();
            let path = if path.is_empty() { name.clone() } else { [path, b"/", &name].concat() };
            let (ino, row) = of(&found.path());
            self.names.insert((dir, name.clone()), ino);
            self.paths.insert((dir, name), path.clone());
            self.inodes.insert(ino, row);
            if found.file_type().unwrap().is_dir() {
                self.add(top, &path);
            }
        }
    }

    fn names_of(&self, ino: u64) -> BTreeSet<&(u64, Vec<u8>)> {
        self.names.iter().filter(|(_, of)| **of == ino).map(|(name, _)| name).collect()
    }

    /// As the server tells it.
    fn changes(&self, new: &Rows) -> Vec<Change> {
        let mut changes = Vec::new();
        for ino in self.inodes.keys().chain(new.inodes.keys()).collect::<BTreeSet<_>>() {
            let (before, after) = (self.names_of(*ino), new.names_of(*ino));
            let removed: Vec<_> = before.difference(&after).collect();
            let added: Vec<_> = after.difference(&before).collect();
            let (one, other) = (self.inodes.get(ino), new.inodes.get(ino));
            let content = one.map(|row| &row.0) != other.map(|row| &row.0);
            for at in 0..removed.len().max(added.len()) {
                let old = removed.get(at).map(|name| self.paths[**name].clone());
                let new = added.get(at).map(|name| new.paths[**name].clone());
                changes.push(Change { old, new, content, folder: false });
            }
            let is_told = !removed.is_empty() && !added.is_empty();
            if let (Some(one), Some(other), false) = (one, other, is_told)
                && one != other
            {
                let of = |rows: &Rows, name: Option<&&(u64, Vec<u8>)>| {
                    name.map_or(Vec::new(), |name| rows.paths[*name].clone())
                };
                let stays = before.intersection(&after).next();
                let (old, new) = (of(self, stays), of(new, stays));
                // The top has no name.
                if stays.is_some() || self.names_of(*ino).is_empty() && removed.is_empty() && added.is_empty()
                {
                    changes.push(Change { old: Some(old), new: Some(new), content, folder: false });
                }
            }
        }
        changes
    }
}

struct World {
    top: tempfile::TempDir,
    random: Random,
    made: usize,
}

impl World {
    fn all(&self, of: impl Fn(&fs::Metadata) -> bool) -> Vec<PathBuf> {
        let (mut found, mut waiting) = (Vec::new(), vec![self.top.path().to_owned()]);
        while let Some(path) = waiting.pop() {
            if path.symlink_metadata().unwrap().is_dir() {
                waiting.extend(fs::read_dir(&path).unwrap().map(|found| found.unwrap().path()));
            }
            if of(&path.symlink_metadata().unwrap()) {
                found.push(path);
            }
        }
        found.sort();
        found
    }

    fn pick(&mut self, of: impl Fn(&fs::Metadata) -> bool) -> Option<PathBuf> {
        let mut all = self.all(of);
        (!all.is_empty()).then(|| all.swap_remove(self.random.below(all.len())))
    }

    fn step(&mut self) {
        self.made += 1;
        let (what, number) = (self.random.below(12), self.made);
        let dir = self.pick(fs::Metadata::is_dir).unwrap();
        let free = dir.join(format!("{}-{number}", ["a", "b", "c"][number % 3]));
        let file = self.pick(fs::Metadata::is_file);
        match (what, file) {
            (0, _) => fs::create_dir(free).unwrap(),
            (1, _) => symlink(format!("to-{number}"), free).unwrap(),
            (2..=3, _) | (_, None) => {
                fs::write(free, vec![number as u8; 1 + self.random.below(40_000)]).unwrap();
            }
            (4, Some(file)) => fs::write(file, vec![number as u8; self.random.below(30_000)]).unwrap(),
            (5, Some(file)) => fs::rename(file, free).unwrap(),
            (6, Some(file)) => fs::hard_link(file, free).unwrap(),
            (7, Some(file)) => fs::remove_file(file).unwrap(),
            (8, Some(file)) => {
                fs::set_permissions(file, fs::Permissions::from_mode(0o600 + number as u32 % 64)).unwrap()
            }
            (9, Some(file)) => fs::File::open(file).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap(),
            (10, _) => {
                let moved = self.pick(fs::Metadata::is_dir).unwrap();
                if !free.starts_with(&moved) {
                    fs::rename(moved, free).unwrap();
                }
            }
            (_, _) => {
                let removed = self.pick(fs::Metadata::is_dir).unwrap();
                if removed != self.top.path() && fs::read_dir(&removed).unwrap().count() < 4 {
                    fs::remove_dir_all(removed).unwrap();
                }
            }
        }
    }

    fn read(&self) -> Manifest {
        Manifest::of_folder(self.top.path(), None, &Progress::default()).unwrap()
    }
}

#[test]
fn what_a_tree_was_and_what_has_changed_since_tell_what_it_is() {
    let mut by_changes = 0;
    for seed in 0..40 {
        let mut world = World { top: tempfile::tempdir().unwrap(), random: Random(seed), made: 0 };
        (0..60).for_each(|_| world.step());
        for round in 0..8 {
            let (before, rows) = (world.read(), Rows::of(world.top.path()));
            (0..=world.random.below(12)).for_each(|_| world.step());
            let changes = rows.changes(&Rows::of(world.top.path()));
            let whole = world.read();
            let Some(after) = before.after(&changes, world.top.path(), None, &Progress::default()).unwrap()
            else {
                continue;
            };
            by_changes += 1;
            assert_eq!(after.tree, whole.tree, "seed {seed}, round {round}: {changes:?}");
            assert_eq!(after.to_bytes(), whole.to_bytes(), "seed {seed}, round {round}: {changes:?}");
        }
    }
    assert!(by_changes > 300, "only {by_changes} of 320 were worked out");
}

#[test]
fn a_tree_of_which_no_inodes_are_known_is_read_as_a_whole_if_files_have_several_names() {
    let top = tempfile::tempdir().unwrap();
    fs::write(top.path().join("one"), "text").unwrap();
    fs::hard_link(top.path().join("one"), top.path().join("two")).unwrap();
    let read = Manifest::of_folder(top.path(), None, &Progress::default()).unwrap();
    let progress = Progress::default();
    assert_eq!(read.after(&[], top.path(), None, &progress).unwrap().unwrap().to_bytes(), read.to_bytes());
    let came = Manifest::from_bytes(&read.to_bytes()).unwrap();
    assert!(came.after(&[], top.path(), None, &progress).unwrap().is_none());
    // A new name of a file whose other names are not known.
    fs::remove_file(top.path().join("two")).unwrap();
    let came =
        Manifest::from_bytes(&Manifest::of_folder(top.path(), None, &progress).unwrap().to_bytes()).unwrap();
    fs::hard_link(top.path().join("one"), top.path().join("three")).unwrap();
    let change = Change { old: None, new: Some(b"three".to_vec()), content: true, folder: false };
    assert!(came.after(&[change], top.path(), None, &progress).unwrap().is_none());
}
