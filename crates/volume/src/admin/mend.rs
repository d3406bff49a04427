//! `hayloft volume check --repair`: mends what can be mended, and says what is gone.

use std::sync::Arc;

use bytes::Bytes;
use hayloft_model::{FileKind, Ino, slot};
use hayloft_wire::{CheckVolume, Checked, DentryRow, InodeRowMessage};
use prost::Message;

use crate::database::rows::Rows;
use crate::database::tables::{self, VolumeRow};
use crate::database::{self, ledger, registry};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::volume::Volume;

/// What mends a problem of the tables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Fix {
    /// A name in a directory that leads nowhere is taken away.
    Unlink(u64, Bytes),
    /// An inode without a name gets one at the top: `lost-` and its number.
    Adopt(u64),
    /// The number of links is put right.
    Links(u64, u32),
    /// The usage is counted anew.
    Usage,
    /// A packed listing is dropped.
    Unpack(u64),
}

/// So often what was mended is looked at again: to take a name away changes the links of what it was in.
const ROUNDS: usize = 4;

/// Checks a volume, and mends it if that is asked for; or scrubs it.
///
/// # Errors
/// It is mounted and is to be mended; it cannot be opened and not be mended either.
pub(crate) async fn check(shared: &Arc<Shared>, asked: &CheckVolume) -> Result<Checked, VolumeError> {
    if asked.scrub {
        let volume = shared.volume(&asked.name).await?;
        return volume.scrub(None).await.map_err(|error| error.of(&volume.name));
    }
    if !asked.repair {
        let volume = shared.volume(&asked.name).await?;
        let checked = volume.check(asked.content).await;
        return checked.inspect_err(|error| volume.note(error)).map_err(|error| error.of(&volume.name));
    }
    let mut mended: Vec<String> = shared.restore_lost(&asked.name).await?.into_iter().collect();
    let was_lost = !mended.is_empty();
    let volume = match shared.volume(&asked.name).await {
        Err(error) if error.is_at_rest() => {
            mend_log(shared, &asked.name, &mut mended).await?;
            shared.volume(&asked.name).await?
        }
        opened => opened?,
    };
    match volume.refuse_when_mounted() {
        // Its entries are back, for which nobody had to go; the rest is looked at.
        Err(VolumeError::Busy { .. }) if was_lost => {
            return Ok(Checked { mended, ..volume.check(asked.content).await? });
        }
        refused => refused?,
    }
    let mut left = volume.check_for_repair(asked.content).await?;
    for _ in 0..ROUNDS {
        let (checked, fixes) = &left;
        if fixes.is_empty() {
            break;
        }
        mended.extend(checked.problems.iter().map(|problem| format!("mended: {problem}")));
        volume.mend(fixes).await?;
        left = volume.check_for_repair(asked.content).await?;
    }
    mended.dedup();
    Ok(Checked { mended, ..left.0 })
}

/// Goes on without files of the log, and manifests, that are damaged. They are kept beside.
async fn mend_log(shared: &Arc<Shared>, name: &str, mended: &mut Vec<String>) -> Result<(), VolumeError> {
    let mut place = shared.hold(name).await;
    if let Some(volume) = place.take() {
        volume.refuse_when_mounted()?;
        let _ = volume.close().await;
    }
    let registered = registry::read(&shared.store, name).await?;
    mended.extend(ledger::accept(&shared.store, &registered.id).await?);
    Ok(())
}

impl Volume {
    async fn mend(self: &Arc<Self>, fixes: &[Fix]) -> Result<(), VolumeError> {
        let _turn = self.turn.lock().await;
        let db = self.db()?;
        let mut batch = Rows::new();
        let mut root = database::decode::<InodeRowMessage>(row(&db, Ino::ROOT).await?, "root")?;
        for fix in fixes {
            match fix {
                Fix::Unlink(parent, name) => batch.delete(tables::dentry(Ino(*parent), name)),
                Fix::Links(ino, links) if *ino == Ino::ROOT.0 => root.nlink = *links,
                Fix::Links(ino, links) => {
                    let mut found = database::decode::<InodeRowMessage>(row(&db, Ino(*ino)).await?, "inode")?;
                    found.nlink = *links;
                    batch.put(tables::inode(Ino(*ino)), found.encode_to_vec());
                }
                Fix::Adopt(ino) => {
                    let mut found = database::decode::<InodeRowMessage>(row(&db, Ino(*ino)).await?, "inode")?;
                    let kind =
                        FileKind::of_mode(found.mode).ok_or(VolumeError::Damaged("mode of an inode"))?;
                    if root.next_cookie >= slot::FIRST_COOKIE {
                        return Err(VolumeError::Damaged("next cookie of the root"));
                    }
                    let dentry = DentryRow { ino: *ino, kind: kind.bits(), cookie: root.next_cookie };
                    root.next_cookie += 1;
                    found.parent = Ino::ROOT.0;
                    if kind == FileKind::Directory {
                        root.nlink += 1;
                    } else {
                        found.nlink = 1;
                    }
                    batch.put(
                        tables::dentry(Ino::ROOT, format!("lost-{ino}").as_bytes()),
                        dentry.encode_to_vec(),
                    );
                    batch.put(tables::inode(Ino(*ino)), found.encode_to_vec());
                }
                Fix::Unpack(dir) => batch.delete(tables::packed(Ino(*dir))),
                Fix::Usage => {
                    let usage = count(&db).await?;
                    let mut state = self.state.lock();
                    (state.usage.bytes, state.usage.inodes) = usage;
                    let counted: VolumeRow = state.volume_row();
                    batch.put(tables::VOLUME, counted.encode_to_vec());
                }
            }
        }
        batch.put(tables::inode(Ino::ROOT), root.encode_to_vec());
        self.write(&db, batch).await
    }
}

async fn row(db: &database::Db, ino: Ino) -> Result<Bytes, VolumeError> {
    db.get(tables::inode(ino)).await?.ok_or(VolumeError::NoInode(ino))
}

/// What the files take, and how many inodes there are.
async fn count(db: &database::Db) -> Result<(u64, u64), VolumeError> {
    let snapshot = db.snapshot()?;
    let (mut bytes, mut inodes) = (0, 0);
    let mut scan = database::scan(&snapshot, &[tables::INODES]).await?;
    while let Some(found) = scan.next().await? {
        let row = database::decode::<InodeRowMessage>(found.value, "inode")?;
        if row.ino != Ino::ROOT.0 && row.nlink > 0 {
            bytes += row.allocated;
            inodes += 1;
        }
    }
    Ok((bytes, inodes))
}
