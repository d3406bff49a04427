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
    /// its time. `None`: half of this mount's share of the host's memory, see `memory`.
    pub dirty: Option<u64>,
    /// `cache=SIZE`: most bytes for what was shipped or fetched, rows among them, beside the kernel's own cache. `None`: as
    /// for `dirty`: what was just written is read next, and the kernel has not kept the last page of each file.
    pub cache: Option<u64>,
    /// `inodes=N`: most inodes kept in memory, about. `None`: so many as a quarter of `cache` and `dirty` together has
    /// room for.
    pub inodes: Option<usize>,
    /// `quiet=SECONDS`: when nothing was asked of the mount for so long, it gives back what it keeps only to be faster.
    pub quiet: Duration,
    /// `noahead`: only what is asked for is fetched, not what is likely to be asked for next: for who looks here and there in a large tree.
    pub ahead: bool,
    /// `ro`: nothing can be changed.
    pub read_only: bool,
    /// `noallow_other`: only the user who mounts has access. The default when root mounts is everybody, and else this:
    /// what others are let in for stands in /etc/fuse.conf.
    pub allow_other: bool,
    /// `nosuid`, `nodev`, `noexec`: as in mount(8). Only root can do without the first two. `None`: as the volume is marked,
    /// and always off for others than root.
    pub suid: Option<bool>,
    /// See `suid`.
    pub dev: Option<bool>,
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
            dirty: None,
            cache: None,
            inodes: None,
            quiet: Duration::from_secs(30),
            ahead: true,
            read_only: false,
            allow_other: root,
            suid: None,
            dev: None,
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
        "unknown mount option {0:?}; known: commit=SECONDS, dirty=SIZE, cache=SIZE, inodes=N, quiet=SECONDS, ahead, noahead, ro, allow_other, noallow_other, suid, nosuid, dev, nodev, exec, noexec, syncfs, nosyncfs, transport=auto|dev|uring, locks=shared|local"
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

/// Smallest cache: what a few readers fetch at once has to fit.
pub(crate) const CACHE_MIN: u64 = 16 << 20;

/// Smallest dirty budget: a few of the largest writes.
pub(crate) const DIRTY_MIN: u64 = 4 << 20;

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
        let seconds = |least: f64, expected| {
            let seconds = value.and_then(|value| value.parse::<f64>().ok());
            let seconds = seconds.filter(|seconds| (least..=3600.0).contains(seconds));
            seconds.map(Duration::from_secs_f64).ok_or_else(|| wrong(expected))
        };
        match (name, value) {
            ("commit", _) => self.commit = seconds(0.01, "seconds from 0.01 to 3600")?,
            ("quiet", _) => self.quiet = seconds(1.0, "seconds from 1 to 3600")?,
            ("dirty", _) => {
                let size = Some(size()?).filter(|size| *size >= DIRTY_MIN);
                self.dirty = Some(size.ok_or_else(|| wrong("at least 4M"))?);
            }
            ("cache", _) => {
                let size = Some(size()?).filter(|size| *size >= CACHE_MIN);
                self.cache = Some(size.ok_or_else(|| wrong("at least 16M"))?);
            }
            ("inodes", _) => {
                let count = value.and_then(|value| value.parse().ok()).filter(|count| *count >= 1000);
                self.inodes = Some(count.ok_or_else(|| wrong("a number of at least 1000"))?);
            }
            ("transport", Some("auto")) => self.transport = TransportOption::Auto,
            ("transport", Some("dev")) => self.transport = TransportOption::Dev,
            ("transport", Some("uring")) => self.transport = TransportOption::Uring,
            ("transport", _) => return Err(wrong("auto, dev or uring")),
            ("locks", Some("shared")) => self.locks = LocksOption::Shared,
            ("locks", Some("local")) => self.locks = LocksOption::Local,
            ("locks", _) => return Err(wrong("shared or local")),
            ("ahead", None) => self.ahead = true,
            ("noahead", None) => self.ahead = false,
            ("ro", None) => self.read_only = true,
            ("rw", None) => self.read_only = false,
            ("allow_other", None) => self.allow_other = true,
            ("noallow_other", None) => self.allow_other = false,
            ("suid", None) => self.suid = Some(true),
            ("nosuid", None) => self.suid = Some(false),
            ("dev", None) => self.dev = Some(true),
            ("nodev", None) => self.dev = Some(false),
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

    proptest::proptest! {
        #[test]
        fn whatever_is_written_is_taken_or_refused(text in "(commit|dirty|cache|inodes|quiet|locks|noahead|ro|=|,|[0-9]{1,22}|[KMGT.]|\\PC){0,12}") {
            let _ = MountOptions::parse(&text);
            let _ = parse_size(&text);
        }
    }

    #[test]
    fn options_are_read() {
        let options = MountOptions::parse(
            "ro,commit=0.5,dirty=64M,,cache=1g,transport=dev,_netdev,nosuid,syncfs,noahead",
        )
        .unwrap();
        assert!(options.read_only && options.suid == Some(false) && options.dev.is_none() && options.syncfs);
        assert!(!options.ahead);
        assert_eq!(options.commit, Duration::from_millis(500));
        assert_eq!((options.dirty, options.cache), (Some(64 << 20), Some(1 << 30)));
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
            "quiet=0",
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
