//! Content is what its name says before it gets a place: a bit that flips on the way harms nobody.

use crate::common::*;
use bytes::Bytes;
use hayloft_model::{BlockRef, Content, ContentHash, FileKind, Ino, Record};
use hayloft_store::{EncodedChunk, encode_chunk};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{Chunk, FailureCode};

/// What happens to a chunk on its way.
type Damage = fn(&mut Chunk);

/// Flips one bit in the middle.
fn flip(bytes: &Bytes) -> Bytes {
    let mut bytes = bytes.to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    bytes.into()
}

const DAMAGES: [(&str, Damage); 4] = [
    ("payload", |chunk| chunk.payload = flip(&chunk.payload)),
    ("name", |chunk| chunk.hash = flip(&chunk.hash)),
    ("length", |chunk| chunk.len -= 1),
    ("codec", |chunk| chunk.codec ^= 1),
];

fn message(chunk: EncodedChunk) -> Chunk {
    Chunk {
        hash: Bytes::copy_from_slice(&chunk.hash.0),
        len: chunk.len,
        codec: chunk.codec as u32,
        payload: chunk.payload,
    }
}

/// Sends these blocks, one of them damaged, with a file of them all.
fn send(client: &mut Client, ino: u64, raw: &[Vec<u8>], damage: Option<(usize, Damage)>) -> Vec<Record> {
    let mut blocks = Vec::new();
    for (at, raw) in raw.iter().enumerate() {
        let chunk = encode_chunk(raw);
        blocks.push(Some(BlockRef { hash: chunk.hash, len: chunk.len }));
        let mut chunk = message(chunk);
        if let Some((_, damage)) = damage.filter(|(which, _)| *which == at) {
            damage(&mut chunk);
        }
        client.send(Ask::Content(chunk));
    }
    let size = raw.iter().map(Vec::len).sum::<usize>() as u64;
    let mut pages = blocks.chunks(64).map(<[_]>::to_vec);
    let mut records = vec![
        put(1, directory(1, 0, ino + 1)),
        link(1, &format!("f{ino}"), ino, FileKind::Regular, ino),
        put(ino, file(Content::Blocks(pages.next().unwrap()), size)),
    ];
    records.extend((1..).zip(pages).map(|(page, blocks)| Record::PutPage(Ino(ino), page, blocks)));
    records
}

fn hashes(raw: &[Vec<u8>]) -> Vec<ContentHash> {
    raw.iter().map(|raw| encode_chunk(raw).hash).collect()
}

#[test]
fn one_flipped_bit_in_an_upload_is_refused_and_what_is_stored_stays_readable() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    let text = |seed: u64| format!("int x{seed} = {seed};\n").into_bytes().repeat(2000);
    // In rows, and in several packs; compressed, and not.
    let small = vec![noise(1, 60_000), text(2)];
    let large: Vec<Vec<u8>> = (0..320).map(|n| if n % 8 == 3 { text(n) } else { noise(n, 65536) }).collect();
    let (mut sequence, mut ino) = (0, 100);
    for raw in [&small, &large] {
        let usage = (raw.iter().map(Vec::len).sum::<usize>() as i64, 1);
        (sequence, ino) = (sequence + 1, ino + 1);
        let records = send(&mut client, ino, raw, None);
        client.commit(sequence, &records, usage).unwrap();
        for (what, damage) in DAMAGES {
            for which in [0, 1, raw.len() - 1] {
                ino += 1;
                let records = send(&mut client, ino, raw, Some((which, damage)));
                let refused = client.commit(sequence + 1, &records, usage).unwrap_err();
                assert_eq!(code(&refused), FailureCode::Damaged, "{what} {which}: {}", refused.message);
                let found = client.fetch(&hashes(raw)).unwrap();
                assert!(found.iter().zip(raw).all(|(found, raw)| found == raw), "{what} {which}");
            }
        }
        // The same batch as it should be, under the same number.
        let records = send(&mut client, ino, raw, None);
        sequence += 1;
        client.commit(sequence, &records, usage).unwrap();
    }
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}
