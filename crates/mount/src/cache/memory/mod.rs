//! What a mount may keep in memory, and giving back what it keeps only to be faster.
//!
//! Content is counted where it is written and fetched ([`crate::cache::budget::Budget`]). Everything else that is resident (rows,
//! the allocator's free pages, buffers) is looked at every second, and what it takes beyond [`OVERHEAD`] the cache gives up.
//! So all of it together stays within `cache` and `dirty`. `docs/operations.md` has the rules for whoever sets them.

mod host;
mod pressure;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hayloft_fuse::Control;

use self::pressure::Pressure;
use crate::core::Client;
use crate::options::{CACHE_MIN, DIRTY_MIN, MountOptions};

pub(crate) use hayloft_memory::resident;

/// What a client takes beside its content and rows: the program, stacks, buffers of requests under way.
const OVERHEAD: u64 = 64 << 20;
/// Bytes of clean content that stay when everything else of it goes.
const FLOOR: u64 = 16 << 20;
/// What is fetched in one request comes in any case.
const FETCHED_MIN: u64 = 8 << 20;
/// What an inode is reckoned with: its row, its name, and what the maps take that lead to both.
const INODE_BYTES: u64 = 1 << 10;
/// Fewer inodes are not worth counting.
const INODES_MIN: usize = 32 << 10;
/// Changed rows beyond which whoever changes more has to wait: bounds of it, whatever `inodes` says.
const DIRTY_ROWS_MIN: usize = 20_000;
const DIRTY_ROWS_MAX: usize = 800_000;
/// Most that the mounts of a host take together, however much memory it has.
const TENTH_MAX: u64 = 16 << 30;
/// How often everything is looked at: while something is asked of the mount, and while nothing is.
const TICK: Duration = Duration::from_secs(1);
const TICK_AT_REST: Duration = Duration::from_secs(5);
/// How often the other mounts of the host are counted.
const COUNT_AGAIN: Duration = Duration::from_secs(5);
/// How long memory counts as short after the kernel has said so, and how soon it is listened to again.
const SHORT_FOR: Duration = Duration::from_secs(10);
const DEAF_FOR: Duration = Duration::from_millis(500);

/// What a mount may keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes of unshipped content.
    pub(crate) dirty: u64,
    /// Bytes of everything else.
    pub(crate) cache: u64,
    /// Rows of inodes.
    pub(crate) inodes: usize,
}

impl Limits {
    /// As the options say; what they leave open is half of `share` each.
    fn new(options: &MountOptions, share: u64) -> Limits {
        let dirty = options.dirty.unwrap_or((share / 2).max(DIRTY_MIN));
        let cache = options.cache.unwrap_or((share / 2).max(CACHE_MIN));
        let room = ((dirty + cache) / 4 / INODE_BYTES) as usize;
        Limits { dirty, cache, inodes: options.inodes.unwrap_or(room.max(INODES_MIN)) }
    }

    /// What everything that is resident may take.
    fn all(&self) -> u64 {
        self.dirty + self.cache + OVERHEAD
    }
}

/// What one mount of a host may take when nobody says how much: a tenth of the host's memory is divided among all of them.
fn share(memory: u64, mounts: usize) -> u64 {
    (memory / 10).min(TENTH_MAX) / mounts.max(1) as u64
}

/// The limits in force.
#[derive(Debug)]
pub(crate) struct Memory {
    dirty: AtomicU64,
    cache: AtomicU64,
    inodes: AtomicUsize,
    /// Of `cache`, what content may take now.
    content: AtomicU64,
    /// Of `inodes`, how many may stay now: they are larger than reckoned with.
    rows: AtomicUsize,
    /// How often the kernel said that memory is short, and whether it still is.
    heard: AtomicU64,
    short: AtomicBool,
    ended: AtomicBool,
}

impl Memory {
    pub(crate) fn new(options: &MountOptions) -> Memory {
        let memory = Memory {
            dirty: AtomicU64::new(0),
            cache: AtomicU64::new(0),
            inodes: AtomicUsize::new(0),
            content: AtomicU64::new(u64::MAX),
            rows: AtomicUsize::new(usize::MAX),
            heard: AtomicU64::new(0),
            short: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        };
        // This one is not there yet.
        memory.set(Limits::new(options, share(host::memory(), host::mounts() + 1)));
        memory
    }

    fn set(&self, limits: Limits) {
        self.dirty.store(limits.dirty, Ordering::Relaxed);
        self.cache.store(limits.cache, Ordering::Relaxed);
        self.inodes.store(limits.inodes, Ordering::Relaxed);
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            dirty: self.dirty.load(Ordering::Relaxed),
            cache: self.cache.load(Ordering::Relaxed),
            inodes: self.inodes.load(Ordering::Relaxed),
        }
    }

    /// Most bytes of unshipped content.
    pub(crate) fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }

    /// Most bytes of clean content.
    pub(crate) fn content(&self) -> u64 {
        self.content.load(Ordering::Relaxed).min(self.cache.load(Ordering::Relaxed))
    }

    /// Most bytes of all content.
    pub(crate) fn all_content(&self) -> u64 {
        self.content() + self.dirty()
    }

    /// Most bytes of content on their way here, as they come and decoded.
    pub(crate) fn fetched(&self) -> u64 {
        (self.content() / 4).max(FETCHED_MIN)
    }

    /// Most rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows.load(Ordering::Relaxed).min(self.inodes.load(Ordering::Relaxed))
    }

    /// Whether memory is short: what can be shipped should be.
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Most changed rows before who changes more has to wait.
    pub(crate) fn dirty_rows(&self) -> usize {
        self.inodes.load(Ordering::Relaxed).clamp(DIRTY_ROWS_MIN, DIRTY_ROWS_MAX)
    }

    /// How often the kernel said that memory is short.
    pub(crate) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    /// The mount has ended, and so does [`run`].
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// Before anything is kept, and before threads are started.
pub(crate) fn set_up() {
    hayloft_memory::set_up(hayloft_memory::Keep::Little);
}

/// What there was to give back when that was done last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    content: u64,
    clean: u64,
    rows: usize,
    operations: u64,
}

/// The thread that looks after the memory: runs as long as the mount.
pub(crate) fn run(client: &Arc<Client>, control: &Control) {
    let mut pressure = Pressure::new();
    let mut keeper = Keeper::new(client, control);
    while !client.memory.ended.load(Ordering::Relaxed) {
        let is_heard = pressure.wait(keeper.pause());
        keeper.look(is_heard);
        if is_heard {
            // The kernel may say it hundreds of times a second.
            std::thread::sleep(DEAF_FOR);
        }
    }
}

struct Keeper<'a> {
    client: &'a Arc<Client>,
    control: &'a Control,
    counted: Instant,
    /// Operations until now, and when there was a new one.
    operations: u64,
    busy: Instant,
    short_until: Option<Instant>,
    given: Option<Kept>,
    /// What there was beside content when free pages were given back last, or since, if that is less.
    least: u64,
}

impl<'a> Keeper<'a> {
    fn new(client: &'a Arc<Client>, control: &'a Control) -> Keeper<'a> {
        let now = Instant::now();
        Keeper {
            client,
            control,
            counted: now,
            operations: 0,
            busy: now,
            short_until: None,
            given: None,
            least: 0,
        }
    }

    /// How long nothing has to be looked at.
    fn pause(&self) -> Duration {
        let is_at_rest = self.given.is_some() && self.short_until.is_none();
        if is_at_rest { TICK_AT_REST } else { TICK.min(self.client.options.quiet / 4) }
    }

    fn look(&mut self, is_heard: bool) {
        let (memory, now) = (&self.client.memory, Instant::now());
        if now - self.counted > COUNT_AGAIN {
            self.counted = now;
            let limits = Limits::new(&self.client.options, share(host::memory(), host::mounts()));
            if limits != memory.limits() {
                tracing::debug!(?limits, "this mount's share of the host's memory has changed");
                memory.set(limits);
            }
        }
        let operations = self.client.stats.operations();
        if std::mem::replace(&mut self.operations, operations) != operations {
            self.busy = now;
        }
        if is_heard {
            self.hear(now);
        } else if self.short_until.is_some_and(|until| now > until) {
            self.short_until = None;
            memory.short.store(false, Ordering::Relaxed);
        }
        let is_quiet = now - self.busy >= self.client.options.quiet;
        if is_quiet || self.short_until.is_some() {
            self.give_back(is_heard);
        } else {
            self.given = None;
        }
        self.bound();
    }

    /// Memory is short.
    fn hear(&mut self, now: Instant) {
        let memory = &self.client.memory;
        memory.heard.fetch_add(1, Ordering::Relaxed);
        if self.short_until.is_none() {
            tracing::debug!("memory is short on this host, or in this control group: the cache is given up");
        }
        self.short_until = Some(now + SHORT_FOR);
        memory.short.store(true, Ordering::Relaxed);
        memory.content.store(FLOOR, Ordering::Relaxed);
        // What the server has can go.
        self.client.ship_soon();
    }

    /// Gives back what is kept only to be faster, unless that was done and nothing has changed since.
    fn give_back(&mut self, anew: bool) {
        let kept = self.kept();
        if !anew && self.given == Some(kept) {
            return;
        }
        self.client.trim_content(FLOOR);
        self.client.shrink();
        self.control.release_memory();
        hayloft_memory::give_back();
        self.given = Some(self.kept());
    }

    fn kept(&self) -> Kept {
        let rows = self.client.core().tree.in_memory().0;
        let (content, clean) = (self.client.budget.held(), self.client.budget.cached());
        Kept { content, clean, rows, operations: self.operations }
    }

    /// Keeps everything together within the limits.
    fn bound(&mut self) {
        let memory = &self.client.memory;
        let limits = memory.limits();
        let others = || resident().own.saturating_sub(self.client.budget.held());
        let mut beside = others();
        // Free pages first: they are of least use. To look for them takes time, so some must have come together.
        let is_over = beside + self.client.budget.held() > limits.all();
        let free_min = limits.all() / if is_over { 64 } else { 8 };
        if beside > OVERHEAD && beside > self.least + free_min {
            self.control.release_memory();
            hayloft_memory::give_back();
            beside = others();
            self.least = beside;
        }
        self.least = self.least.min(beside);
        memory.rows.store(self.rows_max(limits, beside), Ordering::Relaxed);
        if self.short_until.is_none() {
            let charged = beside.saturating_sub(OVERHEAD);
            let left = limits.cache.saturating_sub(charged).max(limits.cache / 4).max(CACHE_MIN);
            memory.content.store(left, Ordering::Relaxed);
        }
        self.client.trim();
        self.client.core().names.bound_absent(limits.inodes);
    }

    /// How many rows may stay. They may be larger than reckoned with: small files, and targets of links, are part of them.
    fn rows_max(&self, limits: Limits, beside: u64) -> usize {
        let most = limits.inodes as u64 * INODE_BYTES;
        if beside <= most + OVERHEAD {
            return limits.inodes;
        }
        let content = self.client.budget.held();
        let taken = hayloft_memory::in_use().saturating_sub(content + OVERHEAD);
        if taken <= most {
            return limits.inodes;
        }
        let rows = self.client.core().tree.in_memory().0 as u128;
        (rows * u128::from(most) / u128::from(taken)) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_what_is_left_open() {
        let limits = |options: &str| Limits::new(&MountOptions::parse(options).unwrap(), 1 << 30);
        assert_eq!(limits(""), Limits { dirty: 512 << 20, cache: 512 << 20, inodes: 256 << 10 });
        assert_eq!(limits("cache=2G").dirty, 512 << 20);
        let given = limits("cache=1G,dirty=1G,inodes=5000");
        assert_eq!(given, Limits { dirty: 1 << 30, cache: 1 << 30, inodes: 5000 });
    }

    #[test]
    fn mounts_divide_a_tenth() {
        assert_eq!(share(40 << 30, 1), 4 << 30);
        assert_eq!(share(40 << 30, 4), 1 << 30);
        assert_eq!(share(1 << 40, 1), TENTH_MAX);
        let crowded = Limits::new(&MountOptions::default(), share(1 << 30, 1000));
        assert_eq!((crowded.dirty, crowded.cache), (DIRTY_MIN, CACHE_MIN));
    }
}
