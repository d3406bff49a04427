//! Scrubbing: everything that a volume has in the store is read and verified, slowly, when nobody needs the server.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hayloft_store::{PackIndex, StoreError};
use hayloft_wire::Checked;
use parking_lot::Mutex;
use slatedb::{ErrorKind, SstReader};

use crate::database;
use crate::database::homes;
use crate::database::ledger::{self, Damage};
use crate::database::{named, registry};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::volume::Volume;

/// How long after its start a server begins to scrub.
const FIRST: Duration = Duration::from_secs(600);

/// A volume is scrubbed again so long after the last time.
const PERIOD: Duration = Duration::from_secs(7 * 24 * 3600);

/// How often to look whether a volume is due.
const LOOK: Duration = Duration::from_secs(60);

/// A server that answers more requests a second than this is busy.
const BUSY: u64 = 50;

/// So long an object waits for a busy server, at most: a server that is never idle is scrubbed too.
const PATIENCE: Duration = Duration::from_secs(10);

/// Damaged objects are told up to this number.
const DAMAGES_MAX: usize = 100;

/// What was scrubbed of a volume since the server's start.
#[derive(Default)]
pub(crate) struct Scrubbed {
    pub(crate) objects: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) rounds: AtomicU64,
    /// Seconds since the epoch; 0: never.
    pub(crate) finished_secs: AtomicU64,
    /// What the last round found. A leaf.
    damages: Mutex<Vec<Damage>>,
}

impl Scrubbed {
    /// How many objects the last round found damaged.
    pub(crate) fn damaged(&self) -> usize {
        self.damages.lock().len()
    }
}

/// Scrubs the open volumes, one after the other, each once a week.
pub(crate) async fn in_background(shared: Arc<Shared>) {
    let Some(rate) = shared.config.scrub_bytes_per_second.filter(|rate| *rate > 0) else { return };
    tokio::time::sleep(FIRST).await;
    let mut last = HashMap::<String, Instant>::new();
    loop {
        for volume in shared.open_volumes().await {
            if last.get(&volume.id).is_some_and(|last| last.elapsed() < PERIOD) {
                continue;
            }
            if let Err(error) = volume.scrub(Some(rate)).await {
                tracing::warn!(volume = volume.name, %error, "the volume is not scrubbed to its end");
            }
            last.insert(volume.id.clone(), Instant::now());
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// One round over a volume.
struct Round<'a> {
    volume: &'a Volume,
    /// Bytes a second, and only when the server is idle; `None`: as fast as it goes.
    rate: Option<u64>,
    damages: Vec<Damage>,
    objects: u64,
}

impl Volume {
    /// Reads and verifies all that the volume has in the store: registry, manifest, log, tables, packs.
    ///
    /// # Errors
    /// The store cannot be read at the moment.
    pub(crate) async fn scrub(&self, rate: Option<u64>) -> Result<Checked, VolumeError> {
        let mut round = Round { volume: self, rate, damages: Vec::new(), objects: 0 };
        if !self.is_view() {
            // It mends an entry that the other one can mend. A snapshot is entered with its family.
            self.scrub_name().await?;
        }
        round.count(0).await;
        round.log().await?;
        round.tables().await?;
        round.packs().await?;
        let Round { damages, objects, .. } = round;
        for damage in &damages {
            tracing::error!(volume = self.name, %damage, "found by scrubbing");
        }
        let problems = damages.iter().map(|damage| format!("volume {}: {damage}", self.name)).collect();
        *self.scrubbed.damages.lock() = damages;
        self.scrubbed.rounds.fetch_add(1, Relaxed);
        self.scrubbed.finished_secs.store(self.shared.now().secs as u64, Relaxed);
        Ok(Checked { problems, objects, ..Checked::default() })
    }
}

impl Volume {
    /// What says that the volume is there, and under which name.
    async fn scrub_name(&self) -> Result<(), VolumeError> {
        // Nobody deletes it meanwhile.
        let _place = self.shared.hold(&self.name).await;
        let registered = registry::read(&self.shared.store, &self.name).await?;
        named::keep(&self.shared.store, &self.name, &registered).await
    }
}

impl Round<'_> {
    /// An object was read; waits as long as that may take at the rate.
    async fn count(&mut self, bytes: u64) {
        self.objects += 1;
        self.volume.scrubbed.objects.fetch_add(1, Relaxed);
        self.volume.scrubbed.bytes.fetch_add(bytes, Relaxed);
        let Some(rate) = self.rate else { return };
        tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / rate as f64)).await;
        let (stats, since) = (&self.volume.shared.stats, Instant::now());
        while since.elapsed() < PATIENCE {
            let before = stats.requests();
            tokio::time::sleep(Duration::from_millis(200)).await;
            if (stats.requests() - before) * 5 <= BUSY {
                return;
            }
        }
    }

    fn damaged(&mut self, object: String, what: String) {
        if self.damages.len() < DAMAGES_MAX {
            self.damages.push(Damage { object, what });
        }
    }

    async fn log(&mut self) -> Result<(), VolumeError> {
        let (store, id) = (&self.volume.shared.store, &self.volume.id);
        let mut found = ledger::differences(store, id, true).await?;
        if !found.is_empty() {
            // What is not needed any more may have been deleted meanwhile.
            let again = ledger::differences(store, id, true).await?;
            found.retain(|damage| again.contains(damage));
        }
        self.damages.extend(found);
        self.count(0).await;
        Ok(())
    }

    async fn tables(&mut self) -> Result<(), VolumeError> {
        let db = self.volume.db()?;
        let own = database::path(&self.volume.id);
        let manifest = db.manifest();
        // What a fork has of its origin lies there.
        let mut elsewhere = HashMap::new();
        for other in manifest.external_dbs() {
            elsewhere.extend(other.sst_ids.iter().map(|id| (id.value(), other.path.clone())));
        }
        let ids: Vec<_> = manifest.all_sst_views().map(|view| view.sst.id.value()).collect();
        drop(manifest);
        for id in ids {
            let path = elsewhere.get(&id).unwrap_or(&own);
            let reader = SstReader::new(path.clone(), self.volume.shared.store.objects(), None, None);
            let object = format!("{path}/compacted/{id}.sst");
            let read = async {
                let file = reader.open(id).await?;
                file.stats().await?;
                let mut blocks = file.index().await?.len();
                let bytes = file.metadata().await?.metadata.size;
                while blocks > 0 {
                    blocks -= 1;
                    file.read_block(blocks).await?;
                }
                Ok::<u64, slatedb::Error>(bytes)
            };
            match read.await {
                Ok(bytes) => self.count(bytes).await,
                Err(error)
                    if error.kind() == ErrorKind::Unavailable && !StoreError::caused_by_damage(&error) =>
                {
                    return Err(error.into());
                }
                // A snapshot that is deleted meanwhile.
                Err(_) if !self.volume.is_usable() => return Err(VolumeError::ShuttingDown),
                // A compaction has taken it away.
                Err(_) if !db.manifest().all_sst_views().any(|view| view.sst.id.value() == id) => {}
                Err(error) => self.damaged(object, format!("is damaged or gone: {error}")),
            }
        }
        Ok(())
    }

    async fn packs(&mut self) -> Result<(), VolumeError> {
        let store = &self.volume.shared.store;
        // What others of the family have put they read themselves, as long as they are there.
        // Where an entry of another volume cannot be read nobody knows who is there: then all is read.
        let living = match self.volume.shared.living(self.volume.homes.first()).await {
            Ok(living) => living,
            Err(error) => {
                tracing::warn!(volume = %self.volume.name, %error, "all packs are read, also those that others put");
                HashSet::new()
            }
        };
        let own = store.list(&homes::folder(&self.volume.id)).await?;
        let elsewhere = self.volume.homes.paths_elsewhere(|home| !living.contains(home));
        // Those that are gone are found by a check: rows name them.
        for path in own.iter().map(|object| object.location.to_string()).chain(elsewhere) {
            let pack = match store.get(&path).await {
                Ok(pack) => pack,
                Err(StoreError::NotFound { .. }) => continue,
                Err(error @ (StoreError::Damaged { .. } | StoreError::Unreadable { .. })) => {
                    self.damaged(path, crate::error::chain(&error));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let bytes = pack.len() as u64;
            let verified = tokio::task::spawn_blocking(move || PackIndex::verify(&pack).map(drop)).await;
            if let Err(error) = verified.map_err(|_| VolumeError::ShuttingDown)? {
                self.damaged(path, crate::error::chain(&error));
            }
            self.count(bytes).await;
        }
        Ok(())
    }
}
