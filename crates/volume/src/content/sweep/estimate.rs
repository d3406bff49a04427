//! What a sweep would give back, without one.

use std::collections::HashMap;
use std::sync::Arc;

use super::{is_sparse, mark};
use crate::database::family;
use crate::database::tables::{self, PackId, Place};
use crate::database::{self, homes};
use crate::error::VolumeError;
use crate::volume::Volume;

impl Volume {
    /// Bytes that a sweep would give back now: of content that nothing names, packs that would be written anew without it, and packs
    /// of commits that never came. All rows are read for it, as by a sweep, and nothing is changed. Deleted rows, and what killed servers
    /// have left unfinished, are not counted.
    ///
    /// # Errors
    /// The store fails; rows are damaged.
    pub(crate) async fn reclaimable(self: &Arc<Self>) -> Result<u64, VolumeError> {
        // Marks take memory: one at a time.
        let _one = self.sweeping.lock().await;
        let held = self.shared.held_by_others(self).await?;
        let rows = self.db()?.snapshot()?;
        let packs = family::packs(database::scan(&rows, &[tables::PACKS]).await?).await?;
        let sizes: HashMap<PackId, u64> = packs.iter().map(|(pack, row)| (*pack, row.size)).collect();
        let marks = mark::mark(&rows).await?;
        let (mut live, mut bytes) = (marks.small.clone(), 0);
        let mut scan = database::scan(&rows, &[tables::CHUNKS]).await?;
        while let Some(found) = scan.next().await? {
            let hash = tables::hash_in(&found.key).ok_or(VolumeError::Damaged("key of content"))?;
            let is_live = marks.is_live(hash);
            match Place::decode(found.value).ok_or(VolumeError::Damaged("place of content"))? {
                Place::Pack { pack, payload_len, .. } if is_live => {
                    *live.entry(pack).or_default() += u64::from(payload_len).max(1);
                }
                Place::Here { payload, .. } if !is_live => bytes += payload.len() as u64,
                Place::Pack { .. } | Place::Here { .. } => {}
            }
        }
        let may_go = |pack: PackId| self.homes.is_own(pack) && !held.has(pack);
        for (pack, size) in sizes.iter().filter(|(pack, _)| may_go(**pack)) {
            match live.get(pack).copied().unwrap_or(0) {
                0 => bytes += size,
                live if is_sparse(live, *size) => bytes += size - live,
                _ => {}
            }
        }
        for object in self.shared.store.list(&homes::folder(&self.id)).await? {
            let Some(pack) = object.location.filename().and_then(PackId::from_name) else { continue };
            // In this order, as a sweep looks.
            if !self.is_flying(pack)
                && !sizes.contains_key(&pack)
                && self.db()?.get(tables::pack(pack)).await?.is_none()
                && may_go(pack)
            {
                bytes += object.size;
            }
        }
        Ok(bytes)
    }
}
