//! Rows that are written together, noted so that they can be written once more.

use std::collections::BTreeSet;

use bytes::Bytes;
use hayloft_model::Ino;
use hayloft_wire::NotedRow;
use slatedb::WriteBatch;

use crate::database::tables;

/// Rows up to this many bytes are noted: what is more waits for the store.
pub(crate) const NOTED_MAX: usize = 256 * 1024;

/// What every row takes beside its key and value.
const ROW_BYTES: usize = 16;

/// A batch, with what it is about.
pub(crate) struct Rows {
    batch: WriteBatch,
    noted: Vec<NotedRow>,
    bytes: usize,
    /// Inodes whose rows or names change.
    subjects: BTreeSet<Ino>,
}

impl Rows {
    pub(crate) fn new() -> Rows {
        Rows { batch: WriteBatch::new(), noted: Vec::new(), bytes: 0, subjects: BTreeSet::new() }
    }

    pub(crate) fn put(&mut self, key: Bytes, value: impl Into<Bytes>) {
        let value = value.into();
        self.batch.put(&key, &value);
        self.note(key, Some(value));
    }

    pub(crate) fn delete(&mut self, key: Bytes) {
        self.batch.delete(&key);
        self.note(key, None);
    }

    /// As [`Rows::put`], or without a value [`Rows::delete`], for a name in a slot of a split directory: that is what it is about.
    pub(crate) fn set_in(&mut self, slot: Ino, key: Bytes, value: Option<Bytes>) {
        match &value {
            Some(value) => self.batch.put(&key, value),
            None => self.batch.delete(&key),
        }
        self.subjects.insert(slot);
        self.note_row(key, value);
    }

    fn note(&mut self, key: Bytes, value: Option<Bytes>) {
        if let Some(&(tables::INODES | tables::DENTRIES | tables::PAGES)) = key.first() {
            self.subjects.extend(tables::number_in(&key).map(Ino));
        }
        self.note_row(key, value);
    }

    fn note_row(&mut self, key: Bytes, value: Option<Bytes>) {
        self.bytes += ROW_BYTES + key.len() + value.as_ref().map_or(0, Bytes::len);
        if self.bytes <= NOTED_MAX {
            self.noted.push(NotedRow { key, value });
        }
    }

    /// A row that is not noted: what it says comes back in another way.
    pub(crate) fn put_unnoted(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        self.batch.put(key, value);
    }

    /// The batch, what it is about, and its rows if they were noted.
    pub(crate) fn into_parts(self) -> (WriteBatch, BTreeSet<Ino>, Option<Vec<NotedRow>>) {
        (self.batch, self.subjects, (self.bytes <= NOTED_MAX).then_some(self.noted))
    }
}
