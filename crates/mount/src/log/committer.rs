//! The log on its way to the server: cuts it, and ships content and records.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hayloft_model::tree::Cut;
use hayloft_model::{BlockRef, Content, FileKind, Ino, PAGE_BLOCKS, Record, Sequence};
use hayloft_store::encode_chunk;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::weight;
use hayloft_wire::{BatchCheck, BeginBatch, Chunk, Commit, Committed, FailureCode, RecordMessage, Records};
use prost::Message;

use crate::cache::data::DataCut;
use crate::core::Client;
use crate::host;
use crate::log::ledger::{FlushError, Work};
use crate::log::rescue::{self, Unsent};
use crate::session::link::CallError;

/// How long to wait before a refused batch is tried again: at first, and at most.
const RETRY_MIN: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How long to wait before a batch with an uncertain fate is sent again.
const AGAIN: Duration = Duration::from_millis(50);
/// How often a batch is sent that arrives damaged, before whoever waits is told. It is encoded anew each time.
const DAMAGED_MAX: u32 = 8;
/// About so many bytes of records go in one message.
const PART_BYTES: usize = 96 << 10;
/// This part of the changed rows that there may be is shipped before its time.
const ROWS_PART: usize = 4;
/// And so many in any case: while the log is cut every call waits.
const CUT_ROWS: usize = 16 << 10;
/// So many records are completed while calls wait.
const COMPLETED_AT_ONCE: usize = 512;

/// A cut with the data of its files.
#[derive(Debug)]
pub(crate) struct Shipment {
    pub(crate) cut: Cut,
    pub(crate) files: Vec<(Ino, DataCut)>,
    /// Bytes of content.
    pub(crate) bytes: u64,
    /// It was refused, and others wait for it.
    pub(crate) pressing: bool,
    /// Somebody waits until it is durable.
    pub(crate) durable: bool,
    /// The records name all content: the check of them.
    pub(crate) completed: Option<BatchCheck>,
}

/// The committer's thread: runs until [`crate::log::ledger::Ledger::stop`].
pub(crate) fn run(client: &Client) {
    host::lower_priority();
    let mut pause = RETRY_MIN;
    while let Some(Work { ticket, pressing, durable }) = client.ledger.await_work(client.options.commit) {
        client.keep_lost();
        let sequence = client.ledger.next_sequence();
        let Some(mut shipment) = cut(client, sequence, pressing, durable) else {
            client.ledger.succeeded(ticket, None);
            continue;
        };
        hayloft_crash::point("log.cut");
        match ship(client, &mut shipment) {
            Ok(committed) => {
                hayloft_crash::point("log.answered");
                pause = RETRY_MIN;
                settle(client, &shipment);
                client.ledger.succeeded(ticket, Some(sequence));
                client.let_go();
                client.note_shipped(sequence, &shipment.cut.batch.records);
                if let Some(status) = committed.and_then(|committed| committed.status) {
                    client.set_usage(status);
                }
                client.trim();
            }
            Err(error) => {
                client.stats.commits_refused.add(1);
                tracing::warn!(?error, "a batch was refused, its changes are kept");
                let pressing = shipment.pressing;
                undo(client, shipment);
                if pressing && error == FlushError::NoSpace && client.set_aside() {
                    client.ledger.again();
                    continue;
                }
                let error = match error {
                    FlushError::Ended(reason) => FlushError::Ended(client.keep_all(&reason)),
                    error => error,
                };
                if error == FlushError::Replaced {
                    client.ledger.put_off();
                    std::thread::sleep(AGAIN);
                    continue;
                }
                let (ended, full) = (matches!(error, FlushError::Ended(_)), error == FlushError::NoSpace);
                client.ledger.failed(ticket, error);
                if ended {
                    client.ledger.stop();
                    continue;
                }
                if full {
                    // The quota may be another one, and others may have used it up.
                    client.refresh_status(None);
                }
                client.ledger.pause(pause);
                pause = (pause * 2).min(RETRY_MAX);
            }
        }
    }
    client.keep_lost();
}

/// Cuts the log; `None` when nothing has changed.
fn cut(client: &Client, sequence: Sequence, pressing: bool, durable: bool) -> Option<Shipment> {
    let mut core = client.core();
    // Data of files without a name stays here unless it is what fills the memory.
    let with_unnamed = client.room_wanted.swap(false, Ordering::Relaxed) || client.over_budget(0);
    let cut = core.tree.cut(sequence, with_unnamed);
    if cut.batch.records.is_empty() && cut.batch.usage == Default::default() {
        return None;
    }
    let mut changed = Vec::new();
    for record in &cut.batch.records {
        let Record::PutInode(ino, row) = record else { continue };
        if row.kind() != FileKind::Regular {
            continue;
        }
        let Some(file) = core.files.get(ino) else { continue };
        file.data.lock().cut_later(sequence);
        changed.push((*ino, Arc::clone(file)));
    }
    core.in_flight = true;
    client.dirty_rows.store(0, Ordering::Relaxed);
    drop(core);
    let mut files = Vec::with_capacity(changed.len());
    let mut bytes = 0;
    for (ino, file) in changed {
        let data = client.budget.with(&file, |data| data.collect_cut(sequence));
        let taken = data.blocks.iter().map(|(_, block)| block.len() as u64).sum::<u64>();
        client.budget.add_in_flight(taken as i64);
        bytes += taken;
        files.push((ino, data));
    }
    Some(Shipment { cut, files, bytes, pressing, durable, completed: None })
}

/// Ships content and records, over as many connections as it takes. `None`: the server had the batch already.
fn ship(client: &Client, shipment: &mut Shipment) -> Result<Option<Committed>, FlushError> {
    let (mut damaged, mut damaged_frames) = (0, client.link.damaged());
    loop {
        let connection = match client.link.connection() {
            Ok(connection) => connection,
            // It had it before it ended the session.
            Err(CallError::Replaced) if client.link.last_sequence() >= shipment.cut.batch.sequence.0 => {
                return Ok(None);
            }
            Err(CallError::Replaced) => return Err(FlushError::Replaced),
            Err(error) => return Err(FlushError::Ended(error.to_string())),
        };
        match ship_once(client, shipment, connection) {
            Ok(committed) => {
                client.link.was_refused(connection, false);
                return Ok(committed);
            }
            Err(CallError::Broken | CallError::Replaced) if client.link.damaged() == damaged_frames => {}
            Err(CallError::Broken | CallError::Replaced) => {
                (damaged, damaged_frames) = (damaged + 1, client.link.damaged());
                if damaged == DAMAGED_MAX {
                    let message = "what is sent arrives damaged at the server each time".to_owned();
                    return Err(FlushError::Store(message));
                }
            }
            Err(CallError::Ended(reason)) => return Err(FlushError::Ended(reason)),
            Err(CallError::Interrupted) => return Err(FlushError::Interrupted),
            Err(CallError::Failed(failed)) => match failed.code() {
                FailureCode::NoSpace => {
                    client.link.was_refused(connection, true);
                    return Err(FlushError::NoSpace);
                }
                // Applied or not, nobody knows yet: the very same batch again, until the answer is certain.
                FailureCode::Uncertain => std::thread::sleep(AGAIN),
                FailureCode::Damaged if damaged + 1 < DAMAGED_MAX => {
                    tracing::warn!(reason = failed.message, "a batch is sent again");
                    damaged += 1;
                }
                // Connected again by then, perhaps to the server that has taken over.
                FailureCode::Unavailable | FailureCode::SessionEnded => {
                    client.link.abandon(connection);
                    std::thread::sleep(AGAIN);
                }
                _ => {
                    tracing::warn!(reason = failed.message, "the server cannot take a batch");
                    return Err(FlushError::Store(failed.message));
                }
            },
        }
    }
}

fn ship_once(
    client: &Client,
    shipment: &mut Shipment,
    connection: u64,
) -> Result<Option<Committed>, CallError> {
    if client.link.last_sequence() >= shipment.cut.batch.sequence.0 {
        // It was the acknowledgement that got lost.
        return Ok(None);
    }
    let commit = say(client, shipment, &mut |ask| client.link.send_on(connection, ask))?;
    hayloft_crash::point("log.records-sent");
    let answers = client.link.call_once(Ask::Commit(commit), connection)?;
    client.stats.commits.add(1);
    client.stats.records_shipped.add(shipment.cut.batch.records.len() as u64);
    match answers.into_iter().next() {
        Some(Answer::Committed(committed)) => Ok(Some(committed)),
        _ => Err(CallError::Broken),
    }
}

/// Says everything of a batch but what ends it, which is returned.
pub(crate) fn say(
    client: &Client,
    shipment: &mut Shipment,
    say: &mut dyn FnMut(Ask) -> Result<(), CallError>,
) -> Result<Commit, CallError> {
    let (sequence, usage) = (shipment.cut.batch.sequence, shipment.cut.batch.usage);
    let (bytes, inodes, pressing) = (usage.bytes, usage.inodes, shipment.pressing);
    say(Ask::BeginBatch(BeginBatch { sequence: client.link.number_of(sequence), bytes, inodes, pressing }))?;
    for (ino, data) in &mut shipment.files {
        for (index, block) in &mut data.blocks {
            let chunk = encode_chunk(block);
            let stored = BlockRef { hash: chunk.hash, len: chunk.len };
            client.stats.content_bytes_shipped.add(u64::from(chunk.len));
            say(Ask::Content(Chunk {
                hash: bytes::Bytes::copy_from_slice(&chunk.hash.0),
                len: chunk.len,
                codec: chunk.codec as u32,
                payload: chunk.payload,
            }))?;
            if shipment.completed.is_none() {
                let fitting = fitting(block);
                let page = data_page(&mut data.pages, *index);
                name_block(client, *ino, page, *index, stored, sequence, fitting.as_ref());
                *block = fitting.unwrap_or_else(|| Arc::clone(block));
            }
        }
    }
    if shipment.completed.is_none() {
        complete(client, shipment);
        let mut check = BatchCheck::default();
        for record in &shipment.cut.batch.records {
            check.add([&RecordMessage::from(record)]);
        }
        shipment.completed = Some(check);
    }
    hayloft_crash::point("log.content-sent");
    for records in parts(&shipment.cut.batch.records) {
        say(Ask::Records(Records { records }))?;
    }
    let sequence = client.link.number_of(sequence);
    let commit = Commit::from(&shipment.cut.batch.without_records());
    let commit = Commit { sequence, durable: shipment.durable, ..commit };
    let check = shipment.completed.as_ref().map(|check| check.of(&commit));
    Ok(Commit { check, ..commit })
}

/// The records as messages, in parts that fit a frame well.
fn parts(records: &[Record]) -> impl Iterator<Item = Vec<RecordMessage>> + '_ {
    let mut rest = records.iter().peekable();
    std::iter::from_fn(move || {
        let mut part = Vec::new();
        let mut bytes = 0;
        while bytes < PART_BYTES
            && part.len() < weight::RECORDS_MAX
            && let Some(record) = rest.next()
        {
            let message = RecordMessage::from(record);
            bytes += message.encoded_len();
            part.push(message);
        }
        (!part.is_empty()).then_some(part)
    })
}

fn data_page(pages: &mut [(u64, Vec<Option<BlockRef>>)], index: u64) -> &mut Vec<Option<BlockRef>> {
    let page = pages.iter_mut().find(|(page, _)| *page == index / PAGE_BLOCKS);
    &mut page.expect("a block that is cut is on a page that is cut").1
}

/// A buffer for a block that takes much less than the one it has grown in.
fn fitting(block: &Arc<Vec<u8>>) -> Option<Arc<Vec<u8>>> {
    let spare = block.capacity() - block.len();
    (spare > block.len() / 8).then(|| Arc::new(block.to_vec()))
}

fn name_block(
    client: &Client,
    ino: Ino,
    page: &mut [Option<BlockRef>],
    index: u64,
    stored: BlockRef,
    sequence: Sequence,
    fitting: Option<&Arc<Vec<u8>>>,
) {
    page[(index % PAGE_BLOCKS) as usize] = Some(stored);
    let file = client.core().files.get(&ino).cloned();
    if let Some(file) = file {
        client.budget.with(&file, |data| data.named(index, stored, sequence, fitting));
    }
}

/// All content has its name: the records can say it.
fn complete(client: &Client, shipment: &mut Shipment) {
    let mut contents: std::collections::HashMap<Ino, Content> = std::collections::HashMap::new();
    let mut pages = Vec::new();
    for (ino, data) in &mut shipment.files {
        let mut content = data.inline.take().map(Content::Inline);
        if let Some(end) = data.pages_end {
            pages.push(Record::DeletePages(*ino, end));
        }
        for (page, refs) in &data.pages {
            match page {
                0 => drop(content.get_or_insert_with(|| Content::Blocks(refs.clone()))),
                page => pages.push(Record::PutPage(*ino, *page, refs.clone())),
            }
        }
        if let Some(content) = content {
            contents.insert(*ino, content);
        }
    }
    for records in shipment.cut.batch.records.chunks_mut(COMPLETED_AT_ONCE) {
        let mut core = client.core();
        for record in records {
            if let Record::PutInode(ino, row) = record
                && let Some(content) = contents.remove(ino)
            {
                row.content = content.clone();
                core.tree.set_content(*ino, content);
            }
        }
    }
    shipment.cut.batch.records.append(&mut pages);
}

/// The server has the batch.
fn settle(client: &Client, shipment: &Shipment) {
    let sequence = shipment.cut.batch.sequence;
    client.budget.add_in_flight(-(shipment.bytes as i64));
    {
        let mut core = client.core();
        core.in_flight = false;
        core.shipped(sequence);
        client.drop_ended(&mut core);
    }
    for (ino, cut) in &shipment.files {
        let mut core = client.core();
        let Some(file) = core.files.get(ino).map(Arc::clone) else { continue };
        let indexes: Vec<u64> = cut.blocks.iter().map(|(index, _)| *index).collect();
        let added = client.budget.with(&file, |data| data.durable(&indexes, sequence));
        client.may_drop(*ino, added.into_iter().map(|(index, _)| index));
        // The map's count and this one.
        let unused = Arc::strong_count(&file) == 2;
        if unused && client.budget.with(&file, |data| data.is_inline() && data.is_clean(sequence)) {
            client.drop_file(&mut core, *ino);
        }
    }
}

/// The batch was not applied: its changes belong to the next one.
fn undo(client: &Client, shipment: Shipment) {
    let sequence = shipment.cut.batch.sequence;
    client.budget.add_in_flight(-(shipment.bytes as i64));
    let mut core = client.core();
    core.in_flight = false;
    for (ino, cut) in &shipment.files {
        if let Some(file) = core.files.get(ino) {
            client.budget.with(file, |data| data.undo_cut(cut, sequence));
        }
    }
    core.tree.undo_cut(shipment.cut);
}

impl Client {
    /// The mount cannot go on: keeps what can never be applied; returns the reason with where it is.
    fn keep_all(&self, reason: &str) -> String {
        self.keep_lost();
        let unsent = Unsent::take(self, &mut self.core(), self.ledger.next_sequence());
        unsent.map_or_else(|| reason.to_string(), |unsent| self.keep_unsent(&unsent, reason))
    }

    /// Keeps what ended sessions have left.
    fn keep_lost(&self) {
        if self.link.ended().is_some() {
            self.restore_no_more();
        }
        for (unsent, reason) in std::mem::take(&mut *self.unsent.lock()) {
            let message = self.keep_unsent(&unsent, &reason);
            self.budget.add_in_flight(-(unsent.shipment.bytes as i64));
            self.ledger.kept(&message);
        }
    }

    fn keep_unsent(&self, unsent: &Unsent, reason: &str) -> String {
        let kept = rescue::keep(unsent, &self.rescue.0, &self.rescue.1, reason);
        let message = match kept {
            Ok(kept) => format!(
                "{reason}; {} names could not be applied and are kept in {} (see REPORT there)",
                kept.names,
                kept.folder.display()
            ),
            Err(error) => format!(
                "{reason}; the last changes could not be applied, nor kept in {}: {error}",
                self.rescue.0.display()
            ),
        };
        tracing::error!("{message}");
        message
    }

    /// After a change: the committer learns of it, and ships early when much has come together.
    pub(crate) fn changed(&self, rows: usize) {
        self.dirty_rows.store(rows, Ordering::Relaxed);
        self.ledger.touch();
        let most = (self.memory.dirty_rows() / ROWS_PART).min(CUT_ROWS);
        if rows > most || self.budget.unshipped() > self.ship_at() {
            self.ledger.kick();
        }
    }
}
