//! The check of a batch: from the log of the client that has cut it to the tables.

use prost::Message;

use crate::messages::batches::{Commit, RecordMessage};

/// CRC-32C of records in their order, each as it is encoded.
///
/// Frames have checks of their own, which end where a message is in memory. This one is made when the log is cut, stays with the
/// batch however often and in how many messages it is sent, and is held against the records that are about to be stored.
#[derive(Debug, Default, Clone)]
pub struct BatchCheck {
    check: u32,
    encoded: Vec<u8>,
}

impl BatchCheck {
    /// The next records of the batch.
    pub fn add<'a>(&mut self, records: impl IntoIterator<Item = &'a RecordMessage>) {
        for record in records {
            self.encoded.clear();
            record.encode_length_delimited(&mut self.encoded).expect("a Vec grows as needed");
            self.check = crc32c::crc32c_append(self.check, &self.encoded);
        }
    }

    /// The check of a batch with these records, and the number, usage and orphans of `commit`.
    pub fn of(&self, commit: &Commit) -> u32 {
        let rest = Commit {
            sequence: commit.sequence,
            bytes: commit.bytes,
            inodes: commit.inodes,
            orphans: commit.orphans.clone(),
            ..Commit::default()
        };
        crc32c::crc32c_append(self.check, &rest.encode_to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::batches::record_message::Body;

    #[test]
    fn every_record_its_place_and_the_usage_count() {
        let record = |ino| RecordMessage { body: Some(Body::DeleteInode(ino)) };
        let check = |records: &[u64], commit: &Commit| {
            let mut check = BatchCheck::default();
            records.iter().for_each(|ino| check.add([&record(*ino)]));
            check.of(commit)
        };
        let commit = Commit { sequence: 3, bytes: -5, inodes: 1, orphans: vec![9], ..Commit::default() };
        let right = check(&[1, 2, 3], &commit);
        assert_eq!(right, check(&[1, 2, 3], &Commit { durable: true, restores: 1, ..commit.clone() }));
        for records in [&[1, 3, 2][..], &[1, 2], &[1, 2, 3, 3], &[]] {
            assert_ne!(right, check(records, &commit), "{records:?}");
        }
        for other in [
            Commit { sequence: 4, ..commit.clone() },
            Commit { bytes: 5, ..commit.clone() },
            Commit { inodes: 2, ..commit.clone() },
            Commit { orphans: vec![8], ..commit.clone() },
        ] {
            assert_ne!(right, check(&[1, 2, 3], &other), "{other:?}");
        }
    }
}
