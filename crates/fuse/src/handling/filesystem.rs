//! What a file system implements.

use crate::handling::interrupt::Interrupt;
use crate::protocol::errno::Errno;
use crate::protocol::reply::Reply;
use crate::protocol::request::Request;

/// Where a request is being handled, and so what it may do.
#[derive(Debug, Clone, Copy)]
pub enum Pace<'a> {
    /// On a transport thread: answer now, or return [`Failure::Again`]. Whatever blocks here also holds
    /// up the requests behind it.
    Fast,
    /// On a pool thread: may block. The token tells whether the request is to be given up.
    Patient(&'a Interrupt),
}

/// Why a request has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The answer is this error.
    Errno(Errno),
    /// Only under [`Pace::Fast`]: the request has to block. It is handled anew, from the start, on a pool
    /// thread under [`Pace::Patient`]; nothing of it may have taken effect yet. Under `Patient` it becomes EIO.
    Again,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::Errno(errno)
    }
}

/// The kernel drops `nlookup` references to an inode: one was given by each entry answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forget {
    /// The inode.
    pub nodeid: u64,
    /// How many references are given back.
    pub nlookup: u64,
}

/// A file system, called from many threads at once.
pub trait FileSystem: Send + Sync + 'static {
    /// Answers one request by calling a method of `reply`, or fails.
    ///
    /// `Ok` without a call of any method of `reply` is an empty answer. A panic is caught and answered
    /// with EIO.
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, pace: Pace<'_>) -> Result<(), Failure>;

    /// The answer to a request that was handled under [`Pace::Patient`] is on its way: it is with the kernel once the
    /// transport threads have settled.
    fn answered(&self, _unique: u64) {}

    /// Takes back references. Must not block for long; there is no answer.
    fn forget(&self, forgets: &[Forget]);
}

impl<F: FileSystem> FileSystem for std::sync::Arc<F> {
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, pace: Pace<'_>) -> Result<(), Failure> {
        (**self).handle(request, reply, pace)
    }

    fn answered(&self, unique: u64) {
        (**self).answered(unique);
    }

    fn forget(&self, forgets: &[Forget]) {
        (**self).forget(forgets);
    }
}
