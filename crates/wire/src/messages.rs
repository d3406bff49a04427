//! The messages. Field numbers are for ever; new fields get new ones.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use bytes::Bytes;
use prost::{Message, Oneof};

use crate::rows::{DentryRow, InodeRowMessage};
use crate::sharing::*;

/// From a client to the server.
#[derive(Clone, PartialEq, Message)]
pub struct ClientMessage {
    /// Comes back in the answer; 0 for messages that get none ([`Chunk`], [`Records`], [`BeginBatch`], [`Goodbye`]).
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// What is said.
    #[prost(
        oneof = "client_message::Body",
        tags = "2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35"
    )]
    pub body: Option<client_message::Body>,
}

/// See [`ClientMessage`].
pub mod client_message {
    use super::*;

    /// What a client says.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Body {
        /// Starts or resumes a session: the first message of a mount's connection.
        #[prost(message, tag = "2")]
        Hello(Hello),
        /// Wants a directory.
        #[prost(message, tag = "3")]
        Enter(Enter),
        /// Wants one inode's row.
        #[prost(message, tag = "4")]
        FetchInode(FetchInode),
        /// Wants the page rows of a file.
        #[prost(message, tag = "5")]
        FetchPages(FetchPages),
        /// Wants pieces of content.
        #[prost(message, tag = "6")]
        FetchContent(FetchContent),
        /// Brings a piece of content that the next commit names.
        #[prost(message, tag = "7")]
        Content(Chunk),
        /// Brings the next batch of the log; answered when it is applied.
        #[prost(message, tag = "8")]
        Commit(Commit),
        /// Wants more inode numbers.
        #[prost(message, tag = "9")]
        AllocateInos(AllocateInos),
        /// Wants to know how full the volume is, or just that the server is there.
        #[prost(message, tag = "10")]
        Status(StatusRequest),
        /// The session is over; nothing of it is left to send.
        #[prost(message, tag = "11")]
        Goodbye(Goodbye),
        /// Brings some of the records of the next commit.
        #[prost(message, tag = "12")]
        Records(Records),
        /// Begins a batch: content and records follow, then its commit.
        #[prost(message, tag = "13")]
        BeginBatch(BeginBatch),
        /// Wants to own an object.
        #[prost(message, tag = "14")]
        Acquire(Acquire),
        /// Wants an operation executed at the server.
        #[prost(message, tag = "15")]
        Change(ChangeRequest),
        /// An event is applied.
        #[prost(message, tag = "16")]
        Ack(Ack),
        /// Inodes are not in use any more.
        #[prost(message, tag = "17")]
        LetGo(LetGo),
        /// What the session owns, after a welcome.
        #[prost(message, tag = "18")]
        Claim(Claim),
        /// Keep-alive.
        #[prost(message, tag = "19")]
        Ping(Ping),
        /// Administration, on a connection without a session.
        #[prost(message, tag = "20")]
        CreateVolume(CreateVolume),
        #[prost(message, tag = "21")]
        ListVolumes(ListVolumes),
        #[prost(message, tag = "22")]
        ShowVolume(ShowVolume),
        #[prost(message, tag = "23")]
        DeleteVolume(DeleteVolume),
        #[prost(message, tag = "24")]
        SweepVolume(SweepVolume),
        #[prost(message, tag = "25")]
        Stats(StatsRequest),
        /// Changes a volume's quota.
        #[prost(message, tag = "26")]
        SetQuota(SetQuota),
        /// Verifies rows and content of a volume.
        #[prost(message, tag = "27")]
        CheckVolume(CheckVolume),
        /// Sets, tests or removes a lock.
        #[prost(message, tag = "28")]
        Lock(LockRequest),
        /// Administration: who is connected.
        #[prost(message, tag = "29")]
        ListClients(ListClients),
        /// Administration: ends a session.
        #[prost(message, tag = "30")]
        EvictClient(EvictClient),
        /// Another session's process is dead.
        #[prost(message, tag = "31")]
        Bury(Bury),
        /// Gives up waiting for a lock.
        #[prost(message, tag = "32")]
        CancelLock(CancelLock),
        /// Files that the session would rather not own by themselves.
        #[prost(message, tag = "33")]
        Release(Release),
        /// Waits until what the session has heard of is durable.
        #[prost(message, tag = "34")]
        Sync(Sync),
        /// Files that the session does not own any more.
        #[prost(message, tag = "35")]
        GiveBack(GiveBack),
    }
}

/// From the server to a client.
#[derive(Clone, PartialEq, Message)]
pub struct ServerMessage {
    /// The request that is answered.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// What is said.
    #[prost(oneof = "server_message::Body", tags = "2,3,4,5,6,7,8,9,10,11,12,13,14,15,20,21,22,23,24,25,26")]
    pub body: Option<server_message::Body>,
    /// To a session: how far the volume's history is durable, see [`Welcome::opening`].
    #[prost(uint64, tag = "16")]
    pub mark: u64,
    /// To a session: what it keeps until that is durable, since the message builds on it.
    #[prost(message, repeated, tag = "17")]
    pub entries: Vec<Entry>,
}

/// See [`ServerMessage`].
pub mod server_message {
    use super::*;

    /// What the server says.
    #[derive(Clone, PartialEq, Oneof)]
    pub enum Body {
        /// Answers `Hello`.
        #[prost(message, tag = "2")]
        Welcome(Welcome),
        /// Answers any request that is refused or failed.
        #[prost(message, tag = "3")]
        Failed(Failed),
        /// Answers `Enter`, in one or several parts.
        #[prost(message, tag = "4")]
        Listings(Listings),
        /// Answers `FetchInode`.
        #[prost(message, tag = "5")]
        Inode(InodeAnswer),
        /// Answers `FetchPages`.
        #[prost(message, tag = "6")]
        Pages(Pages),
        /// Answers `FetchContent`: the chunks in the order asked.
        #[prost(message, tag = "7")]
        Contents(Contents),
        /// Answers `Commit`: everything up to this sequence is applied.
        #[prost(message, tag = "8")]
        Committed(Committed),
        /// Answers `AllocateInos`.
        #[prost(message, tag = "9")]
        Inos(InoRangeMessage),
        /// Answers `Status`, and in general tells how full the volume is.
        #[prost(message, tag = "10")]
        Status(VolumeStatus),
        /// Something to apply and acknowledge; belongs to no request.
        #[prost(message, tag = "11")]
        Event(Event),
        /// Answers `Acquire`.
        #[prost(message, tag = "12")]
        Acquired(Acquired),
        /// Answers `Change`.
        #[prost(message, tag = "13")]
        Changed(Changed),
        /// Answers `Ping`.
        #[prost(message, tag = "14")]
        Pong(Pong),
        /// Answers `Lock`.
        #[prost(message, tag = "15")]
        Locked(LockAnswer),
        /// Answers administration that returns nothing.
        #[prost(message, tag = "20")]
        Done(Done),
        /// Answers `ListVolumes`, `ShowVolume` and `CreateVolume`.
        #[prost(message, tag = "21")]
        Volumes(Volumes),
        /// Answers `Stats`: a JSON document.
        #[prost(message, tag = "22")]
        Stats(StatsAnswer),
        /// Answers `SweepVolume`.
        #[prost(message, tag = "23")]
        Swept(Swept),
        /// Answers `CheckVolume`.
        #[prost(message, tag = "24")]
        Checked(Checked),
        /// Answers `ListClients` and `EvictClient`.
        #[prost(message, tag = "25")]
        Clients(Clients),
        /// Answers `Claim`.
        #[prost(message, tag = "26")]
        Claimed(Claimed),
    }
}

/// Starts or resumes a session on a volume.
#[derive(Clone, PartialEq, Message)]
pub struct Hello {
    /// [`crate::PROTOCOL`] of the client.
    #[prost(uint32, tag = "1")]
    pub protocol: u32,
    /// The volume's name.
    #[prost(string, tag = "2")]
    pub volume: String,
    /// The client's own random session id; the same one when it reconnects.
    #[prost(uint64, tag = "3")]
    pub session: u64,
    /// Whether the session existed before (a reconnect): it is resumed or refused, never begun anew.
    #[prost(bool, tag = "4")]
    pub resume: bool,
    /// The host: machine id and boot id, so that a client can prove that another one on its own host is dead.
    #[prost(string, tag = "5")]
    pub host_id: String,
    /// The host's name, for people.
    #[prost(string, tag = "6")]
    pub host_name: String,
    /// The client's process.
    #[prost(uint32, tag = "7")]
    pub pid: u32,
    /// Ends this session, of which the client has proof that its process is dead; 0 for none.
    #[prost(uint64, tag = "8")]
    pub takes_over: u64,
    /// Nothing will be changed.
    #[prost(bool, tag = "9")]
    pub read_only: bool,
    /// Where it is mounted, for people.
    #[prost(string, tag = "10")]
    pub mount_point: String,
    /// The ended session of this mount that this one goes on for; 0 for none.
    #[prost(uint64, tag = "11")]
    pub replaces: u64,
    /// The latest of the volume's history that the client knows of: see [`Welcome::opening`].
    #[prost(fixed64, tag = "12")]
    pub opening: u64,
    /// The mark in it, see [`Welcome::mark`].
    #[prost(uint64, tag = "13")]
    pub mark: u64,
}

/// The session is open.
#[derive(Clone, PartialEq, Message)]
pub struct Welcome {
    /// The last batch of this session that is applied and durable; 0 for none.
    #[prost(uint64, tag = "1")]
    pub last_sequence: u64,
    /// The server's clock, nanoseconds since the epoch, when it answered.
    #[prost(sint64, tag = "2")]
    pub server_time_nanos: i64,
    /// How full the volume is.
    #[prost(message, optional, tag = "3")]
    pub status: Option<VolumeStatus>,
    /// Inode numbers for the session.
    #[prost(message, optional, tag = "4")]
    pub inos: Option<InoRangeMessage>,
    /// How long a session may be silent before it can be evicted, milliseconds.
    #[prost(uint64, tag = "5")]
    pub lease_ms: u64,
    /// The row of the root directory.
    #[prost(message, optional, tag = "6")]
    pub root: Option<InodeRowMessage>,
    /// The volume's id, random, never used twice.
    #[prost(string, tag = "7")]
    pub volume_id: String,
    /// Sessions of the volume without a connection: a client on the same host may know that one is dead.
    #[prost(message, repeated, tag = "8")]
    pub lost: Vec<LostPeer>,
    /// Random, new each time that a server opens the volume; 0: it keeps no history. With the mark it tells whether a
    /// store is a later state of the one that was seen before, or goes on from an older copy of it.
    #[prost(fixed64, tag = "9")]
    pub opening: u64,
    /// Grows with everything that the server writes; see [`ServerMessage::mark`].
    #[prost(uint64, tag = "10")]
    pub mark: u64,
    /// The session that this one replaces is known: changes that were asked for in it are executed once even so.
    #[prost(bool, tag = "11")]
    pub goes_on: bool,
}

/// Why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum FailureCode {
    /// Not said.
    Unspecified = 0,
    /// The volume, inode or content does not exist.
    NotFound = 1,
    /// A volume of that name exists.
    Exists = 2,
    /// The volume is in use: `holder_*` says by whom.
    Busy = 3,
    /// The store is full, or the quota is used up; the batch was not applied. Send it again later.
    NoSpace = 4,
    /// The session was ended by the server; nothing of it can be applied any more.
    SessionEnded = 5,
    /// The protocol of the other side is another one.
    Protocol = 6,
    /// The request makes no sense.
    Invalid = 7,
    /// The store does not work; send it again later.
    Store = 8,
    /// The server is shutting down, replaced or not ready; connect again.
    Unavailable = 9,
    /// Nobody knows yet whether the batch was applied: send the very same one again.
    Uncertain = 10,
    /// Content is not what its name says: it was damaged on its way. Nothing was applied; send it once more.
    Damaged = 11,
    /// An administrator has ended the session: the mount is not to go on with another one.
    Evicted = 12,
    /// The store is not a later state of the one that the client knows: numbers may mean other things in it.
    OtherHistory = 13,
    /// What an ended session had not shipped cannot be applied: others have changed what it is about, or may have.
    Contradicted = 14,
}

/// A request was refused, or failed.
#[derive(Clone, PartialEq, Message)]
pub struct Failed {
    /// What kind of failure.
    #[prost(enumeration = "FailureCode", tag = "1")]
    pub code: i32,
    /// One clear sentence for a person.
    #[prost(string, tag = "2")]
    pub message: String,
    /// With `Busy`: the session in the way.
    #[prost(uint64, tag = "3")]
    pub holder_session: u64,
    /// With `Busy`: its host id.
    #[prost(string, tag = "4")]
    pub holder_host_id: String,
    /// With `Busy`: its process.
    #[prost(uint32, tag = "5")]
    pub holder_pid: u32,
    /// With `SessionEnded`, about a session that is remembered: its last batch that was applied.
    #[prost(uint64, optional, tag = "6")]
    pub last_sequence: Option<u64>,
}

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
    /// No content is wanted but what rows hold themselves: nobody seems to be reading files.
    #[prost(bool, tag = "3")]
    pub names_only: bool,
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
}

/// One directory, whole; a large one may be spread over several parts: `complete` is on its last.
#[derive(Clone, PartialEq, Message)]
pub struct Listing {
    /// The directory.
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    /// Its entries, in the order of their cookies.
    #[prost(message, repeated, tag = "2")]
    pub entries: Vec<ListedEntry>,
    /// All entries have been said now.
    #[prost(bool, tag = "3")]
    pub complete: bool,
    /// The session owns the directory from now on; else it is a reader of it.
    #[prost(bool, tag = "4")]
    pub own: bool,
}

/// A name with the row it leads to.
#[derive(Clone, PartialEq, Message)]
pub struct ListedEntry {
    /// The name.
    #[prost(bytes = "bytes", tag = "1")]
    pub name: Bytes,
    /// Where it leads.
    #[prost(message, optional, tag = "2")]
    pub dentry: Option<DentryRow>,
    /// The inode's row; absent when somebody else owns it.
    #[prost(message, optional, tag = "3")]
    pub inode: Option<InodeRowMessage>,
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

/// Wants more inode numbers.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateInos {
    /// How many.
    #[prost(uint64, tag = "1")]
    pub count: u64,
}

/// Inode numbers from `next` to before `end`.
#[derive(Clone, PartialEq, Message)]
pub struct InoRangeMessage {
    #[prost(uint64, tag = "1")]
    pub next: u64,
    #[prost(uint64, tag = "2")]
    pub end: u64,
}

/// Asks for [`VolumeStatus`].
#[derive(Clone, PartialEq, Message)]
pub struct StatusRequest {}

/// How full a volume is.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct VolumeStatus {
    /// Bytes that its files take.
    #[prost(uint64, tag = "1")]
    pub used_bytes: u64,
    /// Inodes in use.
    #[prost(uint64, tag = "2")]
    pub used_inodes: u64,
    /// Most bytes that they may take; 0 for no quota.
    #[prost(uint64, tag = "3")]
    pub quota_bytes: u64,
    /// Most inodes; 0 for no quota.
    #[prost(uint64, tag = "4")]
    pub quota_inodes: u64,
    /// Bytes free in the store beyond its reserve; u64::MAX when the store cannot tell (a bucket).
    #[prost(uint64, tag = "5")]
    pub store_free_bytes: u64,
    /// Size of the store, bytes; u64::MAX when it cannot tell.
    #[prost(uint64, tag = "6")]
    pub store_total_bytes: u64,
}

/// The client leaves.
#[derive(Clone, PartialEq, Message)]
pub struct Goodbye {}

/// Makes a volume; answered by [`Volumes`] with the one.
#[derive(Clone, PartialEq, Message)]
pub struct CreateVolume {
    #[prost(string, tag = "1")]
    pub name: String,
    /// 0 for no quota.
    #[prost(uint64, tag = "2")]
    pub quota_bytes: u64,
    /// 0 for no quota.
    #[prost(uint64, tag = "3")]
    pub quota_inodes: u64,
    /// Permission bits of the root directory.
    #[prost(uint32, tag = "4")]
    pub mode: u32,
    /// Owner of the root directory.
    #[prost(uint32, tag = "5")]
    pub uid: u32,
    /// Group of the root directory.
    #[prost(uint32, tag = "6")]
    pub gid: u32,
}

/// Lists all volumes.
#[derive(Clone, PartialEq, Message)]
pub struct ListVolumes {}

/// Shows one volume.
#[derive(Clone, PartialEq, Message)]
pub struct ShowVolume {
    #[prost(string, tag = "1")]
    pub name: String,
}

/// Deletes a volume and its content; refused with `Busy` while it is mounted.
#[derive(Clone, PartialEq, Message)]
pub struct DeleteVolume {
    #[prost(string, tag = "1")]
    pub name: String,
}

/// Reclaims deleted content now.
#[derive(Clone, PartialEq, Message)]
pub struct SweepVolume {
    #[prost(string, tag = "1")]
    pub name: String,
}

/// Changes a volume's quota.
#[derive(Clone, PartialEq, Message)]
pub struct SetQuota {
    #[prost(string, tag = "1")]
    pub name: String,
    /// 0 for no quota.
    #[prost(uint64, tag = "2")]
    pub quota_bytes: u64,
    /// 0 for no quota.
    #[prost(uint64, tag = "3")]
    pub quota_inodes: u64,
}

/// Verifies a volume.
#[derive(Clone, PartialEq, Message)]
pub struct CheckVolume {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Read and hash all content, too.
    #[prost(bool, tag = "2")]
    pub content: bool,
}

/// What a check found.
#[derive(Clone, PartialEq, Message)]
pub struct Checked {
    #[prost(uint64, tag = "1")]
    pub inodes: u64,
    #[prost(uint64, tag = "2")]
    pub dentries: u64,
    #[prost(uint64, tag = "3")]
    pub chunks: u64,
    /// One sentence a problem; empty when all is well.
    #[prost(string, repeated, tag = "4")]
    pub problems: Vec<String>,
}

/// Wants the server's statistics.
#[derive(Clone, PartialEq, Message)]
pub struct StatsRequest {}

/// The server's statistics.
#[derive(Clone, PartialEq, Message)]
pub struct StatsAnswer {
    /// A JSON document; its keys are described in `docs/operations.md`.
    #[prost(string, tag = "1")]
    pub json: String,
}

/// It is done.
#[derive(Clone, PartialEq, Message)]
pub struct Done {}

/// Some volumes.
#[derive(Clone, PartialEq, Message)]
pub struct Volumes {
    #[prost(message, repeated, tag = "1")]
    pub volumes: Vec<VolumeInfo>,
}

/// A volume.
#[derive(Clone, PartialEq, Message)]
pub struct VolumeInfo {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Random, never used twice.
    #[prost(string, tag = "2")]
    pub id: String,
    /// Seconds since the epoch.
    #[prost(int64, tag = "3")]
    pub created_secs: i64,
    #[prost(message, optional, tag = "4")]
    pub status: Option<VolumeStatus>,
    /// Who has it mounted.
    #[prost(message, repeated, tag = "5")]
    pub clients: Vec<ClientInfo>,
}

/// A mounted client.
#[derive(Clone, PartialEq, Message)]
pub struct ClientInfo {
    #[prost(uint64, tag = "1")]
    pub session: u64,
    #[prost(string, tag = "2")]
    pub host_name: String,
    #[prost(uint32, tag = "3")]
    pub pid: u32,
    #[prost(string, tag = "4")]
    pub mount_point: String,
    #[prost(bool, tag = "5")]
    pub connected: bool,
    /// Directories that it holds.
    #[prost(uint64, tag = "6")]
    pub grants: u64,
    /// Its last durable batch.
    #[prost(uint64, tag = "7")]
    pub last_sequence: u64,
}

/// What a sweep did.
#[derive(Clone, PartialEq, Message)]
pub struct Swept {
    /// Packs deleted.
    #[prost(uint64, tag = "1")]
    pub packs_deleted: u64,
    /// Packs of which the live part was moved.
    #[prost(uint64, tag = "2")]
    pub packs_rewritten: u64,
    /// Bytes given back to the store.
    #[prost(uint64, tag = "3")]
    pub bytes_reclaimed: u64,
}
