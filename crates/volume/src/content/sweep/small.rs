//! Packs that are mostly dead: the content of small files in them moves, as the chunks do.

use std::collections::{HashMap, HashSet};

use hayloft_model::Ino;
use hayloft_store::{PackWriter, name_chunks};
use hayloft_wire::InodeRowMessage;
use hayloft_wire::listing::Row;
use prost::Message;

use super::rewrite::MOVE_BYTES;
use super::{SLICE, Sweep};
use crate::database::rows::Rows;
use crate::database::small::SmallPlace;
use crate::database::tables::{self, PackId};
use crate::database::{self, DbSnapshot};
use crate::error::VolumeError;

impl Sweep<'_> {
    /// Moves what inodes of a snapshot have in these packs.
    pub(super) async fn move_small_files(
        &mut self,
        snapshot: &DbSnapshot,
        sparse: &HashMap<PackId, u64>,
        kept: &mut HashSet<PackId>,
    ) -> Result<(), VolumeError> {
        let (mut group, mut bytes) = (Vec::new(), 0);
        let mut scan = database::scan(snapshot, &[tables::INODES]).await?;
        while let Some(found) = scan.next().await? {
            let row = Row::of(&found.value).map_err(|_| VolumeError::Damaged("inode"))?;
            let place = SmallPlace::of_bytes(row.placed)?.filter(|place| sparse.contains_key(&place.pack));
            let Some((place, ino)) = place.zip(tables::number_in(&found.key)) else { continue };
            bytes += u64::from(place.len);
            group.push((Ino(ino), place));
            if bytes >= MOVE_BYTES || group.len() == SLICE {
                self.move_group(std::mem::take(&mut group), kept).await?;
                bytes = 0;
            }
        }
        self.move_group(group, kept).await
    }

    /// Writes contents into a new pack and lets the rows lead there that still lead to the old one, whatever else has changed in
    /// them. A pack of which something cannot be read is kept as it is.
    async fn move_group(
        &mut self,
        group: Vec<(Ino, SmallPlace)>,
        kept: &mut HashSet<PackId>,
    ) -> Result<(), VolumeError> {
        let mut by_pack: HashMap<PackId, Vec<(Ino, SmallPlace)>> = HashMap::new();
        for (ino, place) in group {
            by_pack.entry(place.pack).or_default().push((ino, place));
        }
        let (mut writer, mut moved) = (PackWriter::default(), Vec::new());
        for (pack, files) in by_pack {
            let read = self.db.contents().read(pack, files.iter().map(|(_, place)| *place)).await?;
            let whole = read.filter(|contents| {
                SmallPlace::are(files.iter().map(|(_, place)| place), contents).into_iter().all(|is| is)
            });
            let Some(contents) = whole else {
                let name = &self.volume.name;
                tracing::error!(volume = name, ?pack, "a pack with damaged content is kept");
                kept.insert(pack);
                continue;
            };
            name_chunks(contents).for_each(|chunk| writer.push_named(chunk));
            moved.extend(files);
        }
        if moved.is_empty() {
            return Ok(());
        }
        let (flying, size, entries) = self.put_pack(writer).await?;
        let _turn = self.volume.turn.lock().await;
        let mut batch = Rows::new();
        for ((ino, old), entry) in moved.into_iter().zip(&entries) {
            // Not with its content: this is about the row.
            let Some(row) = (*self.db).get(tables::inode(ino)).await? else { continue };
            let row = database::decode::<InodeRowMessage>(row, "inode")?;
            if SmallPlace::of_row(&row)? == Some(old) {
                let placed = Some(SmallPlace::in_pack(flying.pack, entry).encode());
                batch.put_moved(ino, InodeRowMessage { placed, ..row }.encode_to_vec());
            }
        }
        self.name_pack(batch, flying, size).await
    }
}
