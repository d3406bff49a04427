//! Memory that client and keeper have in common.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::MemfdFlags;

/// Inodes of one chunk: as many as there are bits in a line of the processor's cache.
pub(super) const CHUNK: u64 = 512;
const WORDS: usize = CHUNK as usize / 64;
/// Most chunks: more than a kernel knows inodes of in practice, even if each had one of its own.
const CHUNKS_MAX: usize = 1 << 22;

#[repr(C, align(4096))]
struct Head {
    /// When the client's lease has run out as far as the kernel's caches go, nanoseconds of CLOCK_BOOTTIME.
    deadline: AtomicU64,
    /// Chunks that were ever in use.
    used: AtomicU64,
    /// Numbers that found no chunk, if the first is not greater than the second.
    beyond_first: AtomicU64,
    beyond_last: AtomicU64,
}

/// All of it: only pages that were written to take memory.
#[repr(C)]
struct Layout {
    head: Head,
    /// One more than the number of the chunk; 0 for a free one.
    keys: [AtomicU64; CHUNKS_MAX],
    bits: [[AtomicU64; WORDS]; CHUNKS_MAX],
}

/// The memory.
#[derive(Debug)]
pub(crate) struct Shared {
    file: OwnedFd,
    layout: NonNull<Layout>,
}

// SAFETY: all of it is atomic numbers.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// New memory: no inode is known, and the lease never runs out.
    pub(crate) fn new() -> io::Result<Shared> {
        let file = rustix::fs::memfd_create("hayloft-keeper", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, size_of::<Layout>() as u64)?;
        let shared = Shared::over(file)?;
        shared.layout().head.deadline.store(u64::MAX, Ordering::Relaxed);
        shared.layout().head.beyond_first.store(u64::MAX, Ordering::Relaxed);
        Ok(shared)
    }

    /// The memory behind a descriptor that [`Shared::new`] has made.
    pub(super) fn over(file: OwnedFd) -> io::Result<Shared> {
        if rustix::fs::fstat(&file)?.st_size as usize != size_of::<Layout>() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (none, length) = (std::ptr::null_mut(), size_of::<Layout>());
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { libc::mmap(none, length, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let layout = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Shared { file, layout })
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping lives as long as this, is as long as the layout, and zeroes are valid for all of it.
        unsafe { self.layout.as_ref() }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// When the kernel's caches have to be empty, nanoseconds of CLOCK_BOOTTIME.
    pub(super) fn deadline(&self) -> u64 {
        self.layout().head.deadline.load(Ordering::Acquire)
    }

    /// Sets [`Shared::deadline`].
    pub(crate) fn set_deadline(&self, deadline: u64) {
        self.layout().head.deadline.store(deadline, Ordering::Release);
    }

    /// Chunks that were ever in use.
    pub(super) fn used(&self) -> usize {
        (self.layout().head.used.load(Ordering::Acquire) as usize).min(CHUNKS_MAX)
    }

    /// A place for a chunk that was never in use; `None` when there are no more.
    pub(super) fn take_chunk(&self) -> Option<u32> {
        let used = self.used();
        (used < CHUNKS_MAX).then(|| {
            self.layout().head.used.store(used as u64 + 1, Ordering::Release);
            used as u32
        })
    }

    /// From now on the place is for these inodes, or for none.
    pub(super) fn name_chunk(&self, at: u32, chunk: Option<u64>) {
        self.layout().keys[at as usize].store(chunk.map_or(0, |chunk| chunk + 1), Ordering::Release);
    }

    /// Notes an inode of the chunk at a place.
    pub(super) fn set(&self, at: u32, bit: u64) {
        self.layout().bits[at as usize][bit as usize / 64].fetch_or(1 << (bit % 64), Ordering::AcqRel);
    }

    /// Forgets one; whether the chunk is empty now.
    pub(super) fn clear(&self, at: u32, bit: u64) -> bool {
        let words = &self.layout().bits[at as usize];
        words[bit as usize / 64].fetch_and(!(1 << (bit % 64)), Ordering::AcqRel);
        words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// Notes an inode that no chunk can be had for. It is not forgotten any more.
    pub(super) fn set_beyond(&self, ino: u64) {
        let head = &self.layout().head;
        head.beyond_first.fetch_min(ino, Ordering::AcqRel);
        head.beyond_last.fetch_max(ino, Ordering::AcqRel);
    }

    /// First and last of these.
    pub(super) fn beyond(&self) -> (u64, u64) {
        let head = &self.layout().head;
        (head.beyond_first.load(Ordering::Acquire), head.beyond_last.load(Ordering::Acquire))
    }

    /// What is noted at a place: the first inode of its chunk, and which of the 64 from each word's start are there.
    pub(super) fn chunk(&self, at: usize) -> Option<(u64, [u64; WORDS])> {
        let key = self.layout().keys[at].load(Ordering::Acquire).checked_sub(1)?;
        let words = &self.layout().bits[at];
        Some((key * CHUNK, std::array::from_fn(|word| words[word].load(Ordering::Acquire))))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length, and nothing borrows it any more.
        unsafe { libc::munmap(self.layout.as_ptr().cast(), size_of::<Layout>()) };
    }
}
