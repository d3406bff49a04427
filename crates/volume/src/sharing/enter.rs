//! Answering `Enter`: a directory, and what a walk through the tree will want next.
//!
//! Behind the directory that was asked for come others in the order in which `find` and `tar` meet
//! them: its subdirectories depth first, then what follows it in its parent, and so on upwards. Each
//! comes whole, as long as the budget lasts, and with the contents of its small files if these are wanted.
//!
//! Whatever is sent was read after the request had claimed it, so that nobody changes it before it is in the stream:
//! first a directory, then its names are read; then what its names lead to, then the rows. Directories that come after
//! one another are read together, which takes a fraction of the scans.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use hayloft_model::grants::{Grant, Object, Outcome, Request};
use hayloft_model::{ContentHash, FileKind, Ino, SessionId};
use hayloft_wire::{Enter, InodeRowMessage, Listing, Listings, server_message::Body};
use prost::Message;

use crate::content::message_of;
use crate::database::Db;
use crate::database::listing::{self, Entry, Map};
use crate::database::tables;
use crate::error::VolumeError;
use crate::replies::Replies;
use crate::sharing::foreign;
use crate::sharing::listed::{Listed, PART};
use crate::sharing::packed::{Names, Piece};
use crate::sharing::pass::Pass;
use crate::volume::Volume;

/// Most bytes that may come along, whatever the client says.
const BUDGET_MAX: u64 = 16 << 20;

/// Entries of a large directory that are handled at a time.
const SLICE: usize = 512;

/// Directories that the client has already are walked through, but not more than this many.
const WALKED_MAX: usize = 256;

/// When so many directories that come next belong to others, most of what follows does.
const REFUSED_MAX: usize = 64;

/// Bytes that an entry takes at least; bounds what is read of a directory that will not fit.
const ENTRY_MIN: u64 = 48;

/// Directories that are read together, at most.
const TOGETHER: usize = 32;

/// Bytes that an entry takes most likely, before anything is known: without contents, and with them.
const ENTRY_LIKELY: u64 = 128;
const FILE_LIKELY: u64 = 4096;

pub(super) struct Walk<'a> {
    pub(super) volume: &'a Arc<Volume>,
    pub(super) session: SessionId,
    pub(super) pass: Pass,
    pub(super) db: Db,
    replies: &'a Replies,
    connection: u64,
    request: u64,
    budget: u64,
    /// Contents do not come along.
    pub(super) names_only: bool,
    walked: usize,
    /// Directories that others own, or are about to.
    refused: usize,
    /// The first directory for which there was no room.
    next: Option<Ino>,
    /// The first one that others own, behind all that came along.
    foreign: Option<Ino>,
    /// Directories that others have owned until now, and the rows of those that were read: the session was not told of these with
    /// what they are in.
    given: Vec<Ino>,
    rows: Map<Bytes>,
    /// The client had this directory already and asks again: it has forgotten it, and so most likely
    /// its neighbours.
    again: bool,
    /// Directories that were read with others before them; `None`: it must not come along.
    read: Map<Option<Listed>>,
    /// Bytes that came along, and for how many entries.
    so_far: (u64, u64),
    part: Listings,
    /// What it tells of.
    part_inos: Vec<Ino>,
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
        let width = self.sharing.lock().grants.width(dir).unwrap_or_default();
        let (object, slot) = (Object::Directory(dir), dir.slot(&asked.stem, width));
        let mut given = Vec::new();
        let request_of = match (asked.stem.is_empty(), asked.whole) {
            (false, _) => Request::Names(Object::Directory(slot)),
            (true, true) => Request::List(object),
            (true, false) if asked.files.is_empty() => {
                given = Box::pin(self.foreign_ahead(session, dir)).await?;
                Request::Read(foreign::objects(dir, &given))
            }
            (true, false) => Request::Read(vec![object]),
        };
        let mut pass = self.request(session, request_of)?;
        let outcome = pass.ready().await?;
        // Boxed: thousands may wait, and few are answered at a time.
        let asked = (asked, slot);
        Box::pin(self.entered(session, asked, (pass, outcome, given), replies, (connection, request))).await
    }

    async fn entered(
        self: &Arc<Self>,
        session: SessionId,
        (asked, slot): (&Enter, Ino),
        (pass, outcome, given): (Pass, Outcome, Vec<Ino>),
        replies: &Replies,
        (connection, request): (u64, u64),
    ) -> Result<(), VolumeError> {
        let dir = Ino(asked.dir);
        let db = self.db()?;
        let row = listing::inode(&*db.snapshot()?, dir).await?;
        if FileKind::of_mode(row.mode) != Some(FileKind::Directory) {
            return Err(VolumeError::NotDirectory(dir));
        }
        let is_split = self.sharing.lock().grants.is_split(dir);
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
            refused: 0,
            next: None,
            foreign: None,
            given,
            rows: Map::default(),
            again,
            read: Map::default(),
            so_far: (if asked.names_only { ENTRY_LIKELY } else { FILE_LIKELY }, 1),
            part: Listings::default(),
            part_inos: Vec::new(),
            part_bytes: 0,
            wanted: Vec::new(),
            wanted_bytes: 0,
            seen: HashSet::new(),
        };
        if !asked.files.is_empty() {
            walk.files(dir, asked).await?;
        } else if !asked.stem.is_empty() || is_split {
            let listing = match (outcome, asked.stem.is_empty()) {
                (Outcome::Shared, _) => Listing { dir: dir.0, whole: true, ..Listing::default() },
                (_, true) => {
                    walk.part_inos.push(dir);
                    Listing { dir: dir.0, split: Some(row), ..Listing::default() }
                }
                (_, false) => walk.names_of(dir, slot, asked.stem.clone()).await?,
            };
            walk.part.dirs.push(Listing { complete: true, ..listing });
        } else {
            if walk.given.contains(&dir) {
                walk.part.files.push(row.encode_to_vec().into());
            }
            let below = walk.whole(dir).await?;
            walk.neighbours(&row, below).await?;
            walk.fetch_contents().await?;
            walk.next = walk.next.or(walk.foreign);
            walk.note_walked(dir);
        }
        walk.send_part(false).await?;
        walk.pass.finish();
        Ok(())
    }

    /// Whether the session was sent the directory's listing.
    fn is_listed(&self, session: SessionId, dir: Ino) -> bool {
        self.sharing.lock().streams.get(&session).is_some_and(|stream| stream.listed.contains(&dir))
    }
}

pub(super) fn directories(entries: &[Entry]) -> Vec<Ino> {
    entries.iter().filter(|entry| entry.is_directory()).map(|entry| entry.dentry.ino).collect()
}

impl Walk<'_> {
    /// The directory that was asked for, however large; gives its subdirectories.
    async fn whole(&mut self, dir: Ino) -> Result<Vec<Ino>, VolumeError> {
        self.note_listed(dir);
        let Some(names) = self.names(&[dir], usize::MAX).await?.remove(&dir.0) else { return Ok(Vec::new()) };
        let slices = names.entries.chunks(SLICE).len();
        if slices == 0 {
            self.list(dir, Listed::default(), true).await?;
        }
        for (at, slice) in names.entries.chunks(SLICE).enumerate() {
            let listed = self.listed(names.piece(dir, slice)).await?;
            self.list(dir, listed, at + 1 == slices).await?;
        }
        Ok(directories(&names.entries))
    }

    /// All names of a stem, in the slot of a split directory. Gives what ends them.
    async fn names_of(&mut self, dir: Ino, slot: Ino, stem: Bytes) -> Result<Listing, VolumeError> {
        let entries = listing::names_of(&*self.db.snapshot()?, dir, &stem).await?;
        self.part_inos.push(slot);
        for slice in entries.chunks(SLICE) {
            let listed = self.listed(Piece::part(dir, slice)).await?;
            self.list(slot, listed, false).await?;
        }
        Ok(Listing { dir: slot.0, stem, ..Listing::default() })
    }

    /// Rows of files that directories cover, with their content.
    async fn files(&mut self, dir: Ino, asked: &Enter) -> Result<(), VolumeError> {
        let free: Vec<(u64, u64)> = {
            let mut sharing = self.volume.sharing.lock();
            let mut homes =
                HashMap::from([(dir.0, sharing.grants.unheard_about(self.session, &[dir]).is_empty())]);
            let mut free = Vec::with_capacity(asked.files.len());
            for (ino, home) in asked.files.iter().copied().zip(asked.homes.iter().copied()) {
                let ticket = self.pass.ticket;
                let reads = || sharing.grants.read_along(ticket, Ino(home)).is_some();
                let is_covered = *homes.entry(home).or_insert_with(reads);
                if is_covered && sharing.grants.owner(Ino(ino)).is_none() {
                    free.push((ino, home));
                }
            }
            free
        };
        let mut rows = listing::inodes(&*self.db.snapshot()?, free.iter().map(|(ino, _)| *ino), true).await?;
        let mut count = 0;
        for (ino, home) in free {
            let Some(row) = rows.remove(&ino) else { continue };
            let found = hayloft_wire::listing::Row::of(&row).map_err(|_| VolumeError::Damaged("inode"))?;
            if found.parent != home || found.is_directory() {
                continue;
            }
            let len = row.len() as u64;
            if len > self.budget && count > 0 {
                break;
            }
            count += 1;
            self.budget = self.budget.saturating_sub(len);
            self.part_bytes += row.len();
            self.part.files.push(row);
            self.part_inos.push(Ino(ino));
            if self.part_bytes >= PART {
                self.send_part(true).await?;
            }
        }
        Ok(())
    }

    /// Directories that come next, until the budget is used up.
    async fn neighbours(&mut self, dir: &InodeRowMessage, below: Vec<Ino>) -> Result<(), VolumeError> {
        let mut stack: Vec<Ino> = below.into_iter().rev().collect();
        let (mut at, mut parent) = (Ino(dir.ino), Ino(dir.parent));
        loop {
            while let Some(next) = stack.pop() {
                match self.neighbour(next, &stack).await? {
                    Some(below) => stack.extend(below.into_iter().rev()),
                    None => return Ok(()),
                }
            }
            if at == parent {
                return Ok(());
            }
            let siblings = self.volume.siblings(&self.db, self.session, parent).await?;
            let Some(siblings) = siblings else { return Ok(()) };
            let behind = siblings.dirs.iter().position(|dir| *dir == at).map_or(0, |at| at + 1);
            stack.extend(siblings.dirs[behind..].iter().rev());
            (at, parent) = (parent, siblings.above);
        }
    }

    /// One directory more, whole and with its small contents, if that fits into the budget; gives its
    /// subdirectories, or `None` when the walk is over. `then`: what comes after it, the next one last.
    async fn neighbour(&mut self, dir: Ino, then: &[Ino]) -> Result<Option<Vec<Ino>>, VolumeError> {
        if !self.again && self.volume.is_listed(self.session, dir) {
            self.walked += 1;
            let limit = (self.budget / ENTRY_MIN) as usize;
            let names = self.names(&[dir], limit).await?.remove(&dir.0);
            let below = || names.map_or_else(Vec::new, |names| directories(&names.entries));
            return Ok((self.walked < WALKED_MAX).then(below));
        }
        if !self.read.contains_key(&dir.0) {
            self.read_together(dir, then).await?;
        }
        let Some(listed) = self.read.remove(&dir.0) else {
            self.next = Some(dir);
            return Ok(None);
        };
        let Some(mut listed) = listed else {
            self.refused += 1;
            self.foreign.get_or_insert(dir);
            return Ok((self.refused < REFUSED_MAX).then(Vec::new));
        };
        listed.contents.retain(|(hash, _)| !self.seen.contains(hash));
        let bytes = listed.bytes() as u64 + ENTRY_MIN;
        let with_contents = bytes + listed.contents.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        if with_contents > self.budget {
            self.next = Some(dir);
            return Ok(None);
        }
        self.note_listed(dir);
        self.foreign = None;
        if let Some(row) = self.rows.remove(&dir.0) {
            self.part_bytes += row.len();
            self.part.files.push(row);
        }
        self.so_far = (self.so_far.0 + with_contents, self.so_far.1 + listed.entries);
        self.budget -= bytes;
        let below = std::mem::take(&mut listed.below);
        self.list(dir, listed, true).await?;
        Ok(Some(below))
    }

    /// Reads a directory, and those that come after it for which there will be room.
    async fn read_together(&mut self, dir: Ino, then: &[Ino]) -> Result<(), VolumeError> {
        let mut dirs = vec![dir];
        let likely = (self.budget * self.so_far.1 / self.so_far.0) as usize;
        {
            let mut sharing = self.volume.sharing.lock();
            let listed = sharing.streams.get(&self.session).map(|stream| &stream.listed);
            let is_known = |next: &Ino| !self.again && listed.is_some_and(|listed| listed.contains(next));
            let next = then.iter().rev().take(TOGETHER.min(likely / 4));
            dirs.extend(next.filter(|next| !is_known(next) && !self.read.contains_key(&next.0)));
            dirs.retain(|dir| {
                let claimed = sharing.grants.read_along(self.pass.ticket, *dir).is_some();
                if !claimed {
                    self.read.insert(dir.0, None);
                }
                claimed
            });
        }
        if dirs.is_empty() {
            return Ok(());
        }
        let mut found = self.names(&dirs, likely).await?;
        if dirs[0] == dir && !found.contains_key(&dir.0) {
            let limit = (self.budget / ENTRY_MIN) as usize;
            found = self.names(&[dir], limit).await?;
        }
        let is_empty = |dir: &mut Ino| found.get(&dir.0).is_some_and(|names| names.entries.is_empty());
        for dir in dirs.extract_if(.., is_empty).collect::<Vec<_>>() {
            self.empty(dir, &mut found, &mut dirs).await?;
        }
        let found: Vec<(Ino, Names)> =
            dirs.into_iter().filter_map(|dir| Some((dir, found.remove(&dir.0)?))).collect();
        let pieces: Vec<Piece<'_>> =
            found.iter().map(|(dir, names)| names.piece(*dir, &names.entries)).collect();
        for (piece, listed) in pieces.iter().zip(self.all_listed(&pieces).await?) {
            self.read.insert(piece.dir.0, Some(listed));
        }
        let of_others = found.iter().map(|(dir, _)| dir).filter(|dir| self.given.contains(dir));
        let rows = listing::inodes(&*self.db.snapshot()?, of_others.map(|dir| dir.0), false).await?;
        self.rows.extend(rows);
        Ok(())
    }

    /// A directory without names may be gone by now.
    async fn empty(
        &mut self,
        dir: Ino,
        found: &mut Map<Names>,
        dirs: &mut Vec<Ino>,
    ) -> Result<(), VolumeError> {
        if self.db.snapshot()?.get(tables::inode(dir)).await?.is_some() {
            dirs.push(dir);
        } else {
            found.remove(&dir.0);
            self.volume.sharing.lock().grants.forget(dir);
            self.read.insert(dir.0, None);
        }
        Ok(())
    }

    /// Where the walk will go on.
    fn note_walked(&self, dir: Ino) {
        if let Some(stream) = self.volume.sharing.lock().streams.get_mut(&self.session) {
            stream.walked.goes_on(dir, self.next);
        }
    }

    fn note_listed(&self, dir: Ino) {
        if let Some(stream) = self.volume.sharing.lock().streams.get_mut(&self.session) {
            stream.listed.insert(dir);
        }
    }

    /// Puts a part into the stream. Whether a directory is owned is said as it is at that moment: a recall is in the
    /// stream either before the part, or behind it.
    async fn send_part(&mut self, more: bool) -> Result<(), VolumeError> {
        self.part_bytes = 0;
        let (volume, inos) = (self.volume, std::mem::take(&mut self.part_inos));
        let next = self.next.filter(|_| !more).map_or(0, |dir| dir.0);
        let mut part = Listings { more, next, ..std::mem::take(&mut self.part) };
        volume.await_stuck(inos.iter().copied()).await?;
        let mut sharing = volume.sharing.lock();
        for listing in &mut part.dirs {
            listing.own = sharing.grants.held(self.session, Ino(listing.dir)) == Some(Grant::Own);
            listing.unheard = sharing.tell_unheard(self.session, Ino(listing.dir));
        }
        let entries = volume.entries_for(&sharing, (self.session, self.connection), inos);
        self.replies.push_with(self.request, Body::Listings(part), entries);
        Ok(())
    }

    /// Adds a listing, or a piece of one, to the part; sends the part whenever it is large enough.
    async fn list(&mut self, dir: Ino, listed: Listed, complete: bool) -> Result<(), VolumeError> {
        for (hash, len) in listed.contents {
            if u64::from(len) <= self.budget && self.seen.insert(hash) {
                self.budget = self.budget.saturating_sub(u64::from(len));
                self.wanted.push(hash);
                self.wanted_bytes += len as usize;
            }
        }
        let pieces = listed.pieces.len().max(1);
        let mut packed = listed.pieces.into_iter();
        for at in 1..=pieces {
            let (packed, inos) = packed.next().unwrap_or_default();
            self.part_bytes += packed.len() + ENTRY_MIN as usize;
            self.part_inos.push(dir);
            self.part_inos.extend(inos);
            let packed = Bytes::from(packed);
            let complete = complete && at == pieces;
            self.part.dirs.push(Listing { dir: dir.0, packed, complete, ..Listing::default() });
            if self.part_bytes >= PART {
                self.send_part(true).await?;
            }
        }
        if self.wanted_bytes >= PART { self.fetch_contents().await } else { Ok(()) }
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
        if self.part_bytes >= PART { self.send_part(true).await } else { Ok(()) }
    }
}
