//! Everything that two can do to the same things, put together and compared with a reference.

use std::collections::{BTreeMap, BTreeSet};

use hayloft_tree::TreeName;

use crate::Manifest;
use crate::chunk::ChunkId;
use crate::manifest::Entry;
use crate::merge::merge;

const FOLDER: u32 = 0o040_755;
const OTHER_FOLDER: u32 = 0o040_700;
const FILE: u32 = 0o100_644;
const LINK: u32 = 0o120_777;
const FIFO: u32 = 0o010_644;

/// A thing in a tree; what it is known by is its number.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Thing {
    path: String,
    mode: u32,
    content: String,
}

type Things = BTreeMap<u64, Thing>;

/// A tree on which one side works.
#[derive(Clone)]
struct Work {
    things: Things,
    next: u64,
}

impl Work {
    fn put(&mut self, path: &str, mode: u32, content: &str) {
        let thing = Thing { path: path.into(), mode, content: content.into() };
        self.things.insert(self.next, thing);
        self.next += 1;
    }

    fn find(&self, path: &str) -> Option<u64> {
        self.things.iter().find(|(_, thing)| thing.path == path).map(|(number, _)| *number)
    }

    fn is_folder(&self, path: &str) -> bool {
        path.is_empty() || self.find(path).is_some_and(|number| self.things[&number].mode == FOLDER)
    }

    fn remove(&mut self, path: &str) {
        self.things.retain(|_, thing| !is_in(&thing.path, path));
    }

    fn rename(&mut self, from: &str, to: &str) {
        for thing in self.things.values_mut().filter(|thing| is_in(&thing.path, from)) {
            thing.path = format!("{to}{}", &thing.path[from.len()..]);
        }
    }

    /// Of a folder, or a pipe, the mode is changed.
    fn change(&mut self, path: &str, what: &str) {
        let Some(number) = self.find(path) else { return };
        let thing = self.things.get_mut(&number).unwrap();
        match thing.mode {
            FILE | LINK => thing.content = what.into(),
            _ => thing.mode ^= if what == "same" { 0o7 } else { 1 << (what.len() % 6) },
        }
    }

    fn manifest(&self) -> Manifest {
        let entry = |(number, thing): (&u64, &Thing)| {
            let is_file = thing.mode == FILE;
            let text = thing.content.as_bytes();
            Entry {
                path: thing.path.clone().into_bytes(),
                mode: thing.mode,
                size: if is_file { text.len() as u64 } else { 0 },
                chunks: if is_file { ChunkId::of(text).0.to_vec() } else { Vec::new() },
                lengths: if is_file { vec![text.len() as u32] } else { Vec::new() },
                target: if thing.mode == LINK { text.to_vec() } else { Vec::new() },
                inode: *number,
                ..Entry::default()
            }
        };
        let mut entries: Vec<Entry> = self.things.iter().map(entry).collect();
        entries.push(Entry { mode: FOLDER, inode: 1, ..Entry::default() });
        entries.sort_by(|one, other| one.path.cmp(&other.path));
        Manifest { entries, tree: TreeName([0; 32]) }
    }
}

fn is_in(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// What both together are; `None`: both have changed a path, or a thing, and each in another way, or something would lie in no folder.
fn together(base: &Things, ours: &Things, theirs: &Things) -> Option<BTreeSet<Thing>> {
    fn one<T: PartialEq>(base: T, ours: T, theirs: T) -> Option<T> {
        if ours == theirs || theirs == base {
            Some(ours)
        } else if ours == base {
            Some(theirs)
        } else {
            None
        }
    }
    let numbers: BTreeSet<u64> = [base, ours, theirs].into_iter().flat_map(BTreeMap::keys).copied().collect();
    let mut found = BTreeSet::new();
    for number in numbers {
        found.extend(one(base.get(&number), ours.get(&number), theirs.get(&number))?.cloned());
    }
    let by_path = |things: &Things| {
        let path = |thing: &Thing| (thing.path.clone(), (thing.mode, thing.content.clone()));
        things.values().map(path).collect::<BTreeMap<_, _>>()
    };
    let [base, ours, theirs] = [base, ours, theirs].map(by_path);
    for path in base.keys().chain(ours.keys()).chain(theirs.keys()) {
        one(base.get(path), ours.get(path), theirs.get(path))?;
    }
    let folders: BTreeSet<&str> =
        found.iter().filter(|thing| thing.mode & 0o170_000 == 0o040_000).map(|thing| &*thing.path).collect();
    let lies_in_one =
        |thing: &Thing| thing.path.rsplit_once('/').is_none_or(|(folder, _)| folders.contains(folder));
    found.iter().all(lies_in_one).then_some(found)
}

/// Merges them, each being the volume once. Whether nothing was in the way.
fn check(base: &Work, sides: [&Work; 2], what: &str) -> bool {
    let wanted = together(&base.things, &sides[0].things, &sides[1].things);
    for [ours, theirs] in [sides, [sides[1], sides[0]]] {
        match (merge(&base.manifest(), &ours.manifest(), &theirs.manifest()), &wanted) {
            (Ok(merged), Some(wanted)) => {
                let thing = |entry: &Entry| {
                    let text =
                        [&ours.things, &theirs.things].into_iter().flat_map(BTreeMap::values).find(|thing| {
                            thing.path.as_bytes() == entry.path
                                && ChunkId::of(thing.content.as_bytes()).0[..] == entry.chunks[..]
                        });
                    let content = match entry.mode {
                        FILE => text.unwrap_or_else(|| panic!("{what}: {entry:?}")).content.clone(),
                        LINK => String::from_utf8(entry.target.clone()).unwrap(),
                        _ => String::new(),
                    };
                    Thing { path: String::from_utf8(entry.path.clone()).unwrap(), mode: entry.mode, content }
                };
                let found: BTreeSet<Thing> = merged.entries[1..].iter().map(thing).collect();
                assert_eq!(&found, wanted, "{what}");
            }
            (Err(conflicts), None) => assert!(!conflicts.is_empty()),
            (Ok(merged), None) => {
                let paths = merged.entries.iter().map(|entry| String::from_utf8_lossy(&entry.path));
                panic!("{what}: nothing was in the way of {:?}", paths.collect::<Vec<_>>());
            }
            (Err(conflicts), Some(wanted)) => panic!("{what}: {conflicts:?} in the way of {wanted:?}"),
        }
    }
    wanted.is_some()
}

/// What one side, whose number it gets, does to the thing at `it`.
type Act = fn(&mut Work, &str);

const ACTS: [(&str, Act); 15] = [
    ("kept", |_, _| {}),
    ("changed", |work, side| work.change("it", side)),
    ("changed alike", |work, _| work.change("it", "same")),
    ("renamed", |work, side| work.rename("it", &format!("it of {side}"))),
    ("renamed alike", |work, _| work.rename("it", "its name")),
    ("renamed and changed", |work, side| {
        work.change("it", side);
        work.rename("it", &format!("it of {side}"));
    }),
    ("renamed alike and changed", |work, side| {
        work.change("it", side);
        work.rename("it", "its name");
    }),
    ("moved into a folder", |work, _| work.rename("it", "folder/it")),
    ("moved into a folder that goes there", |work, side| {
        work.rename("folder", &format!("folder of {side}"));
        work.rename("it", &format!("folder of {side}/it"));
    }),
    ("removed", |work, _| work.remove("it")),
    ("removed with a folder", |work, _| {
        work.remove("it");
        work.remove("folder");
    }),
    ("replaced by a folder", |work, side| {
        work.remove("it");
        work.put("it", OTHER_FOLDER, "");
        work.put("it/new", FILE, side);
    }),
    ("replaced by a file", |work, side| {
        work.remove("it");
        work.put("it", FILE, side);
    }),
    ("another one's name given to it", |work, side| {
        work.remove("other");
        work.rename("it", "other");
        work.put("unlike", FILE, side);
    }),
    ("its name given to another one", |work, _| {
        work.remove("it");
        work.rename("other", "it");
    }),
];

/// What one side does in `it`, if that is a folder.
const ACTS_IN: [(&str, Act); 9] = [
    ("something in it changed", |work, side| work.change("it/in", side)),
    ("something in it removed", |work, _| work.remove("it/in")),
    ("something in it renamed", |work, side| work.rename("it/in", &format!("it/{side}"))),
    ("something moved out of it", |work, _| work.rename("it/in", "out")),
    ("something moved out of it and it removed", |work, _| {
        work.rename("it/in", "out");
        work.remove("it");
    }),
    ("something moved into it", |work, _| work.rename("other", "it/other")),
    ("something made in it", |work, side| work.put("it/new", FILE, side)),
    ("a folder in it moved out of it", |work, _| work.rename("it/deep", "deep")),
    ("something deep in it removed", |work, _| work.remove("it/deep/in")),
];

fn base(mode: u32) -> Work {
    let mut work = Work { things: Things::new(), next: 10 };
    work.put("folder", FOLDER, "");
    work.put("folder/in", FILE, "in");
    work.put("other", FILE, "other");
    work.put("it", mode, if [FILE, LINK].contains(&mode) { "it" } else { "" });
    if mode == FOLDER {
        work.put("it/in", FILE, "in it");
        work.put("it/deep", FOLDER, "");
        work.put("it/deep/in", FILE, "deep in it");
    }
    work
}

#[test]
fn whatever_two_do_to_one_thing_is_put_together_or_named() {
    let (mut merged, mut refused) = (0, 0);
    for mode in [FILE, LINK, FIFO, FOLDER] {
        let base = base(mode);
        let acts: Vec<_> =
            if mode == FOLDER { ACTS.iter().chain(&ACTS_IN).collect() } else { ACTS.iter().collect() };
        for (here, act_here) in &acts {
            for (there, act_there) in &acts {
                let side = |act: &Act, name: &str, next: u64| {
                    let mut work = Work { next, ..base.clone() };
                    act(&mut work, name);
                    work
                };
                let sides = [side(act_here, "one", 1000), side(act_there, "another", 2000)];
                let what = format!("{mode:o}: {here} by the one, {there} by the other");
                *(if check(&base, [&sides[0], &sides[1]], &what) { &mut merged } else { &mut refused }) += 1;
            }
        }
    }
    assert!(merged > 150 && refused > 150, "{merged} merged, {refused} refused");
}

/// Random changes by two in one tree.
#[test]
fn whatever_two_do_to_a_tree_is_put_together_or_named() {
    let seed = std::env::var("HAYLOFT_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let rounds = if std::env::var_os("HAYLOFT_TEST_LONG").is_some() { 200_000 } else { 5_000 };
    let mut random: u64 = seed.unwrap_or(0x2545_f491_4f6c_dd1d);
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    let (mut merged, mut refused) = (0, 0);
    for round in 0..rounds {
        let mut base = Work { things: Things::new(), next: 10 };
        for folder in ["a", "b", "c", "a/d"] {
            base.put(folder, FOLDER, "");
            for file in 0..3 {
                base.put(
                    &format!("{folder}/{file}"),
                    if file == 2 { LINK } else { FILE },
                    &format!("{folder}{file}"),
                );
            }
        }
        let (mut sides, mut said) = ([(); 2].map(|()| base.clone()), String::new());
        for (which, side) in sides.iter_mut().enumerate() {
            side.next = 1000 * (which as u64 + 1);
            for step in 0..1 + next(4) {
                let paths: Vec<String> = side.things.values().map(|thing| thing.path.clone()).collect();
                if paths.is_empty() {
                    break;
                }
                let path = paths[next(paths.len())].clone();
                let folders = ["", "a/", "b/", "c/", "a/d/", "new/"];
                let to = format!("{}{}", folders[next(folders.len())], next(5));
                let lies_in_one =
                    |side: &Work| to.rsplit_once('/').is_none_or(|(folder, _)| side.is_folder(folder));
                let what = format!("{which} {step} {round}");
                let act = next(6);
                match act {
                    0 => side.remove(&path),
                    1 | 2 if lies_in_one(side) && !is_in(&to, &path) && !is_in(&path, &to) => {
                        side.remove(&to);
                        side.rename(&path, &to);
                    }
                    3 => side.change(&path, &what),
                    4 if lies_in_one(side) && side.find(&to).is_none() => side.put(&to, FILE, &what),
                    5 if side.find("new").is_none() => side.put("new", FOLDER, ""),
                    _ => continue,
                }
                said.push_str(&format!(
                    "\n{which}: {} {path}, {to}",
                    ["rm", "mv", "mv", "change", "put", "mkdir"][act]
                ));
            }
        }
        *(if check(&base, [&sides[0], &sides[1]], &format!("round {round}:{said}")) {
            &mut merged
        } else {
            &mut refused
        }) += 1;
    }
    assert!(merged > rounds / 20 && refused > rounds / 20, "{merged} merged, {refused} refused");
}
