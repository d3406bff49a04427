//! Layers as overlayfs shows them: one tree, without mounting it.
//!
//! The rules are those of the kernel's `fs/overlayfs/namei.c` and of its document `filesystems/overlayfs.rst`: whiteouts,
//! opaque folders, redirected folders, and files of which the upper layer has the attributes only ("metacopy").

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use crate::error::{Context, Result};
use crate::files::folder::{Folder, Meta, Xattrs};

/// Which extended attributes overlayfs keeps its marks in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Marks {
    /// `trusted.overlay.*`: mounted by root.
    #[default]
    Trusted,
    /// `user.overlay.*`: mounted with `userxattr`, in a user namespace.
    User,
    /// In none: everything is what it looks like. For copies of folders that may be layers themselves.
    None,
}

impl Marks {
    /// What the names of the marks begin with.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Marks::Trusted => "trusted.overlay.",
            Marks::User => "user.overlay.",
            Marks::None => "none.",
        }
    }
}

/// Where something lies: in which layer, counted from the top, and where in that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub layer: usize,
    pub path: PathBuf,
}

/// A file or folder of the merged view.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Attributes: those of the topmost place.
    pub meta: Meta,
    /// Topmost first. Several for a folder that layers share; a file has one.
    pub places: Vec<Place>,
    /// Where the content is, when that is elsewhere than the attributes.
    pub content: Option<Place>,
    /// A folder that hides what the layers below have of that name.
    pub opaque: bool,
}

impl Entry {
    /// Where the attributes are.
    pub(crate) fn place(&self) -> &Place {
        &self.places[0]
    }

    /// Where the content is.
    pub(crate) fn content_place(&self) -> &Place {
        self.content.as_ref().unwrap_or(self.place())
    }
}

/// Layers, topmost first.
#[derive(Debug)]
pub struct Stack {
    layers: Vec<(Folder, PathBuf)>,
    marks: Marks,
}

/// What a name is in one layer.
enum Found {
    Nothing,
    Hidden,
    File(Meta, PathBuf),
    Folder { meta: Meta, path: PathBuf, opaque: bool },
}

impl Stack {
    /// Opens the upper folder of an overlay and its layers, topmost first.
    ///
    /// # Errors
    /// When one of them cannot be opened.
    pub fn open(upper: &Path, layers: &[PathBuf], marks: Marks) -> Result<Stack> {
        let open = |path: &Path| Ok((Folder::open(path).context("open the layer", path)?, path.to_owned()));
        let all = std::iter::once(upper).chain(layers.iter().map(PathBuf::as_path));
        Ok(Stack { layers: all.map(open).collect::<Result<_>>()?, marks })
    }

    /// A folder that is all there is.
    pub(crate) fn of_folder(folder: Folder, path: PathBuf) -> Stack {
        Stack { layers: vec![(folder, path)], marks: Marks::None }
    }

    /// The marks' home.
    pub(crate) fn marks(&self) -> Marks {
        self.marks
    }

    /// The top folder of the view of the layers from `first` on; `None` when there are none.
    pub(crate) fn top(&self, first: usize) -> Result<Option<Entry>> {
        let Some((folder, path)) = self.layers.get(first) else { return Ok(None) };
        let meta = folder.own_meta().context("look at", path)?;
        let places = (first..self.layers.len()).map(|layer| Place { layer, path: PathBuf::new() }).collect();
        Ok(Some(Entry { meta, places, content: None, opaque: false }))
    }

    /// A place on the host, for messages.
    pub(crate) fn shown(&self, place: &Place) -> PathBuf {
        self.layers[place.layer].1.join(&place.path)
    }

    /// Opens the folder at a place.
    pub(crate) fn folder(&self, place: &Place) -> Result<Folder> {
        self.layers[place.layer].0.sub(&place.path).context("open", self.shown(place))
    }

    /// Opens the folder that a place is in, and its name there.
    pub(crate) fn parent<'p>(&self, place: &'p Place) -> Result<(Folder, &'p OsStr)> {
        self.layers[place.layer].0.parent_of(&place.path).context("open the folder of", self.shown(place))
    }

    /// Extended attributes as the view shows them: without the marks, and with what was escaped from being one.
    pub(crate) fn xattrs(&self, entry: &Entry) -> Result<Xattrs> {
        let (folder, name) = self.parent(entry.place())?;
        let raw = folder.xattrs(name).context("read the attributes of", self.shown(entry.place()))?;
        let prefix = self.marks.prefix().as_bytes();
        let shown = raw.into_iter().filter_map(|(name, value)| {
            let Some(mark) = name.as_bytes().strip_prefix(prefix) else { return Some((name, value)) };
            // An overlay within this one keeps its marks as `overlay.overlay.NAME`.
            let escaped = mark.strip_prefix(b"overlay.")?;
            Some((OsString::from_vec([prefix, escaped].concat()), value))
        });
        Ok(shown.collect())
    }

    /// The names in a folder of the view; some may turn out to be removed.
    pub(crate) fn names(&self, folder: &Entry) -> Result<BTreeSet<OsString>> {
        let mut names = BTreeSet::new();
        for place in &folder.places {
            names.extend(self.names_at(place)?);
        }
        Ok(names)
    }

    /// The names in a folder of one layer.
    pub(crate) fn names_at(&self, place: &Place) -> Result<Vec<OsString>> {
        self.folder(place)?.names().context("list", self.shown(place))
    }

    /// Looks up a name in a folder of the view.
    pub(crate) fn lookup(&self, folder: &Entry, name: &OsStr) -> Result<Option<Entry>> {
        let mut found: Option<Entry> = None;
        // The way to it from each place that is left; a redirect changes it for the layers below.
        let mut way = PathBuf::from(name);
        let mut places: Vec<Place> = folder.places.clone();
        let mut at = 0;
        while let Some(place) = places.get(at).cloned() {
            at += 1;
            let mut redirected = None;
            match self.find(&place, &way, &mut redirected)? {
                Found::Nothing => {}
                Found::Hidden => break,
                Found::File(meta, path) => {
                    let here = Place { layer: place.layer, path };
                    let partial = self.is_metacopy(&here, &meta)?;
                    match &mut found {
                        None => {
                            found = Some(Entry { meta, places: vec![here], content: None, opaque: false });
                        }
                        // A folder hides the file below it.
                        Some(entry) if entry.meta.is_folder() => break,
                        Some(entry) => entry.content = Some(here),
                    }
                    if !partial {
                        break;
                    }
                }
                Found::Folder { meta, path, opaque } => {
                    let here = Place { layer: place.layer, path };
                    match &mut found {
                        None => found = Some(Entry { meta, places: vec![here], content: None, opaque }),
                        Some(entry) if entry.meta.is_folder() => entry.places.push(here),
                        Some(_) => break,
                    }
                    if opaque {
                        break;
                    }
                }
            }
            if let Some(to) = redirected {
                match to.strip_prefix("/") {
                    // From the top of the layers below.
                    Ok(absolute) => {
                        way = absolute.to_owned();
                        let below = place.layer + 1..self.layers.len();
                        places = below.map(|layer| Place { layer, path: PathBuf::new() }).collect();
                        at = 0;
                    }
                    Err(_) => way = to,
                }
            }
        }
        Ok(found)
    }

    /// Looks up a way in one layer, step by step.
    fn find(&self, from: &Place, way: &Path, redirected: &mut Option<PathBuf>) -> Result<Found> {
        let steps: Vec<&OsStr> = way
            .components()
            .filter_map(|step| match step {
                Component::Normal(name) => Some(name),
                _ => None,
            })
            .collect();
        let mut at = from.path.clone();
        for (step, name) in steps.iter().enumerate() {
            let last = step + 1 == steps.len();
            let place = Place { layer: from.layer, path: at.clone() };
            let folder = self.folder(&place)?;
            let Some(meta) = folder.meta(name).context("look at", self.shown(&place).join(name))? else {
                return Ok(Found::Nothing);
            };
            at.push(name);
            if self.is_whiteout(&folder, name, &meta).context("look at", self.shown(&place))? {
                return Ok(Found::Hidden);
            }
            let mark =
                |mark| self.mark(&folder, name, mark).context("look at", self.shown(&place).join(name));
            if !meta.is_folder() {
                if !last {
                    return Ok(Found::Hidden);
                }
                *redirected = mark("redirect")?.and_then(|to| redirect(way, step, &to));
                return Ok(Found::File(meta, at));
            }
            let opaque = mark("opaque")?.is_some_and(|value| value == b"y");
            if !opaque && let Some(to) = mark("redirect")? {
                *redirected = redirect(way, step, &to);
            }
            match last {
                true => return Ok(Found::Folder { meta, path: at, opaque }),
                false if opaque => {
                    // What is below is looked up no further than in this layer; a deeper miss hides as well.
                    let rest: PathBuf = steps[step + 1..].iter().collect();
                    let inside = Place { layer: from.layer, path: at };
                    return Ok(match self.find(&inside, &rest, redirected)? {
                        Found::Nothing => Found::Hidden,
                        Found::Folder { meta, path, .. } => Found::Folder { meta, path, opaque: true },
                        other => other,
                    });
                }
                false => {}
            }
        }
        Ok(Found::Nothing)
    }

    fn mark(&self, folder: &Folder, name: &OsStr, mark: &str) -> io::Result<Option<Vec<u8>>> {
        match self.marks {
            Marks::None => Ok(None),
            marks => folder.xattr(name, &format!("{}{mark}", marks.prefix())),
        }
    }

    /// A character device 0/0, or an empty file marked so in a folder that says that it has such.
    fn is_whiteout(&self, folder: &Folder, name: &OsStr, meta: &Meta) -> io::Result<bool> {
        if self.marks == Marks::None {
            return Ok(false);
        }
        if meta.is_whiteout() {
            return Ok(true);
        }
        if meta.kind != crate::files::folder::FileKind::File || meta.size != 0 {
            return Ok(false);
        }
        if self.mark(folder, name, "whiteout")?.is_none() {
            return Ok(false);
        }
        let of_folder = |mark| self.mark(folder, OsStr::new("."), mark);
        Ok(of_folder("opaque")?.is_some_and(|value| value == b"x") || of_folder("whiteouts")?.is_some())
    }

    fn is_metacopy(&self, place: &Place, meta: &Meta) -> Result<bool> {
        if meta.kind != crate::files::folder::FileKind::File {
            return Ok(false);
        }
        let (folder, name) = self.parent(place)?;
        Ok(self.mark(&folder, name, "metacopy").context("look at", self.shown(place))?.is_some())
    }
}

/// The way after a redirect on its step: absolute, or another name beside.
fn redirect(way: &Path, step: usize, to: &[u8]) -> Option<PathBuf> {
    let to = Path::new(OsStr::from_bytes(to));
    let rest: PathBuf = way.components().skip(step + 1).collect();
    let join = |base: PathBuf| if rest.as_os_str().is_empty() { base } else { base.join(&rest) };
    if to.is_absolute() {
        return Some(join(to.to_owned()));
    }
    let before: PathBuf = way.components().take(step).collect();
    (to.components().count() == 1).then(|| join(before.join(to)))
}
