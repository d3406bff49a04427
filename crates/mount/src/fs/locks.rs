//! Requests about locks.

use std::sync::Arc;

use hayloft_fuse::{Lock, Operation, Pace, Reply, Request};
use hayloft_model::locks::Mode;

use super::error::FsError;
use super::{Done, Need, Stop, VolumeFs, ino_of};
use crate::sharing::locks::{LockError, Wanted};

impl VolumeFs {
    /// GETLK, SETLK and SETLKW: never on a transport thread, since all of them ask the server, and the kernel
    /// about the caller.
    pub(super) fn lock(&self, request: &Request<'_>, reply: &mut Reply<'_>, pace: Pace<'_>) -> Done {
        let Some(locks) = self.client.locks.get().map(Arc::clone) else {
            return Err(FsError::NotImplemented.into());
        };
        // `Room` is what any thread of the pool may wait for.
        let Pace::Patient(interrupt) = pace else { return Err(Stop::Need(Need::Room)) };
        let wanted = |owner: u64, lock: &Lock, flock: bool| Wanted {
            ino: ino_of(request),
            owner,
            flock,
            start: lock.start,
            end: lock.end,
            mode: match lock.kind {
                libc::F_RDLCK => Some(Mode::Shared),
                libc::F_WRLCK => Some(Mode::Exclusive),
                _ => None,
            },
            tid: request.pid,
            pid: lock.pid,
        };
        match request.op {
            Operation::Getlk { owner, lock, .. } => {
                let conflict = locks.test(&wanted(owner, &lock, false), interrupt)?;
                reply.lock(&conflict.map_or(Lock { kind: libc::F_UNLCK, ..lock }, |conflict| Lock {
                    start: conflict.start,
                    end: conflict.end,
                    kind: conflict.kind as i32,
                    pid: conflict.pid,
                }));
            }
            Operation::Setlk { owner, lock, flock, .. } | Operation::Setlkw { owner, lock, flock, .. } => {
                let wanted = wanted(owner, &lock, flock);
                let wait = matches!(request.op, Operation::Setlkw { .. });
                match wanted.mode {
                    Some(_) => {
                        locks.set(&wanted, wait, interrupt)?;
                        self.client.await_late_pages(ino_of(request), interrupt);
                    }
                    None => locks.unset(&wanted, interrupt)?,
                }
            }
            _ => return Err(FsError::NotImplemented.into()),
        }
        Ok(())
    }
}

impl From<LockError> for Stop {
    fn from(error: LockError) -> Stop {
        Stop::Error(FsError::Lock(error))
    }
}
