//! A quota that gets too small: who has accepted changes for which there is no room keeps them, until somebody else waits
//! for that (`docs/adr/0012-no-room.md`).

use hayloft_model::{Usage, UsageDelta};

use crate::Rule;
use crate::rng::Rng;
use crate::world::{LEASE, PATIENCE, What, World, trace};

/// Where the choice of worlds begins in which there is one.
const QUOTAS: u64 = 0x0009_007a;

/// When there may be no room, and how things are now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quota {
    /// Zeros: no limit.
    pub(crate) most: Usage,
    /// Since when it has been so, and until when.
    since: Option<u64>,
    until: Option<u64>,
}

impl World {
    /// In one world of sixteen there is a quota for a while, or from some time on.
    pub(crate) fn plan_quota(&mut self) {
        let mut other = Rng::new(self.config.seed ^ QUOTAS);
        if other.permille(62) {
            let when = other.between(50, 4 * LEASE);
            let (bytes, room) = (other.permille(500), other.below(6));
            self.after(when, What::Quota { bytes, room });
            if other.permille(500) {
                let when = when + other.between(LEASE / 2, 8 * LEASE);
                self.after(when, What::NoQuota);
            }
        }
    }

    /// So much more fits than is there.
    pub(crate) fn set_quota(&mut self, bytes: bool, room: u64) {
        let (usage, quota) = (self.server.stored.usage, &mut self.server.quota);
        match bytes {
            true => quota.most.bytes = (usage.bytes + room).max(1),
            false => quota.most.inodes = (usage.inodes + room).max(1),
        }
        quota.since = Some(self.now);
        trace!(self, "the quota is {:?}", self.server.quota.most);
    }

    pub(crate) fn end_quota(&mut self) {
        trace!(self, "the quota ends");
        (self.server.quota.most, self.server.quota.until) = (Usage::default(), Some(self.now));
    }

    /// Whether there is no room for a batch.
    pub(crate) fn is_refused(&self, delta: UsageDelta, pressing: bool) -> bool {
        let (usage, most) = (self.server.stored.usage.after(delta), self.server.quota.most);
        let over = |used: u64, most: u64, change: i64| most != 0 && change > 0 && used > most;
        (!pressing || self.is_broken(Rule::RefusePressing))
            && (over(usage.bytes, most.bytes, delta.bytes) || over(usage.inodes, most.inodes, delta.inodes))
    }

    /// Whether somebody may have been told since `call` that there is no room. Who was refused hears of it with its next
    /// batch that there is some again.
    pub(crate) fn could_be_full(&self, call: u64) -> bool {
        let quota = &self.server.quota;
        quota.since.is_some() && quota.until.is_none_or(|until| call < until + PATIENCE)
    }

    /// Whether somebody else waits for what a client has not shipped, or everything ends.
    pub(crate) fn is_pressed(&self, at: usize) -> bool {
        let client = &self.clients[at];
        self.draining || client.leaving || client.gives_back() || client.requests()
    }
}
