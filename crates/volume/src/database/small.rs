//! Content of small files that lies in packs, and how it comes into the rows that name it.
//!
//! A row with its content is rewritten by every compaction that it takes part in; in a pack the content is written once. A
//! row says only where it is (`InodeRowMessage::placed`). Who reads rows gets them with their content ([`Contents::fill`]),
//! except for scans by the sweep and by the check.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hayloft_model::{BlockRef, ContentHash};
use hayloft_store::{PackEntry, Store, StoreError, hash_all};
use hayloft_wire::{InodeRowMessage, encode_blocks};
use slatedb::Db;

use crate::database;
use crate::database::homes::Homes;
use crate::database::tables::{self, PackId};
use crate::error::VolumeError;

/// How often rows are read anew whose pack is gone: a sweep moves content.
const TRIES: usize = 3;

/// Where the content of a small file is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SmallPlace {
    pub(crate) pack: PackId,
    pub(crate) offset: u32,
    pub(crate) len: u32,
    /// The first bytes of its BLAKE3 hash: enough to notice damage.
    hash: [u8; 8],
}

fn begin_of(hash: ContentHash) -> [u8; 8] {
    *hash.0.first_chunk().expect("hashes have 32 bytes")
}

impl SmallPlace {
    /// Of a chunk that is the content.
    pub(crate) fn in_pack(pack: PackId, entry: &PackEntry) -> SmallPlace {
        SmallPlace { pack, offset: entry.offset, len: entry.len, hash: begin_of(entry.hash) }
    }

    pub(crate) fn encode(&self) -> Bytes {
        let mut place = BytesMut::with_capacity(24);
        place.put_u64_le(self.pack.0);
        place.put_u32_le(self.offset);
        place.put_u32_le(self.len);
        place.put_slice(&self.hash);
        place.freeze()
    }

    /// The reverse of [`SmallPlace::encode`]; `None` for bytes that are none.
    pub(crate) fn decode(mut place: &[u8]) -> Option<SmallPlace> {
        if place.len() != 24 {
            return None;
        }
        let (pack, offset, len) = (PackId(place.get_u64_le()), place.get_u32_le(), place.get_u32_le());
        Some(SmallPlace { pack, offset, len, hash: place.try_into().ok()? })
    }

    /// Of a row, if its content is in a pack.
    ///
    /// # Errors
    /// The row is damaged.
    pub(crate) fn of_row(row: &InodeRowMessage) -> Result<Option<SmallPlace>, VolumeError> {
        SmallPlace::of_bytes(row.placed.as_deref())
    }

    /// As [`SmallPlace::of_row`], of what a row says.
    pub(crate) fn of_bytes(placed: Option<&[u8]>) -> Result<Option<SmallPlace>, VolumeError> {
        let decode = |place| SmallPlace::decode(place).ok_or(VolumeError::Damaged("place of content"));
        placed.map(decode).transpose()
    }

    /// The first bytes of the hash of the content.
    pub(crate) fn hash(&self) -> [u8; 8] {
        self.hash
    }

    /// Where it lies in its pack.
    pub(crate) fn range(&self) -> Range<u64> {
        u64::from(self.offset)..u64::from(self.offset) + u64::from(self.len)
    }

    /// Whether these bytes are what was stored, of each.
    pub(crate) fn are<'a>(places: impl Iterator<Item = &'a SmallPlace>, contents: &[Bytes]) -> Vec<bool> {
        let is = |((place, content), hash): ((&SmallPlace, &Bytes), ContentHash)| {
            content.len() == place.len as usize && begin_of(hash) == place.hash
        };
        places.zip(contents).zip(hash_all(contents)).map(is).collect()
    }

    /// The name that a row gets for content that is damaged or gone: nothing is stored under it, so who reads the file is
    /// told, and all else can be done with it.
    fn lost(&self) -> BlockRef {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&self.hash);
        BlockRef { hash: ContentHash(hash), len: self.len }
    }
}

/// Whether a row names content that is known to be lost.
pub(crate) fn is_lost(hash: &ContentHash) -> bool {
    hash.0[8..] == [0; 24]
}

/// The packs of a volume.
#[derive(Clone)]
pub(crate) struct Contents {
    pub(crate) store: Store,
    pub(crate) homes: Arc<Homes>,
}

impl Contents {
    /// Reads contents from one pack, in the order given. `None`: the pack is gone, or too short.
    pub(crate) async fn read(
        &self,
        pack: PackId,
        places: impl Iterator<Item = SmallPlace>,
    ) -> Result<Option<Vec<Bytes>>, VolumeError> {
        let ranges: Vec<Range<u64>> = places.map(|place| place.range()).collect();
        match self.store.read_ranges(&self.homes.path(pack), &ranges).await {
            Ok(contents) => Ok(Some(contents)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Puts the content into rows that say where it is. Content that is damaged or gone does not spoil the others: its row
    /// names what nobody has.
    ///
    /// # Errors
    /// The store cannot be read now.
    pub(crate) async fn fill<'a>(
        &self,
        db: &Db,
        rows: impl IntoIterator<Item = &'a mut InodeRowMessage>,
    ) -> Result<(), VolumeError> {
        let mut left: Vec<&mut InodeRowMessage> =
            rows.into_iter().filter(|row| row.placed.is_some()).collect();
        for _ in 0..TRIES {
            left = self.fill_once(left).await?;
            for row in &mut left {
                // As it is now: its content was moved, if it was not deleted.
                if let Some(now) = db.get(tables::inode(hayloft_model::Ino(row.ino))).await? {
                    **row = database::decode(now, "inode")?;
                }
            }
            left.retain(|row| row.placed.is_some());
            if left.is_empty() {
                return Ok(());
            }
        }
        for row in left {
            if let Some(place) = SmallPlace::of_row(row)? {
                tracing::error!(ino = row.ino, pack = place.pack.0, "the pack of a file's content is gone");
                lose(row, &place);
            }
        }
        Ok(())
    }

    /// Gives back rows whose packs are not there.
    async fn fill_once<'a>(
        &self,
        rows: Vec<&'a mut InodeRowMessage>,
    ) -> Result<Vec<&'a mut InodeRowMessage>, VolumeError> {
        let mut by_pack: HashMap<PackId, Vec<(SmallPlace, &mut InodeRowMessage)>> = HashMap::new();
        for row in rows {
            if let Some(place) = SmallPlace::of_row(row)? {
                by_pack.entry(place.pack).or_default().push((place, row));
            }
        }
        let mut gone = Vec::new();
        for (pack, rows) in by_pack {
            let Some(contents) = self.read(pack, rows.iter().map(|(place, _)| *place)).await? else {
                gone.extend(rows.into_iter().map(|(_, row)| row));
                continue;
            };
            let are = SmallPlace::are(rows.iter().map(|(place, _)| place), &contents);
            for (((place, row), content), is_right) in rows.into_iter().zip(contents).zip(are) {
                if is_right {
                    (row.inline, row.placed) = (Some(content), None);
                } else {
                    tracing::error!(ino = row.ino, pack = pack.0, "a file's content is damaged");
                    lose(row, &place);
                }
            }
        }
        Ok(gone)
    }
}

fn lose(row: &mut InodeRowMessage, place: &SmallPlace) {
    (row.blocks, row.placed) = (Some(encode_blocks(&[Some(place.lost())])), None);
}

#[cfg(test)]
mod tests {
    use super::*;
    use hayloft_store::Codec;

    #[test]
    fn places_come_back_as_they_went_in_and_know_their_content() {
        let content = b"int main(void) {}";
        let hash = ContentHash(*blake3::hash(content).as_bytes());
        let entry = PackEntry { hash, offset: 8, payload_len: 17, len: 17, codec: Codec::Raw };
        let place = SmallPlace::in_pack(PackId(u64::MAX - 1), &entry);
        assert_eq!(SmallPlace::decode(&place.encode()), Some(place));
        assert_eq!(SmallPlace::decode(&place.encode()[1..]), None);
        let contents = [&content[..], b"int main(void) []", b""].map(Bytes::from_static);
        assert_eq!(SmallPlace::are([place; 3].iter(), &contents), [true, false, false]);
        assert!(is_lost(&place.lost().hash) && !is_lost(&hash));
    }
}
