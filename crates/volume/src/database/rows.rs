//! Rows that are written together: noted, so that they can be written once more, and with the directories of which they change
//! something.

use std::collections::BTreeSet;

use bytes::Bytes;
use hayloft_model::Ino;
use hayloft_model::grants::STRAY;
use hayloft_wire::NotedRow;
use hayloft_wire::listing::Row;
use slatedb::WriteBatch;

use crate::database::tables;

/// Rows up to this many bytes are noted: what is more waits for the store.
pub(crate) const NOTED_MAX: usize = 256 * 1024;

/// What every row takes beside its key and value.
const ROW_BYTES: usize = 16;

/// A batch, with what it is about.
#[derive(Default)]
pub(crate) struct Rows {
    batch: WriteBatch,
    noted: Vec<NotedRow>,
    bytes: usize,
    /// Inodes whose rows or names change.
    subjects: BTreeSet<Ino>,
    /// It has rows of files or names.
    is_of_tree: bool,
    listed: Listed,
    /// Keys of rows of files and names.
    touched: Vec<Bytes>,
}

/// What a batch changes of what listings tell.
#[derive(Default)]
pub(crate) struct Listed {
    /// Directories with names, or files at home there, that change.
    pub(crate) dirs: BTreeSet<Ino>,
    /// Files that are at home nowhere when the batch is written. They may have been before: their rows say where.
    pub(crate) strays: Vec<Ino>,
    /// Directories that come with all their names, packed ([`packed`](super::packed)).
    pub(crate) whole: Vec<(Ino, Bytes)>,
}

/// What a batch consists of.
pub(crate) struct Parts {
    pub(crate) batch: WriteBatch,
    /// Inodes whose rows or names change.
    pub(crate) subjects: BTreeSet<Ino>,
    /// The rows, if they were noted.
    pub(crate) noted: Option<Vec<NotedRow>>,
    /// It may make the tree another one.
    pub(crate) is_of_tree: bool,
    pub(crate) listed: Listed,
    /// Keys of rows of files and names, for the [`journal`](super::journal).
    pub(crate) touched: Vec<Bytes>,
}

impl Rows {
    pub(crate) fn new() -> Rows {
        Rows::default()
    }

    pub(crate) fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        let (key, value) = (key.into(), value.into());
        self.batch.put_bytes(key.clone(), value.clone());
        self.note(key, Some(value));
    }

    /// As [`Rows::put`], for an inode that says as before what it is, and only where its content lies is another place.
    pub(crate) fn put_moved(&mut self, ino: Ino, value: impl Into<Bytes>) {
        self.put(tables::inode(ino), value);
        self.touched.pop();
    }

    pub(crate) fn delete(&mut self, key: impl Into<Bytes>) {
        let key = key.into();
        self.batch.delete(&key);
        self.note(key, None);
    }

    /// As [`Rows::put`], or without a value [`Rows::delete`], for a name in a slot of a split directory: that is what it is about.
    pub(crate) fn set_in(&mut self, slot: Ino, key: Bytes, value: Option<Bytes>) {
        match &value {
            Some(value) => self.batch.put_bytes(key.clone(), value.clone()),
            None => self.batch.delete(&key),
        }
        self.subjects.insert(slot);
        self.is_of_tree = true;
        self.list(&key, value.as_deref());
        self.note_row(key, value);
    }

    fn note(&mut self, key: Bytes, value: Option<Bytes>) {
        if tables::is_of_tree(&key) {
            self.subjects.extend(tables::number_in(&key).map(Ino));
            self.is_of_tree = true;
        }
        self.list(&key, value.as_deref());
        self.note_row(key, value);
    }

    /// Notes whose listing a row is part of. The rows of directories are not part of the listings of those that they are in, and an
    /// inode that is deleted has lost its names in the same batch, or before.
    fn list(&mut self, key: &Bytes, value: Option<&[u8]>) {
        if tables::is_of_tree(key) {
            self.touched.push(key.clone());
        }
        let Some(number) = tables::number_in(key).map(Ino) else { return };
        match (key[0], value.map(Row::of)) {
            (tables::DENTRIES, _) => drop(self.listed.dirs.insert(number)),
            (tables::INODES, Some(Ok(row))) if row.is_directory() => {}
            (tables::INODES, Some(Ok(row))) if row.parent != STRAY.0 => {
                self.listed.dirs.insert(Ino(row.parent));
            }
            (tables::INODES, Some(_)) => self.listed.strays.push(number),
            _ => {}
        }
    }

    fn note_row(&mut self, key: Bytes, value: Option<Bytes>) {
        self.bytes += ROW_BYTES + key.len() + value.as_ref().map_or(0, Bytes::len);
        if self.bytes <= NOTED_MAX {
            self.noted.push(NotedRow { key, value });
        }
    }

    /// A row that is not noted: what it says comes back in another way.
    pub(crate) fn put_unnoted(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        let (key, value) = (key.into(), value.into());
        self.is_of_tree = true;
        self.list(&key, Some(&value));
        self.batch.put_bytes(key, value);
    }

    /// All that the batch leaves of a directory, packed.
    pub(crate) fn put_whole(&mut self, dir: Ino, packed: Bytes) {
        self.listed.whole.push((dir, packed));
    }

    /// Its parts.
    pub(crate) fn into_parts(self) -> Parts {
        let noted = (self.bytes <= NOTED_MAX).then_some(self.noted);
        let Rows { batch, subjects, is_of_tree, listed, touched, .. } = self;
        Parts { batch, subjects, noted, is_of_tree, listed, touched }
    }
}
