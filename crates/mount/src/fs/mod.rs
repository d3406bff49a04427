//! The kernel's requests, answered from memory.

mod attributes;
mod error;
mod io;
mod locks;
mod names;
mod replaced;
mod request;
mod twins;
mod xattrs;

pub use xattrs::VOLUME_XATTR;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hayloft_fuse::{
    Errno, Failure, FileSystem, Forget, Interrupt, Operation, Pace, Reply, Request, write_flags,
};
use hayloft_model::{Ino, Missing, Timestamp, TreeError};

use self::error::FsError;
use self::io::Write;
use self::request::Asked;
use crate::cache::data::{File, Lacking};
use crate::core::{Client, Core};
use crate::kernel::late::{Caller, Callers};
use crate::kernel::nodes::NodeId;
use crate::log::accepted::UpTo;
use crate::session::link::Condition;
use crate::sharing::fault::FaultError;
use crate::sharing::kept;
use crate::stats::{Hold, sent_here};

/// How soon it is looked again whether something has changed.
const CHANGED_PAUSE: Duration = Duration::from_micros(50);

/// A volume as a file system.
pub(crate) struct VolumeFs {
    client: Arc<Client>,
    /// Who asks, see [`crate::kernel::late`].
    callers: Arc<Callers>,
}

/// What an operation has to wait for before it can be done. It has changed nothing.
enum Need {
    Row(Missing),
    Data(Ino, Arc<File>, Lacking),
    /// Unshipped data has to become less.
    Room,
    /// The server has to say how full the store is.
    Status,
    /// What others are just changing has to have changed.
    Changed,
}

/// Why an operation did not complete.
enum Stop {
    Error(FsError),
    Need(Need),
}

impl From<TreeError> for Stop {
    fn from(error: TreeError) -> Stop {
        match error {
            TreeError::Missing(missing) => Stop::Need(Need::Row(missing)),
            error => Stop::Error(FsError::Tree(error)),
        }
    }
}

impl From<FsError> for Stop {
    fn from(error: FsError) -> Stop {
        Stop::Error(error)
    }
}

type Done = Result<(), Stop>;

thread_local! {
    /// How this host holds what the request is about that this thread answers, if it was done with the core at hand.
    static DONE: Cell<Option<Hold>> = const { Cell::new(None) };
}

/// Notes what a request says about files just made. It is not answered before this: whoever has its locks next comes later.
fn note_done(request: &Request<'_>, core: &mut Core) -> Hold {
    core.note_arrivals(request, matches!(request.op, Operation::Create { .. }));
    core.hold(ino_of(request))
}

/// The request is done, and nothing more can fail: what remains to be noted is, while the core is at hand.
fn done(request: &Request<'_>, core: &mut Core) {
    DONE.set(Some(note_done(request, core)));
}

impl FileSystem for VolumeFs {
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, pace: Pace<'_>) -> Result<(), Failure> {
        let sent = sent_here();
        DONE.set(None);
        if let Pace::Fast = pace {
            self.callers.ask(request);
        }
        let twins = self.twins(request);
        if twins.is_some() && matches!(pace, Pace::Fast) {
            return Err(Failure::Again);
        }
        let handled = match self.attend(request, reply, pace) {
            // Whom it looks for waits with one of the pool's threads.
            Err(Failure::Again) if self.client.lookers.has(request.pid) => Err(Failure::Errno(Errno::EINTR)),
            handled => handled,
        };
        twins.into_iter().for_each(|twins| self.tell_twins(twins));
        // When it has ended, the core may be held for long by who keeps what was not sent.
        let condition = self.client.link.condition();
        if let (Operation::Lookup { .. }, Err(Failure::Errno(error))) = (&request.op, &handled)
            && *error != Errno::ESTALE
            && condition != Condition::Ended
        {
            self.client.core().moved.finds_nothing(request.pid);
        }
        if condition == Condition::Live && !matches!(handled, Err(Failure::Again)) {
            let hold = DONE.take().unwrap_or_else(|| note_done(request, &mut self.client.core()));
            self.client.stats.count_operation(hold, sent_here() - sent);
        }
        handled
    }

    fn answered(&self, unique: u64) {
        self.client.calls.end(unique);
    }

    fn forget(&self, forgets: &[Forget]) {
        let mut core = self.client.core();
        for forget in forgets {
            core.take_back(NodeId(forget.nodeid), forget.nlookup);
            let ino = NodeId(forget.nodeid).ino();
            if !core.is_handed_out(ino) {
                core.sizes.settled(ino);
            }
        }
        let ended = core.nodes.take_ended();
        self.client.drop_ended(&mut core);
        let (dirty, released) = (core.tree.is_dirty(), core.tree.has_released());
        drop(core);
        ended.into_iter().for_each(|tree| self.client.replaced.end(tree));
        if released {
            self.client.let_go();
        }
        if dirty {
            self.client.ledger.touch();
        }
    }
}

impl VolumeFs {
    pub(crate) fn new(client: Arc<Client>) -> VolumeFs {
        let callers = Arc::clone(&client.core().names.late.callers);
        VolumeFs { client, callers }
    }

    /// Answers a request, as soon as there is what it needs.
    fn attend(&self, request: &Request<'_>, reply: &mut Reply<'_>, pace: Pace<'_>) -> Result<(), Failure> {
        let mut status_asked = false;
        // What is lost while it waits for anything is lost for it as well.
        let sync_asked = match (&request.op, pace) {
            (Operation::Fsync { .. } | Operation::Fsyncdir { .. } | Operation::Syncfs, Pace::Patient(_)) => {
                Some(self.client.ask_durable())
            }
            _ => None,
        };
        let mut asked = Asked::new(&self.client);
        let (mut needed, mut gone, mut looked) = (None, None, None);
        // It has the directory's lock, and waits for the server until it is answered.
        let flushes = matches!((&request.op, pace), (Operation::Fsyncdir { .. }, Pace::Patient(_)));
        let _asks = flushes.then(|| self.client.asks_with_locks(locked_by(request)));
        if let Pace::Patient(_) = pace {
            self.client.calls.note(request, false);
        }
        loop {
            // It may have been replaced while the request has waited.
            if self.client.any_replaced.load(Ordering::Acquire)
                && let Some(tree) = self.replaced(request)
            {
                return self.answer_replaced(tree, request, reply, pace);
            }
            match (self.client.link.condition(), pace) {
                (Condition::Live, _) => {}
                // Who asks what became of the mount has to find it.
                (Condition::Ended, _) if is_top(request) => {}
                (Condition::Ended, _) => return Err(Failure::Errno(Errno::EIO)),
                (Condition::Lapsed, Pace::Fast) => {
                    self.client.note_wait(request);
                    return Err(Failure::Again);
                }
                (Condition::Lapsed, Pace::Patient(interrupt)) => {
                    self.client.note_wait(request);
                    self.client.link.await_lease(interrupt).map_err(|_| Failure::Errno(Errno::EINTR))?;
                    self.client.calls.note(request, false);
                    continue;
                }
            }
            // Who was ended while the host was away changes nothing any more: it may be done elsewhere by now.
            let relived = self.client.link.relived().filter(|_| changes(&request.op));
            if relived.is_some() && relived != looked {
                let Pace::Patient(interrupt) = pace else {
                    self.client.note_wait(request);
                    return Err(Failure::Again);
                };
                if interrupt.abandoned_now() {
                    return Err(Failure::Errno(Errno::EINTR));
                }
                looked = relived;
            }
            let answered = match self.answer(request, reply, pace, status_asked, sync_asked) {
                // There may be room by now, and a larger quota.
                Err(Stop::Error(FsError::Tree(TreeError::NoSpace))) if !status_asked => {
                    Err(Stop::Need(Need::Status))
                }
                answered => answered,
            };
            match answered {
                Ok(()) => return Ok(()),
                Err(Stop::Error(error)) => return Err(Failure::Errno(self.told(request, error).errno())),
                Err(Stop::Need(need)) => match pace {
                    Pace::Fast => {
                        self.client.note_wait(request);
                        return Err(Failure::Again);
                    }
                    Pace::Patient(interrupt) => {
                        self.client.note_wait(request);
                        // It may have the lock that a word waits for.
                        self.client.core().note_arrivals(request, false);
                        // Who waits for others as well keeps nothing from them.
                        needed = match need {
                            Need::Row(Missing::Inode(ino)) | Need::Data(ino, ..) => needed
                                .filter(|needed: &kept::Need<'_>| needed.is_of(ino))
                                .or_else(|| Some(self.client.kept.need(ino))),
                            _ => None,
                        };
                        // For its data it waits without a directory's lock.
                        let _asks = (!matches!(need, Need::Data(..)))
                            .then(|| self.client.asks_with_locks(locked_by(request)));
                        if let Need::Row(missing @ (Missing::Own(_) | Missing::Executor)) = need {
                            match self.obtain(request, missing, &mut asked, reply, interrupt) {
                                Ok(true) => return Ok(()),
                                Ok(false) => {
                                    self.client.calls.note(request, false);
                                    continue;
                                }
                                Err(error) => return Err(Failure::Errno(self.told(request, error).errno())),
                            }
                        }
                        if let Need::Row(Missing::Names(_)) = need {
                            // These come behind who has asked for the slot meanwhile, and waits until it is given back.
                            asked.want_nothing();
                        }
                        status_asked |= matches!(need, Need::Status);
                        let _waits = match need {
                            // A listing is of a directory that was split: it is recalled, from this host too. So is a slot, for
                            // who has asked for it before.
                            Need::Row(Missing::Heard(_) | Missing::Listing(_) | Missing::Names(_)) => {
                                Some(self.client.waits_with_locks(locked_by(request)))
                            }
                            _ => None,
                        };
                        let named = match need {
                            Need::Row(Missing::Inode(ino)) if ino != ino_of(request) => Some(ino),
                            _ => None,
                        };
                        match self.satisfy(need, &mut needed, interrupt) {
                            Ok(()) => {}
                            // It was removed after its name was looked at: that leads elsewhere by now.
                            Err(FsError::Fault(FaultError::Gone)) if named.is_some() && gone != named => {
                                gone = named;
                            }
                            Err(error) => return Err(Failure::Errno(error.errno())),
                        }
                        self.client.calls.note(request, false);
                    }
                },
            }
        }
    }

    /// `needed`: what is kept for the call.
    fn satisfy<'a>(
        &'a self,
        need: Need,
        needed: &mut Option<kept::Need<'a>>,
        interrupt: &Interrupt,
    ) -> Result<(), FsError> {
        match need {
            Need::Row(missing) => Ok(self.client.fetch_row(missing, Some(interrupt))?),
            Need::Data(ino, file, lacking) => {
                let fetched = self.client.fetch_data(ino, &file, lacking, needed, Some(interrupt));
                match fetched {
                    // Another host has changed the file meanwhile: what was asked for is not its data any more.
                    Err(FaultError::Gone | FaultError::Broken(_)) if !self.client.is_current(ino, &file) => {
                        Ok(())
                    }
                    fetched => Ok(fetched?),
                }
            }
            Need::Status => {
                self.client.refresh_status(Some(interrupt));
                Ok(())
            }
            Need::Changed => {
                if interrupt.wait_timeout(CHANGED_PAUSE) {
                    Err(FsError::Interrupted)
                } else {
                    Ok(())
                }
            }
            Need::Room => {
                if interrupt.interrupted() {
                    return Err(FsError::Interrupted);
                }
                if let Some(reason) = self.client.link.ended() {
                    return Err(FsError::Ended(reason));
                }
                if self.client.ledger.is_full() {
                    return Err(FsError::Tree(TreeError::NoSpace));
                }
                self.client.await_room();
                Ok(())
            }
        }
    }

    fn answer(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        pace: Pace<'_>,
        status_asked: bool,
        sync_asked: Option<UpTo>,
    ) -> Done {
        let ino = ino_of(request);
        // The kernel lets nothing through, unless somebody has told it since to.
        if self.client.options.read_only && changes(&request.op) {
            return Err(FsError::ReadOnly.into());
        }
        if relies_on_locks(&request.op) && self.client.locks.get().is_some_and(|locks| locks.is_lost(ino)) {
            return Err(FsError::LockLost.into());
        }
        if self.client.dirty_rows.load(Ordering::Relaxed) > self.client.memory.dirty_rows()
            && adds_rows(&request.op)
        {
            return Err(Stop::Need(Need::Room));
        }
        match request.op {
            Operation::Lookup { name } => self.lookup(request, name, pace, reply),
            Operation::Getattr { .. } => self.attributes(request, pace, reply),
            Operation::Setattr(change) => self.set_attributes(request, &change, reply),
            Operation::Readlink => self.readlink(ino, reply),
            Operation::Symlink { name, target } => self.symlink(request, name, target, pace, reply),
            Operation::Mknod { name, mode, rdev, .. } => self.mknod(request, name, mode, rdev, pace, reply),
            Operation::Mkdir { name, mode, .. } => self.mkdir(request, name, mode, pace, reply),
            Operation::Unlink { name } => self.unlink(request, name),
            Operation::Rmdir { name } => self.rmdir(ino, name),
            Operation::Rename { name, new_parent, new_name, flags } => {
                self.rename((NodeId(request.nodeid), name), (NodeId(new_parent), new_name), flags)
            }
            Operation::Link { ino: linked, new_name } => {
                self.link(NodeId(linked).ino(), ino, new_name, Caller::of(request, pace), reply)
            }
            Operation::Create { name, mode, flags, .. } => {
                self.create(request, name, mode, flags, pace, reply)
            }
            Operation::Tmpfile { mode, .. } => self.create_unnamed(request, mode, reply),
            Operation::Read { offset, size, flags, .. } => {
                self.read(NodeId(request.nodeid), offset, size, flags, reply)
            }
            Operation::Write { offset, data, write_flags: kind, flags, .. } => {
                let is_stored = kind & write_flags::CACHE != 0;
                let of_pages = || self.client.bases_of(request, offset, data.len() as u64);
                let bases = is_stored.then(of_pages).flatten();
                let write = Write {
                    offset,
                    bytes: data,
                    appends: flags & libc::O_APPEND as u32 != 0 && !is_stored,
                    tid: request.pid,
                    kills_privileges: kind & write_flags::KILL_SUIDGID != 0,
                    is_stored,
                    bases: bases.as_deref(),
                };
                self.write(request, &write, status_asked, pace, reply)
            }
            Operation::Fallocate { offset, length, mode, .. } => {
                // The kernel does not say whether the caller may keep setuid; root may.
                let kills_privileges = request.uid != 0;
                self.fallocate(ino, offset, length, mode, kills_privileges, status_asked, pace)
            }
            Operation::Lseek { offset, whence, .. } => self.seek(ino, offset, whence, reply),
            Operation::Fsync { .. } => {
                self.await_others_writes(ino, pace)?;
                self.sync(Some(ino), request.pid, sync_asked, pace)
            }
            Operation::Fsyncdir { .. } => self.sync(Some(ino), request.pid, sync_asked, pace),
            Operation::Syncfs => self.sync(None, request.pid, sync_asked, pace),
            Operation::Readdir { offset, .. } => {
                self.readdir(NodeId(request.nodeid), offset, false, Caller::of(request, pace), reply)
            }
            Operation::Readdirplus { offset, .. } => {
                self.readdir(NodeId(request.nodeid), offset, true, Caller::of(request, pace), reply)
            }
            Operation::Statfs => self.statfs(status_asked, reply),
            Operation::Setxattr { name, value, flags, .. } => self.set_xattr(ino, name, value, flags),
            Operation::Getxattr { name, size } => self.get_xattr(request, name, size, reply),
            Operation::Listxattr { size } => self.list_xattrs(ino, size, reply),
            Operation::Removexattr { name } => self.remove_xattr(ino, name),
            Operation::Ioctl { .. } => Err(FsError::NoTty.into()),
            Operation::Getlk { .. } | Operation::Setlk { .. } | Operation::Setlkw { .. } => {
                self.lock(request, reply, pace)
            }
            // The kernel does these by itself, or is told to, once it has heard ENOSYS.
            Operation::Open { .. }
            | Operation::Opendir { .. }
            | Operation::Release { .. }
            | Operation::Releasedir { .. }
            | Operation::Flush { .. }
            | Operation::Access { .. }
            | Operation::Poll { .. }
            | Operation::CopyFileRange { .. }
            | Operation::Statx { .. }
            | Operation::Unknown(_) => Err(FsError::NotImplemented.into()),
        }
    }

    /// What a call is told that fails. The kernel looks at what names lead to before it asks: where that is of another kind
    /// than it thought, it has something old, and is to look again. (It has just looked at the target of a rename, and that may
    /// have begun anew already, see [`crate::kernel::moved`]: twice would be an error.)
    fn told(&self, request: &Request<'_>, error: FsError) -> FsError {
        use Operation::{Create, Rmdir, Unlink};
        let is_kind = matches!(error, FsError::Tree(TreeError::IsDirectory | TreeError::NotDirectory));
        let is_of_name = matches!(request.op, Create { .. } | Unlink { .. } | Rmdir { .. });
        if is_kind && is_of_name && self.client.core().excused.excuse(request.pid, ino_of(request)) {
            return FsError::Tree(TreeError::Stale);
        }
        error
    }

    fn now(&self) -> Timestamp {
        self.client.clock.now()
    }

    /// After a change of the tree: what ended is dropped, and the committer knows.
    fn changed(&self, core: &mut Core) {
        self.client.drop_ended(core);
        self.client.changed(core.tree.dirty_rows());
    }
}

/// Whether a request changes names or attributes, and so adds to the rows that have to be shipped.
fn adds_rows(op: &Operation<'_>) -> bool {
    changes(op) && !matches!(op, Operation::Write { .. })
}

/// The inode that a request is about.
fn ino_of(request: &Request<'_>) -> Ino {
    NodeId(request.nodeid).ino()
}

/// Whether a request is about the attributes of the root directory.
fn is_top(request: &Request<'_>) -> bool {
    matches!(request.op, Operation::Getattr { .. }) && request.nodeid == Ino::ROOT.0
}

/// Whether a request may be made by a program that relies on a lock of the file. Letting go is always possible.
fn relies_on_locks(op: &Operation<'_>) -> bool {
    match op {
        Operation::Setattr(change) => change.size.is_some(),
        Operation::Setlk { lock, .. } | Operation::Setlkw { lock, .. } => lock.kind != libc::F_UNLCK,
        op => matches!(op, Operation::Read { .. } | Operation::Write { .. } | Operation::Fallocate { .. }),
    }
}

/// Directories of which the kernel has the locks during a request.
fn locked_by(request: &Request<'_>) -> Vec<Ino> {
    match request.op {
        Operation::Rename { new_parent, .. } => vec![ino_of(request), NodeId(new_parent).ino()],
        Operation::Getattr { .. } | Operation::Getxattr { .. } | Operation::Listxattr { .. } => Vec::new(),
        _ => vec![ino_of(request)],
    }
}

/// Whether a request changes something.
fn changes(op: &Operation<'_>) -> bool {
    matches!(
        op,
        Operation::Setattr(_)
            | Operation::Symlink { .. }
            | Operation::Mknod { .. }
            | Operation::Mkdir { .. }
            | Operation::Unlink { .. }
            | Operation::Rmdir { .. }
            | Operation::Rename { .. }
            | Operation::Link { .. }
            | Operation::Create { .. }
            | Operation::Tmpfile { .. }
            | Operation::Write { .. }
            | Operation::Fallocate { .. }
            | Operation::Setxattr { .. }
            | Operation::Removexattr { .. }
    )
}
