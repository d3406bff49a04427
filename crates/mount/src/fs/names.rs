//! Requests about names and directories.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use hayloft_fuse::{Entry, Operation, Pace, Reply, Request, Validity, open_flags};
use hayloft_model::sound::TARGET_MAX;
use hayloft_model::tree::{NewNode, RenameFlags};
use hayloft_model::{Content, FileKind, Ino, Name, TreeError};

use super::attributes::{entry, made_entry};
use super::error::FsError;
use super::{Done, Need, Stop, VolumeFs, done, ino_of};
use crate::core::{Core, CoreGuard};
use crate::host::thread;
use crate::kernel::Word;
use crate::kernel::late::Caller;
use crate::kernel::moved::{Doing, Kind, Paths, Told};
use crate::kernel::nodes::{Left, NodeId};
use crate::kernel::offsets::{cookie_at, offset_of};
use crate::sharing::ahead::Place;

pub(super) const RENAME_NOREPLACE: u32 = 1;
pub(super) const RENAME_EXCHANGE: u32 = 2;
pub(super) const RENAME_WHITEOUT: u32 = 4;
/// Where the kernel is when it asks whether a name leads where it did.
const REVALIDATES: &str = "fuse_dentry_revalidate";

/// Files stay in the kernel's cache until told otherwise. Without NOFLUSH a close writes back what was stored through a
/// map; FLUSH itself is not sent, since it was answered by ENOSYS once.
pub(super) const OPEN_FLAGS: u32 = open_flags::KEEP_CACHE;

impl VolumeFs {
    pub(super) fn lookup(
        &self,
        request: &Request<'_>,
        name: &[u8],
        pace: Pace<'_>,
        reply: &mut Reply<'_>,
    ) -> Done {
        let at = NodeId(request.nodeid);
        let dir = at.ino();
        let (mut seen, mut apart) = (None, None);
        let mut core = loop {
            let mut core = self.client.core();
            core.moved.looks_up(request.pid, (dir, name));
            let Some(moved) = moved_to(&mut core, dir, name).filter(|moved| Some(*moved) != seen) else {
                break core;
            };
            drop(core);
            match self.of_moved(request, name, moved, pace)? {
                None => {}
                Some(Told::Truth) => (seen, apart) = (Some(moved), None),
                Some(Told::Apart) => (seen, apart) = (Some(moved), Some(moved)),
                Some(Told::LookAgain) => return Err(TreeError::Stale.into()),
                Some(Told::Absent) => {
                    reply.entry(&Entry::negative(Validity::ZERO));
                    return Ok(());
                }
            }
        };
        let found = match name {
            b"." | b".." => return self.lookup_lone(core, at, name, reply),
            name => core.tree.lookup(dir, name)?,
        };
        match found {
            Some(dentry) => {
                let ino = dentry.ino;
                core.tree.shown(ino)?;
                if core.births.holds_back(NodeId::of_file(ino), at, name) {
                    return Err(Stop::Need(Need::Changed));
                }
                if apart == Some(ino) {
                    let node = self.tell_left(core.hand_out_apart(at, name, ino));
                    reply.entry(&made_entry(node, core.tree.inode(ino)?, Validity::ZERO));
                    done(request, &mut core);
                    return Ok(());
                }
                let validity = core.presence(at, name, &dentry, Caller::of(request, pace));
                let node = self.hand_out(&mut core, at, name, ino);
                let is_changing = core.names.changing.contains(ino) | core.tree.run_clock(ino, self.now());
                let entry = if is_changing { made_entry } else { entry };
                reply.entry(&entry(node, core.tree.inode(ino)?, validity));
            }
            None => {
                core.moved.finds_nothing(request.pid);
                reply.entry(&Entry::negative(core.absence(at, name, Caller::of(request, pace))));
            }
        }
        done(request, &mut core);
        Ok(())
    }

    /// The kernel asks for these by number when it has no entry of a directory (exports only).
    fn lookup_lone(&self, mut core: CoreGuard<'_>, at: NodeId, name: &[u8], reply: &mut Reply<'_>) -> Done {
        let node = match name {
            b"." => at,
            _ => core.nodes.parent(at, core.tree.shown(at.ino())?.parent),
        };
        core.tree.run_clock(node.ino(), self.now());
        let entry = made_entry(node, core.tree.inode(node.ino())?, Validity::ZERO);
        core.hand_out_lone(node, node == at);
        reply.entry(&entry);
        Ok(())
    }

    /// The kernel is told of an inode under a name: one more reference.
    pub(super) fn hand_out(&self, core: &mut Core, at: NodeId, name: &[u8], ino: Ino) -> NodeId {
        self.tell_left(core.hand_out(at, name, ino))
    }

    /// Has the kernel let go of directories where they are no more, as they are handed out under another number.
    fn tell_left(&self, (node, left): (NodeId, Vec<Left>)) -> NodeId {
        if !left.is_empty() {
            self.client.tell_kernel(Word::Left(left));
        }
        node
    }

    /// What a thread is told of a name that leads to an inode which has just moved, see [`crate::kernel::moved`]; none: that is not so any more.
    fn of_moved(
        &self,
        request: &Request<'_>,
        name: &[u8],
        moved: Ino,
        pace: Pace<'_>,
    ) -> Result<Option<Told>, Stop> {
        if let Pace::Fast = pace {
            // To look at a thread takes a while. `Room` is what any thread of the pool may wait for.
            return Err(Stop::Need(Need::Room));
        }
        let doing = crate::kernel::moved::doing(request.pid);
        let revalidates = matches!(doing, Doing::Rename(_)) && thread::is_in(request.pid, REVALIDATES);
        let (tid, place) = (request.pid, (ino_of(request), name));
        let mut core = self.client.core();
        if moved_to(&mut core, place.0, name) != Some(moved) {
            return Ok(None);
        }
        let kind = kind_of(&mut core, place.0, name);
        let concerns = |paths: &Paths| core.moved.concerns(moved, place, kind.is_directory, paths);
        let told = match &doing {
            Doing::Other => return Ok(Some(Told::Truth)),
            Doing::Unseen => return Ok(Some(Told::once(core.moved.excuse_unseen(moved, tid)))),
            // It looks the name up next.
            Doing::Rename(paths) if revalidates && paths.as_ref().is_none_or(concerns) => {
                return Ok(Some(Told::LookAgain));
            }
            Doing::Rename(Some(paths)) => core.moved.told_renamer(moved, tid, place, kind, paths),
            Doing::Rename(None) => Told::once(core.moved.excuse(moved, tid)),
        };
        // Not by the number that the kernel goes by for a directory.
        if told == Told::Absent || told == Told::Apart && !kind.is_directory {
            core.moved.hide(tid, moved);
            self.client.any_hidden.store(true, Ordering::Release);
        }
        Ok(Some(told))
    }

    fn make(&self, request: &Request<'_>, name: &[u8], new: NewNode, pace: Pace<'_>) -> Result<Entry, Stop> {
        self.check_not_full()?;
        let mut core = self.client.core();
        let at = NodeId(request.nodeid);
        let dir = at.ino();
        let ino = core.tree.create(dir, name, new, self.now())?;
        core.names.exists(dir, name);
        let node = self.hand_out(&mut core, at, name, ino);
        let validity = core.validity((at, name), Caller::of(request, pace));
        let is_file = matches!(request.op, Operation::Create { .. });
        let is_birth = is_file && !core.tree.is_split(dir);
        let lasts = is_birth && core.births.begin(at, name, node);
        if is_birth && !lasts {
            self.settle_births(&mut core);
        }
        let entry = if lasts { entry } else { made_entry }(node, core.tree.inode(ino)?, validity);
        self.changed(&mut core);
        done(request, &mut core);
        Ok(entry)
    }

    /// There are too many files of which the kernel may not have come to the answer: it has, when it has heard of them.
    fn settle_births(&self, core: &mut Core) {
        if let Some(attributes) = core.births.take_excess() {
            self.client.tell_kernel(Word::Stale {
                names: Vec::new(),
                attributes,
                data: Vec::new(),
                in_use: Vec::new(),
                ack: None,
                bases: Vec::new(),
            });
        }
    }

    pub(super) fn symlink(
        &self,
        request: &Request<'_>,
        name: &[u8],
        target: &[u8],
        pace: Pace<'_>,
        reply: &mut Reply<'_>,
    ) -> Done {
        if target.len() > TARGET_MAX {
            return Err(FsError::Tree(TreeError::NameTooLong).into());
        }
        let new = NewNode {
            mode: FileKind::Symlink.bits() | 0o777,
            target: Some(Bytes::copy_from_slice(target)),
            ..owned_by(request)
        };
        reply.entry(&self.make(request, name, new, pace)?);
        Ok(())
    }

    pub(super) fn mknod(
        &self,
        request: &Request<'_>,
        name: &[u8],
        mode: u32,
        rdev: u32,
        pace: Pace<'_>,
        reply: &mut Reply<'_>,
    ) -> Done {
        reply.entry(&self.make(request, name, NewNode { mode, rdev, ..owned_by(request) }, pace)?);
        Ok(())
    }

    pub(super) fn mkdir(
        &self,
        request: &Request<'_>,
        name: &[u8],
        mode: u32,
        pace: Pace<'_>,
        reply: &mut Reply<'_>,
    ) -> Done {
        let mode = FileKind::Directory.bits() | (mode & 0o7777);
        reply.entry(&self.make(request, name, NewNode { mode, ..owned_by(request) }, pace)?);
        Ok(())
    }

    pub(super) fn create(
        &self,
        request: &Request<'_>,
        name: &[u8],
        mode: u32,
        flags: u32,
        pace: Pace<'_>,
        reply: &mut Reply<'_>,
    ) -> Done {
        let mode = FileKind::Regular.bits() | (mode & 0o7777);
        let entry = match self.make(request, name, NewNode { mode, ..owned_by(request) }, pace) {
            // Somebody else on this host was faster; without O_EXCL theirs is opened.
            Err(Stop::Error(FsError::Tree(TreeError::Exists))) if flags & libc::O_EXCL as u32 == 0 => {
                self.open_existing(NodeId(request.nodeid), name, flags, Caller::of(request, pace))?
            }
            result => result?,
        };
        reply.create(&entry, 0, OPEN_FLAGS);
        Ok(())
    }

    fn open_existing(&self, at: NodeId, name: &[u8], flags: u32, caller: Caller) -> Result<Entry, Stop> {
        let mut core = self.client.core();
        let dir = at.ino();
        let dentry = core.tree.lookup(dir, name)?.ok_or(TreeError::NotFound)?;
        match dentry.kind {
            FileKind::Directory => return Err(TreeError::IsDirectory.into()),
            FileKind::Symlink => return Err(TreeError::Stale.into()),
            _ => {}
        }
        if flags & libc::O_TRUNC as u32 != 0 && dentry.kind == FileKind::Regular {
            self.set_size(&mut core, dentry.ino, 0, false)?;
            self.changed(&mut core);
        }
        core.tree.shown(dentry.ino)?;
        let validity = core.validity((at, name), caller);
        let node = self.hand_out(&mut core, at, name, dentry.ino);
        Ok(made_entry(node, core.tree.inode(dentry.ino)?, validity))
    }

    pub(super) fn create_unnamed(&self, request: &Request<'_>, mode: u32, reply: &mut Reply<'_>) -> Done {
        self.check_not_full()?;
        let new = NewNode { mode: FileKind::Regular.bits() | (mode & 0o7777), ..owned_by(request) };
        let mut core = self.client.core();
        let at = NodeId(request.nodeid);
        let ino = core.tree.create_unnamed(at.ino(), new, self.now())?;
        let node = self.hand_out(&mut core, at, b"", ino);
        reply.create(&made_entry(node, core.tree.inode(ino)?, Validity::FOREVER), 0, OPEN_FLAGS);
        Ok(())
    }

    pub(super) fn link(
        &self,
        ino: Ino,
        dir: Ino,
        name: &[u8],
        caller: Caller,
        reply: &mut Reply<'_>,
    ) -> Done {
        self.check_not_full()?;
        let mut core = self.client.core();
        let number = core.nodes.file(ino);
        core.asked_for(number);
        core.tree.link(ino, dir, name, self.now())?;
        core.names.exists(dir, name);
        // No directory: it has one number wherever its names are.
        let node = self.hand_out(&mut core, NodeId::of_file(dir), name, ino);
        let validity = core.validity((NodeId::of_file(dir), name), caller);
        reply.entry(&made_entry(node, core.tree.inode(ino)?, validity));
        self.changed(&mut core);
        Ok(())
    }

    pub(super) fn unlink(&self, request: &Request<'_>, name: &[u8]) -> Done {
        let mut core = self.client.core();
        core.tree.unlink(ino_of(request), name, self.now())?;
        self.changed(&mut core);
        done(request, &mut core);
        Ok(())
    }

    pub(super) fn rmdir(&self, dir: Ino, name: &[u8]) -> Done {
        let mut core = self.client.core();
        core.tree.rmdir(dir, name, self.now())?;
        self.changed(&mut core);
        Ok(())
    }

    pub(super) fn rename(&self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), flags: u32) -> Done {
        if flags & !(RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT) != 0 {
            return Err(TreeError::Invalid.into());
        }
        let flags = RenameFlags {
            no_replace: flags & RENAME_NOREPLACE != 0,
            exchange: flags & RENAME_EXCHANGE != 0,
            whiteout: flags & RENAME_WHITEOUT != 0,
        };
        let mut core = self.client.core();
        core.tree.rename((from.0.ino(), from.1), (to.0.ino(), to.1), flags, self.now())?;
        core.names.exists(to.0.ino(), to.1);
        core.moves_by_slot((from.0.ino(), from.1), (to.0.ino(), to.1));
        // Of a directory that this host owns names may be for one use as well.
        if core.names.counts_any() {
            let (old, new) = (Name::new(from.1), Name::new(to.1));
            core.takes_along((from.0.ino(), &old), (to.0.ino(), &new), flags.exchange);
        }
        core.renamed(from, to, flags.exchange);
        self.changed(&mut core);
        Ok(())
    }

    pub(super) fn readlink(&self, ino: Ino, reply: &mut Reply<'_>) -> Done {
        match &self.client.core().tree.inode(ino)?.content {
            Content::Target(target) => reply.data(target),
            _ => return Err(TreeError::Invalid.into()),
        }
        Ok(())
    }

    pub(super) fn readdir(
        &self,
        at: NodeId,
        offset: u64,
        plus: bool,
        caller: Caller,
        reply: &mut Reply<'_>,
    ) -> Done {
        let mut core = self.client.core();
        let (dir, offset) = (at.ino(), cookie_at(offset));
        // The kernel keeps it in any case, and is not to have what is old in a moment.
        if core.names.changing.is_closed(dir) {
            return Err(Stop::Need(Need::Changed));
        }
        core.names.changing.lists(dir);
        if offset == 0 {
            self.client.ahead.reads(Place { ino: dir, index: 0 });
        }
        let parent = core.tree.shown(dir)?.parent;
        let validity = if plus { core.validity_listed(at, caller) } else { Validity::ZERO };
        let mut known = Vec::new();
        {
            let Core { tree, nodes, made, names, births, .. } = &mut *core;
            let mut writer = reply.directory();
            let kind = FileKind::Directory.bits() >> 12;
            let dots = [(1, &b"."[..], dir), (2, &b".."[..], parent)];
            for (cookie, name, ino) in dots.into_iter().filter(|(cookie, _, _)| *cookie > offset) {
                let full = if plus {
                    // No reference is given for these two: nodeid 0 says so.
                    let mut attr = Entry::negative(Validity::ZERO);
                    (attr.attr.ino, attr.attr.mode) = (ino.0, FileKind::Directory.bits());
                    !writer.add_plus(&attr, offset_of(cookie), kind, name)
                } else {
                    !writer.add(ino.0, offset_of(cookie), kind, name)
                };
                if full {
                    return Ok(());
                }
            }
            let entries: Vec<_> = tree
                .entries(dir, offset.max(2))?
                .take(ENTRIES_MAX)
                .map(|(name, dentry)| (name.clone(), *dentry))
                .collect();
            for (name, dentry) in entries {
                let (kind, next) = (dentry.kind.bits() >> 12, offset_of(dentry.cookie));
                // A row that is not here (others own it), or has just been made under another name, is looked up when it is
                // asked for.
                let mut is_born =
                    |name: &Name| births.holds_back(NodeId::of_file(dentry.ino), at, name.as_bytes());
                let runs = tree.run_clock(dentry.ino, self.now());
                let row = tree.shown(dentry.ino).ok().filter(|_| plus && !is_born(&name));
                if plus && dentry.kind == FileKind::Directory {
                    names.late.told(dentry.ino, at, name.as_bytes());
                }
                let added = match row {
                    Some(row) => {
                        let node = match dentry.kind {
                            FileKind::Directory => nodes.number(at, name.as_bytes(), dentry.ino),
                            _ => nodes.file(dentry.ino),
                        };
                        // What is new to the kernel may wait there for another call, which waits for the word that it has
                        // changed.
                        let is_known = tree.lookups(dentry.ino) > u64::from(made.contains(&dentry.ino));
                        let lasts = is_known || tree.owns(dentry.ino);
                        let lasts = lasts && !runs && !names.changing.contains(dentry.ino);
                        let entry = if lasts { entry } else { made_entry }(node, row, validity);
                        writer.add_plus(&entry, next, kind, name.as_bytes())
                    }
                    None if plus => {
                        let mut entry = Entry::negative(Validity::ZERO);
                        (entry.attr.ino, entry.attr.mode) = (dentry.ino.0, dentry.kind.bits());
                        writer.add_plus(&entry, next, kind, name.as_bytes())
                    }
                    None => writer.add(dentry.ino.0, next, kind, name.as_bytes()),
                };
                if !added {
                    break;
                }
                if row.is_some() {
                    known.push((name, dentry.ino));
                }
            }
        }
        if known.is_empty() {
            core.names.late.end(caller);
        }
        for (name, ino) in known {
            self.hand_out(&mut core, at, name.as_bytes(), ino);
        }
        Ok(())
    }

    /// Whether the store refused the last batch: nothing new may be made until there is room.
    fn check_not_full(&self) -> Done {
        if self.client.ledger.is_full() { Err(TreeError::NoSpace.into()) } else { Ok(()) }
    }
}

/// What a name leads to. A thread can be told that there is no target of its rename if the kernel does not do less then than to ask. (In a
/// sticky directory it looks whose that is. What it takes for a directory that is gone may have something mounted on it.)
fn kind_of(core: &mut Core, dir: Ino, name: &[u8]) -> Kind {
    let is_sticky = core.tree.inode(dir).map_or(true, |row| row.mode & libc::S_ISVTX != 0);
    let kind = core.tree.leads_to(dir, name).map(|dentry| dentry.kind);
    let is_directory = kind == Some(FileKind::Directory);
    Kind { is_directory, can_be_absent: !is_sticky && !is_directory && kind.is_some() }
}

/// The inode that a name leads to, if it had another name just now.
fn moved_to(core: &mut Core, dir: Ino, name: &[u8]) -> Option<Ino> {
    let ino = core.tree.leads_to(dir, name)?.ino;
    core.moved.was_elsewhere(ino, dir, name).then_some(ino)
}

/// More entries than fit one answer of 1 MiB: the shortest takes 24 bytes, and the kernel asks for less.
const ENTRIES_MAX: usize = 4096;

pub(super) fn owned_by(request: &Request<'_>) -> NewNode {
    NewNode { uid: request.uid, gid: request.gid, ..NewNode::default() }
}
