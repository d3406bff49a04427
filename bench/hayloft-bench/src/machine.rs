//! What a measurement was taken on.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::Serialize;

/// Recorded with every result. Holds no name or address of the machine.
#[derive(Serialize)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) memory_mib: u64,
    /// Load average of the last minute when the run began: over the number of cores, do not trust the figures.
    pub(crate) load: f64,
    /// UTC.
    pub(crate) date: String,
}

impl Machine {
    pub(crate) fn describe() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let meminfo = read("/proc/meminfo");
        Machine {
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            processor: field(&cpuinfo, "model name").unwrap_or("unknown").into(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: field(&meminfo, "MemTotal")
                .and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok())
                .unwrap_or(0)
                / 1024,
            load: read("/proc/loadavg").split(' ').next().and_then(|v| v.parse().ok()).unwrap_or(0.0),
            date: utc(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())),
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The value in a line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(n, _)| n.trim() == name)
        .map(|(_, v)| v.trim())
}

/// Seconds since 1970 as `YYYY-MM-DDTHH:MM:SSZ` (civil_from_days of Howard Hinnant's date algorithms).
fn utc(seconds: u64) -> String {
    let days = (seconds / 86_400) as i64 + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// The type of the file system that `dir` (an absolute path without links) is on.
pub(crate) fn file_system_of(dir: &Path) -> Result<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    Ok(file_system_in(&table, dir).unwrap_or_else(|| "unknown".into()))
}

/// See proc_pid_mountinfo(5): the mount point is the fifth field, the type the first after the lone `-`.
fn file_system_in(table: &str, dir: &Path) -> Option<String> {
    let mounts = table.lines().filter_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        // Spaces and such are written as octal escapes; only the space is at all usual.
        let point = mount.split(' ').nth(4)?.replace("\\040", " ");
        Some((point, source.split(' ').next()?))
    });
    // The deepest mount point above `dir`; of several on one point, the last covers the others.
    mounts
        .filter(|(point, _)| dir.starts_with(point))
        .max_by_key(|(point, _)| Path::new(point).components().count())
        .map(|(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_767_225_599), "2025-12-31T23:59:59Z");
    }

    #[test]
    fn the_deepest_and_latest_mount_counts() {
        let table = "\
21 1 254:0 / / rw,relatime - ext4 /dev/root rw
22 21 0:20 / /mnt/a\\040b rw shared:1 - tmpfs tmpfs rw
23 22 0:21 / /mnt/a\\040b rw - fuse.bindfs /dev/shm rw
";
        assert_eq!(file_system_in(table, Path::new("/mnt/a b/c")).unwrap(), "fuse.bindfs");
        assert_eq!(file_system_in(table, Path::new("/mnt/ab")).unwrap(), "ext4");
    }
}
