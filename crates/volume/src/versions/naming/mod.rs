//! The name by content of a snapshot, see [`hayloft_tree::name`]: worked out from rows, and from what has changed since the last
//! one that was named.

mod directories;
mod kept;
mod nodes;

use std::sync::Arc;

use hayloft_model::Ino;
use hayloft_tree::TreeName;
use hayloft_tree::name::Node;
use hayloft_wire::Version;
use parking_lot::Mutex;

use crate::database::family::{self, Snapshot};
use crate::database::registry;
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::naming::directories::Listed;
use crate::versions::naming::kept::Kept;
use crate::versions::naming::nodes::{Nodes, Reader};
use crate::versions::point::{self, Point};
use crate::versions::snapshot;
use crate::versions::tables::Tables;

/// Most signatures of a snapshot.
const SIGNATURES_MAX: usize = 16;

/// Most bytes of one.
const SIGNATURE_MAX: usize = 16 << 10;

/// Of so many files all names are held in memory while a tree is named from all rows: 30 MiB.
const LISTED_MAX: u64 = 300_000;

/// What was found out.
pub(crate) struct Named {
    /// As it is entered; of a volume as it is now, not entered.
    pub(crate) snapshot: Snapshot,
    pub(crate) name: TreeName,
    /// Rows that were read for it.
    pub(crate) rows_read: u64,
}

/// Works out the name of a version, and enters it with its snapshot if that has none. `anew`: of one that has a name, from all rows,
/// whatever is known.
///
/// # Errors
/// There is no such version; content of it is damaged; the store fails.
pub(crate) async fn name(
    shared: &Arc<Shared>,
    of: &Version,
    by: &str,
    anew: bool,
) -> Result<Named, VolumeError> {
    if of.snapshot.is_empty()
        && !anew
        && let Some((database, mark)) = point::tree(shared, of).await?
        && let Some(name) = shared.lately_named.of(&database, mark)
    {
        return Ok(Named { snapshot: Snapshot::default(), name, rows_read: 0 });
    }
    let point = Point::of(shared, of, by).await?;
    let anew = anew && point.snapshot.tree.is_some();
    let mut named = named(shared, &point, anew).await;
    if let (Ok((named, nodes)), true) = (&mut named, point.is_made)
        && let Some((database, mark)) = shared.remembered.tree(&point.snapshot)
    {
        let nodes = nodes.take().filter(|nodes| nodes.known.len() as u64 <= LISTED_MAX);
        let known = nodes.map(Nodes::into_known);
        shared.lately_named.put(Lately { database, mark, name: named.name, known });
    }
    point.done(shared).await?;
    let (mut named, _) = named?;
    if !of.snapshot.is_empty() && named.snapshot.tree.is_none() {
        named.snapshot = change(shared, of, |snapshot| {
            snapshot.tree.get_or_insert_with(|| named.name.to_string());
            Ok(())
        })
        .await?;
    }
    Ok(named)
}

/// A tree that was named.
struct Lately {
    database: String,
    mark: u64,
    name: TreeName,
    /// The nodes of its files, until a snapshot keeps them.
    known: Option<Vec<(Ino, Node)>>,
}

impl Lately {
    fn is(&self, database: &str, mark: u64) -> bool {
        self.database == database && self.mark == mark
    }
}

/// The tree that was named last without a snapshot of it: of one that is made of it later the name is known.
#[derive(Default)]
pub(crate) struct LatelyNamed(Mutex<Option<Lately>>);

impl LatelyNamed {
    fn put(&self, named: Lately) {
        *self.0.lock() = Some(named);
    }

    /// The name of the tree that a database has with a mark, see [`point::tree`].
    pub(super) fn of(&self, database: &str, mark: u64) -> Option<TreeName> {
        self.0.lock().as_ref().filter(|named| named.is(database, mark)).map(|named| named.name)
    }

    /// The nodes of its files, once.
    fn take_known(&self, database: &str, mark: u64) -> Option<Vec<(Ino, Node)>> {
        self.0.lock().as_mut().filter(|named| named.is(database, mark))?.known.take()
    }

    /// The tree of a database that had one mark has another one from now on.
    pub(super) fn moved(&self, database: &str, from: u64, to: u64) {
        if let Some(named) = self.0.lock().as_mut().filter(|named| named.is(database, from)) {
            named.mark = to;
        }
    }
}

/// A snapshot has its name from its beginning, as the tree that a database has with this mark: while nobody waits it is kept what is known of
/// it when the next one is named, and worked out if that is not at hand any more.
pub(super) fn keep_later(shared: &Arc<Shared>, snapshot: &Snapshot, mark: u64) {
    let (shared, point) = (Arc::clone(shared), Point { snapshot: snapshot.clone(), is_made: false });
    let known = shared.lately_named.take_known(&snapshot.database, mark);
    tokio::spawn(async move {
        if let Some(known) = known
            && let Ok(entry) = registry::read(&shared.store, &point.snapshot.volume).await
        {
            return Kept::write(&shared, entry.family(), &point.snapshot, known).await;
        }
        match named(&shared, &point, false).await {
            Ok((named, _)) if Some(named.name.to_string()) == point.snapshot.tree => {}
            Ok((named, _)) => {
                tracing::error!(snapshot = point.snapshot.shown(), name = %named.name, "a snapshot has another tree than its name says");
            }
            Err(error) => {
                tracing::debug!(snapshot = point.snapshot.shown(), %error, "the next one is named from all rows");
            }
        }
    });
}

/// Adds a signature of a snapshot's name; who may sign is for those to know who mount it.
///
/// # Errors
/// It has another name, or none; it has too many signatures.
pub(crate) async fn sign(
    shared: &Arc<Shared>,
    of: &Version,
    name: TreeName,
    signature: &str,
) -> Result<Snapshot, VolumeError> {
    if signature.is_empty() || signature.len() > SIGNATURE_MAX {
        return Err(VolumeError::Invalid("no signature: it is empty, or has more than 16 KiB"));
    }
    change(shared, of, |snapshot| {
        if snapshot.tree.as_ref() != Some(&name.to_string()) {
            return Err(VolumeError::Invalid("what was signed is not the name of this snapshot"));
        }
        if snapshot.signatures.iter().any(|known| known == signature) {
            return Ok(());
        }
        if snapshot.signatures.len() >= SIGNATURES_MAX {
            return Err(VolumeError::Limit { what: "signatures of a snapshot", limit: SIGNATURES_MAX });
        }
        snapshot.signatures.push(signature.to_owned());
        Ok(())
    })
    .await
}

/// Changes the entry of a snapshot, while nobody else does.
async fn change(
    shared: &Arc<Shared>,
    of: &Version,
    change: impl FnOnce(&mut Snapshot) -> Result<(), VolumeError>,
) -> Result<Snapshot, VolumeError> {
    let _structure = shared.structure.lock().await;
    let entry = registry::read(&shared.store, &of.volume).await?;
    let place = shared.hold(&format!("{}@{}", of.volume, of.snapshot)).await;
    let mut found = snapshot::find(shared, &entry, &of.volume, &of.snapshot).await?;
    change(&mut found)?;
    family::update(&shared.store, entry.family(), &found).await?;
    drop(place);
    Ok(found)
}

/// Nobody needs any more what is known of the snapshots of a family.
///
/// # Errors
/// The store fails.
pub(super) async fn forget(shared: &Shared, family: &str) -> Result<(), VolumeError> {
    Ok(shared.store.delete(&kept::path(family)).await?)
}

/// Works out a name; of a snapshot that is there to stay the nodes are kept, and of another one they are given.
async fn named(
    shared: &Arc<Shared>,
    point: &Point,
    anew: bool,
) -> Result<(Named, Option<Nodes>), VolumeError> {
    let snapshot = &point.snapshot;
    let entry = registry::read(&shared.store, &snapshot.volume).await?;
    let family = entry.family().to_owned();
    let tables = Tables::open(shared, snapshot).await?;
    let named = async {
        let before = match anew {
            false => Kept::read(shared, &family).await,
            true => None,
        };
        let reader = Reader::new(&tables, shared, &snapshot.database, &family).await?;
        let nodes = match before {
            Some(before) => before.nodes_of(shared, &reader).await?,
            None => None,
        };
        let mut nodes = match nodes {
            Some(nodes) => nodes,
            None => Nodes::all(&reader, snapshot.inodes <= LISTED_MAX).await?,
        };
        let attributes = std::mem::take(&mut nodes.attributes);
        let listed = match attributes.is_empty() {
            true => Listed::default(),
            false => Listed::all(&reader, attributes, &mut nodes.rows_read).await?,
        };
        let root = directories::root(&reader, &mut nodes, listed).await?;
        let (name, rows_read) = (TreeName(root), nodes.rows_read);
        let named = Named { snapshot: snapshot.clone(), name, rows_read };
        // With one that goes at once nothing can be compared later.
        if point.is_made {
            return Ok((named, Some(nodes)));
        }
        Kept::write(shared, &family, snapshot, nodes.into_known()).await;
        Ok((named, None))
    };
    let named = named.await;
    tables.close().await;
    named
}
