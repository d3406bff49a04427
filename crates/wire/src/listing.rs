//! The entries of a listing. A walk through a large tree is millions of them, so rows go as the tables have them, and neither
//! side makes messages of them.
//!
//! An entry is its name, the name's row ([`DentryRow`](crate::DentryRow)), and the inode's row
//! ([`InodeRowMessage`](crate::InodeRowMessage)) if that may come along: each a length (a varint) and so many bytes; length 0
//! for a row that does not.

use bytes::{BufMut, Bytes};
use hayloft_model::{Content, Dentry, FileKind, INLINE_MAX, Ino, InodeRow, NAME_MAX, Name};
use prost::encoding::encode_varint;

use crate::convert::{self, InvalidMessage, decode_blocks, invalid, valid};

/// Numbers of the fields of rows that are looked at here.
mod field {
    pub(super) const MODE: u32 = 2;
    pub(super) const NLINK: u32 = 5;
    pub(super) const SIZE: u32 = 7;
    pub(super) const PARENT: u32 = 10;
    pub(super) const INLINE: u32 = 13;
    pub(super) const BLOCKS: u32 = 14;
    pub(super) const LEFT_OUT: u32 = 17;
    pub(super) const PLACED: u32 = 18;
}

/// `left_out` of a row, set.
const LEFT_OUT: [u8; 3] = [0x88, 0x01, 0x01];

/// A field of a message.
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of a kind that rows do not have.
    Other,
}

/// The fields of a message, one after the other.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn number(&mut self) -> Option<u64> {
        // Nearly all are short.
        if let [first, rest @ ..] = self.rest
            && *first < 0x80
        {
            self.rest = rest;
            return Some(u64::from(*first));
        }
        let mut number = 0;
        for (at, byte) in self.rest.iter().take(10).enumerate() {
            number |= u64::from(byte & 0x7f) << (7 * at);
            if *byte < 0x80 {
                self.rest = &self.rest[at + 1..];
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(len).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.number()?;
        self.take(len)
    }

    /// The next one with its number; `None`: the message ends within it.
    fn field(&mut self) -> Option<(u32, Value<'a>)> {
        let key = self.number()?;
        let value = match key & 7 {
            0 => Value::Number(self.number()?),
            1 => self.take(8).map(|_| Value::Other)?,
            2 => Value::Bytes(self.bytes()?),
            5 => self.take(4).map(|_| Value::Other)?,
            _ => return None,
        };
        Some((u32::try_from(key >> 3).ok()?, value))
    }
}

/// What a server has to know of a row that it passes on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Row<'a> {
    mode: u32,
    /// Links.
    pub nlink: u32,
    /// The home, see [`InodeRow::parent`].
    pub parent: u64,
    /// Bytes of the file.
    pub size: u64,
    /// Its blocks, packed.
    pub blocks: Option<&'a [u8]>,
    /// The data in it, or where that is, as a field: from where, up to where.
    inline: (usize, usize),
    /// Where the data of a small file is.
    pub placed: Option<&'a [u8]>,
    /// The data was left out.
    pub left_out: bool,
}

impl<'a> Row<'a> {
    /// Looks at an encoded [`InodeRowMessage`](crate::InodeRowMessage).
    ///
    /// # Errors
    /// When it is none.
    pub fn of(row: &'a [u8]) -> Result<Row<'a>, InvalidMessage> {
        let mut fields = Fields { rest: row };
        let mut found = Row::default();
        while !fields.rest.is_empty() {
            let begin = row.len() - fields.rest.len();
            let (number, value) = valid(fields.field(), "row")?;
            match (number, value) {
                (field::MODE, Value::Number(mode)) => found.mode = mode as u32,
                (field::NLINK, Value::Number(nlink)) => found.nlink = nlink as u32,
                (field::SIZE, Value::Number(size)) => found.size = size,
                (field::PARENT, Value::Number(parent)) => found.parent = parent,
                (field::BLOCKS, Value::Bytes(blocks)) => found.blocks = Some(blocks),
                (field::LEFT_OUT, Value::Number(left_out)) => found.left_out = left_out != 0,
                (field::INLINE | field::PLACED, Value::Bytes(bytes)) => {
                    found.inline = (begin, row.len() - fields.rest.len());
                    found.placed = (number == field::PLACED).then_some(bytes);
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// The kind of the inode; `None`: there is no such kind.
    pub fn kind(&self) -> Option<FileKind> {
        FileKind::of_mode(self.mode)
    }

    /// Whether it is a directory's.
    pub fn is_directory(&self) -> bool {
        self.kind() == Some(FileKind::Directory)
    }

    /// Whether it says where the data of a small file is. Such a row is not to be sent as it is.
    pub fn is_placed(&self) -> bool {
        self.placed.is_some()
    }

    /// Whether it is a file's whose data is all in it, or would be.
    pub fn has_data(&self) -> bool {
        self.inline.0 < self.inline.1
    }

    /// Bytes that the data of a small file takes in it, or where that is.
    pub fn data_bytes(&self) -> usize {
        self.inline.1 - self.inline.0
    }
}

/// Appends an entry to a listing. `row`: the inode's row, with what [`Row::of`] has found in it; `leave_out`: without the data
/// that it may have.
pub fn pack(to: &mut Vec<u8>, name: &[u8], dentry: &[u8], row: Option<(&[u8], &Row<'_>)>, leave_out: bool) {
    for bytes in [name, dentry] {
        encode_varint(bytes.len() as u64, to);
        to.put_slice(bytes);
    }
    match row {
        Some((row, found)) if leave_out && found.has_data() => {
            let (begin, end) = found.inline;
            encode_varint((row.len() - (end - begin) + LEFT_OUT.len()) as u64, to);
            to.put_slice(&row[..begin]);
            to.put_slice(&row[end..]);
            to.put_slice(&LEFT_OUT);
        }
        Some((row, _)) => {
            encode_varint(row.len() as u64, to);
            to.put_slice(row);
        }
        None => to.put_u8(0),
    }
}

/// An entry as it was packed: the name, its row, and the inode's row, which is empty if it did not come along.
pub type Packed = (Bytes, Bytes, Bytes);

/// The entries of a listing as they were packed, without copies; ends behind the first that is cut short.
pub fn split(packed: &Bytes) -> impl Iterator<Item = Result<Packed, InvalidMessage>> {
    let mut at = 0;
    let mut part = move || {
        let mut rest = Fields { rest: &packed[at..] };
        let bytes = valid(rest.bytes(), "entry of a listing")?.len();
        let end = packed.len() - rest.rest.len();
        at = end;
        Ok((end, packed.slice(end - bytes..end)))
    };
    let mut end = 0;
    std::iter::from_fn(move || {
        if end == packed.len() {
            return None;
        }
        let mut entry = || {
            let ((_, name), (_, dentry), (at, row)) = (part()?, part()?, part()?);
            Ok((at, (name, dentry, row)))
        };
        let entry = entry();
        end = entry.as_ref().map_or(packed.len(), |(at, _)| *at);
        Some(entry.map(|(_, entry)| entry))
    })
}

/// An entry as it is unpacked: with the row of its inode unless somebody else owns that.
pub type Entry = (Name, Dentry, Option<InodeRow>);

/// The entries of a listing; ends behind the first that breaks a rule.
pub fn unpack(packed: &[u8]) -> impl Iterator<Item = Result<Entry, InvalidMessage>> {
    let mut rest = Fields { rest: packed };
    std::iter::from_fn(move || {
        if rest.rest.is_empty() {
            return None;
        }
        let entry = unpack_one(&mut rest);
        if entry.is_err() {
            rest.rest = &[];
        }
        Some(entry)
    })
}

fn unpack_one(rest: &mut Fields<'_>) -> Result<Entry, InvalidMessage> {
    let mut part = || valid(rest.bytes(), "entry of a listing");
    let (name, dentry, row) = (part()?, part()?, part()?);
    if name.is_empty() || name.len() > NAME_MAX {
        return invalid("name");
    }
    let dentry = dentry_from(dentry)?;
    let row = if row.is_empty() { None } else { Some(row_from(row)?.1) };
    Ok((Name::new(name), dentry, row))
}

/// A dentry from an encoded [`DentryRow`](crate::DentryRow).
///
/// # Errors
/// When it is none, or breaks a rule.
pub fn dentry_from(row: &[u8]) -> Result<Dentry, InvalidMessage> {
    let mut fields = Fields { rest: row };
    let (mut ino, mut kind, mut cookie) = (0, 0, 0);
    while !fields.rest.is_empty() {
        match valid(fields.field(), "dentry")? {
            (1, Value::Number(number)) => ino = number,
            (2, Value::Number(number)) => kind = number as u32,
            (3, Value::Number(number)) => cookie = number,
            _ => {}
        }
    }
    let kind = valid(FileKind::of_mode(kind), "kind of a dentry")?;
    Ok(Dentry { ino: Ino(ino), kind, cookie })
}

/// An inode's row, and its number, from an encoded [`InodeRowMessage`](crate::InodeRowMessage); it has memory of its own.
///
/// # Errors
/// When it is none, or breaks a rule.
pub fn row_from(bytes: &[u8]) -> Result<(Ino, InodeRow), InvalidMessage> {
    let mut fields = Fields { rest: bytes };
    let mut row = InodeRow { next_cookie: 0, ..InodeRow::new(0, 0, Ino(0)) };
    let (mut ino, mut left_out, mut times) = (0, false, None);
    let (mut inline, mut blocks, mut target) = (None, None, None);
    let mut xattrs = Vec::new();
    while !fields.rest.is_empty() {
        match valid(fields.field(), "row")? {
            (1, Value::Number(number)) => ino = number,
            (field::MODE, Value::Number(mode)) => row.mode = mode as u32,
            (3, Value::Number(uid)) => row.uid = uid as u32,
            (4, Value::Number(gid)) => row.gid = gid as u32,
            (5, Value::Number(nlink)) => row.nlink = nlink as u32,
            (6, Value::Number(rdev)) => row.rdev = rdev as u32,
            (field::SIZE, Value::Number(size)) => row.size = size,
            (8, Value::Number(allocated)) => row.allocated = allocated,
            (9, Value::Bytes(packed)) if times.is_none() => times = Some(times_from(packed)?),
            // In a message what comes again is added to the set.
            (9, _) => return invalid("set of times"),
            (field::PARENT, Value::Number(parent)) => row.parent = Ino(parent),
            (11, Value::Number(cookie)) => row.next_cookie = cookie,
            (12, Value::Bytes(xattr)) => xattrs.push(xattr_from(xattr)?),
            (field::INLINE, Value::Bytes(data)) => inline = Some(data),
            (field::BLOCKS, Value::Bytes(packed)) => blocks = Some(packed),
            (15, Value::Bytes(to)) => target = Some(to),
            (16, Value::Number(unnamed)) => row.unnamed = unnamed != 0,
            (field::LEFT_OUT, Value::Number(number)) => left_out = number != 0,
            (field::PLACED, _) => return invalid("place of content"),
            _ => {}
        }
    }
    valid(FileKind::of_mode(row.mode), "mode")?;
    [row.atime, row.mtime, row.ctime, row.btime] = convert::times_from(&valid(times, "set of times")?)?;
    row.xattrs = xattrs.into_iter().collect();
    row.content = match (inline, blocks, target) {
        (None, None, None) if left_out => Content::LeftOut,
        (None, None, None) => Content::None,
        (Some(data), None, None) if data.len() as u64 <= INLINE_MAX => {
            Content::Inline(Bytes::copy_from_slice(data))
        }
        (None, Some(packed), None) => Content::Blocks(decode_blocks(packed)?),
        (None, None, Some(target)) => Content::Target(Bytes::copy_from_slice(target)),
        _ => return invalid("content of an inode"),
    };
    Ok((Ino(ino), row))
}

fn times_from(packed: &[u8]) -> Result<[i64; 8], InvalidMessage> {
    let mut fields = Fields { rest: packed };
    let mut times = [0; 8];
    for time in &mut times {
        let number = valid(fields.number(), "set of times")?;
        *time = (number >> 1) as i64 ^ -((number & 1) as i64);
    }
    if fields.rest.is_empty() { Ok(times) } else { invalid("set of times") }
}

fn xattr_from(message: &[u8]) -> Result<(Bytes, Bytes), InvalidMessage> {
    let mut fields = Fields { rest: message };
    let (mut name, mut value) = (Bytes::new(), Bytes::new());
    while !fields.rest.is_empty() {
        match valid(fields.field(), "attribute")? {
            (1, Value::Bytes(bytes)) => name = Bytes::copy_from_slice(bytes),
            (2, Value::Bytes(bytes)) => value = Bytes::copy_from_slice(bytes),
            _ => {}
        }
    }
    Ok((name, value))
}

#[cfg(test)]
mod tests {
    use hayloft_model::{BlockRef, ContentHash, Timestamp};
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::{DentryRow, InodeRowMessage};

    fn content() -> impl Strategy<Value = (u32, Content)> {
        let bytes = |most| proptest::collection::vec(any::<u8>(), 0..most).prop_map(Bytes::from);
        let block = proptest::option::of((any::<[u8; 32]>(), 1..=65536u32))
            .prop_map(|block| block.map(|(hash, len)| BlockRef { hash: ContentHash(hash), len }));
        prop_oneof![
            Just((0o040755, Content::None)),
            Just((0o100600, Content::LeftOut)),
            bytes(4096).prop_map(|data| (0o100644, Content::Inline(data))),
            proptest::collection::vec(block, 0..8).prop_map(|blocks| (0o104755, Content::Blocks(blocks))),
            bytes(200).prop_map(|target| (0o120777, Content::Target(target))),
        ]
    }

    prop_compose! {
        fn row()(
            numbers in any::<(u32, u32, u32, u32)>(),
            large in any::<(u64, u64, u64, u64)>(),
            times in proptest::array::uniform4((any::<i64>(), 0..1_000_000_000u32)),
            (mode, content) in content(),
            xattrs in proptest::collection::vec(("[a-z.]{1,20}", "[a-z]{0,40}"), 0..3),
            unnamed in any::<bool>(),
        ) -> InodeRow {
            let [atime, mtime, ctime, btime] = times.map(|(secs, nanos)| Timestamp { secs, nanos });
            let (uid, gid, nlink, rdev) = numbers;
            let (size, allocated, parent, next_cookie) = large;
            let xattrs = xattrs.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
            InodeRow {
                mode, uid, gid, nlink, rdev, size, allocated, atime, mtime, ctime, btime,
                parent: Ino(parent), next_cookie, unnamed, xattrs, content,
            }
        }
    }

    proptest! {
        /// What is passed on as it is stored comes out as it went in, less the data that is left out.
        #[test]
        fn entries_come_out_as_they_went_in(
            entries in proptest::collection::vec(("[a-z]{1,40}", any::<u64>(), any::<u64>(), proptest::option::of(row())), 0..6),
            leave_out in any::<bool>(),
        ) {
            let mut packed = Vec::new();
            let mut expected = Vec::new();
            for (name, ino, cookie, row) in entries {
                let kind = FileKind::Fifo;
                let dentry = DentryRow { ino, kind: kind.bits(), cookie }.encode_to_vec();
                let stored = row.as_ref().map(|row| InodeRowMessage::from_row(Ino(ino), row).encode_to_vec());
                let found = stored.as_ref().map(|stored| Row::of(stored).unwrap());
                if let (Some(row), Some(found)) = (&row, &found) {
                    prop_assert_eq!((row.parent.0, row.size), (found.parent, found.size));
                    prop_assert_eq!(row.kind() == FileKind::Directory, found.is_directory());
                    prop_assert_eq!(matches!(row.content, Content::Inline(_)), found.has_data());
                }
                pack(&mut packed, name.as_bytes(), &dentry, stored.as_deref().zip(found.as_ref()), leave_out);
                let row = row.map(|mut row| {
                    if leave_out && matches!(row.content, Content::Inline(_)) {
                        row.content = Content::LeftOut;
                    }
                    row
                });
                expected.push((Name::new(name.as_bytes()), Dentry { ino: Ino(ino), kind, cookie }, row));
            }
            let unpacked: Vec<Entry> = unpack(&packed).collect::<Result<_, _>>().unwrap();
            prop_assert_eq!(unpacked, expected);
            let mut again = Vec::new();
            for (name, dentry, row) in split(&Bytes::from(packed.clone())).map(Result::unwrap) {
                let found = (!row.is_empty()).then(|| Row::of(&row).unwrap());
                prop_assert!(found.is_none_or(|found| !leave_out || !found.has_data()));
                pack(&mut again, &name, &dentry, found.as_ref().map(|found| (&row[..], found)), false);
            }
            prop_assert_eq!(&again, &packed);
            // However it is cut short, nothing but a whole number of entries is taken for right.
            for end in 0..packed.len() {
                let _ = unpack(&packed[..end]).collect::<Vec<_>>();
            }
        }

        /// As the conversion of the message says.
        #[test]
        fn bytes_are_taken_for_what_the_message_is(row in row(), ino in any::<u64>(), at in any::<usize>(), byte in any::<u8>()) {
            let mut bytes = InodeRowMessage::from_row(Ino(ino), &row).encode_to_vec();
            prop_assert_eq!(row_from(&bytes), Ok((Ino(ino), row)));
            let len = bytes.len();
            bytes[at % len] = byte;
            if let Ok((ino, row)) = row_from(&bytes)
                && let Ok(message) = InodeRowMessage::decode(&bytes[..])
            {
                prop_assert_eq!(ino.0, message.ino);
                prop_assert_eq!(InodeRow::try_from(&message), Ok(row));
            }
        }
    }
}
