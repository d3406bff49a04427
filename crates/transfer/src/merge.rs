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
/// All paths that both have changed, each in another way, those that one has given another name and the other one has removed, and those whose folder or
/// other name is gone.
pub fn merge(base: &Manifest, ours: &Manifest, theirs: &Manifest) -> Result<Manifest, Vec<Conflict>> {
    let mut paths: BTreeMap<&[u8], [Option<&Entry>; 3]> = BTreeMap::new();
    for (side, manifest) in [base, ours, theirs].into_iter().enumerate() {
        for entry in &manifest.entries {
            paths.entry(&entry.path).or_default()[side] = Some(entry);
        }
    }
    let (mut entries, mut conflicts): (Vec<Entry>, Vec<Conflict>) = (Vec::new(), Vec::new());
    let before: HashMap<&[u8], u64> = base
        .entries
        .iter()
        .filter(|entry| entry.inode != 0)
        .map(|entry| (entry.path.as_slice(), entry.inode))
        .collect();
    let [moved_here, moved_there] = moved_onto(&before, [ours, theirs]);
    for (path, [base, ours, theirs]) in paths {
        let stays = |side, moved: &HashSet<&[u8]>| are_same(base, side) && !moved.contains(path);
        let taken = if are_same(ours, theirs) || stays(theirs, &moved_there) {
            ours
        } else if stays(ours, &moved_here) {
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
    conflicts.extend(parted(base, &before, [ours, theirs]));
    if !conflicts.is_empty() {
        conflicts.sort_by(|one, other| one.path.cmp(&other.path));
        return Err(conflicts);
    }
    let named = hayloft_tree::named(entries.iter().map(Entry::to_tree).collect());
    Ok(Manifest { entries, tree: named.name })
}

/// A side as it is compared with what both began as: where things are, by their inode numbers.
struct Side<'m> {
    by_path: HashMap<&'m [u8], &'m Entry>,
    /// Names that were given to what has been there before, or was elsewhere.
    new_names: HashMap<u64, BTreeSet<&'m [u8]>>,
}

impl<'m> Side<'m> {
    fn new(manifest: &'m Manifest, before: &HashMap<&[u8], u64>) -> Side<'m> {
        let by_path = manifest.entries.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
        let mut new_names: HashMap<u64, BTreeSet<&[u8]>> = HashMap::new();
        for entry in manifest.entries.iter().filter(|entry| entry.inode != 0) {
            if before.get(entry.path.as_slice()) != Some(&entry.inode) {
                new_names.entry(entry.inode).or_default().insert(&entry.path);
            }
        }
        Side { by_path, new_names }
    }

    /// Other names of something that is not where it was any more.
    fn names(&self, of: u64) -> impl Iterator<Item = &'m [u8]> + '_ {
        self.new_names.get(&of).into_iter().flatten().copied()
    }

    /// Whether this side has the same there as another one.
    fn has_same(&self, other: &Side<'_>, path: &[u8]) -> bool {
        are_same(self.by_path.get(path).copied(), other.by_path.get(path).copied())
    }
}

/// What is nowhere where it was, since one side has given it another name and the other one has removed it, or given it yet another one: there would be
/// two of it, or what was removed would be back.
fn parted(base: &Manifest, before: &HashMap<&[u8], u64>, sides: [&Manifest; 2]) -> Vec<Conflict> {
    let [here, there] = sides.map(|side| Side::new(side, before));
    let mut conflicts: Vec<Conflict> = Vec::new();
    let mut told: HashSet<&[u8]> = HashSet::new();
    // A folder comes before what is in it.
    for entry in base.entries.iter().filter(|entry| entry.inode != 0) {
        let path = entry.path.as_slice();
        if here.by_path.contains_key(path) || there.by_path.contains_key(path) {
            continue;
        }
        let [in_ours, in_theirs] =
            [&here, &there].map(|side| side.names(entry.inode).collect::<BTreeSet<&[u8]>>());
        let is_only = |names: &BTreeSet<&[u8]>| names.iter().any(|name| !here.has_same(&there, name));
        let why = match (in_ours.is_empty(), in_theirs.is_empty()) {
            (true, true) => continue,
            (false, false) if !in_ours.is_disjoint(&in_theirs) => continue,
            (false, false) => "it was renamed here and there, each time to another name",
            (false, true) if is_only(&in_ours) => "it was renamed here, and removed there",
            (true, false) if is_only(&in_theirs) => "it was removed here, and renamed there",
            // Under the same name there is the same.
            _ => continue,
        };
        if !told.contains(hayloft_tree::split(path).0) {
            conflicts.push(Conflict { path: path.to_vec(), why });
        }
        // What is in it is told with it.
        if entry.kind() == Kind::Directory {
            told.insert(path);
        }
    }
    conflicts
}

/// Paths where each side has put something that was elsewhere before: it is another thing, also if it looks the same.
fn moved_onto<'m>(before: &HashMap<&'m [u8], u64>, sides: [&Manifest; 2]) -> [HashSet<&'m [u8]>; 2] {
    let inodes: HashSet<u64> = before.values().copied().collect();
    sides.map(|side| {
        let moved = side.entries.iter().filter(|entry| inodes.contains(&entry.inode));
        let moved =
            moved.filter_map(|entry| Some((before.get_key_value(entry.path.as_slice())?, entry.inode)));
        moved.filter(|((_, was), inode)| **was != *inode).map(|((path, _), _)| *path).collect()
    })
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
