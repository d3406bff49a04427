//! How a walk learns the content of files: they are cut here or by whoever has them, or known already.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use hayloft_tree::chunk::Chunk;
use hayloft_tree::holes::{self, Part};
use hayloft_tree::{Contents, Found, PIECE, Pieces, Unopened};
use parking_lot::Mutex;

use crate::chunk::{self, ChunkId};
use crate::contents::LARGE;
use crate::far::{self, Far};
use crate::large;
use crate::manifest::Entry;

/// What is known of a file: where its chunks are cut, and the hash of its content.
#[derive(Clone, Default)]
pub(crate) struct Cut {
    pub(crate) content: [u8; 32],
    /// As in [`Entry`].
    pub(crate) holes: Vec<u64>,
    pub(crate) chunks: Vec<u8>,
    pub(crate) lengths: Vec<u32>,
    pub(crate) inode: u64,
    pub(crate) changed: (i64, u32),
}

impl Cut {
    /// Cuts a file. Returns how much of it there was.
    fn read(&mut self, file: &File, size: u64, holes: &[Range<u64>]) -> io::Result<u64> {
        if size >= LARGE && holes.is_empty() {
            let whole = large::cut(file, size)?;
            (self.chunks, self.lengths, self.content) = (whole.chunks, whole.lengths, whole.content);
            // Should it have grown.
            return Ok(whole.read + file.read_at(&mut [0], size)? as u64);
        }
        let mut content = Content::new();
        self.holes = holes.iter().flat_map(|hole| [hole.start, hole.end - hole.start]).collect();
        let mut take = |part: Part<'_>| match part {
            Part::Hole(hole) => {
                content.zeros(hole.end - hole.start);
                Ok(hole.end - hole.start)
            }
            Part::Data(data) => {
                let mut read = Hashed { read: data, len: 0, content: &mut content };
                chunk::cut(&mut read, |chunk| {
                    self.chunks.extend_from_slice(&ChunkId::of(chunk).0);
                    self.lengths.push(chunk.len() as u32);
                })?;
                Ok(read.len)
            }
        };
        let read = holes::read(file, size, holes, &mut take)?;
        self.content = content.finish();
        Ok(read)
    }
}

/// Cuts the files of a walk, but for those that a manifest of the same tree's earlier state knows.
pub(crate) struct Cutter<'a> {
    /// By the path where it is looked for now.
    known: HashMap<&'a [u8], &'a Entry>,
    /// Paths where content is what is known, whatever the inode says.
    trusted: HashSet<&'a [u8]>,
    /// Who cuts large files instead.
    far: Option<&'a dyn Far>,
    cuts: Mutex<HashMap<Vec<u8>, Cut>>,
}

impl<'a> Cutter<'a> {
    /// With what is known of some paths.
    pub(crate) fn new(
        known: HashMap<&'a [u8], &'a Entry>,
        trusted: HashSet<&'a [u8]>,
        far: Option<&'a dyn Far>,
    ) -> Cutter<'a> {
        Cutter { known, trusted, far, cuts: Mutex::default() }
    }

    /// How whoever has a large file cuts it.
    fn cut_by_far(
        &self,
        found: &Found<'_>,
        holes: &[Range<u64>],
    ) -> io::Result<Option<(Vec<Chunk>, [u8; 32])>> {
        match self.far.filter(|_| found.size >= far::CUT_FROM && holes.is_empty()) {
            Some(far) => far::cut(far, found.path, found.size, self.known.get(found.path).copied()),
            None => Ok(None),
        }
    }

    /// What was cut, by path.
    pub(crate) fn cuts(self) -> HashMap<Vec<u8>, Cut> {
        self.cuts.into_inner()
    }
}

/// Computes the hash of a content from bytes as they come.
struct Content {
    piece: blake3::Hasher,
    in_piece: u64,
    pieces: Pieces,
}

impl Content {
    fn new() -> Content {
        Content { piece: blake3::Hasher::new(), in_piece: 0, pieces: Pieces::default() }
    }

    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min((PIECE - self.in_piece) as usize));
            self.piece.update(now);
            self.in_piece += now.len() as u64;
            bytes = later;
            if self.in_piece == PIECE {
                self.end_piece();
            }
        }
    }

    /// Zeros behind a whole piece; unless they are whole pieces themselves nothing follows.
    fn zeros(&mut self, bytes: u64) {
        if self.in_piece > 0 {
            // It got shorter before them: all of it is of no use.
            self.end_piece();
        }
        self.pieces.push_zeros(bytes);
    }

    fn end_piece(&mut self) {
        self.pieces.push(self.piece.finalize().as_bytes());
        self.piece.reset();
        self.in_piece = 0;
    }

    fn finish(mut self) -> [u8; 32] {
        if self.in_piece > 0 {
            self.end_piece();
        }
        self.pieces.finish()
    }
}

/// Computes the hash of a content while that is read for something else.
struct Hashed<'a> {
    read: &'a mut dyn Read,
    len: u64,
    content: &'a mut Content,
}

impl Read for Hashed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let some = self.read.read(buffer)?;
        self.len += some as u64;
        self.content.update(&buffer[..some]);
        Ok(some)
    }
}

/// Whether what is known of a file is so still: nothing of it was changed since.
fn is_untouched(entry: &Entry, found: &Found<'_>) -> bool {
    entry.inode != 0
        && entry.inode == found.inode
        && (entry.changed_seconds, entry.changed_nanos) == found.changed
        && entry.size == found.size
}

impl Cutter<'_> {
    /// Of a file whose content is known.
    fn note(&self, entry: &Entry, found: &Found<'_>) -> [u8; 32] {
        let content = entry.content_hash();
        let cut = Cut {
            content,
            holes: entry.holes.clone(),
            chunks: entry.chunks.clone(),
            lengths: entry.lengths.clone(),
            inode: found.inode,
            changed: found.changed,
        };
        self.cuts.lock().insert(found.path.to_vec(), cut);
        content
    }
}

impl Contents for Cutter<'_> {
    fn of(&self, found: &Found<'_>, file: &File) -> io::Result<(u64, [u8; 32])> {
        let is_same = |entry: &&&Entry| {
            entry.size == found.size && (is_untouched(entry, found) || self.trusted.contains(found.path))
        };
        if let Some(entry) = self.known.get(found.path).filter(is_same) {
            return Ok((found.size, self.note(entry, found)));
        }
        let mut cut = Cut { inode: found.inode, changed: found.changed, ..Cut::default() };
        let mut size = found.size;
        let holes = holes::of(file, found.size)?;
        if let Some((chunks, content)) = self.cut_by_far(found, &holes)? {
            cut.content = content;
            for (name, len) in chunks {
                cut.chunks.extend_from_slice(&name);
                cut.lengths.push(len);
            }
        } else {
            size = cut.read(file, found.size, &holes)?;
        }
        let content = cut.content;
        self.cuts.lock().insert(found.path.to_vec(), cut);
        Ok((size, content))
    }

    fn unopened(&self, found: &Found<'_>) -> Option<Unopened> {
        let entry = self.known.get(found.path).filter(|entry| is_untouched(entry, found))?;
        let xattrs = entry.xattrs.iter().map(|xattr| (xattr.name.clone(), xattr.value.clone())).collect();
        Some(Unopened { content: self.note(entry, found), xattrs })
    }
}

/// What a file has that only this host knows: its number, and when it was changed.
pub(crate) type Mark = (u64, (i64, u32));

/// Takes the content of files to be that of another manifest, if their size is.
pub(crate) struct Trusted<'a> {
    pub(crate) entries: HashMap<&'a [u8], &'a Entry>,
    pub(crate) marks: Mutex<HashMap<Vec<u8>, Mark>>,
}

impl Contents for Trusted<'_> {
    fn of(&self, found: &Found<'_>, _: &File) -> io::Result<(u64, [u8; 32])> {
        self.marks.lock().insert(found.path.to_vec(), (found.inode, found.changed));
        let entry = self.entries.get(found.path).filter(|entry| entry.size == found.size);
        Ok((found.size, entry.map_or([0; 32], |entry| entry.content_hash())))
    }
}
