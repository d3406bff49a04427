//! The tree that is being made: a new version of a folder, from the old one and what was changed.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode};
use rustix::io::Errno;

use crate::error::{Context, LayerError, Result};
use crate::files::copy::{Attributes, Copier, Source};
use crate::files::folder::{FileKind, Folder, Meta};
use crate::overlay::changes::{Change, ChangeKind};
use crate::overlay::stack::{Entry, Stack};
use crate::publication::options::{Form, PublishOptions, Published};
use crate::publication::staging::{Staging, is_staging};

/// The tree that is being made.
pub(crate) struct Tree<'s> {
    /// The root's own.
    stack: &'s Stack,
    /// Folders that are mounted in the root.
    mounted: &'s [(PathBuf, Stack)],
    top: Folder,
    form: Form,
    copier: Copier,
    /// Attributes of the folders, set when all is in them: by then nothing changes their times any more, and one that
    /// may not be written to could be.
    folders: BTreeMap<PathBuf, Attributes>,
    /// Where the first name of a file with several names is.
    links: HashMap<(u64, u64), PathBuf>,
    published: Published,
    stop: Option<&'s dyn Fn() -> bool>,
}

impl<'s> Tree<'s> {
    /// An empty one in `staging`.
    pub(crate) fn make(
        stack: &'s Stack,
        staging: &Staging,
        options: &PublishOptions<'s>,
    ) -> Result<Tree<'s>> {
        let name = staging.new_name();
        fs::mkdirat(staging.folder(), name, Mode::RWXU).context("make", staging.path())?;
        let top = staging.folder().sub(Path::new(name)).context("open", staging.path())?;
        Tree::new(stack, top, options)
    }

    pub(super) fn new(stack: &'s Stack, top: Folder, options: &PublishOptions<'s>) -> Result<Tree<'s>> {
        let mut copier = Copier::new();
        // syncfs(2) does nothing on most FUSE file systems.
        let fuse = || is_fuse(&top).context("look at", Path::new("the new version"));
        copier.fsync_each = options.durable.is_none() && fuse()?;
        let mut tree = Tree {
            stack,
            mounted: options.mounted,
            top,
            form: options.form,
            copier,
            folders: BTreeMap::new(),
            links: HashMap::new(),
            published: Published::default(),
            stop: options.stop,
        };
        if let Some(entry) = stack.top(0)? {
            let attributes = tree.attributes(&entry, stack)?;
            tree.folders.insert(PathBuf::new(), attributes);
        }
        Ok(tree)
    }

    pub(super) fn check_stop(&self) -> Result<()> {
        match self.stop.is_some_and(|stop| stop()) {
            true => Err(LayerError::Stopped),
            false => Ok(()),
        }
    }

    /// Everything of another tree in the same file system: folders anew, the rest by hard links.
    pub(super) fn link_all(&mut self, old: &Folder) -> io::Result<()> {
        let mut pending = vec![PathBuf::new()];
        while let Some(path) = pending.pop() {
            self.check_stop().map_err(io::Error::other)?;
            let folder = old.sub_of_this_mount(&path)?;
            let attributes = Attributes::new(&folder.own_meta()?, folder.xattrs(OsStr::new("."))?);
            let here = self.top.sub(&path)?;
            for name in folder.names()? {
                let Some(meta) = folder.meta(&name)? else { continue };
                if meta.is_folder() && is_staging(&name) {
                    // Left by a crash: nobody makes a version of anything in it now.
                    continue;
                }
                if meta.is_folder() {
                    fs::mkdirat(&here, &name, Mode::RWXU)?;
                    pending.push(path.join(&name));
                } else {
                    self.link(&folder, &here, &name, &meta)?;
                }
            }
            self.folders.insert(path, attributes);
        }
        Ok(())
    }

    fn link(&mut self, from: &Folder, to: &Folder, name: &OsStr, meta: &Meta) -> io::Result<()> {
        match fs::linkat(from, name, to, name, AtFlags::empty()) {
            // Too many names, or a file of somebody else's (fs.protected_hardlinks): a copy.
            Err(Errno::MLINK | Errno::PERM | Errno::XDEV) => {
                let attributes = Attributes::new(meta, from.xattrs(name)?);
                self.copier.copy(Source { meta, content: (from, name) }, &attributes, to, name)
            }
            other => Ok(other?),
        }
    }

    /// Does to the tree what was done to the root, or a folder in it, that the stack is of.
    pub(crate) fn apply(&mut self, change: &Change, stack: &Stack) -> Result<()> {
        let path = &change.path;
        match (&change.new, change.kind) {
            (Some(new), _) if new.meta.is_folder() => self.apply_folder(change, new, stack),
            (Some(new), _) => self.write(path, new, stack).context("copy", Path::new("/").join(path)),
            (None, _) => self.remove(path).context("pass on the removal of", Path::new("/").join(path)),
        }
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        if self.form == Form::Layer {
            self.folders_above(path)?;
            let (folder, name) = self.top.parent_of(path)?;
            fs::mknodat(&folder, name, FileType::CharacterDevice, Mode::empty(), 0)?;
            self.published.removed += 1;
            return Ok(());
        }
        let Some(parent) = self.parent_if_there(path)? else { return Ok(()) };
        let name = path.file_name().unwrap_or_default();
        if parent.meta(name)?.is_some() {
            parent.remove(name)?;
            self.forget_below(path);
            self.published.removed += 1;
        }
        Ok(())
    }

    /// The folder that `path` is in; `None` when there is none.
    fn parent_if_there(&self, path: &Path) -> io::Result<Option<Folder>> {
        match self.top.sub(path.parent().unwrap_or(Path::new(""))) {
            Ok(folder) => Ok(Some(folder)),
            Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
                _ => Err(error),
            },
        }
    }

    fn forget_below(&mut self, path: &Path) {
        let below: Vec<PathBuf> = self
            .folders
            .range(path.to_owned()..)
            .map(|(folder, _)| folder.clone())
            .take_while(|folder| folder.starts_with(path))
            .collect();
        for folder in below {
            self.folders.remove(&folder);
        }
    }

    fn apply_folder(&mut self, change: &Change, new: &Entry, stack: &Stack) -> Result<()> {
        let path = &change.path;
        let shown = Path::new("/").join(path);
        let mut wanted = self.attributes(new, stack)?;
        let was_there = self.folder_at(path).context("copy", &shown)?;
        if self.form == Form::Layer && change.hides && !path.as_os_str().is_empty() {
            let mark = format!("{}opaque", self.stack.marks().prefix());
            wanted.xattrs.insert(mark.into(), b"y".to_vec());
        }
        let old = self.folders.get(path);
        if let Some(now) = old.filter(|_| was_there && change.kind == ChangeKind::Changed) {
            // Only what has changed: the target's own folder may be different in other ways.
            let what = change.aspects;
            wanted = Attributes {
                mode: if what.mode { wanted.mode } else { now.mode },
                uid: if what.owner { wanted.uid } else { now.uid },
                gid: if what.owner { wanted.gid } else { now.gid },
                mtime: if what.time { wanted.mtime } else { now.mtime },
                xattrs: if what.xattrs || self.form == Form::Layer {
                    wanted.xattrs
                } else {
                    now.xattrs.clone()
                },
            };
        }
        self.folders.insert(path.clone(), wanted);
        self.published.written += 1;
        Ok(())
    }

    /// Makes sure that there is a folder at `path`. Gives whether it was there.
    fn folder_at(&mut self, path: &Path) -> io::Result<bool> {
        if self.folders.contains_key(path) {
            return Ok(true);
        }
        self.folders_above(path)?;
        let (parent, name) = self.top.parent_of(path)?;
        parent.remove(name)?;
        fs::mkdirat(&parent, name, Mode::RWXU)?;
        Ok(false)
    }

    /// Makes the folders above `path` that are missing, as they are in the root.
    fn folders_above(&mut self, path: &Path) -> io::Result<()> {
        let Some(above) = path.parent().filter(|above| !self.folders.contains_key(*above)) else {
            return Ok(());
        };
        self.folders_above(above)?;
        let attributes = self.attributes_at(above).map_err(io::Error::other)?;
        let (parent, name) = self.top.parent_of(above)?;
        parent.remove(name)?;
        fs::mkdirat(&parent, name, Mode::RWXU)?;
        self.folders.insert(above.to_owned(), attributes);
        Ok(())
    }

    /// What the folder at `path` of the root is like.
    fn attributes_at(&self, path: &Path) -> Result<Attributes> {
        let inside = self.mounted.iter().find_map(|(at, stack)| Some((stack, path.strip_prefix(at).ok()?)));
        let (stack, rest) = inside.unwrap_or((self.stack, path));
        let mut entry = stack.top(0)?;
        for name in rest {
            entry = match entry.filter(|entry| entry.meta.is_folder()) {
                Some(folder) => stack.lookup(&folder, name)?,
                None => None,
            };
        }
        match entry {
            Some(entry) => self.attributes(&entry, stack),
            // Made only to mount something below it.
            None => Ok(Attributes { mode: 0o755, uid: 0, gid: 0, mtime: (0, 0), xattrs: Default::default() }),
        }
    }

    fn attributes(&self, entry: &Entry, stack: &Stack) -> Result<Attributes> {
        let mut xattrs = stack.xattrs(entry)?;
        if self.form == Form::Layer {
            // What looks like a mark and is none is escaped again.
            let prefix = self.stack.marks().prefix();
            xattrs = xattrs
                .into_iter()
                .map(|(name, value)| match name.as_bytes().strip_prefix(prefix.as_bytes()) {
                    Some(rest) => {
                        let escaped = [prefix.as_bytes(), b"overlay.", rest].concat();
                        (OsStr::from_bytes(&escaped).to_owned(), value)
                    }
                    None => (name, value),
                })
                .collect();
        }
        Ok(Attributes::new(&entry.meta, xattrs))
    }

    fn write(&mut self, path: &Path, entry: &Entry, stack: &Stack) -> io::Result<()> {
        self.folders_above(path)?;
        let (to, name) = self.top.parent_of(path)?;
        if to.meta(name)?.is_some() {
            to.remove(name)?;
            self.forget_below(path);
        }
        self.published.written += 1;
        let several = entry.meta.nlink > 1;
        if let Some(first) = self.links.get(&entry.meta.inode).filter(|_| several) {
            let (from, from_name) = self.top.parent_of(first)?;
            return Ok(fs::linkat(&from, from_name, &to, name, AtFlags::empty())?);
        }
        let attributes = self.attributes(entry, stack).map_err(io::Error::other)?;
        let place = entry.content_place();
        let (from, from_name) = stack.parent(place).map_err(io::Error::other)?;
        let source = Source { meta: &entry.meta, content: (&from, from_name) };
        self.copier.copy(source, &attributes, &to, name)?;
        if several && entry.meta.kind != FileKind::Folder && to.meta(name)?.is_some() {
            self.links.insert(entry.meta.inode, path.to_owned());
        }
        Ok(())
    }

    /// Gives all folders their attributes.
    pub(crate) fn finish(mut self) -> Result<Published> {
        // The deepest ones first: one that may not be entered is left before it is closed.
        for (path, attributes) in std::mem::take(&mut self.folders).iter().rev() {
            let shown = Path::new("/").join(path);
            let (folder, name) = self.top.parent_of(path).context("open the folder of", &shown)?;
            self.copier
                .set(&folder, name, FileKind::Folder, attributes)
                .context("set the attributes of", &shown)?;
            if self.copier.fsync_each {
                let _ = fs::fsync(&folder);
            }
        }
        Ok(Published { bytes: self.copier.bytes, lost: self.copier.lost, ..self.published })
    }
}

/// FUSE_SUPER_MAGIC of statfs(2).
const FUSE_MAGIC: i64 = 0x6573_5546;

fn is_fuse(folder: &Folder) -> io::Result<bool> {
    #[allow(clippy::unnecessary_cast)]
    Ok(fs::fstatfs(folder)?.f_type as i64 == FUSE_MAGIC)
}
