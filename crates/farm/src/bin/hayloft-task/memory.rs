//! Memory until the C library has begun, and the functions that compilers call: those of the C library are chosen by the processor's features
//! when it begins, and not to be called before.

use std::alloc::{GlobalAlloc, Layout, System};
use std::arch::asm;
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Enough for most: only what is used of it is ever there.
const SIZE: usize = 64 << 10;
/// So much more at a time, or as much as is needed at once.
const MORE: usize = 1 << 20;

struct Memory {
    /// What is asked for is of the C library's.
    has_library: AtomicBool,
    /// Where there is room, and where that ends: addresses.
    next: AtomicUsize,
    end: AtomicUsize,
    bytes: UnsafeCell<[u8; SIZE]>,
}

// SAFETY: parts of the bytes are given out once, and there is one thread until the C library begins.
unsafe impl Sync for Memory {}

#[global_allocator]
static MEMORY: Memory = Memory {
    has_library: AtomicBool::new(true),
    next: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    bytes: UnsafeCell::new([0; SIZE]),
};

/// From now on memory is had without the C library, and never given back.
pub(crate) fn begins() {
    let bytes = MEMORY.bytes.get() as usize;
    MEMORY.next.store(bytes, Ordering::Relaxed);
    MEMORY.end.store(bytes + SIZE, Ordering::Relaxed);
    MEMORY.has_library.store(false, Ordering::Relaxed);
}

/// From now on it is the C library's. Nothing of what was had before may be in use.
pub(crate) fn ends() {
    MEMORY.has_library.store(true, Ordering::Relaxed);
}

/// Whether something was done before the C library has begun.
pub(crate) fn was_used() -> bool {
    MEMORY.next.load(Ordering::Relaxed) > 0
}

impl Memory {
    fn take(&self, layout: Layout) -> *mut u8 {
        let mut begin = self.next.load(Ordering::Relaxed).next_multiple_of(layout.align());
        if layout.size() > self.end.load(Ordering::Relaxed).saturating_sub(begin) {
            let size = layout.size().max(MORE);
            // Pages suit whatever has no more than their alignment, as all has that is allocated here.
            let Some(fresh) = mapped(size) else { return null_mut() };
            begin = fresh;
            self.end.store(fresh + size, Ordering::Relaxed);
        }
        self.next.store(begin + layout.size(), Ordering::Relaxed);
        begin as *mut u8
    }
}

/// The address of new pages.
fn mapped(size: usize) -> Option<usize> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory that nobody else has.
    let found = unsafe { libc::mmap(null_mut(), size, protection, flags, -1, 0) };
    (found != libc::MAP_FAILED).then_some(found as usize)
}

// SAFETY: what is given out is given out once, is as large and as aligned as was asked for, and is never given out again.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match self.has_library.load(Ordering::Relaxed) {
            // SAFETY: by the caller.
            true => unsafe { System.alloc(layout) },
            false => self.take(layout),
        }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if self.has_library.load(Ordering::Relaxed) {
            // SAFETY: by the caller; nothing of before is in use.
            unsafe { System.dealloc(memory, layout) };
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match self.has_library.load(Ordering::Relaxed) {
            // SAFETY: by the caller.
            true => unsafe { System.alloc_zeroed(layout) },
            // It is new, and so zero.
            false => self.take(layout),
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if self.has_library.load(Ordering::Relaxed) {
            // SAFETY: by the caller.
            return unsafe { System.realloc(memory, layout, size) };
        }
        // SAFETY: the alignment is one already.
        let new = self.take(unsafe { Layout::from_size_align_unchecked(size, layout.align()) });
        if !new.is_null() {
            // SAFETY: both are at least so large, and apart.
            unsafe { memcpy(new, memory, layout.size().min(size)) };
        }
        new
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: by the caller.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= count {
        // SAFETY: by the caller; its end comes after what it overwrites.
        return unsafe { memcpy(to, from, count) };
    }
    // SAFETY: by the caller; it goes from the end to the beginning, and the direction is put back.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") count => _, inout("rdi") to.add(count).sub(1) => _,
            inout("rsi") from.add(count).sub(1) => _, options(nostack));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    // SAFETY: by the caller.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") byte as u8,
            options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    for at in 0..count {
        // SAFETY: by the caller; compilers see another function in such a loop, unless each byte is to be read.
        let (a, b) = unsafe { (one.add(at).read_volatile(), other.add(at).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    // SAFETY: by the caller.
    unsafe { memcmp(one, other, count) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut length = 0;
    // SAFETY: by the caller; as above.
    while unsafe { text.add(length).read_volatile() } != 0 {
        length += 1;
    }
    length
}
