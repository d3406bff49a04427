//! What the mounts that a root's layers and binds are on have counted while its command ran.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hayloft_root::{Layer, Spec};
use serde_json::{Value, json};

use crate::mountinfo;
use crate::server::stats;

/// What the process of a mount has counted so far.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    /// Requests that it has answered, and that the server has.
    fuse: u64,
    server: u64,
    epochs: u64,
    /// A layer is on it.
    has_layer: bool,
}

/// For each Hayloft mount that is seen in the root: what it has counted.
pub(super) fn operations(spec: &Spec) -> BTreeMap<PathBuf, Counts> {
    let Ok(mounts) = mountinfo::all() else { return BTreeMap::new() };
    // An image is mounted itself: the overlay does not look at the mount that it is on.
    let layers = spec.layers.iter().map(|layer| (layer.path(), matches!(layer, Layer::Folder { .. })));
    let paths = layers.chain(spec.binds.iter().map(|bind| (&*bind.source, false)));
    let on = |path: &Path| {
        let path = path.canonicalize().ok()?;
        let deepest = mounts.iter().filter(|mount| path.starts_with(&mount.mount_point));
        deepest.max_by_key(|mount| mount.mount_point.as_os_str().len()).filter(|mount| mount.is_ours())
    };
    let mut found: BTreeMap<PathBuf, Counts> = BTreeMap::new();
    for (path, is_layer) in paths {
        let Some(mount) = on(path) else { continue };
        if let Some(counts) = found.get_mut(&mount.mount_point) {
            counts.has_layer |= is_layer;
        } else if let Ok(stats) = stats::of_mount(&mount.mount_point) {
            let of = |key| stats::number(&stats, key).unwrap_or(0);
            let counts = Counts {
                fuse: of("fuse.requests.total"),
                server: of("server.requests.total"),
                epochs: of("server.epochs"),
                has_layer: is_layer,
            };
            found.insert(mount.mount_point.clone(), counts);
        }
    }
    found
}

/// What the mounts have counted since, for the report.
pub(super) fn difference(
    before: &BTreeMap<PathBuf, Counts>,
    after: &BTreeMap<PathBuf, Counts>,
) -> BTreeMap<String, Value> {
    let changes = after.iter().map(|(mount, now)| {
        let then = before.get(mount).copied().unwrap_or_default();
        let change = json!({
            "fuse": now.fuse.saturating_sub(then.fuse),
            "server": now.server.saturating_sub(then.server),
        });
        (mount.display().to_string(), change)
    });
    changes.collect()
}

/// Says under which layers all names were dropped meanwhile, which overlayfs takes for a change of the layer.
pub(super) fn warn_of_epochs(before: &BTreeMap<PathBuf, Counts>, after: &BTreeMap<PathBuf, Counts>) {
    for (mount, now) in after {
        let then = before.get(mount).copied().unwrap_or_default();
        if now.has_layer && now.epochs > then.epochs {
            eprintln!(
                "hayloft: hosts changed the same folders of the volume at {} while the command ran: it may have got \"Stale \
                 file handle\"; mount the volume once more with -o ro, and take the layers from there",
                mount.display()
            );
        }
    }
}
