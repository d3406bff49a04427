//! Records to make trees with.

use hayloft_model::{Content, Dentry, FileKind, Ino, InodeRow, Name, Record, Timestamp};

pub(crate) fn row(kind: FileKind, nlink: u32) -> InodeRow {
    let time = Timestamp { secs: 1_700_000_000, nanos: 5 };
    let (atime, mtime, ctime, btime) = (time, time, time, time);
    let made = InodeRow::new(kind.bits() | 0o644, nlink, Ino(0));
    InodeRow { uid: 1, gid: 2, atime, mtime, ctime, btime, ..made }
}

pub(crate) fn file(content: Content, size: u64) -> InodeRow {
    InodeRow { content, size, allocated: size, ..row(FileKind::Regular, 1) }
}

/// A file with a name in one directory.
pub(crate) fn file_in(home: u64, content: Content, size: u64) -> InodeRow {
    InodeRow { parent: Ino(home), ..file(content, size) }
}

pub(crate) fn directory(parent: u64, subdirectories: u32, next_cookie: u64) -> InodeRow {
    InodeRow { parent: Ino(parent), next_cookie, ..row(FileKind::Directory, 2 + subdirectories) }
}

pub(crate) fn put(ino: u64, row: InodeRow) -> Record {
    Record::PutInode(Ino(ino), Box::new(row))
}

pub(crate) fn link(parent: u64, name: &str, ino: u64, kind: FileKind, cookie: u64) -> Record {
    Record::PutDentry(Ino(parent), Name::new(name.as_bytes()), Dentry { ino: Ino(ino), kind, cookie })
}

/// Bytes that are the same for the same seed and cannot be compressed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
