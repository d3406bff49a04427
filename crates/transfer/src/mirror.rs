//! A mirror: a folder of packs and of what versions there are. Files in it never change but for the record of the latest version,
//! so any web server, and any copy of the folder, is a mirror too.

use hayloft_tree::TreeName;
use serde::{Deserialize, Serialize};

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::manifest::Manifest;

/// What this program writes and reads.
const FORMAT: u32 = 1;
/// No pack is larger.
const PACK_MOST: u64 = 64 << 20;
/// A record is no larger.
pub(crate) const RECORD_MOST: u64 = 64 << 20;
/// The name under which the newest version of a volume is found.
pub const LATEST: &str = "latest";

/// A pack of a mirror.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PackRef {
    /// The BLAKE3 hash of the whole file.
    pub name: ChunkId,
    /// Bytes of it.
    pub size: u64,
    /// Bytes of its end that are the index.
    pub index: u64,
}

/// What a mirror says of a version.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The format of the mirror.
    pub format: u32,
    /// The volume.
    pub volume: String,
    /// The version's name.
    pub snapshot: String,
    /// The tree's name by content.
    pub tree: String,
    /// When it was made, nanoseconds since 1970.
    pub created_nanos: i64,
    /// For people.
    pub note: String,
    /// Files, directories and all else.
    pub entries: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Signatures of the tree's name.
    pub signatures: Vec<String>,
    /// The chunks of the manifest.
    pub manifest: Vec<ChunkId>,
    /// The packs that have chunks of this version.
    pub packs: Vec<PackRef>,
}

impl Record {
    /// The tree's name.
    ///
    /// # Errors
    /// It is none.
    pub fn tree_name(&self) -> Result<TreeName, TransferError> {
        self.tree
            .parse()
            .map_err(|said: &str| TransferError::Damaged(format!("the record of a version: {said}")))
    }

    pub(crate) fn parse(bytes: &[u8], of: &str) -> Result<Record, TransferError> {
        let record: Record = serde_json::from_slice(bytes)
            .map_err(|error| TransferError::Damaged(format!("{of}: {error}")))?;
        if record.format != FORMAT {
            let said = format!("{of} has format {}, and this hayloft reads format {FORMAT}", record.format);
            return Err(TransferError::Missing(said));
        }
        check_name(&record.volume)?;
        check_name(&record.snapshot)?;
        let pack_is_fine =
            |pack: &PackRef| pack.index > 4 && pack.size <= PACK_MOST && pack.index + 16 <= pack.size;
        let note_is_fine = record.note.len() <= 4096 && !record.note.chars().any(char::is_control);
        let signatures_are_fine =
            record.signatures.len() <= 16 && record.signatures.iter().all(|text| text.len() <= 16 << 10);
        match note_is_fine && signatures_are_fine && record.packs.iter().all(pack_is_fine) {
            true => Ok(record),
            false => Err(TransferError::Damaged(format!("{of} has numbers or texts that no version has"))),
        }
    }

    /// What is known of a version without a mirror: it has no packs.
    pub fn of(
        volume: &str,
        snapshot: &str,
        manifest: &Manifest,
        created_nanos: i64,
        note: &str,
        signatures: &[String],
    ) -> Record {
        Record {
            format: FORMAT,
            volume: volume.to_owned(),
            snapshot: snapshot.to_owned(),
            tree: manifest.tree.to_string(),
            created_nanos,
            note: note.to_owned(),
            entries: manifest.len(),
            bytes: manifest.bytes(),
            signatures: signatures.to_vec(),
            manifest: Vec::new(),
            packs: Vec::new(),
        }
    }
}

/// Refuses what would lead elsewhere as part of a path.
pub(crate) fn check_name(name: &str) -> Result<(), TransferError> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte);
    let good = (1..=64).contains(&name.len()) && !name.starts_with(['.', '-']) && name.bytes().all(is_good);
    match good {
        true => Ok(()),
        false => Err(TransferError::Missing(format!("'{name}' is no name of a volume or a version"))),
    }
}

pub(crate) fn record_path(volume: &str, snapshot: &str) -> String {
    format!("versions/{volume}/{snapshot}.json")
}

pub(crate) fn pack_path(name: ChunkId) -> String {
    format!("packs/{name}")
}
