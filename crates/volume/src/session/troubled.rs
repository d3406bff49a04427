//! Mounts of which others have waited for one session after the other, until it was ended. Such a one waits for longer and longer before
//! another session may take the place of its last: a host whose network drops packets, or that swaps, would let others wait for a
//! lease again and again.
//!
//! Not in the tables: a server that starts anew knows of nobody's troubles.

use std::collections::HashMap;

use hayloft_model::SessionId;

use crate::error::VolumeError;
use crate::session::Session;
use crate::volume::Volume;

/// So many sessions of a mount end, one soon after the other, before it has to wait.
const FREE: u32 = 3;
/// What a session has to do with those before it when it has lasted for so long: nothing.
const CALM_MS: u64 = 600_000;
/// No mount has to wait for longer.
const PAUSE_MAX_MS: u64 = 300_000;
/// Most sessions of which this is remembered.
const KEPT_MAX: usize = 4096;

/// The end of a session that others had waited for.
#[derive(Clone, Copy, Debug)]
struct Trouble {
    /// The how manyth it was of its mount's, one soon after the other.
    times: u32,
    /// When, milliseconds after the server's start.
    at_ms: u64,
}

/// Such sessions, for as long as their mounts may come back.
#[derive(Debug, Default)]
pub(crate) struct Troubles(HashMap<SessionId, Trouble>);

impl Troubles {
    /// Others have waited for this session, and it is about to be ended.
    pub(super) fn note(&mut self, id: SessionId, session: &Session, now_ms: u64) {
        if self.0.len() >= KEPT_MAX {
            self.0.retain(|_, trouble| now_ms.saturating_sub(trouble.at_ms) < PAUSE_MAX_MS);
        }
        if self.0.len() < KEPT_MAX {
            let is_calm = now_ms.saturating_sub(session.begun_ms) > CALM_MS;
            let before = if is_calm { 0 } else { session.troubles };
            self.0.insert(id, Trouble { times: before + 1, at_ms: now_ms });
        }
    }

    /// How often others have waited for a mount, one soon after the other, whose last session this was; or for how long it has to
    /// wait still, milliseconds.
    fn of(&self, last: SessionId, lease_ms: u64, now_ms: u64) -> Result<u32, (u32, u64)> {
        let Some(Trouble { times, at_ms }) = self.0.get(&last).copied() else { return Ok(0) };
        match (at_ms + pause_ms(times, lease_ms)).saturating_sub(now_ms) {
            0 => Ok(times),
            left => Err((times, left)),
        }
    }
}

/// How long a mount waits that others have waited for so often: as long as they had to, and each time twice as long.
fn pause_ms(times: u32, lease_ms: u64) -> u64 {
    match times.checked_sub(FREE + 1) {
        Some(doublings) => (lease_ms << doublings.min(20)).min(PAUSE_MAX_MS),
        None => 0,
    }
}

impl Volume {
    /// How often others have waited for the mount of an ended session.
    ///
    /// # Errors
    /// It has to wait itself before it goes on with another one.
    pub(super) fn troubles(&self, last: SessionId) -> Result<u32, VolumeError> {
        let lease_ms = self.shared.config.lease.as_millis() as u64;
        let troubles = self.state.lock().troubles.of(last, lease_ms, self.shared.uptime_ms());
        troubles
            .map_err(|(times, left_ms)| VolumeError::Troubled { times, left_secs: left_ms.div_ceil(1000) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::tables::SessionRow;

    const LEASE_MS: u64 = 10_000;

    /// A session of a mount that is ended so long after it has begun; what is known of its end then.
    fn ends(troubles: &mut Troubles, id: u64, times: u32, (begun_ms, now_ms): (u64, u64)) {
        let mut session = Session::found(&SessionRow::default(), begun_ms);
        session.troubles = times;
        troubles.note(SessionId(id), &session, now_ms);
    }

    #[test]
    fn a_mount_that_others_wait_for_again_and_again_waits_itself() {
        let (mut troubles, mut times, mut now_ms) = (Troubles::default(), 0, 0);
        let mut waits = Vec::new();
        for id in 0..12 {
            ends(&mut troubles, id, times, (now_ms, now_ms + LEASE_MS));
            now_ms += LEASE_MS;
            let wait = match troubles.of(SessionId(id), LEASE_MS, now_ms) {
                Ok(_) => 0,
                Err((_, left)) => left,
            };
            waits.push(wait / 1000);
            now_ms += wait;
            times = troubles.of(SessionId(id), LEASE_MS, now_ms).expect("it has waited");
        }
        assert_eq!(waits, [0, 0, 0, 10, 20, 40, 80, 160, 300, 300, 300, 300]);
    }

    #[test]
    fn a_session_that_has_lasted_is_the_first_again() {
        let mut troubles = Troubles::default();
        ends(&mut troubles, 1, 7, (0, CALM_MS + 1));
        assert_eq!(troubles.of(SessionId(1), LEASE_MS, CALM_MS + 1), Ok(1));
        assert_eq!(troubles.of(SessionId(2), LEASE_MS, CALM_MS + 1), Ok(0), "nobody has waited for that one");
    }
}
