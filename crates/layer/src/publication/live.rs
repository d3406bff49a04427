//! A new version of the layers of a root that runs: what differs is put into the root, through its overlay.
//!
//! Three views are compared at each path that differs: what the root was given (`before`), what it is to have (`after`), and what
//! it has. Where the last one is neither, the root has changed the path itself, and nothing is done at all. A file appears by
//! rename(2): whoever opens it finds the old one or the new one.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Mode, StatxFlags};
use rustix::io::Errno;

use crate::error::{Context, LayerError, Result};
use crate::files::copy::{Attributes, Copier, Source};
use crate::files::folder::{FileKind, Folder, Meta, Xattrs};
use crate::overlay::changes::{Walk, same_bytes};
use crate::overlay::stack::{Entry, Marks, Stack};

/// What a file is called as long as it is not complete.
const HALF: &str = ".hayloft-live";

/// Layers, topmost first, and how many of them are above those that both versions have.
#[derive(Debug)]
pub struct View {
    stack: Stack,
    uppers: usize,
}

impl View {
    /// Opens the layers.
    ///
    /// # Errors
    /// When one of them cannot be opened.
    pub fn open(layers: &[PathBuf], uppers: usize, marks: Marks) -> Result<View> {
        let Some((first, rest)) = layers.split_first() else {
            return Err(LayerError::Generation("a root without layers".to_owned()));
        };
        Ok(View { stack: Stack::open(first, rest, marks)?, uppers })
    }

    /// Paths that the layers above the common ones change.
    fn changed(&self) -> Result<BTreeSet<PathBuf>> {
        if self.uppers == 0 {
            return Ok(BTreeSet::new());
        }
        Walk::new(&self.stack, false).of(self.uppers).map(|change| Ok(change?.path)).collect()
    }
}

/// One thing of a tree.
struct Seen {
    folder: Folder,
    name: OsString,
    meta: Meta,
    xattrs: Xattrs,
}

/// What is to be done at a path.
enum Step {
    /// Make it as it is in the new version.
    Put(PathBuf),
    /// Remove it, since something of another kind comes there.
    Clear(PathBuf),
    /// Remove it.
    Remove(PathBuf),
}

/// What would be done to a root.
#[derive(Default)]
pub struct Live {
    steps: Vec<Step>,
    /// Paths that the root has changed itself. As long as there are some nothing can be done.
    pub conflicts: Vec<PathBuf>,
    /// Paths that are not seen in the root, since something is mounted there.
    pub hidden: Vec<PathBuf>,
    /// Bytes of what is written.
    pub bytes: u64,
}

/// What was done to a root.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Applied {
    /// Files and folders made or made anew.
    pub written: u64,
    /// Those removed.
    pub removed: u64,
    /// Paths that something in the root hides.
    pub hidden: u64,
}

/// Entries of a view by path.
struct Entries<'v> {
    stack: &'v Stack,
    folders: HashMap<PathBuf, Option<Entry>>,
}

impl<'v> Entries<'v> {
    fn of(view: &'v View) -> Entries<'v> {
        Entries { stack: &view.stack, folders: HashMap::new() }
    }

    fn entry(&mut self, path: &Path) -> Result<Option<Entry>> {
        let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else { return self.stack.top(0) };
        if !self.folders.contains_key(parent) {
            let entry = self.entry(parent)?.filter(|entry| entry.meta.is_folder());
            self.folders.insert(parent.to_owned(), entry);
        }
        match &self.folders[parent] {
            Some(folder) => self.stack.lookup(folder, name),
            None => Ok(None),
        }
    }

    fn seen(&mut self, path: &Path) -> Result<Option<Seen>> {
        let Some(entry) = self.entry(path)? else { return Ok(None) };
        let xattrs = self.stack.xattrs(&entry)?;
        let (folder, name) = self.stack.parent(entry.content_place())?;
        Ok(Some(Seen { folder, name: name.to_owned(), meta: entry.meta, xattrs }))
    }

    /// All paths below a folder.
    fn below(&mut self, path: &Path, into: &mut BTreeSet<PathBuf>) -> Result<()> {
        let Some(entry) = self.entry(path)?.filter(|entry| entry.meta.is_folder()) else { return Ok(()) };
        for name in self.stack.names(&entry)? {
            let path = path.join(name);
            if self.entry(&path)?.is_some() {
                into.insert(path.clone());
                self.below(&path, into)?;
            }
        }
        Ok(())
    }
}

/// Where something is in a root.
enum There {
    Nothing,
    /// Something is mounted on it or above it.
    Hidden,
    /// The folder that it would be in is not there.
    NoFolder,
    Thing(Seen),
}

fn there(top: &Folder, mount: u64, path: &Path) -> io::Result<There> {
    let parent = match top.sub_of_this_mount(path.parent().unwrap_or(Path::new(""))) {
        Ok(parent) => parent,
        Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::XDEV) => return Ok(There::Hidden),
            Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(There::NoFolder),
            _ => return Err(error),
        },
    };
    let name = path.file_name().unwrap_or(OsStr::new("."));
    let Some(meta) = parent.meta(name)? else { return Ok(There::Nothing) };
    if mount_of(&parent, name)? != mount {
        return Ok(There::Hidden);
    }
    let xattrs = parent.xattrs(name)?;
    Ok(There::Thing(Seen { folder: parent, name: name.to_owned(), meta, xattrs }))
}

fn mount_of(folder: &Folder, name: &OsStr) -> io::Result<u64> {
    Ok(fs::statx(folder, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::MNT_ID)?.stx_mnt_id)
}

/// Whether two are the same but for their times.
fn same(one: Option<&Seen>, other: Option<&Seen>) -> io::Result<bool> {
    let (one, other) = match (one, other) {
        (None, None) => return Ok(true),
        (Some(one), Some(other)) => (one, other),
        _ => return Ok(false),
    };
    let (a, b) = (&one.meta, &other.meta);
    if (a.kind, a.mode, a.uid, a.gid) != (b.kind, b.mode, b.uid, b.gid) || one.xattrs != other.xattrs {
        return Ok(false);
    }
    Ok(match a.kind {
        FileKind::Folder | FileKind::Fifo | FileKind::Socket => true,
        FileKind::Chardev | FileKind::Blockdev => a.rdev == b.rdev,
        FileKind::Symlink => one.folder.link_target(&one.name)? == other.folder.link_target(&other.name)?,
        FileKind::File => {
            a.size == b.size
                && same_bytes(one.folder.open_file(&one.name)?, other.folder.open_file(&other.name)?)?
        }
    })
}

/// Finds out what has to be done to the root whose tree is `merged`.
///
/// # Errors
/// When something cannot be read.
pub fn plan_live(before: &View, after: &View, merged: &Path) -> Result<Live> {
    let top = Folder::open(merged).context("open", merged)?;
    let mount = mount_of(&top, OsStr::new(".")).context("look at", merged)?;
    let (mut old, mut new) = (Entries::of(before), Entries::of(after));
    let mut paths: BTreeSet<PathBuf> = before.changed()?;
    paths.extend(after.changed()?);
    for path in paths.clone() {
        let is_folder = |entry: Option<Entry>| entry.is_some_and(|entry| entry.meta.is_folder());
        if is_folder(old.entry(&path)?) != is_folder(new.entry(&path)?) {
            old.below(&path, &mut paths)?;
            new.below(&path, &mut paths)?;
        }
    }
    let mut live = Live::default();
    let (mut made, mut removals) = (HashSet::new(), Vec::new());
    for path in paths {
        let shown = Path::new("/").join(&path);
        let (was, will) = (old.seen(&path)?, new.seen(&path)?);
        if same(was.as_ref(), will.as_ref()).context("compare", &shown)? {
            continue;
        }
        let is = match there(&top, mount, &path).context("look at", &shown)? {
            There::Hidden => {
                live.hidden.push(shown);
                continue;
            }
            There::NoFolder if will.is_none() => continue,
            There::NoFolder if path.parent().is_some_and(|parent| made.contains(parent)) => None,
            There::NoFolder => {
                live.conflicts.push(shown);
                continue;
            }
            There::Nothing => None,
            There::Thing(seen) => Some(seen),
        };
        if same(is.as_ref(), will.as_ref()).context("compare", &shown)? {
            continue;
        }
        let is_folder = |seen: &Option<Seen>| seen.as_ref().is_some_and(|seen| seen.meta.is_folder());
        // What the root has made itself, and is a folder in both: it stays as the root has made it.
        if was.is_none() && is_folder(&is) && is_folder(&will) {
            continue;
        }
        if !same(is.as_ref(), was.as_ref()).context("compare", &shown)? {
            live.conflicts.push(shown);
            continue;
        }
        match &will {
            Some(seen) => {
                if is.is_some() && is_folder(&is) != seen.meta.is_folder() {
                    removals.push(Step::Clear(path.clone()));
                }
                if seen.meta.is_folder() {
                    made.insert(path.clone());
                } else {
                    live.bytes += seen.meta.size;
                }
                live.steps.push(Step::Put(path));
            }
            None => removals.push(Step::Remove(path)),
        }
    }
    // What is in a folder goes before it.
    removals.reverse();
    let cleared: HashSet<PathBuf> = removals.iter().filter_map(Step::cleared).map(Path::to_owned).collect();
    let (clear, remove): (Vec<_>, Vec<_>) = removals.into_iter().partition(|step| step.is_below(&cleared));
    let puts = std::mem::take(&mut live.steps);
    live.steps = clear.into_iter().chain(puts).chain(remove).collect();
    Ok(live)
}

impl Step {
    fn path(&self) -> &Path {
        match self {
            Step::Put(path) | Step::Clear(path) | Step::Remove(path) => path,
        }
    }

    fn cleared(&self) -> Option<&Path> {
        if let Step::Clear(path) = self { Some(path) } else { None }
    }

    fn is_below(&self, folders: &HashSet<PathBuf>) -> bool {
        self.path().ancestors().any(|path| folders.contains(path))
    }
}

impl Live {
    /// Does it.
    ///
    /// # Errors
    /// When there are conflicts or too little room, and nothing is done; when something fails, and a part is done: once more does the
    /// rest.
    pub fn apply(&self, after: &View, merged: &Path, progress: &dyn Fn(u64)) -> Result<Applied> {
        if let Some(first) = self.conflicts.first() {
            let said = format!("the root has changed {} itself", first.display());
            return Err(LayerError::Choice(said));
        }
        let top = Folder::open(merged).context("open", merged)?;
        let room = fs::fstatvfs(&top).context("look at", merged)?;
        if self.bytes > room.f_bavail * room.f_frsize {
            return Err(Errno::NOSPC).context("write to", merged);
        }
        let mut new = Entries::of(after);
        let mut copier = Copier::new();
        copier.is_watched = true;
        let mut applied = Applied { hidden: self.hidden.len() as u64, ..Applied::default() };
        for (at, step) in self.steps.iter().enumerate() {
            match step {
                Step::Put(path) => {
                    let shown = Path::new("/").join(path);
                    let seen = new.seen(path)?;
                    let Some(seen) = seen else { continue };
                    put(&top, path, &seen, &mut copier).context("write", shown)?;
                    applied.written += 1;
                }
                Step::Clear(path) | Step::Remove(path) => {
                    let shown = Path::new("/").join(path);
                    applied.removed += u64::from(remove(&top, path).context("remove", shown)?);
                }
            }
            if at % 256 == 0 {
                progress(at as u64);
            }
        }
        Ok(applied)
    }
}

fn put(top: &Folder, path: &Path, seen: &Seen, copier: &mut Copier) -> io::Result<()> {
    let parent = top.sub_of_this_mount(path.parent().unwrap_or(Path::new("")))?;
    let name = path.file_name().unwrap_or(OsStr::new("."));
    let attributes = Attributes::new(&seen.meta, seen.xattrs.clone());
    if seen.meta.is_folder() {
        match fs::mkdirat(&parent, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        return copier.set(&parent, name, FileKind::Folder, &attributes);
    }
    let half = OsStr::new(HALF);
    // A kill may have left one.
    parent.unlink(half)?;
    let source = Source { meta: &seen.meta, content: (&seen.folder, &seen.name) };
    let done = copier
        .copy(source, &attributes, &parent, half)
        .and_then(|()| Ok(fs::renameat(&parent, half, &parent, name)?));
    if done.is_err() {
        let _ = parent.unlink(half);
    }
    done
}

/// Gives whether it is gone. A folder in which the root has something of its own stays.
fn remove(top: &Folder, path: &Path) -> io::Result<bool> {
    let parent = match top.sub_of_this_mount(path.parent().unwrap_or(Path::new(""))) {
        Ok(parent) => parent,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let name = path.file_name().unwrap_or(OsStr::new("."));
    if parent.unlink(name)? {
        return Ok(true);
    }
    match fs::unlinkat(&parent, name, AtFlags::REMOVEDIR) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST | Errno::BUSY) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
