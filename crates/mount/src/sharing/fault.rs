//! Fetching what is not in memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_model::{BlockRef, Content, ContentHash, Dentry, Ino, InoRange, InodeRow, Missing, Name};
use hayloft_store::{Codec, decode_chunk};
use hayloft_wire::client_message::Body as Ask;
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
const ENTER_NAMES: u64 = 512 << 10;
/// How often that doubles for who walks.
const DOUBLINGS_MAX: u32 = 3;
/// The same while a lot is on its way already.
const ENTER_LEAST: u64 = 256 << 10;
/// How often a waiting caller looks whether it was interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);
/// How long a store that does not work is waited for before the caller hears of it.
const STORE_PATIENCE: Duration = Duration::from_secs(60);
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

/// An entry, with the row of its inode unless somebody else owns that.
type ListedEntry = (Name, Dentry, Option<InodeRow>);

/// A directory with all its entries.
#[derive(Debug)]
struct Listed {
    dir: Ino,
    entries: Vec<ListedEntry>,
    /// It is owned from now on.
    own: bool,
}

/// Directories as an answer brings them.
#[derive(Debug, Default)]
pub(crate) struct Bundle {
    dirs: Vec<Listed>,
    /// Entries of directories of which parts are still to come.
    partial: HashMap<u64, Vec<ListedEntry>>,
    /// Blocks that wait for their content, by its name.
    wanted: HashMap<ContentHash, Vec<(Ino, u64, BlockRef)>>,
    chunks: Vec<Chunk>,
}

impl Client {
    /// Fetches a row that the tree lacks.
    pub(crate) fn fetch_row(
        &self,
        missing: Missing,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), FaultError> {
        self.faults.once(missing, interrupt, || match missing {
            Missing::Inode(ino) => self.fetch_inode(ino, interrupt),
            Missing::Directory(dir) => self.enter(dir, interrupt),
            Missing::Numbers => self.fetch_numbers(interrupt),
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

    fn ask_marked(
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
    fn mark(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }

    /// The row comes in the stream, see [`Client::receive_inode`].
    fn fetch_inode(&self, ino: Ino, interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        self.ask_marked(Ask::FetchInode(FetchInode { ino: ino.0 }), interrupt, self.mark()).map(|_| ())
    }

    pub(crate) fn receive_inode(&self, answer: &InodeAnswer, mark: u64) -> Result<(), FaultError> {
        let Some(message) = &answer.inode else { return Ok(()) };
        let row = InodeRow::try_from(message)?;
        let mut core = self.core();
        if mark == self.mark() {
            core.tree.add_inode(Ino(message.ino), own(row));
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

    /// A file is read whose content is not in its row.
    pub(crate) fn note_reading(&self) {
        // Most of the time it is known, and then no other core loses the line.
        if !self.is_reading.load(Ordering::Relaxed) {
            self.is_reading.store(true, Ordering::Relaxed);
        }
    }

    /// Fetches a directory, its children's rows, and directories below it that come along; small contents as well when
    /// files are being read: who only walks does not wait for these. They come in the stream, see
    /// [`Client::receive_listings`].
    fn enter(&self, dir: Ino, interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        let names_only = !self.is_reading.swap(false, Ordering::Relaxed);
        let doublings = self.ahead.asks(Place { ino: dir, index: 0 }).min(DOUBLINGS_MAX);
        let whole =
            if names_only { ENTER_NAMES << doublings } else { ENTER_BUDGET }.min(self.memory.content());
        // Twice: as it comes, and decoded. What only comes along does not wait for room.
        let along = self.budget.fetch_now(2 * whole, self.memory.fetched());
        let budget_bytes = if along.is_some() { whole } else { whole.min(ENTER_LEAST) };
        let enter = Enter { dir: dir.0, budget_bytes, names_only };
        self.ask_marked(Ask::Enter(enter), interrupt, self.mark())?;
        self.core().tree.touch(dir);
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
        let mut core = self.core();
        if let Some(asked) = bundle.dirs.first() {
            self.ahead.came(Place { ino: asked.dir, index: 0 }, next);
        }
        let own: Vec<Ino> = bundle.dirs.iter().filter(|listed| listed.own).map(|listed| listed.dir).collect();
        if mark == self.mark() {
            self.add_bundle(&mut core, bundle);
        }
        // One that is gone here is on its way out at the server.
        for dir in own {
            if core.tree.has_inode(dir) {
                core.tree.own(dir);
            }
        }
        Ok(())
    }

    fn add_bundle(&self, core: &mut Core, bundle: Bundle) {
        self.stats.directories_prefetched.add(bundle.dirs.len().saturating_sub(1) as u64);
        let listed = bundle.dirs.iter().flat_map(|listed| &listed.entries).map(|(_, dentry, _)| dentry.ino);
        let fresh: HashSet<Ino> = listed.filter(|ino| !core.tree.has_inode(*ino)).collect();
        for Listed { dir, entries, own } in bundle.dirs {
            core.names.listed(dir, own);
            core.tree.add_listing(dir, entries);
        }
        for chunk in bundle.chunks {
            let Ok((hash, data)) = decode(&chunk) else { continue };
            for (ino, index, stored) in bundle.wanted.get(&hash).into_iter().flatten() {
                // A file that was known before may have changed since; what is here is newer.
                if !fresh.contains(ino) {
                    continue;
                }
                let Ok(file) = core.file(*ino) else { continue };
                if self.budget.with(&file, |file| file.fill(*index, *stored, &data)) > 0 {
                    self.stats.blocks_prefetched.add(1);
                    self.may_drop(*ino, [*index]);
                }
            }
        }
    }
}

impl Bundle {
    fn add(&mut self, listings: Listings) -> Result<(), FaultError> {
        for listing in listings.dirs {
            let entries = self.partial.entry(listing.dir).or_default();
            for entry in listing.entries {
                let dentry = Dentry::try_from(&entry.dentry.ok_or_else(unexpected)?)?;
                let row = entry.inode.map(|inode| InodeRow::try_from(&inode)).transpose()?;
                if let Some(Content::Blocks(blocks)) = row.as_ref().map(|row| &row.content) {
                    for (index, stored) in blocks.iter().enumerate() {
                        if let Some(stored) = stored {
                            let place = (dentry.ino, index as u64, *stored);
                            self.wanted.entry(stored.hash).or_default().push(place);
                        }
                    }
                }
                entries.push((Name::new(&entry.name), dentry, row.map(own)));
            }
            if listing.complete {
                let entries = self.partial.remove(&listing.dir).unwrap_or_default();
                self.dirs.push(Listed { dir: Ino(listing.dir), entries, own: listing.own });
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
        Content::None | Content::Blocks(_) => {}
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
