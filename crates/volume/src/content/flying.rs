//! Packs that are put, and that no durable row names yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::database::tables::PackId;
use crate::volume::Volume;

/// A pack on its way; while this lives, no sweep takes the object for an orphan.
pub(crate) struct Flying {
    pub(crate) pack: PackId,
    size: u64,
    volume: Arc<Volume>,
    /// A row names it, or may do so.
    named: AtomicBool,
}

impl Flying {
    /// To be called before the rows that name the pack are written.
    pub(crate) fn will_be_named(&self) {
        self.named.store(true, Relaxed);
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        self.volume.flying.lock().remove(&self.pack);
        // What no row has ever named is deleted, if that can be done; otherwise a sweep finds it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if *self.named.get_mut() {
            return;
        }
        let (volume, pack, size) = (Arc::clone(&self.volume), self.pack, self.size);
        runtime.spawn(async move {
            if let Err(error) = volume.shared.store.delete(&volume.homes.path(pack)).await {
                tracing::debug!(volume = volume.name, %error, "a pack without use is left to the sweep");
                volume.state.lock().dead_bytes += size as i64;
            }
        });
    }
}

impl Volume {
    /// A number for a new pack of that size, protected from sweeps.
    pub(crate) fn new_pack(self: &Arc<Self>, size: u64) -> Flying {
        let pack = PackId(crate::database::registry::random());
        self.flying.lock().insert(pack);
        Flying { pack, size, volume: Arc::clone(self), named: AtomicBool::new(false) }
    }

    /// Whether a pack is put but not yet named by a row.
    pub(crate) fn is_flying(&self, pack: PackId) -> bool {
        self.flying.lock().contains(&pack)
    }
}
