//! Messages about versions of a volume's tree: snapshots, forks, going back, differences.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use prost::Message;

/// A volume as it is, or as it was: `VOLUME` or `VOLUME@SNAPSHOT`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Version {
    #[prost(string, tag = "1")]
    pub volume: String,
    /// Empty: as it is now.
    #[prost(string, tag = "2")]
    pub snapshot: String,
}

/// Makes a snapshot; answered by [`Snapshots`] with the one.
#[derive(Clone, PartialEq, Message)]
pub struct CreateSnapshot {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
    /// For people.
    #[prost(string, tag = "2")]
    pub note: String,
    /// Of what the server has: hosts are not asked for what they have not shipped.
    #[prost(bool, tag = "3")]
    pub as_stored: bool,
}

/// Lists the snapshots of a volume, or with a name of one of them that one; answered by [`Snapshots`].
#[derive(Clone, PartialEq, Message)]
pub struct ListSnapshots {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
}

/// Deletes a snapshot; refused with `Busy` while it is mounted.
#[derive(Clone, PartialEq, Message)]
pub struct DeleteSnapshot {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
}

/// Makes a volume that begins as a version of another one and shares what it stores; answered by [`crate::Volumes`] with it.
#[derive(Clone, PartialEq, Message)]
pub struct Fork {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
    #[prost(string, tag = "2")]
    pub name: String,
    /// As in [`CreateSnapshot`].
    #[prost(bool, tag = "3")]
    pub as_stored: bool,
}

/// Gives all hosts the tree of a snapshot instead of the present one, which is kept as a snapshot: answered by
/// [`Snapshots`] with that.
#[derive(Clone, PartialEq, Message)]
pub struct Rollback {
    #[prost(message, optional, tag = "1")]
    pub to: Option<Version>,
    /// The name of what is kept; empty: one that says when it was.
    #[prost(string, tag = "2")]
    pub keep_as: String,
}

/// Puts a fork in the place of the volume that it was made of, whose tree is kept as a snapshot: answered by [`Snapshots`]
/// with that.
#[derive(Clone, PartialEq, Message)]
pub struct Promote {
    #[prost(string, tag = "1")]
    pub fork: String,
    /// See [`Rollback::keep_as`].
    #[prost(string, tag = "2")]
    pub keep_as: String,
    /// The fork's id: another one that has got its name is refused. Empty: whichever has the name.
    #[prost(string, tag = "3")]
    pub id: String,
}

/// Some snapshots.
#[derive(Clone, PartialEq, Message)]
pub struct Snapshots {
    #[prost(message, repeated, tag = "1")]
    pub snapshots: Vec<SnapshotInfo>,
}

/// A snapshot.
#[derive(Clone, PartialEq, Message)]
pub struct SnapshotInfo {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
    /// Nanoseconds since the epoch.
    #[prost(int64, tag = "2")]
    pub created_nanos: i64,
    /// For people.
    #[prost(string, tag = "3")]
    pub note: String,
    /// Who has made it.
    #[prost(string, tag = "4")]
    pub by: String,
    /// Bytes of files in it.
    #[prost(uint64, tag = "5")]
    pub bytes: u64,
    #[prost(uint64, tag = "6")]
    pub inodes: u64,
    /// How often it is mounted.
    #[prost(uint64, tag = "7")]
    pub mounts: u64,
    /// Its name by content, `tree1-` and 64 digits; empty: nobody has asked for it.
    #[prost(string, tag = "8")]
    pub tree: String,
    /// Signatures of that name, in the format of ssh-keygen(1), armoured.
    #[prost(string, repeated, tag = "9")]
    pub signatures: Vec<String>,
}

/// Wants the name by content of a version; answered by [`Named`]. With a snapshot it is entered.
#[derive(Clone, PartialEq, Message)]
pub struct NameTree {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
    /// Of a snapshot that has a name already: from all rows, whatever is known.
    #[prost(bool, tag = "2")]
    pub anew: bool,
}

/// The name by content of a version.
#[derive(Clone, PartialEq, Message)]
pub struct Named {
    /// As it was worked out.
    #[prost(string, tag = "1")]
    pub tree: String,
    /// The snapshot as it is entered, with the name that it was given first; nothing of a volume as it is now.
    #[prost(message, optional, tag = "2")]
    pub snapshot: Option<SnapshotInfo>,
    /// Rows that were read for it.
    #[prost(uint64, tag = "3")]
    pub rows_read: u64,
}

/// Adds a signature of a snapshot's name; answered by [`Snapshots`] with it.
#[derive(Clone, PartialEq, Message)]
pub struct SignSnapshot {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
    /// The name that was signed.
    #[prost(string, tag = "2")]
    pub tree: String,
    /// See [`SnapshotInfo::signatures`].
    #[prost(string, tag = "3")]
    pub signature: String,
}

/// Wants what differs between two versions, in parts; answered by [`Differences`].
#[derive(Clone, PartialEq, Message)]
pub struct Diff {
    #[prost(message, optional, tag = "1")]
    pub from: Option<Version>,
    #[prost(message, optional, tag = "2")]
    pub to: Option<Version>,
    /// Only what is below this folder, relative to the root, without a slash at its ends; empty: all.
    #[prost(bytes = "bytes", tag = "3")]
    pub below: prost::bytes::Bytes,
    /// Times of modification count too: see [`difference::MODIFIED`].
    #[prost(bool, tag = "4")]
    pub times: bool,
}

/// What differs.
#[derive(Clone, PartialEq, Message)]
pub struct Differences {
    #[prost(message, repeated, tag = "1")]
    pub differences: Vec<Difference>,
    /// Another part follows.
    #[prost(bool, tag = "2")]
    pub more: bool,
    /// Rows that were read for it.
    #[prost(uint64, tag = "3")]
    pub rows_read: u64,
    /// Times of modification counted. Older servers do not know of that.
    #[prost(bool, tag = "4")]
    pub times: bool,
    /// Whether the second version came of the first one; none: the server does not know.
    #[prost(bool, optional, tag = "5")]
    pub descends: Option<bool>,
}

/// One thing that differs.
#[derive(Clone, PartialEq, Message)]
pub struct Difference {
    /// Where it was, relative to the root; none: it was not there.
    #[prost(bytes = "bytes", optional, tag = "1")]
    pub old_path: Option<prost::bytes::Bytes>,
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub new_path: Option<prost::bytes::Bytes>,
    /// Type and permission bits, before and after; 0: it was not, or is not, there.
    #[prost(uint32, tag = "3")]
    pub old_mode: u32,
    #[prost(uint32, tag = "4")]
    pub new_mode: u32,
    /// Bytes, before and after.
    #[prost(uint64, tag = "5")]
    pub old_size: u64,
    #[prost(uint64, tag = "6")]
    pub new_size: u64,
    /// Bits of what has changed, see [`difference`].
    #[prost(uint32, tag = "7")]
    pub changed: u32,
}

/// The bits of [`Difference::changed`].
pub mod difference {
    /// What is in the file, or where the symbolic link leads.
    pub const CONTENT: u32 = 1;
    /// Permission bits.
    pub const MODE: u32 = 2;
    /// User or group.
    pub const OWNER: u32 = 4;
    /// Extended attributes.
    pub const XATTRS: u32 = 8;
    /// It is of another type, or another device.
    pub const TYPE: u32 = 16;
    /// How many names it has.
    pub const LINKS: u32 = 32;
    /// Its name, or the folder that it is in; not set if only a folder above has another path.
    pub const RENAMED: u32 = 64;
    /// When it was modified; told only to who asks for it.
    pub const MODIFIED: u32 = 128;
}

/// Wants to know where a file of a snapshot is cut by content (`hayloft_tree::chunk`), a part of it at a time; answered by [`Cuts`].
#[derive(Clone, PartialEq, Message)]
pub struct CutFile {
    /// A snapshot: what is read must not change.
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
    /// The file, relative to the root, without a slash at its ends.
    #[prost(bytes = "bytes", tag = "2")]
    pub path: prost::bytes::Bytes,
    /// Where the first part begins that is wanted: 0, or where the last one has ended.
    #[prost(uint64, tag = "3")]
    pub begin: u64,
    /// Tags of groups of chunks that the asker knows (`hayloft_tree::chunk::tag`), 8 bytes each: these are not told, only named.
    #[prost(bytes = "bytes", tag = "4")]
    pub known: prost::bytes::Bytes,
}

/// Where a part of a file is cut.
#[derive(Clone, PartialEq, Message)]
pub struct Cuts {
    /// In the order of the file.
    #[prost(message, repeated, tag = "1")]
    pub groups: Vec<CutGroup>,
    /// Where the part ends.
    #[prost(uint64, tag = "2")]
    pub end: u64,
    /// Bytes of the file.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// The hash of the whole content, as the name of the tree has it.
    #[prost(bytes = "bytes", tag = "4")]
    pub content: prost::bytes::Bytes,
}

/// Chunks that lie together.
#[derive(Clone, PartialEq, Message)]
pub struct CutGroup {
    /// The tag of it, if the asker has named that: then nothing else is said.
    #[prost(bytes = "bytes", tag = "1")]
    pub tag: prost::bytes::Bytes,
    /// The chunks' names, 32 bytes each.
    #[prost(bytes = "bytes", tag = "2")]
    pub names: prost::bytes::Bytes,
    /// Their lengths.
    #[prost(uint32, repeated, tag = "3")]
    pub lengths: Vec<u32>,
}

/// Wants parts of a file of a snapshot; answered by [`FileParts`].
#[derive(Clone, PartialEq, Message)]
pub struct ReadParts {
    #[prost(message, optional, tag = "1")]
    pub of: Option<Version>,
    /// As in [`CutFile`].
    #[prost(bytes = "bytes", tag = "2")]
    pub path: prost::bytes::Bytes,
    /// What is to be compressed together.
    #[prost(message, repeated, tag = "3")]
    pub frames: Vec<FrameOf>,
}

/// Of which parts of a file a frame is made.
#[derive(Clone, PartialEq, Message)]
pub struct FrameOf {
    /// Where they begin.
    #[prost(uint64, repeated, tag = "1")]
    pub offsets: Vec<u64>,
    /// Their lengths.
    #[prost(uint32, repeated, tag = "2")]
    pub lengths: Vec<u32>,
}

/// Parts of a file.
#[derive(Clone, PartialEq, Message)]
pub struct FileParts {
    /// For each frame that was asked for its parts, one after the other, compressed by zstd.
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub frames: Vec<prost::bytes::Bytes>,
}

/// Wants everything that a session has changed up to now; answered by [`Shipped`].
#[derive(Clone, PartialEq, Message)]
pub struct Ship {
    #[prost(uint64, tag = "1")]
    pub number: u64,
}

/// Everything that had changed when [`Ship`] came is with the server.
#[derive(Clone, PartialEq, Message)]
pub struct Shipped {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Why it is not; empty: it is.
    #[prost(string, tag = "2")]
    pub failed: String,
}
