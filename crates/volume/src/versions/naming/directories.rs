//! The nodes of directories, from those of what is in them.

use std::collections::HashMap;

use bytes::Bytes;
use hayloft_model::Ino;
use hayloft_tree::name::{self, Attributes, Body, Kind, Node};
use hayloft_wire::DentryRow;

use crate::database;
use crate::database::tables;
use crate::error::VolumeError;
use crate::versions::naming::nodes::{Nodes, Reader, attributes};

/// How deep directories may lie: a circle, which only damage can make, ends here.
const DEPTH_MAX: usize = 4096;

/// A directory that is worked on.
struct Open {
    ino: Ino,
    attributes: Attributes,
    /// What is in it and was not looked at, the last name first.
    left: Vec<(Bytes, Ino, bool)>,
    done: Vec<(Vec<u8>, Node)>,
}

/// All names of a tree, by directory.
#[derive(Default)]
pub(super) struct Listed {
    names: HashMap<Ino, Vec<(Bytes, Ino, bool)>>,
    attributes: HashMap<Ino, Attributes>,
}

impl Listed {
    /// Reads them one after the other: to look for each directory takes much longer. `attributes` are those of all directories.
    pub(super) async fn all(
        reader: &Reader<'_>,
        attributes: HashMap<Ino, Attributes>,
        rows_read: &mut u64,
    ) -> Result<Listed, VolumeError> {
        let mut names: HashMap<Ino, Vec<(Bytes, Ino, bool)>> = HashMap::new();
        let mut scan = reader.tables.scan(&[tables::DENTRIES]).await?;
        while let Some(found) = scan.next().await? {
            let parent =
                tables::number_in(&found.key).map(Ino).ok_or(VolumeError::Damaged("key of a name"))?;
            names.entry(parent).or_default().push(entry(&found.key, found.value)?);
            *rows_read += 1;
        }
        Ok(Listed { names, attributes })
    }

    /// A directory, once.
    fn take(&mut self, ino: Ino) -> Option<Open> {
        let attributes = self.attributes.remove(&ino)?;
        let mut left = self.names.remove(&ino).unwrap_or_default();
        left.reverse();
        Some(Open { ino, attributes, done: Vec::with_capacity(left.len()), left })
    }
}

/// A name, where it leads, and whether that is a directory.
fn entry(key: &Bytes, value: Bytes) -> Result<(Bytes, Ino, bool), VolumeError> {
    let entry = database::decode::<DentryRow>(value, "name")?;
    Ok((tables::rest_of(key), Ino(entry.ino), Kind::of(entry.kind) == Kind::Directory))
}

async fn open(
    reader: &Reader<'_>,
    ino: Ino,
    listed: &mut Listed,
    rows_read: &mut u64,
) -> Result<Open, VolumeError> {
    if let Some(open) = listed.take(ino) {
        return Ok(open);
    }
    let row = reader.tables.inode(ino).await?.ok_or(VolumeError::NoInode(ino))?;
    if Kind::of(row.mode) != Kind::Directory {
        return Err(VolumeError::Damaged("a name that leads to a directory, and it is none"));
    }
    let mut left = Vec::new();
    let mut scan = reader.tables.scan(&tables::dentries(ino)).await?;
    while let Some(found) = scan.next().await? {
        left.push(entry(&found.key, found.value)?);
    }
    *rows_read += 1 + left.len() as u64;
    left.reverse();
    Ok(Open { ino, attributes: attributes(&row), done: Vec::with_capacity(left.len()), left })
}

/// Works out the nodes of all directories that are open, and gives the root's.
pub(super) async fn root(
    reader: &Reader<'_>,
    nodes: &mut Nodes,
    mut listed: Listed,
) -> Result<Node, VolumeError> {
    let is_open = |nodes: &Nodes, ino: Ino| match &nodes.open {
        Some(open) => open.contains(&ino),
        None => true,
    };
    if !is_open(nodes, Ino::ROOT)
        && let Some(root) = nodes.get(Ino::ROOT)
    {
        return Ok(root);
    }
    let mut rows_read = 0;
    let mut stack = vec![open(reader, Ino::ROOT, &mut listed, &mut rows_read).await?];
    while let Some(top) = stack.last_mut() {
        let Some((name, ino, is_directory)) = top.left.pop() else {
            let whole = name::node(&top.attributes, &Body::Directory(std::mem::take(&mut top.done)));
            nodes.changed.insert(top.ino, Some(whole));
            stack.pop();
            match stack.last_mut() {
                // Its name waits there.
                Some(above) => above.done.last_mut().expect("the name of what was worked on").1 = whole,
                None => {
                    nodes.rows_read += rows_read;
                    return Ok(whole);
                }
            }
            continue;
        };
        if is_directory && is_open(nodes, ino) {
            top.done.push((name.to_vec(), [0; 32]));
            if stack.len() > DEPTH_MAX {
                return Err(VolumeError::Damaged("directories that are in each other"));
            }
            stack.push(open(reader, ino, &mut listed, &mut rows_read).await?);
        } else {
            let node = nodes.get(ino).ok_or(VolumeError::NoInode(ino))?;
            top.done.push((name.to_vec(), node));
        }
    }
    Err(VolumeError::NoInode(Ino::ROOT))
}
