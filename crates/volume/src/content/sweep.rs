//! The sweep: content that no row names is dropped, and its room given back, while clients go on.
//!
//! It marks on a snapshot and deletes only what a commit cannot have brought back meanwhile. A commit
//! that uploads content again writes the chunk's row anew, so a row that is still as the snapshot had it
//! names the old place; and content that a commit names *without* uploading it is noted in
//! `State::touched` from before the snapshot was taken. Each deletion is checked under the volume's turn,
//! and durable before an object goes.

mod estimate;
mod mark;
mod rewrite;
mod small;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hayloft_model::ContentHash;
use hayloft_wire::Swept;
use prost::Message;

use crate::database::family::{self, Held};
use crate::database::rows::Rows;
use crate::database::tables::{self, PackId, Place};
use crate::database::{self, Db, DbSnapshot, homes};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::volume::Volume;

/// Rows that are deleted while the turn is held once.
const SLICE: usize = 1000;

/// Dead content up to this many bytes, and a tenth of what is in use, is not worth a sweep.
const WORTHWHILE: i64 = 32 << 20;

/// When the store runs full, this much is worth it.
const WORTHWHILE_WHEN_LOW: i64 = 1 << 20;

/// How often to look whether the store runs full.
const GLANCE: Duration = Duration::from_secs(1);

/// So many deleted inodes are left in the database at least: to rewrite it costs as much as they did.
const DEAD_ROWS_WORTHWHILE: u64 = 10_000;

/// However full the store is, sweeping takes at most one part in this many of the time.
const SHARE: u32 = 10;

/// When a volume was swept the last time, and how long that took.
struct Last {
    ended: Instant,
    took: Duration,
}

/// Sweeps volumes of which enough is dead, and sooner when the store runs full.
pub(crate) async fn in_background(shared: Arc<Shared>) {
    let mut last = HashMap::<String, Last>::new();
    loop {
        let pause = tokio::time::sleep(GLANCE.min(shared.config.sweep_interval));
        tokio::select! {
            () = pause => {}
            () = shared.room_wanted.notified() => {}
        }
        let low = shared.reserve.is_low();
        for volume in shared.open_volumes().await {
            if let Ok(db) = volume.db() {
                db.tidy().await;
            }
            if !is_due(&shared, &volume, last.get(&volume.id), low) {
                continue;
            }
            let started = Instant::now();
            let wants_room = low || volume.state.lock().wants_room;
            if let Err(error) = volume.sweep(wants_room).await {
                volume.note(&error);
                tracing::warn!(volume = volume.name, %error, "a sweep failed; it will be tried again");
            }
            last.insert(volume.id.clone(), Last { ended: Instant::now(), took: started.elapsed() });
        }
    }
}

/// Whether a volume is to be swept now.
fn is_due(shared: &Shared, volume: &Volume, last: Option<&Last>, low: bool) -> bool {
    if volume.is_view() {
        return false;
    }
    let (dead, used, wants_room) = {
        let state = volume.state.lock();
        (state.dead_bytes, state.usage.bytes, state.wants_room)
    };
    let rested = |pause: Duration| last.is_none_or(|last| last.ended.elapsed() >= pause);
    if rested(shared.config.sweep_interval) && dead > WORTHWHILE + (used / 3) as i64 {
        return true;
    }
    // What was dead before the server opened the volume is not in the count.
    let unknown = last.is_none();
    let urgent = (wants_room && (dead > 0 || unknown)) || (low && dead > WORTHWHILE_WHEN_LOW);
    urgent && rested(last.map_or(GLANCE, |last| GLANCE.max(last.took * SHARE)))
}

/// Whether a pack is worth to be written anew without what is dead.
fn is_sparse(live: u64, size: u64) -> bool {
    live > 0 && live < size / 2
}

/// A sweep in progress.
struct Sweep<'a> {
    volume: &'a Arc<Volume>,
    db: Db,
    done: Swept,
    /// Live bytes of the packs that the snapshot had; the others are none of this sweep's business.
    live: HashMap<PackId, u64>,
    /// What others of the family have, as of so many snapshots of this volume.
    held: (u64, Held),
}

impl Volume {
    /// Drops dead content. What is reachable stays, whatever clients do meanwhile. With `tables`, the database is rewritten without
    /// deleted rows as well; else only if these have become more than those that are left.
    pub(crate) async fn sweep(self: &Arc<Self>, tables: bool) -> Result<Swept, VolumeError> {
        let _one = self.sweeping.lock().await;
        // What they bring back may name content that no row names now.
        self.all_claimed().await?;
        let started = Instant::now();
        let (db, snapshot, dead_before, rewrites) = {
            let _turn = self.turn.lock().await;
            let db = self.db()?;
            let snapshot = db.snapshot()?;
            let mut state = self.state.lock();
            state.touched = Some(HashSet::new());
            state.wants_room = false;
            let rewrites = tables || state.dead_rows > state.usage.inodes + DEAD_ROWS_WORTHWHILE;
            (db, snapshot, std::mem::take(&mut state.dead_bytes), rewrites)
        };
        let swept = async {
            let held = (self.points.load(Acquire), self.shared.held_by_others(self).await?);
            let mut sweep = Sweep { volume: self, db, done: Swept::default(), live: HashMap::new(), held };
            sweep.run(&snapshot, rewrites).await?;
            Ok(sweep.done)
        };
        let swept = swept.await;
        let mut state = self.state.lock();
        state.touched = None;
        let done = match swept {
            Ok(done) => {
                state.sweeps += 1;
                if rewrites {
                    state.dead_rows = 0;
                }
                done
            }
            Err(error) => {
                state.dead_bytes += dead_before;
                return Err(error);
            }
        };
        drop(state);
        let millis = started.elapsed().as_millis() as u64;
        tracing::info!(volume = self.name, millis, ?done, "swept");
        Ok(done)
    }
}

impl Volume {
    /// Drops packs that no row names any more, since others of the family had them until now.
    pub(crate) async fn sweep_orphans(self: &Arc<Self>) -> Result<(), VolumeError> {
        if self.is_view() {
            return Ok(());
        }
        let _one = self.sweeping.lock().await;
        self.all_claimed().await?;
        let held = (self.points.load(Acquire), self.shared.held_by_others(self).await?);
        let db = self.db()?;
        let mut sweep = Sweep { volume: self, db, done: Swept::default(), live: HashMap::new(), held };
        sweep.delete_orphans().await
    }
}

impl Sweep<'_> {
    async fn run(&mut self, snapshot: &DbSnapshot, rewrites: bool) -> Result<(), VolumeError> {
        let packs = family::packs(database::scan(snapshot, &[tables::PACKS]).await?).await?;
        let sizes: HashMap<PackId, u64> = packs.iter().map(|(pack, row)| (*pack, row.size)).collect();
        self.live = sizes.keys().map(|pack| (*pack, 0)).collect();
        let marks = mark::mark(snapshot).await?;
        for slice in marks.stale_pages.chunks(SLICE) {
            self.delete_rows(slice).await?;
        }
        for (pack, bytes) in &marks.small {
            self.count_bytes(*pack, *bytes);
        }
        self.drop_dead_chunks(snapshot, &marks).await?;
        let dead: Vec<PackId> =
            self.live.iter().filter(|(_, live)| **live == 0).map(|(pack, _)| *pack).collect();
        for pack in dead {
            self.delete_pack(pack, sizes[&pack]).await?;
            self.done.packs_deleted += 1;
        }
        let sparse: HashMap<PackId, u64> = self
            .live
            .iter()
            .filter(|(pack, live)| is_sparse(**live, sizes[*pack]))
            // What others have stays as it is: a part of it once more would only take room.
            .filter(|(pack, _)| self.volume.homes.is_own(**pack) && !self.held.1.has(**pack))
            .map(|(pack, _)| (*pack, sizes[pack]))
            .collect();
        self.rewrite(&sparse).await?;
        self.delete_orphans().await?;
        if !rewrites {
            return Ok(());
        }
        let shared = &self.volume.shared;
        let free = shared.reserve.available().map(|space| space.free);
        if let Err(error) = self.volume.compaction.make(&self.db, free).await {
            // Only room is lost by this, and only until the next sweep.
            tracing::warn!(volume = self.volume.name, %error, "a compaction cannot be asked for");
        }
        Ok(())
    }

    async fn delete_rows(&self, keys: &[Bytes]) -> Result<(), VolumeError> {
        let _turn = self.volume.turn.lock().await;
        let mut batch = Rows::new();
        keys.iter().for_each(|key| batch.delete(key.clone()));
        self.volume.write(&self.db, batch).await
    }

    /// Deletes the rows of chunks that nothing names, and counts what is live in each pack.
    async fn drop_dead_chunks(
        &mut self,
        snapshot: &DbSnapshot,
        marks: &mark::Marks,
    ) -> Result<(), VolumeError> {
        let mut dead = Vec::new();
        let mut scan = database::scan(snapshot, &[tables::CHUNKS]).await?;
        while let Some(found) = scan.next().await? {
            let hash = tables::hash_in(&found.key).ok_or(VolumeError::Damaged("key of content"))?;
            if marks.is_live(hash) {
                self.count_live(found.value)?;
            } else {
                dead.push((hash, found.value));
                if dead.len() == SLICE {
                    self.drop_slice(&mut dead).await?;
                }
            }
        }
        self.drop_slice(&mut dead).await
    }

    fn count_live(&mut self, row: Bytes) -> Result<(), VolumeError> {
        if let Place::Pack { pack, payload_len, .. } =
            Place::decode(row).ok_or(VolumeError::Damaged("place of content"))?
        {
            self.count_bytes(pack, u64::from(payload_len).max(1));
        }
        Ok(())
    }

    fn count_bytes(&mut self, pack: PackId, bytes: u64) {
        if let Some(live) = self.live.get_mut(&pack) {
            *live += bytes;
        }
    }

    async fn drop_slice(&mut self, dead: &mut Vec<(ContentHash, Bytes)>) -> Result<(), VolumeError> {
        if dead.is_empty() {
            return Ok(());
        }
        let _turn = self.volume.turn.lock().await;
        let mut batch = Rows::new();
        let mut dropped = Vec::with_capacity(dead.len());
        for (hash, row) in dead.drain(..) {
            let touched =
                self.volume.state.lock().touched.as_ref().is_none_or(|touched| touched.contains(&hash));
            if touched {
                // Uploaded again, the old place is dead, and the new one none of this sweep's business.
                if self.db.get(tables::chunk(hash)).await? == Some(row.clone()) {
                    self.count_live(row)?;
                }
                continue;
            }
            batch.delete(tables::chunk(hash));
            if let Some(Place::Here { payload, .. }) = Place::decode(row) {
                self.done.bytes_reclaimed += payload.len() as u64;
            }
            dropped.push(hash);
        }
        {
            let mut state = self.volume.state.lock();
            dropped.iter().for_each(|hash| {
                state.known.remove(hash);
            });
        }
        if !dropped.is_empty() {
            self.volume.write(&self.db, batch).await?;
            hayloft_crash::point("sweep.chunks-dropped");
        }
        Ok(())
    }

    /// Whether nobody else has the pack. Snapshots that have begun meanwhile count.
    async fn is_free(&mut self, pack: PackId) -> Result<bool, VolumeError> {
        let points = self.volume.points.load(Acquire);
        if points != self.held.0 {
            self.held = (points, self.volume.shared.held_by_others(self.volume).await?);
        }
        Ok(self.volume.homes.is_own(pack) && !self.held.1.has(pack))
    }

    /// Deletes a pack that no chunk's row names: first its row, durably, then the object. That of a pack which others have is
    /// deleted when they have it no more, by a later sweep.
    async fn delete_pack(&mut self, pack: PackId, size: u64) -> Result<(), VolumeError> {
        {
            let _turn = self.volume.turn.lock().await;
            let mut batch = Rows::new();
            batch.delete(tables::pack(pack));
            self.volume.write(&self.db, batch).await?;
            let mut state = self.volume.state.lock();
            state.packs = state.packs.saturating_sub(1);
            state.pack_bytes = state.pack_bytes.saturating_sub(size);
        }
        hayloft_crash::point("sweep.row-deleted");
        if self.is_free(pack).await? {
            self.volume.shared.store.delete(&pack.path(&self.volume.id)).await?;
            self.done.bytes_reclaimed += size;
        }
        Ok(())
    }

    /// Deletes pack objects that no row names: of commits that never came; and what is left of objects that were not written to their end.
    async fn delete_orphans(&mut self) -> Result<(), VolumeError> {
        let volume = self.volume;
        let objects = volume.shared.store.list(&homes::folder(&volume.id)).await?;
        // That this becomes durable proves that the volume was ours until now; so every object that was
        // listed was put by this server, or by one that is gone.
        {
            let _turn = volume.turn.lock().await;
            let mut batch = Rows::new();
            batch.put(tables::VOLUME, volume.state.lock().volume_row().encode_to_vec());
            volume.write(&self.db, batch).await?;
        }
        for object in objects {
            let Some(pack) = object.location.filename().and_then(PackId::from_name) else { continue };
            // In this order: a pack stops flying only after its row is there.
            if volume.is_flying(pack)
                || self.db.get(tables::pack(pack)).await?.is_some()
                || !self.is_free(pack).await?
            {
                continue;
            }
            volume.shared.store.delete(object.location.as_ref()).await?;
            hayloft_crash::point("sweep.orphan-deleted");
            self.done.packs_deleted += 1;
            self.done.bytes_reclaimed += object.size;
        }
        for folder in [homes::folder(&volume.id), database::path(&volume.id)] {
            self.done.bytes_reclaimed += volume.shared.store.delete_unfinished(&folder).await?;
        }
        Ok(())
    }
}
