//! Rows that can be: what no honest client ever sends, and no volume may hold. Used for what clients commit, for the names in
//! changes, and by the check of a volume.

mod ends;

use std::collections::{HashMap, HashSet};

pub use ends::Ends;

use crate::{
    BLOCK_SIZE, Content, Dentry, FileKind, INLINE_MAX, Ino, InodeRow, NAME_MAX, Name, PAGE_BLOCKS, Record,
    UsageDelta, slot, tree::FIRST_COOKIE,
};

/// Inode numbers are below: those above are of slots.
pub const NUMBERS: u64 = 1 << slot::INO_BITS;

/// The largest size of a file, bytes: offsets are signed.
pub const SIZE_MAX: u64 = i64::MAX as u64;

/// Longest target of a symbolic link, bytes: as everywhere on Linux.
pub const TARGET_MAX: usize = 4095;

/// A row that cannot be, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("inode {ino}: {what}")]
pub struct Unsound {
    /// The inode, or the directory of a name.
    pub ino: Ino,
    /// What cannot be.
    pub what: &'static str,
}

/// Whether these bytes can be a name in a directory.
pub fn is_name(name: &[u8]) -> bool {
    (1..=NAME_MAX).contains(&name.len())
        && !name.contains(&b'/')
        && !name.contains(&0)
        && name != b"."
        && name != b".."
}

fn require(is_so: bool, ino: Ino, what: &'static str) -> Result<(), Unsound> {
    if is_so { Ok(()) } else { Err(Unsound { ino, what }) }
}

/// Whether a number can be an inode's, `next` being the first that was given to nobody.
fn is_number(ino: Ino, next: u64) -> bool {
    ino == Ino::ROOT || (Ino::FIRST.0..next).contains(&ino.0)
}

/// Whether a directory can have this name.
///
/// # Errors
/// It cannot.
pub fn dentry(parent: Ino, name: &[u8], dentry: &Dentry, next: u64) -> Result<(), Unsound> {
    require(is_name(name), parent, "a name that cannot be")?;
    require(is_number(parent, next), parent, "names in a number that is no inode's")?;
    require(dentry.ino != parent, parent, "a name that leads to its own directory")?;
    require(dentry.ino != Ino::ROOT, parent, "a name that leads to the root")?;
    require(is_number(dentry.ino, next), dentry.ino, "a number that was not given to anybody")?;
    require(
        (FIRST_COOKIE..1 << 63).contains(&dentry.cookie),
        parent,
        "a name whose place in listings cannot be",
    )
}

/// Whether a name can lead where it does: to an inode of kind `to`, or to none.
///
/// # Errors
/// It cannot.
pub fn leads(dentry: &Dentry, to: Option<FileKind>) -> Result<(), Unsound> {
    require(to.is_some(), dentry.ino, "a name that leads to nothing")?;
    require(to == Some(dentry.kind), dentry.ino, "a name that says another kind than its inode")
}

/// Whether an inode can have this row.
///
/// # Errors
/// It cannot.
pub fn inode(ino: Ino, row: &InodeRow, next: u64) -> Result<(), Unsound> {
    require(is_number(ino, next), ino, "a number that was not given to anybody")?;
    let kind = row.kind();
    require(ino != Ino::ROOT || kind == FileKind::Directory, ino, "a root that is no directory")?;
    require(ino != Ino::ROOT || row.nlink > 0, ino, "a volume without a root")?;
    require(row.size <= SIZE_MAX && row.allocated <= SIZE_MAX, ino, "a size that cannot be")?;
    match &row.content {
        Content::Inline(data) => {
            // Shorter than the file, when that ends in a hole.
            let fits = data.len() as u64 <= INLINE_MAX;
            require(kind == FileKind::Regular && fits, ino, "content that cannot be in a row")?;
        }
        Content::Blocks(blocks) => {
            let fits = blocks.len() as u64 <= PAGE_BLOCKS
                && blocks.iter().flatten().all(|block| u64::from(block.len) <= BLOCK_SIZE);
            require(kind == FileKind::Regular && fits, ino, "blocks that cannot be")?;
        }
        Content::Target(target) => {
            let fits = (1..=TARGET_MAX).contains(&target.len()) && !target.contains(&0);
            require(kind == FileKind::Symlink && fits, ino, "a target that cannot be")?;
        }
        Content::None | Content::LeftOut => {}
    }
    if kind != FileKind::Directory {
        return Ok(());
    }
    require(
        row.next_cookie <= slot::FIRST_COOKIE,
        ino,
        "a directory whose next place in listings cannot be",
    )?;
    let parent_is_it = row.parent == ino;
    require(parent_is_it == (ino == Ino::ROOT), ino, "a directory in itself")
}

/// Whether a batch can have this record.
///
/// # Errors
/// It cannot.
pub fn record(record: &Record, next: u64) -> Result<(), Unsound> {
    match record {
        Record::PutInode(ino, row) => inode(*ino, row, next),
        Record::PutDentry(parent, name, to) => dentry(*parent, name.as_bytes(), to, next),
        Record::DeleteDentry(parent, name) => {
            require(is_name(name.as_bytes()), *parent, "a name that cannot be")
        }
        Record::DeleteInode(ino) => require(*ino != Ino::ROOT, *ino, "a volume without a root"),
        Record::PutPage(ino, page, _) | Record::DeletePages(ino, page) => {
            let is_page = (1..=SIZE_MAX / BLOCK_SIZE / PAGE_BLOCKS).contains(page);
            require(is_page && *ino != Ino::ROOT, *ino, "a page that cannot be")
        }
    }
}

/// Looks at the records of one batch, one after the other, and at what they come to together.
#[derive(Default)]
pub struct Batch {
    /// The first number that was given to nobody.
    next: u64,
    bytes: u64,
    put: HashSet<Ino>,
    deleted: usize,
    /// Inodes that end: deleted, or left without a link.
    ended: HashSet<Ino>,
    /// Names that change, and whether they are there afterwards.
    changed: Vec<(Ino, Name, bool)>,
    /// Where names lead.
    named: Vec<Dentry>,
    /// Parents of directories as they are after the batch.
    parents: HashMap<Ino, Ino>,
    /// Directories that the root is above.
    safe: HashSet<Ino>,
    /// Directories to climb from: they get a name.
    from: Vec<Ino>,
}

impl Batch {
    /// `next`: the first number that was given to nobody.
    pub fn new(next: u64) -> Batch {
        Batch { next, safe: HashSet::from([Ino::ROOT]), ..Batch::default() }
    }

    /// Looks at a record.
    ///
    /// # Errors
    /// There can be no such record.
    pub fn add(&mut self, of: &Record) -> Result<(), Unsound> {
        record(of, self.next)?;
        match of {
            Record::PutInode(ino, row) => {
                self.bytes = self.bytes.saturating_add(row.allocated);
                self.put.insert(*ino);
                if row.nlink == 0 {
                    self.ended.insert(*ino);
                }
                if row.kind() == FileKind::Directory {
                    self.parents.insert(*ino, row.parent);
                }
            }
            Record::DeleteInode(ino) => {
                self.deleted += 1;
                self.ended.insert(*ino);
            }
            Record::DeleteDentry(dir, name) => self.changed.push((*dir, name.clone(), false)),
            Record::PutDentry(dir, name, dentry) => {
                self.changed.push((*dir, name.clone(), true));
                self.named.push(*dentry);
                if dentry.kind == FileKind::Directory {
                    self.from.push(dentry.ino);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether the records can change the usage like this: what is more comes with rows that are put, inodes that are fewer
    /// with rows that are put or deleted.
    ///
    /// # Errors
    /// They cannot.
    pub fn usage(&self, delta: UsageDelta) -> Result<(), Unsound> {
        let (put, deleted) = (self.put.len() as i64, self.deleted as i64);
        let fits = delta.bytes <= i64::try_from(self.bytes).unwrap_or(i64::MAX)
            && delta.inodes <= put
            && delta.inodes >= -(put + deleted);
        require(fits, Ino::ROOT, "a usage that the rows do not have")
    }

    /// Names of inodes whose rows are not in the batch: those have to be stored, see [`leads`].
    pub fn named_elsewhere(&self) -> impl Iterator<Item = Dentry> {
        self.named.iter().copied().filter(|dentry| !self.put.contains(&dentry.ino))
    }

    /// What ends by the batch, to be held against what is stored; `None`: nothing.
    ///
    /// # Errors
    /// The batch itself has a name that leads to it, or lies in it.
    pub fn ends(&mut self) -> Result<Option<Ends>, Unsound> {
        let ended = std::mem::take(&mut self.ended);
        if ended.is_empty() {
            return Ok(None);
        }
        for dentry in &self.named {
            require(!ended.contains(&dentry.ino), dentry.ino, ends::NAMED)?;
        }
        for (dir, _, is_there) in &self.changed {
            require(!is_there || !ended.contains(dir), *dir, ends::FULL)?;
        }
        Ok(Some(Ends::new(ended, std::mem::take(&mut self.changed))))
    }

    /// The next directory whose parent has to be told to [`Batch::is_in`]; `None`: all is well.
    ///
    /// # Errors
    /// A directory would lie in itself.
    pub fn unknown(&mut self) -> Result<Option<Ino>, Unsound> {
        while let Some(from) = self.from.last().copied() {
            let (mut at, mut passed) = (from, HashSet::new());
            while !self.safe.contains(&at) {
                if !passed.insert(at) {
                    return Err(Unsound { ino: from, what: "a directory that would lie in itself" });
                }
                match self.parents.get(&at) {
                    Some(parent) => at = *parent,
                    None => return Ok(Some(at)),
                }
            }
            self.safe.extend(passed);
            self.from.pop();
        }
        Ok(None)
    }

    /// Where a directory is stored to be; `None`: there is none, so it is in no circle.
    pub fn is_in(&mut self, dir: Ino, parent: Option<Ino>) {
        self.parents.insert(dir, parent.unwrap_or(Ino::ROOT));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Name;

    const NEXT: u64 = 1000;

    fn dir(parent: u64) -> InodeRow {
        InodeRow { next_cookie: 3, ..InodeRow::new(FileKind::Directory.bits() | 0o755, 2, Ino(parent)) }
    }

    fn put_dir(ino: u64, parent: u64) -> Record {
        Record::PutInode(Ino(ino), Box::new(dir(parent)))
    }

    fn name(parent: u64, name: &str, ino: u64, cookie: u64) -> Record {
        let dentry = Dentry { ino: Ino(ino), kind: FileKind::Directory, cookie };
        Record::PutDentry(Ino(parent), Name::new(name.as_bytes()), dentry)
    }

    #[test]
    fn rows_that_cannot_be_are_told() {
        let file = InodeRow::new(FileKind::Regular.bits() | 0o644, 1, Ino(1));
        let with =
            |content, size| Record::PutInode(Ino(20), Box::new(InodeRow { content, size, ..file.clone() }));
        for good in [
            put_dir(1, 1),
            put_dir(20, 1),
            name(1, "a", 20, 3),
            name(1, "...", 20, 1 << 60),
            with(Content::Inline(b"hay".as_slice().into()), 5000),
            with(Content::Blocks(vec![None]), SIZE_MAX),
        ] {
            record(&good, NEXT).unwrap_or_else(|error| panic!("{good:?}: {error}"));
        }
        for bad in [
            put_dir(20, 20),
            put_dir(1, 20),
            put_dir(NEXT, 1),
            put_dir(2, 1),
            Record::PutInode(Ino::ROOT, Box::new(file.clone())),
            Record::DeleteInode(Ino::ROOT),
            name(1, ".", 20, 3),
            name(1, "..", 20, 3),
            name(1, "a/b", 20, 3),
            name(1, "", 20, 3),
            name(1, "a", 1, 3),
            name(20, "a", 20, 3),
            name(1, "a", 20, u64::MAX),
            name(1, "a", 20, 2),
            name(1, "a", NEXT, 3),
            with(Content::Inline(vec![0; 5000].into()), 5000),
            with(Content::None, u64::MAX),
            with(Content::Target(b"there".as_slice().into()), 5),
            Record::PutPage(Ino(20), u64::MAX, Vec::new()),
            Record::PutInode(Ino(20), Box::new(InodeRow { next_cookie: u64::MAX, ..dir(1) })),
        ] {
            assert!(record(&bad, NEXT).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn usage_comes_with_rows() {
        let file = InodeRow { allocated: 100, ..InodeRow::new(FileKind::Regular.bits(), 1, Ino(1)) };
        let mut batch = Batch::new(NEXT);
        batch.add(&Record::PutInode(Ino(20), Box::new(file))).unwrap();
        batch.add(&Record::DeleteInode(Ino(21))).unwrap();
        let fits = |bytes, inodes| batch.usage(UsageDelta { bytes, inodes }).is_ok();
        assert!(fits(100, 1) && fits(-5000, -2) && fits(0, 0));
        assert!(!fits(101, 1) && !fits(100, 2) && !fits(0, -3) && !fits(i64::MAX, 0));
    }

    #[test]
    fn directories_that_lie_in_themselves_are_told() {
        // 30 is stored in 31, 31 in 32, 32 in the root.
        let stored = |ino: Ino| match ino.0 {
            30 => Some(Ino(31)),
            31 => Some(Ino(32)),
            32 => Some(Ino::ROOT),
            _ => None,
        };
        let climb = |records: &[Record]| {
            let mut climb = Batch::new(NEXT);
            records.iter().try_for_each(|record| climb.add(record))?;
            let mut looks = 0;
            while let Some(dir) = climb.unknown()? {
                looks += 1;
                climb.is_in(dir, stored(dir));
            }
            Ok::<u32, Unsound>(looks)
        };
        assert_eq!(climb(&[put_dir(20, 1), name(1, "a", 20, 3), put_dir(1, 1)]), Ok(0));
        let deep = [put_dir(20, 30), name(30, "a", 20, 3), put_dir(21, 20), name(20, "b", 21, 3)];
        assert_eq!(climb(&deep), Ok(3));
        assert!(climb(&[put_dir(32, 30), name(30, "up", 32, 3)]).is_err());
        assert!(climb(&[put_dir(40, 41), put_dir(41, 40), name(40, "x", 41, 3)]).is_err());
    }
}
