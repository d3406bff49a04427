//! Trees in which a receiver looks for chunks.

use std::path::PathBuf;

use hayloft_transfer::{Manifest, Tree};
use hayloft_wire::Version;

use crate::versions::mounted::{Mounted, Mounting};

/// Where a tree can be read.
pub(super) enum Place {
    Folder(PathBuf),
    Version(Version),
}

/// A tree that this host knows of.
pub(super) struct Known {
    pub(super) manifest: Manifest,
    pub(super) place: Place,
    /// When it cannot be mounted it does without.
    pub(super) is_optional: bool,
}

/// Trees that can be read, with the mounts that they need.
#[derive(Default)]
pub(super) struct Seeds {
    pub(super) trees: Vec<Tree>,
    _mounts: Vec<Mounted>,
}

impl Seeds {
    /// Those of what is known that have something of a version which none before them has.
    ///
    /// # Errors
    /// One of them cannot be mounted.
    pub(super) fn of(server: &str, known: Vec<Known>, wanted: &Manifest) -> anyhow::Result<Seeds> {
        let manifests: Vec<&Manifest> = known.iter().map(|known| &known.manifest).collect();
        let useful = hayloft_transfer::useful(wanted, &manifests);
        let mut seeds = Seeds::default();
        let mut mounting = Vec::new();
        for (Known { manifest, place, is_optional }, is_useful) in known.into_iter().zip(useful) {
            match place {
                _ if !is_useful => {}
                Place::Folder(folder) => seeds.add(manifest, folder),
                Place::Version(of) => {
                    mounting.push((manifest, is_optional, Mounting::begin(server, &of, "ro")));
                }
            }
        }
        for (manifest, is_optional, begun) in mounting {
            match begun.and_then(Mounting::done) {
                Ok(mounted) => seeds.add_mounted(manifest, mounted),
                Err(_) if is_optional => {}
                Err(error) => return Err(error),
            }
        }
        Ok(seeds)
    }

    /// One more that can be read there.
    pub(super) fn add(&mut self, manifest: Manifest, folder: PathBuf) {
        self.trees.push(Tree { manifest, folder });
    }

    /// As [`Seeds::add`], and keeps the mount.
    pub(super) fn add_mounted(&mut self, manifest: Manifest, mounted: Mounted) {
        self.add(manifest, mounted.path().to_owned());
        self._mounts.push(mounted);
    }
}
