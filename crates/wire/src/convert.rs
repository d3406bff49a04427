//! Checked conversions between messages and the types of `hayloft-model`.

use bytes::{BufMut, Bytes, BytesMut};
use hayloft_model::{
    BLOCK_SIZE, Batch, BlockRef, Content, ContentHash, Dentry, FileKind, INLINE_MAX, Ino, InoRange, InodeRow,
    Name, PAGE_BLOCKS, Record, Sequence, Timestamp, Usage, UsageDelta, sound,
};

use crate::messages::batches::{
    Commit, DeleteDentry, DeletePages, PutDentry, PutPage, RecordMessage, record_message::Body,
};
use crate::messages::rows::{DentryRow, InodeRowMessage, Xattr};
use crate::messages::session::{InoRangeMessage, VolumeStatus};

mod sharing;

pub use sharing::{error_code, error_of};

/// A message that breaks a rule of the protocol: do not act on it; end the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a message with an invalid {what}")]
pub struct InvalidMessage {
    /// The field or rule that is broken.
    pub what: &'static str,
}

pub(crate) fn invalid<T>(what: &'static str) -> Result<T, InvalidMessage> {
    Err(InvalidMessage { what })
}

pub(crate) fn valid<T>(value: Option<T>, what: &'static str) -> Result<T, InvalidMessage> {
    value.ok_or(InvalidMessage { what })
}

const PACKED_BLOCK: usize = 36;

/// Packs block references: 32 bytes of hash and a u32 (little endian) of length each; a hole is all zero.
pub fn encode_blocks(blocks: &[Option<BlockRef>]) -> Bytes {
    let mut packed = BytesMut::with_capacity(blocks.len() * PACKED_BLOCK);
    for block in blocks {
        match block {
            Some(BlockRef { hash, len }) => {
                packed.put_slice(&hash.0);
                packed.put_u32_le(*len);
            }
            None => packed.put_bytes(0, PACKED_BLOCK),
        }
    }
    packed.freeze()
}

/// The reverse of [`encode_blocks`].
///
/// # Errors
/// When the bytes are no whole references, more than a page of them, or a length is over a block's.
pub fn decode_blocks(packed: &[u8]) -> Result<Vec<Option<BlockRef>>, InvalidMessage> {
    if !packed.len().is_multiple_of(PACKED_BLOCK) || packed.len() / PACKED_BLOCK > PAGE_BLOCKS as usize {
        return invalid("list of blocks");
    }
    packed
        .chunks_exact(PACKED_BLOCK)
        .map(|entry| {
            let (hash, len) = entry.split_at(32);
            let len = u32::from_le_bytes(len.try_into().expect("four bytes"));
            match u64::from(len) {
                0 => Ok(None),
                1..=BLOCK_SIZE => {
                    Ok(Some(BlockRef { hash: ContentHash(hash.try_into().expect("32 bytes")), len }))
                }
                _ => invalid("length of a block"),
            }
        })
        .collect()
}

fn name_from(bytes: &[u8]) -> Result<Name, InvalidMessage> {
    if !sound::is_name(bytes) {
        return invalid("name");
    }
    Ok(Name::new(bytes))
}

impl From<&Dentry> for DentryRow {
    fn from(dentry: &Dentry) -> DentryRow {
        DentryRow { ino: dentry.ino.0, kind: dentry.kind.bits(), cookie: dentry.cookie }
    }
}

impl TryFrom<&DentryRow> for Dentry {
    type Error = InvalidMessage;

    fn try_from(row: &DentryRow) -> Result<Dentry, InvalidMessage> {
        let kind = valid(FileKind::of_mode(row.kind), "kind of a dentry")?;
        Ok(Dentry { ino: Ino(row.ino), kind, cookie: row.cookie })
    }
}

impl InodeRowMessage {
    /// The ctime; the epoch if the message has no times.
    pub fn changed(&self) -> Timestamp {
        times_from(&self.times).map_or(Timestamp::default(), |[_, _, changed, _]| changed)
    }

    /// The message for `row`, the row of `ino`.
    pub fn from_row(ino: Ino, row: &InodeRow) -> InodeRowMessage {
        let (inline, blocks, target) = match &row.content {
            Content::None | Content::LeftOut => (None, None, None),
            Content::Inline(bytes) => (Some(bytes.clone()), None, None),
            Content::Blocks(blocks) => (None, Some(encode_blocks(blocks)), None),
            Content::Target(target) => (None, None, Some(target.clone())),
        };
        let times = [row.atime, row.mtime, row.ctime, row.btime];
        InodeRowMessage {
            ino: ino.0,
            mode: row.mode,
            uid: row.uid,
            gid: row.gid,
            nlink: row.nlink,
            rdev: row.rdev,
            size: row.size,
            allocated: row.allocated,
            times: times.iter().flat_map(|time| [time.secs, i64::from(time.nanos)]).collect(),
            parent: row.parent.0,
            next_cookie: row.next_cookie,
            xattrs: row
                .xattrs
                .iter()
                .map(|(name, value)| Xattr { name: name.clone(), value: value.clone() })
                .collect(),
            inline,
            blocks,
            target,
            unnamed: row.unnamed,
            left_out: row.content == Content::LeftOut,
            placed: None,
        }
    }
}

impl TryFrom<&InodeRowMessage> for InodeRow {
    type Error = InvalidMessage;

    fn try_from(message: &InodeRowMessage) -> Result<InodeRow, InvalidMessage> {
        valid(FileKind::of_mode(message.mode), "mode")?;
        if message.placed.is_some() {
            return invalid("place of content");
        }
        let [atime, mtime, ctime, btime] = times_from(&message.times)?;
        let content = match (&message.inline, &message.blocks, &message.target) {
            (None, None, None) if message.left_out => Content::LeftOut,
            (None, None, None) => Content::None,
            (Some(bytes), None, None) if bytes.len() as u64 <= INLINE_MAX => Content::Inline(bytes.clone()),
            (None, Some(packed), None) => Content::Blocks(decode_blocks(packed)?),
            (None, None, Some(target)) => Content::Target(target.clone()),
            _ => return invalid("content of an inode"),
        };
        Ok(InodeRow {
            mode: message.mode,
            uid: message.uid,
            gid: message.gid,
            nlink: message.nlink,
            rdev: message.rdev,
            size: message.size,
            allocated: message.allocated,
            atime,
            mtime,
            ctime,
            btime,
            parent: Ino(message.parent),
            next_cookie: message.next_cookie,
            unnamed: message.unnamed,
            xattrs: message.xattrs.iter().map(|xattr| (xattr.name.clone(), xattr.value.clone())).collect(),
            content,
        })
    }
}

pub(crate) fn times_from(packed: &[i64]) -> Result<[Timestamp; 4], InvalidMessage> {
    let packed: [i64; 8] = valid(packed.try_into().ok(), "set of times")?;
    let mut times = [Timestamp::default(); 4];
    for (time, pair) in times.iter_mut().zip(packed.chunks_exact(2)) {
        let nanos = valid(u32::try_from(pair[1]).ok().filter(|nanos| *nanos < 1_000_000_000), "nanoseconds")?;
        *time = Timestamp { secs: pair[0], nanos };
    }
    Ok(times)
}

impl From<&Record> for RecordMessage {
    fn from(record: &Record) -> RecordMessage {
        let bytes_of = |name: &Name| Bytes::copy_from_slice(name.as_bytes());
        let body = match record {
            Record::PutInode(ino, row) => Body::PutInode(InodeRowMessage::from_row(*ino, row)),
            Record::DeleteInode(ino) => Body::DeleteInode(ino.0),
            Record::PutDentry(parent, name, dentry) => Body::PutDentry(PutDentry {
                parent: parent.0,
                name: bytes_of(name),
                dentry: Some(dentry.into()),
            }),
            Record::DeleteDentry(parent, name) => {
                Body::DeleteDentry(DeleteDentry { parent: parent.0, name: bytes_of(name) })
            }
            Record::PutPage(ino, page, blocks) => {
                Body::PutPage(PutPage { ino: ino.0, page: *page, blocks: encode_blocks(blocks) })
            }
            Record::DeletePages(ino, from) => Body::DeletePages(DeletePages { ino: ino.0, from: *from }),
        };
        RecordMessage { body: Some(body) }
    }
}

impl TryFrom<&RecordMessage> for Record {
    type Error = InvalidMessage;

    fn try_from(message: &RecordMessage) -> Result<Record, InvalidMessage> {
        Ok(match valid(message.body.as_ref(), "record")? {
            Body::PutInode(row) => Record::PutInode(Ino(row.ino), Box::new(row.try_into()?)),
            Body::DeleteInode(ino) => Record::DeleteInode(Ino(*ino)),
            Body::PutDentry(put) => Record::PutDentry(
                Ino(put.parent),
                name_from(&put.name)?,
                valid(put.dentry.as_ref(), "dentry")?.try_into()?,
            ),
            Body::DeleteDentry(delete) => Record::DeleteDentry(Ino(delete.parent), name_from(&delete.name)?),
            Body::PutPage(put) => match put.page {
                0 => return invalid("page number"),
                page => Record::PutPage(Ino(put.ino), page, decode_blocks(&put.blocks)?),
            },
            Body::DeletePages(delete) => match delete.from {
                0 => return invalid("page number"),
                from => Record::DeletePages(Ino(delete.ino), from),
            },
        })
    }
}

impl From<&Batch> for Commit {
    fn from(batch: &Batch) -> Commit {
        Commit {
            sequence: batch.sequence.0,
            records: batch.records.iter().map(RecordMessage::from).collect(),
            bytes: batch.usage.bytes,
            inodes: batch.usage.inodes,
            orphans: batch.orphans.iter().map(|ino| ino.0).collect(),
            restores: 0,
            durable: false,
            check: None,
        }
    }
}

impl TryFrom<&Commit> for Batch {
    type Error = InvalidMessage;

    fn try_from(commit: &Commit) -> Result<Batch, InvalidMessage> {
        Ok(Batch {
            sequence: Sequence(commit.sequence),
            records: commit.records.iter().map(Record::try_from).collect::<Result<_, _>>()?,
            usage: UsageDelta { bytes: commit.bytes, inodes: commit.inodes },
            orphans: commit.orphans.iter().map(|ino| Ino(*ino)).collect(),
        })
    }
}

impl From<InoRange> for InoRangeMessage {
    fn from(range: InoRange) -> InoRangeMessage {
        InoRangeMessage { next: range.next, end: range.end }
    }
}

impl TryFrom<&InoRangeMessage> for InoRange {
    type Error = InvalidMessage;

    fn try_from(message: &InoRangeMessage) -> Result<InoRange, InvalidMessage> {
        if message.next < Ino::FIRST.0 || message.end < message.next {
            return invalid("range of inode numbers");
        }
        Ok(InoRange { next: message.next, end: message.end })
    }
}

impl VolumeStatus {
    /// What the volume's files take.
    pub fn used(&self) -> Usage {
        Usage { bytes: self.used_bytes, inodes: self.used_inodes }
    }
}

#[cfg(test)]
mod tests;
