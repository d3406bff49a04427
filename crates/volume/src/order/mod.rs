//! The volume's order. Everything that is written gets the next number, its mark (`history`), and is what readers find from
//! then on; it becomes durable in groups: one flush at a time takes all that has gathered since the one before. The log
//! is flushed in order, so what is durable is always a prefix. What can be brought back (`entry`) is answered before it is
//! durable: ADR 0017.

pub(crate) mod entry;
mod flushing;
pub(crate) mod history;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hayloft_model::replay::Undurable;
use hayloft_model::{Ino, SessionId};
use hayloft_wire::{Entry, InodeRowMessage};
use parking_lot::Mutex;
use prost::Message;
use slatedb::{CloseReason, ErrorKind, WriteBatch, WriteHandle};

use crate::database::packed::Queued;
use crate::database::rows::{Listed, Parts, Rows};
use crate::database::tables;
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::order::entry::{Doing, SealKey};
use crate::order::flushing::Flushing;
use crate::volume::Volume;

/// Entries of all together up to this many bytes: what is more waits for the store.
const ENTRIES_BYTES: usize = 8 << 20;

/// How long what nobody waits for gathers before it is flushed.
const GATHER: Duration = Duration::from_millis(25);

/// How often to look whether a database is open again.
const REOPENED: Duration = Duration::from_millis(50);

/// A place in the order.
#[derive(Clone)]
pub(crate) struct Ordered {
    /// It counts for this opening of the database: when that has failed, what was not durable is given another place.
    db: Db,
    opening: u64,
    number: u64,
    /// It can be answered before it is durable: all who hear of it can bring it back.
    pub(crate) early: bool,
    /// Inodes that it is about.
    pub(crate) subjects: Vec<Ino>,
}

#[derive(Default)]
pub(crate) struct Order {
    state: Mutex<State>,
    flushing: Flushing,
}

#[derive(Default)]
struct State {
    opening: u64,
    /// The last number that was given.
    last: u64,
    /// The last one whose rows may have made the tree another one; what was before the database was opened counts as that.
    tree: u64,
    /// What the database had when it was opened.
    found: u64,
    /// The last one that was written.
    written: Option<(u64, WriteHandle)>,
    undurable: Undurable<Entry>,
    /// Of what is not durable: mark, since when, and bytes of its entry.
    ages: VecDeque<(u64, Instant, usize)>,
    /// Bytes of all entries.
    bytes: usize,
    /// A task sees to it that what was answered becomes durable.
    is_flushed_behind: bool,
    seal_key: SealKey,
}

impl State {
    fn durable(&mut self, mark: u64) {
        self.undurable.durable(mark);
        while let Some((_, _, bytes)) = self.ages.front().copied().filter(|(of, _, _)| *of <= mark) {
            self.bytes -= bytes;
            self.ages.pop_front();
        }
    }
}

impl Order {
    /// A database was opened that is so far.
    pub(crate) fn begin(&self, mark: u64, seal_key: SealKey) {
        let mut state = self.state.lock();
        state.opening += 1;
        // Marks that were given are not given again: clients may keep entries that have them.
        state.last = state.last.max(mark);
        // What is found is this tree: marks behind it were of changes that are lost, and no snapshot has them.
        state.tree = mark;
        state.found = mark;
        state.written = None;
        state.seal_key = seal_key;
    }

    /// The last mark that was given.
    pub(crate) fn last_mark(&self) -> u64 {
        self.state.lock().last
    }

    /// A mark of the tree as it is: as long as that is the same, the tree is. Who has the turn knows that it stays so.
    pub(crate) fn tree_mark(&self) -> u64 {
        self.state.lock().tree
    }

    /// The place of all that was written. Of what is just being written only who has the turn can be sure.
    pub(crate) fn last(&self, db: Db) -> Ordered {
        let state = self.state.lock();
        let number = state.written.as_ref().map_or(state.found, |(number, _)| *number);
        Ordered { db, opening: state.opening, number, early: false, subjects: Vec::new() }
    }

    fn next(&self, db: &Db, is_of_tree: bool) -> Ordered {
        let mut state = self.state.lock();
        state.last += 1;
        if is_of_tree {
            state.tree = state.last;
        }
        Ordered {
            db: db.clone(),
            opening: state.opening,
            number: state.last,
            early: false,
            subjects: Vec::new(),
        }
    }

    fn written(&self, place: &Ordered, handle: WriteHandle) {
        let mut state = self.state.lock();
        if state.opening == place.opening {
            state.written = Some((place.number, handle));
        }
    }

    /// Whether the database of a place is open still.
    fn is_of_now(&self, place: &Ordered) -> bool {
        self.state.lock().opening == place.opening
    }

    /// What the next flush makes durable. `None`: the database is another one.
    fn gathered(&self, place: &Ordered) -> Option<(u64, WriteHandle)> {
        let state = self.state.lock();
        state.written.clone().filter(|_| state.opening == place.opening)
    }

    /// What a session has to keep that is told of these inodes as they are now. It must get it on the connection that it
    /// has, or [`Order::disconnected`] must follow.
    pub(crate) fn tell(&self, to: SessionId, inos: impl IntoIterator<Item = Ino>) -> Vec<Entry> {
        self.state.lock().undurable.tell(to, inos)
    }

    /// The session has a new connection: what it was told last may not have arrived.
    pub(crate) fn disconnected(&self, session: SessionId) {
        self.state.lock().undurable.disconnected(session);
    }

    /// Entries of what is not known to be durable, beyond a mark.
    pub(crate) fn entries(&self, durable: u64) -> Vec<Entry> {
        let mut state = self.state.lock();
        state.durable(durable);
        state.undurable.clone().take()
    }

    /// They are not this server's business any more.
    pub(crate) fn forget_entries(&self) {
        let mut state = self.state.lock();
        (state.undurable, state.ages, state.bytes) = (Undurable::default(), VecDeque::new(), 0);
    }

    /// The key of entries' seals.
    pub(crate) fn seal_key(&self) -> SealKey {
        self.state.lock().seal_key
    }

    /// Entries that are not durable, and their bytes, for the statistics.
    pub(crate) fn undurable(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.ages.len(), state.bytes)
    }
}

impl Volume {
    /// Gives a batch the next place: readers find it. The caller has the turn.
    ///
    /// # Errors
    /// The database failed. Whether the batch is there is known when it is open again.
    pub(crate) async fn order(self: &Arc<Self>, db: &Db, rows: Rows) -> Result<Ordered, VolumeError> {
        let Parts { batch, is_of_tree, listed, touched, .. } = rows.into_parts();
        let place = self.order.next(db, is_of_tree);
        self.write_at(place, batch, listed, &touched).await
    }

    /// As [`Volume::order`], with what it takes to bring the rows back.
    ///
    /// # Errors
    /// As [`Volume::order`].
    pub(crate) async fn order_entry(
        self: &Arc<Self>,
        db: &Db,
        rows: Rows,
        doing: Doing,
    ) -> Result<Ordered, VolumeError> {
        let Parts { batch, subjects, noted, is_of_tree, listed, touched } = rows.into_parts();
        let (opening, window) = (self.opening(), self.shared.config.window);
        let mut place = self.order.next(db, is_of_tree);
        // What is about nothing is told to nobody.
        let is_told = !subjects.is_empty();
        let can_come_back = opening != 0 && !window.is_zero() && !doing.waits && is_told;
        let entry = noted
            .filter(|_| can_come_back)
            .map(|rows| entry::seal(&self.order.seal_key(), (opening, place.number), &doing, rows));
        {
            // Before anybody can find the rows.
            let mut state = self.order.state.lock();
            let bytes = entry.as_ref().map_or(0, |entry| entry.written.len());
            let entry = entry.filter(|_| state.bytes + bytes <= ENTRIES_BYTES);
            place.subjects = subjects.iter().copied().collect();
            let comes_back = state.undurable.add(place.number, subjects, entry);
            let bytes = if comes_back { bytes } else { 0 };
            state.bytes += bytes;
            state.ages.push_back((place.number, Instant::now(), bytes));
            let oldest = state.ages.front().map_or(Duration::ZERO, |(_, since, _)| since.elapsed());
            place.early = comes_back && oldest <= window;
        }
        hayloft_crash::point("order.entry-kept");
        let place = self.write_at(place, batch, listed, &touched).await?;
        if place.early {
            self.flush_behind();
        }
        Ok(place)
    }

    async fn write_at(
        self: &Arc<Self>,
        place: Ordered,
        mut batch: WriteBatch,
        listed: Listed,
        touched: &[Bytes],
    ) -> Result<Ordered, VolumeError> {
        let dirs = listed_dirs(&place.db, &listed).await?;
        for dir in self.packed.changing(&dirs) {
            batch.delete(tables::packed(dir));
        }
        for (dir, listing) in &listed.whole {
            batch.put_bytes(tables::packed(*dir), listing.clone());
        }
        self.journal.look_for_oldest(&place.db).await?;
        // From here on nothing fails but the write.
        let (noted, gone) = self.journal.note(touched);
        if let Some(noted) = noted {
            batch.put_bytes(tables::journal(place.number), noted);
        }
        gone.into_iter().for_each(|key| batch.delete(key));
        batch.put(tables::MARK, self.journal.mark_row(place.number).encode_to_vec());
        let unsure = self.journal.unsure();
        let handle = place.db.write(batch).await.map_err(|error| self.write_failed(error))?;
        unsure.written();
        hayloft_crash::point("order.written");
        self.packed.changed(&dirs, &listed);
        self.order.written(&place, handle);
        Ok(place)
    }

    /// Writes packed listings that nothing has changed since they were read. They are durable some time. The caller has the turn.
    ///
    /// # Errors
    /// As [`Volume::order`].
    pub(crate) async fn write_packed(
        self: &Arc<Self>,
        db: &Db,
        queued: Vec<Queued>,
    ) -> Result<(), VolumeError> {
        let mut batch = WriteBatch::new();
        for (dir, listing) in self.packed.still_true(queued) {
            batch.put_bytes(tables::packed(dir), listing);
        }
        if batch.is_empty() {
            return Ok(());
        }
        let place = self.order.next(db, false);
        self.write_at(place, batch, Listed::default(), &[]).await?;
        Ok(())
    }

    /// Histories may part here: from the first time on a journal is kept. The caller has the turn.
    ///
    /// # Errors
    /// As [`Volume::order`].
    pub(crate) async fn journal_point(self: &Arc<Self>, db: &Db) -> Result<(), VolumeError> {
        let mark = self.order.last_mark();
        if let Some(lineage) = self.journal.point(db, &self.id, mark).await? {
            let mut rows = Rows::new();
            rows.put(tables::LINEAGE, lineage.encode_to_vec());
            self.order(db, rows).await?;
        }
        Ok(())
    }

    /// Waits until everything up to a place is durable.
    ///
    /// # Errors
    /// As [`Volume::order`].
    pub(crate) async fn durable(self: &Arc<Self>, place: &Ordered) -> Result<(), VolumeError> {
        let is_over = || self.mark() >= place.number || !self.order.is_of_now(place);
        let _turn = self.order.flushing.turn(is_over).await;
        // The mark first: then it is one of that opening.
        if self.mark() >= place.number && self.order.is_of_now(place) {
            return Ok(());
        }
        // Without a turn it is of another opening: there is nothing to flush.
        let gathered = self.order.gathered(place);
        let (upto, handle) = gathered.ok_or_else(|| VolumeError::Reopening("it had failed".to_owned()))?;
        // Only the handle says that another server has opened the database meanwhile.
        let flushed = async {
            place.db.flush().await?;
            handle.await_durable().await
        };
        flushed.await.map_err(|error| self.write_failed(error))?;
        hayloft_crash::point("order.flushed");
        self.counted(upto);
        self.order.state.lock().durable(upto);
        Ok(())
    }

    /// Waits while the database is opened again.
    pub(crate) async fn reopened(&self) -> Result<(), VolumeError> {
        loop {
            match self.db() {
                Err(VolumeError::Reopening(_)) => tokio::time::sleep(REOPENED).await,
                other => return other.map(drop),
            }
        }
    }

    /// Waits until everything that has a place is durable, over as many openings of the database as it takes.
    ///
    /// # Errors
    /// The volume is not this server's any more, or closed.
    pub(crate) async fn all_durable(self: &Arc<Self>) -> Result<(), VolumeError> {
        loop {
            self.reopened().await?;
            let place = {
                let _turn = self.turn.lock().await;
                let Ok(db) = self.db() else { continue };
                self.order.last(db)
            };
            if self.durable(&place).await.is_ok() {
                return Ok(());
            }
        }
    }

    /// Waits until what a client has seen on a connection is durable: `opening` is the one that it was welcomed in. What it
    /// has brought of others is so since its claim.
    ///
    /// # Errors
    /// As [`Volume::all_durable`], or others had the volume meanwhile: the client has to bring it.
    pub(crate) async fn sync(
        self: &Arc<Self>,
        opening: u64,
        (of, mark): (u64, u64),
    ) -> Result<(), VolumeError> {
        if of == opening && mark > self.mark() {
            self.all_durable().await?;
        }
        if opening == self.opening() { Ok(()) } else { Err(VolumeError::Superseded) }
    }

    /// Waits while something about these inodes is not durable that nobody could bring back: nobody may hear of it
    /// before.
    ///
    /// # Errors
    /// As [`Volume::all_durable`].
    pub(crate) async fn await_stuck(
        self: &Arc<Self>,
        inos: impl IntoIterator<Item = Ino>,
    ) -> Result<(), VolumeError> {
        let is_stuck = self.order.state.lock().undurable.stuck(inos).is_some();
        if is_stuck { self.all_durable().await } else { Ok(()) }
    }

    /// Sees to it that what was answered becomes durable soon.
    fn flush_behind(self: &Arc<Self>) {
        if std::mem::replace(&mut self.order.state.lock().is_flushed_behind, true) {
            return;
        }
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(GATHER).await;
                // A database that has failed brings its entries back when it is opened again.
                let is_flushed = match volume.db() {
                    Ok(db) => volume.durable(&volume.order.last(db)).await.is_ok(),
                    Err(_) => false,
                };
                let mut state = volume.order.state.lock();
                if !is_flushed || state.undurable.is_empty() {
                    state.is_flushed_behind = false;
                    return;
                }
            }
        });
    }

    /// Orders a batch and waits until it is durable, and with it all that came before. The caller has the turn.
    ///
    /// # Errors
    /// As [`Volume::order`].
    pub(crate) async fn write(self: &Arc<Self>, db: &Db, rows: Rows) -> Result<(), VolumeError> {
        let place = self.order(db, rows).await?;
        self.durable(&place).await
    }

    /// The database is closed and opened again, and what it holds then is the truth.
    fn write_failed(self: &Arc<Self>, error: slatedb::Error) -> VolumeError {
        self.database_failed(&error);
        match error.kind() {
            ErrorKind::Closed(CloseReason::Fenced) => VolumeError::Fenced,
            _ => error.into(),
        }
    }
}

/// The directories whose listings change, also those where files were at home that are so nowhere now.
async fn listed_dirs(db: &Db, listed: &Listed) -> Result<Vec<Ino>, VolumeError> {
    let mut dirs = listed.dirs.clone();
    for stray in &listed.strays {
        // As it is stored: its content does not matter.
        if let Some(row) = (**db).get(tables::inode(*stray)).await? {
            let before = database::decode::<InodeRowMessage>(row, "inode")?;
            dirs.insert(Ino(before.parent));
        }
    }
    Ok(dirs.into_iter().collect())
}
