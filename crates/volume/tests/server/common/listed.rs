//! What an `Enter` brings.

use std::collections::HashMap;

use hayloft_model::{Dentry, FileKind, Ino, InodeRow, Name, Rows};
use hayloft_wire::Chunk;

use crate::common::Client;

/// What an `Enter` brings.
#[derive(Debug, Default)]
pub(crate) struct Entered {
    pub(crate) dirs: Vec<Listed>,
    pub(crate) contents: Vec<Chunk>,
    pub(crate) files: Vec<(Ino, InodeRow)>,
    pub(crate) next: u64,
}

/// A directory in it.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) dir: u64,
    pub(crate) entries: Vec<ListedEntry>,
    pub(super) complete: bool,
    pub(crate) own: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct ListedEntry {
    pub(crate) name: Name,
    pub(crate) dentry: Dentry,
    pub(crate) inode: Option<InodeRow>,
}

impl ListedEntry {
    pub(crate) fn name(&self) -> String {
        String::from_utf8(self.name.as_bytes().to_vec()).unwrap()
    }
}

/// Reads all that can be reached and compares it with `rows`.
pub(crate) fn compare_tree(client: &mut Client, rows: &Rows) {
    let mut listed = HashMap::new();
    let mut waiting = vec![1];
    while let Some(dir) = waiting.pop() {
        if listed.contains_key(&dir) {
            continue;
        }
        for listing in client.enter(dir, 1 << 20).unwrap().dirs {
            let entries: Vec<_> = listing
                .entries
                .iter()
                .map(|entry| (entry.name.clone(), entry.dentry, entry.inode.clone().unwrap()))
                .collect();
            waiting.extend(
                entries.iter().filter(|entry| entry.1.kind == FileKind::Directory).map(|entry| entry.1.ino.0),
            );
            let expected: Vec<_> = rows
                .listing(Ino(listing.dir))
                .into_iter()
                .map(|(name, dentry)| (name, dentry, rows.inodes[&dentry.ino].clone()))
                .collect();
            assert_eq!(entries, expected, "directory {}", listing.dir);
            listed.insert(listing.dir, ());
        }
    }
}
