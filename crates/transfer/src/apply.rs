//! Makes a folder what a manifest says, by what differs from what it is.

use std::collections::{HashMap, HashSet};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use hayloft_tree::{Kind, open_below, split};
use parking_lot::Mutex;
use rustix::fs::{
    self as sys, AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::contents::{Contents, LARGE, Reader, fill_by_all};
use crate::error::TransferError;
use crate::manifest::{Entry, Manifest};
use crate::seed::threads;

/// Makes files, in one thread.
struct Maker<'a> {
    reader: Reader<'a>,
    /// The directory in which something was made last.
    dir: Option<(&'a [u8], OwnedFd)>,
}

impl<'a> Maker<'a> {
    fn new(contents: &'a Contents<'a>) -> Maker<'a> {
        Maker { reader: Reader::new(contents), dir: None }
    }
}

struct Apply<'a> {
    folder: &'a Path,
    top: OwnedFd,
    contents: &'a Contents<'a>,
}

/// Threads that make files in a mount: they wait for its server most of the time.
const THREADS_IN_A_MOUNT: usize = 8;

/// What comes in the place of something else is made under a name that begins so.
const INCOMING: &str = ".hayloft-incoming-";

/// Whether both have the same content, or lead to the same place, and are no directories.
fn has_same_body(one: &Entry, other: &Entry) -> bool {
    one.kind() == other.kind()
        && one.mode & !0o7777 == other.mode & !0o7777
        && (one.size, &one.chunks, &one.holes, &one.target, one.rdev)
            == (other.size, &other.chunks, &other.holes, &other.target, other.rdev)
        && one.same_as == other.same_as
}

fn times(entry: &Entry) -> Timestamps {
    let modified = Timespec { tv_sec: entry.modified_seconds, tv_nsec: entry.modified_nanos.into() };
    Timestamps { last_access: modified, last_modification: modified }
}

/// Paths of what lies where a directory has to be, or is in a directory where something else has to be: it goes before that is made.
fn in_the_way<'e>(was: &'e [Entry], wanted: &Manifest) -> HashSet<&'e [u8]> {
    let wanted: HashMap<&[u8], Kind> =
        wanted.entries.iter().map(|entry| (entry.path.as_slice(), entry.kind())).collect();
    let mut found: HashSet<&[u8]> = HashSet::new();
    for entry in was.iter().filter(|entry| !entry.path.is_empty()) {
        let is_directory = entry.kind() == Kind::Directory;
        let kind = wanted.get(entry.path.as_slice());
        if kind.is_some_and(|kind| (*kind == Kind::Directory) != is_directory)
            || found.contains(split(&entry.path).0)
        {
            found.insert(&entry.path);
        }
    }
    found
}

impl Manifest {
    /// Whether all that a folder has which is this can be read there until everything is made that makes it `wanted`.
    pub fn stays_until_made(&self, wanted: &Manifest) -> bool {
        in_the_way(&self.entries, wanted).is_empty()
    }
}

/// Makes the folder what `wanted` says; `is` is what it is now. But for what is in the way, all of that stays until everything new is there: it
/// may be read for it.
pub(crate) fn apply(
    folder: &Path,
    is: Option<&Manifest>,
    wanted: &Manifest,
    contents: &Contents<'_>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), TransferError> {
    let top = sys::open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| TransferError::io(format!("cannot open {}", folder.display()))(error.into()))?;
    let apply = Apply { folder, top, contents };
    if let (None, Some(entry)) = (is, wanted.entries.first()) {
        // A default access control list would be given to all that is made.
        apply.set_xattrs(&apply.open(b"")?, b".", entry)?;
    }
    let was = is.map_or(&[][..], |is| &is.entries);
    let there: HashMap<&[u8], &Entry> = was.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
    let in_the_way = in_the_way(was, wanted);
    // Directories in which something happens get their times again.
    let mut touched: HashSet<&[u8]> = HashSet::new();
    // What is in a directory comes behind it.
    for entry in was.iter().rev().filter(|entry| in_the_way.contains(entry.path.as_slice())) {
        apply.remove(entry)?;
        touched.insert(split(&entry.path).0);
    }
    // Whose content or links are made anew: their other names have to follow.
    let mut anew: HashSet<&[u8]> = HashSet::new();
    let (mut files, mut links, mut described) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = None;
    for entry in &wanted.entries {
        let old = there
            .get(entry.path.as_slice())
            .filter(|old| (old.kind() == Kind::Directory) == (entry.kind() == Kind::Directory));
        let follows = !entry.same_as.is_empty() && anew.contains(entry.same_as.as_slice());
        match old {
            Some(old) if old.is_same(entry) && !follows => continue,
            Some(old) if entry.kind() != Kind::Directory && has_same_body(old, entry) && !follows => {
                if entry.same_as.is_empty() {
                    described.push(entry);
                }
                continue;
            }
            _ => {}
        }
        let (dir, name) = split(&entry.path);
        if entry.kind() == Kind::Directory {
            if old.is_none() && !entry.path.is_empty() {
                let dir_fd = apply.open_again(&mut last, dir)?;
                sys::mkdirat(dir_fd, name, Mode::from_raw_mode(0o700)).map_err(apply.failed(entry))?;
                touched.insert(dir);
            }
            touched.insert(&entry.path);
            continue;
        }
        touched.insert(dir);
        anew.insert(&entry.path);
        if entry.same_as.is_empty() {
            files.push((entry, old.is_some()))
        } else {
            links.push((entry, old.is_some()))
        }
    }
    apply.make_all(&files, progress)?;
    for entry in described {
        apply.describe(entry, there.get(entry.path.as_slice()).copied(), &mut last)?;
    }
    let paths: HashSet<&[u8]> = wanted.entries.iter().map(|entry| entry.path.as_slice()).collect();
    for entry in was.iter().rev().filter(|entry| !paths.contains(entry.path.as_slice())) {
        if !in_the_way.contains(entry.path.as_slice()) {
            apply.remove(entry)?;
            touched.insert(split(&entry.path).0);
        }
    }
    for (entry, is_there) in links {
        let (dir, name) = split(&entry.path);
        let (first_dir, first) = split(&entry.same_as);
        let dir = apply.open(dir)?;
        if is_there {
            sys::unlinkat(&dir, name, AtFlags::empty()).map_err(apply.failed(entry))?;
        }
        sys::linkat(apply.open(first_dir)?, first, &dir, name, AtFlags::empty())
            .map_err(apply.failed(entry))?;
    }
    // What is in a directory comes behind it.
    for entry in wanted.entries.iter().rev() {
        if entry.kind() == Kind::Directory && touched.contains(entry.path.as_slice()) {
            let old = there.get(entry.path.as_slice()).filter(|old| old.kind() == Kind::Directory);
            apply.describe(entry, old.copied(), &mut last)?;
        }
    }
    Ok(())
}

/// Waits until everything in a folder's file system is on its disk.
pub(crate) fn sync(folder: &Path) -> Result<(), TransferError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let synced = sys::open(folder, flags, Mode::empty()).and_then(sys::syncfs);
    synced.map_err(|error| TransferError::io(format!("cannot write {}", folder.display()))(error.into()))
}

impl<'a> Apply<'a> {
    fn failed(&self, entry: &Entry) -> impl FnOnce(Errno) -> TransferError {
        let path = self.folder.join(OsStr::from_bytes(&entry.path));
        move |error| TransferError::io(format!("cannot write {}", path.display()))(error.into())
    }

    fn open(&self, path: &[u8]) -> Result<OwnedFd, TransferError> {
        open_below(&self.top, path, OFlags::PATH | OFlags::DIRECTORY).map_err(|error| {
            let path = self.folder.join(OsStr::from_bytes(path));
            TransferError::io(format!("cannot open {}", path.display()))(error.into())
        })
    }

    fn make_all(
        &self,
        files: &[(&'a Entry, bool)],
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), TransferError> {
        const AT_A_TIME: usize = 32;
        // One after the other, each by all threads.
        let random = RandomState::new().hash_one(std::process::id());
        let (made, to_rename) = (AtomicU64::new(0), Mutex::new(Vec::new()));
        let make = |(entry, is_there): (&'a Entry, bool), maker: &mut Maker<'a>| {
            let number = made.fetch_add(1, Relaxed);
            let incoming = is_there.then(|| format!("{INCOMING}{random:016x}-{number}").into_bytes());
            self.make(entry, incoming.as_deref(), maker)?;
            if let Some(incoming) = incoming {
                to_rename.lock().push((entry, incoming));
            }
            Ok::<(), TransferError>(())
        };
        let is_large = |(entry, _): &(&Entry, bool)| entry.kind() == Kind::File && entry.size >= LARGE;
        let (large, files): (Vec<_>, Vec<_>) = files.iter().copied().partition(is_large);
        let mut maker = Maker::new(self.contents);
        for file in large {
            make(file, &mut maker)?;
        }
        let parts: Vec<_> = files.chunks(AT_A_TIME).collect();
        let (next, done, result) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(Ok(())));
        let threads = if hayloft_tree::is_mount(&self.top) { THREADS_IN_A_MOUNT } else { threads() };
        std::thread::scope(|scope| {
            for _ in 0..threads.min(parts.len()) {
                scope.spawn(|| {
                    let mut maker = Maker::new(self.contents);
                    while let Some(part) = parts.get(next.fetch_add(1, Relaxed)) {
                        for file in part.iter().copied() {
                            if let Err(error) = make(file, &mut maker) {
                                *result.lock() = Err(error);
                                next.store(parts.len(), Relaxed);
                                return;
                            }
                        }
                        let made = done.fetch_add(part.len() as u64, Relaxed) + part.len() as u64;
                        progress(made, files.len() as u64);
                    }
                });
            }
        });
        result.into_inner()?;
        let mut last = None;
        let mut to_rename = to_rename.into_inner();
        to_rename.sort_unstable_by_key(|(entry, _)| &entry.path);
        for (entry, incoming) in to_rename {
            let (path, name) = split(&entry.path);
            let dir = self.open_again(&mut last, path)?;
            sys::renameat(dir, incoming.as_slice(), dir, name).map_err(self.failed(entry))?;
        }
        Ok(())
    }

    /// A directory, which is often the one that was opened last.
    fn open_again<'d, 'p>(
        &self,
        last: &'d mut Option<(&'p [u8], OwnedFd)>,
        path: &'p [u8],
    ) -> Result<&'d OwnedFd, TransferError> {
        let dir = match last.take().filter(|(open, _)| *open == path) {
            Some((_, dir)) => dir,
            None => self.open(path)?,
        };
        Ok(&last.insert((path, dir)).1)
    }

    fn remove(&self, entry: &Entry) -> Result<(), TransferError> {
        let flags = if entry.kind() == Kind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let (dir, name) = split(&entry.path);
        sys::unlinkat(self.open(dir)?, name, flags).map_err(self.failed(entry))
    }

    /// Makes a file, under another name if something is there.
    fn make(
        &self,
        entry: &'a Entry,
        incoming: Option<&[u8]>,
        maker: &mut Maker<'a>,
    ) -> Result<(), TransferError> {
        let (dir, name) = split(&entry.path);
        let dir = self.open_again(&mut maker.dir, dir)?;
        self.make_in(dir, incoming.unwrap_or(name), entry, &mut maker.reader)
    }

    fn make_in(
        &self,
        dir: &OwnedFd,
        under: &[u8],
        entry: &'a Entry,
        reader: &mut Reader<'a>,
    ) -> Result<(), TransferError> {
        let failed = || self.failed(entry);
        match entry.kind() {
            Kind::File => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                let mode = Mode::from_raw_mode(entry.mode & 0o777);
                let file = File::from(sys::openat(dir, under, flags, mode).map_err(failed())?);
                let made = sys::fstat(&file).map_err(failed())?;
                let not_written =
                    |error| self.failed(entry)(Errno::from_io_error(&error).unwrap_or(Errno::IO));
                let content = match entry.size >= LARGE {
                    true => fill_by_all(self.contents, &file, entry, &not_written)?,
                    false => reader.fill(&file, entry, &not_written)?,
                };
                // The tree's name says this, and not which chunks it has.
                if content != entry.content_hash() {
                    reader.verify(entry)?;
                    let shown = String::from_utf8_lossy(&entry.path);
                    let said = format!("{shown} has other chunks than its name by content says");
                    return Err(TransferError::Damaged(said));
                }
                self.describe_file(&file, &made, entry)?;
            }
            Kind::Link => {
                sys::symlinkat(entry.target.as_slice(), dir, under).map_err(failed())?;
                self.describe_in(dir, under, entry, None)?;
            }
            Kind::Special | Kind::Directory => {
                let kind = FileType::from_raw_mode(entry.mode);
                sys::mknodat(dir, under, kind, Mode::from_raw_mode(0o600), entry.rdev).map_err(failed())?;
                self.describe_in(dir, under, entry, None)?;
            }
        }
        Ok(())
    }

    /// As [`Apply::describe`], of a file that was just made, and was `made` so: only what it does not have already.
    fn describe_file(&self, file: &File, made: &Stat, entry: &Entry) -> Result<(), TransferError> {
        let failed = || self.failed(entry);
        if (made.st_uid, made.st_gid) != (entry.uid, entry.gid) {
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            sys::fchown(file, Some(uid), Some(gid)).map_err(failed())?;
        }
        for xattr in &entry.xattrs {
            sys::fsetxattr(file, xattr.name.as_slice(), &xattr.value, XattrFlags::empty())
                .map_err(failed())?;
        }
        // After the owner, and after what was written: both take set-user-ID bits away.
        if made.st_mode & 0o7777 != entry.mode & 0o7777 || entry.mode & 0o6000 != 0 {
            sys::fchmod(file, Mode::from_raw_mode(entry.mode & 0o7777)).map_err(failed())?;
        }
        sys::futimens(file, &times(entry)).map_err(failed())
    }

    /// Gives what lies at a path the owner, mode, extended attributes and times of an entry. It has those of `old`; without that it was just made.
    /// `last` is the directory in which that was done last.
    fn describe<'p>(
        &self,
        entry: &'p Entry,
        old: Option<&Entry>,
        last: &mut Option<(&'p [u8], OwnedFd)>,
    ) -> Result<(), TransferError> {
        let (dir, name) = split(&entry.path);
        let dir = self.open_again(last, dir)?;
        self.describe_in(dir, if name.is_empty() { b"." } else { name }, entry, old)
    }

    fn describe_in(
        &self,
        fd: &OwnedFd,
        name: &[u8],
        entry: &Entry,
        old: Option<&Entry>,
    ) -> Result<(), TransferError> {
        let failed = || self.failed(entry);
        let has_owner = old.is_some_and(|old| (old.uid, old.gid) == (entry.uid, entry.gid));
        if !has_owner {
            let (uid, gid) = (Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)));
            sys::chownat(fd, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(failed())?;
        }
        // With another owner what it may do is gone (`security.capability`).
        if !has_owner || old.is_none_or(|old| old.xattrs != entry.xattrs) {
            self.set_xattrs(fd, name, entry)?;
        }
        if entry.kind() != Kind::Link && !(has_owner && old.is_some_and(|old| old.mode == entry.mode)) {
            // After the owner: that takes set-user-ID bits away.
            sys::chmodat(fd, name, Mode::from_raw_mode(entry.mode & 0o7777), AtFlags::empty())
                .map_err(failed())?;
        }
        sys::utimensat(fd, name, &times(entry), AtFlags::SYMLINK_NOFOLLOW).map_err(failed())
    }

    fn set_xattrs(&self, dir: &OwnedFd, name: &[u8], entry: &Entry) -> Result<(), TransferError> {
        use std::os::fd::AsRawFd;
        let path = [format!("/proc/self/fd/{}/", dir.as_fd().as_raw_fd()).as_bytes(), name].concat();
        let path = CString::new(path).unwrap_or_default();
        let mut names = vec![0; 65536];
        let there = match sys::llistxattr(path.as_c_str(), &mut names) {
            Ok(len) => &names[..len],
            Err(Errno::OPNOTSUPP) => &[],
            Err(error) => return Err(self.failed(entry)(error)),
        };
        for old in
            there.split(|byte| *byte == 0).filter(|old| !old.is_empty() && hayloft_tree::name::counts(old))
        {
            if !entry.xattrs.iter().any(|xattr| xattr.name == old) {
                match sys::lremovexattr(path.as_c_str(), old) {
                    Ok(()) | Err(Errno::NODATA) => {}
                    Err(error) => return Err(self.failed(entry)(error)),
                }
            }
        }
        for xattr in &entry.xattrs {
            sys::lsetxattr(path.as_c_str(), xattr.name.as_slice(), &xattr.value, XattrFlags::empty())
                .map_err(self.failed(entry))?;
        }
        Ok(())
    }
}
