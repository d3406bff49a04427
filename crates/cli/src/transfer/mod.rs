//! Trees that are made what a manifest says: `hayloft send`, `hayloft receive`, and `hayloft merge`.

pub(crate) mod args;
pub(crate) mod merge;
pub(crate) mod receive;
mod replace;
pub(crate) mod send;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hayloft_transfer::{Cache, Manifest, TransferError};
use hayloft_tree::{Progress, TreeName};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{ListSnapshots, SnapshotInfo, Version};

use crate::exit::{Exit, failure};
use crate::progress;
use crate::server::admin::Admin;
use crate::sys;
use crate::units::{show_count, show_size};
use crate::versions::commands;
use crate::versions::mounted::Mounted;

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
}

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
}

/// A snapshot with its name by content, as the server works it out the first time.
fn named(admin: &mut Admin, of: &Version) -> anyhow::Result<(SnapshotInfo, TreeName)> {
    let mut info = commands::one(admin, Ask::ListSnapshots(ListSnapshots { of: Some(of.clone()) }))?;
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
    let progress = Progress::default();
    let text = || {
        let (entries, bytes) = (progress.entries.load(Relaxed), progress.bytes.load(Relaxed));
        format!("{} files, {} looked at", show_count(entries), show_size(bytes))
    };
    let read = progress::shown(text, || Manifest::of_folder(folder, known, &progress));
    read.map_err(|error| failure(Exit::Failed, error.to_string()))
}

/// A snapshot's manifest: as it is kept here, or read through a mount. What has not changed is taken from `like`, of the same
/// family, or from an older snapshot's that is kept.
fn manifest_of(
    admin: &mut Admin,
    server: &str,
    of: &Version,
    cache: &Cache,
    like: Option<&Manifest>,
) -> anyhow::Result<(SnapshotInfo, Manifest)> {
    let (info, tree) = named(admin, of)?;
    if let Some(manifest) = cache.get(&tree) {
        return Ok((info, manifest));
    }
    let mounted = Mounted::new(server, of)?;
    let mut known = like.cloned();
    for older in commands::all(admin, &of.volume)?.iter().rev() {
        if known.is_some() {
            break;
        }
        known = older.tree.parse().ok().and_then(|tree| cache.get(&tree));
    }
    let mut manifest = read(mounted.path(), known.as_ref())?;
    if manifest.tree != tree && known.is_some() {
        // What is kept was of something else that has the same numbers and times.
        manifest = read(mounted.path(), None)?;
    }
    if manifest.tree != tree {
        let said = format!(
            "{} is {} as it is read, and {tree} by its rows: see `hayloft verify --deep`",
            commands::shown(of),
            manifest.tree
        );
        return Err(failure(Exit::Damaged, said));
    }
    cache.put(&manifest).map_err(failed)?;
    Ok((info, manifest))
}
