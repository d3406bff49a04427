//! Numbers of the FUSE protocol, as in the kernel's `include/uapi/linux/fuse.h` (protocol 7).
//!
//! Messages are read and written field by field at their offsets, in the byte order of the machine.

/// Major version of the protocol spoken here.
pub(crate) const MAJOR: u32 = 7;
/// The newest minor version this crate knows of.
pub(crate) const MINOR_NEWEST: u32 = 45;
/// The oldest minor version accepted (Linux 5.4).
pub(crate) const MINOR_OLDEST: u32 = 31;

/// Size of `fuse_in_header`.
pub(crate) const IN_HEADER_SIZE: usize = 40;
/// Size of `fuse_out_header`.
pub(crate) const OUT_HEADER_SIZE: usize = 16;
/// The page size the protocol counts `max_pages` in.
pub(crate) const PAGE_SIZE: usize = 4096;

macro_rules! opcodes {
    ($($name:ident = $value:literal),* $(,)?) => {
        /// Opcodes (`enum fuse_opcode`).
        pub(crate) mod opcode {
            #![allow(dead_code)]
            $(pub(crate) const $name: u32 = $value;)*
        }

        /// The kernel's name of an opcode without `FUSE_`, or `UNKNOWN`.
        pub(crate) fn opcode_name(opcode: u32) -> &'static str {
            match opcode {
                $($value => stringify!($name),)*
                _ => "UNKNOWN",
            }
        }
    };
}

opcodes! {
    LOOKUP = 1, FORGET = 2, GETATTR = 3, SETATTR = 4, READLINK = 5, SYMLINK = 6, MKNOD = 8, MKDIR = 9,
    UNLINK = 10, RMDIR = 11, RENAME = 12, LINK = 13, OPEN = 14, READ = 15, WRITE = 16, STATFS = 17,
    RELEASE = 18, FSYNC = 20, SETXATTR = 21, GETXATTR = 22, LISTXATTR = 23, REMOVEXATTR = 24, FLUSH = 25,
    INIT = 26, OPENDIR = 27, READDIR = 28, RELEASEDIR = 29, FSYNCDIR = 30, GETLK = 31, SETLK = 32,
    SETLKW = 33, ACCESS = 34, CREATE = 35, INTERRUPT = 36, BMAP = 37, DESTROY = 38, IOCTL = 39, POLL = 40,
    NOTIFY_REPLY = 41, BATCH_FORGET = 42, FALLOCATE = 43, READDIRPLUS = 44, RENAME2 = 45, LSEEK = 46,
    COPY_FILE_RANGE = 47, SETUPMAPPING = 48, REMOVEMAPPING = 49, SYNCFS = 50, TMPFILE = 51, STATX = 52,
    COPY_FILE_RANGE_64 = 53,
}

/// One more than the largest opcode that is counted by itself.
pub(crate) const OPCODE_LIMIT: usize = 64;

/// Size of the structure with the fixed fields that follows the header of a request.
///
/// Over io_uring the kernel hands this structure over apart from the rest, over /dev/fuse in one piece.
pub(crate) fn fixed_size(opcode: u32) -> usize {
    use opcode::*;
    match opcode {
        GETATTR | RENAME2 | CREATE | TMPFILE | MKNOD | SETXATTR | FSYNC | FSYNCDIR => 16,
        SETATTR => 88,
        OPEN | OPENDIR | MKDIR | RENAME | LINK | GETXATTR | LISTXATTR | ACCESS | INTERRUPT | SYNCFS => 8,
        FORGET | BATCH_FORGET => 8,
        READ | WRITE | READDIR | READDIRPLUS => 40,
        RELEASE | RELEASEDIR | FLUSH | POLL | LSEEK | STATX => 24,
        GETLK | SETLK | SETLKW => 48,
        IOCTL | FALLOCATE => 32,
        COPY_FILE_RANGE | COPY_FILE_RANGE_64 => 56,
        BMAP => 16,
        _ => 0,
    }
}

/// Bits of `fuse_setattr_in.valid`.
pub(crate) mod fattr {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const LOCKOWNER: u32 = 1 << 9;
    pub(crate) const CTIME: u32 = 1 << 10;
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
}

/// Capabilities exchanged at INIT; bits 32 and up travel in `flags2`.
pub mod capability {
    /// Reads may be sent in parallel.
    pub const ASYNC_READ: u64 = 1 << 0;
    /// The file system keeps POSIX record locks.
    pub const POSIX_LOCKS: u64 = 1 << 1;
    /// OPEN carries O_TRUNC and the file system truncates.
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    /// LOOKUP of "." and ".." is answered (NFS export).
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    /// Writes larger than a page.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// The file system keeps flock(2) locks.
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    /// The kernel drops cached pages when attributes change.
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    /// READDIRPLUS is answered.
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    /// The kernel chooses between READDIR and READDIRPLUS.
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    /// Direct I/O may be sent in parallel.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// The kernel collects writes in its page cache.
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    /// OPEN may be answered with ENOSYS, once and for all.
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    /// Lookups and readdir in one directory may be sent in parallel.
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// The kernel enforces POSIX access control lists.
    pub const POSIX_ACL: u64 = 1 << 20;
    /// `max_pages` is negotiated.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// The kernel caches targets of symbolic links.
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    /// OPENDIR may be answered with ENOSYS, once and for all.
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    /// The kernel drops cached pages only when told to.
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    /// The file system clears setuid and setgid bits as the flags of a request say.
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// SETXATTR carries `setxattr_flags`.
    pub const SETXATTR_EXT: u64 = 1 << 29;
    /// `flags2` is valid.
    pub const INIT_EXT: u64 = 1 << 30;
    /// Entries can be expired rather than dropped.
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
    /// Files can be read and written by the kernel in a backing file.
    pub const PASSTHROUGH: u64 = 1 << 37;
    /// Requests travel over io_uring.
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Notification codes (`enum fuse_notify_code`).
pub(crate) mod notify {
    pub(crate) const INVAL_INODE: i32 = 2;
    pub(crate) const INVAL_ENTRY: i32 = 3;
    pub(crate) const STORE: i32 = 4;
    pub(crate) const DELETE: i32 = 6;
    pub(crate) const INC_EPOCH: i32 = 8;
    /// First minor version which knows `INC_EPOCH`.
    pub(crate) const INC_EPOCH_MINOR: u32 = 44;
    pub(crate) const PRUNE: i32 = 9;
    /// First minor version which knows `PRUNE`.
    pub(crate) const PRUNE_MINOR: u32 = 45;
    /// `fuse_notify_inval_entry_out.flags`: expire, don't drop.
    pub(crate) const EXPIRE_ONLY: u32 = 1;
}

/// A message was shorter than its opcode requires, or a name lacks its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Reads fields one after another.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = tail;
        Ok(u16::from_ne_bytes(*head))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = tail;
        Ok(u32::from_ne_bytes(*head))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = tail;
        Ok(u64::from_ne_bytes(*head))
    }

    pub(crate) fn skip(&mut self, count: usize) -> Result<(), Malformed> {
        self.0 = self.0.get(count..).ok_or(Malformed)?;
        Ok(())
    }
}

/// `fuse_in_header`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InHeader {
    pub(crate) len: u32,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) nodeid: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    /// Length of the extensions at the end, in units of 8 bytes.
    pub(crate) extensions: u16,
}

impl InHeader {
    pub(crate) fn parse(bytes: &[u8]) -> Result<InHeader, Malformed> {
        let mut fields = Fields(bytes);
        Ok(InHeader {
            len: fields.u32()?,
            opcode: fields.u32()?,
            unique: fields.u64()?,
            nodeid: fields.u64()?,
            uid: fields.u32()?,
            gid: fields.u32()?,
            pid: fields.u32()?,
            extensions: fields.u16()?,
        })
    }
}

/// `fuse_out_header` with the length filled in; `error` is 0 or a negative errno.
pub(crate) fn out_header(unique: u64, error: i32, body_len: usize) -> [u8; OUT_HEADER_SIZE] {
    let mut header = [0; OUT_HEADER_SIZE];
    header[0..4].copy_from_slice(&((OUT_HEADER_SIZE + body_len) as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    header
}
