//! What a message comes to in memory, seen before it is decoded: one of many small parts takes far more than its bytes.

use crate::RecordMessage;
use crate::frame::FrameError;

/// Most bytes of one message of a client, but for those that are lists.
pub const MESSAGE_MAX: usize = 1 << 20;

/// Most bytes of one message of a client that is a list: a claim, or what is let go, given back or acknowledged.
pub const LIST_MAX: usize = 16 << 20;

/// Most records in one message.
pub const RECORDS_MAX: usize = 8192;

/// Most items in one message that is a list; numbers that are packed are one item.
pub const ITEMS_MAX: usize = 1 << 20;

/// Tags of [`client_message::Body`](crate::client_message::Body): `Commit` and `Records`.
const RECORDS: [u64; 2] = [8, 12];
/// `Ack`, `LetGo`, `Claim`, `Release` and `GiveBack`.
const LISTS: [u64; 5] = [16, 17, 18, 33, 35];

/// What a message comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weight {
    /// Bytes of memory that it takes, about.
    pub bytes: usize,
    /// It is a part of a batch, or its commit: it may have to wait in memory.
    pub is_of_batch: bool,
}

/// Tag of `Content`.
const CONTENT: u64 = 7;

/// Bytes of memory that a record takes beside its own.
const RECORD: usize = size_of::<RecordMessage>();

/// Looks whether a message of a client, encoded, keeps the limits above. Returns what it is about when it is decoded.
///
/// # Errors
/// It does not, or is no message.
pub fn check(message: &[u8]) -> Result<Weight, FrameError> {
    let len = message.len();
    let mut weight = Weight { bytes: len, is_of_batch: false };
    for field in Fields(message) {
        let (tag, Some(body)) = field? else { continue };
        weight.is_of_batch |= tag == CONTENT || RECORDS.contains(&tag);
        let (bytes_max, items_max) = match tag {
            _ if LISTS.contains(&tag) => (LIST_MAX, ITEMS_MAX),
            _ if RECORDS.contains(&tag) => (MESSAGE_MAX, RECORDS_MAX),
            _ => (MESSAGE_MAX, usize::MAX),
        };
        if len > bytes_max {
            return Err(FrameError::TooLarge { len, limit: bytes_max });
        }
        if items_max == usize::MAX {
            continue;
        }
        let mut items = 0;
        for item in Fields(body) {
            item?;
            items += 1;
            if items > items_max {
                return Err(FrameError::TooMany { limit: items_max });
            }
        }
        if RECORDS.contains(&tag) {
            weight.bytes += items * RECORD;
        }
    }
    Ok(weight)
}

/// The fields of an encoded message: tags, and the bytes of those that have a length.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for at in 0..10 {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn bytes(&mut self, len: u64) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }

    fn field(&mut self) -> Option<(u64, Option<&'a [u8]>)> {
        let key = self.varint()?;
        let body = match key & 7 {
            0 => self.varint().map(|_| None)?,
            1 => self.bytes(8).map(|_| None)?,
            2 => {
                let len = self.varint()?;
                Some(self.bytes(len)?)
            }
            5 => self.bytes(4).map(|_| None)?,
            _ => return None,
        };
        Some((key >> 3, body))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Option<&'a [u8]>), FrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field.ok_or(FrameError::Shapeless))
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::client_message::Body;
    use crate::{Claim, ClientMessage, Commit, Enter, Records, record_message};

    fn encoded(body: Body) -> Vec<u8> {
        ClientMessage { request: 7, body: Some(body) }.encode_to_vec()
    }

    fn records(count: usize) -> Vec<RecordMessage> {
        vec![RecordMessage { body: Some(record_message::Body::DeleteInode(70)) }; count]
    }

    #[test]
    fn messages_of_too_many_parts_are_refused_before_they_are_decoded() {
        let too_many = |body| matches!(check(&encoded(body)), Err(FrameError::TooMany { .. }));
        let full = check(&encoded(Body::Records(Records { records: records(RECORDS_MAX) }))).unwrap();
        assert!(full.is_of_batch && full.bytes > RECORDS_MAX * size_of::<RecordMessage>());
        assert!(too_many(Body::Records(Records { records: records(RECORDS_MAX + 1) })));
        assert!(too_many(Body::Commit(Commit { records: records(RECORDS_MAX + 1), ..Commit::default() })));
        // What 16 MiB of nothing would come to.
        assert!(too_many(Body::Claim(Claim {
            own: vec![Default::default(); ITEMS_MAX + 1],
            ..Claim::default()
        })));
        let empty = vec![RecordMessage::default(); 500_000];
        assert!(too_many(Body::Records(Records { records: empty })));
        let in_use = (1 << 40..).take(300_000).collect();
        assert!(check(&encoded(Body::Claim(Claim { in_use, ..Claim::default() }))).is_ok());
        let files = vec![u64::MAX; 300_000];
        let large = check(&encoded(Body::Enter(Enter { files, ..Enter::default() })));
        assert!(matches!(large, Err(FrameError::TooLarge { limit: MESSAGE_MAX, .. })), "{large:?}");
    }

    #[test]
    fn whatever_can_be_decoded_has_a_shape() {
        let enter = encoded(Body::Enter(Enter { dir: 1 << 60, names_only: true, ..Enter::default() }));
        assert!(check(&enter).is_ok() && check(&[]).is_ok());
        for end in 1..enter.len() {
            assert_eq!(check(&enter[..end]).is_ok(), ClientMessage::decode(&enter[..end]).is_ok(), "{end}");
        }
    }
}
