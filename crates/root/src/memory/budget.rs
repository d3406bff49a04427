//! How much memory a root gets, and whether the host has it.

use std::fs;
use std::os::unix::fs::MetadataExt;
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
    /// How many files; without those of /tmp when that has a size of its own.
    pub inodes: u64,
    /// How many files /tmp holds then.
    pub tmp_inodes: u64,
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
        // A file takes about 1 KiB of the kernel's memory, which never goes to swap: half of what is left to processes.
        let inodes = memory.map_or(host_memory / 4096, |memory| memory / 8192);
        let tmp_inodes = tmp.map_or(0, |tmp| {
            let share = (u128::from(inodes) * u128::from(tmp) / u128::from(all)) as u64;
            // Small files are many, on either side.
            share.clamp(inodes / 4, inodes - inodes / 4)
        });
        Ok(Budget { files, tmp, inodes: inodes - tmp_inodes, tmp_inodes })
    }

    /// Bytes of all files together.
    pub(crate) fn files_max(&self) -> u64 {
        self.files + self.tmp.unwrap_or(0)
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
/// files. What its group has of other file systems' pages is available to all, and the kernel says so.
pub(crate) fn claim(root: &RootInfo) -> u64 {
    match root.memory {
        Some(memory) => {
            let usage = crate::memory::cgroup::usage(&root.cgroups).unwrap_or(0);
            memory.saturating_sub(usage.saturating_sub(crate::memory::cgroup::file_pages(&root.cgroups)))
        }
        // Not built yet.
        None if root.upper.as_os_str().is_empty() => root.files_bytes_max,
        None => root.upper.parent().map_or(0, room_left),
    }
}

/// How much the files of a stage may still grow.
fn room_left(stage: &Path) -> u64 {
    let room =
        |path: &Path| rustix::fs::statvfs(path).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).ok();
    let tmp = stage.join("tmp");
    let of_tmp = if device(&tmp) == device(stage) { 0 } else { room(&tmp) };
    room(stage) + of_tmp
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
    fn files_of_tmp_are_among_those_of_the_whole() {
        let budget = |memory, spill, tmp| Budget::new(Some(memory), spill, tmp, 16 << 30).unwrap();
        let whole = budget(64 * MIB, 0, None);
        assert_eq!((whole.inodes, whole.tmp_inodes), (8 << 10, 0));
        for (spill, tmp) in [(0, 16 * MIB), (0, 47 * MIB), (1 << 40, MIB), (1 << 40, 1 << 40)] {
            let split = budget(64 * MIB, spill, Some(tmp));
            assert_eq!(split.inodes + split.tmp_inodes, whole.inodes);
            assert!(split.inodes.min(split.tmp_inodes) >= whole.inodes / 4, "{split:?}");
        }
    }

    fn root(memory: Option<u64>, group: &Path) -> RootInfo {
        let info = serde_json::json!({
            "name": "r", "created": 0, "command": [], "layers": [], "lower": [], "upper": "", "merged": "", "userxattr": false,
            "state": "running", "pid": 0, "exit_code": null, "memory": memory, "cgroups": [group], "spill": null,
            "files_bytes_max": 5 * MIB,
        });
        serde_json::from_value(info).unwrap()
    }

    #[test]
    fn pages_of_files_are_still_to_be_claimed() {
        let dir = tempfile::tempdir().unwrap();
        let root = root(Some(100 * MIB), dir.path());
        assert_eq!(claim(&root), 100 * MIB);
        for name in ["memory.current", "memory.usage_in_bytes"] {
            fs::write(dir.path().join(name), format!("{}\n", 80 * MIB)).unwrap();
            let stat =
                format!("cache 1\nfile 1\nshmem 2\ninactive_file {}\nactive_file {}\n", 20 * MIB, 30 * MIB);
            fs::write(dir.path().join("memory.stat"), stat).unwrap();
            assert_eq!(claim(&root), 70 * MIB, "{name}");
            fs::remove_file(dir.path().join(name)).unwrap();
        }
    }

    #[test]
    fn a_root_that_is_being_made_claims_what_its_files_may_take() {
        let dir = tempfile::tempdir().unwrap();
        let mut root = root(None, dir.path());
        assert_eq!(claim(&root), 5 * MIB);
        root.upper = dir.path().join("upper");
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let stat = rustix::fs::statvfs(dir.path()).unwrap();
        // What has no file system of its own does not count twice; somebody else may write meanwhile.
        assert!(claim(&root) < stat.f_bavail * stat.f_frsize / 2 * 3);
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
