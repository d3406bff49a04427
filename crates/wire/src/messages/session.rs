//! Messages by which a session begins, goes on and ends, and by which anything is refused.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use bytes::Bytes;
use prost::Message;

use crate::messages::rows::InodeRowMessage;
use crate::messages::sharing::LostPeer;
use crate::versions::Spoken;

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
    /// Random, of the client, told to nobody else: who has it, and is the same peer, goes on with the session.
    #[prost(bytes = "bytes", tag = "14")]
    pub token: Bytes,
    /// The oldest protocol that the client speaks; 0 for no other.
    #[prost(uint32, tag = "15")]
    pub oldest: u32,
    /// See [`Spoken::features`].
    #[prost(uint64, tag = "16")]
    pub features: u64,
    /// See [`Spoken::needs`].
    #[prost(uint64, tag = "17")]
    pub needs: u64,
    /// The client's release, for people.
    #[prost(string, tag = "18")]
    pub release: String,
}

impl Hello {
    /// What the client speaks.
    pub fn spoken(&self) -> Spoken<'_> {
        let Hello { protocol, oldest, features, needs, release, .. } = self;
        Spoken { newest: *protocol, oldest: *oldest, features: *features, needs: *needs, release }
    }
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
    /// Sessions of the volume without a connection, of clients on the same host: this one may know that one is dead.
    #[prost(message, repeated, tag = "8")]
    pub lost: Vec<LostPeer>,
    /// Random, new each time that a server opens the volume; 0: it keeps no history. With the mark it tells whether a
    /// store is a later state of the one that was seen before, or goes on from an older copy of it.
    #[prost(fixed64, tag = "9")]
    pub opening: u64,
    /// Grows with everything that the server writes; see [`crate::ServerMessage::mark`].
    #[prost(uint64, tag = "10")]
    pub mark: u64,
    /// The session that this one replaces is known: changes that were asked for in it are executed once even so.
    #[prost(bool, tag = "11")]
    pub goes_on: bool,
    /// Device and setuid files of the volume may count.
    #[prost(bool, tag = "12")]
    pub trusted: bool,
    /// The protocol that is spoken from now on; 0, of a server that knows of one only: the client's.
    #[prost(uint32, tag = "13")]
    pub protocol: u32,
    /// See [`Spoken::features`]: those that both have.
    #[prost(uint64, tag = "14")]
    pub features: u64,
    /// See [`Spoken::needs`].
    #[prost(uint64, tag = "15")]
    pub needs: u64,
}

impl Welcome {
    /// What the server speaks on this connection.
    pub fn spoken(&self) -> Spoken<'_> {
        let newest = if self.protocol == 0 { crate::PROTOCOL } else { self.protocol };
        Spoken { newest, oldest: newest, features: self.features, needs: self.needs, release: "" }
    }
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
    /// Content is not what its name says, or a batch not what its check says: it was damaged on its way. Nothing was applied; send it
    /// once more.
    Damaged = 11,
    /// An administrator has ended the session: the mount is not to go on with another one.
    Evicted = 12,
    /// The store is not a later state of the one that the client knows: numbers may mean other things in it.
    OtherHistory = 13,
    /// What an ended session had not shipped cannot be applied: others have changed what it is about, or may have.
    Contradicted = 14,
    /// The peer has not the right: an administrator has to give it.
    Denied = 15,
    /// What the store holds is damaged, or a part of it is gone: it stays so until somebody mends it.
    AtRest = 16,
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
    /// With `SessionEnded`, since the volume has got another tree: up to this mark of the opening that the client has told
    /// everything is durable, in a snapshot.
    #[prost(uint64, tag = "7")]
    pub durable: u64,
    /// With the same: the snapshot that has the tree of the session.
    #[prost(string, tag = "8")]
    pub kept: String,
    /// What its `volume_id` begins with where it is mounted, see [`id_begin`]; another snapshot may get its name.
    #[prost(uint64, tag = "9")]
    pub kept_id: u64,
}

/// The first half of a random id, by which two are told apart.
pub fn id_begin(id: &str) -> u64 {
    id.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0)
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

/// It is done.
#[derive(Clone, PartialEq, Message)]
pub struct Done {}
