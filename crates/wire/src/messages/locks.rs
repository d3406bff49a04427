//! Messages about locks of programs; see `docs/adr/0006-locks.md`.
#![allow(missing_docs)] // prost's derives make undocumented helpers; every field below has its comment

use prost::Message;

/// A lock of flock or fcntl.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LockMessage {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// Who has it, as the kernel of its host names them.
    #[prost(uint64, tag = "2")]
    pub owner: u64,
    #[prost(uint64, tag = "3")]
    pub start: u64,
    /// Last byte.
    #[prost(uint64, tag = "4")]
    pub end: u64,
    /// F_RDLCK, F_WRLCK or F_UNLCK.
    #[prost(uint32, tag = "5")]
    pub kind: u32,
    #[prost(uint32, tag = "6")]
    pub pid: u32,
    /// A lock of flock: of another family than those of fcntl.
    #[prost(bool, tag = "7")]
    pub flock: bool,
    /// A lock of fcntl that belongs to an open file (F_OFD_SETLK): it is left out of the search for deadlocks.
    #[prost(bool, tag = "8")]
    pub of_file: bool,
}

/// Sets, tests or removes a lock. Answered by [`LockAnswer`]; with `wait`, when it is set.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LockRequest {
    #[prost(message, optional, tag = "1")]
    pub lock: Option<LockMessage>,
    #[prost(bool, tag = "2")]
    pub wait: bool,
    /// Only tell which lock is in the way.
    #[prost(bool, tag = "3")]
    pub test: bool,
}

/// A waiting [`LockRequest`] is given up. Gets no answer; the request is answered, as set or in the way.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct CancelLock {
    /// The request's number.
    #[prost(uint64, tag = "1")]
    pub request: u64,
}

/// Answers [`LockRequest`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LockAnswer {
    /// The lock that is in the way; absent when it was set (or could be).
    #[prost(message, optional, tag = "1")]
    pub conflict: Option<LockMessage>,
    /// It would deadlock.
    #[prost(bool, tag = "2")]
    pub deadlock: bool,
}
