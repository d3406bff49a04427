//! Packed listings: what a walk wants of a directory, in one row instead of two for each name.
//!
//! A listing is derived from the rows of names and inodes, which stay the truth. It holds the names of a directory in their order, and
//! the rows of files that are at home there, as they are stored; data of more than a few bytes is left out. Rows of directories and of
//! files with names in several directories are read by themselves.
//!
//! Whatever changes a name, or a file at home in a directory, deletes the directory's listing in the same batch:
//! [`Rows`](super::rows::Rows) notes whose it is, and everything that is written while a volume is open goes through
//! `Volume::order`. Servers that do not know of listings write rows and leave listings as they are. So a listing counts only with
//! the [`Generation`] that it was written in, and a new one begins unless the opening of the database before this one was by a server
//! that knows of them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::{BufMut, Bytes};
use hayloft_model::Ino;
use hayloft_wire::listing::{self, Row};
use parking_lot::Mutex;
use prost::Message;
use rustc_hash::FxHashMap;

use crate::database::listing::Entry;
use crate::database::registry::random;
use crate::database::rows::Listed;
use crate::database::tables::{self, Generation};
use crate::database::{self, Db, DbSnapshot};
use crate::error::VolumeError;

/// Fewer names are read as fast by themselves.
pub(crate) const NAMES_MIN: usize = 8;

/// A larger listing is not written: each change would make it worthless.
const BYTES_MAX: usize = 512 << 10;

/// Data of small files beyond this is left out.
const DATA_MAX: usize = 256;

/// Directories of which it is remembered when they were changed.
const CHANGED_MAX: usize = 1 << 16;

/// Bytes of listings that wait to be written, at most.
const QUEUED_MAX: usize = 16 << 20;

/// What a server knows of the packed listings of a volume.
#[derive(Default)]
pub(crate) struct PackedListings {
    generation: AtomicU64,
    state: Mutex<State>,
    /// Directories that walks found packed, and did not; listings written.
    pub(crate) found: AtomicU64,
    pub(crate) missed: AtomicU64,
    pub(crate) written: AtomicU64,
}

#[derive(Default)]
struct State {
    /// How often something was written.
    moment: u64,
    /// Whatever was read before this moment may have changed.
    floor: u64,
    changed: FxHashMap<u64, Change>,
    queue: Vec<Queued>,
    queued_bytes: usize,
    is_written: bool,
}

/// When a directory was changed the last time.
#[derive(Clone, Copy)]
struct Change {
    /// `None`: nobody knows yet whether it was.
    at: Option<u64>,
    /// Whether it may have a listing since.
    has: bool,
}

/// A listing that is to be written if nothing changes meanwhile.
pub(crate) struct Queued {
    pub(crate) dir: Ino,
    /// It is as things were then.
    pub(crate) since: u64,
    pub(crate) packed: Bytes,
}

impl PackedListings {
    /// The database is opened: listings that may be stale do not count from now on. Gives the row that says by whom it was opened.
    pub(crate) async fn begin(&self, db: &Db) -> Result<Bytes, VolumeError> {
        let epoch = db.manifest().writer_epoch();
        let row = db.get(tables::GENERATION).await?;
        let before = row.map(|row| database::decode::<Generation>(row, "generation")).transpose()?;
        let known = before.filter(|before| before.epoch + 1 == epoch);
        let generation = known.map_or_else(random, |before| before.generation);
        self.generation.store(generation, Relaxed);
        self.reset();
        Ok(Generation { epoch, generation }.encode_to_vec().into())
    }

    /// Nothing is known of what was changed until now.
    pub(crate) fn reset(&self) {
        let mut state = self.state.lock();
        state.moment += 1;
        state.floor = state.moment;
        state.changed.clear();
    }

    /// Now: to be asked for before something is read.
    pub(crate) fn moment(&self) -> u64 {
        self.state.lock().moment
    }

    /// Whether nothing of these directories' listings has changed since a moment, as far as is known: of each.
    pub(crate) fn unchanged(&self, dirs: impl Iterator<Item = (Ino, u64)>) -> Vec<bool> {
        let state = self.state.lock();
        dirs.map(|(dir, since)| state.is_unchanged(dir, since)).collect()
    }

    /// Something is about to be written that changes this. Gives the listings that have to go.
    pub(crate) fn changing(&self, dirs: &[Ino]) -> Vec<Ino> {
        let mut state = self.state.lock();
        if state.changed.len() + dirs.len() > CHANGED_MAX {
            state.moment += 1;
            state.floor = state.moment;
            state.changed.clear();
        }
        let mut gone = Vec::new();
        for dir in dirs {
            let before = state.changed.insert(dir.0, Change { at: None, has: true });
            if before.is_none_or(|before| before.has) {
                gone.push(*dir);
            }
        }
        gone
    }

    /// It was written; some have a new listing.
    pub(crate) fn changed(&self, dirs: &[Ino], listed: &Listed) {
        let mut state = self.state.lock();
        state.moment += 1;
        let now = state.moment;
        let changes = dirs.iter().map(|dir| (dir.0, Change { at: Some(now), has: false }));
        state.changed.extend(changes);
        for (dir, _) in &listed.whole {
            if let Some(change) = state.changed.get_mut(&dir.0) {
                change.has = true;
            }
        }
        self.written.fetch_add(listed.whole.len() as u64, Relaxed);
    }

    /// Adds a listing to those that are to be written. `true`: nobody sees to it yet.
    pub(crate) fn queue(&self, queued: Queued) -> bool {
        let mut state = self.state.lock();
        if state.queued_bytes + queued.packed.len() > QUEUED_MAX
            || !state.is_unchanged(queued.dir, queued.since)
        {
            return false;
        }
        state.queued_bytes += queued.packed.len();
        state.queue.push(queued);
        !std::mem::replace(&mut state.is_written, true)
    }

    /// What is to be written; without anything, nobody sees to it any more.
    pub(crate) fn take_queue(&self) -> Vec<Queued> {
        let mut state = self.state.lock();
        state.queued_bytes = 0;
        let queue = std::mem::take(&mut state.queue);
        state.is_written = !queue.is_empty();
        queue
    }

    /// Leaves of these what nothing has changed since, and expects them to be written. The caller has the turn.
    pub(crate) fn still_true(&self, queued: Vec<Queued>) -> Vec<(Ino, Bytes)> {
        let mut state = self.state.lock();
        let is_true = |queued: &Queued| state.is_unchanged(queued.dir, queued.since);
        let queued: Vec<Queued> = queued.into_iter().filter(is_true).collect();
        for queued in &queued {
            if let Some(change) = state.changed.get_mut(&queued.dir.0) {
                change.has = true;
            }
        }
        self.written.fetch_add(queued.len() as u64, Relaxed);
        queued.into_iter().map(|queued| (queued.dir, queued.packed)).collect()
    }

    /// The listing of a directory, if it is packed.
    pub(crate) async fn read(
        &self,
        snapshot: &DbSnapshot,
        dir: Ino,
    ) -> Result<Option<Vec<Entry>>, VolumeError> {
        let row = snapshot.get(tables::packed(dir)).await?;
        let entries = row.and_then(|row| unpack(&row, self.generation.load(Relaxed))).transpose()?;
        let count = if entries.is_some() { &self.found } else { &self.missed };
        count.fetch_add(1, Relaxed);
        Ok(entries)
    }

    /// The names in a packed listing with their rows, for a check; `None`: it does not count.
    pub(crate) fn look(&self, row: &Bytes) -> Option<Result<Vec<Entry>, VolumeError>> {
        unpack(row, self.generation.load(Relaxed))
    }

    /// Packs a listing: its entries in their order, with their rows as far as they may be in it.
    pub(crate) fn pack<'a>(
        &self,
        dir: Ino,
        entries: impl ExactSizeIterator<Item = (&'a [u8], &'a [u8], Option<&'a Bytes>)>,
    ) -> Option<Bytes> {
        let (count, mut read_alone) = (entries.len(), 0);
        if count < NAMES_MIN || count * 32 > BYTES_MAX {
            return None;
        }
        let mut packed = Vec::with_capacity(count * 128);
        packed.put_u64_le(self.generation.load(Relaxed));
        for (name, dentry, row) in entries {
            let found = row.and_then(|row| Some((row, Row::of(row).ok()?)));
            let found = found.filter(|(_, row)| row.parent == dir.0 && !row.is_directory());
            let leave_out =
                found.as_ref().is_some_and(|(_, row)| !row.is_placed() && row.data_bytes() > DATA_MAX);
            read_alone += usize::from(found.is_none());
            let row = found.as_ref().map(|(row, found)| (&row[..], found));
            listing::pack(&mut packed, name, dentry, row, leave_out);
            if packed.len() > BYTES_MAX {
                return None;
            }
        }
        (read_alone * 2 <= count).then(|| packed.into())
    }
}

impl State {
    fn is_unchanged(&self, dir: Ino, since: u64) -> bool {
        let change = self.changed.get(&dir.0);
        since >= self.floor && change.is_none_or(|change| change.at.is_some_and(|at| at <= since))
    }
}

fn unpack(row: &Bytes, generation: u64) -> Option<Result<Vec<Entry>, VolumeError>> {
    let written_in = row.first_chunk().map(|written_in| u64::from_le_bytes(*written_in));
    if written_in != Some(generation) {
        return None;
    }
    let damaged = |_| VolumeError::Damaged("packed listing");
    let packed = row.slice(8..);
    let entries = listing::split(&packed).map(|entry| {
        let (name, row, inode) = entry.map_err(damaged)?;
        Entry::packed(name, row, inode)
    });
    Some(entries.collect())
}
