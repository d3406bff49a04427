//! The tables of a volume: rows of one SlateDB database, told apart by the first byte of their keys.
//! Numbers in keys are big endian, so that rows lie in the order of their numbers.
//!
//! | key | row |
//! |---|---|
//! | `I` inode | [`InodeRowMessage`](hayloft_wire::InodeRowMessage), with the data of a small file or its [`SmallPlace`](super::small::SmallPlace) |
//! | `D` directory, name | [`DentryRow`](hayloft_wire::DentryRow) |
//! | `B` inode, page | block references of page 1 and later, as [`hayloft_wire::encode_blocks`] packs them |
//! | `C` hash | [`Place`]: where a chunk is, or the chunk itself |
//! | `P` pack | [`PackRow`]: its size, and whose folder it lies in |
//! | `S` session | [`SessionRow`] |
//! | `O` session, inode | one byte: an inode without a name that the session has open |
//! | `R` session, request | [`Changed`](hayloft_wire::Changed): the outcome of a `CHANGE` |
//! | `E` session | [`EndedRow`]: a session that was ended without its client's word, for a week |
//! | `V` | [`VolumeRow`] |
//! | `H` | [`HistoryRow`]: when servers opened the volume |
//! | `M` | [`MarkRow`]: how far its history is |
//! | `K` | 32 bytes, random: the key of the seals of entries |
//! | `F` | id of the volume that the rows were made fit for, of a clone |
//! | `L` directory | its [`packed`](super::packed) listing |
//! | `G` | [`Generation`]: which packed listings count |
//! | `J` mark | [`JournalRow`](super::journal::JournalRow): which rows were written then, from the first snapshot on |
//! | `N` | [`Lineage`](super::journal::Lineage): the databases that its history went through |
//! | `A` | [`BroughtRow`]: which entries of earlier openings were brought back |

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hayloft_model::replay::BroughtBack;
use hayloft_model::{ContentHash, Ino, SessionId};
use hayloft_store::{Codec, EncodedChunk, PackEntry};
use prost::Message;

/// Number of a pack: random, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct PackId(pub(crate) u64);

impl PackId {
    pub(crate) fn path(self, volume_id: &str) -> String {
        format!("packs/{volume_id}/{:016x}", self.0)
    }

    /// The reverse of [`PackId::path`], from the last part of a path.
    pub(crate) fn from_name(name: &str) -> Option<PackId> {
        u64::from_str_radix(name, 16).ok().map(PackId)
    }
}

pub(crate) const INODES: u8 = b'I';
pub(crate) const DENTRIES: u8 = b'D';
pub(crate) const PAGES: u8 = b'B';
pub(crate) const CHUNKS: u8 = b'C';
pub(crate) const PACKS: u8 = b'P';
pub(crate) const SESSIONS: u8 = b'S';
pub(crate) const ORPHANS: u8 = b'O';
pub(crate) const CHANGES: u8 = b'R';
pub(crate) const ENDED: u8 = b'E';
pub(crate) const VOLUME: &[u8] = b"V";
pub(crate) const HISTORY: &[u8] = b"H";
pub(crate) const MARK: &[u8] = b"M";
pub(crate) const SEAL_KEY: &[u8] = b"K";
pub(crate) const BROUGHT: &[u8] = b"A";
pub(crate) const FITTED: &[u8] = b"F";
pub(crate) const PACKED: u8 = b'L';
pub(crate) const GENERATION: &[u8] = b"G";
pub(crate) const JOURNAL: u8 = b'J';
pub(crate) const LINEAGE: &[u8] = b"N";

/// Tables with rows of files and names.
pub(crate) const OF_TREE: [u8; 3] = [INODES, DENTRIES, PAGES];

/// Whether a key is of a row of files or names.
pub(crate) fn is_of_tree(key: &[u8]) -> bool {
    key.first().is_some_and(|table| OF_TREE.contains(table))
}

fn key(table: u8, number: u64, rest: &[u8]) -> Bytes {
    let mut key = BytesMut::with_capacity(9 + rest.len());
    key.put_u8(table);
    key.put_u64(number);
    key.put_slice(rest);
    key.freeze()
}

pub(crate) fn inode(ino: Ino) -> Bytes {
    key(INODES, ino.0, b"")
}

pub(crate) fn dentry(parent: Ino, name: &[u8]) -> Bytes {
    key(DENTRIES, parent.0, name)
}

/// What the keys of a directory's dentries begin with.
pub(crate) fn dentries(parent: Ino) -> Bytes {
    key(DENTRIES, parent.0, b"")
}

pub(crate) fn page(ino: Ino, page: u64) -> Bytes {
    key(PAGES, ino.0, &page.to_be_bytes())
}

/// The packed listing of a directory.
pub(crate) fn packed(dir: Ino) -> Bytes {
    key(PACKED, dir.0, b"")
}

/// The journal's row of a mark.
pub(crate) fn journal(mark: u64) -> Bytes {
    key(JOURNAL, mark, b"")
}

/// What the keys of a file's pages begin with.
pub(crate) fn pages(ino: Ino) -> Bytes {
    key(PAGES, ino.0, b"")
}

pub(crate) fn chunk(hash: ContentHash) -> Bytes {
    let mut key = BytesMut::with_capacity(33);
    key.put_u8(CHUNKS);
    key.put_slice(&hash.0);
    key.freeze()
}

pub(crate) fn pack(pack: PackId) -> Bytes {
    key(PACKS, pack.0, b"")
}

pub(crate) fn session(session: SessionId) -> Bytes {
    key(SESSIONS, session.0, b"")
}

pub(crate) fn ended(session: SessionId) -> Bytes {
    key(ENDED, session.0, b"")
}

pub(crate) fn orphan(session: SessionId, ino: Ino) -> Bytes {
    key(ORPHANS, session.0, &ino.0.to_be_bytes())
}

pub(crate) fn change(session: SessionId, request: u64) -> Bytes {
    key(CHANGES, session.0, &request.to_be_bytes())
}

/// What the keys of a session's outcomes begin with.
pub(crate) fn changes(session: SessionId) -> Bytes {
    key(CHANGES, session.0, b"")
}

/// The number right after the table's byte; `None` for a key that is too short.
pub(crate) fn number_in(key: &[u8]) -> Option<u64> {
    key.get(1..9).map(|bytes| u64::from_be_bytes(bytes.try_into().expect("eight bytes")))
}

/// The number after the first one.
pub(crate) fn second_number_in(key: &[u8]) -> Option<u64> {
    key.get(9..17).map(|bytes| u64::from_be_bytes(bytes.try_into().expect("eight bytes")))
}

/// What follows the first number.
pub(crate) fn rest_of(key: &Bytes) -> Bytes {
    key.slice(9.min(key.len())..)
}

/// The hash in the key of a chunk's row.
pub(crate) fn hash_in(key: &[u8]) -> Option<ContentHash> {
    key.get(1..33).map(|bytes| ContentHash(bytes.try_into().expect("32 bytes")))
}

/// A pack that rows of the volume may name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PackRow {
    /// Bytes of the object.
    pub(crate) size: u64,
    /// The id of the volume that has put it; `None`: the first of the family.
    pub(crate) home: Option<String>,
}

impl PackRow {
    pub(crate) fn encode(&self) -> Bytes {
        let mut row = BytesMut::with_capacity(40);
        row.put_u64_le(self.size);
        row.put_slice(self.home.as_deref().unwrap_or_default().as_bytes());
        row.freeze()
    }

    /// The reverse of [`PackRow::encode`]; `None` for bytes that are none.
    pub(crate) fn decode(mut row: &[u8]) -> Option<PackRow> {
        if row.len() < 8 {
            return None;
        }
        let size = row.get_u64_le();
        let home = match row {
            [] => None,
            home => Some(std::str::from_utf8(home).ok()?.to_owned()),
        };
        Some(PackRow { size, home })
    }

    /// The pack of a row, and the row.
    pub(crate) fn of(key: &[u8], row: &[u8]) -> Option<(PackId, PackRow)> {
        Some((PackId(number_in(key)?), PackRow::decode(row)?))
    }
}

/// Where a chunk is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// In the row itself: content of small commits.
    Here { len: u32, codec: Codec, payload: Bytes },
    /// In a pack.
    Pack { pack: PackId, offset: u32, payload_len: u32, len: u32, codec: Codec },
}

impl Place {
    pub(crate) fn here(chunk: EncodedChunk) -> Place {
        Place::Here { len: chunk.len, codec: chunk.codec, payload: chunk.payload }
    }

    pub(crate) fn in_pack(pack: PackId, entry: &PackEntry) -> Place {
        let PackEntry { offset, payload_len, len, codec, .. } = *entry;
        Place::Pack { pack, offset, payload_len, len, codec }
    }

    pub(crate) fn encode(&self) -> Bytes {
        let mut row = BytesMut::new();
        match self {
            Place::Here { len, codec, payload } => {
                row.reserve(6 + payload.len());
                row.put_u8(0);
                row.put_u8(*codec as u8);
                row.put_u32_le(*len);
                row.put_slice(payload);
            }
            Place::Pack { pack, offset, payload_len, len, codec } => {
                row.reserve(22);
                row.put_u8(1);
                row.put_u8(*codec as u8);
                row.put_u32_le(*len);
                row.put_u64_le(pack.0);
                row.put_u32_le(*offset);
                row.put_u32_le(*payload_len);
            }
        }
        row.freeze()
    }

    /// The reverse of [`Place::encode`]; `None` for bytes that are none.
    pub(crate) fn decode(mut row: Bytes) -> Option<Place> {
        if row.len() < 6 {
            return None;
        }
        let (kind, codec, len) = (row.get_u8(), row.get_u8(), row.get_u32_le());
        let codec = Codec::try_from(u32::from(codec)).ok()?;
        match (kind, row.len()) {
            (0, _) => Some(Place::Here { len, codec, payload: row }),
            (1, 16) => {
                let pack = PackId(row.get_u64_le());
                let (offset, payload_len) = (row.get_u32_le(), row.get_u32_le());
                Some(Place::Pack { pack, offset, payload_len, len, codec })
            }
            _ => None,
        }
    }
}

/// A session that has not ended.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SessionRow {
    /// The last batch applied.
    #[prost(uint64, tag = "1")]
    pub(crate) last_sequence: u64,
    #[prost(string, tag = "2")]
    pub(crate) host_id: String,
    #[prost(string, tag = "3")]
    pub(crate) host_name: String,
    #[prost(uint32, tag = "4")]
    pub(crate) pid: u32,
    #[prost(string, tag = "5")]
    pub(crate) mount_point: String,
    #[prost(bool, tag = "6")]
    pub(crate) read_only: bool,
    /// Whose it is: the peer, and the hash of its token.
    #[prost(string, tag = "7")]
    pub(crate) peer: String,
    #[prost(bytes = "bytes", tag = "8")]
    pub(crate) token: Bytes,
    /// It is of a tree in whose place this one came: its client begins another one, and holds until then what it has of that.
    #[prost(bool, tag = "9")]
    pub(crate) moved: bool,
    /// As which snapshot that tree is kept, and the database of that where it is mounted.
    #[prost(string, tag = "10")]
    pub(crate) kept: String,
    #[prost(string, tag = "11")]
    pub(crate) kept_id: String,
    /// The longest lease that its client was told of, milliseconds; 0: by a server that did not write it down.
    #[prost(uint64, tag = "12")]
    pub(crate) lease_ms: u64,
}

/// A session that the server has ended: its client may not know it yet.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct EndedRow {
    /// The last batch applied.
    #[prost(uint64, tag = "1")]
    pub(crate) last_sequence: u64,
    /// When it was ended, seconds since the epoch.
    #[prost(int64, tag = "2")]
    pub(crate) ended_secs: i64,
    /// An administrator has ended it.
    #[prost(bool, tag = "3")]
    pub(crate) by_hand: bool,
    /// See [`SessionRow`].
    #[prost(string, tag = "4")]
    pub(crate) peer: String,
    #[prost(bytes = "bytes", tag = "5")]
    pub(crate) token: Bytes,
}

/// Whenever a server has opened the volume.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct HistoryRow {
    /// The latest, in order.
    #[prost(message, repeated, tag = "1")]
    pub(crate) openings: Vec<Opening>,
}

/// A server has opened the volume.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct Opening {
    /// Random.
    #[prost(fixed64, tag = "1")]
    pub(crate) id: u64,
    /// The mark that it found.
    #[prost(uint64, tag = "2")]
    pub(crate) from: u64,
}

/// How far a volume's history is: written with everything that is written.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct MarkRow {
    /// How often something was written.
    #[prost(uint64, tag = "1")]
    pub(crate) mark: u64,
    /// From which mark on the journal is whole; none: none is kept.
    #[prost(uint64, optional, tag = "2")]
    pub(crate) journal_from: Option<u64>,
    /// Bytes of the journal.
    #[prost(uint64, tag = "3")]
    pub(crate) journal_bytes: u64,
}

/// Which entries of earlier openings were brought back: see [`hayloft_model::replay::BroughtBack`].
#[derive(Clone, PartialEq, Message)]
pub(crate) struct BroughtRow {
    #[prost(message, repeated, tag = "1")]
    pub(crate) openings: Vec<BroughtOpening>,
}

impl From<BroughtRow> for BroughtBack {
    fn from(row: BroughtRow) -> BroughtBack {
        BroughtBack::from_openings(row.openings.into_iter().map(|of| (of.opening, of.marks)))
    }
}

impl From<&BroughtBack> for BroughtRow {
    fn from(brought: &BroughtBack) -> BroughtRow {
        let openings = brought.openings().map(|(opening, marks)| BroughtOpening { opening, marks });
        BroughtRow { openings: openings.collect() }
    }
}

/// Entries of one opening.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct BroughtOpening {
    #[prost(fixed64, tag = "1")]
    pub(crate) opening: u64,
    /// Their marks.
    #[prost(uint64, repeated, tag = "2")]
    pub(crate) marks: Vec<u64>,
}

/// By whom the database was opened the last time that it was by a server that knows of packed listings.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct Generation {
    /// SlateDB's count of openings then.
    #[prost(uint64, tag = "1")]
    pub(crate) epoch: u64,
    /// Random: what its listings begin with.
    #[prost(fixed64, tag = "2")]
    pub(crate) generation: u64,
}

/// What a volume knows of itself.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct VolumeRow {
    /// Bytes that the files take.
    #[prost(uint64, tag = "1")]
    pub(crate) bytes: u64,
    /// Inodes, the root not counted.
    #[prost(uint64, tag = "2")]
    pub(crate) inodes: u64,
    /// The first inode number that no session was given.
    #[prost(uint64, tag = "3")]
    pub(crate) next_ino: u64,
    /// Version of these tables.
    #[prost(uint32, tag = "4")]
    pub(crate) version: u32,
    /// Where the run ends that `next_ino` is of; 0: it is of none. See [`numbers`](super::numbers).
    #[prost(uint64, tag = "5")]
    pub(crate) end_ino: u64,
    /// Where it goes on behind the run.
    #[prost(uint64, tag = "6")]
    pub(crate) then_ino: u64,
    /// What it gives once it has taken another volume's place.
    #[prost(message, optional, tag = "7")]
    pub(crate) heir: Option<NumbersRow>,
}

/// Inode numbers that a volume may give, as in its own row.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct NumbersRow {
    /// Where its window begins: what the registry says of it as well.
    #[prost(uint64, tag = "1")]
    pub(crate) window: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) next_ino: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) end_ino: u64,
    #[prost(uint64, tag = "4")]
    pub(crate) then_ino: u64,
}

/// The version of the tables that this code writes. It reads the ones before as well: in version 1 the content of a small
/// file was always in its row.
pub(crate) const VERSION: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back_as_they_went_in() {
        for place in [
            Place::Here { len: 3, codec: Codec::Raw, payload: Bytes::from_static(b"hay") },
            Place::Pack { pack: PackId(u64::MAX), offset: 8, payload_len: 9, len: 10, codec: Codec::Lz4 },
        ] {
            let row = place.encode();
            assert_eq!(Place::decode(row.clone()), Some(place));
            assert_eq!(Place::decode(row.slice(..5)), None);
        }
    }

    #[test]
    fn rows_of_one_directory_lie_together() {
        let key = dentry(Ino(0x1_0000_0002), b"name");
        assert!(key.starts_with(&dentries(Ino(0x1_0000_0002))));
        assert_eq!(number_in(&key), Some(0x1_0000_0002));
        assert_eq!(rest_of(&key), "name");
        assert_eq!(second_number_in(&page(Ino(2), 7)), Some(7));
    }
}
