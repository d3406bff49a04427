//! Attributes: those of files, as the kernel wants them, and of the volume as a whole.

use std::sync::atomic::Ordering;

use hayloft_fuse::{Attr, Entry, Interrupt, Pace, Reply, Request, SetAttr, Statfs, TimeOrNow, Validity};
use hayloft_model::tree::AttributeChange;
use hayloft_model::{BLOCK_SIZE, FileKind, Ino, InodeRow, Timestamp, TreeError};

use crate::core::{Client, Core};
use crate::fs::{Done, Need, Stop, VolumeFs, done, ino_of};
use crate::host::caller::{Capability, has_capability};
use crate::kernel::nodes::NodeId;

/// Refuses who changes what only the owner may. The kernel has looked at whose the file is as it knows that, which for a file that is open
/// is what it was when it was asked for last: another host may have given it to somebody else.
fn check_owner(request: &Request<'_>, change: &SetAttr, row: &InodeRow) -> Done {
    let gives = change.uid.is_some() || change.gid.is_some();
    let is_set = |time: &Option<TimeOrNow>| matches!(time, Some(TimeOrNow::Time(_)));
    let sets = change.mode.is_some() || is_set(&change.atime) || is_set(&change.mtime);
    if !(gives || sets) || [0, row.uid].contains(&request.uid) {
        return Ok(());
    }
    let needed = [(gives, Capability::Chown), (sets, Capability::Fowner)];
    let may = needed
        .into_iter()
        .all(|(needed, capability)| !needed || has_capability(request.pid, capability, row.uid));
    if may { Ok(()) } else { Err(TreeError::NotPermitted.into()) }
}

impl VolumeFs {
    pub(super) fn attributes(&self, request: &Request<'_>, pace: Pace<'_>, reply: &mut Reply<'_>) -> Done {
        let ino = ino_of(request);
        let mut core = self.client.core();
        let may_differ = |core: &mut Core| {
            let Ok(row) = core.tree.shown(ino) else { return false };
            row.kind() == FileKind::Regular && core.sizes.may_differ(ino, row.size)
        };
        while may_differ(&mut core) && !self.client.lookers.has(request.pid) {
            drop(core);
            // `Room` is what any thread of the pool may wait for.
            let Pace::Patient(_) = pace else { return Err(Stop::Need(Need::Room)) };
            let can_be_seen = self.client.settle_size(NodeId(request.nodeid));
            core = self.client.core();
            if !can_be_seen {
                break;
            }
        }
        let is_changing = core.names.changing.contains(ino) | core.tree.run_clock(ino, self.now());
        let validity = if is_changing { Validity::ZERO } else { Validity::FOREVER };
        reply.attr(&attr(ino, core.tree.shown(ino)?), validity);
        done(request, &mut core);
        Ok(())
    }

    pub(super) fn set_attributes(
        &self,
        request: &Request<'_>,
        change: &SetAttr,
        reply: &mut Reply<'_>,
    ) -> Done {
        let (ino, now) = (ino_of(request), self.now());
        let time = |time: Option<TimeOrNow>| {
            time.map(|time| match time {
                TimeOrNow::Now => now,
                TimeOrNow::Time(time) => Timestamp { secs: time.seconds, nanos: time.nanos },
            })
        };
        let mut core = self.client.core();
        if let Some(size) = change.size {
            return self.truncate(core, ino, size, change, reply);
        }
        check_owner(request, change, core.tree.inode(ino)?)?;
        let change = AttributeChange {
            mode: change.mode,
            uid: change.uid,
            gid: change.gid,
            size: None,
            atime: time(change.atime),
            mtime: time(change.mtime),
            kill_privileges: change.kill_suidgid,
        };
        core.tree.set_attributes(ino, change, now)?;
        let attr = attr(ino, core.tree.inode(ino)?);
        self.changed(&mut core);
        reply.attr(&attr, Validity::ZERO);
        Ok(())
    }

    pub(super) fn statfs(&self, status_asked: bool, reply: &mut Reply<'_>) -> Done {
        if !status_asked && self.client.others_changed.load(Ordering::Relaxed) {
            return Err(Stop::Need(Need::Status));
        }
        let status = self.client.status();
        let (used, quota) = {
            let core = self.client.core();
            (core.tree.usage(), core.tree.quota())
        };
        let unshipped = self.client.budget.unshipped() + self.client.budget.in_flight();
        // A store that cannot tell its size (a bucket) is shown as a large one.
        let unknown = 1 << 50;
        let free_in_store = match status.store_free_bytes {
            u64::MAX => unknown,
            free => free.saturating_sub(unshipped),
        };
        let free = match quota.bytes {
            0 => free_in_store,
            quota => free_in_store.min(quota.saturating_sub(used.bytes)),
        };
        let total = match quota.bytes {
            0 => used.bytes + free,
            quota => quota,
        };
        // Programs of 32 bits that were not built for large files are refused all of this when one number is too large for them.
        let low = u64::from(u32::MAX);
        let unit = (total.div_ceil(4096 * low).next_power_of_two() * 4096).min(1 << 30);
        let files_free = match quota.inodes {
            0 => low.saturating_sub(used.inodes).max(1 << 20),
            quota => quota.min(low).saturating_sub(used.inodes),
        };
        reply.statfs(&Statfs {
            blocks: total / unit,
            bfree: free / unit,
            bavail: free / unit,
            files: used.inodes + files_free,
            ffree: files_free,
            bsize: unit as u32,
            namelen: hayloft_model::NAME_MAX as u32,
            frsize: unit as u32,
        });
        Ok(())
    }
}

/// The row as the kernel wants it.
pub(super) fn attr(ino: Ino, row: &InodeRow) -> Attr {
    let time = |time: Timestamp| hayloft_fuse::Timestamp { seconds: time.secs, nanos: time.nanos };
    let is_dir = row.kind() == FileKind::Directory;
    Attr {
        ino: ino.0,
        // Programs take a directory of size 0 for an empty one of some other system.
        size: if is_dir { 4096 } else { row.size },
        blocks: row.allocated.div_ceil(512),
        atime: time(row.atime),
        mtime: time(row.mtime),
        ctime: time(row.ctime),
        mode: row.mode,
        nlink: row.nlink,
        uid: row.uid,
        gid: row.gid,
        rdev: row.rdev,
        blksize: BLOCK_SIZE as u32,
        flags: 0,
    }
}

/// A name's answer. The kernel may keep the attributes until told otherwise.
pub(super) fn entry(node: NodeId, row: &InodeRow, entry_valid: Validity) -> Entry {
    let attr = attr(node.ino(), row);
    Entry { nodeid: node.0, generation: 0, entry_valid, attr_valid: Validity::FOREVER, attr }
}

/// The answer to what makes a name. The kernel takes its attributes for what is so however late the caller goes on, even
/// after the word that they have changed: so they are for one use, as those in answers to SETATTR are. It asks for them
/// once more, and keeps that. (Files made in directories that this host owns: [`crate::kernel::births`].)
pub(super) fn made_entry(node: NodeId, row: &InodeRow, entry_valid: Validity) -> Entry {
    Entry { attr_valid: Validity::ZERO, ..entry(node, row, entry_valid) }
}

impl Client {
    /// Asks how full the store is; without an answer the last one stays.
    pub(crate) fn refresh_status(&self, interrupt: Option<&Interrupt>) {
        use hayloft_wire::{StatusRequest, client_message::Body as Ask, server_message::Body as Answer};
        let answers = self.link.call(Ask::Status(StatusRequest {}), interrupt);
        if let Ok(answers) = answers
            && let Some(Answer::Status(status)) = answers.into_iter().next()
        {
            if self.ledger.is_shipping() { self.set_status(status) } else { self.set_usage(status) }
        }
    }
}
