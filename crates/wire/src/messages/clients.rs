//! Messages about who has a volume mounted.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use prost::Message;

/// Who is connected; answered by [`Clients`].
#[derive(Clone, PartialEq, Message)]
pub struct ListClients {
    /// Only of this volume; empty for all.
    #[prost(string, tag = "1")]
    pub volume: String,
}

/// Ends a session; answered by [`Clients`] with what it was.
#[derive(Clone, PartialEq, Message)]
pub struct EvictClient {
    #[prost(string, tag = "1")]
    pub volume: String,
    #[prost(uint64, tag = "2")]
    pub session: u64,
}

/// Sessions.
#[derive(Clone, PartialEq, Message)]
pub struct Clients {
    #[prost(message, repeated, tag = "1")]
    pub clients: Vec<SessionInfo>,
}

/// A session, for people.
#[derive(Clone, PartialEq, Message)]
pub struct SessionInfo {
    #[prost(string, tag = "1")]
    pub volume: String,
    #[prost(uint64, tag = "2")]
    pub session: u64,
    #[prost(string, tag = "3")]
    pub host_name: String,
    #[prost(uint32, tag = "4")]
    pub pid: u32,
    #[prost(string, tag = "5")]
    pub mount_point: String,
    #[prost(bool, tag = "6")]
    pub read_only: bool,
    #[prost(bool, tag = "7")]
    pub connected: bool,
    /// Milliseconds since it was last heard of.
    #[prost(uint64, tag = "8")]
    pub silent_ms: u64,
    /// Directories owned, and read.
    #[prost(uint64, tag = "9")]
    pub own_directories: u64,
    #[prost(uint64, tag = "10")]
    pub read_directories: u64,
    /// Files owned by themselves.
    #[prost(uint64, tag = "11")]
    pub own_files: u64,
    /// Events that it has not acknowledged, and the age of the oldest, milliseconds.
    #[prost(uint64, tag = "12")]
    pub events_waiting: u64,
    #[prost(uint64, tag = "13")]
    pub lag_ms: u64,
    /// Locks that its programs hold.
    #[prost(uint64, tag = "14")]
    pub locks: u64,
    /// Its last batch.
    #[prost(uint64, tag = "15")]
    pub last_sequence: u64,
    /// The protocol that its last connection spoke, and the release of its hayloft; 0 and empty when it has had none since the
    /// server began.
    #[prost(uint32, tag = "16")]
    pub protocol: u32,
    #[prost(string, tag = "17")]
    pub release: String,
}
