//! Latencies, counted in buckets.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Buckets per doubling: a quantile is at most an eighth too large.
const STEPS: u64 = 8;
const BUCKETS: usize = 8 * 34;

/// Counts of durations in buckets that grow by an eighth of a power of two: quantiles without keeping
/// the values. Shared by threads, never locked.
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    max_us: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: [const { AtomicU64::new(0) }; BUCKETS], max_us: AtomicU64::new(0) }
    }
}

fn bucket_of(us: u64) -> usize {
    if us < STEPS {
        return us as usize;
    }
    let octave = us.ilog2() as u64 - 2;
    let step = (us >> (octave - 1)) & (STEPS - 1);
    ((octave * STEPS + step) as usize).min(BUCKETS - 1)
}

/// The largest value that falls into a bucket.
fn top_of(bucket: usize) -> u64 {
    let (octave, step) = (bucket as u64 / STEPS, bucket as u64 % STEPS);
    if octave == 0 { step } else { ((STEPS + step + 1) << (octave - 1)) - 1 }
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&self, duration: Duration) {
        let us = duration.as_micros().min(u128::from(u64::MAX)) as u64;
        self.buckets[bucket_of(us)].fetch_add(1, Relaxed);
        self.max_us.fetch_max(us, Relaxed);
    }

    /// The durations, in microseconds, that these shares (0 to 1) of all stay at or below, and the
    /// longest one.
    pub fn quantiles<const N: usize>(&self, shares: [f64; N]) -> ([u64; N], u64) {
        let counts: Vec<u64> = self.buckets.iter().map(|count| count.load(Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let max = self.max_us.load(Relaxed);
        let at = |share: f64| {
            let wanted = (total as f64 * share).ceil() as u64;
            let mut seen = 0;
            for (bucket, count) in counts.iter().enumerate() {
                seen += count;
                if seen >= wanted.max(1) {
                    return top_of(bucket).min(max);
                }
            }
            max
        };
        (shares.map(at), max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_gapless_and_quantiles_close() {
        for us in 0..100_000u64 {
            let bucket = bucket_of(us);
            assert!(us <= top_of(bucket), "{us}");
            assert!(bucket == 0 || us > top_of(bucket - 1), "{us}");
        }
        let histogram = Histogram::default();
        (1..=1000).for_each(|us| histogram.record(Duration::from_micros(us)));
        let ([p50, p99], max) = histogram.quantiles([0.5, 0.99]);
        assert!((500..=563).contains(&p50) && (990..=1000).contains(&p99) && max == 1000);
    }
}
