//! A store that times out and does things twice, in worlds whose seeds are from [`FROM`] on. A write of the log that times out takes longer than
//! a lease, and then nobody knows whether it was done, or how far; what was not done then arrives later, when the database is open again.
//! The store refuses it, since the file's number is taken. A write that is done twice is refused as well the second time: the
//! server takes that for another server's, and opens the volume anew.

use super::*;
use crate::rng::Rng;
use crate::world::LEASE;

/// The first seed of a world with such a store.
pub(crate) const FROM: u64 = 1 << 32;

/// From this seed on, worlds have hosts that know of directories with many slots, beside such that do not.
pub(crate) const MANY_FROM: u64 = 1 << 33;

/// How a flush ends.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Ending {
    TimedOut,
    Doubled,
}

pub(crate) struct LateStore {
    /// Of its own, as that of damage at rest.
    rng: Rng,
    /// How the flush under way will end, if not well.
    ending: Option<Ending>,
}

impl LateStore {
    /// That of a world, if it has one.
    pub(crate) fn new(seed: u64) -> Option<LateStore> {
        (FROM..MANY_FROM)
            .contains(&seed)
            .then(|| LateStore { rng: Rng::new(seed ^ 0x6c61_7465), ending: None })
    }
}

impl World {
    /// A flush begins: how long it takes, if that is decided here.
    pub(super) fn late_flush(&mut self) -> Option<u64> {
        let is_over = self.draining;
        let late = self.late_store.as_mut()?;
        late.ending = match late.rng.below(100) {
            _ if is_over => None,
            0..3 => Some(Ending::TimedOut),
            3..6 => Some(Ending::Doubled),
            _ => None,
        };
        let takes = (late.ending == Some(Ending::TimedOut)).then(|| late.rng.between(LEASE / 2, 2 * LEASE));
        if late.ending.is_some() {
            self.has_fault();
        }
        takes
    }

    /// How the flush under way ends, if not well.
    pub(super) fn late_ending(&mut self) -> Option<Ending> {
        self.late_store.as_mut()?.ending.take()
    }

    /// A part of it, or all, or nothing is done; the rest arrives when the database is open again.
    pub(super) fn time_out(&mut self, upto: u64) {
        trace!(self, "the store times out");
        self.has_fault();
        let puts = self.server.order.log_upto(upto);
        self.server.order.set_flushing(upto);
        self.reopen();
        let after = self.late_store.as_mut().map_or(1, |late| late.rng.between(1, LEASE));
        self.after(after, What::LateWrite(puts));
    }

    /// What timed out arrives.
    pub(crate) fn late_write(&mut self, puts: &[(u64, Vec<Put>)]) {
        trace!(self, "what timed out arrives: {:?}", puts.iter().map(|(mark, _)| mark).collect::<Vec<_>>());
        if self.is_broken(Rule::OverwriteLog) {
            puts.iter().flat_map(|(_, puts)| puts).for_each(|put| self.server.durable.put(put));
        }
    }

    /// All of it is done, and the server believes that another one has the volume.
    pub(super) fn done_twice(&mut self, upto: u64) {
        trace!(self, "the store writes twice");
        self.has_fault();
        if self.replaced.is_some() {
            return self.durable_to(upto);
        }
        self.make_durable(upto);
        let life = self.server.life;
        let store = self.store_as_found();
        let mut replaced = self.next_server(life + 1, store);
        replaced.order.fenced = true;
        self.replaced = Some(Box::new(replaced));
        self.end_replaced();
    }
}
