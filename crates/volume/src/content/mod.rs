//! Content: what a connection has brought for its next commit, and reading what is stored.

pub(crate) mod flying;
pub(crate) mod reserve;
pub(crate) mod sweep;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use hayloft_model::{BLOCK_SIZE, ContentHash};
use hayloft_store::{ChunkError, Codec, EncodedChunk, PackEntry, PackWriter, StoreError, name_chunks};
use hayloft_wire::{BeginBatch, Chunk, RecordMessage, record_message};
use prost::Message;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use crate::content::flying::Flying;
use crate::database::ledger::Damage;
use crate::database::small::{SmallPlace, is_lost};
use crate::database::tables::{self, PackId, Place};
use crate::error::VolumeError;
use crate::room::Held;
use crate::volume::Volume;

/// A pack is closed when it holds this many bytes.
const PACK_BYTES: usize = 8 << 20;

/// Packs of one connection that are being written at a time; with the one that fills, the memory that
/// a connection's uploads take is bounded.
const PACKS_IN_FLIGHT: usize = 2;

/// Content of a commit up to this many bytes goes into rows: the commit is one write then, not two.
const ROWS_BYTES: usize = 128 * 1024;

/// Content of a small file up to this many bytes stays in its row: where it is would take a tenth of it.
const SMALL_MIN: usize = 256;

/// Rows or packs that are read at a time for one request.
const READS: usize = 16;

/// A pack that is durable, or will be soon.
struct Written {
    flying: Arc<Flying>,
    size: u64,
    entries: Vec<PackEntry>,
    /// The records that have brought the last of these, in their order.
    small: Vec<usize>,
    done: JoinHandle<Result<(), VolumeError>>,
}

/// What came for the next commit. When it is dropped instead, its packs are deleted.
pub(crate) struct Pending {
    volume: Arc<Volume>,
    /// The sequence that a `BeginBatch` has announced.
    begun: Option<u64>,
    /// The batch gives room back: its content may use the reserve.
    frees: bool,
    /// Others wait for it: so may this one, and it may exceed the quota.
    pressing: bool,
    records: Vec<RecordMessage>,
    /// Bytes that `records` take.
    records_bytes: u64,
    open: PackWriter,
    /// The records that have brought the last chunks of `open`.
    small: Vec<usize>,
    written: Vec<Written>,
    failed: Option<VolumeError>,
    /// Room for what `open`, and the records, take of the server's memory.
    open_room: Vec<OwnedSemaphorePermit>,
    records_room: Vec<OwnedSemaphorePermit>,
}

/// Content that is ready to be named by rows: durable packs, or chunks for the rows themselves.
pub(crate) struct Ready {
    pub(crate) places: HashMap<ContentHash, Place>,
    /// Content of small files, by the number of the record that has brought it.
    pub(crate) small: HashMap<usize, SmallPlace>,
    pub(crate) packs: Vec<(PackId, u64)>,
    /// Bytes that the rows will hold.
    pub(crate) row_bytes: u64,
    /// Bytes of content, decoded.
    pub(crate) content_bytes: u64,
    /// Keeps sweeps from the packs until the rows are there.
    pub(crate) flying: Vec<Arc<Flying>>,
}

impl Ready {
    /// Bytes of all packs.
    pub(crate) fn pack_bytes(&self) -> u64 {
        self.packs.iter().map(|(_, size)| size).sum()
    }
}

/// A chunk of a message, checked in form; that it is what its name says is for [`verified`] to find.
fn chunk_from(chunk: Chunk) -> Result<EncodedChunk, VolumeError> {
    let hash: [u8; 32] =
        chunk.hash.as_ref().try_into().map_err(|_| VolumeError::Invalid("a hash not of 32 bytes"))?;
    let codec = Codec::try_from(chunk.codec)?;
    let found = chunk.payload.len();
    let fits = match codec {
        Codec::Raw => found == chunk.len as usize,
        Codec::Lz4 => found <= chunk.len as usize,
    };
    if !fits || u64::from(chunk.len) > BLOCK_SIZE {
        return Err(ChunkError::Length { expected: chunk.len, found }.into());
    }
    Ok(EncodedChunk { hash: ContentHash(hash), len: chunk.len, codec, payload: chunk.payload })
}

pub(crate) fn message_of(chunk: EncodedChunk) -> Chunk {
    Chunk {
        hash: bytes::Bytes::copy_from_slice(&chunk.hash.0),
        len: chunk.len,
        codec: chunk.codec as u32,
        payload: chunk.payload,
    }
}

impl Pending {
    pub(crate) fn new(volume: Arc<Volume>) -> Pending {
        Pending {
            volume,
            begun: None,
            frees: false,
            pressing: false,
            records: Vec::new(),
            records_bytes: 0,
            open: PackWriter::default(),
            small: Vec::new(),
            written: Vec::new(),
            failed: None,
            open_room: Vec::new(),
            records_room: Vec::new(),
        }
    }

    /// A batch that the client has announced.
    pub(crate) fn begin(volume: Arc<Volume>, begin: &BeginBatch) -> Pending {
        let (frees, pressing) = (begin.bytes < 0, begin.pressing);
        Pending { begun: Some(begin.sequence), frees, pressing, ..Pending::new(volume) }
    }

    /// Whether others wait for the batch, and it was refused before.
    pub(crate) fn is_pressing(&self) -> bool {
        self.pressing
    }

    /// Takes records; those of too large a batch are dropped, which is told at the commit.
    pub(crate) fn push_records(&mut self, records: Vec<RecordMessage>, room: Held) {
        if self.failed.is_some() {
            return;
        }
        let of = |record: &RecordMessage| (record.encoded_len() + size_of::<RecordMessage>()) as u64;
        self.records_bytes += records.iter().map(of).sum::<u64>();
        if self.records_bytes > self.volume.shared.config.batch_records_bytes {
            self.fail(VolumeError::Invalid("a batch of too many records"));
        } else {
            self.records.extend(records);
            self.records_room.extend(room);
        }
    }

    /// The records that came, for the commit of that sequence.
    pub(crate) fn take_records(&mut self, sequence: u64) -> Vec<RecordMessage> {
        if self.begun.is_some_and(|begun| begun != sequence) {
            self.fail(VolumeError::Invalid("the commit of another batch than the one that was begun"));
        }
        std::mem::take(&mut self.records)
    }

    /// Nothing will come of this batch: what it has brought goes at once.
    fn fail(&mut self, error: VolumeError) {
        self.failed = Some(error);
        self.open = PackWriter::default();
        self.small.clear();
        self.written.clear();
        self.records = Vec::new();
        self.open_room.clear();
        self.records_room.clear();
    }

    /// There was no room for a part of it: it has to be sent anew.
    pub(crate) fn crowded(&mut self) {
        if self.failed.is_none() {
            self.fail(VolumeError::Crowded);
        }
    }

    /// Whether nothing will come of it, whatever follows.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Whether nothing of a batch is in memory.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.records.is_empty()
    }

    /// Others need the room: content goes to the store before its time.
    pub(crate) async fn spill(&mut self) {
        if !self.open.is_empty()
            && let Err(error) = self.write_pack().await
        {
            self.fail(error);
        }
    }

    /// The room that the batch takes, which is given back when it is done.
    pub(crate) fn take_room(&mut self) -> Vec<OwnedSemaphorePermit> {
        let mut room = std::mem::take(&mut self.records_room);
        room.append(&mut self.open_room);
        room
    }

    /// Takes a chunk; waits while too many packs are being written. What goes wrong is told at the
    /// commit, which then stores nothing.
    pub(crate) async fn push(&mut self, chunk: Chunk, room: Held) {
        if self.failed.is_some() {
            return;
        }
        let pushed = match chunk_from(chunk) {
            Ok(chunk) => {
                self.open.push(chunk);
                self.open_room.extend(room);
                if self.open.size() >= PACK_BYTES { self.write_pack().await } else { Ok(()) }
            }
            Err(error) => Err(error),
        };
        if let Err(error) = pushed {
            self.fail(error);
        }
    }

    async fn write_pack(&mut self) -> Result<(), VolumeError> {
        if let Some(at) = self.written.len().checked_sub(PACKS_IN_FLIGHT) {
            finished(&mut self.written[at].done).await?;
        }
        let (open, small) = (std::mem::take(&mut self.open), std::mem::take(&mut self.small));
        let (size, entries) = (open.sealed_size(), open.entries().to_vec());
        let reserve = &self.volume.shared.reserve;
        if self.frees || self.pressing {
            reserve.admit_to_free(size)?
        } else {
            reserve.admit(size)?
        }
        let flying = Arc::new(self.volume.new_pack(size));
        let path = self.volume.homes.path(flying.pack);
        let store = self.volume.shared.store.clone();
        let room = std::mem::take(&mut self.open_room);
        // The put holds the pack, too: it is not deleted before it is there.
        let held = Arc::clone(&flying);
        let done = tokio::spawn(async move {
            let stored = async { Ok(store.create(&path, verified(open).await?.seal().payload).await?) };
            let stored = stored.await;
            hayloft_crash::point("commit.pack-put");
            drop((held, room));
            stored
        });
        self.written.push(Written { flying, size, entries, small, done });
        Ok(())
    }

    /// Puts the content of small files into packs, if there is enough of all to be worth one.
    async fn push_small(&mut self, records: &[RecordMessage]) -> Result<(), VolumeError> {
        let small: Vec<(usize, Bytes)> = small_contents(records).collect();
        let bytes = small.iter().map(|(_, content)| content.len()).sum::<usize>();
        if small.is_empty() || self.written.is_empty() && self.open.size() + bytes < ROWS_BYTES {
            return Ok(());
        }
        let name = move || -> Vec<(usize, EncodedChunk)> {
            let (at, contents): (Vec<usize>, Vec<Bytes>) = small.into_iter().unzip();
            at.into_iter().zip(name_chunks(contents)).collect()
        };
        for (at, chunk) in tokio::task::spawn_blocking(name).await.map_err(|_| VolumeError::ShuttingDown)? {
            self.open.push_named(chunk);
            self.small.push(at);
            if self.open.size() >= PACK_BYTES {
                self.write_pack().await?;
            }
        }
        Ok(())
    }

    /// Makes everything durable that has to be so before the rows of these records.
    pub(crate) async fn finish(mut self, records: &[RecordMessage]) -> Result<Ready, VolumeError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.push_small(records).await?;
        let mut ready = Ready {
            places: HashMap::new(),
            small: HashMap::new(),
            packs: Vec::new(),
            row_bytes: 0,
            content_bytes: 0,
            flying: Vec::new(),
        };
        if self.written.is_empty() && self.open.size() < ROWS_BYTES {
            for chunk in verified(self.open).await?.into_chunks() {
                ready.row_bytes += chunk.payload.len() as u64;
                ready.content_bytes += u64::from(chunk.len);
                ready.places.insert(chunk.hash, Place::here(chunk));
            }
            return Ok(ready);
        }
        if !self.open.is_empty() {
            self.write_pack().await?;
        }
        for mut written in self.written {
            finished(&mut written.done).await?;
            let (chunks, small) = written.entries.split_at(written.entries.len() - written.small.len());
            ready.content_bytes += written.entries.iter().map(|entry| u64::from(entry.len)).sum::<u64>();
            let place =
                |(at, entry): (usize, &PackEntry)| (at, SmallPlace::in_pack(written.flying.pack, entry));
            ready.small.extend(written.small.into_iter().zip(small).map(place));
            for entry in chunks {
                ready.places.insert(entry.hash, Place::in_pack(written.flying.pack, entry));
            }
            ready.packs.push((written.flying.pack, written.size));
            ready.flying.push(written.flying);
        }
        Ok(ready)
    }
}

/// Content in rows that is better kept in packs, with the numbers of the records.
fn small_contents(records: &[RecordMessage]) -> impl Iterator<Item = (usize, Bytes)> {
    records.iter().enumerate().filter_map(|(at, record)| match record.body.as_ref()? {
        record_message::Body::PutInode(row) => {
            row.inline.clone().filter(|content| content.len() > SMALL_MIN).map(|content| (at, content))
        }
        _ => None,
    })
}

/// Gives the chunks back when each of them is what its name says: no other may get a place, or take that of a good one.
/// This is computing, so it is done beside the threads that serve, while more arrives.
async fn verified(chunks: PackWriter) -> Result<PackWriter, VolumeError> {
    if chunks.is_named() {
        return Ok(chunks);
    }
    let verify = tokio::task::spawn_blocking(move || chunks.verify().map(|()| chunks));
    Ok(verify.await.map_err(|_| VolumeError::ShuttingDown)??)
}

/// Waits for a put; a second wait for the same one is answered at once.
async fn finished(done: &mut JoinHandle<Result<(), VolumeError>>) -> Result<(), VolumeError> {
    let outcome = (&mut *done).await;
    *done = tokio::spawn(async { Ok(()) });
    outcome.unwrap_or(Err(VolumeError::ShuttingDown))
}

impl Volume {
    /// Where a chunk is.
    async fn place_of(&self, hash: ContentHash) -> Result<Place, VolumeError> {
        if is_lost(&hash) {
            let what = "is damaged, or the pack that it was in is gone".to_owned();
            return Err(VolumeError::AtRest(Damage {
                object: format!("the content of a small file ({hash})"),
                what,
            }));
        }
        let row = self.db()?.get(tables::chunk(hash)).await?.ok_or(VolumeError::NoContent(hash))?;
        Place::decode(row).ok_or(VolumeError::Damaged("place of content"))
    }

    /// Reads chunks, in the order asked. A chunk that a sweep moves meanwhile is found at its new place.
    pub(crate) async fn read_chunks(&self, hashes: &[ContentHash]) -> Result<Vec<EncodedChunk>, VolumeError> {
        let mut tries = 0;
        loop {
            match self.try_read_chunks(hashes).await {
                Err(VolumeError::Store(StoreError::NotFound { path })) if tries < 3 => {
                    tries += 1;
                    tracing::debug!(path, "a pack is gone; its chunks are looked up again");
                }
                read => return read,
            }
        }
    }

    async fn try_read_chunks(&self, hashes: &[ContentHash]) -> Result<Vec<EncodedChunk>, VolumeError> {
        let places: Vec<Place> = stream::iter(hashes.iter().copied())
            .map(|hash| self.place_of(hash))
            .buffered(READS)
            .try_collect()
            .await?;
        let mut chunks: Vec<Option<EncodedChunk>> = vec![None; hashes.len()];
        let mut by_pack: HashMap<PackId, Vec<usize>> = HashMap::new();
        for (at, place) in places.iter().enumerate() {
            match place {
                Place::Here { len, codec, payload } => {
                    let (hash, payload) = (hashes[at], payload.clone());
                    chunks[at] = Some(EncodedChunk { hash, len: *len, codec: *codec, payload });
                }
                Place::Pack { pack, .. } => by_pack.entry(*pack).or_default().push(at),
            }
        }
        let places = &places;
        let read: Vec<(usize, EncodedChunk)> = stream::iter(by_pack)
            .map(|(pack, wanted)| self.read_pack(pack, wanted, hashes, places))
            .buffer_unordered(READS)
            .map_ok(|chunks| stream::iter(chunks).map(Ok::<_, VolumeError>))
            .try_flatten()
            .try_collect()
            .await?;
        for (at, chunk) in read {
            chunks[at] = Some(chunk);
        }
        Ok(chunks.into_iter().map(|chunk| chunk.expect("every chunk is in its row or in a pack")).collect())
    }

    async fn read_pack(
        &self,
        pack: PackId,
        wanted: Vec<usize>,
        hashes: &[ContentHash],
        places: &[Place],
    ) -> Result<Vec<(usize, EncodedChunk)>, VolumeError> {
        let mut ranges = Vec::with_capacity(wanted.len());
        let mut heads = Vec::with_capacity(wanted.len());
        for at in wanted {
            if let Place::Pack { offset, payload_len, len, codec, .. } = &places[at] {
                let from = u64::from(*offset);
                ranges.push(from..from + u64::from(*payload_len));
                heads.push((at, hashes[at], *len, *codec));
            }
        }
        let payloads = self.shared.store.read_ranges(&self.homes.path(pack), &ranges).await?;
        Ok(heads
            .into_iter()
            .zip(payloads)
            .map(|((at, hash, len, codec), payload)| (at, EncodedChunk { hash, len, codec, payload }))
            .collect())
    }
}
