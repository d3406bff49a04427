//! Messages of those who administer volumes.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use prost::Message;

use crate::messages::session::VolumeStatus;

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
    /// Device and setuid files of it may count where it is mounted.
    #[prost(bool, tag = "7")]
    pub trusted: bool,
    /// The rights that it begins with.
    #[prost(message, repeated, tag = "8")]
    pub grants: Vec<GrantMessage>,
}

/// Lists all volumes.
#[derive(Clone, PartialEq, Message)]
pub struct ListVolumes {}

/// Shows one volume.
#[derive(Clone, PartialEq, Message)]
pub struct ShowVolume {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Wants [`VolumeInfo::reclaimable_bytes`] too, for which all rows are read.
    #[prost(bool, tag = "2")]
    pub reclaimable: bool,
    /// Does not want to know what it has in common with others, for which these are looked at.
    #[prost(bool, tag = "3")]
    pub brief: bool,
}

/// Deletes a volume and its content; refused with `Busy` while it is mounted.
#[derive(Clone, PartialEq, Message)]
pub struct DeleteVolume {
    #[prost(string, tag = "1")]
    pub name: String,
    /// And its snapshots; refused with `Busy` if it has some and this is not said.
    #[prost(bool, tag = "2")]
    pub snapshots: bool,
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

/// A right on a volume.
#[derive(Clone, PartialEq, Message)]
pub struct GrantMessage {
    /// `cert:NAME`, `uid:NUMBER`, `cert:*` or `uid:*`.
    #[prost(string, tag = "1")]
    pub who: String,
    /// `none`, `read`, `write` or `admin`; empty: the right is taken away.
    #[prost(string, tag = "2")]
    pub right: String,
    /// Networks that they may come from; none: from anywhere.
    #[prost(string, repeated, tag = "3")]
    pub from: Vec<String>,
}

/// Gives or takes a right, or says whether device and setuid files count; answered by [`Volumes`] with the one.
#[derive(Clone, PartialEq, Message)]
pub struct SetRights {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub grant: Option<GrantMessage>,
    #[prost(bool, optional, tag = "3")]
    pub trusted: Option<bool>,
}

/// Verifies a volume.
#[derive(Clone, PartialEq, Message)]
pub struct CheckVolume {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Read and hash all content, too.
    #[prost(bool, tag = "2")]
    pub content: bool,
    /// Mend what can be mended; refused with `Busy` while the volume is mounted.
    #[prost(bool, tag = "3")]
    pub repair: bool,
    /// Read and verify every object that the volume has in the store, as they are, instead of what its tables say.
    #[prost(bool, tag = "4")]
    pub scrub: bool,
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
    /// What was mended, and what is gone for good, one sentence each.
    #[prost(string, repeated, tag = "5")]
    pub mended: Vec<String>,
    /// Objects that were read, when scrubbing.
    #[prost(uint64, tag = "6")]
    pub objects: u64,
    /// Directories of which the listing is kept packed.
    #[prost(uint64, tag = "7")]
    pub packed: u64,
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
    /// Who may do what; only its administrators see it.
    #[prost(message, repeated, tag = "6")]
    pub grants: Vec<GrantMessage>,
    /// See [`CreateVolume::trusted`].
    #[prost(bool, tag = "7")]
    pub trusted: bool,
    /// What it was forked from, `VOLUME` or `VOLUME@SNAPSHOT`; empty if it is no fork.
    #[prost(string, tag = "8")]
    pub origin: String,
    /// How many snapshots it has; told to [`ShowVolume`] only, as are the next two.
    #[prost(uint64, tag = "9")]
    pub snapshots: u64,
    /// Bytes in the store that nobody else has: what would be given back without it.
    #[prost(uint64, tag = "10")]
    pub own_bytes: u64,
    /// Bytes in the store that its snapshots or forks have as well, or what it was forked from.
    #[prost(uint64, tag = "11")]
    pub shared_bytes: u64,
    /// Why it cannot be opened; then nothing else is told of it. Empty if it can.
    #[prost(string, tag = "12")]
    pub damage: String,
    /// Bytes that a sweep would give back now; told to who asks for it, by servers that know of it.
    #[prost(uint64, optional, tag = "13")]
    pub reclaimable_bytes: Option<u64>,
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
