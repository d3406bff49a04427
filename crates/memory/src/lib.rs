//! What the process takes of the host's memory, and giving back what the allocator keeps for later.
//!
//! The C library's allocator returns by itself only what lies at the end of its heaps. Asked to, it returns every page
//! that nothing is on, in the middle as well; the decision in `docs/adr` says how that compares with other allocators.
#![allow(unsafe_code)]

mod counted;

use std::fs;

/// Threads beyond so many share heaps: what is free in one is of no use to the others.
#[cfg(target_env = "gnu")]
const HEAPS_MAX: libc::c_int = 8;
/// What a heap grows by, and what may be free at its end, bytes: messages come and go, and growing and shrinking for each takes
/// longer than they do.
#[cfg(target_env = "gnu")]
const HEAP_STEP: libc::c_int = 512 << 10;
/// The most that the C library takes for a threshold.
#[cfg(target_env = "gnu")]
const BUFFER_MAX: libc::c_int = 32 << 20;

/// Which free memory the allocator keeps until [`give_back`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Up to a megabyte at the end of each heap. What is larger than that has pages of its own, which go back at once.
    Little,
    /// Large buffers as well: for who fills one after the other, since new pages are zeroed by the kernel.
    Buffers,
}

/// Before threads are started that allocate.
pub fn set_up(keep: Keep) {
    #[cfg(target_env = "gnu")]
    {
        let kept = match keep {
            Keep::Little => 2 * HEAP_STEP,
            Keep::Buffers => BUFFER_MAX,
        };
        // SAFETY: takes numbers only.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, HEAPS_MAX);
            libc::mallopt(libc::M_TOP_PAD, HEAP_STEP);
            libc::mallopt(libc::M_TRIM_THRESHOLD, kept);
            libc::mallopt(libc::M_MMAP_THRESHOLD, kept);
        }
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = keep;
}

/// Bytes that are allocated and not freed. What libraries written in C allocate is not among them.
pub fn in_use() -> u64 {
    counted::in_use()
}

/// Returns all pages to the host that nothing is on. Whoever allocates meanwhile may have to wait for some
/// milliseconds, more when there is much to return.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes a number only; what is allocated stays as it is.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes of this process that are in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// All of them, with the program's own file.
    pub all: u64,
    /// What nobody else has: without files.
    pub own: u64,
}

/// What the process takes now; nothing where that cannot be seen.
pub fn resident() -> Resident {
    parse(&fs::read_to_string("/proc/self/status").unwrap_or_default())
}

/// The bytes of a line such as `MemTotal: 16 kB`, as files of /proc have them.
pub fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

fn parse(status: &str) -> Resident {
    let bytes = |key: &str| kib(status, key).unwrap_or(0);
    Resident { all: bytes("VmRSS:"), own: bytes("RssAnon:") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_parsed() {
        let status = "Name:\tx\nVmRSS:\t    9000 kB\nRssAnon:\t    1024 kB\nRssFile:\t 7976 kB\n";
        assert_eq!(parse(status), Resident { all: 9000 << 10, own: 1 << 20 });
        assert_eq!(parse(""), Resident::default());
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn what_is_freed_goes_back() {
        // Much more than what other tests of the process take and free meanwhile.
        let pieces: Vec<Vec<u8>> = (0..20_480).map(|_| vec![1; 20_000]).collect();
        let full = resident().own;
        // Every other one stays where it is, so that nothing is free at an end.
        let mut kept: Vec<Vec<u8>> = pieces.into_iter().step_by(2).collect();
        give_back();
        let half = resident().own;
        assert!(full > half + (20 << 20), "{full} became {half}");
        assert!(in_use() > 40_000_000);
        kept.clear();
        give_back();
        assert!(half > resident().own + (20 << 20));
    }
}
