//! How much the volume's files take, and how much they may.

use super::Tree;
use crate::{TreeError, Usage, UsageDelta};

impl Tree {
    /// The volume's files take more (or less) from now on.
    pub(super) fn count(&mut self, bytes: i64, inodes: i64) {
        self.usage = self.usage.after(UsageDelta { bytes, inodes });
        self.changes.usage.bytes += bytes;
        self.changes.usage.inodes += inodes;
    }

    /// What the volume's files take now.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// What the volume's files take by the server's account, all cuts included: others change it too.
    pub fn set_usage(&mut self, usage: Usage) {
        self.usage = usage.after(self.changes.usage);
    }

    /// How much they may take; 0 for no limit.
    pub fn quota(&self) -> Usage {
        self.quota
    }

    /// The quota was changed at the server.
    pub fn set_quota(&mut self, quota: Usage) {
        self.quota = quota;
    }

    /// Whether `bytes` more fit the quota.
    ///
    /// # Errors
    /// [`TreeError::NoSpace`] when they do not.
    pub fn check_room(&self, bytes: u64) -> Result<(), TreeError> {
        let over =
            |used: u64, more: u64, quota: u64| quota != 0 && more != 0 && used.saturating_add(more) > quota;
        if over(self.usage.bytes, bytes, self.quota.bytes) { Err(TreeError::NoSpace) } else { Ok(()) }
    }

    pub(super) fn check_inode_room(&self) -> Result<(), TreeError> {
        let full = self.quota.inodes != 0 && self.usage.inodes >= self.quota.inodes;
        if full { Err(TreeError::NoSpace) } else { Ok(()) }
    }
}
