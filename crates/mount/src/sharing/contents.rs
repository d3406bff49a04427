//! Fetching contents of files: what a call waits for, what lies next to it, and what a walk will read after that.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hayloft_fuse::Interrupt;
use hayloft_model::{BlockRef, Content, Ino};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FetchContent, FetchPages};
use parking_lot::{Condvar, Mutex};

use crate::cache::data::{File, Lacking};
use crate::core::Client;
use crate::sharing::ahead::Place;
use crate::sharing::fault::{FaultError, decode, unexpected};

/// Blocks that are fetched in one request for a call that waits, at most.
const FETCH_BLOCKS: usize = 64;
/// How often the parts double that are fetched ahead of a walk.
const DOUBLINGS_MAX: u32 = 2;
/// How many of the next inode numbers are looked at for files to fetch ahead, and how large these may be, bytes.
const NEIGHBOURS: u64 = 256;
const NEIGHBOUR_SIZE_MAX: u64 = 1 << 20;
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

/// Blocks that are being fetched ahead: who needs one waits for that.
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
    fn begin(&self, wanted: &[Wanted]) -> Fetching<'_> {
        *self.blocks.lock() = wanted.iter().map(|wanted| (wanted.ino, wanted.index)).collect();
        Fetching(self)
    }

    /// Waits as long as one of the file's blocks comes. Returns whether it has waited.
    fn wait(
        &self,
        ino: Ino,
        lacking: &[(u64, BlockRef)],
        interrupt: Option<&Interrupt>,
    ) -> Result<bool, FaultError> {
        let mut blocks = self.blocks.lock();
        let is_coming = |blocks: &HashSet<(Ino, u64)>| {
            !blocks.is_empty() && lacking.iter().any(|(index, _)| blocks.contains(&(ino, *index)))
        };
        let mut has_waited = false;
        while is_coming(&blocks) {
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
    /// Fetches what a file's data lacks.
    pub(crate) fn fetch_data(
        &self,
        ino: Ino,
        file: &Arc<File>,
        lacking: Lacking,
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
                if self.coming.wait(ino, &blocks, interrupt)? {
                    return Ok(());
                }
                self.fetch_content(ino, file, blocks, interrupt)
            }
        }
    }

    fn fetch_content(
        &self,
        ino: Ino,
        file: &Arc<File>,
        blocks: Vec<(u64, BlockRef)>,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), FaultError> {
        let Some((first, _)) = blocks.first().copied() else { return Ok(()) };
        let mut wanted: Vec<Wanted> = blocks
            .into_iter()
            .map(|(index, stored)| Wanted { ino, file: Arc::clone(file), index, stored })
            .collect();
        let needed = wanted.len();
        self.stats.block_misses.add(needed as u64);
        self.contents_ahead.asks(Place { ino, index: first });
        let last = wanted.last().map_or(first, |last| last.index);
        let rest = file.data.lock().absent().into_iter().find(|(index, _)| *index > last);
        let next = match rest {
            Some((index, _)) => Some(Place { ino, index }),
            None if first == 0 && wanted.len() < FETCH_BLOCKS => {
                self.add_files(Place { ino: Ino(ino.0 + 1), index: 0 }, FETCH_BLOCKS, &mut wanted)
            }
            None => Some(Place { ino: Ino(ino.0 + 1), index: 0 }),
        };
        self.stats.blocks_prefetched.add((wanted.len() - needed) as u64);
        let mut result = self.fetch_all(&wanted, interrupt);
        if matches!(result, Err(FaultError::Gone | FaultError::Broken(_))) && needed < wanted.len() {
            // What was only fetched ahead must not make a read fail.
            result = self.fetch_all(&wanted[..needed], interrupt);
        }
        drop(wanted);
        self.contents_ahead.came(Place { ino, index: first }, next);
        self.trim();
        result
    }

    /// Fetches a part of what a walk will read.
    pub(crate) fn fetch_contents_ahead(&self, from: Place) {
        let parts = self.contents_ahead.asks(from);
        let most = FETCH_BLOCKS << parts.saturating_sub(1).min(DOUBLINGS_MAX);
        let mut wanted = Vec::new();
        let next = self.add_files(from, most, &mut wanted);
        let Some(head) = wanted.first().map(|wanted| Place { ino: wanted.ino, index: wanted.index }) else {
            return;
        };
        let fetching = self.coming.begin(&wanted);
        // What is only fetched ahead does not wait for room. Whoever needs it asks for it as well, and is told why it cannot
        // be had.
        let bytes = wanted.iter().map(|wanted| 2 * u64::from(wanted.stored.len)).sum();
        let room = self.budget.fetch_now(bytes, self.memory.fetched());
        let is_fetched = room.is_some() && self.fetch_blocks(&wanted, None).is_ok();
        drop((fetching, room));
        if is_fetched {
            self.stats.blocks_prefetched.add(wanted.len() as u64);
            self.contents_ahead.came(head, next);
        }
        drop(wanted);
        self.trim();
    }

    /// Files made right after one another are likely to be read so. Adds what lacks of them, up to `most` blocks in all. Returns
    /// where the next part begins.
    fn add_files(&self, from: Place, most: usize, wanted: &mut Vec<Wanted>) -> Option<Place> {
        let mut core = self.core();
        for ino in (from.ino.0..from.ino.0 + NEIGHBOURS).map(Ino) {
            // One that is being read may have any size.
            let begin = if ino == from.ino { from.index } else { 0 };
            let fits = core.tree.inode(ino).is_ok_and(|row| {
                matches!(row.content, Content::Blocks(_)) && (begin > 0 || row.size <= NEIGHBOUR_SIZE_MAX)
            });
            let Some(file) = fits.then(|| core.file(ino).ok()).flatten() else { continue };
            let mut absent = file.data.lock().absent();
            absent.retain(|(index, _)| *index >= begin);
            let room = most - wanted.len();
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
            wanted.extend(of_file);
            if is_cut {
                return rest;
            }
        }
        Some(Place { ino: Ino(from.ino.0 + NEIGHBOURS), index: 0 })
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
