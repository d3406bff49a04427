//! Packs that are mostly dead: their live chunks move together into new ones.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use hayloft_model::ContentHash;
use hayloft_store::{EncodedChunk, PackEntry, PackWriter, decode_chunk};

use super::Sweep;
use crate::content::flying::Flying;
use crate::database;
use crate::database::rows::Rows;
use crate::database::tables::{self, PackId, Place};
use crate::error::VolumeError;

/// Payload that is moved at a time.
pub(super) const MOVE_BYTES: u64 = 8 << 20;

impl Sweep<'_> {
    /// Moves what is live in these packs, and deletes them.
    pub(super) async fn rewrite(&mut self, sparse: &HashMap<PackId, u64>) -> Result<(), VolumeError> {
        if sparse.is_empty() {
            return Ok(());
        }
        // A later snapshot: since no commit ever adds a row for an old pack, these are all that count.
        let snapshot = self.db.snapshot()?;
        let mut kept = HashSet::new();
        let mut group: Vec<(ContentHash, Bytes, Place)> = Vec::new();
        let mut bytes = 0;
        let mut scan = database::scan(&snapshot, &[tables::CHUNKS]).await?;
        while let Some(found) = scan.next().await? {
            let hash = tables::hash_in(&found.key).ok_or(VolumeError::Damaged("key of content"))?;
            let place = Place::decode(found.value.clone()).ok_or(VolumeError::Damaged("place of content"))?;
            let Place::Pack { pack, payload_len, .. } = &place else { continue };
            if !sparse.contains_key(pack) {
                continue;
            }
            bytes += u64::from(*payload_len);
            group.push((hash, found.value, place));
            if bytes >= MOVE_BYTES {
                self.move_chunks(std::mem::take(&mut group), &mut kept).await?;
                bytes = 0;
            }
        }
        self.move_chunks(group, &mut kept).await?;
        self.move_small_files(&snapshot, sparse, &mut kept).await?;
        for (pack, size) in sparse.iter().filter(|(pack, _)| !kept.contains(*pack)) {
            self.delete_pack(*pack, *size).await?;
            self.done.packs_rewritten += 1;
        }
        Ok(())
    }

    /// Writes chunks into a new pack and lets their rows lead there. The pack of a chunk that cannot be
    /// read is kept as it is.
    async fn move_chunks(
        &mut self,
        group: Vec<(ContentHash, Bytes, Place)>,
        kept: &mut HashSet<PackId>,
    ) -> Result<(), VolumeError> {
        if group.is_empty() {
            return Ok(());
        }
        let mut by_pack: HashMap<PackId, Vec<(ContentHash, Bytes, Place)>> = HashMap::new();
        for (hash, row, place) in group {
            if let Place::Pack { pack, .. } = &place {
                by_pack.entry(*pack).or_default().push((hash, row, place));
            }
        }
        let mut writer = PackWriter::default();
        let mut old_rows = HashMap::new();
        for (pack, chunks) in by_pack {
            match self.read_live(pack, &chunks).await {
                Ok(read) => {
                    read.into_iter().for_each(|chunk| writer.push(chunk));
                    old_rows.extend(chunks.into_iter().map(|(hash, row, _)| (hash, row)));
                }
                Err(error) => {
                    let name = &self.volume.name;
                    tracing::error!(volume = name, ?pack, error, "a pack with damaged content is kept");
                    kept.insert(pack);
                }
            }
        }
        if writer.is_empty() {
            return Ok(());
        }
        let (flying, size, entries) = self.put_pack(writer).await?;
        let _turn = self.volume.turn.lock().await;
        let mut batch = Rows::new();
        for entry in &entries {
            if self.db.get(tables::chunk(entry.hash)).await?.as_ref() == old_rows.get(&entry.hash) {
                batch.put(tables::chunk(entry.hash), Place::in_pack(flying.pack, entry).encode());
            }
        }
        self.name_pack(batch, flying, size).await
    }

    /// Puts a pack; rows are to name it next.
    pub(super) async fn put_pack(
        &self,
        writer: PackWriter,
    ) -> Result<(Flying, u64, Vec<PackEntry>), VolumeError> {
        let sealed = writer.seal();
        let flying = self.volume.new_pack(sealed.size);
        let path = self.volume.homes.path(flying.pack);
        self.volume.shared.store.create(&path, sealed.payload).await?;
        hayloft_crash::point("sweep.pack-put");
        Ok((flying, sealed.size, sealed.entries))
    }

    /// Writes the rows that name a new pack. The caller has the turn.
    pub(super) async fn name_pack(
        &mut self,
        mut batch: Rows,
        flying: Flying,
        size: u64,
    ) -> Result<(), VolumeError> {
        batch.put(tables::pack(flying.pack), self.volume.homes.row(size).encode());
        flying.will_be_named();
        self.volume.write(&self.db, batch).await?;
        hayloft_crash::point("sweep.pack-named");
        self.done.bytes_reclaimed = self.done.bytes_reclaimed.saturating_sub(size);
        let mut state = self.volume.state.lock();
        state.packs += 1;
        state.pack_bytes += size;
        Ok(())
    }

    async fn read_live(
        &self,
        pack: PackId,
        chunks: &[(ContentHash, Bytes, Place)],
    ) -> Result<Vec<EncodedChunk>, String> {
        let mut ranges = Vec::with_capacity(chunks.len());
        let mut heads = Vec::with_capacity(chunks.len());
        for (hash, _, place) in chunks {
            if let Place::Pack { offset, payload_len, len, codec, .. } = place {
                ranges.push(u64::from(*offset)..u64::from(*offset) + u64::from(*payload_len));
                heads.push((*hash, *len, *codec));
            }
        }
        let path = self.volume.homes.path(pack);
        let payloads =
            self.volume.shared.store.read_ranges(&path, &ranges).await.map_err(|error| error.to_string())?;
        heads
            .into_iter()
            .zip(payloads)
            .map(|((hash, len, codec), payload)| {
                decode_chunk(hash, len, codec, payload.clone()).map_err(|error| error.to_string())?;
                Ok(EncodedChunk { hash, len, codec, payload })
            })
            .collect()
    }
}
