//! Whether a server may speak for a volume. Another server that opens the volume makes it its own, and this one may not notice for as
//! long as its store does not answer. So what is said has to rest on a look that is not old (ADR 79).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use hayloft_store::Store;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use slatedb::VersionedManifest;
use slatedb::admin::AdminBuilder;
use tokio::sync::Notify;

use crate::database::{ledger, path};
use crate::error::VolumeError;

/// What is known of whose a volume is.
pub(crate) struct Ownership {
    pub(crate) store: Store,
    pub(crate) volume_id: String,
    /// How long a look counts, milliseconds; `None`: nobody else can change anything, as of a snapshot.
    counts_for: Option<u64>,
    /// When the last look began that has found the volume its own, by [`now_ms`].
    seen: AtomicU64,
    /// Since when there was no moment without such a look.
    since: AtomicU64,
    /// A leaf.
    known: Mutex<Known>,
    /// Counts openings before which another server has had it.
    tenure: AtomicU64,
    /// It is another server's for good.
    is_lost: AtomicBool,
    /// Told of each look.
    looked: Notify,
}

/// The newest manifest of the database up to which none is of another server's, since this one has opened it.
#[derive(Clone, Copy, Default)]
struct Known {
    manifest: u64,
    /// SlateDB's number of the opening.
    epoch: u64,
}

/// Milliseconds since the host was booted, those that it has slept among them.
pub(crate) fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

impl Ownership {
    /// Of a volume that is not open yet. `counts_for`: how long a look counts, `None`: no other server can change anything.
    pub(crate) fn new(store: &Store, volume_id: &str, counts_for: Option<Duration>) -> Ownership {
        Ownership {
            store: store.clone(),
            volume_id: volume_id.to_owned(),
            counts_for: counts_for.map(|counts_for| counts_for.as_millis() as u64),
            seen: AtomicU64::new(0),
            since: AtomicU64::new(0),
            known: Mutex::default(),
            tenure: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
            looked: Notify::new(),
        }
    }

    /// The database was opened, by what began at that time. `was_taken`: another server has had it since the opening before.
    pub(crate) fn opened(&self, manifest: &VersionedManifest, began_ms: u64, was_taken: bool) {
        *self.known.lock() = Known { manifest: manifest.id(), epoch: manifest.writer_epoch() };
        if was_taken {
            self.tenure.fetch_add(1, SeqCst);
            self.since.store(now_ms(), SeqCst);
        }
        self.note(began_ms);
    }

    /// Changes when another server has had the volume.
    pub(crate) fn tenure(&self) -> u64 {
        self.tenure.load(SeqCst)
    }

    /// A manifest was written here. Openings that fail leave some, too.
    pub(crate) fn wrote(&self, manifest: u64) {
        let mut known = self.known.lock();
        if manifest == known.manifest + 1 {
            known.manifest = manifest;
        }
    }

    /// Another server has it.
    pub(crate) fn lose(&self) {
        self.is_lost.store(true, SeqCst);
        self.looked.notify_waiters();
    }

    fn note(&self, began_ms: u64) {
        if !self.is_certain() {
            self.since.store(now_ms(), SeqCst);
        }
        self.seen.fetch_max(began_ms, SeqCst);
        self.looked.notify_waiters();
    }

    /// Whether it was this server's all the time since that tenure began, as far as looks tell that count still.
    pub(crate) fn is_certain_in(&self, tenure: u64) -> bool {
        self.is_certain() && self.tenure() == tenure
    }

    /// Whether the last look counts still.
    pub(crate) fn is_certain(&self) -> bool {
        let Some(counts_for) = self.counts_for else { return true };
        !self.is_lost.load(SeqCst) && now_ms().saturating_sub(self.seen.load(SeqCst)) <= counts_for
    }

    /// Whether that was so for all of that time.
    pub(crate) fn is_certain_for(&self, time: Duration) -> bool {
        let is_long = || now_ms().saturating_sub(self.since.load(SeqCst)) >= time.as_millis() as u64;
        self.is_certain() && (self.counts_for.is_none() || is_long())
    }

    /// Returns when it is certain that what was decided in a tenure up to now was decided by who had the volume. `false`: it is over.
    pub(crate) async fn certain_in(&self, tenure: u64) -> bool {
        loop {
            let looked = self.looked.notified();
            tokio::pin!(looked);
            looked.as_mut().enable();
            if self.is_lost.load(SeqCst) || self.tenure() != tenure {
                return false;
            }
            if self.is_certain() {
                return true;
            }
            looked.await;
        }
    }

    /// Looks whether another server has opened the database since: then `false`.
    ///
    /// # Errors
    /// The store does not tell.
    pub(crate) async fn look(&self) -> Result<bool, VolumeError> {
        if self.counts_for.is_none() {
            return Ok(true);
        }
        let (began, Known { manifest, epoch }) = (now_ms(), *self.known.lock());
        let admin = AdminBuilder::new(path(&self.volume_id), self.store.objects()).build();
        // Only the newest one is there for certain: others are collected, and by clocks that may be wrong. And a folder's listing leaves out
        // what cannot be looked at: so it is asked for the next one as well.
        let newest = ledger::newest_manifest_from(&self.store, &self.volume_id, manifest).await?;
        let newest = newest.max(manifest + 1);
        match admin.read_manifest(Some(newest)).await? {
            None if newest == manifest + 1 => {}
            Some(found) if found.writer_epoch() == epoch => {
                let mut known = self.known.lock();
                if known.epoch == epoch {
                    known.manifest = known.manifest.max(newest);
                }
            }
            _ => return Ok(false),
        }
        self.note(began);
        Ok(true)
    }
}
