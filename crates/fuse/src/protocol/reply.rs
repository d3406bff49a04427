//! Answers.

use std::time::Duration;

use crate::protocol::abi::opcode;
use crate::protocol::request::{Lock, Timestamp};

/// Room for the largest answer without content (`fuse_statx_out`).
const SCRATCH: usize = 288;
/// Size of `fuse_entry_out`.
pub(crate) const ENTRY_SIZE: usize = 128;
/// Size of the fixed part of `fuse_dirent`.
const DIRENT_SIZE: usize = 24;

/// How long the kernel may keep something without asking again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Validity(Duration);

impl Validity {
    /// Ask every time.
    pub const ZERO: Validity = Validity(Duration::ZERO);
    /// Until told otherwise (some 136 years, which no kernel overflows on).
    pub const FOREVER: Validity = Validity(Duration::from_secs(u32::MAX as u64));

    /// For some time; times beyond [`Validity::FOREVER`] become it.
    pub fn new(time: Duration) -> Validity {
        Validity(time.min(Validity::FOREVER.0))
    }
}

/// The attributes of an inode (`fuse_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attr {
    /// Number that stat(2) shows.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Space taken, in units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of attributes.
    pub ctime: Timestamp,
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device file.
    pub rdev: u32,
    /// Preferred size of I/O.
    pub blksize: u32,
    /// Flags of `fuse_attr`; normally 0.
    pub flags: u32,
}

/// The answer to a lookup: one more reference to an inode, given back by a forget. `nodeid` 0 says that
/// there is no such name, for the time of `entry_valid`, and gives no reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The inode's number in this protocol.
    pub nodeid: u64,
    /// Tells apart inodes which had the same number one after the other.
    pub generation: u64,
    /// How long the name holds.
    pub entry_valid: Validity,
    /// How long the attributes hold.
    pub attr_valid: Validity,
    /// The attributes.
    pub attr: Attr,
}

impl Entry {
    /// There is no such name.
    pub fn negative(entry_valid: Validity) -> Entry {
        let attr = Attr::default();
        Entry { nodeid: 0, generation: 0, entry_valid, attr_valid: Validity::ZERO, attr }
    }
}

/// Bits of `open_flags` in [`Reply::open`] and [`Reply::create`].
pub mod open_flags {
    /// Go past the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Keep what the page cache has of the file.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// No seeking.
    pub const NONSEEKABLE: u32 = 1 << 2;
    /// Cache the entries of this directory.
    pub const CACHE_DIR: u32 = 1 << 3;
    /// A stream without a position.
    pub const STREAM: u32 = 1 << 4;
    /// Send no FLUSH at close.
    pub const NOFLUSH: u32 = 1 << 5;
    /// Direct writes may run in parallel.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Figures of statfs(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Statfs {
    pub blocks: u64,
    pub bfree: u64,
    pub bavail: u64,
    pub files: u64,
    pub ffree: u64,
    pub bsize: u32,
    pub namelen: u32,
    pub frsize: u32,
}

/// Where content goes.
pub(crate) enum Area<'a> {
    /// Memory of the transport: shared with the kernel over io_uring.
    Shared(&'a mut [u8]),
    /// Memory of a pool thread, allocated when first used.
    Owned(Vec<u8>),
}

/// Takes the answer to one request. The last call of a method that answers is the one that counts.
pub struct Reply<'a> {
    opcode: u32,
    /// How much content the request allows.
    capacity: usize,
    scratch: [u8; SCRATCH],
    scratch_len: usize,
    area: Area<'a>,
    area_len: usize,
}

impl<'a> Reply<'a> {
    pub(crate) fn new(opcode: u32, capacity: usize, area: Area<'a>) -> Reply<'a> {
        Reply { opcode, capacity, scratch: [0; SCRATCH], scratch_len: 0, area, area_len: 0 }
    }

    /// Forgets what was answered so far.
    pub(crate) fn clear(&mut self) {
        (self.scratch_len, self.area_len) = (0, 0);
    }

    /// The answer, in two pieces.
    pub(crate) fn parts(&self) -> (&[u8], &[u8]) {
        let area: &[u8] = match &self.area {
            Area::Shared(slice) => slice,
            Area::Owned(vec) => vec,
        };
        (&self.scratch[..self.scratch_len], &area[..self.area_len])
    }

    /// Puts the answer into the shared memory in one piece; returns its length.
    pub(crate) fn join(self) -> usize {
        let Area::Shared(area) = self.area else { return 0 };
        if self.scratch_len > 0 {
            area.copy_within(..self.area_len, self.scratch_len);
            area[..self.scratch_len].copy_from_slice(&self.scratch[..self.scratch_len]);
        }
        self.scratch_len + self.area_len
    }

    fn put(&mut self) -> Put<'_> {
        self.clear();
        Put { bytes: &mut self.scratch, len: &mut self.scratch_len }
    }

    /// Success without content.
    pub fn empty(&mut self) {
        self.clear();
    }

    /// For LOOKUP, SYMLINK, MKNOD, MKDIR and LINK. A negative entry is for LOOKUP only.
    pub fn entry(&mut self, entry: &Entry) {
        self.put().entry(entry);
    }

    /// For GETATTR and SETATTR.
    pub fn attr(&mut self, attr: &Attr, valid: Validity) {
        let mut put = self.put();
        put.u64(valid.0.as_secs()).u32(valid.0.subsec_nanos()).u32(0).attr(attr);
    }

    /// For OPEN and OPENDIR; `flags` are [`open_flags`].
    pub fn open(&mut self, fh: u64, flags: u32) {
        self.put().u64(fh).u32(flags).u32(0);
    }

    /// For CREATE and TMPFILE.
    pub fn create(&mut self, entry: &Entry, fh: u64, flags: u32) {
        self.put().entry(entry).u64(fh).u32(flags).u32(0);
    }

    /// For WRITE: how many bytes were written.
    pub fn written(&mut self, count: u32) {
        self.put().u32(count).u32(0);
    }

    /// For COPY_FILE_RANGE: how many bytes were copied.
    pub fn copied(&mut self, count: u64) {
        if self.opcode == opcode::COPY_FILE_RANGE_64 {
            self.put().u64(count);
        } else {
            self.written(u32::try_from(count).unwrap_or(u32::MAX));
        }
    }

    /// Content for READ, READLINK, GETXATTR, LISTXATTR and the like, copied from `data`. More than was
    /// asked for is cut off: check the size of extended attributes first.
    pub fn data(&mut self, data: &[u8]) {
        let len = data.len().min(self.capacity);
        self.buffer()[..len].copy_from_slice(&data[..len]);
        self.filled(len);
    }

    /// Memory of the size asked for, to put content into; say how much with [`Reply::filled`]. It is the
    /// memory that the kernel takes the answer from. What it holds at first means nothing.
    pub fn buffer(&mut self) -> &mut [u8] {
        self.scratch_len = 0;
        let capacity = self.capacity;
        match &mut self.area {
            Area::Shared(slice) => &mut slice[..capacity],
            Area::Owned(vec) => {
                if vec.len() < capacity {
                    vec.resize(capacity, 0);
                }
                &mut vec[..capacity]
            }
        }
    }

    /// The first `len` bytes of [`Reply::buffer`] are the answer.
    pub fn filled(&mut self, len: usize) {
        self.scratch_len = 0;
        self.area_len = len.min(self.buffer().len());
    }

    /// For READDIR and READDIRPLUS.
    pub fn directory(&mut self) -> DirectoryWriter<'_> {
        self.clear();
        self.buffer();
        let bytes: &mut [u8] = match &mut self.area {
            Area::Shared(slice) => &mut slice[..self.capacity],
            Area::Owned(vec) => &mut vec[..self.capacity],
        };
        DirectoryWriter { bytes, len: &mut self.area_len }
    }

    /// For GETXATTR and LISTXATTR of size 0: the size there is.
    pub fn xattr_size(&mut self, size: u32) {
        self.put().u32(size).u32(0);
    }

    /// For STATFS.
    pub fn statfs(&mut self, s: &Statfs) {
        let mut put = self.put();
        put.u64(s.blocks).u64(s.bfree).u64(s.bavail).u64(s.files).u64(s.ffree);
        put.u32(s.bsize).u32(s.namelen).u32(s.frsize).zeroes(28);
    }

    /// For GETLK: the lock in the way, or the one asked about with kind `F_UNLCK`.
    pub fn lock(&mut self, lock: &Lock) {
        self.put().u64(lock.start).u64(lock.end).u32(lock.kind as u32).u32(lock.pid);
    }

    /// For LSEEK: the resulting offset.
    pub fn lseek(&mut self, offset: u64) {
        self.put().u64(offset);
    }

    /// For POLL: what is ready.
    pub fn poll(&mut self, revents: u32) {
        self.put().u32(revents).u32(0);
    }

    /// For IOCTL: the result and the data that goes back to the caller, at most `out_size` bytes.
    pub fn ioctl(&mut self, result: i32, data: &[u8]) {
        let len = data.len().min(self.capacity);
        if len > 0 {
            self.data(data);
        } else {
            self.area_len = 0;
        }
        let mut put = Put { bytes: &mut self.scratch, len: &mut self.scratch_len };
        put.u32(result as u32).u32(0).u32(0).u32(0);
    }

    /// For STATX: attributes with the time of creation, if known.
    pub fn statx(&mut self, attr: &Attr, created: Option<Timestamp>, valid: Validity) {
        const STATX_BASIC_STATS: u32 = 0x7ff;
        const STATX_BTIME: u32 = 0x800;
        let mask = STATX_BASIC_STATS | if created.is_some() { STATX_BTIME } else { 0 };
        let mut put = self.put();
        put.u64(valid.0.as_secs()).u32(valid.0.subsec_nanos()).u32(0).zeroes(16);
        put.u32(mask).u32(attr.blksize).u64(0).u32(attr.nlink).u32(attr.uid).u32(attr.gid);
        put.u16(attr.mode as u16).u16(0).u64(attr.ino).u64(attr.size).u64(attr.blocks).u64(0);
        for time in [attr.atime, created.unwrap_or_default(), attr.ctime, attr.mtime] {
            put.u64(time.seconds as u64).u32(time.nanos).u32(0);
        }
        let (major, minor) = ((attr.rdev >> 8) & 0xfff, (attr.rdev & 0xff) | ((attr.rdev >> 12) & 0xfff00));
        put.u32(major).u32(minor).zeroes(120);
    }
}

/// Writes the entries of a directory until the kernel's buffer is full.
pub struct DirectoryWriter<'r> {
    bytes: &'r mut [u8],
    len: &'r mut usize,
}

impl DirectoryWriter<'_> {
    /// Adds an entry to an answer to READDIR. `next` is the offset from which the listing goes on after
    /// it, not 0; `kind` is the type as in `d_type`. Returns false, having done nothing, when it is full.
    #[must_use]
    pub fn add(&mut self, ino: u64, next: u64, kind: u32, name: &[u8]) -> bool {
        let end = *self.len + (DIRENT_SIZE + name.len()).next_multiple_of(8);
        if end > self.bytes.len() {
            return false;
        }
        let mut put = Put { bytes: &mut self.bytes[..end], len: self.len };
        put.u64(ino).u64(next).u32(name.len() as u32).u32(kind).slice(name).fill();
        true
    }

    /// Adds an entry to an answer to READDIRPLUS. The reference that `entry` carries counts only when
    /// this returns true; none counts for "." and "..", nor for `nodeid` 0 (an entry without attributes:
    /// the kernel will look it up; `attr.ino` and `kind` are still shown).
    #[must_use]
    pub fn add_plus(&mut self, entry: &Entry, next: u64, kind: u32, name: &[u8]) -> bool {
        let end = *self.len + (ENTRY_SIZE + DIRENT_SIZE + name.len()).next_multiple_of(8);
        if end > self.bytes.len() {
            return false;
        }
        let mut put = Put { bytes: &mut self.bytes[..end], len: self.len };
        put.entry(entry).u64(entry.attr.ino).u64(next).u32(name.len() as u32).u32(kind);
        put.slice(name).fill();
        true
    }
}

/// Writes fields one after another.
struct Put<'r> {
    bytes: &'r mut [u8],
    len: &'r mut usize,
}

impl Put<'_> {
    fn slice(&mut self, bytes: &[u8]) -> &mut Self {
        let end = *self.len + bytes.len();
        self.bytes[*self.len..end].copy_from_slice(bytes);
        *self.len = end;
        self
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.slice(&value.to_ne_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.slice(&value.to_ne_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.slice(&value.to_ne_bytes())
    }

    fn zeroes(&mut self, count: usize) -> &mut Self {
        self.bytes[*self.len..*self.len + count].fill(0);
        *self.len += count;
        self
    }

    /// Zeroes up to the end of the memory.
    fn fill(&mut self) {
        self.zeroes(self.bytes.len() - *self.len);
    }

    fn attr(&mut self, a: &Attr) -> &mut Self {
        self.u64(a.ino).u64(a.size).u64(a.blocks);
        self.u64(a.atime.seconds as u64).u64(a.mtime.seconds as u64).u64(a.ctime.seconds as u64);
        self.u32(a.atime.nanos).u32(a.mtime.nanos).u32(a.ctime.nanos);
        self.u32(a.mode).u32(a.nlink).u32(a.uid).u32(a.gid).u32(a.rdev).u32(a.blksize).u32(a.flags)
    }

    fn entry(&mut self, e: &Entry) -> &mut Self {
        self.u64(e.nodeid).u64(e.generation).u64(e.entry_valid.0.as_secs()).u64(e.attr_valid.0.as_secs());
        self.u32(e.entry_valid.0.subsec_nanos()).u32(e.attr_valid.0.subsec_nanos()).attr(&e.attr)
    }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
