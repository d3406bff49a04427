//! The clock of leases: it goes on while the host sleeps (CLOCK_BOOTTIME).
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

/// A moment since the host was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    pub(crate) fn now() -> Moment {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the structure lives until the call returns, which cannot fail for this clock.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
        Moment(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    /// So many ticks of the clock after the host was started, as the kernel counts them in /proc.
    pub(crate) fn of_ticks(ticks: u64) -> Moment {
        // SAFETY: asks for a constant.
        let a_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
        Moment(ticks.saturating_mul(1_000_000_000 / a_second))
    }

    /// Nanoseconds since the host was started.
    pub(crate) fn nanos(self) -> u64 {
        self.0
    }

    pub(crate) fn elapsed(self) -> Duration {
        Duration::from_nanos(Moment::now().0.saturating_sub(self.0))
    }

    /// The same moment for a clock that stands while the host sleeps, if it did not since.
    pub(crate) fn instant(self) -> Instant {
        let now = Instant::now();
        now.checked_sub(self.elapsed()).unwrap_or(now)
    }

    /// So much later.
    pub(crate) fn after(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}
