//! The log: ordered batches of records. A batch is applied whole or not at all, and brings the
//! volume from one state that its client has shown to a later one.

use crate::{BlockRef, Dentry, Ino, InodeRow, Name, Sequence};

/// One change of a row. Applying it twice is the same as applying it once.
#[derive(Clone, PartialEq, Debug)]
pub enum Record {
    /// The inode's row is now this.
    PutInode(Ino, Box<InodeRow>),
    /// The inode is gone, with all its page rows.
    DeleteInode(Ino),
    /// The name now leads there.
    PutDentry(Ino, Name, Dentry),
    /// The name is gone.
    DeleteDentry(Ino, Name),
    /// Page `.1` (1 or more) of the file's blocks is now this.
    PutPage(Ino, u64, Vec<Option<BlockRef>>),
    /// The file has no page `.1` (1 or more) and none after it.
    DeletePages(Ino, u64),
}

/// What a volume's files take, or may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Bytes, counted as [`InodeRow::allocated`].
    pub bytes: u64,
    /// Inodes, the root not counted.
    pub inodes: u64,
}

/// A change of [`Usage`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UsageDelta {
    /// Bytes more (or fewer, when negative).
    pub bytes: i64,
    /// Inodes more (or fewer, when negative).
    pub inodes: i64,
}

impl Usage {
    /// The usage after `delta`; never below zero.
    pub fn after(self, delta: UsageDelta) -> Usage {
        Usage {
            bytes: self.bytes.saturating_add_signed(delta.bytes),
            inodes: self.inodes.saturating_add_signed(delta.inodes),
        }
    }
}

/// A batch: all that changed between two cuts of a client's log.
#[derive(Clone, PartialEq, Debug)]
pub struct Batch {
    /// Its place in the session's log.
    pub sequence: Sequence,
    /// The changes; their order inside the batch does not matter, no two are about the same row.
    pub records: Vec<Record>,
    /// How the volume's usage changes.
    pub usage: UsageDelta,
    /// Inodes put by this batch that have no name but are open at the client: the server deletes them
    /// when the session ends.
    pub orphans: Vec<Ino>,
}

impl Batch {
    /// What it is when its session is over: what has no name ends with it.
    pub fn end_unnamed(&mut self) {
        self.orphans.clear();
        for record in &mut self.records {
            if let Record::PutInode(ino, row) = record
                && row.nlink == 0
            {
                *record = Record::DeleteInode(*ino);
            }
        }
    }

    /// The batch with everything but its records.
    pub fn without_records(&self) -> Batch {
        Batch {
            sequence: self.sequence,
            records: Vec::new(),
            usage: self.usage,
            orphans: self.orphans.clone(),
        }
    }
}
