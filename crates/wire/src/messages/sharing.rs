//! Messages by which hosts share a volume; see `docs/sharing.md`.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use bytes::Bytes;
use prost::{Message, Oneof};

use crate::messages::batches::RecordMessage;
use crate::messages::locks::LockMessage;

/// `hayloft_model::grants::Object`.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ObjectMessage {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// A directory; else a file (anything that is no directory).
    #[prost(bool, tag = "2")]
    pub directory: bool,
    /// A file's home directory; 0 for a stray.
    #[prost(uint64, tag = "3")]
    pub home: u64,
}

/// Wants to own an object. Answered by [`Acquired`]; what changes by it comes as an event before.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Acquire {
    #[prost(message, optional, tag = "1")]
    pub object: Option<ObjectMessage>,
}

/// Answers [`Acquire`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Acquired {
    /// It is owned now; else it is shared: changes go to the server.
    #[prost(bool, tag = "1")]
    pub owned: bool,
}

/// Wants an operation executed at the server. Answered by [`Changed`]; its effects come as an event before.
#[derive(Clone, PartialEq, Message)]
pub struct ChangeRequest {
    /// No request of this session below this number will be sent again: their outcomes can be forgotten.
    #[prost(uint64, tag = "1")]
    pub forget_below: u64,
    /// Only the server may do it: the session is not to be made an owner instead.
    #[prost(bool, tag = "10")]
    pub execute: bool,
    #[prost(oneof = "change_request::Operation", tags = "2,3,4,5,6,7,8,9")]
    pub operation: Option<change_request::Operation>,
}

/// See [`ChangeRequest`].
pub mod change_request {
    use super::*;

    /// As `hayloft_model::Change`.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Operation {
        #[prost(message, tag = "2")]
        Create(CreateChange),
        #[prost(message, tag = "3")]
        Link(LinkChange),
        #[prost(message, tag = "4")]
        Unlink(PlaceMessage),
        #[prost(message, tag = "5")]
        Rmdir(PlaceMessage),
        #[prost(message, tag = "6")]
        Rename(RenameChange),
        #[prost(message, tag = "7")]
        SetAttributes(SetAttributesChange),
        #[prost(message, tag = "8")]
        SetXattr(SetXattrChange),
        #[prost(message, tag = "9")]
        RemoveXattr(RemoveXattrChange),
    }
}

/// A name in a directory.
#[derive(Clone, PartialEq, Message)]
pub struct PlaceMessage {
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    #[prost(bytes = "bytes", tag = "2")]
    pub name: Bytes,
}

/// Makes an inode.
#[derive(Clone, PartialEq, Message)]
pub struct CreateChange {
    #[prost(message, optional, tag = "1")]
    pub place: Option<PlaceMessage>,
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    #[prost(uint32, tag = "3")]
    pub uid: u32,
    #[prost(uint32, tag = "4")]
    pub gid: u32,
    #[prost(uint32, tag = "5")]
    pub rdev: u32,
    #[prost(bytes = "bytes", optional, tag = "6")]
    pub target: Option<Bytes>,
}

/// Gives an inode one more name.
#[derive(Clone, PartialEq, Message)]
pub struct LinkChange {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(message, optional, tag = "2")]
    pub place: Option<PlaceMessage>,
}

/// Moves a name.
#[derive(Clone, PartialEq, Message)]
pub struct RenameChange {
    #[prost(message, optional, tag = "1")]
    pub from: Option<PlaceMessage>,
    #[prost(message, optional, tag = "2")]
    pub to: Option<PlaceMessage>,
    #[prost(bool, tag = "3")]
    pub no_replace: bool,
    #[prost(bool, tag = "4")]
    pub exchange: bool,
    #[prost(bool, tag = "5")]
    pub whiteout: bool,
}

/// Changes attributes of an inode, never its size.
#[derive(Clone, PartialEq, Message)]
pub struct SetAttributesChange {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint32, optional, tag = "2")]
    pub mode: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub uid: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    pub gid: Option<u32>,
    /// Seconds and nanoseconds.
    #[prost(sint64, repeated, tag = "5")]
    pub atime: Vec<i64>,
    /// Seconds and nanoseconds.
    #[prost(sint64, repeated, tag = "6")]
    pub mtime: Vec<i64>,
    #[prost(bool, tag = "7")]
    pub kill_privileges: bool,
}

/// Sets an extended attribute.
#[derive(Clone, PartialEq, Message)]
pub struct SetXattrChange {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(bytes = "bytes", tag = "2")]
    pub name: Bytes,
    #[prost(bytes = "bytes", tag = "3")]
    pub value: Bytes,
    #[prost(bool, tag = "4")]
    pub create: bool,
    #[prost(bool, tag = "5")]
    pub replace: bool,
}

/// Removes an extended attribute.
#[derive(Clone, PartialEq, Message)]
pub struct RemoveXattrChange {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(bytes = "bytes", tag = "2")]
    pub name: Bytes,
}

/// Answers [`ChangeRequest`].
#[derive(Clone, PartialEq, Message)]
pub struct Changed {
    /// 0: executed (or `yours`); else a `TreeError`, see `hayloft_wire::error_of`; nothing was changed.
    #[prost(uint32, tag = "1")]
    pub error: u32,
    /// The inode that was made.
    #[prost(uint64, tag = "2")]
    pub ino: u64,
    /// Not executed: the directories are the session's own now, it does the operation itself.
    #[prost(bool, tag = "3")]
    pub yours: bool,
    /// Not executed: the directory is split now, the session does the operation itself when it has the slots.
    #[prost(bool, tag = "4")]
    pub split: bool,
    /// It says how these are, and others have not heard of that yet: nobody is told before [`Hear`] about them is answered.
    #[prost(uint64, repeated, tag = "5")]
    pub unheard: Vec<u64>,
}

/// Something that a client has to apply, in the order of the stream, and to acknowledge by [`Ack`].
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// 1, 2, 3, ... of the connection's claim.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    #[prost(oneof = "event::Body", tags = "2,3,4")]
    pub body: Option<event::Body>,
}

/// See [`Event`].
pub mod event {
    use super::*;

    /// The kinds of events.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Body {
        /// Something was changed, or granted.
        #[prost(message, tag = "2")]
        Apply(Apply),
        /// Forget the rows and data of these inodes.
        #[prost(message, tag = "3")]
        Drop(DropRows),
        /// Stop owning, or holding, an object.
        #[prost(message, tag = "4")]
        Recall(Recall),
    }
}

/// Rows that have changed, or become known, and what the session owns from now on.
#[derive(Clone, PartialEq, Message)]
pub struct Apply {
    #[prost(message, repeated, tag = "1")]
    pub records: Vec<RecordMessage>,
    #[prost(message, repeated, tag = "2")]
    pub own: Vec<ObjectMessage>,
    /// Inodes whose rows changed in a way that the session is not told: it forgets them.
    #[prost(uint64, repeated, tag = "3")]
    pub forget: Vec<u64>,
    /// It is what the session asked for itself: the kernel that did the call knows of it.
    #[prost(bool, tag = "4")]
    pub asked: bool,
    /// The number of the change, if others have not heard of it yet: it is shown to nobody before
    /// [`crate::ServerMessage::heard`] names it, or [`Hear`] is answered. 0: they have.
    #[prost(uint64, tag = "5")]
    pub change: u64,
}

/// Waits until all others have heard of a change, and of all that has changed up to now of some inodes.
#[derive(Clone, PartialEq, Message)]
pub struct Hear {
    /// See [`Apply::change`]; 0: none.
    #[prost(uint64, tag = "1")]
    pub change: u64,
    /// Inodes, or directories with their names.
    #[prost(uint64, repeated, tag = "2")]
    pub inos: Vec<u64>,
}

/// Rows to forget.
#[derive(Clone, PartialEq, Message)]
pub struct DropRows {
    #[prost(uint64, repeated, tag = "1")]
    pub inos: Vec<u64>,
}

/// Somebody else needs an object.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Recall {
    #[prost(message, optional, tag = "1")]
    pub object: Option<ObjectMessage>,
    /// Keep what is known of it, as a reader.
    #[prost(bool, tag = "2")]
    pub keep_read: bool,
}

/// Events are applied, here and in the kernel's caches. Gets no answer.
#[derive(Clone, PartialEq, Message)]
pub struct Ack {
    /// Their numbers. A recall is acknowledged alone.
    #[prost(uint64, repeated, tag = "1")]
    pub events: Vec<u64>,
    /// Inodes that the events took the name or the cover of, and that the kernel still knows.
    #[prost(uint64, repeated, tag = "2")]
    pub in_use: Vec<u64>,
}

/// The kernel knows these inodes no more, which were reported in use. Gets no answer.
#[derive(Clone, PartialEq, Message)]
pub struct LetGo {
    #[prost(uint64, repeated, tag = "1")]
    pub inos: Vec<u64>,
}

/// The session would rather not own these files, each owned by itself: they are recalled. Gets no answer.
#[derive(Clone, PartialEq, Message)]
pub struct Release {
    #[prost(uint64, repeated, tag = "1")]
    pub inos: Vec<u64>,
}

/// The session does not own these files any more, each owned by itself: what it had changed of them is stored. Gets no
/// answer.
#[derive(Clone, PartialEq, Message)]
pub struct GiveBack {
    #[prost(uint64, repeated, tag = "1")]
    pub inos: Vec<u64>,
    /// The last event of the connection that the session had applied then.
    #[prost(uint64, tag = "2")]
    pub seen: u64,
}

/// The first message after a welcome: what the session owns; everything else it has forgotten. Answered by
/// [`Claimed`] when requests are served.
#[derive(Clone, PartialEq, Message)]
pub struct Claim {
    #[prost(message, repeated, tag = "1")]
    pub own: Vec<ObjectMessage>,
    /// Inodes in use whose names or cover are gone.
    #[prost(uint64, repeated, tag = "2")]
    pub in_use: Vec<u64>,
    /// Locks that programs hold.
    #[prost(message, repeated, tag = "3")]
    pub locks: Vec<LockMessage>,
    /// Entries of other openings of the volume that the session keeps.
    #[prost(message, repeated, tag = "4")]
    pub entries: Vec<Entry>,
}

/// Answers [`Claim`]: what was brought with it is durable.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Claimed {
    /// The last batch of the session that is applied, also if only others have brought it back.
    #[prost(uint64, tag = "1")]
    pub last_sequence: u64,
}

/// What one mark has written, see `hayloft_model::replay`: kept by clients, read by servers.
#[derive(Clone, PartialEq, Message)]
pub struct Entry {
    /// In which opening of the volume.
    #[prost(fixed64, tag = "1")]
    pub opening: u64,
    /// Its mark.
    #[prost(uint64, tag = "2")]
    pub mark: u64,
    /// What was written, as only servers read it.
    #[prost(bytes = "bytes", tag = "3")]
    pub written: Bytes,
    /// Proves that a server of the volume has made it.
    #[prost(bytes = "bytes", tag = "4")]
    pub seal: Bytes,
}

/// Waits until everything up to a mark of an opening is durable. Answered by [`crate::Done`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Sync {
    #[prost(fixed64, tag = "1")]
    pub opening: u64,
    #[prost(uint64, tag = "2")]
    pub mark: u64,
}

/// A keep-alive, answered by [`Pong`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Ping {}

/// Answers [`Ping`].
#[derive(Clone, PartialEq, Message)]
pub struct Pong {
    /// The server's clock, nanoseconds since the epoch.
    #[prost(sint64, tag = "1")]
    pub server_time_nanos: i64,
    /// Inodes that the session has said its kernel knows, and that have no name any more: it may let go of those that nobody has open
    /// there. Told again after a while; a part of them where there are many. Said to those with [`crate::LETS_GO`].
    #[prost(uint64, repeated, tag = "2")]
    pub nameless: Vec<u64>,
}

/// A session whose process is proved to be dead, by the machine that it ran on: it can end. Answered by
/// [`crate::Done`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Bury {
    #[prost(uint64, tag = "1")]
    pub session: u64,
}

/// A session that has no connection at the moment.
#[derive(Clone, PartialEq, Message)]
pub struct LostPeer {
    #[prost(uint64, tag = "1")]
    pub session: u64,
    #[prost(string, tag = "2")]
    pub host_id: String,
    #[prost(uint32, tag = "3")]
    pub pid: u32,
}
