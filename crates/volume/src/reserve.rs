//! Room that is kept free on the store's disk, so that databases never meet a full disk because of us,
//! and space can always be freed.

use hayloft_store::{Space, Store};

use crate::error::VolumeError;

const MIB: u64 = 1 << 20;

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

impl Reserve {
    pub(crate) fn new(store: Store, configured: Option<u64>) -> Reserve {
        Reserve { store, configured }
    }

    /// Free bytes beyond the reserve, and the size of the store; `None` when it cannot tell.
    pub(crate) fn available(&self) -> Option<Space> {
        let Space { total, free } = self.store.space()?;
        let reserve = self.configured.unwrap_or_else(|| default_reserve(total));
        Some(Space { total, free: free.saturating_sub(reserve) })
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
