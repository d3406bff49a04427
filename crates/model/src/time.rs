//! Points in time.

/// A point in time as POSIX keeps it: seconds since 1970-01-01 UTC (negative before) and nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp {
    /// Whole seconds since the epoch.
    pub secs: i64,
    /// Nanoseconds after `secs`, 0 to 999,999,999.
    pub nanos: u32,
}

impl Timestamp {
    /// From nanoseconds since the epoch.
    pub fn from_nanos(nanos: i128) -> Timestamp {
        let secs = nanos.div_euclid(1_000_000_000);
        Timestamp { secs: secs as i64, nanos: nanos.rem_euclid(1_000_000_000) as u32 }
    }

    /// The next point in time after this one.
    pub fn next(self) -> Timestamp {
        Timestamp::from_nanos(self.as_nanos() + 1)
    }

    /// Nanoseconds since the epoch.
    pub fn as_nanos(self) -> i128 {
        i128::from(self.secs) * 1_000_000_000 + i128::from(self.nanos)
    }
}
