//! Receives a version: what this host lacks is brought, then a folder is made what the version is.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::apply;
use crate::cache::Cache;
use crate::chunk::ChunkId;
use crate::contents::{Contents, places};
use crate::error::TransferError;
use crate::fetch::{self, Fetched, FrameReader, Packs};
use crate::manifest::Manifest;
use crate::mirror::Record;
use crate::seed::Seed;

/// A tree that this host has, with the folder in which its files can be read.
pub struct Tree {
    /// What it is.
    pub manifest: Manifest,
    /// Where it is. It must not change while something is received.
    pub folder: PathBuf,
}

/// A version that has come as a whole.
pub struct Received {
    /// What it is.
    pub manifest: Manifest,
    pub(crate) fetched: Fetched,
    pub(crate) spool: PathBuf,
    /// Bytes of chunks that were here already.
    pub had: u64,
    /// Bytes of chunks that had to come, before compression.
    pub lacked: u64,
}

/// A manifest of some ten million files is no larger.
const MANIFEST_MOST: usize = 2 << 30;

/// Brings a version's manifest. Of the trees in the cache nothing has to come again.
///
/// # Errors
/// The source cannot be read, or the manifest is not of the tree that the record names.
pub fn manifest(
    packs: &mut Packs<'_>,
    record: &Record,
    cache: &Cache,
    like: &[&Manifest],
) -> Result<Manifest, TransferError> {
    let tree = record.tree_name()?;
    if let Some(manifest) = cache.get(&tree) {
        return Ok(manifest);
    }
    let mut have: HashMap<ChunkId, Vec<u8>> = HashMap::new();
    for manifest in like {
        crate::chunk::cut(&mut manifest.to_bytes().as_slice(), |chunk| {
            have.insert(ChunkId::of(chunk), chunk.to_vec());
        })
        .map_err(TransferError::io("cannot cut a manifest"))?;
    }
    let mut fetched = Fetched::default();
    let spool = fetch::spool_path(cache.folder(), &format!("manifest-{tree}"));
    let wanted = record.manifest.iter().filter(|id| !have.contains_key(id)).copied();
    packs.fetch(wanted, &mut fetched, &spool, &|_, _| {})?;
    let (mut bytes, mut reader) = (Vec::new(), FrameReader::new(&fetched));
    for id in &record.manifest {
        if bytes.len() > MANIFEST_MOST {
            return Err(TransferError::Damaged("the manifest has no end".to_owned()));
        }
        match have.get(id) {
            Some(chunk) => bytes.extend_from_slice(chunk),
            None => {
                let lacking = || TransferError::Lacking(format!("chunk {id} did not come"));
                let chunk = reader.read(id)?.ok_or_else(lacking)?;
                if ChunkId::of(chunk) != *id {
                    return Err(TransferError::Damaged(format!("chunk {id} of the manifest")));
                }
                bytes.extend_from_slice(chunk);
            }
        }
    }
    let manifest = Manifest::from_bytes(&bytes)?;
    if manifest.tree != tree {
        let said =
            format!("the manifest of {}@{} is that of {}", record.volume, record.snapshot, manifest.tree);
        return Err(TransferError::Damaged(said));
    }
    let _ = std::fs::remove_file(spool);
    Ok(manifest)
}

/// Which of some trees have chunks of a version that none before them has.
pub fn useful(wanted: &Manifest, trees: &[&Manifest]) -> Vec<bool> {
    let mut lacking: HashSet<ChunkId> =
        wanted.entries.iter().flat_map(|entry| ChunkId::all(&entry.chunks)).collect();
    let has = |tree: &&Manifest| {
        let before = lacking.len();
        for entry in &tree.entries {
            for id in ChunkId::all(&entry.chunks) {
                lacking.remove(&id);
            }
        }
        lacking.len() < before
    };
    trees.iter().map(has).collect()
}

/// Brings what none of `seeds` has.
///
/// # Errors
/// The source cannot be read; a chunk is nowhere; there is no room.
pub fn fetch(
    packs: &mut Packs<'_>,
    record: &Record,
    manifest: Manifest,
    seeds: &[Tree],
    cache: &Cache,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Received, TransferError> {
    let seeded = places(seeds);
    let mut lacking: HashMap<ChunkId, u32> = HashMap::new();
    let (mut had, mut lacked) = (0, 0);
    for entry in &manifest.entries {
        for (id, _, len) in entry.pieces() {
            if seeded.contains_key(&id) {
                had += u64::from(len);
            } else if lacking.insert(id, len).is_none() {
                lacked += u64::from(len);
            }
        }
    }
    let mut fetched = Fetched::default();
    let spool = fetch::spool_path(cache.folder(), &record.tree);
    let wanted = lacking.into_keys();
    packs.fetch(wanted, &mut fetched, &spool, progress)?;
    Ok(Received { manifest, fetched, spool, had, lacked })
}

/// Makes a folder what `wanted` says, of what the seeds have.
///
/// # Errors
/// The folder cannot be written; none of the seeds has a chunk, or one is not what it was.
pub fn make(
    folder: &Path,
    is: &Manifest,
    wanted: &Manifest,
    seeds: &[Tree],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), TransferError> {
    apply_from(&Fetched::default(), folder, Some(is), wanted, seeds, progress)
}

fn apply_from(
    fetched: &Fetched,
    folder: &Path,
    is: Option<&Manifest>,
    wanted: &Manifest,
    seeds: &[Tree],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), TransferError> {
    let opened = seeds.iter().map(|tree| Seed::open(&tree.folder)).collect::<Result<Vec<_>, _>>()?;
    let contents = Contents { fetched, seeded: places(seeds), seeds: &opened };
    apply::apply(folder, is, wanted, &contents, progress)
}

impl Received {
    /// What can be read here, through a mount of another server's: nothing has to be brought before. `seeds` are what is nearer.
    pub fn here(manifest: Manifest, seeds: &[Tree]) -> Received {
        let seeded = places(seeds);
        let chunks: HashMap<ChunkId, u32> =
            manifest.entries.iter().flat_map(|entry| entry.pieces()).map(|(id, _, len)| (id, len)).collect();
        let (had, lacked): (Vec<_>, Vec<_>) = chunks.iter().partition(|(id, _)| seeded.contains_key(*id));
        let sum = |chunks: Vec<(&ChunkId, &u32)>| chunks.iter().map(|(_, len)| u64::from(**len)).sum();
        let (had, lacked) = (sum(had), sum(lacked));
        Received { manifest, fetched: Fetched::default(), spool: PathBuf::new(), had, lacked }
    }

    /// Makes a folder what the version is. `is` is what the folder is now: nothing, or one of `seeds`' trees.
    ///
    /// # Errors
    /// The folder cannot be written, or a seed is not what it was.
    pub fn apply(
        &self,
        folder: &Path,
        is: Option<&Manifest>,
        seeds: &[Tree],
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), TransferError> {
        apply_from(&self.fetched, folder, is, &self.manifest, seeds, progress)
    }

    /// What a folder of this host's disk is in which this was applied, when it is there to stay: names and all else are read, but what
    /// is in files was verified as it was written. Until then `meanwhile` does something with it.
    ///
    /// # Errors
    /// As [`hayloft_tree::walk`], and when it cannot be written.
    pub fn copy<T>(&self, folder: &Path, meanwhile: impl FnOnce(Manifest) -> T) -> Result<T, TransferError> {
        std::thread::scope(|scope| {
            let synced = scope.spawn(|| apply::sync(folder));
            let copy = meanwhile(self.manifest.of_copy(folder)?);
            let failed =
                |_| Err(TransferError::Lacking("the thread that waits for the disk has ended".to_owned()));
            synced.join().unwrap_or_else(failed)?;
            Ok(copy)
        })
    }

    /// Lets go of what has come: it is in the folder now.
    pub fn forget(self) {
        let _ = std::fs::remove_file(self.spool);
    }
}
