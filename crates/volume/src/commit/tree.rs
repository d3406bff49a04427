//! Whether a batch leaves the volume a tree, with what is stored already.

use hayloft_model::sound::{self, Ends};
use hayloft_model::{FileKind, Ino, Name};
use hayloft_wire::InodeRowMessage;
use hayloft_wire::listing::Row;

use crate::database::{self, Db, DbSnapshot, listing, tables};
use crate::error::VolumeError;

/// Fewer names of a directory than this are looked up one by one.
const SCAN_MIN: usize = 4;

/// Whether names lead to what is there, no directory lies in itself, and nothing leads to what is deleted. Mostly the first two are seen in
/// the batch, and nothing is looked up.
pub(super) async fn check(db: &Db, batch: &mut sound::Batch) -> Result<(), VolumeError> {
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
        Some(ends) => check_ends(&*db.snapshot()?, ends).await,
        None => Ok(()),
    }
}

/// Rows of what ends first: mostly they say that there is nothing to look for in directories, or in which one.
async fn check_ends(snapshot: &DbSnapshot, mut ends: Ends) -> Result<(), VolumeError> {
    let inodes: Vec<u64> = ends.inodes().map(|ino| ino.0).collect();
    for (ino, row) in listing::inodes(snapshot, inodes.into_iter(), false).await? {
        let row = Row::of(&row).map_err(|_| VolumeError::Damaged("inode"))?;
        let kind = row.kind().ok_or(VolumeError::Damaged("inode"))?;
        ends.has(Ino(ino), kind, row.nlink, Ino(row.parent));
    }
    let (dirs, most) = ends.directories();
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
