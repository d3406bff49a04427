//! The time of changes: the server's clock, never going backwards.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use hayloft_model::Timestamp;

/// Nanoseconds since the epoch by this host's clock.
pub(crate) fn host_nanos() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

/// One clock for all hosts: this host's, moved by its distance from the server's.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    offset_nanos: AtomicI64,
    last_nanos: AtomicI64,
}

impl Clock {
    /// The server's clock said `server_nanos` while this host's went from `sent_nanos` to now.
    pub(crate) fn set(&self, server_nanos: i64, sent_nanos: i64) {
        let middle = sent_nanos + (host_nanos() - sent_nanos) / 2;
        self.offset_nanos.store(server_nanos - middle, Ordering::Relaxed);
    }

    /// The present time; never earlier than what was told before.
    pub(crate) fn now(&self) -> Timestamp {
        let nanos = host_nanos() + self.offset_nanos.load(Ordering::Relaxed);
        let last = self.last_nanos.fetch_max(nanos, Ordering::Relaxed);
        Timestamp::from_nanos(i128::from(nanos.max(last)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_does_not_go_back_when_the_servers_clock_does() {
        let clock = Clock::default();
        let before = clock.now();
        let now = host_nanos();
        clock.set(now - 3_600_000_000_000, now);
        assert!(clock.now() >= before);
    }
}
