//! How much memory a root gets, and whether the host has it.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result, Trying};
use crate::state::RootInfo;

const MIB: u64 = 1 << 20;
/// Least memory for a root: its processes and the kernel's records of its files need some.
const MEMORY_MIN: u64 = 16 * MIB;

/// Sizes of a root's file system in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Bytes of all files, /tmp among them unless it has a size of its own.
    pub files: u64,
    /// Bytes of /tmp when it has a size of its own.
    pub tmp: Option<u64>,
    /// How many files.
    pub inodes: u64,
}

impl Budget {
    /// Divides `memory` (resident) and `spill` (swapped) bytes between files and processes. Files get
    /// what is left after a quarter of the memory, at most 1 GiB, so that a full root gets ENOSPC while its
    /// processes still have room, and the out-of-memory killer nothing to do.
    pub(crate) fn new(memory: Option<u64>, spill: u64, tmp: Option<u64>, host_memory: u64) -> Result<Budget> {
        let all = match memory {
            Some(memory) if memory < MEMORY_MIN => {
                return Err(Error::Usage(format!(
                    "--memory is too small: a root takes at least {} MiB",
                    MEMORY_MIN / MIB
                )));
            }
            Some(memory) => memory - (memory / 4).clamp(8 * MIB, 1 << 30) + spill,
            None if spill > 0 => {
                return Err(Error::Usage(
                    "--spill needs --memory: what may stay resident before anything spills".to_owned(),
                ));
            }
            // As tmpfs(5) does by itself.
            None => host_memory / 2,
        };
        let files = match tmp {
            // To the kernel none is as much as there is.
            Some(0) => return Err(Error::Usage("--tmp takes a size above zero".to_owned())),
            Some(tmp) if tmp >= all => {
                return Err(Error::Usage(format!(
                    "--tmp must be less than the {} MiB that the whole root has",
                    all / MIB
                )));
            }
            Some(tmp) => all - tmp,
            None => all,
        };
        // A file takes about 1 KiB of the kernel's memory, which never goes to swap; half of the budget at most.
        let inodes = memory.unwrap_or(host_memory / 2) / 2048;
        Ok(Budget { files, tmp, inodes })
    }
}

/// A figure of /proc/meminfo in bytes.
pub(crate) fn meminfo(key: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").trying(|| "read /proc/meminfo".to_owned())?;
    figure(&text, key).ok_or_else(|| Error::Missing(format!("/proc/meminfo has no figure {key}")))
}

fn figure(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let number: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(number * 1024)
}

/// What a living root may still take of the host's memory: up to its limit; without a limit up to the size of its
/// files.
pub(crate) fn claim(root: &RootInfo) -> u64 {
    match root.memory {
        Some(memory) => memory.saturating_sub(crate::cgroup::usage(&root.cgroups).unwrap_or(0)),
        None => root.upper.parent().and_then(room_left).unwrap_or(0),
    }
}

fn room_left(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

/// Refuses when the host has less than `required` bytes, after what other roots may still claim.
pub(crate) fn require_free(required: u64, available: u64, claims: &[u64]) -> Result<()> {
    let claimed: u64 = claims.iter().sum();
    if available.saturating_sub(claimed) >= required {
        return Ok(());
    }
    let others = match claims.len() {
        0 => "no other root is there".to_owned(),
        1 => format!("one other root may still claim {} MiB of it", claimed / MIB),
        count => format!("{count} other roots may still claim {} MiB of it", claimed / MIB),
    };
    Err(Error::NoRoom(format!(
        "--require-free asks for {} MiB of free memory: {} MiB are available, and {others}; wait for others to end, or ask for less",
        required / MIB,
        available / MIB
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_leave_room_for_processes() {
        let budget = |memory, spill, tmp| Budget::new(memory, spill, tmp, 16 << 30);
        assert_eq!(budget(Some(256 * MIB), 0, None).unwrap().files, 192 * MIB);
        assert_eq!(budget(Some(16 << 30), 0, None).unwrap().files, 15 << 30);
        // Four times its memory fits, with a spill of that.
        assert!(budget(Some(256 * MIB), 1 << 30, None).unwrap().files > 1 << 30);
        assert_eq!(budget(None, 0, None).unwrap().files, 8 << 30);
        let with_tmp = budget(Some(256 * MIB), 0, Some(64 * MIB)).unwrap();
        assert_eq!((with_tmp.files, with_tmp.tmp), (128 * MIB, Some(64 * MIB)));
        for (memory, spill, tmp) in
            [(Some(MIB), 0, None), (None, MIB, None), (Some(64 * MIB), 0, Some(64 * MIB)), (None, 0, Some(0))]
        {
            assert!(matches!(budget(memory, spill, tmp), Err(Error::Usage(_))), "{memory:?} {spill} {tmp:?}");
        }
    }

    #[test]
    fn claims_of_others_count() {
        require_free(4, 10, &[3, 3]).unwrap();
        let error = require_free(5 * MIB, 10 * MIB, &[3 * MIB, 3 * MIB]).unwrap_err().to_string();
        assert!(error.contains("2 other roots may still claim 6 MiB"), "{error}");
        assert!(require_free(11 * MIB, 10 * MIB, &[]).is_err());
    }

    #[test]
    fn the_host_says_what_it_has() {
        assert!(meminfo("MemTotal").unwrap() >= meminfo("MemAvailable").unwrap());
        assert_eq!(figure("MemTotal:    12 kB\nMemFree: 3 kB\n", "MemFree"), Some(3072));
        assert_eq!(figure("MemTotal:    12 kB\n", "Mem"), None);
    }
}
