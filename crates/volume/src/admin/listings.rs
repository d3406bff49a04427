//! Verifying packed listings: each must say what the rows say that it was made from.

use std::sync::Arc;

use bytes::Bytes;
use hayloft_model::Ino;
use hayloft_wire::listing::{self as packed, Row};

use crate::admin::mend::Fix;
use crate::database::listing::{self, Entry};
use crate::database::{self, DbSnapshot, tables};
use crate::error::VolumeError;
use crate::volume::Volume;

/// What is wrong with packed listings, by their directories, and what would mend it; how many there are.
pub(super) async fn check(
    volume: &Arc<Volume>,
    snapshot: &DbSnapshot,
) -> Result<(u64, Vec<(Ino, Fix)>), VolumeError> {
    let (mut count, mut wrong) = (0, Vec::new());
    let mut scan = database::scan(snapshot, &[tables::PACKED]).await?;
    while let Some(found) = scan.next().await? {
        let dir = tables::number_in(&found.key).map(Ino).ok_or(VolumeError::Damaged("key of a listing"))?;
        // Of another generation: nobody reads it.
        let Some(entries) = volume.packed.look(&found.value) else { continue };
        count += 1;
        let is_right = match entries {
            Ok(entries) => is_right(snapshot, dir, &entries).await?,
            Err(_) => false,
        };
        if !is_right {
            wrong.push((dir, Fix::Unpack(dir.0)));
        }
    }
    Ok((count, wrong))
}

async fn is_right(snapshot: &DbSnapshot, dir: Ino, entries: &[Entry]) -> Result<bool, VolumeError> {
    let stored = listing::entries(snapshot, dir, usize::MAX).await?.unwrap_or_default();
    let of = |entry: &Entry| (entry.name.clone(), entry.row.clone());
    if !stored.iter().map(of).eq(entries.iter().map(of)) {
        return Ok(false);
    }
    let with_row = || entries.iter().filter(|entry| !entry.inode.is_empty());
    let rows = listing::inodes(snapshot, with_row().map(|entry| entry.dentry.ino.0), false).await?;
    let is_as_stored =
        |entry: &Entry| rows.get(&entry.dentry.ino.0).is_some_and(|row| is_of(row, &entry.inode, dir));
    Ok(with_row().all(is_as_stored))
}

/// Whether a row in the listing of a directory is a stored one, or that without its data.
fn is_of(row: &Bytes, listed: &Bytes, dir: Ino) -> bool {
    let (Ok(found), Ok(of)) = (Row::of(row), Row::of(listed)) else { return false };
    if found.is_directory() || found.parent != dir.0 {
        return false;
    }
    let whole = |row: &[u8], found: &Row<'_>| {
        let mut entry = Vec::new();
        packed::pack(&mut entry, b"", b"", Some((row, found)), of.left_out);
        entry
    };
    let mut expected = Vec::new();
    packed::pack(&mut expected, b"", b"", Some((listed, &of)), false);
    whole(row, &found) == expected
}
