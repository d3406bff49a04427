//! Rows as messages: the same encoding on the wire and in the tables.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field is as in `model`

use bytes::Bytes;
use prost::Message;

/// `hayloft_model::Dentry`.
#[derive(Clone, PartialEq, Message)]
pub struct DentryRow {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// Type bits of the mode.
    #[prost(uint32, tag = "2")]
    pub kind: u32,
    #[prost(uint64, tag = "3")]
    pub cookie: u64,
}

/// An extended attribute.
#[derive(Clone, PartialEq, Message)]
pub struct Xattr {
    #[prost(bytes = "bytes", tag = "1")]
    pub name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

/// `hayloft_model::InodeRow` with its number.
#[derive(Clone, PartialEq, Message)]
pub struct InodeRowMessage {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    #[prost(uint32, tag = "3")]
    pub uid: u32,
    #[prost(uint32, tag = "4")]
    pub gid: u32,
    #[prost(uint32, tag = "5")]
    pub nlink: u32,
    #[prost(uint32, tag = "6")]
    pub rdev: u32,
    #[prost(uint64, tag = "7")]
    pub size: u64,
    #[prost(uint64, tag = "8")]
    pub allocated: u64,
    /// Seconds, then nanoseconds, of atime, mtime, ctime and btime.
    #[prost(sint64, repeated, tag = "9")]
    pub times: Vec<i64>,
    #[prost(uint64, tag = "10")]
    pub parent: u64,
    #[prost(uint64, tag = "11")]
    pub next_cookie: u64,
    #[prost(message, repeated, tag = "12")]
    pub xattrs: Vec<Xattr>,
    /// Whole data of a small file.
    #[prost(bytes = "bytes", optional, tag = "13")]
    pub inline: Option<Bytes>,
    /// Packed block references of page 0, see [`crate::encode_blocks`].
    #[prost(bytes = "bytes", optional, tag = "14")]
    pub blocks: Option<Bytes>,
    /// Target of a symbolic link.
    #[prost(bytes = "bytes", optional, tag = "15")]
    pub target: Option<Bytes>,
    /// Made without a name, and without one so far.
    #[prost(bool, tag = "16")]
    pub unnamed: bool,
    /// There is data of a small file that was left out: see [`hayloft_model::Content::LeftOut`]. Never in the tables.
    #[prost(bool, tag = "17")]
    pub left_out: bool,
    /// Where a server keeps the data of a small file. Only in its tables: never sent.
    #[prost(bytes = "bytes", optional, tag = "18")]
    pub placed: Option<Bytes>,
}

/// What one mark has written: all that it takes to write it once more. Not a row; [`crate::Entry`] brings it.
#[derive(Clone, PartialEq, Message)]
pub struct WrittenEntry {
    /// Whose change, or batch, it was.
    #[prost(uint64, tag = "1")]
    pub session: u64,
    /// The number of the batch; 0 for a change.
    #[prost(uint64, tag = "2")]
    pub sequence: u64,
    /// How the usage changed, bytes and inodes.
    #[prost(sint64, tag = "3")]
    pub bytes: i64,
    #[prost(sint64, tag = "4")]
    pub inodes: i64,
    #[prost(message, repeated, tag = "5")]
    pub rows: Vec<NotedRow>,
}

/// A row that was written, or deleted.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NotedRow {
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub value: Option<Bytes>,
}

impl WrittenEntry {
    /// The inodes whose rows it writes, or in which it writes names or data.
    pub fn inos(&self) -> impl Iterator<Item = u64> {
        let rows = self.rows.iter().filter(|row| matches!(row.key.first(), Some(b'I' | b'D' | b'B')));
        rows.filter_map(|row| row.key.get(1..9)?.try_into().ok().map(u64::from_be_bytes))
    }

    /// The names that it gives, without the directories that they are in.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        let puts = self.rows.iter().filter(|row| row.value.is_some() && row.key.first() == Some(&b'D'));
        puts.filter_map(|row| row.key.get(9..))
    }
}
