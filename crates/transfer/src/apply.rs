//! Makes a folder what a manifest says, by what differs from what it is.

use std::collections::{HashMap, HashSet};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use hayloft_tree::{Kind, split};
use parking_lot::Mutex;
use rustix::fs::{
    self as sys, AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
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

/// What lies where now, and is to be replaced, gets this name until it is whole.
const INCOMING: &[u8] = b".hayloft-incoming";

/// Whether both have the same content, or lead to the same place, and are no directories.
fn has_same_body(one: &Entry, other: &Entry) -> bool {
    one.kind() == other.kind()
        && one.mode & !0o7777 == other.mode & !0o7777
        && (one.size, &one.chunks, &one.target, one.rdev)
            == (other.size, &other.chunks, &other.target, other.rdev)
        && one.same_as == other.same_as
}

fn times(entry: &Entry) -> Timestamps {
    let modified = Timespec { tv_sec: entry.modified_seconds, tv_nsec: entry.modified_nanos.into() };
    Timestamps { last_access: modified, last_modification: modified }
}

/// Makes the folder what `wanted` says; `is` is what it is now.
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
    let there: HashMap<&[u8], &Entry> =
        is.map_or(&[][..], |is| &is.entries).iter().map(|entry| (entry.path.as_slice(), entry)).collect();
    let wanted_kinds: HashMap<&[u8], Kind> =
        wanted.entries.iter().map(|entry| (entry.path.as_slice(), entry.kind())).collect();
    // Directories in which something happens get their times again.
    let mut touched: HashSet<&[u8]> = HashSet::new();
    for entry in is.map_or(&[][..], |is| &is.entries).iter().rev().filter(|entry| !entry.path.is_empty()) {
        let kind = wanted_kinds.get(entry.path.as_slice());
        let is_directory = entry.kind() == Kind::Directory;
        if kind.is_none_or(|kind| (*kind == Kind::Directory) != is_directory) {
            let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            let (dir, name) = split(&entry.path);
            sys::unlinkat(apply.open(dir)?, name, flags).map_err(apply.failed(entry))?;
            touched.insert(dir);
        }
    }
    // Whose content or links are made anew: their other names have to follow.
    let mut anew: HashSet<&[u8]> = HashSet::new();
    let (mut files, mut links) = (Vec::new(), Vec::new());
    for entry in &wanted.entries {
        let old = there
            .get(entry.path.as_slice())
            .filter(|old| (old.kind() == Kind::Directory) == (entry.kind() == Kind::Directory));
        let follows = !entry.same_as.is_empty() && anew.contains(entry.same_as.as_slice());
        match old {
            Some(old) if old.is_same(entry) && !follows => continue,
            Some(old) if entry.kind() != Kind::Directory && has_same_body(old, entry) && !follows => {
                if entry.same_as.is_empty() {
                    apply.describe(entry, &entry.path)?;
                }
                continue;
            }
            _ => {}
        }
        let (dir, name) = split(&entry.path);
        if entry.kind() == Kind::Directory {
            if old.is_none() && !entry.path.is_empty() {
                sys::mkdirat(apply.open(dir)?, name, Mode::from_raw_mode(0o700))
                    .map_err(apply.failed(entry))?;
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
            apply.describe(entry, &entry.path)?;
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
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let of: &[u8] = if path.is_empty() { b"." } else { path };
        sys::openat2(&self.top, of, flags, Mode::empty(), resolve).map_err(|error| {
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
        let is_large = |(entry, _): &(&Entry, bool)| entry.kind() == Kind::File && entry.size >= LARGE;
        let (large, files): (Vec<_>, Vec<_>) = files.iter().copied().partition(is_large);
        let mut maker = Maker::new(self.contents);
        for (entry, is_there) in large {
            self.make(entry, is_there, &mut maker)?;
        }
        let parts: Vec<_> = files.chunks(AT_A_TIME).collect();
        let (next, done, result) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(Ok(())));
        let threads = if hayloft_tree::is_mount(&self.top) { THREADS_IN_A_MOUNT } else { threads() };
        std::thread::scope(|scope| {
            for _ in 0..threads.min(parts.len()) {
                scope.spawn(|| {
                    let mut maker = Maker::new(self.contents);
                    while let Some(part) = parts.get(next.fetch_add(1, Relaxed)) {
                        for (entry, is_there) in part.iter().copied() {
                            if let Err(error) = self.make(entry, is_there, &mut maker) {
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
        result.into_inner()
    }

    /// Makes a file, in place of another one.
    fn make(&self, entry: &'a Entry, is_there: bool, maker: &mut Maker<'a>) -> Result<(), TransferError> {
        let (dir, name) = split(&entry.path);
        let fd = match maker.dir.take().filter(|(open, _)| *open == dir) {
            Some((_, fd)) => fd,
            None => self.open(dir)?,
        };
        let made = self.make_in(&fd, name, entry, is_there, &mut maker.reader);
        maker.dir = Some((dir, fd));
        made
    }

    fn make_in(
        &self,
        dir: &OwnedFd,
        name: &[u8],
        entry: &'a Entry,
        is_there: bool,
        reader: &mut Reader<'a>,
    ) -> Result<(), TransferError> {
        // Under its own name at once if nothing is there.
        let incoming = [INCOMING, format!("-{:?}", std::thread::current().id()).as_bytes()].concat();
        let under: &[u8] = if is_there { &incoming } else { name };
        let failed = || self.failed(entry);
        match entry.kind() {
            Kind::File => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                let mode = Mode::from_raw_mode(entry.mode & 0o777);
                let file = File::from(sys::openat(dir, under, flags, mode).map_err(failed())?);
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
                self.describe_file(&file, entry)?;
            }
            Kind::Link => {
                sys::symlinkat(entry.target.as_slice(), dir, under).map_err(failed())?;
                self.describe_in(dir, under, entry)?;
            }
            Kind::Special | Kind::Directory => {
                let kind = FileType::from_raw_mode(entry.mode);
                sys::mknodat(dir, under, kind, Mode::from_raw_mode(0o600), entry.rdev).map_err(failed())?;
                self.describe_in(dir, under, entry)?;
            }
        }
        if is_there {
            sys::renameat(dir, under, dir, name).map_err(failed())?;
        }
        Ok(())
    }

    /// As [`Apply::describe`], of a file that was just made: only what it does not have already.
    fn describe_file(&self, file: &File, entry: &Entry) -> Result<(), TransferError> {
        let failed = || self.failed(entry);
        let stat = sys::fstat(file).map_err(failed())?;
        if (stat.st_uid, stat.st_gid) != (entry.uid, entry.gid) {
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            sys::fchown(file, Some(uid), Some(gid)).map_err(failed())?;
        }
        for xattr in &entry.xattrs {
            sys::fsetxattr(file, xattr.name.as_slice(), &xattr.value, XattrFlags::empty())
                .map_err(failed())?;
        }
        // After the owner, and after what was written: both take set-user-ID bits away.
        if stat.st_mode & 0o7777 != entry.mode & 0o7777 || entry.mode & 0o6000 != 0 {
            sys::fchmod(file, Mode::from_raw_mode(entry.mode & 0o7777)).map_err(failed())?;
        }
        sys::futimens(file, &times(entry)).map_err(failed())
    }

    /// Gives what lies at a path the owner, mode, extended attributes and times of an entry.
    fn describe(&self, entry: &Entry, path: &[u8]) -> Result<(), TransferError> {
        let (dir, name) = split(path);
        let fd = self.open(dir)?;
        self.describe_in(&fd, if name.is_empty() { b"." } else { name }, entry)
    }

    fn describe_in(&self, fd: &OwnedFd, name: &[u8], entry: &Entry) -> Result<(), TransferError> {
        let failed = || self.failed(entry);
        sys::chownat(
            fd,
            name,
            Some(Uid::from_raw(entry.uid)),
            Some(Gid::from_raw(entry.gid)),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .map_err(failed())?;
        self.set_xattrs(fd, name, entry)?;
        if entry.kind() != Kind::Link {
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
