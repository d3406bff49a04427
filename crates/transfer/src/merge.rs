//! Puts together what two sides have made of one tree, where they have changed different paths.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use hayloft_tree::Kind;

use crate::manifest::{Entry, Manifest};

/// A path that both sides have changed, and why that cannot be put together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conflict {
    /// Where, relative to the top.
    pub path: Vec<u8>,
    /// What is in the way.
    pub why: &'static str,
}

/// Whether both are the same, but for times, and for what only a host knows.
fn is_same(one: &Entry, other: &Entry) -> bool {
    one.timeless() == other.timeless()
}

fn are_same(one: Option<&Entry>, other: Option<&Entry>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => is_same(one, other),
        (one, other) => one.is_none() && other.is_none(),
    }
}

fn modified(entry: &Entry) -> (i64, u32) {
    (entry.modified_seconds, entry.modified_nanos)
}

/// What `ours` becomes with what `theirs` has changed since `base`. Times alone are no change: the later one counts.
///
/// # Errors
/// All paths that both have changed, each in another way, and those whose folder or other name is gone.
pub fn merge(base: &Manifest, ours: &Manifest, theirs: &Manifest) -> Result<Manifest, Vec<Conflict>> {
    let mut paths: BTreeMap<&[u8], [Option<&Entry>; 3]> = BTreeMap::new();
    for (side, manifest) in [base, ours, theirs].into_iter().enumerate() {
        for entry in &manifest.entries {
            paths.entry(&entry.path).or_default()[side] = Some(entry);
        }
    }
    let (mut entries, mut conflicts): (Vec<Entry>, Vec<Conflict>) = (Vec::new(), Vec::new());
    for (path, [base, ours, theirs]) in paths {
        let taken = if are_same(base, theirs) || are_same(ours, theirs) {
            ours
        } else if are_same(base, ours) {
            theirs
        } else {
            let why = match (ours, theirs) {
                (None, _) => "it was removed here, and changed there",
                (_, None) => "it was changed here, and removed there",
                _ => "it was changed here and there",
            };
            conflicts.push(Conflict { path: path.to_vec(), why });
            // So that not all below it are conflicts, too.
            ours.or(theirs)
        };
        let Some(taken) = taken else { continue };
        let alike = [ours, theirs].into_iter().flatten().filter(|other| is_same(other, taken));
        let latest = alike.map(modified).max().unwrap_or(modified(taken));
        let mut taken = taken.clone();
        (taken.modified_seconds, taken.modified_nanos) = latest;
        entries.push(taken);
    }
    conflicts.extend(broken(&entries));
    conflicts.extend(parted(base, ours, theirs));
    if !conflicts.is_empty() {
        conflicts.sort_by(|one, other| one.path.cmp(&other.path));
        return Err(conflicts);
    }
    let named = hayloft_tree::named(entries.iter().map(Entry::to_tree).collect());
    Ok(Manifest { entries, tree: named.name })
}

/// Files that each side has given another name: there would be two of them.
fn parted(base: &Manifest, ours: &Manifest, theirs: &Manifest) -> Vec<Conflict> {
    let before: HashMap<&[u8], u64> =
        base.entries.iter().map(|entry| (entry.path.as_slice(), entry.inode)).collect();
    let new_names = |side: &Manifest| {
        let mut names: HashMap<u64, BTreeSet<Vec<u8>>> = HashMap::new();
        for entry in side.entries.iter().filter(|entry| entry.inode != 0) {
            if before.get(entry.path.as_slice()) != Some(&entry.inode) {
                names.entry(entry.inode).or_default().insert(entry.path.clone());
            }
        }
        names
    };
    fn paths(side: &Manifest) -> HashSet<&[u8]> {
        side.entries.iter().map(|entry| entry.path.as_slice()).collect()
    }
    let (here, there) = (new_names(ours), new_names(theirs));
    let (ours, theirs) = (paths(ours), paths(theirs));
    let moved = base.entries.iter().filter(|entry| {
        let names = here.get(&entry.inode).zip(there.get(&entry.inode));
        let path = entry.path.as_slice();
        let is_gone = !ours.contains(path) && !theirs.contains(path);
        is_gone && names.is_some_and(|(here, there)| here.is_disjoint(there))
    });
    let why = "it was renamed here and there, each time to another name";
    moved.map(|entry| Conflict { path: entry.path.clone(), why }).collect()
}

/// Paths, each fine for itself, that are no tree together.
fn broken(entries: &[Entry]) -> Vec<Conflict> {
    let by_path: HashMap<&[u8], &Entry> =
        entries.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
    let mut conflicts = Vec::new();
    for entry in entries.iter().filter(|entry| !entry.path.is_empty()) {
        let (dir, _) = hayloft_tree::split(&entry.path);
        let conflict = |why| Conflict { path: entry.path.clone(), why };
        if by_path.get(dir).is_none_or(|dir| dir.kind() != Kind::Directory) {
            conflicts.push(conflict("its folder was removed or replaced on the other side"));
        } else if !entry.same_as.is_empty() {
            let is_one = |first: &&Entry| {
                first.same_as.is_empty()
                    && is_same(
                        first,
                        &Entry { path: first.path.clone(), same_as: Vec::new(), ..entry.clone() },
                    )
            };
            if by_path.get(entry.same_as.as_slice()).copied().filter(is_one).is_none() {
                conflicts.push(conflict("it is another name of a file that the other side has changed"));
            }
        }
    }
    conflicts
}
