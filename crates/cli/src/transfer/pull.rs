//! `hayloft pull`.

use std::path::PathBuf;

use hayloft_transfer::{Cache, Manifest, Received, Record, useful};
use hayloft_wire::Version;

use crate::config::Config;
use crate::dial;
use crate::exit::{Exit, failure};
use crate::server::admin::Admin;
use crate::server::snapshots::parse_version;
use crate::transfer::args::PullArgs;
use crate::transfer::far::FarSnapshot;
use crate::transfer::receive::{From, bring};
use crate::transfer::seeds::{Known, Seeds};
use crate::transfer::{cache, failed, read_from, receiving};
use crate::versions::commands;
use crate::versions::mounted::Mounted;

/// A snapshot of another server.
pub(super) struct Pulled {
    server: String,
    of: Version,
    manifest: Manifest,
    /// Where it is mounted, if it had to be read.
    mounted: Option<Mounted>,
    files: FarSnapshot,
}

/// Runs `hayloft pull`.
///
/// # Errors
/// A snapshot that is not there; a volume that others have changed; what one of the servers refuses.
pub(crate) fn run(args: &PullArgs, config: &Config) -> anyhow::Result<u8> {
    let cache = cache(args.to.host.cache.as_ref())?;
    let wrong = || {
        let said = format!("'{}' names no snapshot: write HOST:PORT/VOLUME@NAME", args.from);
        failure(Exit::Usage, said)
    };
    let (far, name) = dial::split_volume(&args.from).ok_or_else(wrong)?;
    let mut of = parse_version(name).map_err(|_| wrong())?;
    let mut admin = Admin::connect(far)?;
    if of.snapshot.is_empty() {
        let newest = commands::all(&mut admin, &of.volume)?.pop().and_then(|info| info.of);
        of = newest.ok_or_else(|| {
            let said = format!(
                "{name} has no snapshot at {far}: `hayloft snapshot create {name}@NAME` there makes one"
            );
            failure(Exit::NoVolume, said)
        })?;
    }
    let files = FarSnapshot::new(far, &of);
    let (info, manifest, mounted) = read_from(&mut admin, far, &of, &cache, None, &files)?;
    let record =
        Record::of(&of.volume, &of.snapshot, &manifest, info.created_nanos, &info.note, &info.signatures);
    let pulled = Pulled { server: far.to_owned(), of, manifest, mounted, files };
    bring(&args.to, config, From::Server(Box::new(pulled)), record, cache)
}

impl Pulled {
    /// What it is.
    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Bytes that have come of large files, and of where they are cut.
    pub(super) fn received(&self) -> u64 {
        self.files.received()
    }

    /// Brings what `server` lacks of large files, and gives the trees in which all else is found: small files are read through a mount.
    ///
    /// # Errors
    /// A seed, or the snapshot, cannot be mounted; the link has broken.
    pub(super) fn fetch(
        &self,
        server: &str,
        cache: &Cache,
        known: Vec<Known>,
    ) -> anyhow::Result<(Received, Seeds)> {
        let manifest = &self.manifest;
        let mut seeds = Seeds::of(server, known, manifest)?;
        let come = receiving(|report| Received::from_far(&self.files, manifest, &seeds.trees, cache, report));
        let (received, left) = match come.map_err(failed)? {
            Some(received) => (received, manifest.without_large()),
            None => (Received::here(manifest.clone(), &seeds.trees), manifest.clone()),
        };
        let mut trees: Vec<&Manifest> = seeds.trees.iter().map(|tree| &tree.manifest).collect();
        trees.push(&left);
        if useful(manifest, &trees).last() == Some(&true) {
            match &self.mounted {
                Some(mounted) => seeds.add(left, PathBuf::from(mounted.path())),
                None => seeds.add_mounted(left, Mounted::new(&self.server, &self.of)?),
            }
        }
        Ok((received, seeds))
    }
}
