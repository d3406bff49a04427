//! Walks read packed listings where there are such, and see to it that there are ([`crate::database::packed`]).

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::Ino;

use crate::database::Db;
use crate::database::listing::{self, Entry, Map};
use crate::database::packed::Queued;
use crate::error::VolumeError;
use crate::sharing::enter::Walk;
use crate::volume::Volume;

/// Listings that are looked for at a time.
const READS: usize = 4;

/// What is quiet for this long after it was read is packed.
const QUIET: Duration = Duration::from_secs(1);

/// Bytes of listings that are written while the turn is held once, about.
const SLICE: usize = 1 << 20;

/// The names of a directory, as a walk has read them.
pub(super) struct Names {
    pub(super) entries: Vec<Entry>,
    /// Rows came along.
    is_packed: bool,
    /// Nothing was read before this.
    since: u64,
}

/// Names of a directory of which a listing is to tell.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) dir: Ino,
    pub(super) entries: &'a [Entry],
    pub(super) is_packed: bool,
    pub(super) since: u64,
    /// These are all.
    pub(super) is_whole: bool,
}

impl Names {
    pub(super) fn piece<'a>(&'a self, dir: Ino, entries: &'a [Entry]) -> Piece<'a> {
        let is_whole = entries.len() == self.entries.len();
        Piece { dir, entries, is_packed: self.is_packed, since: self.since, is_whole }
    }
}

impl<'a> Piece<'a> {
    /// Some names, read row by row.
    pub(super) fn part(dir: Ino, entries: &'a [Entry]) -> Piece<'a> {
        Piece { dir, entries, is_packed: false, since: 0, is_whole: false }
    }
}

impl Walk<'_> {
    /// See [`Volume::names`].
    pub(super) async fn names(&self, dirs: &[Ino], limit: usize) -> Result<Map<Names>, VolumeError> {
        self.volume.names(&self.db, dirs, limit).await
    }
}

impl Volume {
    /// The names of directories, packed or row by row. Those that come after about `limit` names are left out.
    pub(super) async fn names(&self, db: &Db, dirs: &[Ino], limit: usize) -> Result<Map<Names>, VolumeError> {
        let since = self.packed.moment();
        let snapshot = db.snapshot()?;
        let (mut found, mut rest, mut count) = (Map::default(), Vec::new(), 0);
        let read = |dir: Ino| {
            let (packed, snapshot) = (&self.packed, &snapshot);
            async move { Ok::<_, VolumeError>((dir, packed.read(snapshot, dir).await?)) }
        };
        let mut packed = stream::iter(dirs.iter().copied()).map(read).buffered(READS);
        while let Some((dir, entries)) = packed.try_next().await? {
            match entries {
                Some(entries) if count + entries.len() <= limit => {
                    count += entries.len();
                    found.insert(dir.0, Names { entries, is_packed: true, since });
                }
                Some(_) => break,
                None => rest.push(dir),
            }
        }
        if !rest.is_empty() && count <= limit {
            let rows = listing::directories(&snapshot, &rest, limit - count).await?;
            let names = |(dir, entries)| (dir, Names { entries, is_packed: false, since });
            found.extend(rows.into_iter().map(names));
        }
        Ok(found)
    }

    /// Writes the listing of a directory, as it was at a moment, when it has been quiet since then.
    pub(super) fn pack_later(self: &Arc<Self>, queued: Queued) {
        // The rows of a snapshot that is mounted are read from a database that goes with the mount.
        if self.is_view() || !self.packed.queue(queued) {
            return;
        }
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(QUIET).await;
                let mut queue = volume.packed.take_queue();
                if queue.is_empty() {
                    return;
                }
                while !queue.is_empty() {
                    let mut bytes = 0;
                    let fits = |queued: &&Queued| {
                        bytes += queued.packed.len();
                        bytes <= SLICE
                    };
                    let count = queue.iter().take_while(fits).count().max(1);
                    let slice = queue.drain(..count).collect();
                    if let Err(error) = volume.write_queued(slice).await {
                        tracing::debug!(volume = volume.name, %error, "listings are not packed");
                        break;
                    }
                }
            }
        });
    }

    async fn write_queued(self: &Arc<Self>, queued: Vec<Queued>) -> Result<(), VolumeError> {
        let _turn = self.turn.lock().await;
        let bytes: usize = queued.iter().map(|queued| queued.packed.len()).sum();
        self.shared.reserve.admit(2 * bytes as u64)?;
        self.write_packed(&self.db()?, queued).await
    }
}
