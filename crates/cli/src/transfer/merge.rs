//! `hayloft merge`.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use hayloft_transfer::{Cache, Change, Conflict, Manifest, Tree};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{CreateSnapshot, DeleteSnapshot, ListSnapshots, Version};
use serde_json::json;

use crate::config::Config;
use crate::exit::{Exit, exit_of, failure};
use crate::server::admin::Admin;
use crate::server::snapshots::{self, parse_snapshot};
use crate::server::volume::show_volume;
use crate::transfer::args::MergeArgs;
use crate::transfer::far::FarSnapshot;
use crate::transfer::replace::{self, Replacement};
use crate::transfer::{self, cache, failed};
use crate::units::show_count;
use crate::versions::diff::{self, shown};
use crate::versions::mounted::Mounted;

/// So often it is tried again when hosts have written meanwhile.
const TRIES: u32 = 5;

/// The three versions of a merge, and what they are: the whole trees, or only where they differ.
struct Sides {
    ours: Tree,
    theirs: Tree,
    base: Manifest,
    is_whole: bool,
    is_scattered: bool,
    _mounts: Vec<Mounted>,
}

/// Where it is merged.
struct Merge<'a> {
    server: &'a str,
    cache: Cache,
    volume: String,
    /// What the fork is said to have begun as was made after it, by the clock.
    is_later: bool,
}

/// Runs the command.
///
/// # Errors
/// Paths that both have changed; no snapshot that both began as; what the server refuses.
pub(crate) fn run(args: &MergeArgs, config: &Config) -> anyhow::Result<u8> {
    let server = args.host.at.server(config);
    let mut admin = Admin::connect(server)?;
    let forked = show_volume(&mut admin, &args.fork)?;
    let origin = forked.origin;
    let base = match &args.base {
        Some(base) => base.clone(),
        None => parse_snapshot(&origin).map_err(|_| {
            let said = match origin.is_empty() {
                true => format!("{} is no fork", args.fork),
                false => format!(
                    "{} was made of {origin} as it was then, and no snapshot says what that is: name one that both began as (--base)",
                    args.fork
                ),
            };
            failure(Exit::Usage, said)
        })?,
    };
    let info = snapshots::one(&mut admin, Ask::ListSnapshots(ListSnapshots { of: Some(base.clone()) }))?;
    let is_later = info.created_nanos.div_euclid(1_000_000_000) > forked.created_secs;
    let (cache, volume) = (cache(args.host.cache.as_ref())?, base.volume.clone());
    let merge = Merge { server, cache, volume, is_later };
    let fork = Version { volume: args.fork.clone(), snapshot: format!("merge-{}", now()) };
    create(&mut admin, &fork, "for hayloft merge")?;
    let merged = merge.run(&mut admin, &base, &fork);
    // The fork gets no snapshot by this.
    let deleted = Admin::connect(server).and_then(|mut admin| delete(&mut admin, &fork));
    let kept = merged?;
    deleted?;
    let kept = kept.map(|kept| snapshots::shown(&kept));
    match (args.host.at.json, &kept) {
        (true, _) => println!("{}", json!({ "merged": args.fork, "into": base.volume, "kept": kept })),
        (false, Some(kept)) => println!("merged {} into {}; what that was is {kept}", args.fork, base.volume),
        (false, None) => println!("{} has nothing that {} has not", args.fork, base.volume),
    }
    Ok(0)
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis())
}

fn create(admin: &mut Admin, of: &Version, note: &str) -> anyhow::Result<()> {
    let ask = CreateSnapshot { of: Some(of.clone()), note: note.to_owned(), as_stored: false };
    snapshots::one(admin, Ask::CreateSnapshot(ask)).map(drop)
}

fn delete(admin: &mut Admin, of: &Version) -> anyhow::Result<()> {
    admin.ask(Ask::DeleteSnapshot(DeleteSnapshot { of: Some(of.clone()) })).map(drop)
}

impl Merge<'_> {
    /// What the three are where they differ: nothing else of them is read. `None`: that has to be looked for in the whole trees.
    fn where_they_differ(
        &self,
        admin: &mut Admin,
        [base, ours, theirs]: [&Version; 3],
    ) -> anyhow::Result<Option<Sides>> {
        let mut changes = Vec::new();
        for side in [theirs, ours] {
            let found = transfer::changes(admin, base, side)?;
            let descends = found.as_ref().and_then(|(_, descends)| *descends);
            if side == theirs && !descends.unwrap_or(!self.is_later) {
                return Err(is_no_base(base, theirs));
            }
            match found {
                Some((found, _)) => changes.insert(0, found),
                None => return Ok(None),
            }
        }
        let is_scattered = is_here_and_there(&changes);
        let options = if is_scattered { "ro,noahead" } else { "ro" };
        let mounts = Mounted::all(self.server, [base, ours, theirs], options)?;
        let [base_at, ours_at, theirs_at] = [&mounts[0], &mounts[1], &mounts[2]].map(Mounted::path);
        let mut paths = BTreeSet::new();
        for change in &changes[1] {
            add(change, base_at, theirs_at, &mut paths)?;
        }
        // A folder that the volume has moved takes along what the fork has changed in it.
        let moved = changes[0].iter().filter(|change| is_elsewhere(change));
        let moved: HashSet<&[u8]> =
            moved.flat_map(|change| [&change.old, &change.new]).flatten().map(Vec::as_slice).collect();
        if paths.iter().any(|path| folders_of(path).any(|dir| moved.contains(dir))) {
            return Ok(None);
        }
        // Of what only the volume has changed nothing has to be known: it stays, unless the folder that it is in does not.
        let gone = changes[1].iter().filter(|change| is_elsewhere(change));
        let gone: HashSet<&[u8]> = gone.filter_map(|change| change.old.as_deref()).collect();
        let concerns =
            |path: &Vec<u8>| paths.contains(path) || folders_of(path).any(|dir| gone.contains(dir));
        let mut ours_too = BTreeSet::new();
        for change in &changes[0] {
            if [&change.old, &change.new].into_iter().flatten().any(concerns) {
                add(change, base_at, ours_at, &mut ours_too)?;
            }
        }
        paths.append(&mut ours_too);
        let of = |mounted: &Mounted, like: Option<&Manifest>| {
            let found = Manifest::of_paths(mounted.path(), &paths, like);
            found.map_err(|error| failure(Exit::Failed, error.to_string()))
        };
        let Some(base) = of(&mounts[0], None)? else { return Ok(None) };
        let (ours, theirs) = std::thread::scope(|scope| {
            let theirs = scope.spawn(|| of(&mounts[2], Some(&base)));
            let ended = |_| Err(failure(Exit::Failed, "the thread that reads has ended"));
            (of(&mounts[1], Some(&base)), theirs.join().unwrap_or_else(ended))
        });
        let (Some(ours), Some(theirs)) = (ours?, theirs?) else { return Ok(None) };
        let tree = |manifest, mounted: &Mounted| Tree { manifest, folder: mounted.path().to_owned() };
        let (ours, theirs) = (tree(ours, &mounts[1]), tree(theirs, &mounts[2]));
        Ok(Some(Sides { ours, theirs, base, is_whole: false, is_scattered, _mounts: mounts }))
    }

    fn sides(&self, admin: &mut Admin, of: [&Version; 3]) -> anyhow::Result<Sides> {
        if let Some(sides) = self.where_they_differ(admin, of)? {
            return Ok(sides);
        }
        let mounts = Mounted::all(self.server, of, "ro")?;
        let mut trees: Vec<Tree> = Vec::new();
        for (of_one, mounted) in of.into_iter().zip(&mounts) {
            let like = trees.first().map(|base| (of[0], &base.manifest));
            let manifest = self.with_numbers(admin, of_one, mounted, like)?;
            trees.push(Tree { manifest, folder: mounted.path().to_owned() });
        }
        let [base, ours, theirs] =
            <[Tree; 3]>::try_from(trees).map_err(|_| anyhow::anyhow!("three were read"))?;
        Ok(Sides { ours, theirs, base: base.manifest, is_whole: true, is_scattered: false, _mounts: mounts })
    }

    /// The manifest of a snapshot with the inode numbers that it has in its family: what is kept here of the same tree may come from elsewhere.
    /// `like` is one of these.
    fn with_numbers(
        &self,
        admin: &mut Admin,
        of: &Version,
        mounted: &Mounted,
        like: Option<(&Version, &Manifest)>,
    ) -> anyhow::Result<Manifest> {
        let (_, tree) = transfer::named(admin, of)?;
        let far = FarSnapshot::new(self.server, of);
        let changes = match like {
            Some((older, _)) => transfer::changes(admin, older, of)?.map(|(changes, _)| changes),
            None => None,
        };
        let older = like.map(|(_, older)| older).zip(changes.as_deref());
        let known = self.cache.get(&tree);
        let manifest = transfer::read_mounted(of, tree, mounted, older, known.as_ref(), &far)?;
        let _ = self.cache.put(&manifest);
        Ok(manifest)
    }

    /// The snapshot of what the volume was, if it is another one now.
    fn run(&self, admin: &mut Admin, base: &Version, fork: &Version) -> anyhow::Result<Option<Version>> {
        let (mut base, mut theirs) = (base.clone(), fork.clone());
        let begun = now();
        let name = |round: u32| match round {
            0 => format!("before-merge-{begun}"),
            _ => format!("before-merge-{begun}-{round}"),
        };
        let version = |round| Version { volume: self.volume.clone(), snapshot: name(round) };
        // What nobody wants to go back to.
        let mut passing: Vec<Version> = Vec::new();
        let mut tries = 0;
        let mut round = 0;
        loop {
            let of = version(round);
            create(admin, &of, &format!("before the merge of {}", fork.volume))?;
            let done = self.round(admin, [&base, &of, &theirs]);
            if !matches!(done, Ok(Some(_))) {
                // The volume is what it was.
                let _ = delete(admin, &of);
            }
            let kept = match done {
                Ok(Some(kept)) => kept,
                Ok(None) => return Ok(None),
                Err(error) if exit_of(&error) == Exit::Busy && tries < TRIES => {
                    tries += 1;
                    continue;
                }
                Err(error) if round > 0 => {
                    let said = "it is merged but for what hosts have written in that moment, which is in the snapshots before-promote-*";
                    return Err(error.context(said));
                }
                Err(error) => return Err(error),
            };
            if round > 0 {
                passing.push(of.clone());
            }
            passing.push(kept.clone());
            if replace::differences(admin, &of, &kept)? == 0 {
                for of in &passing {
                    match delete(admin, of) {
                        // Hosts read what they had open.
                        Err(error) if exit_of(&error) == Exit::Busy => {
                            eprintln!("hayloft: {} stays: hosts read files of it", snapshots::shown(of));
                        }
                        deleted => deleted?,
                    }
                }
                return Ok(Some(version(0)));
            }
            // What hosts have written until the trees were exchanged is merged into the new one.
            (base, theirs) = (of, kept);
            round += 1;
        }
    }

    /// The snapshot of what the volume was when the trees were exchanged; none if there is nothing to do.
    fn round(&self, admin: &mut Admin, of: [&Version; 3]) -> anyhow::Result<Option<Version>> {
        let [_, ours_of, theirs_of] = of;
        let Sides { ours, theirs, base, is_whole, is_scattered, _mounts } = self.sides(admin, of)?;
        let merged = hayloft_transfer::merge(&base, &ours.manifest, &theirs.manifest)
            .map_err(|conflicts| refused(&conflicts, ours_of, theirs_of))?;
        if merged.tree == ours.manifest.tree {
            return Ok(None);
        }
        let seeds = [ours, theirs];
        let ours = &seeds[0].manifest;
        let make = |folder: &Path| {
            transfer::making(|report| hayloft_transfer::make(folder, ours, &merged, &seeds, report))
                .map_err(failed)
        };
        let is_right = |admin: &mut Admin, new: &Version| match is_whole {
            true => replace::is_tree(merged.tree)(admin, new),
            false => differs_as(admin, (ours_of, new), &ours.differing(&merged)),
        };
        let live = Version { volume: self.volume.clone(), snapshot: String::new() };
        let rests = |admin: &mut Admin| match replace::differences(admin, ours_of, &live)? {
            0 => Ok(()),
            _ => {
                let said = format!(
                    "hosts are writing to {}, and would be interrupted: merge when they rest",
                    self.volume
                );
                Err(failure(Exit::Busy, said))
            }
        };
        let mut replacement = Replacement::begin(self.server, ours_of);
        replacement.mount(if is_scattered { "rw,noahead" } else { "rw" })?;
        let kept = replacement.finish(admin, make, is_right, rests)?;
        if is_whole {
            let _ = self.cache.put(&merged);
        }
        Ok(kept.of)
    }
}

/// With another one, what only that has would be taken for what the fork has removed.
fn is_no_base(base: &Version, fork: &Version) -> anyhow::Error {
    let (base, fork) = (snapshots::shown(base), &fork.volume);
    failure(Exit::Usage, format!("{base} is not what {fork} began as; name a snapshot that is (--base)"))
}

/// Changes are in so few files of a folder, in the mean, that what lies beside them is not worth fetching.
const FEW: usize = 16;

/// Whether what has changed is scattered: then only that is fetched, and nothing that lies beside it.
fn is_here_and_there(sides: &[Vec<Change>]) -> bool {
    let mut folders = HashSet::new();
    let mut count = 0;
    for change in sides.iter().flatten() {
        if is_elsewhere(change) && change.old.is_some() && change.new.is_some() {
            // Of a folder all that is in it is looked at.
            return false;
        }
        count += 1;
        folders.insert(change.new.as_ref().or(change.old.as_ref()).map(|path| hayloft_tree::split(path).0));
    }
    count <= FEW * folders.len()
}

/// Whether it is a folder that has another path, is new, or is gone: what is in it is not told.
fn is_elsewhere(change: &Change) -> bool {
    change.folder && change.old != change.new
}

/// The folders that a path is in, without the top.
fn folders_of(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    fn above(path: &[u8]) -> Option<&[u8]> {
        Some(hayloft_tree::split(path).0).filter(|dir| !dir.is_empty())
    }
    std::iter::successors(above(path), |dir| above(dir))
}

/// Adds the paths that a change is about.
fn add(change: &Change, base: &Path, side: &Path, paths: &mut BTreeSet<Vec<u8>>) -> anyhow::Result<()> {
    for (top, path) in [(base, &change.old), (side, &change.new)] {
        let Some(path) = path else { continue };
        if is_elsewhere(change) {
            add_below(top, path, paths)?;
        }
        paths.insert(path.clone());
    }
    Ok(())
}

/// Adds all that is in a folder, if it is one.
fn add_below(top: &Path, path: &[u8], paths: &mut BTreeSet<Vec<u8>>) -> anyhow::Result<()> {
    for name in hayloft_tree::names_below(top, path)?.unwrap_or_default() {
        let path = [path, b"/", &name].concat();
        add_below(top, &path, paths)?;
        paths.insert(path);
    }
    Ok(())
}

/// Refuses a new tree that differs from the old one elsewhere than it should, or not where it should. What is in files was compared as it
/// was written.
fn differs_as(
    admin: &mut Admin,
    (old, new): (&Version, &Version),
    wanted: &BTreeSet<Vec<u8>>,
) -> anyhow::Result<()> {
    let (found, _) = diff::differences(admin, old, new, Vec::new())?;
    let paths = found.into_iter().flat_map(|found| [found.old_path, found.new_path]).flatten();
    let found: BTreeSet<Vec<u8>> = paths.map(|path| path.to_vec()).collect();
    match found.symmetric_difference(wanted).next() {
        None => Ok(()),
        Some(path) => {
            let said =
                format!("the new tree is not what it has to be, see {}; nothing is merged", shown(path));
            Err(failure(Exit::Damaged, said))
        }
    }
}

fn refused(conflicts: &[Conflict], ours: &Version, theirs: &Version) -> anyhow::Error {
    const SHOWN: usize = 50;
    let lines = conflicts
        .iter()
        .take(SHOWN)
        .map(|conflict| format!("\n  {}: {}", shown(&conflict.path), conflict.why));
    let more = match conflicts.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("\n  and {} more", show_count(more as u64)),
    };
    let said = format!(
        "{} and {} have changed the same paths; nothing is merged:{}{more}",
        ours.volume,
        snapshots::shown(theirs),
        lines.collect::<String>()
    );
    failure(Exit::Exists, said)
}
