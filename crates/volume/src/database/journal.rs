//! The journal of a volume that has versions: which rows of files and names were written at which mark. What differs between two versions
//! of a family is among what was written since their histories parted, and is found without reading their trees.
//!
//! A row of the journal is written in the batch that it tells of, so it is there when that is. It is kept from a volume's first snapshot on: nothing
//! that came before can be behind a point at which two histories part. A key that is in it since the last snapshot is not noted again.
//! Clones begin with the rows of what they are made of, and with its **lineage**: the databases that their history went through, and the mark at which each
//! of them began. Two versions part where their lineages do.
//!
//! [`MarkRow`] is written with everything, and says from which mark on the journal is whole. Servers that know of no journal write it without
//! that: then the journal begins anew with the next snapshot.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use bytes::Bytes;
use hayloft_model::Ino;
use parking_lot::Mutex;
use prost::Message;
use rustc_hash::FxHashSet;

use crate::database::tables::{self, MarkRow};
use crate::database::{self, Db};
use crate::error::VolumeError;

/// Keys that are known to be noted since the last snapshot; with more, some are noted twice.
const NOTED_MAX: usize = 1 << 18;

/// Bytes of the journal, at most: the oldest rows go. What parted before is compared by tables.
const BYTES_MAX: u64 = 64 << 20;

/// How many of the oldest rows are looked for at once, and how many go with each that comes.
const OLDEST: usize = 256;
const GONE: usize = 2;

/// What was written at one mark.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct JournalRow {
    /// Rows of inodes: numbers in their order, each but the first by what it is more than the one before.
    #[prost(uint64, repeated, tag = "1")]
    pub(crate) inodes: Vec<u64>,
    /// Names, and pages of blocks.
    #[prost(message, repeated, tag = "2")]
    pub(crate) others: Vec<Keys>,
}

/// Keys that begin alike.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Keys {
    /// The table's letter, and the number of a directory or file.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) head: Bytes,
    /// What follows.
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub(crate) rests: Vec<Bytes>,
}

impl JournalRow {
    fn of(keys: &[&Bytes]) -> JournalRow {
        let (mut row, mut last) = (JournalRow::default(), 0);
        for key in keys {
            if key[0] == tables::INODES {
                let number = tables::number_in(key).unwrap_or_default();
                row.inodes.push(number - last);
                last = number;
                continue;
            }
            let rest = tables::rest_of(key);
            let head = key.slice(..key.len() - rest.len());
            match row.others.last_mut().filter(|keys| keys.head == head) {
                Some(keys) => keys.rests.push(rest),
                None => row.others.push(Keys { head, rests: vec![rest] }),
            }
        }
        row
    }

    /// The keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = Bytes> {
        let numbers = self.inodes.iter().scan(0_u64, |last, more| {
            *last = last.wrapping_add(*more);
            Some(tables::inode(Ino(*last)))
        });
        let others = self.others.iter();
        numbers.chain(others.flat_map(|keys| {
            let key = |rest: &Bytes| Bytes::from([keys.head.as_ref(), rest].concat());
            keys.rests.iter().map(key)
        }))
    }
}

/// The databases that a history went through, in their order.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Lineage {
    #[prost(message, repeated, tag = "1")]
    pub(crate) parts: Vec<Part>,
}

/// A part of a history.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Part {
    #[prost(string, tag = "1")]
    pub(crate) database: String,
    /// The mark at which it began.
    #[prost(uint64, tag = "2")]
    pub(crate) from: u64,
}

impl Lineage {
    /// Whether it is of a database, and not of one that it was cloned from by a server that knows of none.
    pub(crate) fn is_of(&self, database: &str) -> bool {
        self.parts.last().is_some_and(|last| last.database == database)
    }
}

/// What a server knows of the journal of a volume.
#[derive(Default)]
pub(crate) struct Journal {
    state: Mutex<State>,
    /// Two of them: names are made by people, and no two may be taken for one.
    hashers: [RandomState; 2],
}

#[derive(Default)]
struct State {
    /// From which mark on it is whole; `None`: none is kept.
    from: Option<u64>,
    bytes: u64,
    inodes: FxHashSet<u64>,
    others: FxHashSet<[u64; 2]>,
    /// The oldest rows: marks, and how many bytes they have.
    oldest: VecDeque<(u64, u64)>,
}

impl State {
    fn forget_noted(&mut self) {
        self.inodes.clear();
        self.others.clear();
    }
}

impl Journal {
    /// The database was opened.
    pub(crate) async fn begin(&self, db: &Db, id: &str) -> Result<(), VolumeError> {
        let mark = database::row::<MarkRow>(db, tables::MARK, "mark").await?.unwrap_or_default();
        let lineage = database::row::<Lineage>(db, tables::LINEAGE, "lineage").await?.unwrap_or_default();
        let from = mark.journal_from.filter(|_| lineage.is_of(id));
        let bytes = if from.is_some() { mark.journal_bytes } else { 0 };
        *self.state.lock() = State { from, bytes, ..State::default() };
        Ok(())
    }

    /// A snapshot is being made: histories may part here. Gives the lineage that is to be written when no journal was kept, at this mark.
    pub(crate) async fn point(&self, db: &Db, id: &str, mark: u64) -> Result<Option<Lineage>, VolumeError> {
        self.state.lock().forget_noted();
        if self.state.lock().from.is_some() {
            return Ok(None);
        }
        let known = database::row::<Lineage>(db, tables::LINEAGE, "lineage").await?;
        let own = || Lineage { parts: vec![Part { database: id.to_owned(), from: mark }] };
        let lineage = known.filter(|known| known.is_of(id)).unwrap_or_else(own);
        *self.state.lock() = State { from: Some(mark), ..State::default() };
        Ok(Some(lineage))
    }

    /// The row that tells of these keys, if there is something to note, and the keys of old rows that go.
    pub(crate) fn note(&self, keys: &[Bytes]) -> (Option<Bytes>, Vec<Bytes>) {
        let mut state = self.state.lock();
        if state.from.is_none() || keys.is_empty() {
            return (None, Vec::new());
        }
        if state.inodes.len() + state.others.len() > NOTED_MAX {
            state.forget_noted();
        }
        let mut new: Vec<&Bytes> = keys
            .iter()
            .filter(|key| match (key[0], tables::number_in(key)) {
                (tables::INODES, Some(number)) => state.inodes.insert(number),
                _ => state.others.insert(self.hashers.each_ref().map(|hasher| hasher.hash_one(key))),
            })
            .collect();
        if new.is_empty() {
            return (None, Vec::new());
        }
        new.sort_unstable();
        let row = Bytes::from(JournalRow::of(&new).encode_to_vec());
        state.bytes += row.len() as u64;
        let mut gone = Vec::new();
        while state.bytes > BYTES_MAX
            && gone.len() < GONE
            && let Some((oldest, bytes)) = state.oldest.pop_front()
        {
            state.bytes = state.bytes.saturating_sub(bytes);
            state.from = Some(oldest);
            gone.push(tables::journal(oldest));
        }
        (Some(row), gone)
    }

    /// Looks for the oldest rows, if there are too many.
    pub(crate) async fn look_for_oldest(&self, db: &Db) -> Result<(), VolumeError> {
        let from = {
            let state = self.state.lock();
            match state.from {
                Some(from) if state.bytes > BYTES_MAX && state.oldest.is_empty() => from,
                _ => return Ok(()),
            }
        };
        let mut oldest = VecDeque::new();
        let snapshot = db.snapshot()?;
        let (first, last) = (tables::journal(from), tables::journal(u64::MAX));
        let mut scan = database::scan_range(&snapshot, first, last).await?;
        while oldest.len() < OLDEST
            && let Some(found) = scan.next().await?
        {
            let mark = tables::number_in(&found.key).ok_or(VolumeError::Damaged("key of the journal"))?;
            oldest.push_back((mark, found.value.len() as u64));
        }
        self.state.lock().oldest = oldest;
        Ok(())
    }

    /// What was noted last is about to be written. As long as it is not said that it is, nobody knows, also when the writing is given up.
    pub(crate) fn unsure(&self) -> Unsure<'_> {
        Unsure(Some(self))
    }

    /// The row that is written with everything.
    pub(crate) fn mark_row(&self, mark: u64) -> MarkRow {
        let state = self.state.lock();
        let journal_bytes = if state.from.is_some() { state.bytes } else { 0 };
        MarkRow { mark, journal_from: state.from, journal_bytes }
    }
}

/// Forgets what was noted when it is dropped: it is noted again.
pub(crate) struct Unsure<'a>(Option<&'a Journal>);

impl Unsure<'_> {
    pub(crate) fn written(mut self) {
        self.0 = None;
    }
}

impl Drop for Unsure<'_> {
    fn drop(&mut self) {
        if let Some(journal) = self.0 {
            journal.state.lock().forget_noted();
        }
    }
}

/// A version in its history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Position {
    pub(crate) lineage: Lineage,
    /// The last mark.
    pub(crate) mark: u64,
    /// From which on its journal is whole.
    pub(crate) from: u64,
}

impl Position {
    fn end_of(&self, part: usize) -> u64 {
        self.lineage.parts.get(part + 1).map_or(self.mark, |next| next.from)
    }

    /// How many parts of their histories two have in common.
    fn in_common(&self, other: &Position) -> usize {
        let both = self.lineage.parts.iter().zip(&other.lineage.parts);
        both.take_while(|(one, other)| one == other).count()
    }

    /// Whether another one came of it. `None`: their histories have nothing in common that is known.
    pub(crate) fn is_before(&self, later: &Position) -> Option<bool> {
        let last = self.in_common(later).checked_sub(1)?;
        Some(last + 1 == self.lineage.parts.len() && self.mark <= later.end_of(last))
    }

    /// The mark at which two histories part. `None`: nobody knows, or a journal does not go back so far.
    pub(crate) fn parts_from(&self, other: &Position) -> Option<u64> {
        let last = self.in_common(other).checked_sub(1)?;
        let parted = self.end_of(last).min(other.end_of(last));
        let is_whole = |of: &Position| of.mark <= parted || of.from <= parted;
        (is_whole(self) && is_whole(other)).then_some(parted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(parts: &[(&str, u64)], mark: u64, from: u64) -> Position {
        let part = |(database, from): &(&str, u64)| Part { database: (*database).to_owned(), from: *from };
        Position { lineage: Lineage { parts: parts.iter().map(part).collect() }, mark, from }
    }

    #[test]
    fn histories_part_where_one_of_them_went_elsewhere() {
        let snapshot = position(&[("a", 5)], 10, 5);
        let later = position(&[("a", 5)], 30, 5);
        let fork = position(&[("a", 5), ("b", 10)], 17, 5);
        let of_fork = position(&[("a", 5), ("b", 10), ("c", 15)], 90, 5);
        let sibling = position(&[("a", 5), ("d", 20)], 21, 5);
        for (one, other, at) in [
            (&snapshot, &snapshot, Some(10)),
            (&snapshot, &later, Some(10)),
            (&fork, &snapshot, Some(10)),
            (&fork, &later, Some(10)),
            (&fork, &of_fork, Some(15)),
            (&of_fork, &later, Some(10)),
            (&later, &sibling, Some(20)),
            (&fork, &sibling, Some(10)),
        ] {
            assert_eq!((one.parts_from(other), other.parts_from(one)), (at, at), "{one:?} {other:?}");
        }
        let before = [&later, &fork, &of_fork, &sibling].map(|other| snapshot.is_before(other));
        assert_eq!(before, [Some(true); 4]);
        assert_eq!([&later, &sibling].map(|other| fork.is_before(other)), [Some(false); 2]);
        assert_eq!(
            [&snapshot, &fork].map(|other| later.is_before(other)),
            [Some(false); 2],
            "made when it was there"
        );
        assert_eq!((fork.is_before(&of_fork), later.is_before(&sibling)), (Some(false), Some(false)));
        assert_eq!(snapshot.parts_from(&position(&[("e", 5)], 20, 5)), None, "nothing in common");
        assert_eq!(snapshot.parts_from(&position(&[("a", 6)], 20, 6)), None, "begun anew");
        assert_eq!(snapshot.parts_from(&position(&[("a", 5)], 30, 11)), None, "what was noted first is gone");
        assert_eq!(position(&[("a", 5)], 10, 12).parts_from(&position(&[("a", 5)], 30, 10)), Some(10));
    }

    #[test]
    fn rows_tell_the_keys_that_were_noted_and_each_once() {
        let journal = Journal::default();
        let keys = [
            tables::dentry(Ino(7), b"b"),
            tables::inode(Ino(900)),
            tables::dentry(Ino(7), b"a"),
            tables::page(Ino(3), 2),
            tables::inode(Ino(7)),
        ];
        assert_eq!(journal.note(&keys), (None, Vec::new()), "before the first snapshot");
        journal.state.lock().from = Some(1);
        let (row, gone) = journal.note(&keys);
        let row = JournalRow::decode(row.unwrap()).unwrap();
        let mut told: Vec<Bytes> = row.keys().collect();
        told.sort();
        let mut sorted = keys.to_vec();
        sorted.sort();
        assert_eq!((told, gone.len(), row.others.len()), (sorted, 0, 2));
        assert_eq!(journal.note(&keys[1..]).0, None);
        let (row, _) = journal.note(&[tables::inode(Ino(8)), tables::inode(Ino(7))]);
        let row = JournalRow::decode(row.unwrap()).unwrap();
        assert_eq!(row.keys().collect::<Vec<_>>(), [tables::inode(Ino(8))]);
        drop(journal.unsure());
        assert!(journal.note(&keys[1..]).0.is_some(), "it may not have been written");
    }

    #[test]
    fn the_oldest_rows_go_when_there_are_too_many() {
        let journal = Journal::default();
        let old = VecDeque::from([(3, BYTES_MAX / 2), (4, BYTES_MAX / 2), (5, 9)]);
        *journal.state.lock() = State { from: Some(1), bytes: BYTES_MAX, oldest: old, ..State::default() };
        let (row, gone) = journal.note(&[tables::inode(Ino(8))]);
        assert!(row.is_some());
        assert_eq!(gone, [tables::journal(3)]);
        assert_eq!(journal.mark_row(9).journal_from, Some(3), "what parted at 3 or later is told whole");
    }
}
