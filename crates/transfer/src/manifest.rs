//! The manifest of a tree: all that is in it but the bytes of files, of which it has the chunks' names.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use hayloft_tree::{Attributes, Body, Kind, PIECE, Pieces, Progress, TreeName, WalkError};
use parking_lot::Mutex;
use prost::Message;

use crate::chunk::{self, ChunkId};
use crate::cutter::{Cut, Cutter, Trusted};
use crate::error::TransferError;
use crate::far::Far;

/// An extended attribute.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Xattr {
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// Something in a tree; docs/transfer.md says what each field means.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Entry {
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    #[prost(uint32, tag = "3")]
    pub uid: u32,
    #[prost(uint32, tag = "4")]
    pub gid: u32,
    #[prost(uint64, tag = "5")]
    pub rdev: u64,
    #[prost(sint64, tag = "6")]
    pub modified_seconds: i64,
    #[prost(uint32, tag = "7")]
    pub modified_nanos: u32,
    #[prost(message, repeated, tag = "8")]
    pub xattrs: Vec<Xattr>,
    #[prost(uint64, tag = "9")]
    pub size: u64,
    /// The hash of the content, of files with more than one piece; of others it is that of the only chunk's name.
    #[prost(bytes = "vec", tag = "10")]
    pub content: Vec<u8>,
    /// The chunks' names, one after the other.
    #[prost(bytes = "vec", tag = "11")]
    pub chunks: Vec<u8>,
    #[prost(uint32, repeated, tag = "12")]
    pub lengths: Vec<u32>,
    /// Where a symbolic link leads.
    #[prost(bytes = "vec", tag = "13")]
    pub target: Vec<u8>,
    /// An earlier path that is the same file.
    #[prost(bytes = "vec", tag = "14")]
    pub same_as: Vec<u8>,
    /// Zeros that no chunk has: for each hole where it begins, and its length. They begin and end with whole pieces, or with the file.
    #[prost(uint64, repeated, tag = "18")]
    pub holes: Vec<u64>,
    /// Only in a manifest that a host keeps: by these it knows a file again that has not changed.
    #[prost(uint64, tag = "15")]
    pub inode: u64,
    #[prost(sint64, tag = "16")]
    pub changed_seconds: i64,
    #[prost(uint32, tag = "17")]
    pub changed_nanos: u32,
}

impl Entry {
    pub(crate) fn kind(&self) -> Kind {
        Kind::of(self.mode)
    }

    /// What was found in a walk, without other names that it has.
    pub(crate) fn of(found: hayloft_tree::Entry, cut: Cut) -> Entry {
        let (size, target) = match found.body {
            Body::File { size, .. } => (size, Vec::new()),
            Body::Link(target) => (0, target),
            Body::Directory(_) | Body::Nothing => (0, Vec::new()),
        };
        let of = found.attributes;
        let is_derived = cut.lengths.len() <= 1 && cut.holes.is_empty();
        let has_content = Kind::of(of.mode) == Kind::File && !is_derived;
        Entry {
            path: found.path,
            mode: of.mode,
            uid: of.uid,
            gid: of.gid,
            rdev: if Kind::of(of.mode) == Kind::Special { of.rdev } else { 0 },
            modified_seconds: found.modified.0,
            modified_nanos: found.modified.1,
            xattrs: of.xattrs.into_iter().map(|(name, value)| Xattr { name, value }).collect(),
            size,
            content: if has_content { cut.content.to_vec() } else { Vec::new() },
            chunks: cut.chunks,
            lengths: cut.lengths,
            holes: cut.holes,
            target,
            same_as: Vec::new(),
            // Of a file that which was opened.
            inode: if cut.inode == 0 { found.inode } else { cut.inode },
            changed_seconds: cut.changed.0,
            changed_nanos: cut.changed.1,
        }
    }

    /// Its holes: where each begins, and ends.
    pub(crate) fn holes(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.holes.as_chunks::<2>().0.iter().map(|[begin, len]| *begin..begin.saturating_add(*len))
    }

    /// What chunks have: all between the holes.
    pub(crate) fn extents(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = 0;
        let ends = self.holes().chain(std::iter::once(self.size..self.size));
        ends.map(move |hole| std::mem::replace(&mut at, hole.end)..hole.start)
            .filter(|extent| !extent.is_empty())
    }

    /// Its chunks: name, where in the file it begins, length.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (ChunkId, u64, u32)> + '_ {
        let mut holes = self.holes().peekable();
        ChunkId::all(&self.chunks).zip(&self.lengths).scan(0, move |at, (id, len)| {
            while let Some(hole) = holes.next_if(|hole| hole.start <= *at) {
                *at = hole.end;
            }
            let begin = *at;
            *at += u64::from(*len);
            Some((id, begin, *len))
        })
    }

    /// Whether both are the same but for what only a host knows.
    pub(crate) fn is_same(&self, other: &Entry) -> bool {
        let of = |entry: &Entry| {
            (
                entry.mode,
                entry.uid,
                entry.gid,
                entry.rdev,
                entry.size,
                entry.modified_seconds,
                entry.modified_nanos,
            )
        };
        of(self) == of(other)
            && self.path == other.path
            && self.xattrs == other.xattrs
            && (&self.content, &self.chunks, &self.lengths) == (&other.content, &other.chunks, &other.lengths)
            && self.holes == other.holes
            && (&self.target, &self.same_as) == (&other.target, &other.same_as)
    }

    /// Without what only a host knows.
    pub(crate) fn plain(&self) -> Entry {
        Entry { inode: 0, changed_seconds: 0, changed_nanos: 0, ..self.clone() }
    }

    /// As [`Entry::plain`], without times.
    pub(crate) fn timeless(&self) -> Entry {
        Entry { modified_seconds: 0, modified_nanos: 0, ..self.plain() }
    }

    pub(crate) fn content_hash(&self) -> [u8; 32] {
        let mut pieces = Pieces::default();
        match <[u8; 32]>::try_from(self.content.as_slice()) {
            Ok(content) => content,
            Err(_) => {
                for id in ChunkId::all(&self.chunks) {
                    pieces.push(&id.0);
                }
                pieces.finish()
            }
        }
    }

    pub(crate) fn to_tree(&self) -> hayloft_tree::Entry {
        let attributes = Attributes {
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            xattrs: self.xattrs.iter().map(|xattr| (xattr.name.clone(), xattr.value.clone())).collect(),
        };
        let body = match self.kind() {
            Kind::File => Body::File { size: self.size, content: self.content_hash() },
            Kind::Link => Body::Link(self.target.clone()),
            Kind::Directory | Kind::Special => Body::Nothing,
        };
        let node = hayloft_tree::name::node(&attributes, &body);
        let modified = (self.modified_seconds, self.modified_nanos);
        let (path, inode) = (self.path.clone(), self.inode);
        hayloft_tree::Entry { path, attributes, body, node, modified, inode, links: 1 }
    }
}

/// The manifest of a tree.
#[derive(Clone, PartialEq, Debug)]
pub struct Manifest {
    /// By path; the first one is the top.
    pub(crate) entries: Vec<Entry>,
    /// The tree's name, as it follows from the entries.
    pub tree: TreeName,
}

impl Manifest {
    /// What a folder is if files have the content that they have here; with its name as it is.
    ///
    /// # Errors
    /// As [`hayloft_tree::walk`].
    pub(crate) fn of_copy(&self, folder: &Path) -> Result<Manifest, WalkError> {
        let entries = self.entries.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
        let trusted = Trusted { entries, marks: Mutex::default() };
        let tree = hayloft_tree::walk_with(folder, &trusted, &Progress::default())?.name;
        let marks = trusted.marks.into_inner();
        let marked = |entry: &Entry| {
            let (inode, (changed_seconds, changed_nanos)) =
                marks.get(&entry.path).copied().unwrap_or_default();
            Entry { inode, changed_seconds, changed_nanos, ..entry.clone() }
        };
        Ok(Manifest { entries: self.entries.iter().map(marked).collect(), tree })
    }

    /// Reads a folder. Files that `known` has under the same path, inode number and time of change are not read again, so it
    /// must be of an earlier state of the same folder.
    ///
    /// # Errors
    /// As [`hayloft_tree::walk`].
    pub fn of_folder(
        top: &Path,
        known: Option<&Manifest>,
        progress: &Progress,
    ) -> Result<Manifest, WalkError> {
        Manifest::of_mount(top, known, None, progress)
    }

    /// As [`Manifest::of_folder`], of a mount of what `far` has: that cuts large files.
    ///
    /// # Errors
    /// As there.
    pub fn of_mount(
        top: &Path,
        known: Option<&Manifest>,
        far: Option<&dyn Far>,
        progress: &Progress,
    ) -> Result<Manifest, WalkError> {
        let known = known.map_or(&[][..], |known| &known.entries);
        let known = known.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
        let cutter = Cutter::new(known, HashSet::new(), far);
        let walked = hayloft_tree::walk_with(top, &cutter, progress)?;
        let mut cuts = cutter.cuts();
        let mut first_names: HashMap<u64, Vec<u8>> = HashMap::new();
        let entries = walked.entries.into_iter().map(|found| {
            let cut = cuts.remove(&found.path).unwrap_or_default();
            let mut same_as = Vec::new();
            if found.is_linked() {
                match first_names.get(&found.inode) {
                    Some(first) => same_as.clone_from(first),
                    None => drop(first_names.insert(found.inode, found.path.clone())),
                }
            }
            Entry { same_as, ..Entry::of(found, cut) }
        });
        Ok(Manifest { entries: entries.collect(), tree: walked.name })
    }

    /// As it is sent: without what only this host knows.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.encode(Entry::plain)
    }

    /// As a host keeps it.
    pub(crate) fn to_kept_bytes(&self) -> Vec<u8> {
        self.encode(Entry::clone)
    }

    fn encode(&self, of: impl Fn(&Entry) -> Entry) -> Vec<u8> {
        let mut bytes = Vec::new();
        for entry in &self.entries {
            let encoded = of(entry).encode_length_delimited_to_vec();
            bytes.extend_from_slice(&encoded);
        }
        bytes
    }

    /// Reads one, and works out the tree's name.
    ///
    /// # Errors
    /// It is damaged, or nobody's honest manifest: paths lead elsewhere, or sizes do not agree.
    pub(crate) fn from_bytes(mut bytes: &[u8]) -> Result<Manifest, TransferError> {
        let mut entries: Vec<Entry> = Vec::new();
        while !bytes.is_empty() {
            let entry = Entry::decode_length_delimited(&mut bytes)
                .map_err(|error| TransferError::Damaged(format!("the manifest: {error}")))?;
            // Now, and not when memory is full of them.
            if entries.last().is_some_and(|last| last.path >= entry.path) {
                return Err(TransferError::Damaged("the manifest: paths are not in order".to_owned()));
            }
            entries.push(entry);
        }
        check(&entries)?;
        let named = hayloft_tree::named(entries.iter().map(Entry::to_tree).collect());
        Ok(Manifest { entries, tree: named.name })
    }

    /// Files, directories and all else.
    pub fn len(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Whether there is nothing, not even a top.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        let firsts = self.entries.iter().filter(|entry| entry.same_as.is_empty());
        firsts.fold(0, |sum, entry| sum.saturating_add(entry.size))
    }
}

/// Whether chunks and holes together are as much as the file has, and no chunk is in a hole.
fn fits(entry: &Entry) -> bool {
    let (mut lengths, mut at) = (entry.lengths.iter(), 0);
    let holes = entry.holes.as_chunks::<2>().0;
    if holes.iter().any(|[_, len]| *len == 0) {
        return false;
    }
    let ends = holes.iter().map(|[begin, len]| (*begin, *len)).chain([(entry.size, 0)]);
    for (begin, len) in ends {
        while at < begin {
            let Some(len) = lengths.next() else { return false };
            at += u64::from(*len);
        }
        let Some(end) = begin.checked_add(len) else { return false };
        let is_whole =
            len == 0 || (begin.is_multiple_of(PIECE) && (len.is_multiple_of(PIECE) || end == entry.size));
        if at != begin || !is_whole || end > entry.size {
            return false;
        }
        at = end;
    }
    entry.holes.len().is_multiple_of(2) && lengths.next().is_none()
}

/// Whatever a stranger writes into a manifest, nothing outside of the folder is touched: paths are in order, have no `..`, and what
/// they lie in are directories of the manifest.
fn check(entries: &[Entry]) -> Result<(), TransferError> {
    let wrong = |entry: &Entry, what: &str| {
        Err(TransferError::Damaged(format!("the manifest: {}: {what}", String::from_utf8_lossy(&entry.path))))
    };
    let Some(top) = entries.first().filter(|top| top.path.is_empty() && top.kind() == Kind::Directory) else {
        return Err(TransferError::Damaged("the manifest has no top directory".to_owned()));
    };
    if !(top.chunks.is_empty() && top.lengths.is_empty() && top.holes.is_empty()) {
        return wrong(top, "a directory has no content");
    }
    let mut kinds: HashMap<&[u8], Kind> = HashMap::from([(top.path.as_slice(), Kind::Directory)]);
    let mut firsts: HashMap<&[u8], &Entry> = HashMap::new();
    for entry in &entries[1..] {
        let (dir, name) = hayloft_tree::split(&entry.path);
        if matches!(name, b"" | b"." | b"..") || name.len() > 255 || name.contains(&0) {
            return wrong(entry, "that is no name of a file");
        }
        if kinds.get(dir) != Some(&Kind::Directory) {
            return wrong(entry, "it lies in no directory");
        }
        if entry.chunks.len() != entry.lengths.len() * 32 {
            return wrong(entry, "chunks and lengths do not agree");
        }
        let is_file = entry.kind() == Kind::File;
        let too_long = entry.lengths.iter().any(|len| *len as usize > chunk::LONGEST);
        if too_long || (!is_file && entry.size > 0) || !fits(entry) {
            return wrong(entry, "chunks do not have its size");
        }
        if entry.same_as.is_empty() {
            firsts.insert(&entry.path, entry);
        } else {
            let of = |entry: &Entry| Entry { path: Vec::new(), same_as: Vec::new(), ..entry.clone() };
            if entry.kind() == Kind::Directory
                || firsts.get(entry.same_as.as_slice()).is_none_or(|first| of(first) != of(entry))
            {
                return wrong(entry, "it is the same as something that is not there, or is another file");
            }
        }
        if entry.target.contains(&0) || (entry.kind() == Kind::Link && entry.target.is_empty()) {
            return wrong(entry, "it leads nowhere");
        }
        kinds.insert(&entry.path, entry.kind());
    }
    Ok(())
}
