//! Fetching contents of files: what a call waits for, what lies next to it, and what a walk will read after that.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hayloft_fuse::Interrupt;
use hayloft_model::grants::STRAY;
use hayloft_model::{BlockRef, Content, INLINE_MAX, Ino};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Enter, FetchContent, FetchPages};
use parking_lot::{Condvar, Mutex};

use crate::cache::data::{File, Lacking};
use crate::core::Client;
use crate::sharing::ahead::Place;
use crate::sharing::fault::{FaultError, decode, unexpected};
use crate::sharing::kept;

/// Blocks that are fetched in one request for a call that waits, at most.
const FETCH_BLOCKS: usize = 64;
/// How often the parts double that are fetched ahead of a walk.
const DOUBLINGS_MAX: u32 = 2;
/// How many of the next inode numbers are looked at for files to fetch ahead, and how large these may be, bytes.
const NEIGHBOURS: u64 = 256;
const NEIGHBOUR_SIZE_MAX: u64 = 1 << 20;
/// Bytes of a row with its data, as a rule: those with large attributes besides come one by one.
const FILE_MAX: u64 = INLINE_MAX + 512;
/// A walk may leave out so many files between two parts: those that have come with their directory.
pub(crate) const REACH: u64 = 64;
/// How often a waiting caller looks whether it was interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);

/// A block to fetch.
struct Wanted {
    ino: Ino,
    file: Arc<File>,
    index: u64,
    stored: BlockRef,
}

/// What is fetched together.
#[derive(Default)]
struct Part {
    blocks: Vec<Wanted>,
    /// Files of which the content was left out of their rows, with their homes.
    files: Vec<(Ino, Ino)>,
    /// Bytes of these.
    file_bytes: u64,
}

impl Part {
    fn len(&self) -> usize {
        self.blocks.len() + self.files.len()
    }

    /// Twice what comes: as it comes, and decoded.
    fn room(&self) -> u64 {
        let blocks: u64 = self.blocks.iter().map(|wanted| u64::from(wanted.stored.len)).sum();
        2 * (blocks + self.file_bytes)
    }
}

/// Contents that are being fetched ahead: who needs one waits for that. What was left out of a row is block 0.
#[derive(Debug, Default)]
pub(crate) struct Coming {
    blocks: Mutex<HashSet<(Ino, u64)>>,
    changed: Condvar,
}

/// They come as long as this lives.
struct Fetching<'a>(&'a Coming);

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.0.blocks.lock().clear();
        self.0.changed.notify_all();
    }
}

impl Coming {
    /// Only one part is fetched ahead at a time.
    fn begin(&self, part: &Part) -> Fetching<'_> {
        let blocks = part.blocks.iter().map(|wanted| (wanted.ino, wanted.index));
        *self.blocks.lock() = blocks.chain(part.files.iter().map(|(ino, _)| (*ino, 0))).collect();
        Fetching(self)
    }

    /// Waits as long as one of the file's blocks comes. Returns whether it has waited.
    fn wait(
        &self,
        ino: Ino,
        lacking: impl Iterator<Item = u64> + Clone,
        needed: &mut Option<kept::Need<'_>>,
        interrupt: Option<&Interrupt>,
    ) -> Result<bool, FaultError> {
        let mut blocks = self.blocks.lock();
        let is_coming = |blocks: &HashSet<(Ino, u64)>| {
            !blocks.is_empty() && lacking.clone().any(|index| blocks.contains(&(ino, index)))
        };
        let mut has_waited = false;
        while is_coming(&blocks) {
            *needed = None;
            if interrupt.is_some_and(Interrupt::interrupted) {
                return Err(FaultError::Interrupted);
            }
            has_waited = true;
            self.changed.wait_for(&mut blocks, INTERRUPT_POLL);
        }
        Ok(has_waited)
    }
}

impl Client {
    /// Fetches what a file's data lacks. `needed`: what is kept for the call; not as long as it waits for more than its data.
    pub(crate) fn fetch_data<'a>(
        &'a self,
        ino: Ino,
        file: &Arc<File>,
        lacking: Lacking,
        needed: &mut Option<kept::Need<'a>>,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), FaultError> {
        match lacking {
            // Whoever asks again gets what there is now.
            Lacking::Gone => Ok(()),
            Lacking::Pages => {
                let answers = self.ask(Ask::FetchPages(FetchPages { ino: ino.0 }), interrupt)?;
                let Some(Answer::Pages(pages)) = answers.into_iter().next() else { return Err(unexpected()) };
                let mut rows = Vec::with_capacity(pages.pages.len());
                for row in pages.pages {
                    rows.push((row.page, hayloft_wire::decode_blocks(&row.blocks)?));
                }
                rows.sort_by_key(|(page, _)| *page);
                self.budget.with(file, |data| data.add_pages(&rows));
                Ok(())
            }
            Lacking::Content(blocks) => {
                if self.coming.wait(ino, blocks.iter().map(|(index, _)| *index), needed, interrupt)? {
                    return Ok(());
                }
                self.fetch_content(ino, file, blocks, needed, interrupt)
            }
        }
    }

    fn fetch_content<'a>(
        &'a self,
        ino: Ino,
        file: &Arc<File>,
        blocks: Vec<(u64, BlockRef)>,
        keeps: &mut Option<kept::Need<'a>>,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), FaultError> {
        let Some((first, _)) = blocks.first().copied() else { return Ok(()) };
        let wanted: Vec<Wanted> = blocks
            .into_iter()
            .map(|(index, stored)| Wanted { ino, file: Arc::clone(file), index, stored })
            .collect();
        let needed = wanted.len();
        self.stats.block_misses.add(needed as u64);
        self.asks_for_contents(Place { ino, index: first });
        let last = wanted.last().map_or(first, |last| last.index);
        let rest = file.data.lock().absent().into_iter().find(|(index, _)| *index > last);
        let mut part = Part { blocks: wanted, ..Part::default() };
        let next = match rest {
            Some((index, _)) => Some(Place { ino, index }),
            None if first == 0 && part.len() < self.fetched_at_once() => {
                self.add_files(Place { ino: Ino(ino.0 + 1), index: 0 }, FETCH_BLOCKS, &mut part)
            }
            None => Some(Place { ino: Ino(ino.0 + 1), index: 0 }),
        };
        self.stats.blocks_prefetched.add((part.len() - needed) as u64);
        if !part.files.is_empty() {
            // These come with their directory, which may have to wait until what is needed here has been given up.
            *keeps = None;
            // What was only fetched ahead must not make a read fail.
            let _ = self.fetch_files(&part.files, interrupt);
            *keeps = Some(self.kept.need(ino));
        }
        let mut result = self.fetch_all(&part.blocks, interrupt);
        if matches!(result, Err(FaultError::Gone | FaultError::Broken(_))) && needed < part.blocks.len() {
            // The same here.
            result = self.fetch_all(&part.blocks[..needed], interrupt);
        }
        drop(part);
        self.contents_ahead.came(Place { ino, index: first }, next);
        self.trim();
        result
    }

    /// Somebody asks for this, and with it for what a walk will read after it.
    fn asks_for_contents(&self, place: Place) {
        if self.options.ahead {
            self.contents_ahead.asks(place);
        }
    }

    /// So many blocks come with one that is needed, itself among them.
    fn fetched_at_once(&self) -> usize {
        if self.options.ahead { FETCH_BLOCKS } else { 1 }
    }

    /// Fetches the content that was left out of a file's row, and what a walk will read after it.
    pub(crate) fn fetch_left_out(&self, ino: Ino, interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        if self.coming.wait(ino, std::iter::once(0), &mut None, interrupt)? {
            return Ok(());
        }
        let place = Place { ino, index: 0 };
        self.asks_for_contents(place);
        let mut part = Part::default();
        let next = self.add_files(place, self.fetched_at_once(), &mut part);
        if part.files.first().is_some_and(|(first, _)| *first == ino) {
            self.stats.block_misses.add(1);
            self.stats.blocks_prefetched.add(part.len() as u64 - 1);
            self.fetch_files(&part.files, interrupt)?;
            let _ = self.fetch_all(&part.blocks, interrupt);
        }
        drop(part);
        if self.core().tree.is_left_out(ino) {
            // It has names in several directories, or is owned by itself.
            self.fetch_inode(ino, interrupt)?;
        }
        self.contents_ahead.came(place, next);
        self.trim();
        Ok(())
    }

    /// Fetches a part of what a walk will read.
    pub(crate) fn fetch_contents_ahead(&self, from: Place) {
        let parts = self.contents_ahead.asks(from);
        let most = FETCH_BLOCKS << parts.saturating_sub(1).min(DOUBLINGS_MAX);
        let mut part = Part::default();
        let next = self.add_files(from, most, &mut part);
        let block = part.blocks.first().map(|wanted| Place { ino: wanted.ino, index: wanted.index });
        let file = part.files.first().map(|(ino, _)| Place { ino: *ino, index: 0 });
        let first = |one: Place, other: Place| if other.ino < one.ino { other } else { one };
        let Some(head) = block.into_iter().chain(file).reduce(first) else { return };
        let fetching = self.coming.begin(&part);
        // What is only fetched ahead does not wait for room. Whoever needs it asks for it as well, and is told why it cannot
        // be had.
        let room = self.budget.fetch_now(part.room(), self.memory.fetched());
        let is_fetched = room.is_some()
            && self.fetch_files(&part.files, None).is_ok()
            && self.fetch_blocks(&part.blocks, None).is_ok();
        drop((fetching, room));
        if is_fetched {
            self.stats.blocks_prefetched.add(part.len() as u64);
            self.contents_ahead.came(head, next);
        }
        drop(part);
        self.trim();
    }

    /// Files made right after one another are likely to be read so. Adds what lacks of them, up to `most` blocks in all. Returns
    /// where the next part begins.
    fn add_files(&self, from: Place, most: usize, part: &mut Part) -> Option<Place> {
        let mut core = self.core();
        for ino in (from.ino.0..from.ino.0 + NEIGHBOURS).map(Ino) {
            let Ok(row) = core.tree.inode(ino) else { continue };
            // One that is being read may have any size.
            let begin = if ino == from.ino { from.index } else { 0 };
            match row.content {
                Content::Blocks(_) if begin > 0 || row.size <= NEIGHBOUR_SIZE_MAX => {}
                Content::LeftOut if part.len() == most => return Some(Place { ino, index: 0 }),
                Content::LeftOut if row.parent != STRAY => {
                    part.files.push((ino, row.parent));
                    part.file_bytes += row.size.min(INLINE_MAX);
                    continue;
                }
                _ => continue,
            }
            let Ok(file) = core.file(ino) else { continue };
            let mut absent = file.data.lock().absent();
            absent.retain(|(index, _)| *index >= begin);
            let room = most - part.len();
            let is_cut = absent.len() > room;
            if is_cut && begin == 0 {
                return Some(Place { ino, index: 0 });
            }
            let rest = absent.get(room).map(|(index, _)| Place { ino, index: *index });
            let of_file = absent.into_iter().take(room).map(|(index, stored)| Wanted {
                ino,
                file: Arc::clone(&file),
                index,
                stored,
            });
            part.blocks.extend(of_file);
            if is_cut {
                return rest;
            }
        }
        Some(Place { ino: Ino(from.ino.0 + NEIGHBOURS), index: 0 })
    }

    /// The rows come in the stream, see [`Client::receive_listings`].
    fn fetch_files(&self, files: &[(Ino, Ino)], interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        let Some((_, dir)) = files.first() else { return Ok(()) };
        let enter = Enter {
            dir: dir.0,
            budget_bytes: files.len() as u64 * FILE_MAX,
            files: files.iter().map(|(ino, _)| ino.0).collect(),
            homes: files.iter().map(|(_, home)| home.0).collect(),
            ..Enter::default()
        };
        self.ask_marked(Ask::Enter(enter), interrupt, self.mark()).map(|_| ())
    }

    fn fetch_all(&self, wanted: &[Wanted], interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        for part in wanted.chunks(FETCH_BLOCKS) {
            // Twice: as it comes, and decoded.
            let bytes = part.iter().map(|wanted| 2 * u64::from(wanted.stored.len)).sum();
            let is_given_up = || interrupt.is_some_and(Interrupt::interrupted);
            let Some(_fetch) = self.budget.fetch(bytes, self.memory.fetched(), is_given_up) else {
                return Err(FaultError::Interrupted);
            };
            self.fetch_blocks(part, interrupt)?;
        }
        Ok(())
    }

    fn fetch_blocks(&self, wanted: &[Wanted], interrupt: Option<&Interrupt>) -> Result<(), FaultError> {
        if wanted.is_empty() {
            return Ok(());
        }
        let hashes: Vec<u8> = wanted.iter().flat_map(|wanted| wanted.stored.hash.0).collect();
        let answers = self.ask(Ask::FetchContent(FetchContent { hashes: hashes.into() }), interrupt)?;
        let mut contents = HashMap::new();
        for answer in answers {
            let Answer::Contents(answer) = answer else { return Err(unexpected()) };
            for chunk in &answer.chunks {
                let (hash, data) = decode(chunk)?;
                contents.insert(hash, data);
            }
        }
        for Wanted { ino, file, index, stored } in wanted {
            let data = contents
                .get(&stored.hash)
                .ok_or_else(|| FaultError::Broken(format!("the server left out content {}", stored.hash)))?;
            if self.budget.with(file, |file| file.fill(*index, *stored, data)) > 0 {
                self.may_drop(*ino, [*index]);
            }
        }
        self.trim_content(self.memory.content());
        Ok(())
    }
}
