//! Trees that are made what a manifest says: `hayloft send`, `hayloft receive`, and `hayloft merge`.

pub(crate) mod args;
mod far;
pub(crate) mod merge;
pub(crate) mod pull;
pub(crate) mod receive;
mod replace;
mod seeds;
pub(crate) mod send;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hayloft_transfer::{Cache, Change, Manifest, TransferError};
use hayloft_tree::{Progress, TreeName, WalkError};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{Difference, ListSnapshots, SnapshotInfo, Version, difference};

use crate::exit::{Exit, exit_of, failure};
use crate::progress;
use crate::server::admin::Admin;
use crate::server::snapshots;
use crate::sys;
use crate::transfer::far::FarSnapshot;
use crate::units::{show_count, show_size};
use crate::versions::mounted::{Mounted, Mounting};
use crate::versions::{commands, diff};

/// The error of this command for one of a transfer.
fn failed(error: TransferError) -> anyhow::Error {
    let exit = match &error {
        TransferError::Missing(_) => Exit::NoVolume,
        TransferError::Exists(_) => Exit::Exists,
        TransferError::Damaged(_) => Exit::Damaged,
        TransferError::Web(_) => Exit::Unreachable,
        TransferError::Io { source, .. } if source.kind() == ErrorKind::StorageFull => Exit::NoSpace,
        TransferError::Io { .. } | TransferError::Lacking(_) | TransferError::Walk(_) => Exit::Failed,
    };
    failure(exit, error.to_string())
}

/// Where manifests are kept on this host.
fn cache(folder: Option<&PathBuf>) -> anyhow::Result<Cache> {
    let of_user = || {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        cache.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
    };
    let base = match sys::user_and_group() {
        (0, _) => Some(PathBuf::from("/var/cache")),
        _ => of_user(),
    };
    let folder = folder.cloned().or_else(|| base.map(|base| base.join("hayloft/transfer")));
    let folder =
        folder.ok_or_else(|| failure(Exit::Usage, "there is no HOME: name a folder with --cache"))?;
    Cache::new(&folder).map_err(failed)
}

/// How much of something is done, for a line on the terminal.
#[derive(Default)]
struct Share {
    done: AtomicU64,
    all: AtomicU64,
    /// How much it was when that was shown last, and since when.
    shown: Mutex<Option<(u64, Instant)>>,
}

/// When so long nothing is done, it is said for how long.
const STILL: Duration = Duration::from_secs(3);

impl Share {
    fn set(&self, done: u64, all: u64) {
        self.done.store(done, Relaxed);
        self.all.store(all, Relaxed);
    }

    /// Done, of all, percent.
    fn get(&self) -> (u64, u64, u64) {
        let (done, all) = (self.done.load(Relaxed), self.all.load(Relaxed));
        (done, all, (done * 100).checked_div(all).unwrap_or(0))
    }

    /// For how long it has been as much as now.
    fn still(&self, done: u64) -> Duration {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let since = shown.filter(|(last, _)| *last == done).map_or_else(Instant::now, |(_, since)| since);
        *shown = Some((done, since));
        since.elapsed()
    }
}

/// Makes files; on a terminal it is seen how many there are.
fn making<T>(make: impl FnOnce(&(dyn Fn(u64, u64) + Sync)) -> T) -> T {
    let share = Share::default();
    let line = || {
        let (done, all, percent) = share.get();
        format!("{percent:3} %  {} of {} files made", show_count(done), show_count(all))
    };
    progress::shown(line, || make(&|done, all| share.set(done, all)))
}

/// Receives something; on a terminal it is seen how far that has come, and when nothing comes.
fn receiving<T>(receive: impl FnOnce(&(dyn Fn(u64, u64) + Sync)) -> T) -> T {
    let share = Share::default();
    let line = || {
        let (done, all, percent) = share.get();
        let still = match share.still(done) {
            still if still < STILL => String::new(),
            still => format!(", nothing for {} s", still.as_secs()),
        };
        format!("{percent:3} %  {} of {} received{still}", show_size(done), show_size(all))
    };
    progress::shown(line, || receive(&|done, all| share.set(done, all)))
}

/// A snapshot with its name by content, as the server works it out the first time.
fn named(admin: &mut Admin, of: &Version) -> anyhow::Result<(SnapshotInfo, TreeName)> {
    let mut info = snapshots::one(admin, Ask::ListSnapshots(ListSnapshots { of: Some(of.clone()) }))?;
    if info.tree.is_empty() {
        info.tree = name(admin, of)?.to_string();
    }
    let tree = commands::parse_tree(&info.tree)?;
    Ok((info, tree))
}

/// The name by content of a version as it is.
fn name(admin: &mut Admin, of: &Version) -> anyhow::Result<TreeName> {
    commands::parse_tree(&commands::name_tree(admin, of, false)?.tree)
}

/// Reads a folder.
fn read(folder: &Path, known: Option<&Manifest>) -> anyhow::Result<Manifest> {
    shown(|progress| Manifest::of_folder(folder, known, progress))
}

/// Reads something; on a terminal it is seen how far that has come.
fn shown<T>(read: impl FnOnce(&Progress) -> Result<T, WalkError>) -> anyhow::Result<T> {
    let progress = Progress::default();
    let text = || {
        let (entries, bytes) = (progress.entries.load(Relaxed), progress.bytes.load(Relaxed));
        format!("{} files, {} looked at", show_count(entries), show_size(bytes))
    };
    progress::shown(text, || read(&progress)).map_err(|error| failure(Exit::Failed, error.to_string()))
}

/// A snapshot's manifest: as it is kept here, or read through a mount. When that of `like`, of the same family, or of another
/// snapshot of the volume is kept, only what the server says to have changed since is read.
fn manifest_of(
    admin: &mut Admin,
    server: &str,
    of: &Version,
    cache: &Cache,
    like: Option<(&Version, &Manifest)>,
) -> anyhow::Result<(SnapshotInfo, Manifest)> {
    let far = FarSnapshot::new(server, of);
    let (info, manifest, _) = read_from(admin, server, of, cache, like, &far)?;
    Ok((info, manifest))
}

/// As [`manifest_of`], with the mount through which it was read. `far` cuts large files.
fn read_from(
    admin: &mut Admin,
    server: &str,
    of: &Version,
    cache: &Cache,
    like: Option<(&Version, &Manifest)>,
    far: &FarSnapshot,
) -> anyhow::Result<(SnapshotInfo, Manifest, Option<Mounted>)> {
    let (info, tree) = named(admin, of)?;
    if let Some(manifest) = cache.get(&tree) {
        return Ok((info, manifest, None));
    }
    let mounting = Mounting::begin(server, of, "ro")?;
    let known = match like {
        Some((of, manifest)) => Some((of.clone(), manifest.clone())),
        None => kept(admin, of, cache)?,
    };
    let changes = match &known {
        Some((older, _)) => changes(admin, older, of)?.map(|(changes, _)| changes),
        None => None,
    };
    let mounted = mounting.done()?;
    let like = known.as_ref().map(|(_, known)| known);
    let older = like.zip(changes.as_deref());
    let manifest = read_mounted(of, tree, &mounted, older, like, far)?;
    cache.put(&manifest).map_err(failed)?;
    Ok((info, manifest, Some(mounted)))
}

/// Reads the manifest of a snapshot that has the name `tree`: what has changed since an older one, if that and the changes are known, or all.
/// `like` is one from which files are known.
fn read_mounted(
    of: &Version,
    tree: TreeName,
    mounted: &Mounted,
    older: Option<(&Manifest, &[Change])>,
    like: Option<&Manifest>,
    far: &FarSnapshot,
) -> anyhow::Result<Manifest> {
    if let Some((older, changes)) = older {
        let after = shown(|progress| older.after(changes, mounted.path(), Some(far), progress))?;
        if let Some(manifest) = after.filter(|found| found.tree == tree) {
            return Ok(manifest);
        }
    }
    let mut manifest = shown(|progress| Manifest::of_mount(mounted.path(), like, Some(far), progress))?;
    if manifest.tree != tree {
        // What is kept was of something else that has the same numbers and times, or what was told is not so.
        manifest = read(mounted.path(), None)?;
    }
    if manifest.tree == tree {
        return Ok(manifest);
    }
    let said = format!(
        "{} is {} as it is read, and {tree} by its rows: see `hayloft verify --deep`",
        snapshots::shown(of),
        manifest.tree
    );
    Err(failure(Exit::Damaged, said))
}

/// The newest other snapshot of a volume of which the manifest is kept here.
fn kept(admin: &mut Admin, of: &Version, cache: &Cache) -> anyhow::Result<Option<(Version, Manifest)>> {
    let others = commands::all(admin, &of.volume)?;
    Ok(others.into_iter().rev().find_map(|other| Some((other.of?, cache.get(&other.tree.parse().ok()?)?))))
}

/// What has changed from one snapshot to another one, and whether that came of the first one, if the server knows; `None`: the server does not tell.
fn changes(
    admin: &mut Admin,
    from: &Version,
    to: &Version,
) -> anyhow::Result<Option<(Vec<Change>, Option<bool>)>> {
    let found = match diff::with_times(admin, from, to) {
        // Of different families, or one of them was deleted meanwhile.
        Err(error) if matches!(exit_of(&error), Exit::Usage | Exit::NoVolume) => None,
        found => found?,
    };
    let changed = |difference: &Difference| Change {
        old: difference.old_path.as_deref().map(<[u8]>::to_vec),
        new: difference.new_path.as_deref().map(<[u8]>::to_vec),
        content: difference.changed & (difference::CONTENT | difference::TYPE) != 0,
        folder: [difference.old_mode, difference.new_mode]
            .iter()
            .any(|mode| mode & libc::S_IFMT == libc::S_IFDIR),
    };
    Ok(found.map(|found| (found.differences.iter().map(changed).collect(), found.descends)))
}
