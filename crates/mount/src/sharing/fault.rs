//! Fetching what is not in memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hayloft_fuse::Interrupt;
use hayloft_model::{BlockRef, Content, ContentHash, FileKind, Ino, InoRange, InodeRow, Missing};
use hayloft_store::{Codec, decode_chunk};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::listing::Entry;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{AllocateInos, Chunk, Enter, FailureCode, FetchInode, InodeAnswer, Listings};
use parking_lot::{Condvar, Mutex};

use crate::core::{Client, Core};
use crate::session::link::CallError;
use crate::sharing::ahead::Place;

/// Bytes of neighbours and contents that may come with a listing.
const ENTER_BUDGET: u64 = 4 << 20;
/// The same where contents are not wanted. Should files be read after all, those of what has come are fetched by
/// themselves, so it is not too much.
const ENTER_NAMES: u64 = 64 << 10;
/// How often that becomes four times as much for who walks.
const GROWTHS_MAX: u32 = 3;
/// The same while a lot is on its way already.
const ENTER_LEAST: u64 = 256 << 10;
/// How often a waiting caller looks whether it was interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);
/// How long a store that does not work is waited for before the caller hears of it.
const STORE_PATIENCE: Duration = Duration::from_secs(60);
/// Names that are added while the lock is held.
const ADD_AT_ONCE: usize = 512;
/// Inode numbers fetched at once.
const NUMBERS: u64 = 1 << 16;

/// Why something could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FaultError {
    #[error("it is gone at the server")]
    Gone,
    #[error("interrupted")]
    Interrupted,
    #[error("the store is full, or the quota used up")]
    NoSpace,
    #[error("the session has ended: {0}")]
    Ended(String),
    #[error("{0}")]
    Broken(String),
}

impl From<CallError> for FaultError {
    fn from(error: CallError) -> FaultError {
        match error {
            CallError::Interrupted => FaultError::Interrupted,
            CallError::Ended(reason) => FaultError::Ended(reason),
            CallError::Broken | CallError::Replaced => FaultError::Broken(error.to_string()),
            CallError::Failed(failed) if failed.code() == FailureCode::NotFound => FaultError::Gone,
            CallError::Failed(failed) => FaultError::Broken(failed.message),
        }
    }
}

impl From<hayloft_wire::InvalidMessage> for FaultError {
    fn from(error: hayloft_wire::InvalidMessage) -> FaultError {
        FaultError::Broken(error.to_string())
    }
}

/// What is being fetched now, so that many who need the same ask once.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    under_way: Mutex<HashSet<Missing>>,
    done: Condvar,
}

impl Faults {
    /// Runs `fetch` unless somebody else does it already; then waits for them.
    fn once(
        &self,
        missing: Missing,
        interrupt: Option<&Interrupt>,
        fetch: impl FnOnce() -> Result<(), FaultError>,
    ) -> Result<(), FaultError> {
        {
            let mut under_way = self.under_way.lock();
            if !under_way.insert(missing) {
                while under_way.contains(&missing) {
                    if interrupt.is_some_and(Interrupt::interrupted) {
                        return Err(FaultError::Interrupted);
                    }
                    self.done.wait_for(&mut under_way, INTERRUPT_POLL);
                }
                return Ok(());
            }
        }
        let _ended = UnderWay { faults: self, missing };
        fetch()
    }
}

/// A fetch that others wait for; ends for them however it ends.
struct UnderWay<'a> {
    faults: &'a Faults,
    missing: Missing,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.faults.under_way.lock().remove(&self.missing);
        self.faults.done.notify_all();
    }
}

/// A directory with all its entries.
#[derive(Debug)]
struct Listed {
    dir: Ino,
    /// Its own row, if it came along.
    row: Option<InodeRow>,
    entries: Vec<Entry>,
    /// It is owned from now on.
    own: bool,
    /// Changes in it of which others have not heard.
    unheard: Vec<u64>,
    what: What,
}

/// What a listing is.
#[derive(Debug)]
enum What {
    /// All of a directory.
    Directory,
    /// Names of a stem, in a slot.
    Stem(Bytes),
    /// A split directory: its row.
    Split(InodeRow),
    /// A directory that is not split any more.
    Whole,
}

/// Directories as an answer brings them.
#[derive(Debug, Default)]
pub(crate) struct Bundle {
    dirs: Vec<Listed>,
    /// Entries of directories of which parts are still to come.
    partial: HashMap<u64, Vec<Entry>>,
    chunks: Vec<Chunk>,
    /// Rows of files that were asked for.
    files: Vec<(Ino, InodeRow)>,
    /// Rows of directories that others had owned until now.
    rows: HashMap<Ino, InodeRow>,
}

impl Client {
    /// Fetches a row that the tree lacks.
    pub(crate) fn fetch_row(
        &self,
        missing: Missing,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), FaultError> {
        self.faults.once(missing, interrupt, || match missing {
            Missing::Inode(ino) if self.core().tree.is_left_out(ino) => self.fetch_left_out(ino, interrupt),
            Missing::Inode(ino) => self.fetch_inode(ino, interrupt),
            Missing::Directory(dir) => self.enter(dir, false, interrupt),
            Missing::Listing(dir) => self.enter(dir, true, interrupt),
            Missing::Names(slot) => self.enter_names(slot, interrupt),
            Missing::Numbers => self.fetch_numbers(interrupt),
            Missing::Heard(change) => self.await_all_heard(change, Vec::new(), interrupt),
            Missing::Own(_) | Missing::Executor => {
                Err(FaultError::Broken("this is no row that can be fetched".to_string()))
            }
        })
    }

    /// Asks the server; while it, or its store, is not ready, the caller waits as for a broken connection.
    pub(crate) fn ask(&self, ask: Ask, interrupt: Option<&Interrupt>) -> Result<Vec<Answer>, FaultError> {
        self.ask_marked(ask, interrupt, 0)
    }

    /// The same for a change, which is executed once however often it is asked for under its number.
    pub(crate) fn ask_change(
        &self,
        ask: &Ask,
        number: u64,
        interrupt: Option<&Interrupt>,
    ) -> Result<Vec<Answer>, FaultError> {
        self.ask_until(interrupt, || self.link.call_change(ask.clone(), interrupt, number))
    }

    pub(super) fn ask_marked(
        &self,
        ask: Ask,
        interrupt: Option<&Interrupt>,
        mark: u64,
    ) -> Result<Vec<Answer>, FaultError> {
        self.ask_until(interrupt, || self.link.call_marked(ask.clone(), interrupt, mark))
    }

    fn ask_until(
        &self,
        interrupt: Option<&Interrupt>,
        call: impl Fn() -> Result<Vec<Answer>, CallError>,
    ) -> Result<Vec<Answer>, FaultError> {
        let begun = Instant::now();
        loop {
            let error = match call() {
                Ok(answers) => return Ok(answers),
                Err(error) => error,
            };
            let again = match &error {
                CallError::Failed(failed) => match failed.code() {
                    FailureCode::Unavailable | FailureCode::Uncertain => true,
                    FailureCode::Store => begun.elapsed() < STORE_PATIENCE,
                    _ => false,
                },
                _ => false,
            };
            if !again {
                return Err(error.into());
            }
            match interrupt {
                Some(interrupt) if interrupt.wait_timeout(INTERRUPT_POLL) => {
                    return Err(FaultError::Interrupted);
                }
                Some(_) => {}
                None => std::thread::sleep(INTERRUPT_POLL),
            }
        }
    }

    /// What has been evicted so far: an answer that was asked for before an eviction may be older than what was
    /// dropped, and is not used.
    pub(super) fn mark(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }

    /// The row comes in the stream, see [`Client::receive_inode`].
    pub(crate) fn fetch_inode(&self, ino: Ino, interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        self.ask_marked(Ask::FetchInode(FetchInode { ino: ino.0 }), interrupt, self.mark()).map(|_| ())
    }

    pub(crate) fn receive_inode(&self, answer: &InodeAnswer, mark: u64) -> Result<(), FaultError> {
        let Some(message) = &answer.inode else { return Ok(()) };
        let row = InodeRow::try_from(message)?;
        let mut core = self.core();
        if mark == self.mark() {
            core.tree.unheard_of(Ino(message.ino), &answer.unheard);
            match answer.split {
                true => core.tree.add_split(Ino(message.ino), own(row)),
                false => core.tree.add_inode(Ino(message.ino), own(row)),
            }
        }
        if answer.own {
            core.tree.own(Ino(message.ino));
        }
        Ok(())
    }

    fn fetch_numbers(&self, interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        let answers = self.ask(Ask::AllocateInos(AllocateInos { count: NUMBERS }), interrupt)?;
        let Some(Answer::Inos(range)) = answers.into_iter().next() else { return Err(unexpected()) };
        self.core().tree.add_numbers(InoRange::try_from(&range)?);
        Ok(())
    }

    /// A file is read.
    pub(crate) fn note_reading(&self, place: Place) {
        if !self.options.ahead {
            return;
        }
        // Most of the time it is known, and then no other core loses the line.
        if !self.is_reading.load(Ordering::Relaxed) {
            self.is_reading.store(true, Ordering::Relaxed);
        }
        self.contents_ahead.reads(place);
    }

    /// Fetches a directory, its children's rows, and directories below it that come along; small contents as well when
    /// files are being read: who only walks does not wait for these. They come in the stream, see
    /// [`Client::receive_listings`].
    /// `whole`: all names are wanted also if the directory is split.
    fn enter(&self, dir: Ino, whole: bool, interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        let names_only = !self.is_reading.swap(false, Ordering::Relaxed);
        let most = match self.options.ahead {
            true => {
                let growths = self.ahead.asks(Place { ino: dir, index: 0 }).min(GROWTHS_MAX);
                if names_only { ENTER_NAMES << (2 * growths) } else { ENTER_BUDGET }
                    .min(self.memory.content())
            }
            false => 0,
        };
        // Twice: as it comes, and decoded. What only comes along does not wait for room.
        let along = self.budget.fetch_now(2 * most, self.memory.fetched());
        let budget_bytes = if along.is_some() { most } else { most.min(ENTER_LEAST) };
        let enter = Enter { dir: dir.0, budget_bytes, names_only, whole, ..Enter::default() };
        self.ask_marked(Ask::Enter(enter), interrupt, self.mark())?;
        self.core().tree.touch(dir);
        self.trim();
        Ok(())
    }

    /// Fetches the names of a stem of a split directory.
    fn enter_names(&self, slot: Ino, interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        let stem = self.core().tree.wanted_stem(slot);
        let (Some(dir), Some(stem)) = (slot.of_slot(), stem) else { return Ok(()) };
        let stem = Bytes::copy_from_slice(stem.as_bytes());
        let names_only = !self.is_reading.load(Ordering::Relaxed);
        let enter = Enter { dir: dir.0, names_only, stem, ..Enter::default() };
        self.ask_marked(Ask::Enter(enter), interrupt, self.mark())?;
        self.trim();
        Ok(())
    }

    pub(crate) fn receive_listings(
        &self,
        request: u64,
        listings: Listings,
        mark: u64,
    ) -> Result<(), FaultError> {
        let (mut bundle, more) = (self.partial.lock().remove(&request).unwrap_or_default(), listings.more);
        let next = Some(Place { ino: Ino(listings.next), index: 0 }).filter(|next| next.ino.0 != 0);
        bundle.add(listings)?;
        if more {
            // The server lets nobody change what it is about before the last part.
            self.partial.lock().insert(request, bundle);
            return Ok(());
        }
        if let Some(asked) = bundle.dirs.first() {
            self.ahead.came(Place { ino: asked.dir, index: 0 }, next);
        }
        self.stats.directories_prefetched.add(bundle.dirs.len().saturating_sub(1) as u64);
        let contents = self.contents_for(&bundle);
        bundle.dirs.iter_mut().for_each(|listed| listed.row = bundle.rows.remove(&listed.dir));
        self.add_directories(bundle.dirs, mark);
        let mut core = self.core();
        if mark == self.mark() {
            for (ino, row) in bundle.files {
                // What is here is newer but for what was left out.
                if core.tree.is_left_out(ino) {
                    core.tree.add_inode(ino, row);
                }
            }
            self.fill(&mut core, contents);
        }
        Ok(())
    }

    /// Not with one hold of the lock: others want to look at what has come already.
    fn add_directories(&self, dirs: Vec<Listed>, mark: u64) {
        let mut dirs = dirs.into_iter();
        while dirs.len() > 0 {
            let mut core = self.core();
            let mut count = 0;
            while count < ADD_AT_ONCE
                && let Some(Listed { dir, row, entries, own, unheard, what }) = dirs.next()
            {
                count += 1 + entries.len();
                if mark == self.mark() {
                    core.tree.unheard_of(dir, &unheard);
                    if let Some(row) = row.filter(|_| !core.tree.has_inode(dir)) {
                        core.tree.add_inode(dir, row);
                    }
                    match what {
                        What::Directory => {
                            core.tree.add_listing(dir, entries);
                            core.listed(dir, own, self.clock.now());
                        }
                        What::Stem(stem) => core.tree.add_names(dir, &stem, entries),
                        What::Split(row) => core.tree.add_split(dir, row),
                        What::Whole => core.tree.forget_split(dir),
                    }
                }
                // One that is gone here is on its way out at the server.
                if own && core.tree.has_inode(dir.or_directory()) {
                    core.tree.own(dir);
                }
            }
        }
    }

    /// Contents that have come, with the blocks that they are for. A file that was known before may have changed since: what is
    /// here is newer.
    fn contents_for(&self, bundle: &Bundle) -> Vec<(Ino, u64, BlockRef, Arc<Vec<u8>>)> {
        if bundle.chunks.is_empty() {
            return Vec::new();
        }
        let mut wanted: HashMap<ContentHash, Vec<(Ino, u64, BlockRef)>> = HashMap::new();
        {
            let core = self.core();
            for (_, dentry, row) in bundle.dirs.iter().flat_map(|listed| &listed.entries) {
                let Some(Content::Blocks(blocks)) = row.as_ref().map(|row| &row.content) else { continue };
                if core.tree.has_inode(dentry.ino) {
                    continue;
                }
                for (index, stored) in blocks.iter().enumerate() {
                    if let Some(stored) = stored {
                        wanted.entry(stored.hash).or_default().push((dentry.ino, index as u64, *stored));
                    }
                }
            }
        }
        let decoded = bundle.chunks.iter().filter_map(|chunk| decode(chunk).ok());
        let for_blocks = decoded.flat_map(|(hash, data)| {
            let blocks = wanted.get(&hash).cloned().unwrap_or_default();
            blocks.into_iter().map(move |(ino, index, stored)| (ino, index, stored, Arc::clone(&data)))
        });
        for_blocks.collect()
    }

    fn fill(&self, core: &mut Core, contents: Vec<(Ino, u64, BlockRef, Arc<Vec<u8>>)>) {
        for (ino, index, stored, data) in contents {
            let Ok(file) = core.file(ino) else { continue };
            if self.budget.with(&file, |file| file.fill(index, stored, &data)) > 0 {
                self.stats.blocks_prefetched.add(1);
                self.may_drop(ino, [index]);
            }
        }
    }
}

impl Bundle {
    fn add(&mut self, listings: Listings) -> Result<(), FaultError> {
        for listing in listings.dirs {
            let mut entries = self.partial.remove(&listing.dir).unwrap_or_default();
            for entry in hayloft_wire::listing::unpack(&listing.packed) {
                entries.push(entry?);
            }
            match listing.complete {
                true => {
                    let what = match &listing.split {
                        Some(row) => What::Split(own(InodeRow::try_from(row)?)),
                        None if listing.whole => What::Whole,
                        None if !listing.stem.is_empty() => What::Stem(listing.stem),
                        None => What::Directory,
                    };
                    let (dir, own, unheard) = (Ino(listing.dir), listing.own, listing.unheard);
                    self.dirs.push(Listed { dir, row: None, entries, own, unheard, what });
                }
                false => drop(self.partial.insert(listing.dir, entries)),
            }
        }
        for row in &listings.files {
            let (ino, row) = hayloft_wire::listing::row_from(row)?;
            match FileKind::of_mode(row.mode) {
                Some(FileKind::Directory) => drop(self.rows.insert(ino, row)),
                _ => self.files.push((ino, row)),
            }
        }
        self.chunks.extend(listings.contents);
        Ok(())
    }
}

pub(super) fn unexpected() -> FaultError {
    FaultError::Broken("the server's answer is of another kind than asked for".to_string())
}

/// The row with memory of its own: it must not keep the whole message alive.
fn own(mut row: InodeRow) -> InodeRow {
    use bytes::Bytes;
    match &mut row.content {
        Content::Inline(bytes) | Content::Target(bytes) => *bytes = Bytes::copy_from_slice(bytes),
        Content::None | Content::LeftOut | Content::Blocks(_) => {}
    }
    row.xattrs = row
        .xattrs
        .iter()
        .map(|(name, value)| (Bytes::copy_from_slice(name), Bytes::copy_from_slice(value)))
        .collect();
    row
}

/// The bytes of a chunk, checked against its name.
pub(super) fn decode(chunk: &Chunk) -> Result<(ContentHash, Arc<Vec<u8>>), FaultError> {
    let broken = |error: &dyn std::fmt::Display| FaultError::Broken(format!("damaged content: {error}"));
    let hash = ContentHash(chunk.hash[..].try_into().map_err(|_| broken(&"its name is no hash"))?);
    let codec = Codec::try_from(chunk.codec).map_err(|error| broken(&error))?;
    let data = decode_chunk(hash, chunk.len, codec, chunk.payload.clone()).map_err(|error| broken(&error))?;
    Ok((hash, Arc::new(data.to_vec())))
}
