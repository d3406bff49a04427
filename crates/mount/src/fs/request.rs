//! Operations on what others use too: owned first, or executed by the server.

use bytes::Bytes;
use hayloft_fuse::{Interrupt, Operation, Pace, Reply, Request, TimeOrNow, Validity};
use hayloft_model::grants::Object;
use hayloft_model::tree::{AttributeChange, NewNode, RenameFlags};
use hayloft_model::{Change, FileKind, Ino, Missing, Name, Timestamp, TreeError, slot};

use super::attributes::{attr, made_entry};
use super::error::FsError;
use super::names::{OPEN_FLAGS, RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, owned_by};
use super::{Stop, VolumeFs, ino_of, locked_by};
use crate::core::Client;
use crate::kernel::late::Caller;
use crate::kernel::nodes::NodeId;
use crate::sharing::change::Outcome;

/// What was asked of the server for an operation.
pub(super) struct Asked<'a> {
    client: &'a Client,
    /// What it wanted to own: as soon as it does, it is done before that is given back.
    wanted: Vec<Ino>,
    /// Directories that it was to own: asked once each.
    acquired: Vec<Ino>,
    /// How often it has asked for slots: others may want the same.
    slots: u32,
    /// It was told to do it here, where something was still lacking.
    was_yours: bool,
}

impl<'a> Asked<'a> {
    pub(super) fn new(client: &'a Client) -> Asked<'a> {
        Asked { client, wanted: Vec::new(), acquired: Vec::new(), slots: 0, was_yours: false }
    }

    fn want(&mut self, ino: Ino) {
        if !self.wanted.contains(&ino) {
            self.wanted.push(ino);
            *self.client.wanted.lock().entry(ino).or_default() += 1;
        }
    }
}

impl Asked<'_> {
    /// It does not wait for ownership any more.
    pub(super) fn want_nothing(&mut self) {
        if self.wanted.is_empty() {
            return;
        }
        let mut wanted = self.client.wanted.lock();
        for ino in self.wanted.drain(..) {
            if let Some(count) = wanted.get_mut(&ino) {
                *count -= 1;
                if *count == 0 {
                    wanted.remove(&ino);
                }
            }
        }
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.want_nothing();
    }
}

impl VolumeFs {
    /// Gets what an operation lacks: the ownership of an object, so that it can be repeated (`false`), or its
    /// execution by the server, after which it is answered (`true`).
    pub(super) fn obtain(
        &self,
        request: &Request<'_>,
        missing: Missing,
        asked: &mut Asked<'_>,
        reply: &mut Reply<'_>,
        interrupt: &Interrupt,
    ) -> Result<bool, FsError> {
        if let Missing::Own(object) = missing {
            asked.want(object.ino());
            if object.ino().of_slot().is_some() && asked.slots < slot::ASKS_MAX {
                // Granted, or the directory is not split any more.
                asked.slots += 1;
                // Others may have asked for it before, and wait until this host has let go of its names.
                let _waits = self.client.waits_with_locks(locked_by(request));
                self.client.acquire(object, Some(interrupt))?;
                return Ok(false);
            }
        }
        let change = match (missing, self.change_of(request)) {
            (Missing::Own(object), None) => {
                self.client.acquire(object, Some(interrupt))?;
                return Ok(false);
            }
            // Rows of files are changed by their owner.
            (Missing::Own(object @ Object::File { .. }), Some(_)) => {
                self.client.acquire(object, Some(interrupt))?;
                return Ok(false);
            }
            (Missing::Own(Object::Directory(slot)), Some(change)) if slot.of_slot().is_some() => {
                asked.was_yours = true;
                change
            }
            (Missing::Own(Object::Directory(dir)), Some(change)) => {
                let tried = asked.acquired.contains(&dir) || self.client.core().names.is_changed_here(dir);
                asked.acquired.push(dir);
                if !tried {
                    // Who has to expire names there waits for this call, which may wait for him.
                    let _waits = self.client.waits_with_locks(locked_by(request));
                    if self.client.acquire(Object::Directory(dir), Some(interrupt))? {
                        return Ok(false);
                    }
                }
                change
            }
            (_, Some(change)) => change,
            (_, None) => return Err(FsError::NotSupported),
        };
        let moves = match request.op {
            Operation::Rename { name, new_parent, new_name, flags } => {
                let (from, to) = ((NodeId(request.nodeid), name), (NodeId(new_parent), new_name));
                Some((from, to, flags & RENAME_EXCHANGE != 0))
            }
            _ => None,
        };
        if let Some((from, to, exchange)) = moves {
            self.client.core().names.late.may_move(from, to, exchange);
        }
        // What became its own may not be enough: the row of a directory that is moved or removed is another's. The server does it,
        // and recalls for that what was just acquired: to keep that for this call would be to wait for oneself.
        asked.want_nothing();
        match self.client.change(&change, missing == Missing::Executor || asked.was_yours, interrupt)? {
            Outcome::Split => Ok(false),
            Outcome::Yours => {
                asked.was_yours = true;
                Ok(false)
            }
            Outcome::Done(made) => {
                if let Some((from, to, exchange)) = moves {
                    // The kernel moves what it has there when it has the answer; until then it lets nobody look there.
                    self.client.core().renamed(from, to, exchange);
                }
                self.answer_done(request, made, reply, interrupt).map(|()| true)
            }
            Outcome::Refused(TreeError::Exists) if opens_existing(request) => Ok(false),
            Outcome::Refused(error) => Err(FsError::Tree(error)),
        }
    }

    /// The operation as the server executes it.
    pub(super) fn change_of(&self, request: &Request<'_>) -> Option<Change> {
        let dir = ino_of(request);
        let made = |name: &[u8], new: NewNode| Some(Change::Create(dir, Name::new(name), new));
        match request.op {
            Operation::Create { name, mode, .. } => {
                let mode = FileKind::Regular.bits() | (mode & 0o7777);
                made(name, NewNode { mode, ..owned_by(request) })
            }
            Operation::Mkdir { name, mode, .. } => {
                let mode = FileKind::Directory.bits() | (mode & 0o7777);
                made(name, NewNode { mode, ..owned_by(request) })
            }
            Operation::Mknod { name, mode, rdev, .. } => {
                made(name, NewNode { mode, rdev, ..owned_by(request) })
            }
            Operation::Symlink { name, target } => {
                let mode = FileKind::Symlink.bits() | 0o777;
                let target = Some(Bytes::copy_from_slice(target));
                made(name, NewNode { mode, target, ..owned_by(request) })
            }
            Operation::Link { ino, new_name } => {
                Some(Change::Link(NodeId(ino).ino(), dir, Name::new(new_name)))
            }
            Operation::Unlink { name } => Some(Change::Unlink(dir, Name::new(name))),
            Operation::Rmdir { name } => Some(Change::Rmdir(dir, Name::new(name))),
            Operation::Rename { name, new_parent, new_name, flags } => {
                let flags = RenameFlags {
                    no_replace: flags & RENAME_NOREPLACE != 0,
                    exchange: flags & RENAME_EXCHANGE != 0,
                    whiteout: flags & RENAME_WHITEOUT != 0,
                };
                let to = NodeId(new_parent).ino();
                Some(Change::Rename((dir, Name::new(name)), (to, Name::new(new_name)), flags))
            }
            Operation::Setattr(change) if change.size.is_none() => {
                let time = |time: Option<TimeOrNow>| {
                    time.map(|time| match time {
                        TimeOrNow::Now => self.now(),
                        TimeOrNow::Time(time) => Timestamp { secs: time.seconds, nanos: time.nanos },
                    })
                };
                let change = AttributeChange {
                    mode: change.mode,
                    uid: change.uid,
                    gid: change.gid,
                    size: None,
                    atime: time(change.atime),
                    mtime: time(change.mtime),
                    kill_privileges: change.kill_suidgid,
                };
                Some(Change::SetAttributes(dir, change))
            }
            Operation::Setxattr { name, value, flags, .. } => {
                let mode = (flags & libc::XATTR_CREATE as u32 != 0, flags & libc::XATTR_REPLACE as u32 != 0);
                let (name, value) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(value));
                Some(Change::SetXattr(dir, name, value, mode))
            }
            Operation::Removexattr { name } => Some(Change::RemoveXattr(dir, Bytes::copy_from_slice(name))),
            _ => None,
        }
    }

    /// Answers an operation that the server has executed. What it changed is here already.
    fn answer_done(
        &self,
        request: &Request<'_>,
        made: Option<Ino>,
        reply: &mut Reply<'_>,
        interrupt: &Interrupt,
    ) -> Result<(), FsError> {
        let ino = match request.op {
            Operation::Link { ino, .. } => NodeId(ino).ino(),
            Operation::Setattr(_) => ino_of(request),
            _ => match made {
                Some(made) => made,
                None => return Ok(()),
            },
        };
        loop {
            let error = match self.answer_row(request, ino, reply, interrupt) {
                Ok(()) => return Ok(()),
                Err(Stop::Error(error)) => error,
                // Somebody has changed it in this moment: it is fetched.
                Err(Stop::Need(need)) => match self.satisfy(need, &mut None, interrupt) {
                    Ok(()) => continue,
                    Err(error) => error,
                },
            };
            let mut core = self.client.core();
            core.give_up_made(ino);
            self.changed(&mut core);
            return Err(error);
        }
    }

    fn answer_row(
        &self,
        request: &Request<'_>,
        ino: Ino,
        reply: &mut Reply<'_>,
        interrupt: &Interrupt,
    ) -> Result<(), Stop> {
        let mut core = self.client.core();
        let caller = Caller::of(request, Pace::Patient(interrupt));
        let validity = core.validity((NodeId(request.nodeid), name_of(request)), caller);
        let row = core.tree.inode(ino)?;
        match request.op {
            Operation::Setattr(_) => reply.attr(&attr(ino, row), Validity::ZERO),
            Operation::Create { .. } => {
                reply.create(&made_entry(NodeId::of_file(ino), row, validity), 0, OPEN_FLAGS);
                core.hand_out_made(ino);
            }
            Operation::Mkdir { name, .. } => {
                let at = NodeId(request.nodeid);
                reply.entry(&made_entry(core.nodes.number(at, name, ino), row, validity));
                self.hand_out(&mut core, at, name, ino);
                core.give_up_made(ino);
            }
            _ => {
                reply.entry(&made_entry(core.nodes.file(ino), row, validity));
                core.hand_out_made(ino);
            }
        }
        Ok(())
    }
}

/// The name that a request makes, if it makes any.
fn name_of<'a>(request: &Request<'a>) -> &'a [u8] {
    match request.op {
        Operation::Create { name, .. }
        | Operation::Mkdir { name, .. }
        | Operation::Mknod { name, .. }
        | Operation::Symlink { name, .. }
        | Operation::Link { new_name: name, .. } => name,
        _ => b"",
    }
}

/// Whether the operation is content with a file that somebody else was faster to make.
fn opens_existing(request: &Request<'_>) -> bool {
    matches!(request.op, Operation::Create { flags, .. } if flags & libc::O_EXCL as u32 == 0)
}
