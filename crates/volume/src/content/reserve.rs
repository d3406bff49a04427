//! Room that is kept free on the store's disk, so that databases never meet a full disk because of us,
//! and space can always be freed.

use hayloft_store::{Space, Store};

use crate::database::TABLE_FILE;
use crate::error::VolumeError;

const MIB: u64 = 1 << 20;

/// What must be free for any batch that grows the volume, besides its rows.
pub(crate) const COMMIT_ROOM: u64 = TABLE_FILE as u64 / 8;

/// Less room than this, and dead content is worth a sweep at once; of a small disk, a sixteenth.
const LOW: u64 = 4 * TABLE_FILE as u64;

/// The part of the disk that new data may not take.
#[derive(Clone, Debug)]
pub(crate) struct Reserve {
    store: Store,
    configured: Option<u64>,
}

/// The reserve of a disk of `total` bytes: one percent, between 32 MiB and 1 GiB; of a small disk at
/// most an eighth.
fn default_reserve(total: u64) -> u64 {
    (total / 100).clamp(32 * MIB, 1024 * MIB).min(total / 8)
}

fn usable_of(free: u64) -> u64 {
    free.saturating_sub(COMMIT_ROOM + free / 64)
}

impl Reserve {
    pub(crate) fn new(store: Store, configured: Option<u64>) -> Reserve {
        Reserve { store, configured }
    }

    fn of(&self, space: Space) -> u64 {
        self.configured.unwrap_or_else(|| default_reserve(space.total))
    }

    /// Free bytes beyond the reserve, and the size of the store; `None` when it cannot tell.
    pub(crate) fn available(&self) -> Option<Space> {
        let space = self.store.space()?;
        Some(Space { free: space.free.saturating_sub(self.of(space)), ..space })
    }

    /// What content of a batch may fill: less than what is free, since rows, the indexes of packs and the
    /// database's log need room, too.
    pub(crate) fn usable(&self) -> Option<Space> {
        let space = self.available()?;
        Some(Space { free: usable_of(space.free), ..space })
    }

    /// Whether the store runs full.
    pub(crate) fn is_low(&self) -> bool {
        self.available().is_some_and(|space| space.free < LOW.min(space.total / 16))
    }

    /// Whether `bytes` more may be written for a batch that gives room back in the end: half of the
    /// reserve is there for that.
    pub(crate) fn admit_to_free(&self, bytes: u64) -> Result<(), VolumeError> {
        match self.store.space() {
            Some(space) if space.free.saturating_sub(self.of(space) / 2) < bytes => {
                Err(VolumeError::StoreFull)
            }
            _ => Ok(()),
        }
    }

    /// Whether `bytes` more may be written.
    pub(crate) fn admit(&self, bytes: u64) -> Result<(), VolumeError> {
        match self.available() {
            Some(space) if space.free < bytes => Err(VolumeError::StoreFull),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_fits_the_disk() {
        assert_eq!(default_reserve(64 * MIB), 8 * MIB);
        assert_eq!(default_reserve(1024 * MIB), 32 * MIB);
        assert_eq!(default_reserve(50 << 30), 512 * MIB);
        assert_eq!(default_reserve(50 << 40), 1024 * MIB);
    }
}
