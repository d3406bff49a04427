//! Damage at rest: in one world of sixteen the last file of the log may be lost while no server has the volume. What is noted beside
//! the log says where it has to end (`docs/adr/0023`): the volume is not opened before the file is put back from a copy.

use super::*;
use crate::rng::Rng;

/// The store's disk, and what is noted of the log.
pub(crate) struct AtRest {
    /// Of its own: the rest of a world is as it is without damage.
    rng: Rng,
    can_rot: bool,
    /// The last mark of which it is noted that it is durable.
    noted: u64,
    /// The store without the last file of its log.
    without_last: Option<Stored>,
}

impl AtRest {
    pub(crate) fn new(seed: u64) -> AtRest {
        let mut rng = Rng::new(seed.rotate_left(32) ^ 0x726f_7400);
        let can_rot = rng.below(16) == 0;
        AtRest { rng, can_rot, noted: 0, without_last: None }
    }
}

impl World {
    /// A file is about to be added to the log.
    pub(super) fn log_grows(&mut self) {
        if self.at_rest.can_rot {
            self.at_rest.without_last = Some(self.server.durable.clone());
        }
    }

    /// It is noted up to where the log goes.
    pub(super) fn note_log_end(&mut self, mark: u64) {
        self.at_rest.noted = mark;
    }

    /// A server has opened the store: its notes begin with what is there.
    pub(crate) fn begin_notes(&mut self, mark: u64) {
        self.at_rest.noted = mark;
        self.at_rest.without_last = None;
    }

    /// What a server finds that starts, and may open.
    pub(super) fn found_at_rest(&mut self, whole: Stored) -> Stored {
        let is_lost = self.at_rest.can_rot && self.at_rest.rng.permille(500);
        let rotten = self.at_rest.without_last.take().filter(|_| is_lost);
        let Some(rotten) = rotten.filter(|rotten| rotten.history.mark < whole.history.mark) else {
            self.compare_with_notes(whole.history.mark);
            return whole;
        };
        let is_told = rotten.history.mark < self.at_rest.noted;
        trace!(self, "the end of the log is lost, which is told: {is_told}");
        // What nobody has noted nobody has heard of either; the file is put back all the same, since the reference knows of it.
        match is_told && self.is_broken(Rule::NoNotes) {
            true => rotten,
            false => whole,
        }
    }

    /// Of a log that is as it was left nobody says that it is not.
    pub(super) fn compare_with_notes(&mut self, found: u64) {
        let noted = self.at_rest.noted;
        if found < noted {
            self.fail(format!("the log ends at {found}, and {noted} is noted: nothing of it was lost"));
        }
    }
}
