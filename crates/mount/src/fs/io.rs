//! Requests about data.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hayloft_fuse::{Interrupt, Pace, Reply, Request, SetAttr, Validity};
use hayloft_model::tree::{AttributeChange, Tree, has_privileges};
use hayloft_model::{BLOCK_SIZE, Content, FileKind, Ino, InodeRow, TreeError};

use super::attributes::attr;
use super::error::FsError;
use super::{Done, Need, Stop, VolumeFs, done, ino_of};
use crate::cache::data::{File, FileData, Lacking, PAGE};
use crate::core::{Core, CoreGuard};
use crate::kernel::Word;
use crate::kernel::bases::OfPages;
use crate::kernel::nodes::NodeId;
use crate::log::accepted::UpTo;
use crate::log::ledger::FlushError;
use crate::sharing::ahead::Place;
use crate::sharing::appends::Append;
use crate::sharing::fault::FaultError;

/// Whether a file loses setuid or setgid. The kernel does not take that from its copy of the mode, nor ask anew who may do
/// what: it has to be told before the call returns, which transport threads may not.
fn demoted(row: &InodeRow, kills_privileges: bool, pace: Pace<'_>) -> Result<bool, Stop> {
    match pace {
        _ if !(kills_privileges && has_privileges(row)) => Ok(false),
        // `Room` is what any thread of the pool may wait for.
        Pace::Fast => Err(Stop::Need(Need::Room)),
        Pace::Patient(_) => Ok(true),
    }
}
/// The kernel may send larger writes in parts, bytes.
const LARGE: usize = 128 << 10;

/// What a program writes.
pub(super) struct Write<'a> {
    pub(super) offset: u64,
    pub(super) bytes: &'a [u8],
    /// At the end, wherever that is.
    pub(super) appends: bool,
    /// The thread that writes.
    pub(super) tid: u32,
    pub(super) kills_privileges: bool,
    /// It was stored through a map, in pages that were filled from this; none: the pages are what the file is to be.
    pub(super) bases: Option<&'a OfPages>,
    /// It is of pages that the kernel writes back.
    pub(super) is_stored: bool,
}

impl Write<'_> {
    fn end(&self, offset: u64) -> u64 {
        offset.saturating_add(self.bytes.len() as u64)
    }

    /// Whether this may be the first part of what a program appends with one call. The kernel sends what goes into a
    /// page that it has not read apart from the rest.
    fn is_to_be_continued(&self) -> bool {
        let ends_with_page = self.end(self.offset).is_multiple_of(PAGE);
        self.appends && ends_with_page && (!self.offset.is_multiple_of(PAGE) || self.bytes.len() >= LARGE)
    }
}

/// A write that the file's owner has admitted: who needs the file waits until it is in the tree.
struct Admitted(Arc<File>);

impl Admitted {
    /// To be called with the core's lock held.
    fn new(file: Arc<File>) -> Admitted {
        file.writes.fetch_add(1, Ordering::AcqRel);
        Admitted(file)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.writes.fetch_sub(1, Ordering::AcqRel);
    }
}

impl VolumeFs {
    /// `flags`: of the open file.
    pub(super) fn read(
        &self,
        node: NodeId,
        offset: u64,
        size: u32,
        flags: u32,
        reply: &mut Reply<'_>,
    ) -> Done {
        let ino = node.ino();
        let (file, length) = {
            let mut core = self.client.core();
            let length = core.tree.inode(ino)?.size;
            if flags & libc::O_DIRECT as u32 == 0 {
                core.bases.read(node, offset, size);
            }
            if let Some(bytes) = core.inline(ino) {
                let buffer = reply.buffer();
                let count = u64::from(size).min(length.saturating_sub(offset)) as usize;
                buffer[..count].fill(0);
                if let Some(bytes) = bytes.get(offset as usize..) {
                    let part = bytes.len().min(count);
                    buffer[..part].copy_from_slice(&bytes[..part]);
                }
                reply.filled(count);
                drop(core);
                self.client.note_reading(Place { ino, index: 0 });
                return Ok(());
            }
            (core.file(ino)?, length)
        };
        self.client.note_reading(Place { ino, index: offset / BLOCK_SIZE });
        let wanted = u64::from(size).min(length.saturating_sub(offset));
        let ahead = file.ahead(offset, wanted);
        let buffer = &mut reply.buffer()[..wanted as usize];
        let count = self.with_data(ino, &file, |data| data.read(offset, buffer, ahead))?;
        self.client.stats.block_hits.add((wanted).div_ceil(BLOCK_SIZE));
        reply.filled(count);
        Ok(())
    }

    /// Does something with a file's data; what lacks has to be fetched first.
    fn with_data<T>(
        &self,
        ino: Ino,
        file: &Arc<File>,
        work: impl FnOnce(&mut FileData) -> Result<T, Lacking>,
    ) -> Result<T, Stop> {
        self.client
            .budget
            .with(file, |data| if data.is_gone() { Err(Lacking::Gone) } else { work(data) })
            .map_err(|lacking| Stop::Need(Need::Data(ino, Arc::clone(file), lacking)))
    }

    pub(super) fn write(
        &self,
        request: &Request<'_>,
        write: &Write<'_>,
        status_asked: bool,
        pace: Pace<'_>,
        reply: &mut Reply<'_>,
    ) -> Done {
        let ino = ino_of(request);
        let mut core = self.client.core();
        core.tree.check_owned(ino)?;
        let row = core.tree.inode(ino)?;
        let (size, demoted) = (row.size, demoted(row, write.kills_privileges, pace)?);
        if write.appends && core.torn.remove(&ino).is_some_and(|tid| tid == write.tid) {
            return Err(FsError::Lost.into());
        }
        // The kernel's idea of the end is old when another host has appended.
        let offset = if write.appends { size } else { write.offset };
        // What others have cut off since does not come back.
        let bytes = match write.is_stored {
            true => &write.bytes[..write.bytes.len().min(size.saturating_sub(offset) as usize)],
            false => write.bytes,
        };
        if write.is_stored && bytes.is_empty() {
            reply.written(write.bytes.len() as u32);
            return Ok(());
        }
        let (len, end) = (bytes.len() as u64, offset.saturating_add(bytes.len() as u64));
        if end > Tree::size_max() {
            return Err(TreeError::TooLarge.into());
        }
        let file = core.file(ino)?;
        let growth = self.with_data(ino, &file, |data| data.growth(offset, len))?;
        self.check_room(&core, ino, growth, len, status_asked)?;
        // Who takes the file away looks at it under the same lock.
        if write.is_to_be_continued() {
            core.appending.insert(ino, Append::begun(write.tid));
        } else if !write.is_stored {
            core.appending.remove(&ino);
        }
        let file = Admitted::new(file);
        let file = &file.0;
        // A cut of the log between the data and the size would take what lies before the end, and leave out the rest. Of what
        // only appends it takes nothing that anybody sees.
        let is_over_the_end = offset < size && end > size;
        let change = |data: &mut FileData| match write.bases {
            Some(bases) => data.merge(offset, bytes, bases),
            None => data.write(offset, bytes).map(|_| false),
        };
        let is_beside = if is_over_the_end {
            self.with_data(ino, file, change)?
        } else {
            drop(core);
            let is_beside = self.with_data(ino, file, change)?;
            core = self.client.core();
            is_beside
        };
        let node = NodeId(request.nodeid);
        // The kernel fills a page with zeros behind the end that it knows; others have made the file longer.
        let is_short = write.is_stored && end < size && !end.is_multiple_of(PAGE);
        let is_beside = is_beside || is_short;
        let unlike = if is_beside { core.bases.written(node, offset, bytes) } else { None };
        if is_beside || offset != write.offset {
            // Its pages are not like this.
        } else if write.is_stored {
            core.bases.write(node, offset, len.next_multiple_of(PAGE));
        } else {
            core.bases.write(node, offset, len);
        }
        let allocated = file.data.lock().allocated();
        core.tree.wrote(ino, end, allocated, write.kills_privileges, self.now())?;
        self.changed(&mut core);
        done(request, &mut core);
        if offset != write.offset || is_short {
            core.sizes.changes(ino, None);
        }
        drop(core);
        let is_elsewhere = offset != write.offset || (is_short && unlike.is_none());
        unlike.into_iter().for_each(|former| self.client.tell_kernel(Word::Unlike(former)));
        if demoted || is_short {
            // Who asks for the size, as a read to the end does, waits until the page is gone.
            self.client.drop_attributes(&self.client.numbers(ino));
        }
        if is_elsewhere {
            // It has the bytes elsewhere in its cache, or others in their place. The word waits until this answer is there.
            let numbers = self.client.numbers(ino);
            let (names, attributes, data) = (Vec::new(), numbers.clone(), numbers);
            self.client.tell_kernel(Word::Stale {
                names,
                attributes,
                data,
                in_use: Vec::new(),
                ack: None,
                bases: Vec::new(),
            });
        }
        reply.written(write.bytes.len() as u32);
        Ok(())
    }

    /// Whether `bytes` of data, `growth` of them new, have room: in the quota, in the store, in memory.
    fn check_room(&self, core: &Core, ino: Ino, growth: u64, bytes: u64, status_asked: bool) -> Done {
        if growth > 0 && core.tree.inode(ino)?.nlink > 0 {
            core.tree.check_room(growth)?;
        }
        let client = &self.client;
        let free = client.status().store_free_bytes;
        let unshipped = client.budget.unshipped() + client.budget.in_flight();
        if client.ledger.is_full() || (free != u64::MAX && unshipped.saturating_add(bytes) > free) {
            // The store may have got room since it was asked.
            let still_full = client.ledger.is_full() || status_asked;
            return Err(if still_full { TreeError::NoSpace.into() } else { Stop::Need(Need::Status) });
        }
        if client.over_budget(bytes) {
            return Err(Stop::Need(Need::Room));
        }
        Ok(())
    }

    /// Sets the size: cuts the data off, or extends it with a hole.
    pub(super) fn set_size(&self, core: &mut Core, ino: Ino, size: u64, kill_privileges: bool) -> Done {
        if core.tree.inode(ino)?.kind() == FileKind::Directory {
            return Err(TreeError::IsDirectory.into());
        }
        if size > Tree::size_max() {
            return Err(TreeError::TooLarge.into());
        }
        core.tree.check_owned(ino)?;
        if size == 0 && core.tree.is_left_out(ino) {
            // Nothing of it is needed any more.
            core.tree.set_content(ino, Content::None);
        }
        let file = core.file(ino)?;
        self.with_data(ino, &file, |data| data.truncate(size))?;
        let allocated = file.data.lock().allocated();
        let change = AttributeChange { size: Some((size, allocated)), kill_privileges, ..Default::default() };
        core.tree.set_attributes(ino, change, self.now())?;
        Ok(())
    }

    pub(super) fn truncate(
        &self,
        mut core: CoreGuard<'_>,
        ino: Ino,
        size: u64,
        change: &SetAttr,
        reply: &mut Reply<'_>,
    ) -> Done {
        self.set_size(&mut core, ino, size, change.kill_suidgid)?;
        let attr = attr(ino, core.tree.inode(ino)?);
        self.changed(&mut core);
        reply.attr(&attr, Validity::ZERO);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // all that the call says, and how it is handled
    pub(super) fn fallocate(
        &self,
        ino: Ino,
        offset: u64,
        length: u64,
        mode: u32,
        kills_privileges: bool,
        status_asked: bool,
        pace: Pace<'_>,
    ) -> Done {
        const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
        const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32;
        const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE as u32;
        if mode & !(KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE) != 0 {
            return Err(FsError::NotSupported.into());
        }
        let end = offset.saturating_add(length);
        if end > Tree::size_max() {
            return Err(TreeError::TooLarge.into());
        }
        let mut core = self.client.core();
        core.tree.check_owned(ino)?;
        let row = core.tree.inode(ino)?;
        let (size, demoted) = (row.size, demoted(row, kills_privileges, pace)?);
        let file = core.file(ino)?;
        if mode & (PUNCH_HOLE | ZERO_RANGE) != 0 {
            self.with_data(ino, &file, |data| data.punch(offset, end))?;
        } else {
            // Nothing is reserved: room is promised only as far as it is there now.
            let growth = self.with_data(ino, &file, |data| data.growth(offset, length))?;
            let free = self.client.status().store_free_bytes;
            core.tree.check_room(growth)?;
            if growth > free {
                return Err(if status_asked { TreeError::NoSpace.into() } else { Stop::Need(Need::Status) });
            }
        }
        let extends = mode & (KEEP_SIZE | PUNCH_HOLE) == 0 && end > size;
        if extends {
            self.with_data(ino, &file, |data| data.truncate(end))?;
        }
        let allocated = file.data.lock().allocated();
        let change = AttributeChange {
            size: Some((if extends { end } else { size }, allocated)),
            kill_privileges: kills_privileges,
            ..Default::default()
        };
        core.tree.set_attributes(ino, change, self.now())?;
        self.changed(&mut core);
        drop(core);
        if demoted {
            self.client.drop_attributes(&self.client.numbers(ino));
        }
        Ok(())
    }

    pub(super) fn seek(&self, ino: Ino, offset: u64, whence: u32, reply: &mut Reply<'_>) -> Done {
        let data = match whence as i32 {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return Err(TreeError::Invalid.into()),
        };
        let file = self.client.core().file(ino)?;
        match self.with_data(ino, &file, |file| file.seek(offset, data))? {
            Some(position) => reply.lseek(position),
            None => return Err(FsError::NoSuchOffset.into()),
        }
        Ok(())
    }

    /// Waits until the server has what other hosts have written to a file: it is to be durable when fsync(2) returns, whoever wrote it.
    pub(super) fn await_others_writes(&self, ino: Ino, pace: Pace<'_>) -> Done {
        let Pace::Patient(interrupt) = pace else { return Ok(()) };
        // Whose row is here is nobody else's to write to.
        if self.client.core().tree.inode(ino).is_ok() {
            return Ok(());
        }
        // A fetch of its own: one that is under way may have been answered before, or be given up.
        match self.client.fetch_inode(ino, Some(interrupt)) {
            // What was removed is nobody's.
            Ok(()) | Err(FaultError::Gone) => Ok(()),
            Err(error) => Err(FsError::Fault(error).into()),
        }
    }

    /// Makes everything durable up to when that was asked. `ino`: who asks wants to know of this one; none: of everything.
    pub(super) fn sync(&self, ino: Option<Ino>, tid: u32, asked: Option<UpTo>, pace: Pace<'_>) -> Done {
        let (interrupt, asked): (&Interrupt, UpTo) = match (pace, asked) {
            (Pace::Patient(interrupt), Some(asked)) => (interrupt, asked),
            _ => return Err(Stop::Need(Need::Room)),
        };
        if let Some(kept) = ino.and_then(|ino| self.client.ledger.told_before(ino, tid)) {
            return Err(FsError::Flush(FlushError::Lost(kept)).into());
        }
        let flushed = self.client.flush_durably(asked, Some(interrupt));
        // Who is told something else asks once more.
        let tells = matches!(flushed, Ok(()) | Err(FlushError::Lost(_)));
        let is_lost = tells
            && match ino {
                Some(ino) => self.client.take_failed(ino),
                None => self.client.ledger.take_untold().is_some(),
            };
        let told = match &flushed {
            Ok(()) if is_lost => Some(""),
            Err(FlushError::Lost(kept)) => Some(kept.as_str()),
            _ => None,
        };
        if let (Some(ino), Some(kept)) = (ino, told) {
            self.client.ledger.told_of(ino, tid, kept);
        }
        match flushed {
            Ok(()) if is_lost => Err(Stop::Error(FsError::Lost)),
            // What was set aside since is told once.
            Ok(()) if self.client.take_lost(ino.unwrap_or(Ino::ROOT)) => {
                Err(FsError::Flush(FlushError::NoSpace).into())
            }
            flushed => flushed.map_err(|error| Stop::Error(FsError::Flush(error))),
        }
    }
}
