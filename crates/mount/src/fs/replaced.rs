//! Requests about files of a tree in whose place the volume got another one: they are what they were until they are closed.
//! Nothing of them changes any more: whatever is asked but to be read is ESTALE.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hayloft_fuse::{Errno, Failure, FileSystem, Interrupt, Operation, Pace, Reply, Request};

use super::{VolumeFs, ino_of};
use crate::core::Client;
use crate::error::MountError;
use crate::kernel::nodes::NodeId;

/// How long a server is asked again that does not want to give a tree, as it may while it starts.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

impl VolumeFs {
    /// The tree of a file of which a request is, if that was replaced.
    pub(super) fn replaced(&self, request: &Request<'_>) -> Option<u32> {
        use Operation::{
            Create, Fsyncdir, Link, Lookup, Mkdir, Mknod, Readdir, Readdirplus, Rename, Rmdir, Statfs,
            Symlink, Syncfs, Tmpfile, Unlink,
        };
        let number = match request.op {
            Link { ino, .. } => ino,
            // About directories, which stay.
            Lookup { .. }
            | Create { .. }
            | Mkdir { .. }
            | Mknod { .. }
            | Symlink { .. }
            | Tmpfile { .. }
            | Unlink { .. }
            | Rmdir { .. }
            | Rename { .. }
            | Readdir { .. }
            | Readdirplus { .. }
            | Fsyncdir { .. }
            | Syncfs
            | Statfs => return None,
            _ => request.nodeid,
        };
        self.client.core().nodes.replaced(NodeId(number))
    }

    /// What reads from a tree; waits for a server that does not answer, as every call does.
    fn reader_of(&self, tree: u32, interrupt: &Interrupt) -> Result<Arc<Client>, Failure> {
        let begun = Instant::now();
        loop {
            let error = match self.client.replaced.open(&self.client, tree) {
                Ok(reader) => return Ok(reader),
                Err(error) => error,
            };
            let may_pass = match &error {
                MountError::Unreachable { .. } => true,
                MountError::Refused { .. } => begun.elapsed() < PATIENCE,
                _ => false,
            };
            if !may_pass || self.client.link.ended().is_some() {
                tracing::warn!(%error, "a file that is open cannot be read: its tree was replaced, and is not to be had");
                return Err(Failure::Errno(Errno::ESTALE));
            }
            if interrupt.wait_timeout(PAUSE) {
                return Err(Failure::Errno(Errno::EINTR));
            }
        }
    }

    pub(super) fn answer_replaced(
        &self,
        tree: u32,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        pace: Pace<'_>,
    ) -> Result<(), Failure> {
        match request.op {
            Operation::Getattr { .. }
            | Operation::Read { .. }
            | Operation::Readlink
            | Operation::Lseek { .. }
            | Operation::Getxattr { .. }
            | Operation::Listxattr { .. } => {}
            // As of all files: the kernel does these by itself once it has heard that.
            Operation::Open { .. }
            | Operation::Opendir { .. }
            | Operation::Release { .. }
            | Operation::Releasedir { .. }
            | Operation::Flush { .. }
            | Operation::Access { .. }
            | Operation::Poll { .. }
            | Operation::CopyFileRange { .. }
            | Operation::Statx { .. }
            | Operation::Unknown(_) => return Err(Failure::Errno(Errno::ENOSYS)),
            _ => return Err(Failure::Errno(Errno::ESTALE)),
        }
        let Pace::Patient(interrupt) = pace else { return Err(Failure::Again) };
        let reader = self.reader_of(tree, interrupt)?;
        let reading = VolumeFs::new(Arc::clone(&reader));
        let handled = reading.handle(&Request { nodeid: ino_of(request).0, ..*request }, reply, pace);
        reading.answered(request.unique);
        // It is trimmed by nobody else.
        reader.trim();
        match handled {
            Err(Failure::Errno(Errno::EIO)) if reader.link.ended().is_some() => {
                Err(Failure::Errno(Errno::ESTALE))
            }
            handled => handled,
        }
    }
}
