//! What goes over a connection: one message of these two at a time. Field numbers are for ever; new fields get new ones.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

pub(crate) mod admin;
pub(crate) mod batches;
pub(crate) mod clients;
pub(crate) mod locks;
pub(crate) mod reading;
pub(crate) mod rows;
pub(crate) mod session;
pub(crate) mod sharing;
pub(crate) mod snapshots;

use prost::{Message, Oneof};

use crate::messages::admin::*;
use crate::messages::batches::*;
use crate::messages::clients::*;
use crate::messages::locks::*;
use crate::messages::reading::*;
use crate::messages::session::*;
use crate::messages::sharing::*;
use crate::messages::snapshots::*;

/// From a client to the server.
#[derive(Clone, PartialEq, Message)]
pub struct ClientMessage {
    /// Comes back in the answer; 0 for messages that get none ([`Chunk`], [`Records`], [`BeginBatch`], [`Goodbye`]).
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// What is said.
    #[prost(
        oneof = "client_message::Body",
        tags = "2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,37,38,39,40,41,42,43,44,45,46,47,48,49"
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
        /// Administration: who may do what with a volume.
        #[prost(message, tag = "36")]
        SetRights(SetRights),
        /// Waits until all others have heard of a change; answered with `Done`.
        #[prost(message, tag = "37")]
        Hear(Hear),
        /// Answers [`Ship`]; gets no answer itself.
        #[prost(message, tag = "38")]
        Shipped(Shipped),
        /// Administration: versions of a volume's tree.
        #[prost(message, tag = "39")]
        CreateSnapshot(CreateSnapshot),
        #[prost(message, tag = "40")]
        ListSnapshots(ListSnapshots),
        #[prost(message, tag = "41")]
        DeleteSnapshot(DeleteSnapshot),
        #[prost(message, tag = "42")]
        Fork(Fork),
        #[prost(message, tag = "43")]
        Rollback(Rollback),
        #[prost(message, tag = "44")]
        Promote(Promote),
        #[prost(message, tag = "45")]
        Diff(Diff),
        #[prost(message, tag = "46")]
        NameTree(NameTree),
        #[prost(message, tag = "47")]
        SignSnapshot(SignSnapshot),
        /// Administration: files of snapshots, for who has most of them already.
        #[prost(message, tag = "48")]
        CutFile(CutFile),
        #[prost(message, tag = "49")]
        ReadParts(ReadParts),
    }
}

/// From the server to a client.
#[derive(Clone, PartialEq, Message)]
pub struct ServerMessage {
    /// The request that is answered.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// What is said.
    #[prost(
        oneof = "server_message::Body",
        tags = "2,3,4,5,6,7,8,9,10,11,12,13,14,15,20,21,22,23,24,25,26,27,28,29,30,31,32"
    )]
    pub body: Option<server_message::Body>,
    /// To a session: how far the volume's history is durable, see [`Welcome::opening`].
    #[prost(uint64, tag = "16")]
    pub mark: u64,
    /// To a session: what it keeps until that is durable, since the message builds on it.
    #[prost(message, repeated, tag = "17")]
    pub entries: Vec<Entry>,
    /// To a session: changes of which all have heard by now, see [`Apply::change`].
    #[prost(uint64, repeated, tag = "18")]
    pub heard: Vec<u64>,
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
        /// To a session: belongs to no request. Said to those with [`crate::SHIPS`].
        #[prost(message, tag = "27")]
        Ship(Ship),
        /// Answers what makes, lists and deletes snapshots.
        #[prost(message, tag = "28")]
        Snapshots(Snapshots),
        /// Answers `Diff`, in one or several parts.
        #[prost(message, tag = "29")]
        Differences(Differences),
        /// Answers `NameTree`.
        #[prost(message, tag = "30")]
        Named(Named),
        /// Answers `CutFile`.
        #[prost(message, tag = "31")]
        Cuts(Cuts),
        /// Answers `ReadParts`.
        #[prost(message, tag = "32")]
        FileParts(FileParts),
    }
}
