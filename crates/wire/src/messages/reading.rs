//! Messages by which a client comes to know what is in a volume: listings, rows, contents.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use bytes::Bytes;
use prost::Message;

use crate::messages::rows::InodeRowMessage;

/// Wants a directory's listing with its children's rows, small contents, and likely neighbours
/// (directories below it), up to a budget. The answer carries a grant of each directory in it.
#[derive(Clone, PartialEq, Message)]
pub struct Enter {
    /// The directory.
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    /// How many bytes of content and neighbours may come along; the listing itself comes whole.
    #[prost(uint64, tag = "2")]
    pub budget_bytes: u64,
    /// No content is wanted: nobody seems to be reading files.
    #[prost(bool, tag = "3")]
    pub names_only: bool,
    /// Not the listing, but only the rows of these files with their content, as far as the budget goes: of those that nobody
    /// else owns.
    #[prost(uint64, repeated, tag = "4")]
    pub files: Vec<u64>,
    /// Their homes, in the same order: others than the directory may come along.
    #[prost(uint64, repeated, tag = "5")]
    pub homes: Vec<u64>,
    /// Of a split directory, only the names of this stem are wanted. Empty: all.
    #[prost(bytes = "bytes", tag = "6")]
    pub stem: Bytes,
    /// All names are wanted: if the directory is split, it is made whole.
    #[prost(bool, tag = "7")]
    pub whole: bool,
}

/// Some directories.
#[derive(Clone, PartialEq, Message)]
pub struct Listings {
    /// The directory that was asked for is the first one of the first part.
    #[prost(message, repeated, tag = "1")]
    pub dirs: Vec<Listing>,
    /// Contents that blocks of the children name, as far as the budget went.
    #[prost(message, repeated, tag = "2")]
    pub contents: Vec<Chunk>,
    /// Another part with the same request number follows.
    #[prost(bool, tag = "3")]
    pub more: bool,
    /// In the last part: the directory that would have come next, which a walk through the tree wants then. 0: none.
    #[prost(uint64, tag = "4")]
    pub next: u64,
    /// Rows of files that were asked for, as [`InodeRowMessage`](crate::InodeRowMessage)s.
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub files: Vec<Bytes>,
}

/// One directory, whole; a large one may be spread over several parts: `complete` is on its last.
#[derive(Clone, PartialEq, Message)]
pub struct Listing {
    /// The directory.
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    /// Some of its entries, in the order of their cookies, as [`crate::listing`] packs them. (Field 2 had them as messages.)
    #[prost(bytes = "bytes", tag = "5")]
    pub packed: Bytes,
    /// All entries have been said now.
    #[prost(bool, tag = "3")]
    pub complete: bool,
    /// The session owns the directory from now on; else it is a reader of it.
    #[prost(bool, tag = "4")]
    pub own: bool,
    /// These are the names of a stem; `dir` is their slot.
    #[prost(bytes = "bytes", tag = "8")]
    pub stem: Bytes,
    /// The directory is split: this is its row, and there are no entries.
    #[prost(message, optional, tag = "6")]
    pub split: Option<InodeRowMessage>,
    /// The directory is not split, though names of a stem were asked for.
    #[prost(bool, tag = "7")]
    pub whole: bool,
    /// Changes of it, or in it, of which others have not heard: as [`crate::Apply::change`].
    #[prost(uint64, repeated, tag = "9")]
    pub unheard: Vec<u64>,
}

/// Wants one inode's row.
#[derive(Clone, PartialEq, Message)]
pub struct FetchInode {
    /// The inode.
    #[prost(uint64, tag = "1")]
    pub ino: u64,
}

/// One inode's row.
#[derive(Clone, PartialEq, Message)]
pub struct InodeAnswer {
    /// The row.
    #[prost(message, optional, tag = "1")]
    pub inode: Option<InodeRowMessage>,
    /// The session owns it from now on (directories only); else it is a reader of it, or of its home.
    #[prost(bool, tag = "2")]
    pub own: bool,
    /// It is a split directory.
    #[prost(bool, tag = "3")]
    pub split: bool,
    /// Changes of it, or in it, of which others have not heard: as [`crate::Apply::change`].
    #[prost(uint64, repeated, tag = "4")]
    pub unheard: Vec<u64>,
}

/// Wants the page rows 1 and later of a file.
#[derive(Clone, PartialEq, Message)]
pub struct FetchPages {
    /// The file.
    #[prost(uint64, tag = "1")]
    pub ino: u64,
}

/// Page rows of a file, all of them.
#[derive(Clone, PartialEq, Message)]
pub struct Pages {
    /// The rows.
    #[prost(message, repeated, tag = "1")]
    pub pages: Vec<PageRow>,
}

/// One page row.
#[derive(Clone, PartialEq, Message)]
pub struct PageRow {
    /// Its number, 1 or more.
    #[prost(uint64, tag = "1")]
    pub page: u64,
    /// Packed block references, see [`crate::encode_blocks`].
    #[prost(bytes = "bytes", tag = "2")]
    pub blocks: Bytes,
}

/// Wants pieces of content by name.
#[derive(Clone, PartialEq, Message)]
pub struct FetchContent {
    /// Hashes, 32 bytes each, one after the other.
    #[prost(bytes = "bytes", tag = "1")]
    pub hashes: Bytes,
}

/// Pieces of content.
#[derive(Clone, PartialEq, Message)]
pub struct Contents {
    /// In the order asked.
    #[prost(message, repeated, tag = "1")]
    pub chunks: Vec<Chunk>,
}

/// A piece of content as it travels and is stored.
#[derive(Clone, PartialEq, Message)]
pub struct Chunk {
    /// BLAKE3 of the uncompressed bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub hash: Bytes,
    /// Length uncompressed.
    #[prost(uint32, tag = "2")]
    pub len: u32,
    /// 0: as is, 1: LZ4 block.
    #[prost(uint32, tag = "3")]
    pub codec: u32,
    /// The bytes, encoded.
    #[prost(bytes = "bytes", tag = "4")]
    pub payload: Bytes,
}
