//! Directories that arrive whole with one batch: their listings are packed at once, and never have to be read row by row.

use bytes::Bytes;
use hayloft_model::tree::FIRST_COOKIE;
use hayloft_model::{Dentry, FileKind, Ino, Name};
use hayloft_wire::{RecordMessage, record_message::Body};
use rustc_hash::FxHashMap;

use crate::database::packed::{NAMES_MIN, PackedListings};
use crate::database::rows::Rows;

/// What a batch brings of such directories.
#[derive(Default)]
pub(super) struct Arriving {
    dirs: FxHashMap<u64, Whole>,
    /// Rows of files that are at home in them.
    rows: FxHashMap<u64, Bytes>,
}

#[derive(Default)]
struct Whole {
    /// How many names it has had, ever.
    had: u64,
    names: Vec<(u64, Ino, Name, Bytes)>,
}

impl Arriving {
    /// Directories of which the batch may bring all names.
    pub(super) fn of(records: &[RecordMessage]) -> Arriving {
        let mut dirs = FxHashMap::default();
        for record in records {
            if let Some(Body::PutInode(row)) = &record.body
                && FileKind::of_mode(row.mode) == Some(FileKind::Directory)
                && row.next_cookie >= FIRST_COOKIE + NAMES_MIN as u64
            {
                dirs.insert(row.ino, (row.next_cookie - FIRST_COOKIE, 0));
            }
        }
        for record in records {
            if let Some(Body::PutDentry(put)) = &record.body
                && let Some((_, names)) = dirs.get_mut(&put.parent)
            {
                *names += 1;
            }
        }
        let whole = dirs.into_iter().filter(|(_, (had, names))| had == names);
        let dirs = whole.map(|(dir, (had, _))| (dir, Whole { had, names: Vec::new() })).collect();
        Arriving { dirs, rows: FxHashMap::default() }
    }

    /// The row of a file, as it is stored.
    pub(super) fn file(&mut self, ino: Ino, home: Ino, row: &Bytes) {
        if self.dirs.contains_key(&home.0) {
            self.rows.insert(ino.0, row.clone());
        }
    }

    /// A name, with its row.
    pub(super) fn name(&mut self, dir: Ino, name: &Name, dentry: &Dentry, row: &Bytes) {
        if let Some(whole) = self.dirs.get_mut(&dir.0) {
            whole.names.push((dentry.cookie, dentry.ino, name.clone(), row.clone()));
        }
    }

    /// Adds the listings to the batch; gives their bytes. Cookies are given to names one after the other and never again: who has a name for
    /// each has all.
    pub(super) fn pack(self, packed: &PackedListings, batch: &mut Rows) -> u64 {
        let mut bytes = 0;
        for (dir, mut whole) in self.dirs {
            whole.names.sort_unstable_by_key(|(cookie, ..)| *cookie);
            let cookies = whole.names.iter().map(|(cookie, ..)| *cookie);
            if !cookies.eq(FIRST_COOKIE..FIRST_COOKIE + whole.had) {
                continue;
            }
            let entries = whole.names.iter().map(|(_, ino, name, row)| {
                let inode = self.rows.get(&ino.0);
                (name.as_bytes(), &row[..], inode)
            });
            if let Some(listing) = packed.pack(Ino(dir), entries) {
                bytes += listing.len() as u64;
                batch.put_whole(Ino(dir), listing);
            }
        }
        bytes
    }
}
