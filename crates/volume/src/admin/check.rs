//! Verifying a volume: names and inodes, usage, and content.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use hayloft_model::{ContentHash, Dentry, FileKind, Ino, slot, sound};
use hayloft_store::decode_chunk;
use hayloft_wire::{Checked, DentryRow, InodeRowMessage, decode_blocks};

use crate::admin::listings;
use crate::admin::mend::Fix;
use crate::database::small::SmallPlace;
use crate::database::tables::{self, PackId, Place, VolumeRow};
use crate::database::{self, DbSnapshot};
use crate::error::{VolumeError, chain};
use crate::volume::Volume;

/// Problems are told up to this number.
const PROBLEMS_MAX: usize = 100;

/// Chunks that are read at a time.
const READ: usize = 64;

/// What names must agree with.
struct Inode {
    kind: u32,
    nlink: u32,
    parent: u64,
    next_cookie: u64,
    names: u32,
    directories: u32,
}

struct Check<'a> {
    volume: &'a Arc<Volume>,
    found: Checked,
    inodes: HashMap<u64, Inode>,
    orphans: HashSet<u64>,
    content: HashSet<ContentHash>,
    /// Content of small files that lies in packs.
    small: Vec<(u64, SmallPlace)>,
    bytes: u64,
    /// Problems that are about an inode, which is to be named by its path.
    of_inodes: Vec<(u64, String)>,
    /// Content that cannot be read, and why.
    bad: HashMap<ContentHash, String>,
    fixes: Vec<Fix>,
}

impl Volume {
    /// Compares everything that must agree, on a snapshot; with `content`, reads and hashes all content.
    pub(crate) async fn check(self: &Arc<Self>, content: bool) -> Result<Checked, VolumeError> {
        Ok(self.check_for_repair(content).await?.0)
    }

    /// The same, with what would mend some of it.
    pub(crate) async fn check_for_repair(
        self: &Arc<Self>,
        content: bool,
    ) -> Result<(Checked, Vec<Fix>), VolumeError> {
        // No sweep meanwhile: the snapshot's packs have to stay.
        let _one = self.sweeping.lock().await;
        let snapshot = {
            let _turn = self.turn.lock().await;
            self.db()?.snapshot()?
        };
        let mut check = Check {
            volume: self,
            found: Checked::default(),
            inodes: HashMap::new(),
            orphans: HashSet::new(),
            content: HashSet::new(),
            small: Vec::new(),
            bytes: 0,
            of_inodes: Vec::new(),
            bad: HashMap::new(),
            fixes: Vec::new(),
        };
        check.read_inodes(&snapshot).await?;
        check.read_pages(&snapshot).await?;
        check.read_names(&snapshot).await?;
        check.compare_links();
        check.compare_listings(&snapshot).await?;
        check.compare_usage(&snapshot).await?;
        check.compare_content(&snapshot).await?;
        if content {
            check.verify_content().await;
            check.verify_small_files().await?;
        }
        check.find_bad_content(&snapshot).await?;
        check.tell_by_path(&snapshot).await?;
        Ok((check.found, check.fixes))
    }
}

impl Check<'_> {
    /// A problem of an inode.
    fn problem_of(&mut self, ino: u64, text: String) {
        if self.of_inodes.len() < PROBLEMS_MAX {
            self.of_inodes.push((ino, text));
        }
    }

    /// Finds out which files name content that cannot be read.
    async fn find_bad_content(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let bad = std::mem::take(&mut self.bad);
        if bad.is_empty() {
            return Ok(());
        }
        let mut scan = database::scan(snapshot, &[tables::INODES]).await?;
        while let Some(found) = scan.next().await? {
            let row = database::decode::<InodeRowMessage>(found.value, "inode")?;
            self.name_bad(row.ino, row.blocks.as_deref().unwrap_or_default(), &bad);
        }
        let mut scan = database::scan(snapshot, &[tables::PAGES]).await?;
        while let Some(found) = scan.next().await? {
            if let Some(ino) = tables::number_in(&found.key).filter(|ino| self.inodes.contains_key(ino)) {
                self.name_bad(ino, &found.value, &bad);
            }
        }
        Ok(())
    }

    fn name_bad(&mut self, ino: u64, blocks: &[u8], bad: &HashMap<ContentHash, String>) {
        let Ok(blocks) = decode_blocks(blocks) else { return };
        if let Some(why) = blocks.iter().flatten().find_map(|block| bad.get(&block.hash)) {
            self.problem_of(ino, why.clone());
        }
    }

    /// Says where the inodes are that problems are about.
    async fn tell_by_path(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let of_inodes = std::mem::take(&mut self.of_inodes);
        if of_inodes.is_empty() {
            return Ok(());
        }
        let concerned: HashSet<u64> = of_inodes.iter().map(|(ino, _)| *ino).collect();
        let mut names = HashMap::new();
        let mut scan = database::scan(snapshot, &[tables::DENTRIES]).await?;
        while let Some(found) = scan.next().await? {
            let dentry = database::decode::<DentryRow>(found.value, "dentry")?;
            if let Some(parent) = tables::number_in(&found.key)
                && (dentry.kind == FileKind::Directory.bits() || concerned.contains(&dentry.ino))
            {
                names.insert(dentry.ino, (parent, tables::rest_of(&found.key)));
            }
        }
        for (ino, text) in of_inodes {
            let path = path_of(ino, &names);
            self.problem(format!("{path} (inode {ino}): {text}"));
        }
        Ok(())
    }

    fn problem(&mut self, text: String) {
        if self.found.problems.len() < PROBLEMS_MAX {
            self.found.problems.push(text);
        }
    }

    async fn read_inodes(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let mut scan = database::scan(snapshot, &[tables::ORPHANS]).await?;
        while let Some(found) = scan.next().await? {
            self.orphans.extend(tables::second_number_in(&found.key));
        }
        let mut scan = database::scan(snapshot, &[tables::INODES]).await?;
        while let Some(found) = scan.next().await? {
            let row = database::decode::<InodeRowMessage>(found.value, "inode")?;
            if tables::number_in(&found.key) != Some(row.ino) {
                self.problem(format!("inode {} lies under another number", row.ino));
            }
            if let Some(blocks) = &row.blocks {
                self.name(row.ino, blocks);
            }
            self.small.extend(SmallPlace::of_row(&row)?.map(|place| (row.ino, place)));
            // What is deleted but open somewhere takes no part in the usage.
            if row.ino != Ino::ROOT.0 && row.nlink > 0 {
                self.bytes += row.allocated;
            }
            if let Err(error) =
                hayloft_model::InodeRow::try_from(&InodeRowMessage { placed: None, ..row.clone() })
                    .map_err(|error| error.to_string())
                    .and_then(|sane| {
                        sound::inode(Ino(row.ino), &sane, sound::NUMBERS).map_err(|error| error.to_string())
                    })
            {
                self.problem_of(row.ino, error);
            }
            let inode = Inode {
                kind: FileKind::of_mode(row.mode).map_or(0, FileKind::bits),
                nlink: row.nlink,
                parent: row.parent,
                next_cookie: row.next_cookie,
                names: 0,
                directories: 0,
            };
            self.inodes.insert(row.ino, inode);
        }
        self.found.inodes = self.inodes.len() as u64;
        Ok(())
    }

    fn name(&mut self, ino: u64, blocks: &[u8]) {
        match decode_blocks(blocks) {
            Ok(blocks) => self.content.extend(blocks.iter().flatten().map(|block| block.hash)),
            Err(error) => self.problem(format!("inode {ino}: {error}")),
        }
    }

    async fn read_pages(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let mut scan = database::scan(snapshot, &[tables::PAGES]).await?;
        while let Some(found) = scan.next().await? {
            // Pages of an inode that is gone are no problem: the next sweep drops them.
            if let Some(ino) = tables::number_in(&found.key).filter(|ino| self.inodes.contains_key(ino)) {
                self.name(ino, &found.value);
            }
        }
        Ok(())
    }

    async fn read_names(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let directory = FileKind::Directory.bits();
        let mut scan = database::scan(snapshot, &[tables::DENTRIES]).await?;
        let mut cookies = (0, HashSet::new());
        while let Some(found) = scan.next().await? {
            self.found.dentries += 1;
            let parent = tables::number_in(&found.key).ok_or(VolumeError::Damaged("key of a name"))?;
            let raw = tables::rest_of(&found.key);
            let name = String::from_utf8_lossy(&raw).into_owned();
            let dentry = database::decode::<DentryRow>(found.value, "dentry")?;
            let sane = Dentry {
                ino: Ino(dentry.ino),
                kind: FileKind::of_mode(dentry.kind).unwrap_or(FileKind::Regular),
                cookie: dentry.cookie,
            };
            if let Err(error) = sound::dentry(Ino(parent), &raw, &sane, sound::NUMBERS) {
                self.problem_of(parent, format!("its name {:?}: {error}", String::from_utf8_lossy(&raw)));
                self.fixes.push(Fix::Unlink(parent, raw.clone()));
            }
            if sane.kind.bits() != dentry.kind {
                self.problem(format!("{name:?} in directory {parent} says a kind that there is not"));
            }
            if cookies.0 != parent {
                cookies = (parent, HashSet::new());
            }
            if !cookies.1.insert(dentry.cookie) {
                self.problem(format!("{name:?} in directory {parent} has the cookie of another name"));
            }
            match self.inodes.get_mut(&parent) {
                Some(dir) if dir.kind == directory => {
                    dir.directories += u32::from(dentry.kind == directory);
                    if (dir.next_cookie..slot::FIRST_COOKIE).contains(&dentry.cookie) {
                        self.problem(format!("{name:?} in directory {parent} has a cookie of the future"));
                    }
                }
                _ => {
                    self.problem(format!("{name:?} is in {parent}, which is no directory"));
                    self.fixes.push(Fix::Unlink(parent, raw.clone()));
                }
            }
            let inode = self.inodes.get_mut(&dentry.ino);
            let leads = sound::leads(&sane, inode.as_ref().and_then(|inode| FileKind::of_mode(inode.kind)));
            if let Some(inode) = inode {
                inode.names += 1;
                let (kind, up) = (inode.kind, inode.parent);
                if let Err(error) = leads {
                    self.problem(format!("{name:?} in directory {parent}: {error}"));
                }
                if kind == directory && up != parent {
                    self.problem(format!("directory {} is in {parent} but says {up}", dentry.ino));
                }
            } else if let Err(error) = leads {
                self.problem_of(parent, format!("its name {name:?}: {error}"));
                self.fixes.push(Fix::Unlink(parent, raw));
            }
        }
        Ok(())
    }

    fn compare_links(&mut self) {
        let mut problems = Vec::new();
        for (ino, inode) in &self.inodes {
            let is_directory = inode.kind == FileKind::Directory.bits();
            let is_root = *ino == Ino::ROOT.0;
            let expected = if is_directory { 2 + inode.directories } else { inode.names };
            if inode.names == 0 && !is_root {
                if !self.orphans.contains(ino) {
                    problems.push((*ino, "has no name and is not open".to_owned()));
                    self.fixes.push(Fix::Adopt(*ino));
                }
            } else if inode.nlink != expected {
                problems.push((*ino, format!("says {} links and has {expected}", inode.nlink)));
                self.fixes.push(Fix::Links(*ino, expected));
            }
            if is_directory && inode.names > 1 {
                problems.push((*ino, format!("is a directory and has {} names", inode.names)));
            }
        }
        problems.extend(self.circles());
        problems.sort();
        problems.into_iter().for_each(|(ino, problem)| self.problem_of(ino, problem));
    }

    /// Directories that lie in themselves.
    fn circles(&self) -> Vec<(u64, String)> {
        let mut safe = HashSet::from([Ino::ROOT.0]);
        let mut circles = Vec::new();
        for (ino, _) in self.inodes.iter().filter(|(_, inode)| inode.kind == FileKind::Directory.bits()) {
            let (mut at, mut passed) = (*ino, HashSet::new());
            while !safe.contains(&at) {
                if !passed.insert(at) {
                    circles.push((*ino, "is a directory that lies in itself".to_owned()));
                    break;
                }
                match self.inodes.get(&at) {
                    Some(inode) => at = inode.parent,
                    None => break,
                }
            }
            safe.extend(passed);
        }
        circles
    }

    async fn compare_listings(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let (packed, wrong) = listings::check(self.volume, snapshot).await?;
        self.found.packed = packed;
        for (dir, fix) in wrong {
            self.problem_of(dir.0, "its packed listing is not what its rows say".to_owned());
            self.fixes.push(fix);
        }
        Ok(())
    }

    async fn compare_usage(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let row = snapshot.get(tables::VOLUME).await?.ok_or(VolumeError::Damaged("volume row"))?;
        let row = database::decode::<VolumeRow>(row, "volume row")?;
        let counts = |(ino, inode): &(&u64, &Inode)| **ino != Ino::ROOT.0 && inode.nlink > 0;
        let inodes = self.inodes.iter().filter(counts).count() as u64;
        if (row.bytes, row.inodes) != (self.bytes, inodes) {
            self.problem(format!(
                "the usage says {} bytes in {} inodes; there are {} bytes in {inodes}",
                row.bytes, row.inodes, self.bytes
            ));
            self.fixes.push(Fix::Usage);
        }
        let window = self.volume.registered.lock().numbers_from;
        let numbers = row.numbers_of(window);
        if let Some(ino) = self.inodes.keys().find(|ino| numbers.may_give(**ino)) {
            self.problem(format!("inode {ino} has a number that was not handed out"));
        }
        Ok(())
    }

    /// All content that is named must have a place, and the place must exist.
    async fn compare_content(&mut self, snapshot: &DbSnapshot) -> Result<(), VolumeError> {
        let volume = self.volume;
        let mut objects = Vec::new();
        for folder in volume.homes.folders() {
            objects.extend(volume.shared.store.list(&folder).await?);
        }
        let sizes: HashMap<PackId, u64> = objects
            .iter()
            .filter_map(|object| Some((PackId::from_name(object.location.filename()?)?, object.size)))
            .collect();
        for (ino, place) in std::mem::take(&mut self.small) {
            if sizes.get(&place.pack).is_none_or(|size| *size < place.range().end) {
                self.problem_of(ino, format!("its content was in pack {:016x}, which is gone", place.pack.0));
            } else {
                self.small.push((ino, place));
            }
        }
        let mut missing = self.content.clone();
        let mut scan = database::scan(snapshot, &[tables::CHUNKS]).await?;
        while let Some(found) = scan.next().await? {
            let hash = tables::hash_in(&found.key).ok_or(VolumeError::Damaged("key of content"))?;
            if !missing.remove(&hash) {
                continue;
            }
            self.found.chunks += 1;
            match Place::decode(found.value) {
                Some(Place::Pack { pack, offset, payload_len, .. }) => {
                    let end = u64::from(offset) + u64::from(payload_len);
                    if sizes.get(&pack).is_none_or(|size| *size < end) {
                        self.bad.insert(
                            hash,
                            format!("content {hash} was in pack {:016x}, which is gone", pack.0),
                        );
                    }
                }
                Some(Place::Here { .. }) => {}
                None => {
                    self.bad.insert(hash, format!("content {hash} has a damaged row"));
                }
            }
        }
        for hash in missing {
            self.bad.insert(hash, format!("content {hash} is named by it and is not stored"));
        }
        Ok(())
    }

    async fn verify_small_files(&mut self) -> Result<(), VolumeError> {
        let db = self.volume.db()?;
        let mut small = std::mem::take(&mut self.small);
        small.sort_unstable_by_key(|(_, place)| (place.pack, place.offset));
        for files in small.chunk_by(|(_, one), (_, next)| one.pack == next.pack) {
            for files in files.chunks(READ) {
                let places = files.iter().map(|(_, place)| *place);
                let contents = db.contents().read(files[0].1.pack, places).await?.unwrap_or_default();
                let mut are = SmallPlace::are(files.iter().map(|(_, place)| place), &contents).into_iter();
                for (ino, place) in files {
                    if !are.next().is_some_and(|is| is) {
                        let pack = place.pack.0;
                        self.problem_of(*ino, format!("its content is damaged (pack {pack:016x})"));
                    }
                }
            }
        }
        Ok(())
    }

    async fn verify_content(&mut self) {
        let known = |hash: &&ContentHash| !self.bad.contains_key(*hash);
        let hashes: Vec<ContentHash> = self.content.iter().filter(known).copied().collect();
        for hashes in hashes.chunks(READ) {
            match self.volume.read_chunks(hashes).await {
                Ok(chunks) => {
                    for chunk in chunks {
                        if let Err(error) = decode_chunk(chunk.hash, chunk.len, chunk.codec, chunk.payload) {
                            self.bad.insert(chunk.hash, error.to_string());
                        }
                    }
                }
                // One of them; which, is found one by one.
                Err(_) => {
                    for hash in hashes {
                        if let Err(error) = self.volume.read_chunks(&[*hash]).await {
                            self.bad.insert(*hash, format!("content {hash}: {}", chain(&error)));
                        }
                    }
                }
            }
        }
    }
}

/// The path of an inode, from the top of the volume.
fn path_of(ino: u64, names: &HashMap<u64, (u64, bytes::Bytes)>) -> String {
    let mut parts = Vec::new();
    let mut at = ino;
    while at != Ino::ROOT.0 {
        // A circle ends nowhere.
        let Some((parent, name)) = names.get(&at).filter(|_| parts.len() < names.len() + 1) else {
            return format!("no path leads to it{}", if parts.is_empty() { "" } else { " from the top" });
        };
        parts.push(String::from_utf8_lossy(name).into_owned());
        at = *parent;
    }
    parts.reverse();
    format!("/{}", parts.join("/"))
}
