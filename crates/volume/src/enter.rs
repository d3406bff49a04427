//! Answering `Enter`: a directory, and what a walk through the tree will want next.
//!
//! Behind the directory that was asked for come others in the order in which `find` and `tar` meet
//! them: its subdirectories depth first, then what follows it in its parent, and so on upwards. Each
//! comes whole, with the contents of its small files, as long as the budget lasts.

use std::collections::HashSet;
use std::sync::Arc;

use hayloft_model::grants::{Decision, Grant};
use hayloft_model::{BLOCK_SIZE, ContentHash, FileKind, Ino, SessionId};
use hayloft_wire::{InodeRowMessage, ListedEntry, Listing, Listings, decode_blocks, server_message::Body};
use prost::Message;
use slatedb::DbSnapshot;

use crate::content::message_of;
use crate::error::VolumeError;
use crate::listing::{self, Entry};
use crate::replies::Replies;
use crate::volume::Volume;

/// Most bytes that may come along, whatever the client says.
const BUDGET_MAX: u64 = 16 << 20;

/// An answer is cut into parts of about this many bytes.
const PART: usize = 1 << 20;

/// Entries of a large directory that are handled at a time.
const SLICE: usize = 512;

/// Directories that the client has already are walked through, but not more than this many.
const WALKED_MAX: usize = 256;

/// A larger parent is not searched for what follows.
const PARENT_MAX: usize = 8192;

/// Bytes that an entry takes at least; bounds what is read of a directory that will not fit.
const ENTRY_MIN: u64 = 48;

/// Bytes that stand before an entry in a listing, at most.
const ENTRY_HEAD: usize = 8;

struct Walk<'a> {
    volume: &'a Arc<Volume>,
    session: SessionId,
    snapshot: Arc<DbSnapshot>,
    replies: &'a Replies,
    request: u64,
    budget: u64,
    walked: usize,
    /// The client had this directory already and asks again: it has forgotten it, and so most likely
    /// its neighbours.
    again: bool,
    part: Listings,
    part_bytes: usize,
    wanted: Vec<ContentHash>,
    wanted_bytes: usize,
    seen: HashSet<ContentHash>,
}

impl Volume {
    /// Sends a directory with its neighbours, in one or several parts.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        session: SessionId,
        dir: Ino,
        budget: u64,
        replies: &Replies,
        request: u64,
    ) -> Result<(), VolumeError> {
        let snapshot = self.db()?.snapshot()?;
        let row = listing::inode(&snapshot, dir).await?;
        if FileKind::of_mode(row.mode) != Some(FileKind::Directory) {
            return Err(VolumeError::NotDirectory(dir));
        }
        let mut walk = Walk {
            volume: self,
            session,
            snapshot,
            replies,
            request,
            budget: budget.min(BUDGET_MAX),
            walked: 0,
            again: self.state.lock().grants.held(session, dir).is_some(),
            part: Listings::default(),
            part_bytes: 0,
            wanted: Vec::new(),
            wanted_bytes: 0,
            seen: HashSet::new(),
        };
        let below = walk.whole(dir).await?;
        walk.neighbours(&row, below).await?;
        walk.fetch_contents().await?;
        let last = std::mem::take(&mut walk.part);
        replies.send(request, Body::Listings(last)).await;
        Ok(())
    }
}

/// The content of a small file that is not in its row.
fn small_content(row: &InodeRowMessage) -> Option<(ContentHash, u32)> {
    if row.size > BLOCK_SIZE {
        return None;
    }
    let blocks = decode_blocks(row.blocks.as_ref()?).ok()?;
    blocks.first().copied().flatten().map(|block| (block.hash, block.len))
}

fn directories(entries: &[Entry]) -> Vec<Ino> {
    entries.iter().filter(|entry| entry.is_directory()).map(|entry| Ino(entry.dentry.ino)).collect()
}

impl Walk<'_> {
    /// The directory that was asked for, however large; gives its subdirectories.
    async fn whole(&mut self, dir: Ino) -> Result<Vec<Ino>, VolumeError> {
        self.grant(dir);
        let entries = listing::entries(&self.snapshot, dir, usize::MAX).await?.unwrap_or_default();
        if entries.is_empty() {
            self.list(dir, Vec::new(), true).await?;
        }
        let slices = entries.chunks(SLICE).len();
        for (at, slice) in entries.chunks(SLICE).enumerate() {
            let listed = self.listed(dir, slice).await?;
            for (hash, len) in listed.iter().filter_map(|entry| small_content(entry.inode.as_ref()?)) {
                if u64::from(len) <= self.budget && self.seen.insert(hash) {
                    self.want(hash, len);
                }
            }
            self.list(dir, listed, at + 1 == slices).await?;
        }
        Ok(directories(&entries))
    }

    async fn listed(&self, dir: Ino, entries: &[Entry]) -> Result<Vec<ListedEntry>, VolumeError> {
        let rows = listing::inodes(&self.snapshot, entries.iter().map(|entry| entry.dentry.ino)).await?;
        let listed = entries.iter().map(|entry| {
            let ino = entry.dentry.ino;
            let inode = rows.get(&ino).cloned();
            if inode.is_none() {
                let (volume, dir) = (&self.volume.name, dir.0);
                tracing::error!(volume, dir, ino, "a name leads to an inode that does not exist");
            }
            ListedEntry { name: entry.name.clone(), dentry: Some(entry.dentry.clone()), inode }
        });
        Ok(listed.collect())
    }

    /// Directories that come next, until the budget is used up.
    async fn neighbours(&mut self, dir: &InodeRowMessage, below: Vec<Ino>) -> Result<(), VolumeError> {
        let mut stack: Vec<Ino> = below.into_iter().rev().collect();
        let (mut at, mut parent) = (Ino(dir.ino), Ino(dir.parent));
        loop {
            while let Some(next) = stack.pop() {
                match self.neighbour(next).await? {
                    Some(below) => stack.extend(below.into_iter().rev()),
                    None => return Ok(()),
                }
            }
            if at == parent || self.budget == 0 {
                return Ok(());
            }
            let Some(entries) = listing::entries(&self.snapshot, parent, PARENT_MAX).await? else {
                return Ok(());
            };
            let behind = entries.iter().position(|entry| entry.dentry.ino == at.0).map_or(0, |at| at + 1);
            stack.extend(directories(&entries[behind..]).into_iter().rev());
            let up = listing::inode(&self.snapshot, parent).await?;
            (at, parent) = (parent, Ino(up.parent));
        }
    }

    /// One directory more, whole and with its small contents, if that fits into the budget; gives its
    /// subdirectories, or `None` when the walk is over.
    async fn neighbour(&mut self, dir: Ino) -> Result<Option<Vec<Ino>>, VolumeError> {
        let limit = (self.budget / ENTRY_MIN) as usize;
        let Some(entries) = listing::entries(&self.snapshot, dir, limit).await? else { return Ok(None) };
        if !self.again && self.volume.state.lock().grants.held(self.session, dir).is_some() {
            self.walked += 1;
            return Ok((self.walked < WALKED_MAX).then(|| directories(&entries)));
        }
        let listed = self.listed(dir, &entries).await?;
        let mut bytes: u64 = listed.iter().map(|entry| entry.encoded_len() as u64).sum::<u64>() + ENTRY_MIN;
        let mut contents = Vec::new();
        for (hash, len) in listed.iter().filter_map(|entry| small_content(entry.inode.as_ref()?)) {
            if !self.seen.contains(&hash) {
                bytes += u64::from(len);
                contents.push((hash, len));
            }
        }
        if bytes > self.budget || !self.grant(dir) {
            return Ok(None);
        }
        self.budget -= bytes - contents.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        for (hash, len) in contents {
            if self.seen.insert(hash) {
                self.want(hash, len);
            }
        }
        self.list(dir, listed, true).await?;
        Ok(Some(directories(&entries)))
    }

    fn grant(&self, dir: Ino) -> bool {
        let decision = self.volume.state.lock().grants.request(self.session, dir, Grant::Own);
        matches!(decision, Decision::Granted(_))
    }

    fn want(&mut self, hash: ContentHash, len: u32) {
        self.budget = self.budget.saturating_sub(u64::from(len));
        self.wanted.push(hash);
        self.wanted_bytes += len as usize;
    }

    /// Adds a listing, or a piece of one, to the part; sends the part whenever it is large enough: rows
    /// with many attributes are large.
    async fn list(&mut self, dir: Ino, entries: Vec<ListedEntry>, complete: bool) -> Result<(), VolumeError> {
        let mut piece = Vec::with_capacity(entries.len());
        for entry in entries {
            self.part_bytes += entry.encoded_len() + ENTRY_HEAD;
            piece.push(entry);
            if self.part_bytes >= PART {
                let entries = std::mem::take(&mut piece);
                self.part.dirs.push(Listing { dir: dir.0, entries, complete: false });
                self.send_part().await;
            }
        }
        self.part_bytes += ENTRY_MIN as usize;
        self.part.dirs.push(Listing { dir: dir.0, entries: piece, complete });
        if self.wanted_bytes >= PART {
            self.fetch_contents().await?;
        }
        if self.part_bytes >= PART {
            self.send_part().await;
        }
        Ok(())
    }

    async fn send_part(&mut self) {
        self.part_bytes = 0;
        let part = Listings { more: true, ..std::mem::take(&mut self.part) };
        self.replies.send(self.request, Body::Listings(part)).await;
    }

    /// Reads the contents that were chosen so far. One that cannot be read does not spoil the listing:
    /// the client will ask for it by name and be told.
    async fn fetch_contents(&mut self) -> Result<(), VolumeError> {
        self.wanted_bytes = 0;
        for hashes in std::mem::take(&mut self.wanted).chunks(SLICE) {
            match self.volume.read_chunks(hashes).await {
                Ok(chunks) => {
                    self.part_bytes += chunks.iter().map(|chunk| chunk.payload.len() + 48).sum::<usize>();
                    self.part.contents.extend(chunks.into_iter().map(message_of));
                }
                Err(error) => tracing::error!(volume = self.volume.name, %error, "content cannot be read"),
            }
        }
        Ok(())
    }
}
