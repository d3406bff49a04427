//! Rows: what a volume consists of. An inode row per inode, a dentry row per name, and a page row
//! per [`PAGE_BLOCKS`] blocks of a file beyond its first page.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;

use crate::{ContentHash, Ino, Timestamp};

/// Bytes of a file that one piece of content holds: files are cut at multiples of it.
pub const BLOCK_SIZE: u64 = 64 * 1024;

/// Blocks named by one page row; page 0 of a file is part of its inode row.
pub const PAGE_BLOCKS: u64 = 64;

/// Files up to this many bytes are kept whole in their inode row.
pub const INLINE_MAX: u64 = 4096;

/// Longest name in a directory, in bytes.
pub const NAME_MAX: usize = 255;

/// How many blocks a file of `size` bytes spans.
pub fn blocks_of(size: u64) -> u64 {
    size.div_ceil(BLOCK_SIZE)
}

/// How many pages, page 0 included, a file of `size` bytes spans.
pub fn pages_of(size: u64) -> u64 {
    blocks_of(size).div_ceil(PAGE_BLOCKS)
}

/// Names up to this many bytes take no memory of their own.
const SHORT_MAX: usize = 22;

/// A name in a directory: 1 to [`NAME_MAX`] bytes without `/` and NUL; cheap to clone.
#[derive(Clone)]
pub struct Name(Repr);

#[derive(Clone)]
enum Repr {
    Short { len: u8, bytes: [u8; SHORT_MAX] },
    Long(Arc<[u8]>),
}

impl Name {
    /// The bytes as they were given; who makes one from user input checks length and characters.
    pub fn new(bytes: &[u8]) -> Name {
        if bytes.len() > SHORT_MAX {
            return Name(Repr::Long(bytes.into()));
        }
        let mut short = [0; SHORT_MAX];
        short[..bytes.len()].copy_from_slice(bytes);
        Name(Repr::Short { len: bytes.len() as u8, bytes: short })
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Short { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Long(bytes) => bytes,
        }
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Name) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Name {}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Name) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Name) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        String::from_utf8_lossy(self.as_bytes()).fmt(f)
    }
}

/// The kind of an inode, from the type bits of its mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// S_IFREG
    Regular,
    /// S_IFDIR
    Directory,
    /// S_IFLNK
    Symlink,
    /// S_IFIFO
    Fifo,
    /// S_IFSOCK
    Socket,
    /// S_IFCHR
    CharDevice,
    /// S_IFBLK
    BlockDevice,
}

impl FileKind {
    /// The kind that the type bits of `mode` say; `None` for bits that mean nothing.
    pub fn of_mode(mode: u32) -> Option<FileKind> {
        Some(match mode & 0o170000 {
            0o100000 => FileKind::Regular,
            0o040000 => FileKind::Directory,
            0o120000 => FileKind::Symlink,
            0o010000 => FileKind::Fifo,
            0o140000 => FileKind::Socket,
            0o020000 => FileKind::CharDevice,
            0o060000 => FileKind::BlockDevice,
            _ => return None,
        })
    }

    /// The type bits of a mode.
    pub fn bits(self) -> u32 {
        match self {
            FileKind::Regular => 0o100000,
            FileKind::Directory => 0o040000,
            FileKind::Symlink => 0o120000,
            FileKind::Fifo => 0o010000,
            FileKind::Socket => 0o140000,
            FileKind::CharDevice => 0o020000,
            FileKind::BlockDevice => 0o060000,
        }
    }
}

/// One block of a file: the content's name and how many bytes it has (the rest of the block, up to
/// the file's end, reads as zeros).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockRef {
    /// Name of the content.
    pub hash: ContentHash,
    /// Bytes of content, 1 to [`BLOCK_SIZE`].
    pub len: u32,
}

/// What an inode holds besides its attributes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Content {
    /// Nothing: directories, devices, sockets, fifos, files without data.
    #[default]
    None,
    /// The whole data of a small file; bytes from its end to the file's size are zeros.
    Inline(Bytes),
    /// Page 0 of a file's blocks, at most [`PAGE_BLOCKS`]; `None` is a hole. Missing ones at the end
    /// are holes too.
    Blocks(Vec<Option<BlockRef>>),
    /// The target of a symbolic link.
    Target(Bytes),
    /// The whole data of a small file, which the server has and has not sent along: whoever only looks at names does not
    /// wait for it. In a record: what the server has stays as it is.
    LeftOut,
}

/// Extended attributes by their whole name. Most inodes have none, and then this is a word.
#[derive(Clone, Default)]
#[allow(clippy::box_collection)] // a third of what the map takes by itself
pub struct Xattrs(Option<Box<BTreeMap<Bytes, Bytes>>>);

static NO_XATTRS: BTreeMap<Bytes, Bytes> = BTreeMap::new();

impl Deref for Xattrs {
    type Target = BTreeMap<Bytes, Bytes>;

    fn deref(&self) -> &BTreeMap<Bytes, Bytes> {
        self.0.as_deref().unwrap_or(&NO_XATTRS)
    }
}

impl DerefMut for Xattrs {
    fn deref_mut(&mut self) -> &mut BTreeMap<Bytes, Bytes> {
        self.0.get_or_insert_default()
    }
}

impl FromIterator<(Bytes, Bytes)> for Xattrs {
    fn from_iter<I: IntoIterator<Item = (Bytes, Bytes)>>(xattrs: I) -> Xattrs {
        let all: BTreeMap<Bytes, Bytes> = xattrs.into_iter().collect();
        Xattrs((!all.is_empty()).then(|| Box::new(all)))
    }
}

impl PartialEq for Xattrs {
    fn eq(&self, other: &Xattrs) -> bool {
        **self == **other
    }
}

impl Eq for Xattrs {}

impl fmt::Debug for Xattrs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// An inode as it is stored and sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InodeRow {
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Hard links; for a directory 2 plus its subdirectories. 0: deleted, but open somewhere.
    pub nlink: u32,
    /// Device number of a device node, as in `st_rdev`.
    pub rdev: u32,
    /// Size in bytes.
    pub size: u64,
    /// Bytes that take room: the data without its holes.
    pub allocated: u64,
    /// Last access: set at creation and by utimensat only.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of the content or of an attribute.
    pub ctime: Timestamp,
    /// Creation.
    pub btime: Timestamp,
    /// The directory that holds a directory (itself for the root). Of other kinds, the home: the directory that all
    /// names are in; `Ino(0)` when they are in several, or there is none.
    pub parent: Ino,
    /// For a directory: the cookie that its next new entry gets.
    pub next_cookie: u64,
    /// It was made without a name (O_TMPFILE), and has had none so far: it may get one. What has lost its last name may not.
    pub unnamed: bool,
    /// Extended attributes.
    pub xattrs: Xattrs,
    /// Data, blocks or target.
    pub content: Content,
}

impl InodeRow {
    /// A row of which nothing else is set: an empty inode of root, with all its times zero. A directory of it has had no
    /// names yet.
    pub fn new(mode: u32, nlink: u32, parent: Ino) -> InodeRow {
        let time = Timestamp::default();
        InodeRow {
            mode,
            uid: 0,
            gid: 0,
            nlink,
            rdev: 0,
            size: 0,
            allocated: 0,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            parent,
            next_cookie: crate::tree::FIRST_COOKIE,
            unnamed: false,
            xattrs: Xattrs::default(),
            content: Content::None,
        }
    }

    /// The kind of the inode.
    ///
    /// # Panics
    /// When the mode's type bits mean nothing; rows from outside are checked by `wire`.
    pub fn kind(&self) -> FileKind {
        FileKind::of_mode(self.mode).expect("rows carry a valid file type")
    }
}

/// A name's row: which inode it leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dentry {
    /// The inode.
    pub ino: Ino,
    /// Its kind.
    pub kind: FileKind,
    /// Place in the directory's order, unique in it and never used again: what readdir resumes at.
    pub cookie: u64,
}
