//! Reads a folder with all that is in it, by several threads, and works out its name.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Condvar, Mutex};
use rustix::fs::{self, AtFlags, Mode, OFlags, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;

use crate::below::open_below;
use crate::name::{self, Attributes, Body, Kind, Node, TreeName};
use crate::whole::Whole;
use crate::xattrs::{self, Xattrs};

/// Files that one thread takes at a time.
const FILES_AT_A_TIME: usize = 64;

/// Threads that read from a mount: more would read in an order in which it cannot read ahead.
const THREADS_OF_A_MOUNT: usize = 2;

/// Most threads that read from a disk.
const THREADS_MAX: usize = 8;

/// The file system's number of FUSE, as statfs(2) gives it.
const FUSE: u64 = 0x6573_5546;

/// Something in a tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Where it is, relative to the top, which is empty.
    pub path: Vec<u8>,
    /// What it is beside its content.
    pub attributes: Attributes,
    /// What it holds; of a directory nothing: its entries have paths of their own.
    pub body: Body,
    /// The hash of all of it, and of a directory of all that is in it.
    pub node: Node,
    /// When it was modified: seconds since 1970, nanoseconds. Does not count for the name.
    pub modified: (i64, u32),
    /// Its inode number. Does not count for the name.
    pub inode: u64,
    /// How many names it has, also outside of the tree; a directory has one.
    pub links: u32,
}

impl Entry {
    /// Whether it has several names.
    pub fn is_linked(&self) -> bool {
        self.links > 1
    }
}

/// A file that a walk has come to.
#[derive(Debug)]
pub struct Found<'a> {
    /// Where it is, relative to the top.
    pub path: &'a [u8],
    /// Bytes.
    pub size: u64,
    /// Its inode number.
    pub inode: u64,
    /// When its inode was changed: seconds since 1970, nanoseconds.
    pub changed: (i64, u32),
}

/// How a walk learns the content of a file.
pub trait Contents: Sync {
    /// The number of bytes, and the hash of the content, see [`Pieces`](crate::Pieces). Another number than the size says that the file has become shorter, or
    /// longer, while it was read.
    ///
    /// # Errors
    /// The file cannot be read.
    fn of(&self, found: &Found<'_>, file: &File) -> io::Result<(u64, [u8; 32])>;

    /// What is known of a file that need not be opened, since it is so still.
    fn unopened(&self, _found: &Found<'_>) -> Option<Unopened> {
        None
    }
}

/// What is known of a file.
#[derive(Debug)]
pub struct Unopened {
    /// The hash of its content.
    pub content: [u8; 32],
    /// Its extended attributes that count, in the order of their names.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A tree that was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Walked {
    /// By path; the first one is the top.
    pub entries: Vec<Entry>,
    /// The tree's name.
    pub name: TreeName,
}

/// How far a walk has come.
#[derive(Default, Debug)]
pub struct Progress {
    /// Files, directories and all else that was read.
    pub entries: AtomicU64,
    /// Bytes of files that were read.
    pub bytes: AtomicU64,
}

/// Why a tree has no name.
#[derive(Debug, thiserror::Error)]
pub enum WalkError {
    /// Something cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file got shorter or longer while it was read.
    #[error("{} changed while it was read: verify a snapshot, or when nobody writes", .0.display())]
    Changed(PathBuf),
    /// Something else is mounted below.
    #[error("{} is a mount point: what is mounted there does not belong to the tree; unmount it first", .0.display())]
    Mounted(PathBuf),
}

impl WalkError {
    /// Whether nothing is there; what lies behind a symbolic link does not.
    fn is_of_nothing(&self) -> bool {
        let WalkError::Io { source, .. } = self else { return false };
        let errno = Errno::from_io_error(source);
        errno.is_some_and(|errno| [Errno::NOENT, Errno::NOTDIR, Errno::LOOP].contains(&errno))
    }
}

enum Job {
    Directory(Vec<u8>),
    /// Names in a directory.
    Files(Vec<u8>, Vec<Vec<u8>>),
    /// Names in a directory that may be of directories, or of nothing; of the empty one is the directory itself.
    Some(Vec<u8>, Vec<Vec<u8>>),
}

struct Queue {
    jobs: Vec<Job>,
    /// Jobs that are worked on, which may bring others.
    working: usize,
    found: Result<Vec<Entry>, WalkError>,
}

struct Walk<'a> {
    contents: &'a dyn Contents,
    top: &'a Path,
    fd: OwnedFd,
    queue: Mutex<Queue>,
    changed: Condvar,
    progress: &'a Progress,
}

/// Reads the folder with all that is in it.
///
/// # Errors
/// Something cannot be read, changes meanwhile, or is a mount point; it is no folder.
pub fn walk(top: &Path, progress: &Progress) -> Result<Walked, WalkError> {
    walk_with(top, &Whole, progress)
}

/// As [`walk`], with another way to learn what is in files.
///
/// # Errors
/// As [`walk`].
pub fn walk_with(top: &Path, contents: &dyn Contents, progress: &Progress) -> Result<Walked, WalkError> {
    run(top, vec![Job::Directory(Vec::new())], contents, progress).map(named)
}

/// Reads what is at some paths relative to the folder, and nothing else. What is not there is left out.
///
/// # Errors
/// As [`walk`].
pub fn read<'p>(
    top: &Path,
    paths: impl IntoIterator<Item = &'p [u8]>,
    contents: &dyn Contents,
    progress: &Progress,
) -> Result<Vec<Entry>, WalkError> {
    let mut by_directory: BTreeMap<Vec<u8>, Vec<Vec<u8>>> = BTreeMap::new();
    for path in paths {
        let (dir, name) = split(path);
        by_directory.entry(dir.to_vec()).or_default().push(name.to_vec());
    }
    let jobs = by_directory.into_iter().flat_map(|(dir, names)| {
        let parts = names.chunks(FILES_AT_A_TIME).map(<[_]>::to_vec).collect::<Vec<_>>();
        parts.into_iter().map(move |names| Job::Some(dir.clone(), names))
    });
    run(top, jobs.collect(), contents, progress)
}

fn run(
    top: &Path,
    jobs: Vec<Job>,
    contents: &dyn Contents,
    progress: &Progress,
) -> Result<Vec<Entry>, WalkError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = fs::open(top, flags, Mode::empty())
        .map_err(|error| WalkError::Io { path: top.to_owned(), source: error.into() })?;
    let walk = Walk {
        contents,
        top,
        fd,
        queue: Mutex::new(Queue { jobs, working: 0, found: Ok(Vec::new()) }),
        changed: Condvar::new(),
        progress,
    };
    let threads = match is_mount(&walk.fd) {
        true => THREADS_OF_A_MOUNT,
        false => std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, THREADS_MAX)),
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| walk.work());
        }
    });
    walk.queue.into_inner().found
}

/// Whether a folder is in a mount whose file system is a process.
pub fn is_mount(folder: impl AsFd) -> bool {
    fs::fstatfs(folder).is_ok_and(|stat| stat.f_type as u64 == FUSE)
}

/// Works out the nodes of directories, from those of what is in them, and the order.
pub fn named(mut entries: Vec<Entry>) -> Walked {
    entries.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    let mut children: HashMap<Vec<u8>, Vec<(Vec<u8>, Node)>> = HashMap::new();
    // What is in a directory comes after it.
    for entry in entries.iter_mut().rev() {
        if Kind::of(entry.attributes.mode) == Kind::Directory {
            let mut inside = children.remove(&entry.path).unwrap_or_default();
            inside.sort_unstable();
            entry.node = name::node(&entry.attributes, &Body::Directory(inside));
        }
        if !entry.path.is_empty() {
            let (dir, name) = split(&entry.path);
            children.entry(dir.to_vec()).or_default().push((name.to_vec(), entry.node));
        }
    }
    let name = TreeName(entries.first().map_or([0; 32], |top| top.node));
    Walked { entries, name }
}

/// The directory, and the name in it, of a path relative to the top; of the top both are empty.
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

fn joined(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let separator: &[u8] = if dir.is_empty() { b"" } else { b"/" };
    [dir, separator, name].concat()
}

impl Walk<'_> {
    fn shown(&self, path: &[u8]) -> PathBuf {
        if path.is_empty() { self.top.to_owned() } else { self.top.join(OsStr::from_bytes(path)) }
    }

    fn failed(&self, path: &[u8], error: Errno) -> WalkError {
        WalkError::Io { path: self.shown(path), source: error.into() }
    }

    fn work(&self) {
        while let Some(job) = self.next() {
            let done = match job {
                Job::Directory(path) => self.directory(&path),
                Job::Files(dir, names) => self.files(&dir, &names),
                Job::Some(dir, names) => self.some(&dir, &names),
            };
            self.done(done);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop() {
                queue.working += 1;
                return Some(job);
            }
            if queue.working == 0 {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn done(&self, done: Result<(Vec<Entry>, Vec<Job>), WalkError>) {
        let mut queue = self.queue.lock();
        queue.working -= 1;
        match (&mut queue.found, done) {
            (Ok(found), Ok((entries, jobs))) => {
                found.extend(entries);
                queue.jobs.extend(jobs);
            }
            (Ok(_), Err(error)) => {
                queue.found = Err(error);
                queue.jobs.clear();
            }
            // Another one has failed.
            (Err(_), _) => {}
        }
        self.changed.notify_all();
    }

    fn open(&self, path: &[u8]) -> Result<OwnedFd, WalkError> {
        if path.is_empty() {
            return self.fd.try_clone().map_err(|source| WalkError::Io { path: self.top.to_owned(), source });
        }
        open_below(&self.fd, path, OFlags::RDONLY | OFlags::DIRECTORY)
            .map_err(|error| self.failed(path, error))
    }

    fn directory(&self, path: &[u8]) -> Result<(Vec<Entry>, Vec<Job>), WalkError> {
        let fd = self.open(path)?;
        let own = self.own(&fd, path)?;
        let (mut directories, mut files) = (Vec::new(), Vec::new());
        let read = || fs::Dir::read_from(&fd).map_err(|error| self.failed(path, error));
        for found in read()? {
            let found = found.map_err(|error| self.failed(path, error))?;
            let name = found.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let is_directory = match found.file_type() {
                fs::FileType::Directory => true,
                fs::FileType::Unknown => {
                    Kind::of(self.stat(&fd, name, path)?.stx_mode.into()) == Kind::Directory
                }
                _ => false,
            };
            if is_directory {
                directories.push((found.ino(), name.to_vec()));
            } else {
                files.push((found.ino(), name.to_vec()));
            }
        }
        // As they were made, most likely: a disk, and a mount that reads ahead, has them in this order. Jobs are taken from the end.
        for entries in [&mut directories, &mut files] {
            entries.sort_unstable();
        }
        let mut jobs: Vec<Job> =
            directories.iter().rev().map(|(_, name)| Job::Directory(joined(path, name))).collect();
        let parts = files.chunks(FILES_AT_A_TIME).rev();
        jobs.extend(
            parts.map(|part| Job::Files(path.to_vec(), part.iter().map(|(_, name)| name.clone()).collect())),
        );
        Ok((vec![own], jobs))
    }

    /// A directory without what is in it.
    fn own(&self, fd: &OwnedFd, path: &[u8]) -> Result<Entry, WalkError> {
        let stat = self.stat(fd, b"", path)?;
        self.progress.entries.fetch_add(1, Relaxed);
        Ok(Entry {
            path: path.to_vec(),
            attributes: attributes(&stat, self.xattrs(fd.as_fd(), None, path)?),
            body: Body::Nothing,
            node: [0; 32],
            modified: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            inode: stat.stx_ino,
            links: 1,
        })
    }

    /// What statx(2) says of a name in a directory, or of that itself.
    fn stat(&self, dir: &OwnedFd, name: &[u8], path: &[u8]) -> Result<Statx, WalkError> {
        let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
        let of = || if name.is_empty() { path.to_vec() } else { joined(path, name) };
        let stat = fs::statx(dir, name, flags, StatxFlags::BASIC_STATS)
            .map_err(|error| self.failed(&of(), error))?;
        let of = of();
        if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) && !of.is_empty() {
            return Err(WalkError::Mounted(self.shown(&of)));
        }
        Ok(stat)
    }

    fn files(&self, dir: &[u8], names: &[Vec<u8>]) -> Result<(Vec<Entry>, Vec<Job>), WalkError> {
        let fd = self.open(dir)?;
        let mut entries = Vec::with_capacity(names.len());
        for name in names {
            match self.entry(&fd, dir, name)? {
                Some(entry) => entries.push(entry),
                // It was none when the directory was read.
                None => return Err(WalkError::Changed(self.shown(&joined(dir, name)))),
            }
        }
        Ok((entries, Vec::new()))
    }

    fn some(&self, dir: &[u8], names: &[Vec<u8>]) -> Result<(Vec<Entry>, Vec<Job>), WalkError> {
        let mut entries = Vec::with_capacity(names.len());
        let fd = match self.open(dir) {
            Err(error) if error.is_of_nothing() => return Ok((entries, Vec::new())),
            fd => fd?,
        };
        for name in names {
            let one = || match name.is_empty() {
                true => self.own(&fd, dir),
                false => match self.entry(&fd, dir, name)? {
                    Some(entry) => Ok(entry),
                    None => {
                        let path = joined(dir, name);
                        self.own(&self.open(&path)?, &path)
                    }
                },
            };
            match one() {
                Err(error) if error.is_of_nothing() => {}
                one => entries.push(one?),
            }
        }
        Ok((entries, Vec::new()))
    }

    /// What a name in a directory leads to; `None`: a directory.
    fn entry(&self, fd: &OwnedFd, dir: &[u8], name: &[u8]) -> Result<Option<Entry>, WalkError> {
        let path = joined(dir, name);
        let stat = self.stat(fd, name, dir)?;
        let (body, xattrs) = match Kind::of(stat.stx_mode.into()) {
            Kind::File => {
                let changed = (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec);
                let found = Found { path: &path, size: stat.stx_size, inode: stat.stx_ino, changed };
                match self.contents.unopened(&found) {
                    Some(Unopened { content, xattrs }) => (Body::File { size: found.size, content }, xattrs),
                    None => self.file(fd, name, &path)?,
                }
            }
            Kind::Link => {
                let target = fs::readlinkat(fd, name, Vec::new());
                let target = target.map_err(|error| self.failed(&path, error))?;
                (Body::Link(target.into_bytes()), self.xattrs(fd.as_fd(), Some(name), &path)?)
            }
            Kind::Special => (Body::Nothing, self.xattrs(fd.as_fd(), Some(name), &path)?),
            Kind::Directory => return Ok(None),
        };
        let attributes = attributes(&stat, xattrs);
        let node = name::node(&attributes, &body);
        self.progress.entries.fetch_add(1, Relaxed);
        let modified = (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec);
        let (inode, links) = (stat.stx_ino, stat.stx_nlink);
        Ok(Some(Entry { path, attributes, body, node, modified, inode, links }))
    }

    fn file(&self, dir: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(Body, Xattrs), WalkError> {
        // Without waiting, should it have become a fifo.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = fs::openat(dir, name, flags, Mode::empty()).map_err(|error| self.failed(path, error))?;
        let xattrs = self.xattrs(fd.as_fd(), None, path)?;
        let file = File::from(fd);
        let io = |source| WalkError::Io { path: self.shown(path), source };
        let stat = file.metadata().map_err(io)?;
        let size = stat.len();
        let changed = (stat.ctime(), stat.ctime_nsec() as u32);
        let found = Found { path, size, inode: stat.ino(), changed };
        let (read, content) = self.contents.of(&found, &file).map_err(io)?;
        self.progress.bytes.fetch_add(read, Relaxed);
        match read == size {
            true => Ok((Body::File { size, content }, xattrs)),
            false => Err(WalkError::Changed(self.shown(path))),
        }
    }

    /// Extended attributes of what is open, or of a name in a directory that is.
    fn xattrs(&self, fd: BorrowedFd<'_>, name: Option<&[u8]>, path: &[u8]) -> Result<Xattrs, WalkError> {
        xattrs::of(fd, name).map_err(|error| self.failed(path, error))
    }
}

fn attributes(stat: &Statx, xattrs: Xattrs) -> Attributes {
    Attributes {
        mode: stat.stx_mode.into(),
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        rdev: fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        xattrs,
    }
}

#[cfg(test)]
#[path = "walk_tests.rs"]
mod tests;
