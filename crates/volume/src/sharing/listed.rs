//! What a listing tells of directories: their names, and the rows that the session may know.

use std::collections::HashSet;

use bytes::Bytes;
use hayloft_model::{BLOCK_SIZE, ContentHash, Ino};
use hayloft_wire::decode_blocks;
use hayloft_wire::listing::{Row, pack};
use rustc_hash::FxBuildHasher;

use crate::database::listing::{self, Map};
use crate::database::packed::Queued;
use crate::error::VolumeError;
use crate::sharing::enter::Walk;
use crate::sharing::packed::Piece;

/// An answer is cut into parts of about this many bytes.
pub(super) const PART: usize = 1 << 20;

/// A listing, or a part of one, ready to be sent.
#[derive(Default)]
pub(super) struct Listed {
    /// Entries, packed, and what they lead to as far as that is told. Rows with many attributes are large: each piece is not
    /// much more than a part.
    pub(super) pieces: Vec<(Vec<u8>, Vec<Ino>)>,
    pub(super) entries: u64,
    /// Directories among the entries.
    pub(super) below: Vec<Ino>,
    /// Contents of small files that are not in their rows, if they are wanted.
    pub(super) contents: Vec<(ContentHash, u32)>,
}

impl Listed {
    pub(super) fn bytes(&self) -> usize {
        self.pieces.iter().map(|(packed, _)| packed.len()).sum()
    }
}

/// The content of a small file that is not in its row.
fn small_content(row: &Row<'_>) -> Option<(ContentHash, u32)> {
    if row.size > BLOCK_SIZE {
        return None;
    }
    let blocks = decode_blocks(row.blocks?).ok()?;
    blocks.first().copied().flatten().map(|block| (block.hash, block.len))
}

fn look(row: &Bytes) -> Result<Row<'_>, VolumeError> {
    Row::of(row).map_err(|_| VolumeError::Damaged("inode"))
}

/// Names that are looked at while the lock of what sessions share is held once.
const LOOKS: usize = 32;

impl Walk<'_> {
    /// These entries of a directory.
    pub(super) async fn listed(&self, piece: Piece<'_>) -> Result<Listed, VolumeError> {
        let mut all = self.all_listed(&[piece]).await?;
        Ok(all.pop().unwrap_or_default())
    }

    /// The same for several.
    pub(super) async fn all_listed(&self, pieces: &[Piece<'_>]) -> Result<Vec<Listed>, VolumeError> {
        let mut known = self.take_along(pieces);
        // A file that somebody owned when the listing was read may have been changed, and given back, since.
        let unchanged = self.volume.packed.unchanged(pieces.iter().map(|piece| (piece.dir, piece.since)));
        let pieces: Vec<Piece<'_>> = pieces
            .iter()
            .zip(&unchanged)
            .map(|(piece, unchanged)| Piece { is_packed: piece.is_packed && *unchanged, ..*piece })
            .collect();
        let (mut alone, mut along) = (Vec::new(), Vec::new());
        for piece in &pieces {
            for entry in piece.entries.iter().filter(|entry| known.contains(&entry.dentry.ino.0)) {
                let is_along = piece.is_packed && !entry.inode.is_empty();
                if !is_along || (!self.names_only && look(&entry.inode)?.left_out) {
                    alone.push(entry.dentry.ino.0);
                } else if !self.names_only {
                    along.push((entry.dentry.ino.0, entry.inode.clone()));
                }
            }
        }
        let snapshot = self.db.snapshot()?;
        let mut rows = listing::inodes(&snapshot, alone.into_iter(), false).await?;
        if !self.names_only {
            rows.extend(along);
            listing::fill(&snapshot, &mut rows).await?;
        }
        self.read_strays(&mut rows, &mut known).await?;
        let mut all = Vec::with_capacity(pieces.len());
        for (piece, unchanged) in pieces.iter().zip(unchanged) {
            all.push(self.packed(piece, &rows, &known)?);
            if unchanged && piece.is_whole && !piece.is_packed && self.names_only {
                self.pack(piece, &rows);
            }
        }
        Ok(all)
    }

    /// What was read row by row is to be found packed the next time.
    fn pack(&self, piece: &Piece<'_>, rows: &Map<Bytes>) {
        let entries = piece.entries.iter();
        let entries = entries.map(|entry| (&entry.name[..], &entry.row[..], rows.get(&entry.dentry.ino.0)));
        let packed = self.volume.packed.pack(piece.dir, entries);
        if let Some(packed) = packed {
            self.volume.pack_later(Queued { dir: piece.dir, since: piece.since, packed });
        }
    }

    fn packed(
        &self,
        piece: &Piece<'_>,
        rows: &Map<Bytes>,
        known: &HashSet<u64, FxBuildHasher>,
    ) -> Result<Listed, VolumeError> {
        let mut listed = Listed { entries: piece.entries.len() as u64, ..Listed::default() };
        let (mut packed, mut inos) = (Vec::new(), Vec::new());
        for entry in piece.entries {
            let ino = entry.dentry.ino;
            let along = Some(&entry.inode).filter(|row| {
                piece.is_packed && self.names_only && !row.is_empty() && known.contains(&ino.0)
            });
            let row = along.or_else(|| rows.get(&ino.0));
            let found = row.map(look).transpose()?;
            match &found {
                Some(found) => {
                    inos.push(ino);
                    listed.contents.extend(small_content(found).filter(|_| !self.names_only));
                }
                None if known.contains(&ino.0) => self.miss(piece.dir, ino),
                None => {}
            }
            if entry.is_directory() {
                listed.below.push(ino);
            }
            let row = row.map(|row| &row[..]).zip(found.as_ref());
            pack(&mut packed, &entry.name, &entry.row, row, self.names_only);
            if packed.len() >= PART {
                listed.pieces.push((std::mem::take(&mut packed), std::mem::take(&mut inos)));
            }
        }
        if !packed.is_empty() {
            listed.pieces.push((packed, inos));
        }
        Ok(listed)
    }

    /// What the session itself owns it may be removing at this moment.
    fn miss(&self, dir: Ino, ino: Ino) {
        if self.volume.sharing.lock().grants.owner(dir) != Some(self.session) {
            let (volume, dir, ino) = (&self.volume.name, dir.0, ino.0);
            tracing::error!(volume, dir, ino, "a name leads to an inode that does not exist");
        }
    }

    /// Which inodes' rows may come along: directories that the session reads from now on, and files that nobody else
    /// owns. Nobody becomes an owner of these while the request is under way.
    fn take_along(&self, pieces: &[Piece<'_>]) -> HashSet<u64, FxBuildHasher> {
        let mut sharing = self.volume.sharing.lock();
        let mut looked_at = 0;
        let count = pieces.iter().map(|piece| piece.entries.len()).sum();
        let mut known = HashSet::with_capacity_and_hasher(count, FxBuildHasher);
        for (dir, entry) in
            pieces.iter().flat_map(|piece| piece.entries.iter().map(move |entry| (piece.dir, entry)))
        {
            looked_at += 1;
            if looked_at % LOOKS == 0 {
                drop(sharing);
                sharing = self.volume.sharing.lock();
            }
            let (ino, ticket) = (entry.dentry.ino, self.pass.ticket);
            let is_known = match entry.is_directory() {
                true => sharing.grants.read_along(ticket, ino).is_some(),
                // What the session owns by itself it has, and may be told to give back meanwhile.
                false if sharing.grants.owner(ino).is_some() => false,
                // The names of a slot are read while files are given to owners.
                false => !sharing.grants.is_split(dir) || sharing.grants.read_file_along(ticket, ino),
            };
            if is_known {
                known.insert(ino.0);
            }
        }
        known
    }

    /// Files with names in several directories are covered by none: their rows are read once more, when the request
    /// has claimed each.
    async fn read_strays(
        &self,
        rows: &mut Map<Bytes>,
        known: &mut HashSet<u64, FxBuildHasher>,
    ) -> Result<(), VolumeError> {
        let mut strays = Vec::new();
        for (ino, row) in &*rows {
            let found = look(row)?;
            if found.parent == 0 && !found.is_directory() {
                strays.push(*ino);
            }
        }
        if strays.is_empty() {
            return Ok(());
        }
        for ino in &strays {
            rows.remove(ino);
            known.remove(ino);
        }
        let claimed: Vec<u64> = {
            let mut sharing = self.volume.sharing.lock();
            let claim = |ino: &u64| {
                sharing.grants.owner(Ino(*ino)).is_none()
                    && sharing.grants.read_file_along(self.pass.ticket, Ino(*ino))
            };
            strays.into_iter().filter(claim).collect()
        };
        let snapshot = self.db.snapshot()?;
        rows.extend(listing::inodes(&snapshot, claimed.iter().copied(), !self.names_only).await?);
        known.extend(claimed);
        Ok(())
    }
}
