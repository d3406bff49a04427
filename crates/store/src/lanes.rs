//! The hashes of many short contents at once.
//!
//! BLAKE3 is as fast as it is since a processor works on sixteen chunks of 1,024 bytes beside each other, and a small file has one to four of
//! them. Here chunks of different contents share the lanes: a third of the time, and less.

use blake3::IncrementCounter;
use blake3::platform::Platform;
use hayloft_model::ContentHash;

const BLOCK: usize = 64;
const CHUNK: usize = 1024;
const CHUNK_BLOCKS: usize = CHUNK / BLOCK;

/// Longer contents fill lanes of their own well enough.
const CHUNKS_MAX: usize = 8;

/// Flags of a block (the BLAKE3 paper, 2.3).
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;

/// What every chunk begins with: the words of SHA-256, as everywhere in BLAKE3.
const IV: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

type Value = [u32; 8];

/// What a chunk has before its last block; a chunk that is full and has others beside it ends here.
#[derive(Clone, Copy)]
struct Head<'a> {
    bytes: &'a [u8],
    /// Where its value goes.
    to: usize,
}

/// The hashes of contents, in their order.
pub fn hash_all<B: AsRef<[u8]>>(contents: &[B]) -> Vec<ContentHash> {
    let platform = Platform::detect();
    let (mut values, mut firsts) = (Vec::new(), Vec::with_capacity(contents.len()));
    // By the place of the chunk in its content, and its number of blocks: what goes through the lanes together has both in common.
    let mut heads: Vec<Vec<Head<'_>>> = vec![Vec::new(); CHUNKS_MAX * (CHUNK_BLOCKS + 1)];
    for content in contents {
        let content = content.as_ref();
        firsts.push(values.len());
        if content.len() > CHUNKS_MAX * CHUNK {
            continue;
        }
        for (at, chunk) in chunks(content).enumerate() {
            let blocks = if ends_here(content, chunk) { CHUNK_BLOCKS } else { blocks_before_last(chunk) };
            let head = Head { bytes: &chunk[..blocks * BLOCK], to: values.len() };
            values.push(IV);
            heads[at * (CHUNK_BLOCKS + 1) + blocks].push(head);
        }
    }
    for (group, heads) in heads.iter().enumerate() {
        let (at, blocks) = (group / (CHUNK_BLOCKS + 1), group % (CHUNK_BLOCKS + 1));
        if blocks > 0 && !heads.is_empty() {
            through_lanes(platform, (at as u64, blocks), heads, &mut values);
        }
    }
    let whole = |(content, first): (&B, usize)| {
        let content = content.as_ref();
        if content.len() > CHUNKS_MAX * CHUNK {
            return ContentHash(*blake3::hash(content).as_bytes());
        }
        let count = chunks(content).count();
        let values = &mut values[first..first + count];
        for (at, chunk) in chunks(content).enumerate().filter(|(_, chunk)| !ends_here(content, chunk)) {
            last_block(platform, (at as u64, count == 1), chunk, &mut values[at]);
        }
        ContentHash(bytes_of(&joined(platform, values, true)))
    };
    contents.iter().zip(firsts).map(whole).collect()
}

/// The chunks of a content; of nothing it is one.
fn chunks(content: &[u8]) -> impl Iterator<Item = &[u8]> {
    let empty = content.is_empty().then_some(content);
    content.chunks(CHUNK).chain(empty)
}

fn ends_here(content: &[u8], chunk: &[u8]) -> bool {
    content.len() > CHUNK && chunk.len() == CHUNK
}

fn blocks_before_last(chunk: &[u8]) -> usize {
    chunk.len().div_ceil(BLOCK).saturating_sub(1)
}

fn last_block(platform: Platform, (at, is_root): (u64, bool), chunk: &[u8], value: &mut Value) {
    let before = blocks_before_last(chunk);
    let last = &chunk[before * BLOCK..];
    let mut block = [0; BLOCK];
    block[..last.len()].copy_from_slice(last);
    let start = if before == 0 { CHUNK_START } else { 0 };
    let root = if is_root { ROOT } else { 0 };
    platform.compress_in_place(value, &block, last.len() as u8, at, start | CHUNK_END | root);
}

/// The value of some chunks that follow each other: a tree, of which the left side is the largest power of two.
fn joined(platform: Platform, values: &[Value], is_root: bool) -> Value {
    let [value] = values else {
        let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
        let mut block = [0; BLOCK];
        block[..32].copy_from_slice(&bytes_of(&joined(platform, left, false)));
        block[32..].copy_from_slice(&bytes_of(&joined(platform, right, false)));
        let mut value = IV;
        platform.compress_in_place(
            &mut value,
            &block,
            BLOCK as u8,
            0,
            PARENT | if is_root { ROOT } else { 0 },
        );
        return value;
    };
    *value
}

fn bytes_of(value: &Value) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.as_chunks_mut::<4>().0.iter_mut().zip(value).for_each(|(to, word)| *to = word.to_le_bytes());
    bytes
}

fn through_lanes(platform: Platform, (at, blocks): (u64, usize), heads: &[Head<'_>], values: &mut [Value]) {
    macro_rules! of_blocks {
        ($($n:literal)*) => {
            match blocks {
                $($n => lanes_of::<{ $n * BLOCK }>(platform, at, heads, values),)*
                _ => unreachable!("a chunk has sixteen blocks"),
            }
        };
    }
    of_blocks!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
}

fn lanes_of<const N: usize>(platform: Platform, at: u64, heads: &[Head<'_>], values: &mut [Value]) {
    let inputs: Vec<&[u8; N]> =
        heads.iter().map(|head| head.bytes.try_into().expect("sorted by length")).collect();
    let mut out = vec![0; heads.len() * 32];
    let end = if N == CHUNK { CHUNK_END } else { 0 };
    platform.hash_many(&inputs, &IV, at, IncrementCounter::No, 0, CHUNK_START, end, &mut out);
    for (head, out) in heads.iter().zip(out.as_chunks::<4>().0.chunks_exact(8)) {
        values[head.to] = std::array::from_fn(|word| u32::from_le_bytes(out[word]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        blake3::Hasher::new().update(&len.to_le_bytes()).finalize_xof().fill(&mut out);
        out
    }

    fn assert_right(contents: &[Vec<u8>]) {
        let alone = |content: &Vec<u8>| ContentHash(*blake3::hash(content).as_bytes());
        let right: Vec<ContentHash> = contents.iter().map(alone).collect();
        assert!(
            hash_all(contents) == right,
            "contents of {:?}",
            contents.iter().map(Vec::len).collect::<Vec<_>>()
        );
    }

    #[test]
    fn contents_of_every_length_have_the_hash_that_they_have_alone() {
        assert_right(&[]);
        let all: Vec<Vec<u8>> = (0..=(CHUNKS_MAX + 1) * CHUNK).map(noise).collect();
        assert_right(&all);
        all.chunks(7).for_each(assert_right);
        assert_right(&all[CHUNK..=CHUNK]);
    }

    #[test]
    fn more_of_a_length_than_lanes_do_not_disturb_each_other() {
        for len in [0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 3072, 4000, 8192, 70_000] {
            for count in [1, 2, 15, 16, 17, 50] {
                let contents: Vec<Vec<u8>> = (0..count).map(|n| vec![n as u8; len]).collect();
                assert_right(&contents);
            }
        }
    }
}
