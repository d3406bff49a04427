//! The options of a mount (`-o`).

use std::time::Duration;

use crate::host;

/// How requests travel between kernel and client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TransportOption {
    /// io_uring where the kernel allows it, else /dev/fuse.
    #[default]
    Auto,
    /// /dev/fuse.
    Dev,
    /// io_uring or an error.
    Uring,
}

/// Whom locks of flock(2) and fcntl(2) exclude.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LocksOption {
    /// Everybody, on every host.
    #[default]
    Shared,
    /// Programs of this host: the kernel keeps them, which costs nothing.
    Local,
}

/// What `-o` sets.
#[derive(Clone, Debug, PartialEq)]
pub struct MountOptions {
    /// `commit=SECONDS`: changes older than this are shipped; the most that a crash of this host loses.
    pub commit: Duration,
    /// `dirty=SIZE`: most bytes of unshipped data in memory; writers wait beyond it. Half of it is shipped before
    /// its time. By default a tenth of the host's memory, from 256 MiB to 8 GiB.
    pub dirty: u64,
    /// `cache=SIZE`: most bytes of shipped or fetched data kept in memory, beside the kernel's own cache. By default as
    /// much as `dirty`: what was just written is read next, and the kernel has not kept the last page of each file.
    pub cache: u64,
    /// `inodes=N`: most inodes kept in memory, about.
    pub inodes: usize,
    /// `ro`: nothing can be changed.
    pub read_only: bool,
    /// `noallow_other`: only the user who mounts has access. The default when root mounts is everybody, and else this:
    /// what others are let in for stands in /etc/fuse.conf.
    pub allow_other: bool,
    /// `nosuid`, `nodev`, `noexec`: as in mount(8). Only root can do without the first two.
    pub suid: bool,
    /// See `suid`.
    pub dev: bool,
    /// See `suid`.
    pub exec: bool,
    /// `syncfs`: syncfs(2) and sync(1) wait for the store. Without effect on a mount that is read-only.
    pub syncfs: bool,
    /// `transport=auto|dev|uring`.
    pub transport: TransportOption,
    /// `locks=shared|local`.
    pub locks: LocksOption,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        let root = host::is_root();
        MountOptions {
            commit: Duration::from_secs(5),
            dirty: tenth_of_memory(),
            cache: tenth_of_memory(),
            inodes: 2_000_000,
            read_only: false,
            allow_other: root,
            suid: root,
            dev: root,
            exec: true,
            syncfs: false,
            transport: TransportOption::Auto,
            locks: LocksOption::Shared,
        }
    }
}

/// An option that is not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// There is no such option.
    #[error(
        "unknown mount option {0:?}; known: commit=SECONDS, dirty=SIZE, cache=SIZE, inodes=N, ro, allow_other, noallow_other, suid, nosuid, dev, nodev, exec, noexec, syncfs, nosyncfs, transport=auto|dev|uring, locks=shared|local"
    )]
    Unknown(String),
    /// Its value makes no sense.
    #[error("mount option {name}={value}: expected {expected}")]
    Value {
        /// The option.
        name: String,
        /// What was given.
        value: String,
        /// What could be.
        expected: &'static str,
    },
}

/// A tenth of the memory, as the kernel does for its own file systems' dirty pages before it starts to write.
fn tenth_of_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = total.and_then(|total| total.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
    (kib * 1024 / 10).clamp(256 << 20, 8 << 30)
}

/// Smallest cache: what a few readers fetch at once has to fit.
const CACHE_MIN: u64 = 16 << 20;

/// Smallest dirty budget: a few of the largest writes.
const DIRTY_MIN: u64 = 4 << 20;

/// Bytes from `N`, `NK`, `NM`, `NG` or `NT` (powers of 1024; lower case too).
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl MountOptions {
    /// Parses a comma-separated list on top of the defaults.
    ///
    /// # Errors
    /// An option is unknown or has a senseless value.
    pub fn parse(text: &str) -> Result<MountOptions, OptionError> {
        let mut options = MountOptions::default();
        for option in text.split(',').map(str::trim).filter(|option| !option.is_empty()) {
            let (name, value) =
                option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
            options.set(name, value)?;
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: Option<&str>) -> Result<(), OptionError> {
        let wrong = |expected| OptionError::Value {
            name: name.to_string(),
            value: value.unwrap_or_default().to_string(),
            expected,
        };
        let size = || value.and_then(parse_size).ok_or_else(|| wrong("a size such as 256M"));
        match (name, value) {
            ("commit", _) => {
                let seconds =
                    value.and_then(|value| value.parse::<f64>().ok()).filter(|s| (0.01..=3600.0).contains(s));
                self.commit =
                    Duration::from_secs_f64(seconds.ok_or_else(|| wrong("seconds from 0.01 to 3600"))?);
            }
            ("dirty", _) => {
                self.dirty =
                    Some(size()?).filter(|size| *size >= DIRTY_MIN).ok_or_else(|| wrong("at least 4M"))?;
            }
            ("cache", _) => {
                self.cache =
                    Some(size()?).filter(|size| *size >= CACHE_MIN).ok_or_else(|| wrong("at least 16M"))?;
            }
            ("inodes", _) => {
                let count = value.and_then(|value| value.parse().ok()).filter(|count| *count >= 1000);
                self.inodes = count.ok_or_else(|| wrong("a number of at least 1000"))?;
            }
            ("transport", Some("auto")) => self.transport = TransportOption::Auto,
            ("transport", Some("dev")) => self.transport = TransportOption::Dev,
            ("transport", Some("uring")) => self.transport = TransportOption::Uring,
            ("transport", _) => return Err(wrong("auto, dev or uring")),
            ("locks", Some("shared")) => self.locks = LocksOption::Shared,
            ("locks", Some("local")) => self.locks = LocksOption::Local,
            ("locks", _) => return Err(wrong("shared or local")),
            ("ro", None) => self.read_only = true,
            ("rw", None) => self.read_only = false,
            ("allow_other", None) => self.allow_other = true,
            ("noallow_other", None) => self.allow_other = false,
            ("suid", None) => self.suid = true,
            ("nosuid", None) => self.suid = false,
            ("dev", None) => self.dev = true,
            ("nodev", None) => self.dev = false,
            ("exec", None) => self.exec = true,
            ("noexec", None) => self.exec = false,
            ("syncfs", None) => self.syncfs = true,
            ("nosyncfs", None) => self.syncfs = false,
            // What mount(8) and fstab add, and what is so in any case.
            (
                "defaults"
                | "auto"
                | "noauto"
                | "nofail"
                | "_netdev"
                | "user"
                | "noatime"
                | "default_permissions",
                None,
            ) => {}
            _ => return Err(OptionError::Unknown(name.to_string())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        let options =
            MountOptions::parse("ro,commit=0.5,dirty=64M,,cache=1g,transport=dev,_netdev,nosuid,syncfs")
                .unwrap();
        assert!(options.read_only && !options.suid && options.dev == host::is_root() && options.syncfs);
        assert_eq!(options.commit, Duration::from_millis(500));
        assert_eq!((options.dirty, options.cache), (64 << 20, 1 << 30));
        assert_eq!(options.transport, TransportOption::Dev);
        assert_eq!(MountOptions::parse("").unwrap(), MountOptions::default());
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for bad in [
            "dirty=1",
            "dirty=x",
            "commit=0",
            "commit",
            "cache=1Q",
            "cache=1M",
            "ro=1",
            "transport=tcp",
            "locks=none",
            "frobnicate",
        ] {
            let error = MountOptions::parse(bad).unwrap_err().to_string();
            assert!(error.contains(bad.split('=').next().unwrap()), "{error}");
        }
    }
}
