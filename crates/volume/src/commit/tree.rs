//! Whether a batch leaves the volume a tree, with what is stored already.

use std::collections::{HashMap, HashSet};

use hayloft_model::sound::{self, Ends};
use hayloft_model::{FileKind, Ino, Name};
use hayloft_wire::InodeRowMessage;
use hayloft_wire::listing::Row;

use crate::database::listing::{Entry, Map};
use crate::database::packed::{NAMES_MIN, PackedListings};
use crate::database::{self, Db, DbSnapshot, listing, tables};
use crate::error::VolumeError;

/// Fewer names of a directory than this are looked up one by one.
const SCAN_MIN: usize = 4;

/// Whether names lead to what is there, no directory lies in itself, and nothing leads to what is deleted. Mostly the first two are seen in
/// the batch, and nothing is looked up. `taken`: how many names of which directories it deletes.
pub(super) async fn check(
    db: &Db,
    (listings, taken): (&PackedListings, &HashMap<Ino, usize>),
    batch: &mut sound::Batch,
) -> Result<(), VolumeError> {
    let stored = async |ino: Ino| -> Result<Option<InodeRowMessage>, VolumeError> {
        let row = (**db).get(tables::inode(ino)).await?;
        row.map(|row| database::decode::<InodeRowMessage>(row, "inode")).transpose()
    };
    let elsewhere: Vec<_> = batch.named_elsewhere().collect();
    for dentry in elsewhere {
        let row = stored(dentry.ino).await?;
        sound::leads(&dentry, row.and_then(|row| FileKind::of_mode(row.mode)))?;
    }
    while let Some(dir) = batch.unknown()? {
        let parent = stored(dir).await?.map(|row| Ino(row.parent));
        batch.is_in(dir, parent);
    }
    match batch.ends()? {
        Some(ends) => {
            let snapshot = db.snapshot()?;
            let many = taken.iter().filter(|(_, count)| **count >= NAMES_MIN).map(|(dir, _)| *dir);
            let packed = read_packed(&snapshot, listings, many).await?;
            check_ends(&snapshot, packed, ends).await
        }
        None => Ok(()),
    }
}

/// Rows of what ends first: mostly they say that there is nothing to look for in directories, or in which one.
async fn check_ends(
    snapshot: &DbSnapshot,
    packed: Map<Vec<Entry>>,
    mut ends: Ends,
) -> Result<(), VolumeError> {
    let mut inodes: HashSet<u64> = ends.inodes().map(|ino| ino.0).collect();
    for entry in packed.values().flatten().filter(|entry| !entry.inode.is_empty()) {
        if inodes.remove(&entry.dentry.ino.0) {
            let row = Row::of(&entry.inode).map_err(|_| VolumeError::Damaged("packed listing"))?;
            let kind = row.kind().ok_or(VolumeError::Damaged("packed listing"))?;
            ends.has(entry.dentry.ino, kind, row.nlink, Ino(row.parent));
        }
    }
    for (ino, row) in listing::inodes(snapshot, inodes.into_iter(), false).await? {
        let row = Row::of(&row).map_err(|_| VolumeError::Damaged("inode"))?;
        let kind = row.kind().ok_or(VolumeError::Damaged("inode"))?;
        ends.has(Ino(ino), kind, row.nlink, Ino(row.parent));
    }
    for (dir, entries) in &packed {
        entries.iter().try_for_each(|entry| ends.was(Ino(*dir), &entry.name, entry.dentry.ino))?;
    }
    let (mut dirs, most) = ends.directories();
    dirs.retain(|dir| !packed.contains_key(&dir.0));
    if !dirs.is_empty() {
        // Between two of them one name of another directory may be passed.
        let found = listing::directories(snapshot, &dirs, most + dirs.len()).await?;
        if found.len() < dirs.len() {
            return Err(ends.too_many().into());
        }
        for (dir, entries) in found {
            entries.iter().try_for_each(|entry| ends.was(Ino(dir), &entry.name, entry.dentry.ino))?;
        }
    }
    for given in [false, true] {
        for (dir, names) in ends.wanted(given) {
            tell_names(snapshot, &mut ends, dir, &names).await?;
        }
    }
    Ok(ends.finish()?)
}

/// The listings of directories that lose many names at once, as far as these are packed: one row each, instead of two for each name. A file that
/// has its name there is there with its row.
async fn read_packed(
    snapshot: &DbSnapshot,
    listings: &PackedListings,
    dirs: impl Iterator<Item = Ino>,
) -> Result<Map<Vec<Entry>>, VolumeError> {
    let mut found = Map::default();
    for dir in dirs {
        let row = (**snapshot).get(tables::packed(dir)).await?;
        if let Some(entries) = row.and_then(|row| listings.look(&row)) {
            found.insert(dir.0, entries?);
        }
    }
    Ok(found)
}

/// Tells which of these names are stored, and where they lead.
async fn tell_names(
    snapshot: &DbSnapshot,
    ends: &mut Ends,
    dir: Ino,
    names: &[Name],
) -> Result<(), VolumeError> {
    if names.len() >= SCAN_MIN
        && let Some(entries) = listing::entries(snapshot, dir, 2 * names.len()).await?
    {
        entries.iter().try_for_each(|entry| ends.was(dir, &entry.name, entry.dentry.ino))?;
        return Ok(());
    }
    for name in names {
        if let Some(row) = (**snapshot).get(tables::dentry(dir, name.as_bytes())).await? {
            let dentry =
                hayloft_wire::listing::dentry_from(&row).map_err(|_| VolumeError::Damaged("dentry"))?;
            ends.was(dir, name.as_bytes(), dentry.ino)?;
        }
    }
    Ok(())
}
