//! The nodes of the last snapshot of a family that was named: of the next one only what differs is worked out. It is an object
//! beside the snapshots' entries, `named/FAMILY`; when it is lost, all is worked out again.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hayloft_model::Ino;
use hayloft_tree::name::{Kind, Node};
use uuid::Uuid;

use crate::database::family::Snapshot;
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::diff::changed;
use crate::versions::naming::nodes::{Nodes, Reader};
use crate::versions::tables::Tables;

/// What the object begins with.
const MAGIC: &[u8; 8] = b"hayname2";

/// Larger trees are named from all rows each time: what is kept takes 40 bytes a file, three times while it is used.
const FILES_MAX: usize = 1_500_000;

/// When so large a part has changed, to work all out is as fast.
const PART: usize = 3;

/// What is known of one that was named before.
pub(super) struct Kept {
    /// The database, and its checkpoint.
    of: (String, Uuid),
    known: Vec<(Ino, Node)>,
}

pub(super) fn path(family: &str) -> String {
    format!("named/{family}")
}

impl Kept {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = BytesMut::with_capacity(64 + 40 * self.known.len());
        bytes.put_slice(MAGIC);
        bytes.put_u16_le(self.of.0.len() as u16);
        bytes.put_slice(self.of.0.as_bytes());
        bytes.put_slice(self.of.1.as_bytes());
        for (ino, node) in &self.known {
            bytes.put_u64_le(ino.0);
            bytes.put_slice(node);
        }
        let sum = *blake3::hash(&bytes).as_bytes();
        bytes.put_slice(&sum);
        bytes.into()
    }

    /// `None` for bytes that are not what was written.
    fn decode(mut bytes: Bytes) -> Option<Kept> {
        let sum = bytes.split_off(bytes.len().checked_sub(32)?);
        if *blake3::hash(&bytes).as_bytes() != *sum || !bytes.starts_with(MAGIC) {
            return None;
        }
        bytes.advance(MAGIC.len());
        let len = usize::from(bytes.try_get_u16_le().ok()?);
        if bytes.len() < len + 16 {
            return None;
        }
        let database = String::from_utf8(bytes.split_to(len).to_vec()).ok()?;
        let checkpoint = Uuid::from_slice(&bytes.split_to(16)).ok()?;
        let known = bytes
            .chunks_exact(40)
            .map(|mut one| {
                let ino = Ino(one.get_u64_le());
                (ino, one.try_into().expect("32 bytes are left"))
            })
            .collect();
        Some(Kept { of: (database, checkpoint), known })
    }

    /// The one of a family.
    pub(super) async fn read(shared: &Shared, family: &str) -> Option<Kept> {
        let kept = shared.store.get(&path(family)).await.ok()?;
        Kept::decode(kept)
    }

    /// From now on this one is known. That it is not costs time only.
    pub(super) async fn write(shared: &Shared, family: &str, of: &Snapshot, known: Vec<(Ino, Node)>) {
        let (Some(checkpoint), false) = (of.checkpoint, known.len() > FILES_MAX) else { return };
        let kept = Kept { of: (of.database.clone(), checkpoint), known };
        if let Err(error) = shared.store.put(&path(family), kept.encode()).await {
            tracing::debug!(family, %error, "the nodes of a snapshot are not kept");
        }
    }

    /// What of it is so in another snapshot too; directories are open in which something differs. `None` when it is of no use.
    pub(super) async fn nodes_of(
        self,
        shared: &Arc<Shared>,
        reader: &Reader<'_>,
    ) -> Result<Option<Nodes>, VolumeError> {
        let of = Snapshot::at(&self.of.0, self.of.1);
        // It may be deleted by now.
        let Ok(before) = Tables::open(shared, &of).await else { return Ok(None) };
        let changed = changed::changed_if_few(&before, reader.tables).await;
        before.close().await;
        let Ok(Some(changed)) = changed else { return Ok(None) };
        if (changed.inodes.len() + changed.names.len()) * PART > self.known.len() {
            return Ok(None);
        }
        let mut nodes = Nodes { known: self.known, rows_read: changed.rows_read, ..Nodes::default() };
        let mut open: HashSet<Ino> = changed.names.keys().map(|(dir, _)| *dir).collect();
        let (mut files, mut strays) = (Vec::new(), BTreeSet::new());
        let mut rows = Vec::new();
        for (ino, (_, new)) in changed.inodes {
            match new.filter(|row| row.nlink > 0) {
                Some(row) => rows.push(row),
                None => drop(nodes.changed.insert(ino, None)),
            }
        }
        let of_rows: BTreeSet<Ino> = rows.iter().map(|row| Ino(row.ino)).collect();
        for ino in changed.pages {
            if !nodes.changed.contains_key(&ino)
                && !of_rows.contains(&ino)
                && let Some(row) = reader.tables.inode(ino).await?
            {
                rows.push(row);
            }
        }
        for row in rows {
            match (Kind::of(row.mode), row.parent) {
                (Kind::Directory, _) => drop(open.insert(Ino(row.ino))),
                (_, 0) => drop(strays.insert(Ino(row.ino))),
                (_, home) => drop(open.insert(Ino(home))),
            }
            if Kind::of(row.mode) != Kind::Directory {
                files.push(row);
            }
        }
        if !strays.is_empty() {
            open.extend(reader.directories_of(&strays, &mut nodes.rows_read).await?);
        }
        nodes.changed.extend(reader.nodes(files).await?.into_iter().map(|(ino, node)| (ino, Some(node))));
        nodes.open = Some(above(reader, open).await?);
        Ok(Some(nodes))
    }
}

/// These directories that are there, and all above them.
async fn above(reader: &Reader<'_>, directories: HashSet<Ino>) -> Result<HashSet<Ino>, VolumeError> {
    let mut open = HashSet::new();
    for directory in directories {
        let mut at = directory;
        while !open.contains(&at) {
            // One that is gone has nobody above who would ask for it.
            let Some(row) = reader.tables.inode(at).await?.filter(|row| row.nlink > 0) else { break };
            open.insert(at);
            if at == Ino::ROOT {
                break;
            }
            at = Ino(row.parent);
        }
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_comes_back_or_is_not_believed() {
        let known = vec![(Ino(1), [1; 32]), (Ino(99), [2; 32])];
        let kept = Kept { of: ("0123".to_owned(), Uuid::from_u128(7)), known: known.clone() };
        let bytes = kept.encode();
        let read = Kept::decode(bytes.clone().into()).unwrap();
        assert_eq!((read.of, read.known), (kept.of, known));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(Kept::decode(damaged.into()).is_none(), "byte {at}");
        }
        assert!(Kept::decode(Bytes::new()).is_none());
    }
}
