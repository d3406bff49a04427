//! What a build root has changed against its layers.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::files::folder::FileKind;
use crate::overlay::stack::{Entry, Stack};

/// How a path has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// It was not there.
    Added,
    /// It is gone, with everything that was below it.
    Removed,
    /// It is of another kind now: a folder that was a file, say.
    Type,
    /// It is of the same kind, and something about it is different.
    Changed,
}

/// What is different about something that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Aspects {
    /// The bytes of a file, where a link points, or which device it is.
    pub content: bool,
    /// Permission bits.
    pub mode: bool,
    /// Owner or group.
    pub owner: bool,
    /// Extended attributes: capabilities, access control lists and others.
    pub xattrs: bool,
    /// The time of the last modification.
    pub time: bool,
    /// It has got another name: it is what that one is.
    pub links: bool,
}

impl Aspects {
    /// The names of those that differ.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let all = [
            (self.content, "content"),
            (self.mode, "mode"),
            (self.owner, "owner"),
            (self.xattrs, "xattrs"),
            (self.time, "time"),
            (self.links, "links"),
        ];
        all.into_iter().filter_map(|(differs, name)| differs.then_some(name))
    }

    fn any(self) -> bool {
        self != Aspects::default()
    }
}

/// One path that has changed.
#[derive(Debug, Clone)]
pub struct Change {
    /// Where, below the top of the root; empty for the top itself.
    pub path: PathBuf,
    /// How.
    pub kind: ChangeKind,
    /// What is different when the kind is [`ChangeKind::Changed`].
    pub aspects: Aspects,
    pub(crate) new: Option<Entry>,
    pub(crate) old: Option<Entry>,
    /// A folder that has nothing of the folder that was there: it hides that one as a layer.
    pub(crate) hides: bool,
}

impl Change {
    /// What it is now, or was when it is removed.
    pub fn file_kind(&self) -> FileKind {
        self.new.as_ref().or(self.old.as_ref()).map_or(FileKind::File, |entry| entry.meta.kind)
    }

    /// Permission bits, owner and group before and now.
    pub fn attributes(&self) -> [Option<(u32, u32, u32)>; 2] {
        let of = |entry: &Option<Entry>| entry.as_ref().map(|e| (e.meta.mode, e.meta.uid, e.meta.gid));
        [of(&self.old), of(&self.new)]
    }

    /// Whether nothing but the time of a folder has changed, which every new name in it does.
    pub fn is_only_a_folders_time(&self) -> bool {
        let only_time = Aspects { time: true, ..Aspects::default() };
        self.kind == ChangeKind::Changed && self.aspects == only_time && self.file_kind() == FileKind::Folder
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.kind {
            ChangeKind::Added => "added",
            ChangeKind::Removed => "removed",
            ChangeKind::Type => "type",
            ChangeKind::Changed => "changed",
        };
        write!(f, "{word:<8} /{}", self.path.display())
    }
}

/// The changes in an overlay's upper folder (the first layer of the stack) against what is below: a folder before what is
/// in it, names in the order of their bytes. What was only copied up, and is as it was, is not among them.
///
/// # Errors
/// Each item: when something cannot be read; the walk ends there.
pub fn changes(stack: &Stack) -> impl Iterator<Item = Result<Change>> {
    Walk::new(stack, false)
}

/// A folder to look into.
struct Pending {
    path: PathBuf,
    new: Entry,
    old: Option<Entry>,
}

/// The walk behind [`changes`].
pub(crate) struct Walk<'s> {
    stack: &'s Stack,
    /// How many layers are taken for changes of those below.
    uppers: usize,
    /// As a layer needs it: nothing is told of what a folder hides, and everything of what it holds.
    as_layer: bool,
    /// Where the top is, for the paths that are told.
    at: PathBuf,
    /// Folders that lead to none of these are not looked into, nor what is not in one of these; unless there are none.
    only: Vec<PathBuf>,
    ready: VecDeque<Result<Change>>,
    pending: Vec<Pending>,
    started: bool,
}

impl<'s> Walk<'s> {
    pub(crate) fn new(stack: &'s Stack, as_layer: bool) -> Walk<'s> {
        Walk {
            stack,
            uppers: 1,
            as_layer,
            at: PathBuf::new(),
            only: Vec::new(),
            ready: VecDeque::new(),
            pending: Vec::new(),
            started: false,
        }
    }

    /// The same for the changes that so many layers, the topmost ones, make together.
    pub(crate) fn of(mut self, uppers: usize) -> Walk<'s> {
        self.uppers = uppers;
        self
    }

    /// The same for a folder that is at `at`, as far as these paths go.
    pub(crate) fn below(mut self, at: &Path, only: &[PathBuf]) -> Walk<'s> {
        at.clone_into(&mut self.at);
        only.clone_into(&mut self.only);
        self
    }

    fn leads_somewhere(&self, path: &Path) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only.starts_with(path) || path.starts_with(only))
    }

    fn start(&mut self) -> Result<()> {
        let Some(new) = self.stack.top(0)? else { return Ok(()) };
        let old = self.stack.top(self.uppers)?;
        self.consider(self.at.clone(), Some(new), old)
    }

    /// Looks into a folder: the changes in it are ready, and folders in it wait.
    fn descend(&mut self, folder: &Pending) -> Result<()> {
        let first_new = self.pending.len();
        for name in self.names(folder)? {
            let new = self.stack.lookup(&folder.new, &name)?;
            let old = match &folder.old {
                Some(old) => self.stack.lookup(old, &name)?,
                None => None,
            };
            self.consider(folder.path.join(&name), new, old)?;
        }
        // The last one waiting is the next one looked into.
        self.pending[first_new..].reverse();
        Ok(())
    }

    /// Names that may have changed: when both views have the same layers below, only those of the upper folder.
    fn names(&self, folder: &Pending) -> Result<Vec<OsString>> {
        if same_below(&folder.new, folder.old.as_ref(), self.uppers) {
            let mut names = Vec::new();
            let above = folder.new.places.iter().take_while(|place| place.layer < self.uppers);
            // One that has no place above has no change in it.
            for place in above {
                names.extend(self.stack.names_at(place)?);
            }
            names.sort();
            names.dedup();
            return Ok(names);
        }
        let mut names = self.stack.names(&folder.new)?;
        if let Some(old) = &folder.old {
            names.extend(self.stack.names(old)?);
        }
        Ok(names.into_iter().collect())
    }

    fn consider(&mut self, path: PathBuf, new: Option<Entry>, old: Option<Entry>) -> Result<()> {
        let (kind, aspects) = match (&new, &old) {
            (None, None) => return Ok(()),
            (Some(_), None) => (Some(ChangeKind::Added), Aspects::default()),
            (None, Some(_)) => (Some(ChangeKind::Removed), Aspects::default()),
            (Some(new), Some(old)) if new.meta.kind != old.meta.kind => {
                (Some(ChangeKind::Type), Aspects::default())
            }
            (Some(new), Some(old)) => {
                let aspects = differences(self.stack, new, old)?;
                (aspects.any().then_some(ChangeKind::Changed), aspects)
            }
        };
        let replaced = match (&new, &old) {
            (Some(new), Some(old)) if new.meta.is_folder() && old.meta.is_folder() => {
                new.places != old.places && !same_below(new, Some(old), self.uppers)
            }
            _ => false,
        };
        let hides = replaced || new.as_ref().is_some_and(|new| new.opaque && new.place().layer < self.uppers);
        // A replaced folder must be told of as a layer, even if it looks as before.
        if let Some(kind) = kind.or((replaced && self.as_layer).then_some(ChangeKind::Changed)) {
            let change =
                Change { path: path.clone(), kind, aspects, new: new.clone(), old: old.clone(), hides };
            self.ready.push_back(Ok(change));
        }
        if let Some(new) = new.filter(|new| new.meta.is_folder()) {
            let old = old.filter(|old| old.meta.is_folder() && !(replaced && self.as_layer));
            let untouched = old.as_ref().is_some_and(|old| old.places == new.places);
            if !untouched && self.leads_somewhere(&path) {
                self.pending.push(Pending { path, new, old });
            }
        }
        Ok(())
    }
}

impl Iterator for Walk<'_> {
    type Item = Result<Change>;

    fn next(&mut self) -> Option<Result<Change>> {
        if !self.started {
            self.started = true;
            if let Err(error) = self.start() {
                self.ready.push_back(Err(error));
            }
        }
        loop {
            if let Some(change) = self.ready.pop_front() {
                return Some(change);
            }
            let folder = self.pending.pop()?;
            if let Err(error) = self.descend(&folder) {
                self.pending.clear();
                self.ready.push_back(Err(error));
            }
        }
    }
}

/// Whether a folder of the upper layers lies over exactly what the view without them shows there.
fn same_below(new: &Entry, old: Option<&Entry>, uppers: usize) -> bool {
    let above = new.places.iter().take_while(|place| place.layer < uppers).count();
    &new.places[above..] == old.map_or(&[][..], |old| &old.places[..])
}

fn differences(stack: &Stack, new: &Entry, old: &Entry) -> Result<Aspects> {
    if new.places == old.places || new.place() == old.place() {
        return Ok(Aspects::default());
    }
    let (a, b) = (&new.meta, &old.meta);
    Ok(Aspects {
        content: !same_content(stack, new, old)?,
        mode: a.mode != b.mode,
        owner: (a.uid, a.gid) != (b.uid, b.gid),
        xattrs: stack.xattrs(new)? != stack.xattrs(old)?,
        time: a.mtime != b.mtime,
        links: !a.is_folder() && a.nlink > 1 && new.place().layer == 0,
    })
}

fn same_content(stack: &Stack, new: &Entry, old: &Entry) -> Result<bool> {
    let (one, other) = (new.content_place(), old.content_place());
    match new.meta.kind {
        FileKind::Folder | FileKind::Fifo | FileKind::Socket => Ok(true),
        FileKind::Chardev | FileKind::Blockdev => Ok(new.meta.rdev == old.meta.rdev),
        FileKind::Symlink => {
            let target = |place| {
                let (folder, name) = stack.parent(place)?;
                folder.link_target(name).context("read the link", stack.shown(place))
            };
            Ok(target(one)? == target(other)?)
        }
        FileKind::File => {
            if one == other {
                return Ok(true);
            }
            let open = |place| {
                let (folder, name) = stack.parent(place)?;
                folder.open_file(name).context("read", stack.shown(place))
            };
            let (one, other) = (open(one)?, open(other)?);
            let length = |file: &std::fs::File| file.metadata().context("look at", Path::new("a file"));
            if length(&one)?.len() != length(&other)?.len() {
                return Ok(false);
            }
            same_bytes(one, other).context("compare", stack.shown(new.content_place()))
        }
    }
}

pub(crate) fn same_bytes(mut one: impl Read, mut other: impl Read) -> io::Result<bool> {
    let (mut left, mut right) = (vec![0; 128 << 10], vec![0; 128 << 10]);
    loop {
        let length = read_full(&mut one, &mut left)?;
        if length != read_full(&mut other, &mut right)? || left[..length] != right[..length] {
            return Ok(false);
        }
        if length < left.len() {
            return Ok(true);
        }
    }
}

fn read_full(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut at = 0;
    while at < buffer.len() {
        match file.read(&mut buffer[at..]) {
            Ok(0) => break,
            Ok(length) => at += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(at)
}
