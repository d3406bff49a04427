//! The time of changes: the server's, by a clock of this host that nobody can set.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hayloft_model::Timestamp;
use hayloft_model::clock::{DistantClock, GrowingTime};
use parking_lot::Mutex;

/// One clock for all hosts. It follows the server's with every answer to a keep-alive, however this host's own is set; where that one
/// may say the same as the server's, it is that one.
#[derive(Debug)]
pub(crate) struct Clock {
    begun: Instant,
    /// A leaf: nothing is taken under it.
    state: Mutex<(DistantClock, GrowingTime)>,
}

impl Default for Clock {
    fn default() -> Clock {
        let system = system_nanos();
        let state = Mutex::new((DistantClock::new(0, system), GrowingTime::default()));
        Clock { begun: Instant::now(), state }
    }
}

/// What this host's own clock says.
fn system_nanos() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanos)
}

impl Clock {
    /// The server's clock said `server_nanos` at some moment between `sent` and now.
    pub(crate) fn hear(&self, server_nanos: i64, sent: Instant) {
        let sent = nanos(sent.saturating_duration_since(self.begun));
        // The own clock first: what comes between the two looks makes the time late, and never ahead of it.
        let own = system_nanos();
        let received = nanos(self.begun.elapsed());
        self.state.lock().0.hear(server_nanos, sent, received, own - received);
    }

    /// The present time; later than what was told before, unless the server's clock has been set far back.
    pub(crate) fn now(&self) -> Timestamp {
        let (clock, told) = &mut *self.state.lock();
        let now = clock.now(nanos(self.begun.elapsed()));
        Timestamp::from_nanos(i128::from(told.next(now)))
    }
}

fn nanos(duration: Duration) -> i64 {
    duration.as_nanos() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn times_grow_and_are_the_servers() {
        let clock = Clock::default();
        let real = clock.now().as_nanos() as i64;
        let mut last = clock.now();
        // A little back: it waits, and no time is told twice.
        clock.hear(real - SECOND, Instant::now());
        for _ in 0..1000 {
            let now = clock.now();
            assert!(now > last, "{now:?} after {last:?}");
            last = now;
        }
        // Far back, as when it was wrong before.
        clock.hear(real - 3600 * SECOND, Instant::now());
        assert!(clock.now().as_nanos() < i128::from(real - 3500 * SECOND));
        clock.hear(real, Instant::now());
        assert!(clock.now().as_nanos() >= i128::from(real));
    }
}
