//! The nodes of files, from their rows.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::{BLOCK_SIZE, BlockRef, Ino};
use hayloft_store::decode_chunk;
use hayloft_tree::name::{self, Attributes, Body, Kind, Node, PIECE};
use hayloft_wire::InodeRowMessage;

use crate::database::homes::Homes;
use crate::database::ledger::Damage;
use crate::database::small::{Contents, SmallPlace, is_lost};
use crate::database::tables::{self, Place};
use crate::database::{self, family};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::blocks::{self, Blocks, Content};
use crate::versions::tables::Tables;

/// Rows that are worked on at a time: their contents may have 4 KiB each.
const ROWS: usize = 1024;

/// Files of such a part that are worked on at a time.
const FILES: usize = 8;

const _: () = assert!(PIECE == BLOCK_SIZE, "the hashes of blocks are those of pieces");

/// Nodes by inode.
#[derive(Default)]
pub(super) struct Nodes {
    /// In the order of the numbers.
    pub(super) known: Vec<(Ino, Node)>,
    /// What has changed since; `None`: it is gone.
    pub(super) changed: HashMap<Ino, Option<Node>>,
    /// Directories whose nodes are not known; `None`: all.
    pub(super) open: Option<HashSet<Ino>>,
    pub(super) rows_read: u64,
    /// Of all directories, when all rows were read.
    pub(super) attributes: HashMap<Ino, Attributes>,
}

impl Nodes {
    /// From all rows of files; directories are open, and their attributes are kept if they are wanted.
    pub(super) async fn all(reader: &Reader<'_>, with_directories: bool) -> Result<Nodes, VolumeError> {
        let mut nodes = Nodes::default();
        let mut scan = reader.tables.scan(&[tables::INODES]).await?;
        loop {
            let mut rows = Vec::new();
            while rows.len() < ROWS
                && let Some(found) = scan.next().await?
            {
                nodes.rows_read += 1;
                let row = database::decode::<InodeRowMessage>(found.value, "inode")?;
                match Kind::of(row.mode) {
                    _ if row.nlink == 0 => {}
                    Kind::Directory if with_directories => {
                        nodes.attributes.insert(Ino(row.ino), attributes(&row));
                    }
                    Kind::Directory => {}
                    _ => rows.push(row),
                }
            }
            if rows.is_empty() {
                return Ok(nodes);
            }
            nodes.known.extend(reader.nodes(rows).await?);
        }
    }

    pub(super) fn get(&self, ino: Ino) -> Option<Node> {
        match self.changed.get(&ino) {
            Some(changed) => *changed,
            None => {
                let at = self.known.binary_search_by_key(&ino, |(ino, _)| *ino).ok()?;
                Some(self.known[at].1)
            }
        }
    }

    /// All that is known, in the order of the numbers.
    pub(super) fn into_known(mut self) -> Vec<(Ino, Node)> {
        self.known.retain(|(ino, _)| !self.changed.contains_key(ino));
        self.known.extend(self.changed.into_iter().filter_map(|(ino, node)| Some((ino, node?))));
        self.known.sort_unstable_by_key(|(ino, _)| *ino);
        self.known
    }
}

/// Reads the rows and contents of a snapshot.
pub(super) struct Reader<'a> {
    pub(super) tables: &'a Tables,
    contents: Contents,
}

/// What a row says beside the content.
pub(super) fn attributes(row: &InodeRowMessage) -> Attributes {
    let xattrs = row.xattrs.iter().filter(|xattr| name::counts(&xattr.name));
    let mut xattrs: Vec<_> = xattrs.map(|xattr| (xattr.name.to_vec(), xattr.value.to_vec())).collect();
    xattrs.sort_unstable();
    Attributes { mode: row.mode, uid: row.uid, gid: row.gid, rdev: row.rdev.into(), xattrs }
}

impl Reader<'_> {
    pub(super) async fn new<'a>(
        tables: &'a Tables,
        shared: &Arc<Shared>,
        database: &str,
        family: &str,
    ) -> Result<Reader<'a>, VolumeError> {
        let homes = Homes::new(database, family);
        let packs = family::packs(tables.scan(&[tables::PACKS]).await?).await?;
        homes.learn(packs.iter().map(|(pack, row)| (*pack, row)));
        let contents = Contents { store: shared.store.clone(), homes: Arc::new(homes) };
        Ok(Reader { tables, contents })
    }

    /// The nodes of some files.
    pub(super) async fn nodes(&self, rows: Vec<InodeRowMessage>) -> Result<Vec<(Ino, Node)>, VolumeError> {
        let mut rows = self.filled(rows).await?;
        rows.sort_unstable_by_key(|row| row.ino);
        let nodes = stream::iter(rows).map(|row| async move {
            let body = self.body(&row).await?;
            Ok::<_, VolumeError>((Ino(row.ino), name::node(&attributes(&row), &body)))
        });
        nodes.buffered(FILES).try_collect().await
    }

    /// With the contents of small files.
    async fn filled(&self, rows: Vec<InodeRowMessage>) -> Result<Vec<InodeRowMessage>, VolumeError> {
        let mut by_pack: HashMap<_, Vec<(SmallPlace, InodeRowMessage)>> = HashMap::new();
        let mut filled = Vec::with_capacity(rows.len());
        for row in rows {
            match SmallPlace::of_row(&row)? {
                Some(place) => by_pack.entry(place.pack).or_default().push((place, row)),
                None => filled.push(row),
            }
        }
        for (pack, mut rows) in by_pack {
            rows.sort_unstable_by_key(|(place, _)| place.offset);
            let contents = self.contents.read(pack, rows.iter().map(|(place, _)| *place)).await?;
            let contents = contents.ok_or_else(|| self.damaged(pack, "is not there"))?;
            let are = SmallPlace::are(rows.iter().map(|(place, _)| place), &contents);
            for (((_, mut row), content), is_right) in rows.into_iter().zip(contents).zip(are) {
                if !is_right {
                    return Err(self.damaged(pack, &format!("holds damaged content of inode {}", row.ino)));
                }
                (row.inline, row.placed) = (Some(content), None);
                filled.push(row);
            }
        }
        Ok(filled)
    }

    fn damaged(&self, pack: tables::PackId, what: &str) -> VolumeError {
        let (object, what) = (self.contents.homes.path(pack), what.to_owned());
        VolumeError::AtRest(Damage { object, what })
    }

    async fn body(&self, row: &InodeRowMessage) -> Result<Body, VolumeError> {
        Ok(match Kind::of(row.mode) {
            Kind::Link => Body::Link(row.target.as_deref().unwrap_or_default().to_vec()),
            Kind::Special | Kind::Directory => Body::Nothing,
            Kind::File => Body::File { size: row.size, content: self.content(row).await? },
        })
    }

    async fn content(&self, row: &InodeRowMessage) -> Result<[u8; 32], VolumeError> {
        if let Some(inline) = &row.inline {
            return Ok(blocks::content_of(inline, row.size));
        }
        let mut rows = None;
        if Blocks::has_pages(row) {
            rows = Some(self.tables.scan(&tables::pages(Ino(row.ino))).await?);
        }
        let (mut content, mut found) = (Content::new(row.size), Blocks::new(row, rows)?);
        while let Some((at, block)) = found.next().await? {
            content.push(at, &self.piece(block, blocks::span(row.size, at)).await?);
        }
        Ok(content.finish())
    }

    /// The hash of a piece that has so many bytes.
    async fn piece(&self, block: BlockRef, span: u64) -> Result<[u8; 32], VolumeError> {
        if is_lost(&block.hash) {
            return Err(VolumeError::NoContent(block.hash));
        }
        if u64::from(block.len) == span {
            return Ok(block.hash.0);
        }
        // Zeros follow, or it was cut off.
        let mut content = self.chunk(block).await?.to_vec();
        content.resize(span as usize, 0);
        Ok(name::hash(&content))
    }

    async fn chunk(&self, block: BlockRef) -> Result<Bytes, VolumeError> {
        let row = self.tables.get(&tables::chunk(block.hash)).await?;
        let row = row.ok_or(VolumeError::NoContent(block.hash))?;
        let (len, codec, payload) = match Place::decode(row) {
            Some(Place::Here { len, codec, payload }) => (len, codec, payload),
            Some(Place::Pack { pack, offset, payload_len, len, codec }) => {
                let from = u64::from(offset);
                let range = from..from + u64::from(payload_len);
                let path = self.contents.homes.path(pack);
                let mut read = self.contents.store.read_ranges(&path, &[range]).await?;
                (len, codec, read.remove(0))
            }
            None => return Err(VolumeError::Damaged("place of content")),
        };
        decode_chunk(block.hash, len, codec, payload).map_err(|_| VolumeError::NoContent(block.hash))
    }

    /// Directories that have a name of one of these.
    pub(super) async fn directories_of(
        &self,
        inos: &BTreeSet<Ino>,
        rows_read: &mut u64,
    ) -> Result<HashSet<Ino>, VolumeError> {
        let mut found = HashSet::new();
        let mut scan = self.tables.scan(&[tables::DENTRIES]).await?;
        while let Some(row) = scan.next().await? {
            *rows_read += 1;
            let ino = Ino(database::decode::<hayloft_wire::DentryRow>(row.value, "name")?.ino);
            if inos.contains(&ino) {
                found.extend(tables::number_in(&row.key).map(Ino));
            }
        }
        Ok(found)
    }
}
