//! What a session asks of the kernel.

use std::time::Duration;

/// The module parameter which allows FUSE over io_uring.
pub(crate) const RING_PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// How requests travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// io_uring if the kernel allows it and it works, else /dev/fuse.
    #[default]
    Auto,
    /// Reads and writes on /dev/fuse.
    DevFuse,
    /// io_uring or an error.
    IoUring,
}

/// When the kernel lists directories together with attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readdirplus {
    /// Never: READDIR only.
    Off,
    /// When the kernel thinks that the attributes will be wanted.
    #[default]
    Auto,
    /// Always.
    Always,
}

/// Settings of a session. The defaults suit a file system which keeps its own data coherent by telling
/// the kernel what to drop.
#[derive(Debug, Clone)]
pub struct Config {
    /// How requests travel.
    pub transport: Transport,
    /// Threads reading /dev/fuse; `None` means one per core. Over io_uring there is one per core always.
    pub threads: Option<usize>,
    /// Requests a core may have under way at once over io_uring before a request goes to the pool (each
    /// request there is made up for by a further place, up to `queue_depth_max`).
    pub queue_depth: u32,
    /// Bound of the places of one core's queue. Each place owns `max_write` bytes of memory, of which
    /// only what was once used is resident. When all are taken by blocked requests, further requests of
    /// that core wait in the kernel.
    pub queue_depth_max: u32,
    /// Bound of the pool's threads. Requests beyond it wait in line; blocking lock requests have
    /// threads of their own, so that they cannot hold up the release of what they wait for.
    pub pool_threads_max: usize,
    /// As many threads for blocking lock requests. Among these are releases (flock(2) with LOCK_UN may block for
    /// all that the kernel knows): the file system must let fewer than that wait.
    pub lock_threads_max: usize,
    /// Bound of the line before the pool. When it is full, transport threads wait.
    pub pool_queue_max: usize,
    /// How long a pool thread without work stays.
    pub pool_idle: Duration,

    /// Largest write and read in bytes; a multiple of 4096, at most 1 MiB unless the sysctl
    /// `fs.fuse.max_pages_limit` says otherwise.
    pub max_write: u32,
    /// Largest read-ahead in bytes.
    pub max_readahead: u32,
    /// Read-ahead and other asynchronous requests under way at once.
    pub max_background: u16,
    /// From how many of these on the kernel calls the mount congested.
    pub congestion_threshold: u16,

    /// Answer OPEN with ENOSYS: the kernel then opens files without asking, and sends no RELEASE and no
    /// FLUSH. Must not be combined with `atomic_o_trunc`: truncations would be lost.
    pub no_open: bool,
    /// Answer OPENDIR with ENOSYS; the kernel then caches directories as with `CACHE_DIR` and `KEEP_CACHE`.
    pub no_opendir: bool,
    /// OPEN carries O_TRUNC instead of a SETATTR before it.
    pub atomic_o_trunc: bool,
    /// The file system answers GETLK, SETLK and SETLKW for POSIX locks.
    pub posix_locks: bool,
    /// The file system answers SETLK and SETLKW for flock(2) locks.
    pub flock_locks: bool,
    /// The file system answers LOOKUP of "." and "..", by inode number.
    pub export_support: bool,
    /// The kernel collects writes; it then owns size and times of open files.
    pub writeback_cache: bool,
    /// Listing with attributes.
    pub readdirplus: Readdirplus,
    /// The kernel keeps targets of symbolic links until told otherwise.
    pub cache_symlinks: bool,
    /// Requests say when to clear setuid and setgid bits and the file system does it. Spares the kernel a
    /// GETXATTR per write.
    pub handle_killpriv: bool,
    /// The kernel checks access by POSIX access control lists (extended attributes `system.posix_acl_*`).
    pub posix_acl: bool,
    /// The kernel drops cached data by itself when size or mtime change. Off: only when it is told.
    pub auto_inval_data: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            transport: Transport::Auto,
            threads: None,
            queue_depth: 16,
            queue_depth_max: 256,
            pool_threads_max: 256,
            lock_threads_max: 256,
            pool_queue_max: 4096,
            pool_idle: Duration::from_secs(10),
            max_write: 1 << 20,
            max_readahead: 1 << 20,
            max_background: 64,
            congestion_threshold: 48,
            no_open: false,
            no_opendir: false,
            atomic_o_trunc: false,
            posix_locks: false,
            flock_locks: false,
            export_support: true,
            writeback_cache: false,
            readdirplus: Readdirplus::Auto,
            cache_symlinks: true,
            handle_killpriv: true,
            posix_acl: false,
            auto_inval_data: false,
        }
    }
}

impl Config {
    /// What is wrong with the settings, if anything.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        if self.no_open && self.atomic_o_trunc {
            return Some("no_open and atomic_o_trunc together lose truncations: switch one of them off");
        }
        if self.max_write < 4096 || !self.max_write.is_multiple_of(4096) || self.max_write > 256 << 20 {
            return Some("max_write must be a multiple of 4096 between 4 KiB and 256 MiB");
        }
        if self.queue_depth == 0 || self.queue_depth > self.queue_depth_max || self.queue_depth_max > 4096 {
            return Some("queue_depth must be between 1 and queue_depth_max, and that at most 4096");
        }
        if self.threads == Some(0)
            || self.pool_threads_max == 0
            || self.lock_threads_max == 0
            || self.pool_queue_max == 0
        {
            return Some("threads, pool_threads_max and pool_queue_max must be at least 1");
        }
        None
    }
}
