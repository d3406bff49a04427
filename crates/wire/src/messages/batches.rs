//! Messages by which a client ships what it has changed.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use bytes::Bytes;
use prost::{Message, Oneof};

use crate::messages::rows::{DentryRow, InodeRowMessage};
use crate::messages::session::VolumeStatus;

/// The next batch of the session's log. All content that it names and the server does not have came
/// before it on the same connection.
#[derive(Clone, PartialEq, Message)]
pub struct Commit {
    /// Its place: one more than the last one.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    /// The changes, beside those that came in [`Records`] before.
    #[prost(message, repeated, tag = "2")]
    pub records: Vec<RecordMessage>,
    /// Change of the volume's used bytes.
    #[prost(sint64, tag = "3")]
    pub bytes: i64,
    /// Change of the volume's used inodes.
    #[prost(sint64, tag = "4")]
    pub inodes: i64,
    /// Inodes in this batch that have no link but are open on the client: deleted when its session ends.
    #[prost(uint64, repeated, tag = "5")]
    pub orphans: Vec<u64>,
    /// What a session that was ended had not shipped, to be applied if nobody has changed since what it is about. 0: it
    /// is of the present session.
    #[prost(uint64, tag = "6")]
    pub restores: u64,
    /// Answered when it is durable, and not before.
    #[prost(bool, tag = "7")]
    pub durable: bool,
    /// The check of the whole batch, see [`BatchCheck`](crate::BatchCheck).
    #[prost(fixed32, optional, tag = "8")]
    pub check: Option<u32>,
}

/// Begins a batch: whatever came since the last commit and was not committed is forgotten. Gets no answer.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct BeginBatch {
    /// As in the commit that follows.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    /// As in the commit: a batch that gives room back may use what is reserved for that.
    #[prost(sint64, tag = "2")]
    pub bytes: i64,
    /// As in the commit.
    #[prost(sint64, tag = "3")]
    pub inodes: i64,
    /// It was refused for want of room, and others wait for it: it may exceed the quota, and use what is reserved.
    #[prost(bool, tag = "4")]
    pub pressing: bool,
}

/// Some of the records of the next commit, which would be too large for one message. Gets no answer.
#[derive(Clone, PartialEq, Message)]
pub struct Records {
    /// The changes.
    #[prost(message, repeated, tag = "1")]
    pub records: Vec<RecordMessage>,
}

/// One record of a batch.
#[derive(Clone, PartialEq, Message)]
pub struct RecordMessage {
    /// Which one.
    #[prost(oneof = "record_message::Body", tags = "1,2,3,4,5,6")]
    pub body: Option<record_message::Body>,
}

/// See [`RecordMessage`].
pub mod record_message {
    use super::*;

    /// The kinds of records, as in `hayloft_model::Record`.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Body {
        #[prost(message, tag = "1")]
        PutInode(InodeRowMessage),
        #[prost(uint64, tag = "2")]
        DeleteInode(u64),
        #[prost(message, tag = "3")]
        PutDentry(PutDentry),
        #[prost(message, tag = "4")]
        DeleteDentry(DeleteDentry),
        #[prost(message, tag = "5")]
        PutPage(PutPage),
        #[prost(message, tag = "6")]
        DeletePages(DeletePages),
    }
}

/// The name leads there now.
#[derive(Clone, PartialEq, Message)]
pub struct PutDentry {
    #[prost(uint64, tag = "1")]
    pub parent: u64,
    #[prost(bytes = "bytes", tag = "2")]
    pub name: Bytes,
    #[prost(message, optional, tag = "3")]
    pub dentry: Option<DentryRow>,
}

/// The name is gone.
#[derive(Clone, PartialEq, Message)]
pub struct DeleteDentry {
    #[prost(uint64, tag = "1")]
    pub parent: u64,
    #[prost(bytes = "bytes", tag = "2")]
    pub name: Bytes,
}

/// A page row is now this.
#[derive(Clone, PartialEq, Message)]
pub struct PutPage {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint64, tag = "2")]
    pub page: u64,
    #[prost(bytes = "bytes", tag = "3")]
    pub blocks: Bytes,
}

/// The page rows from here on are gone.
#[derive(Clone, PartialEq, Message)]
pub struct DeletePages {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint64, tag = "2")]
    pub from: u64,
}

/// Everything up to `sequence` is applied: what comes with the answer brings it back until it is durable.
#[derive(Clone, PartialEq, Message)]
pub struct Committed {
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    /// How full the volume is now.
    #[prost(message, optional, tag = "2")]
    pub status: Option<VolumeStatus>,
}
