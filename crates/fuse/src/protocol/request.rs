//! Requests, parsed in place.

use crate::protocol::abi::{Fields, InHeader, Malformed, fattr, opcode};

/// One request of the kernel. Names and data point into the message.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The number of the request.
    pub unique: u64,
    /// The inode it is about: the parent directory where a name is given. The root is 1.
    pub nodeid: u64,
    /// Effective user of the caller.
    pub uid: u32,
    /// Effective group of the caller.
    pub gid: u32,
    /// Thread of the caller; 0 when the kernel acts by itself or the caller is in another PID namespace.
    pub pid: u32,
    /// What is asked.
    pub op: Operation<'a>,
}

/// A point in time, since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Timestamp {
    /// Whole seconds; negative before 1970.
    pub seconds: i64,
    /// Nanoseconds after that, below 1,000,000,000.
    pub nanos: u32,
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeOrNow {
    /// The file system's present time.
    Now,
    /// This time.
    Time(Timestamp),
}

/// The attributes to change; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetAttr {
    /// Type and permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes (truncate).
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<TimeOrNow>,
    /// Last change of content.
    pub mtime: Option<TimeOrNow>,
    /// Last change of attributes; sent with write-back caching only.
    pub ctime: Option<Timestamp>,
    /// The open file it is done through (ftruncate and the like).
    pub fh: Option<u64>,
    /// Owner of locks, for mandatory locking.
    pub lock_owner: Option<u64>,
    /// Clear setuid, and setgid when the group may execute.
    pub kill_suidgid: bool,
}

/// A record or flock(2) lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lock {
    /// First byte.
    pub start: u64,
    /// Last byte, included; `u64::MAX >> 1` means to the end.
    pub end: u64,
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub kind: i32,
    /// Process which holds the lock (for an answer to GETLK).
    pub pid: u32,
}

/// What a request asks. Fields carry the names and values of `fuse(4)` and the calls behind them.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum Operation<'a> {
    Lookup {
        name: &'a [u8],
    },
    Getattr {
        fh: Option<u64>,
    },
    Setattr(SetAttr),
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        name: &'a [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: &'a [u8],
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    /// RENAME and RENAME2; `flags` as in `renameat2(2)`.
    Rename {
        name: &'a [u8],
        new_parent: u64,
        new_name: &'a [u8],
        flags: u32,
    },
    /// A further name in directory `nodeid` for inode `ino`.
    Link {
        ino: u64,
        new_name: &'a [u8],
    },
    /// `open_flags` bit 0: clear setuid and setgid.
    Open {
        flags: u32,
        open_flags: u32,
    },
    Read {
        fh: u64,
        offset: u64,
        size: u32,
        flags: u32,
        lock_owner: Option<u64>,
    },
    /// `write_flags`: see [`write_flags`].
    Write {
        fh: u64,
        offset: u64,
        data: &'a [u8],
        write_flags: u32,
        flags: u32,
        lock_owner: Option<u64>,
    },
    Statfs,
    /// `flush` and `flock_unlock` are the release flags.
    Release {
        fh: u64,
        flags: u32,
        flush: bool,
        flock_unlock: bool,
        lock_owner: u64,
    },
    Fsync {
        fh: u64,
        datasync: bool,
    },
    /// `setxattr_flags` bit 0: clear setgid.
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
        setxattr_flags: u32,
    },
    /// Size 0 asks for the size only: answer with `Reply::xattr_size`.
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    /// Size 0 asks for the size only: answer with `Reply::xattr_size`.
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    Flush {
        fh: u64,
        lock_owner: u64,
    },
    Opendir {
        flags: u32,
    },
    Readdir {
        fh: u64,
        offset: u64,
        size: u32,
    },
    Readdirplus {
        fh: u64,
        offset: u64,
        size: u32,
    },
    Releasedir {
        fh: u64,
        flags: u32,
    },
    Fsyncdir {
        fh: u64,
        datasync: bool,
    },
    Getlk {
        fh: u64,
        owner: u64,
        lock: Lock,
    },
    Setlk {
        fh: u64,
        owner: u64,
        lock: Lock,
        flock: bool,
    },
    /// May block until the lock is free. These wait on threads of their own, apart from the pool of the rest.
    Setlkw {
        fh: u64,
        owner: u64,
        lock: Lock,
        flock: bool,
    },
    Access {
        mask: u32,
    },
    Create {
        name: &'a [u8],
        mode: u32,
        umask: u32,
        flags: u32,
        open_flags: u32,
    },
    /// A file without a name in directory `nodeid`; the answer is that of a create. `name` means nothing.
    Tmpfile {
        name: &'a [u8],
        mode: u32,
        umask: u32,
        flags: u32,
        open_flags: u32,
    },
    Ioctl {
        fh: u64,
        flags: u32,
        cmd: u32,
        arg: u64,
        data: &'a [u8],
        out_size: u32,
    },
    Poll {
        fh: u64,
        kh: u64,
        flags: u32,
        events: u32,
    },
    Fallocate {
        fh: u64,
        offset: u64,
        length: u64,
        mode: u32,
    },
    Lseek {
        fh: u64,
        offset: u64,
        whence: u32,
    },
    /// COPY_FILE_RANGE and COPY_FILE_RANGE_64; the source is `nodeid`. Answer with `Reply::copied`.
    CopyFileRange {
        fh: u64,
        offset: u64,
        to: u64,
        to_fh: u64,
        to_offset: u64,
        length: u64,
        flags: u64,
    },
    Syncfs,
    Statx {
        fh: Option<u64>,
        flags: u32,
        mask: u32,
    },
    /// Any other opcode; ENOSYS is the right answer.
    Unknown(u32),
}

/// Bits of `write_flags` of [`Operation::Write`].
pub mod write_flags {
    /// From the page cache; the file handle is a guess.
    pub const CACHE: u32 = 1 << 0;
    /// Clear setuid, and setgid when the group may execute.
    pub const KILL_SUIDGID: u32 = 1 << 2;
}

const GETATTR_FH: u32 = 1;
const LOCK_OWNER: u32 = 1 << 1;
const RELEASE_FLUSH: u32 = 1;
const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
const FSYNC_DATASYNC: u32 = 1;
const LOCK_FLOCK: u32 = 1;

impl<'a> Request<'a> {
    /// Parses a request from its fixed fields and the rest. The rest ends where the extensions begin.
    pub(crate) fn parse(
        header: &InHeader,
        fixed: &'a [u8],
        rest: &'a [u8],
        setxattr_ext: bool,
    ) -> Result<Self, Malformed> {
        let len = rest.len().checked_sub(usize::from(header.extensions) * 8).ok_or(Malformed)?;
        let op = Operation::parse(header.opcode, Fields(fixed), &rest[..len], setxattr_ext)?;
        let InHeader { unique, nodeid, uid, gid, pid, .. } = *header;
        Ok(Request { unique, nodeid, uid, gid, pid, op })
    }
}

/// Splits off a name that ends in NUL.
fn name(rest: &[u8]) -> Result<(&[u8], &[u8]), Malformed> {
    let end = rest.iter().position(|byte| *byte == 0).ok_or(Malformed)?;
    Ok((&rest[..end], &rest[end + 1..]))
}

fn only_name(rest: &[u8]) -> Result<&[u8], Malformed> {
    Ok(name(rest)?.0)
}

fn two_names(rest: &[u8]) -> Result<(&[u8], &[u8]), Malformed> {
    let (first, rest) = name(rest)?;
    Ok((first, name(rest)?.0))
}

impl<'a> Operation<'a> {
    fn parse(opcode: u32, mut f: Fields<'_>, rest: &'a [u8], setxattr_ext: bool) -> Result<Self, Malformed> {
        use opcode::*;
        Ok(match opcode {
            LOOKUP => Operation::Lookup { name: only_name(rest)? },
            GETATTR => {
                let flags = f.u32()?;
                f.skip(4)?;
                Operation::Getattr { fh: given(flags & GETATTR_FH, f.u64()?) }
            }
            SETATTR => Operation::Setattr(setattr(f)?),
            READLINK => Operation::Readlink,
            SYMLINK => {
                let (name, target) = two_names(rest)?;
                Operation::Symlink { name, target }
            }
            MKNOD => {
                Operation::Mknod { mode: f.u32()?, rdev: f.u32()?, umask: f.u32()?, name: only_name(rest)? }
            }
            MKDIR => Operation::Mkdir { mode: f.u32()?, umask: f.u32()?, name: only_name(rest)? },
            UNLINK => Operation::Unlink { name: only_name(rest)? },
            RMDIR => Operation::Rmdir { name: only_name(rest)? },
            RENAME | RENAME2 => {
                let new_parent = f.u64()?;
                let flags = if opcode == RENAME2 { f.u32()? } else { 0 };
                let (name, new_name) = two_names(rest)?;
                Operation::Rename { name, new_parent, new_name, flags }
            }
            LINK => Operation::Link { ino: f.u64()?, new_name: only_name(rest)? },
            OPEN => Operation::Open { flags: f.u32()?, open_flags: f.u32()? },
            OPENDIR => Operation::Opendir { flags: f.u32()? },
            READ => {
                let (fh, offset, size, read_flags) = (f.u64()?, f.u64()?, f.u32()?, f.u32()?);
                let lock_owner = given(read_flags & LOCK_OWNER, f.u64()?);
                Operation::Read { fh, offset, size, flags: f.u32()?, lock_owner }
            }
            READDIR => Operation::Readdir { fh: f.u64()?, offset: f.u64()?, size: f.u32()? },
            READDIRPLUS => Operation::Readdirplus { fh: f.u64()?, offset: f.u64()?, size: f.u32()? },
            WRITE => {
                let (fh, offset, size, write_flags) = (f.u64()?, f.u64()?, f.u32()?, f.u32()?);
                let lock_owner = given(write_flags & LOCK_OWNER, f.u64()?);
                let data = rest.get(..size as usize).ok_or(Malformed)?;
                Operation::Write { fh, offset, data, write_flags, flags: f.u32()?, lock_owner }
            }
            STATFS => Operation::Statfs,
            RELEASE => {
                let (fh, flags, release_flags, lock_owner) = (f.u64()?, f.u32()?, f.u32()?, f.u64()?);
                let flush = release_flags & RELEASE_FLUSH != 0;
                let flock_unlock = release_flags & RELEASE_FLOCK_UNLOCK != 0;
                Operation::Release { fh, flags, flush, flock_unlock, lock_owner }
            }
            RELEASEDIR => Operation::Releasedir { fh: f.u64()?, flags: f.u32()? },
            FSYNC => Operation::Fsync { fh: f.u64()?, datasync: f.u32()? & FSYNC_DATASYNC != 0 },
            FSYNCDIR => Operation::Fsyncdir { fh: f.u64()?, datasync: f.u32()? & FSYNC_DATASYNC != 0 },
            SETXATTR => {
                let (size, flags, wide) = (f.u32()?, f.u32()?, f.u32());
                let setxattr_flags = if setxattr_ext { wide? } else { 0 };
                let (name, value) = name(rest)?;
                let value = value.get(..size as usize).ok_or(Malformed)?;
                Operation::Setxattr { name, value, flags, setxattr_flags }
            }
            GETXATTR => Operation::Getxattr { size: f.u32()?, name: only_name(rest)? },
            LISTXATTR => Operation::Listxattr { size: f.u32()? },
            REMOVEXATTR => Operation::Removexattr { name: only_name(rest)? },
            FLUSH => {
                let fh = f.u64()?;
                f.skip(8)?;
                Operation::Flush { fh, lock_owner: f.u64()? }
            }
            GETLK | SETLK | SETLKW => lock(opcode, f)?,
            ACCESS => Operation::Access { mask: f.u32()? },
            CREATE | TMPFILE => {
                let (flags, mode, umask, open_flags) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
                let name = only_name(rest)?;
                if opcode == CREATE {
                    Operation::Create { name, mode, umask, flags, open_flags }
                } else {
                    Operation::Tmpfile { name, mode, umask, flags, open_flags }
                }
            }
            IOCTL => {
                let (fh, flags, cmd, arg) = (f.u64()?, f.u32()?, f.u32()?, f.u64()?);
                let (in_size, out_size) = (f.u32()?, f.u32()?);
                let data = rest.get(..in_size as usize).ok_or(Malformed)?;
                Operation::Ioctl { fh, flags, cmd, arg, data, out_size }
            }
            POLL => Operation::Poll { fh: f.u64()?, kh: f.u64()?, flags: f.u32()?, events: f.u32()? },
            FALLOCATE => {
                Operation::Fallocate { fh: f.u64()?, offset: f.u64()?, length: f.u64()?, mode: f.u32()? }
            }
            LSEEK => Operation::Lseek { fh: f.u64()?, offset: f.u64()?, whence: f.u32()? },
            COPY_FILE_RANGE | COPY_FILE_RANGE_64 => Operation::CopyFileRange {
                fh: f.u64()?,
                offset: f.u64()?,
                to: f.u64()?,
                to_fh: f.u64()?,
                to_offset: f.u64()?,
                length: f.u64()?,
                flags: f.u64()?,
            },
            SYNCFS => Operation::Syncfs,
            STATX => {
                let getattr_flags = f.u32()?;
                f.skip(4)?;
                let fh = given(getattr_flags & GETATTR_FH, f.u64()?);
                Operation::Statx { fh, flags: f.u32()?, mask: f.u32()? }
            }
            other => Operation::Unknown(other),
        })
    }
}

fn given<T>(bit: u32, value: T) -> Option<T> {
    (bit != 0).then_some(value)
}

fn setattr(mut f: Fields<'_>) -> Result<SetAttr, Malformed> {
    let valid = f.u32()?;
    f.skip(4)?;
    let (fh, size, lock_owner) = (f.u64()?, f.u64()?, f.u64()?);
    let seconds = [f.u64()?, f.u64()?, f.u64()?];
    let nanos = [f.u32()?, f.u32()?, f.u32()?];
    let mode = f.u32()?;
    f.skip(4)?;
    let (uid, gid) = (f.u32()?, f.u32()?);
    let timestamp = |i: usize| Timestamp { seconds: seconds[i] as i64, nanos: nanos[i] };
    let time = |bit, now, i| match (valid & bit != 0, valid & now != 0) {
        (false, _) => None,
        (true, true) => Some(TimeOrNow::Now),
        (true, false) => Some(TimeOrNow::Time(timestamp(i))),
    };
    Ok(SetAttr {
        mode: given(valid & fattr::MODE, mode),
        uid: given(valid & fattr::UID, uid),
        gid: given(valid & fattr::GID, gid),
        size: given(valid & fattr::SIZE, size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, 0),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, 1),
        ctime: given(valid & fattr::CTIME, timestamp(2)),
        fh: given(valid & fattr::FH, fh),
        lock_owner: given(valid & fattr::LOCKOWNER, lock_owner),
        kill_suidgid: valid & fattr::KILL_SUIDGID != 0,
    })
}

fn lock<'a>(opcode: u32, mut f: Fields<'_>) -> Result<Operation<'a>, Malformed> {
    let (fh, owner) = (f.u64()?, f.u64()?);
    let lock = Lock { start: f.u64()?, end: f.u64()?, kind: f.u32()? as i32, pid: f.u32()? };
    let flock = f.u32()? & LOCK_FLOCK != 0;
    Ok(match opcode {
        opcode::GETLK => Operation::Getlk { fh, owner, lock },
        opcode::SETLK => Operation::Setlk { fh, owner, lock, flock },
        _ => Operation::Setlkw { fh, owner, lock, flock },
    })
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
