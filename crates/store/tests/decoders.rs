//! Whatever a store holds, reading a pack gives its chunks or an error. Inputs that once failed are kept in `decoders.corpus`, and are
//! tried first.

use bytes::Bytes;
use hayloft_model::ContentHash;
use hayloft_store::{Codec, PackIndex, PackWriter, decode_chunk, encode_chunk};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::FileFailurePersistence;

fn pack() -> Vec<u8> {
    let mut writer = PackWriter::default();
    for raw in [&b"hay".repeat(300)[..], b"straw", b""] {
        writer.push(encode_chunk(raw));
    }
    writer.seal().payload.iter().flat_map(|part| part.iter().copied()).collect()
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 3000,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("corpus"))),
        ..ProptestConfig::default()
    }
}

/// Where the index begins, as the pack itself says, and where its hash is.
fn seal_anew(pack: &mut [u8]) {
    // The count, its hash, and eight bytes that say what it is, as at the front.
    let Some(count_at) = pack.len().checked_sub(4 + 32 + 8) else { return };
    let count = u32::from_le_bytes(pack[count_at..count_at + 4].try_into().unwrap()) as usize;
    let Some(start) = count_at.checked_sub(count.saturating_mul(45)) else { return };
    let hash = blake3::hash(&pack[start..count_at + 4]);
    pack[count_at + 4..count_at + 36].copy_from_slice(hash.as_bytes());
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn packs(edits in prop::collection::vec((any::<Index>(), any::<u8>()), 0..6), cut in any::<Index>(), sealed: bool) {
        let good = pack();
        let mut bytes = good.clone();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if sealed {
            // A pack of which somebody has made the index.
            seal_anew(&mut bytes);
        } else if cut.index(3) == 0 {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = PackIndex::of_pack(&bytes);
        if let Ok(index) = PackIndex::verify(&Bytes::from(bytes)) {
            // What is verified is content by its name.
            prop_assert!(index.entries.len() <= 3);
        }
    }

    #[test]
    fn chunks(
        hash in any::<[u8; 32]>(),
        len in any::<u32>(),
        codec in 0..3_u32,
        payload in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        if let Ok(codec) = Codec::try_from(codec) {
            prop_assert!(decode_chunk(ContentHash(hash), len, codec, payload.into()).is_err());
        }
    }
}
