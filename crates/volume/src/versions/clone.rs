//! Databases that begin as others were.

use hayloft_model::Ino;
use hayloft_store::Store;
use hayloft_wire::InodeRowMessage;
use prost::Message;
use slatedb::CloneSourceSpec;
use slatedb::admin::AdminBuilder;
use uuid::Uuid;

use crate::database::journal::{Lineage, Part};
use crate::database::numbers::Numbers;
use crate::database::registry::Registered;
use crate::database::rows::Rows;
use crate::database::tables::{self, MarkRow, VolumeRow};
use crate::database::{self, Db, family};
use crate::error::VolumeError;

/// Rows that are deleted in one batch.
const SLICE: usize = 1000;

/// Makes a database that begins as another one was at a checkpoint. It has that one's table files; nothing is copied but the
/// end of its log.
pub(crate) async fn make(
    store: &Store,
    family: &str,
    (from, checkpoint): (&str, Uuid),
    to: &str,
) -> Result<(), VolumeError> {
    // First: nothing that it needs goes from now on.
    family::enter(store, family, to).await?;
    hayloft_crash::point("clone.entered");
    let source = CloneSourceSpec::with_checkpoint(database::path(from), checkpoint);
    let admin = AdminBuilder::new(database::path(to), store.objects()).build();
    if admin.read_manifest(None).await?.is_some_and(|manifest| manifest.initialized()) {
        return Ok(());
    }
    admin.create_clone_builder_from_source(source).build().await?;
    hayloft_crash::point("clone.made");
    Ok(())
}

/// Makes rows that began as those of another volume fit for this one, once: its sessions are not this one's, nor is what only
/// they had open.
pub(crate) async fn fit(db: &Db, id: &str, registered: &Registered) -> Result<(), VolumeError> {
    if db.get(tables::FITTED).await?.is_some_and(|fitted| fitted == id) {
        return Ok(());
    }
    let snapshot = db.snapshot()?;
    let mut batch = Rows::new();
    let mut count = 0;
    for table in [tables::ORPHANS, tables::SESSIONS, tables::CHANGES, tables::ENDED] {
        let mut scan = database::scan(&snapshot, &[table]).await?;
        while let Some(found) = scan.next().await? {
            if table == tables::ORPHANS {
                let ino =
                    tables::second_number_in(&found.key).ok_or(VolumeError::Damaged("key of an orphan"))?;
                let row = (**db).get(tables::inode(Ino(ino))).await?;
                let row = row.map(|row| database::decode::<InodeRowMessage>(row, "inode")).transpose()?;
                if row.is_some_and(|row| row.nlink == 0) {
                    // It has left the usage when it lost its name.
                    batch.delete(tables::inode(Ino(ino)));
                }
            }
            batch.delete(found.key);
            count += 1;
            if count % SLICE == 0 {
                database::write_durably(db, std::mem::take(&mut batch)).await?;
            }
        }
    }
    for row in [tables::HISTORY, tables::SEAL_KEY, tables::BROUGHT] {
        batch.delete(row);
    }
    let row = db.get(tables::VOLUME).await?.ok_or(VolumeError::Damaged("volume row"))?;
    let row = database::decode::<VolumeRow>(row, "volume")?;
    let mark = database::row::<MarkRow>(db, tables::MARK, "mark").await?;
    let lineage = database::row::<Lineage>(db, tables::LINEAGE, "lineage").await?;
    match (mark, lineage) {
        (Some(MarkRow { mark, journal_from: Some(_), .. }), Some(mut lineage)) => {
            lineage.parts.push(Part { database: id.to_owned(), from: mark });
            batch.put(tables::LINEAGE, lineage.encode_to_vec());
        }
        _ => batch.delete(tables::LINEAGE),
    }
    let window = registered.numbers_from;
    let own = row.numbers_of(window);
    // The same volume's, at an earlier time.
    let is_own = if own.end != 0 { own.then == window } else { own.next >= window };
    let numbers = match registered.run {
        None if is_own => own,
        run => Numbers::of_fork(run, window),
    };
    let (next_ino, end_ino, then_ino) = (numbers.next, numbers.end, numbers.then);
    let row = VolumeRow { next_ino, end_ino, then_ino, heir: None, ..row };
    batch.put(tables::VOLUME, row.encode_to_vec());
    batch.put(tables::FITTED, id.to_owned());
    Ok(database::write_durably(db, batch).await?)
}
