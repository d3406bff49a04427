//! Rows that differ, told as people see them: by paths, with what has changed.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use hayloft_model::{ContentHash, FileKind, Ino};
use hayloft_wire::difference::{CONTENT, LINKS, MODE, MODIFIED, OWNER, RENAMED, TYPE, XATTRS};
use hayloft_wire::{DentryRow, Difference, InodeRowMessage};

use crate::database;
use crate::database::small::SmallPlace;
use crate::database::tables;
use crate::error::VolumeError;
use crate::versions::diff::changed::{Changed, Pair};
use crate::versions::tables::Tables;

/// How deep directories may lie: a circle of parents, which only damage can make, ends here.
const DEPTH_MAX: usize = 4096;

/// The bits of a mode that say of which type it is.
const KIND: u32 = 0o170_000;

/// A name in a directory.
type Named = (Ino, Bytes);

/// Finds the paths of inodes in one version.
struct Paths<'a> {
    tables: &'a Tables,
    directories: HashMap<Ino, Bytes>,
    /// Names in directories that were read, by inode.
    listed: HashMap<Ino, HashMap<Ino, Bytes>>,
}

impl Paths<'_> {
    /// The name of an inode in a directory; the first one, if it has several.
    async fn name_in(&mut self, dir: Ino, ino: Ino) -> Result<Option<Bytes>, VolumeError> {
        if let Some(names) = self.listed.get(&dir) {
            return Ok(names.get(&ino).cloned());
        }
        let mut names = HashMap::new();
        let mut scan = self.tables.scan(&tables::dentries(dir)).await?;
        while let Some(found) = scan.next().await? {
            let row = database::decode::<DentryRow>(found.value, "name")?;
            names.entry(Ino(row.ino)).or_insert_with(|| tables::rest_of(&found.key));
        }
        let name = names.get(&ino).cloned();
        self.listed.insert(dir, names);
        Ok(name)
    }

    /// The path of a directory; `None` when nothing leads there.
    async fn directory(&mut self, dir: Ino) -> Result<Option<Bytes>, VolumeError> {
        let (mut at, mut below) = (dir, Vec::new());
        let mut path = loop {
            if at == Ino::ROOT {
                break Vec::new();
            }
            if let Some(known) = self.directories.get(&at) {
                break known.to_vec();
            }
            let Some(row) = self.tables.inode(at).await? else { return Ok(None) };
            let parent = Ino(row.parent);
            let Some(name) = self.name_in(parent, at).await? else { return Ok(None) };
            below.push((at, name));
            at = parent;
            if below.len() > DEPTH_MAX {
                return Err(VolumeError::Damaged("directories that are in each other"));
            }
        };
        for (dir, name) in below.into_iter().rev() {
            path = joined(&path, &name);
            self.directories.insert(dir, path.clone().into());
        }
        Ok(Some(path.into()))
    }

    async fn path(&mut self, (dir, name): &Named) -> Result<Option<Bytes>, VolumeError> {
        Ok(self.directory(*dir).await?.map(|dir| joined(&dir, name).into()))
    }

    /// A name of an inode in the directory that its row says; `None` when it has names in others only.
    async fn name_of(&mut self, row: &InodeRowMessage) -> Result<Option<Named>, VolumeError> {
        let dir = Ino(row.parent);
        Ok(self.name_in(dir, Ino(row.ino)).await?.map(|name| (dir, name)))
    }

    /// A name of each of these, wherever it is: reads all names.
    async fn names_of(
        &self,
        is_one: impl Fn(Ino, &Named) -> bool,
    ) -> Result<HashMap<Ino, Named>, VolumeError> {
        let mut names = HashMap::new();
        let mut scan = self.tables.scan(&[tables::DENTRIES]).await?;
        while let Some(found) = scan.next().await? {
            let ino = Ino(database::decode::<DentryRow>(found.value, "name")?.ino);
            let dir = tables::number_in(&found.key).ok_or(VolumeError::Damaged("key of a name"))?;
            let name = (Ino(dir), tables::rest_of(&found.key));
            if is_one(ino, &name) {
                names.insert(ino, name);
            }
        }
        Ok(names)
    }
}

fn joined(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let separator: &[u8] = if dir.is_empty() { b"" } else { b"/" };
    [dir, separator, name].concat()
}

/// What is in a file, as far as its row tells.
#[derive(PartialEq)]
enum Content<'a> {
    Small { len: usize, hash: [u8; 8] },
    Blocks(&'a [u8]),
    Link(&'a [u8]),
    Nothing,
}

fn content_of(row: &InodeRowMessage) -> Result<Content<'_>, VolumeError> {
    if let Some(place) = SmallPlace::of_row(row)? {
        return Ok(Content::Small { len: place.len as usize, hash: place.hash() });
    }
    Ok(match (&row.inline, &row.blocks, &row.target) {
        (Some(inline), ..) if !inline.is_empty() => {
            let hash = ContentHash(*blake3::hash(inline).as_bytes());
            Content::Small { len: inline.len(), hash: *hash.0.first_chunk().expect("hashes have 32 bytes") }
        }
        (_, Some(blocks), _) if !blocks.is_empty() => Content::Blocks(blocks),
        (.., Some(target)) => Content::Link(target),
        _ => Content::Nothing,
    })
}

/// When it was modified: seconds, nanoseconds.
fn modified(row: &InodeRowMessage) -> Option<&[i64]> {
    row.times.get(2..4)
}

/// Bits of what has changed between two rows of one inode, but for times.
fn changed_bits((old, new): (&InodeRowMessage, &InodeRowMessage), pages: bool) -> Result<u32, VolumeError> {
    let is_directory = |row: &InodeRowMessage| row.mode & KIND == FileKind::Directory.bits();
    let content =
        !is_directory(new) && (pages || old.size != new.size || content_of(old)? != content_of(new)?);
    let bits = [
        (content, CONTENT),
        (old.mode & !KIND != new.mode & !KIND, MODE),
        ((old.uid, old.gid) != (new.uid, new.gid), OWNER),
        (old.xattrs != new.xattrs, XATTRS),
        ((old.mode & KIND, old.rdev) != (new.mode & KIND, new.rdev), TYPE),
        // Of a directory it counts folders below it, which are told themselves.
        (old.nlink != new.nlink && !is_directory(new), LINKS),
    ];
    Ok(bits.into_iter().filter(|(is_so, _)| *is_so).map(|(_, bit)| bit).sum())
}

/// Names and rows of both versions.
pub(super) struct Names<'a> {
    old: Paths<'a>,
    new: Paths<'a>,
    /// Times of modification count.
    times: bool,
    /// What has changed of files of which it is not known which of their names both versions have, and names that only the new one has.
    strays: HashMap<Ino, (Difference, Vec<Named>)>,
}

impl<'a> Names<'a> {
    pub(super) fn new(old: &'a Tables, new: &'a Tables, times: bool) -> Names<'a> {
        let paths = |tables| Paths { tables, directories: HashMap::new(), listed: HashMap::new() };
        Names { old: paths(old), new: paths(new), times, strays: HashMap::new() }
    }

    /// Everything that differs, in the order of the paths.
    pub(super) async fn differences(&mut self, changed: Changed) -> Result<Vec<Difference>, VolumeError> {
        let mut removed: BTreeMap<Ino, Vec<Named>> = BTreeMap::new();
        let mut added: BTreeMap<Ino, Vec<Named>> = BTreeMap::new();
        for (name, (old, new)) in changed.names {
            if old == new {
                continue;
            }
            old.into_iter().for_each(|ino| removed.entry(ino).or_default().push(name.clone()));
            new.into_iter().for_each(|ino| added.entry(ino).or_default().push(name.clone()));
        }
        let mut inos: BTreeSet<Ino> = removed.keys().chain(added.keys()).copied().collect();
        inos.extend(changed.inodes.keys().chain(&changed.pages));
        let mut differences = Vec::new();
        for ino in inos {
            let rows = match changed.inodes.get(&ino) {
                Some(rows) => rows.clone(),
                // The row is the same in both, if it is there.
                None => {
                    let row = self.new.tables.inode(ino).await?;
                    (row.clone(), row)
                }
            };
            let (removed, added) =
                (removed.remove(&ino).unwrap_or_default(), added.remove(&ino).unwrap_or_default());
            self.of_inode(rows, changed.pages.contains(&ino), (removed, added), &mut differences).await?;
        }
        let strays = std::mem::take(&mut self.strays);
        if !strays.is_empty() {
            let is_one =
                |ino: Ino, name: &Named| strays.get(&ino).is_some_and(|(_, added)| !added.contains(name));
            let names = self.new.names_of(is_one).await?;
            for (ino, (told, _)) in strays {
                if let Some(name) = names.get(&ino) {
                    differences.extend(self.at(name, told).await?);
                }
            }
        }
        let path = |difference: &Difference| {
            difference.new_path.clone().or_else(|| difference.old_path.clone()).unwrap_or_default()
        };
        differences.sort_by_cached_key(path);
        Ok(differences)
    }

    async fn of_inode(
        &mut self,
        (old, new): Pair<InodeRowMessage>,
        pages: bool,
        (removed, added): (Vec<Named>, Vec<Named>),
        differences: &mut Vec<Difference>,
    ) -> Result<(), VolumeError> {
        // Without a name it is not in the tree.
        let is_named = |row: &&InodeRowMessage| row.nlink > 0;
        let (old, new) = (old.as_ref().filter(is_named), new.as_ref().filter(is_named));
        let bits = match (old, new) {
            (Some(old), Some(new)) => {
                let modified = self.times && modified(old) != modified(new);
                changed_bits((old, new), pages)? | if modified { MODIFIED } else { 0 }
            }
            _ => 0,
        };
        let difference = |old_path: Option<Bytes>, new_path: Option<Bytes>, changed: u32| {
            let (old, new) = (old.filter(|_| old_path.is_some()), new.filter(|_| new_path.is_some()));
            Difference {
                old_mode: old.map_or(0, |row| row.mode),
                new_mode: new.map_or(0, |row| row.mode),
                old_size: old.map_or(0, |row| row.size),
                new_size: new.map_or(0, |row| row.size),
                old_path,
                new_path,
                changed,
            }
        };
        let count = removed.len().max(added.len());
        let mut is_told = false;
        for at in 0..count {
            let old_path = match removed.get(at) {
                Some(name) => self.old.path(name).await?,
                None => None,
            };
            let new_path = match added.get(at) {
                Some(name) => self.new.path(name).await?,
                None => None,
            };
            if old_path.is_some() || new_path.is_some() {
                let is_both = old_path.is_some() && new_path.is_some();
                is_told |= is_both;
                differences.push(difference(old_path, new_path, if is_both { bits | RENAMED } else { 0 }));
            }
        }
        let (Some(_), Some(new)) = (old, new) else { return Ok(()) };
        let told = difference(Some(Bytes::new()), Some(Bytes::new()), bits);
        // That it has more names or less is told by these.
        if !is_told && count > 0 && bits & !LINKS != 0 && new.nlink as usize > added.len() {
            self.strays.insert(Ino(new.ino), (told, added));
        } else if count == 0 && bits != 0 {
            // Its names are the same in both.
            match self.new.name_of(new).await? {
                _ if new.ino == Ino::ROOT.0 => differences.push(told),
                Some(name) => differences.extend(self.at(&name, told).await?),
                None => drop(self.strays.insert(Ino(new.ino), (told, Vec::new()))),
            }
        }
        Ok(())
    }

    /// What has changed under a name that is the same in both.
    async fn at(&mut self, name: &Named, told: Difference) -> Result<Option<Difference>, VolumeError> {
        let (old_path, new_path) = (self.old.path(name).await?, self.new.path(name).await?);
        let is_there = old_path.is_some() && new_path.is_some();
        Ok(is_there.then_some(Difference { old_path, new_path, ..told }))
    }
}

/// Those of which a path is a folder, or below it.
pub(super) fn below(mut differences: Vec<Difference>, folder: &[u8]) -> Vec<Difference> {
    let is_below = |path: &Option<Bytes>| {
        path.as_ref().is_some_and(|path| match path.strip_prefix(folder) {
            Some(rest) => folder.is_empty() || rest.is_empty() || rest.starts_with(b"/"),
            None => false,
        })
    };
    differences.retain(|difference| is_below(&difference.old_path) || is_below(&difference.new_path));
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> InodeRowMessage {
        InodeRowMessage { ino, mode: 0o100_644, nlink: 1, ..InodeRowMessage::default() }
    }

    #[test]
    fn what_has_changed_is_told_and_times_are_not() {
        let row = InodeRowMessage { inline: Some(Bytes::from_static(b"text")), size: 4, ..file(7) };
        let bits = |new: InodeRowMessage| changed_bits((&row, &new), false).unwrap();
        assert_eq!(bits(InodeRowMessage { times: vec![1; 8], next_cookie: 9, ..row.clone() }), 0);
        assert_eq!(
            bits(InodeRowMessage { inline: Some(Bytes::from_static(b"tex_")), ..row.clone() }),
            CONTENT
        );
        assert_eq!(bits(InodeRowMessage { mode: 0o100_600, uid: 5, ..row.clone() }), MODE | OWNER);
        assert_eq!(bits(InodeRowMessage { nlink: 2, ..row.clone() }), LINKS);
        assert_eq!(bits(InodeRowMessage { mode: 0o020_644, rdev: 5, ..row.clone() }), TYPE);
        assert_eq!(changed_bits((&row, &row), true).unwrap(), CONTENT, "blocks of a later page");
    }

    #[test]
    fn content_is_the_same_wherever_it_lies() {
        let text = Bytes::from_static(b"int main(void) {}");
        let entry = hayloft_store::PackEntry {
            hash: ContentHash(*blake3::hash(&text).as_bytes()),
            offset: 8,
            payload_len: 17,
            len: 17,
            codec: hayloft_store::Codec::Raw,
        };
        let place = SmallPlace::in_pack(tables::PackId(3), &entry).encode();
        let here = InodeRowMessage { inline: Some(text), size: 17, ..file(7) };
        let there = InodeRowMessage { placed: Some(place), size: 17, ..file(7) };
        assert_eq!(changed_bits((&here, &there), false).unwrap(), 0);
    }

    #[test]
    fn folders_are_not_their_prefixes() {
        let path = |path: &'static str| Difference {
            new_path: Some(Bytes::from_static(path.as_bytes())),
            ..Difference::default()
        };
        let found = below(vec![path("a/b"), path("a"), path("ab"), path("c/a")], b"a");
        assert_eq!(found, [path("a/b"), path("a")]);
        assert_eq!(below(vec![path("x")], b"").len(), 1);
    }
}
