//! Entries: what one mark has written, sealed, for clients to keep until it is durable (`hayloft_model::replay`).

use bytes::Bytes;
use hayloft_model::{SessionId, UsageDelta};
use hayloft_wire::{Entry, NotedRow, WrittenEntry};
use prost::Message;

/// The key of a volume's seals.
pub(crate) type SealKey = [u8; 32];

/// What is done by what is written, beside its rows.
#[derive(Clone, Copy)]
pub(crate) struct Doing {
    pub(crate) session: SessionId,
    /// The number of a batch; 0 for a change.
    pub(crate) sequence: u64,
    pub(crate) usage: UsageDelta,
    /// It builds on more than its rows say: it waits for the store.
    pub(crate) waits: bool,
}

/// Makes an entry.
pub(crate) fn seal(key: &SealKey, (opening, mark): (u64, u64), doing: &Doing, rows: Vec<NotedRow>) -> Entry {
    let UsageDelta { bytes, inodes } = doing.usage;
    let written = WrittenEntry { session: doing.session.0, sequence: doing.sequence, bytes, inodes, rows };
    let written = Bytes::from(written.encode_to_vec());
    let seal = Bytes::copy_from_slice(&seal_of(key, opening, mark, &written));
    Entry { opening, mark, written, seal }
}

/// What an entry says; `None`: no server of this volume has made it.
pub(crate) fn open(key: &SealKey, entry: &Entry) -> Option<WrittenEntry> {
    let seal = blake3::Hash::from_bytes(entry.seal.as_ref().try_into().ok()?);
    // Compared in constant time.
    let is_sealed = seal == blake3::Hash::from_bytes(seal_of(key, entry.opening, entry.mark, &entry.written));
    if is_sealed { WrittenEntry::decode(entry.written.clone()).ok() } else { None }
}

fn seal_of(key: &SealKey, opening: u64, mark: u64, written: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&opening.to_le_bytes()).update(&mark.to_le_bytes()).update(written);
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_server_of_the_volume_has_made_is_an_entry() {
        let doing = Doing { session: SessionId(7), sequence: 3, usage: UsageDelta::default(), waits: false };
        let row = NotedRow { key: Bytes::from_static(b"I1"), value: None };
        let entry = seal(&[1; 32], (5, 6), &doing, vec![row.clone()]);
        assert_eq!(open(&[1; 32], &entry).unwrap().rows, [row]);
        assert_eq!(open(&[2; 32], &entry), None);
        let changed = |change: fn(&mut Entry)| {
            let mut other = entry.clone();
            change(&mut other);
            open(&[1; 32], &other)
        };
        assert_eq!(changed(|other| other.mark += 1), None);
        assert_eq!(changed(|other| other.written = Bytes::new()), None);
        assert_eq!(changed(|other| other.seal.truncate(8)), None);
    }
}
