//! Answering `Enter`: a directory, and what a walk through the tree will want next.
//!
//! Behind the directory that was asked for come others in the order in which `find` and `tar` meet
//! them: its subdirectories depth first, then what follows it in its parent, and so on upwards. Each
//! comes whole, as long as the budget lasts, and with the contents of its small files if these are wanted.
//!
//! Whatever is sent was read after the request had claimed it, so that nobody changes it before it is in the stream:
//! first a directory, then its names are read; then what its names lead to, then the rows.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use hayloft_model::grants::{Grant, Object, Request};
use hayloft_model::{BLOCK_SIZE, ContentHash, FileKind, Ino, SessionId};
use hayloft_wire::{
    Enter, InodeRowMessage, ListedEntry, Listing, Listings, decode_blocks, server_message::Body,
};
use prost::Message;
use slatedb::Db;

use crate::content::message_of;
use crate::database::listing::{self, Entry};
use crate::error::VolumeError;
use crate::replies::Replies;
use crate::sharing::Pass;
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

/// Type bits of a mode.
const FILE_TYPE: u32 = 0o170000;

struct Walk<'a> {
    volume: &'a Arc<Volume>,
    session: SessionId,
    pass: Pass,
    db: Db,
    replies: &'a Replies,
    connection: u64,
    request: u64,
    budget: u64,
    /// Contents do not come along.
    names_only: bool,
    walked: usize,
    /// The first directory for which there was no room.
    next: Option<Ino>,
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
        asked: &Enter,
        replies: &Replies,
        (connection, request): (u64, u64),
    ) -> Result<(), VolumeError> {
        let dir = Ino(asked.dir);
        replies.room().await;
        let mut pass = self.request(session, Request::Read(vec![Object::Directory(dir)]))?;
        pass.ready().await?;
        let db = self.db()?;
        let row = listing::inode(&*db.snapshot()?, dir).await?;
        if FileKind::of_mode(row.mode) != Some(FileKind::Directory) {
            return Err(VolumeError::NotDirectory(dir));
        }
        let again = self.is_listed(session, dir);
        let mut walk = Walk {
            volume: self,
            session,
            pass,
            db,
            replies,
            connection,
            request,
            budget: asked.budget_bytes.min(BUDGET_MAX),
            names_only: asked.names_only,
            walked: 0,
            next: None,
            again,
            part: Listings::default(),
            part_bytes: 0,
            wanted: Vec::new(),
            wanted_bytes: 0,
            seen: HashSet::new(),
        };
        let below = walk.whole(dir).await?;
        walk.neighbours(&row, below).await?;
        walk.fetch_contents().await?;
        let next = walk.next.map_or(0, |dir| dir.0);
        let last = Listings { next, ..std::mem::take(&mut walk.part) };
        walk.push(last).await?;
        walk.pass.finish();
        Ok(())
    }

    /// Whether the session was sent the directory's listing.
    fn is_listed(&self, session: SessionId, dir: Ino) -> bool {
        self.sharing.lock().streams.get(&session).is_some_and(|stream| stream.listed.contains(&dir))
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

/// What a part tells of: directories, and what their names lead to.
fn inos_of(part: &Listings) -> impl Iterator<Item = Ino> + '_ {
    part.dirs.iter().flat_map(|listing| {
        let led_to = listing.entries.iter().filter_map(|entry| entry.inode.as_ref());
        std::iter::once(Ino(listing.dir)).chain(led_to.map(|row| Ino(row.ino)))
    })
}

fn directories(entries: &[Entry]) -> Vec<Ino> {
    entries.iter().filter(|entry| entry.is_directory()).map(|entry| Ino(entry.dentry.ino)).collect()
}

impl Walk<'_> {
    /// The directory that was asked for, however large; gives its subdirectories.
    async fn whole(&mut self, dir: Ino) -> Result<Vec<Ino>, VolumeError> {
        self.note_listed(dir);
        let entries = listing::entries(&*self.db.snapshot()?, dir, usize::MAX).await?.unwrap_or_default();
        if entries.is_empty() {
            self.list(dir, Vec::new(), true).await?;
        }
        let slices = entries.chunks(SLICE).len();
        for (at, slice) in entries.chunks(SLICE).enumerate() {
            let listed = self.listed(dir, slice).await?;
            for (hash, len) in self.contents_of(&listed) {
                if u64::from(len) <= self.budget && self.seen.insert(hash) {
                    self.want(hash, len);
                }
            }
            self.list(dir, listed, at + 1 == slices).await?;
        }
        Ok(directories(&entries))
    }

    /// The entries with the rows that the session may know.
    async fn listed(&self, dir: Ino, entries: &[Entry]) -> Result<Vec<ListedEntry>, VolumeError> {
        let mut known = self.take_along(entries);
        let snapshot = self.db.snapshot()?;
        let mut rows = listing::inodes(&snapshot, known.iter().copied()).await?;
        self.read_strays(&mut rows, &mut known).await?;
        let is_own = self.volume.sharing.lock().grants.owner(dir) == Some(self.session);
        let listed = entries.iter().map(|entry| {
            let ino = entry.dentry.ino;
            let inode = rows.get(&ino).cloned();
            // What the session itself owns it may be removing at this moment.
            if inode.is_none() && known.contains(&ino) && !is_own {
                let (volume, dir) = (&self.volume.name, dir.0);
                tracing::error!(volume, dir, ino, "a name leads to an inode that does not exist");
            }
            ListedEntry { name: entry.name.clone(), dentry: Some(entry.dentry.clone()), inode }
        });
        Ok(listed.collect())
    }

    /// Which inodes' rows may come along: directories that the session reads from now on, and files that nobody else
    /// owns. Nobody becomes an owner of these while the request is under way.
    fn take_along(&self, entries: &[Entry]) -> HashSet<u64> {
        let mut sharing = self.volume.sharing.lock();
        let mut known = HashSet::with_capacity(entries.len());
        for entry in entries {
            let ino = Ino(entry.dentry.ino);
            let is_known = match entry.is_directory() {
                true => sharing.grants.read_along(self.pass.ticket, ino).is_some(),
                // What the session owns by itself it has, and may be told to give back meanwhile.
                false => sharing.grants.owner(ino).is_none(),
            };
            if is_known {
                known.insert(ino.0);
            }
        }
        known
    }

    /// Files with names in several directories are covered by none: their rows are read once more, when the request
    /// has claimed each.
    async fn read_strays(
        &self,
        rows: &mut HashMap<u64, InodeRowMessage>,
        known: &mut HashSet<u64>,
    ) -> Result<(), VolumeError> {
        let is_directory = |row: &InodeRowMessage| row.mode & FILE_TYPE == FileKind::Directory.bits();
        let strays: Vec<u64> =
            rows.values().filter(|row| row.parent == 0 && !is_directory(row)).map(|row| row.ino).collect();
        if strays.is_empty() {
            return Ok(());
        }
        for ino in &strays {
            rows.remove(ino);
            known.remove(ino);
        }
        let claimed: Vec<u64> = {
            let mut sharing = self.volume.sharing.lock();
            let claim = |ino: &u64| {
                sharing.grants.owner(Ino(*ino)).is_none()
                    && sharing.grants.read_stray_along(self.pass.ticket, Ino(*ino))
            };
            strays.into_iter().filter(claim).collect()
        };
        let snapshot = self.db.snapshot()?;
        rows.extend(listing::inodes(&snapshot, claimed.iter().copied()).await?);
        known.extend(claimed);
        Ok(())
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
            if at == parent {
                return Ok(());
            }
            let Some(entries) = listing::entries(&*self.db.snapshot()?, parent, PARENT_MAX).await? else {
                return Ok(());
            };
            let behind = entries.iter().position(|entry| entry.dentry.ino == at.0).map_or(0, |at| at + 1);
            stack.extend(directories(&entries[behind..]).into_iter().rev());
            let up = listing::inode(&*self.db.snapshot()?, parent).await?;
            (at, parent) = (parent, Ino(up.parent));
        }
    }

    /// One directory more, whole and with its small contents, if that fits into the budget; gives its
    /// subdirectories, or `None` when the walk is over.
    async fn neighbour(&mut self, dir: Ino) -> Result<Option<Vec<Ino>>, VolumeError> {
        let limit = (self.budget / ENTRY_MIN) as usize;
        if !self.again && self.volume.is_listed(self.session, dir) {
            self.walked += 1;
            let entries = listing::entries(&*self.db.snapshot()?, dir, limit).await?.unwrap_or_default();
            return Ok((self.walked < WALKED_MAX).then(|| directories(&entries)));
        }
        if self.volume.sharing.lock().grants.read_along(self.pass.ticket, dir).is_none() {
            return Ok(Some(Vec::new()));
        }
        let Some(entries) = listing::entries(&*self.db.snapshot()?, dir, limit).await? else {
            self.next = Some(dir);
            return Ok(None);
        };
        let listed = self.listed(dir, &entries).await?;
        let mut bytes: u64 = listed.iter().map(|entry| entry.encoded_len() as u64).sum::<u64>() + ENTRY_MIN;
        let mut contents = self.contents_of(&listed);
        contents.retain(|(hash, _)| !self.seen.contains(hash));
        bytes += contents.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        if bytes > self.budget {
            self.next = Some(dir);
            return Ok(None);
        }
        self.note_listed(dir);
        self.budget -= bytes - contents.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        for (hash, len) in contents {
            if self.seen.insert(hash) {
                self.want(hash, len);
            }
        }
        self.list(dir, listed, true).await?;
        Ok(Some(directories(&entries)))
    }

    /// Contents of small files that may come along.
    fn contents_of(&self, listed: &[ListedEntry]) -> Vec<(ContentHash, u32)> {
        let rows = listed.iter().filter(|_| !self.names_only).filter_map(|entry| entry.inode.as_ref());
        rows.filter_map(small_content).collect()
    }

    fn note_listed(&self, dir: Ino) {
        if let Some(stream) = self.volume.sharing.lock().streams.get_mut(&self.session) {
            stream.listed.insert(dir);
        }
    }

    /// Puts a part into the stream. Whether a directory is owned is said as it is at that moment: a recall is in the
    /// stream either before the part, or behind it.
    async fn push(&self, mut part: Listings) -> Result<(), VolumeError> {
        let volume = self.volume;
        volume.await_stuck(inos_of(&part)).await?;
        let sharing = volume.sharing.lock();
        for listing in &mut part.dirs {
            listing.own = sharing.grants.held(self.session, Ino(listing.dir)) == Some(Grant::Own);
        }
        let entries = volume.entries_for(&sharing, (self.session, self.connection), inos_of(&part));
        self.replies.push_with(self.request, Body::Listings(part), entries);
        Ok(())
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
                self.part.dirs.push(Listing { dir: dir.0, entries, complete: false, own: false });
                self.send_part().await?;
            }
        }
        self.part_bytes += ENTRY_MIN as usize;
        self.part.dirs.push(Listing { dir: dir.0, entries: piece, complete, own: false });
        if self.wanted_bytes >= PART {
            self.fetch_contents().await?;
        }
        if self.part_bytes >= PART { self.send_part().await } else { Ok(()) }
    }

    async fn send_part(&mut self) -> Result<(), VolumeError> {
        self.part_bytes = 0;
        let part = Listings { more: true, ..std::mem::take(&mut self.part) };
        self.push(part).await
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
