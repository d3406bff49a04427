//! The bytes of each file: a piece of a corpus, with a stamp in every KiB that no other file has.
//!
//! Copying is most of the cost. The stamps keep a file system that stores equal content once from storing the
//! corpus only, and let a reader notice when it is given another file's bytes.

use std::time::Instant;

use super::corpus;
use super::shape::{FilePlan, Kind};
use crate::rng::{Rng, mix};

const STAMP_EVERY: u64 = 1024;
const STAMP_BYTES: usize = 16;

/// Makes and checks contents.
pub(crate) struct Content {
    text: Vec<u8>,
    objects: Vec<u8>,
}

impl Content {
    pub(crate) fn new(seed: u64) -> Self {
        Content { text: corpus::text(mix(seed ^ 2)), objects: corpus::objects(mix(seed ^ 3)) }
    }

    /// Fills `out` with the bytes of `file` from `offset` on.
    pub(crate) fn fill(&self, file: &FilePlan, offset: u64, out: &mut [u8]) {
        let corpus = match file.kind {
            Kind::Source => &self.text,
            Kind::Output => &self.objects,
        };
        let mut from = ((file.corpus_offset + offset) % corpus.len() as u64) as usize;
        let mut rest = &mut *out;
        while !rest.is_empty() {
            let len = rest.len().min(corpus.len() - from);
            let (now, later) = rest.split_at_mut(len);
            now.copy_from_slice(&corpus[from..from + len]);
            (rest, from) = (later, 0);
        }
        self.stamp(file, offset, out);
    }

    fn stamp(&self, file: &FilePlan, offset: u64, out: &mut [u8]) {
        let end = offset + out.len() as u64;
        let mut at = offset / STAMP_EVERY * STAMP_EVERY;
        while at < end {
            let stamp = stamp(file, at);
            // The part of the stamp that lies within `offset..end`.
            let (first, last) = (at.max(offset), (at + STAMP_BYTES as u64).min(end));
            if first < last {
                out[(first - offset) as usize..(last - offset) as usize]
                    .copy_from_slice(&stamp[(first - at) as usize..(last - at) as usize]);
            }
            at += STAMP_EVERY;
        }
    }

    /// Whether `got`, read at `offset`, is right at its beginning, its end, and a few places between.
    ///
    /// `places` are offsets in the file that are worth a look as well.
    pub(crate) fn check(&self, file: &FilePlan, offset: u64, got: &[u8], places: &[u64]) -> Result<(), u64> {
        const SAMPLE_BYTES: usize = 16;
        const SAMPLE_EVERY: usize = 16 << 10;
        let end = offset + got.len() as u64;
        let regular = (0..got.len()).step_by(SAMPLE_EVERY).map(|start| {
            let room = SAMPLE_EVERY.min(got.len() - start);
            let within = mix(file.id ^ (offset + start as u64)) as usize % room;
            start + if start == 0 { 0 } else { within }
        });
        let asked = places.iter().filter(|p| (offset..end).contains(p)).map(|p| (p - offset) as usize);
        let tail = got.len().saturating_sub(SAMPLE_BYTES);
        for start in regular.chain(asked).chain([tail]) {
            let got = &got[start..(start + SAMPLE_BYTES).min(got.len())];
            let mut wanted = [0; SAMPLE_BYTES];
            let wanted = &mut wanted[..got.len()];
            self.fill(file, offset + start as u64, wanted);
            if got != wanted {
                return Err(offset + start as u64);
            }
        }
        Ok(())
    }

    /// Bytes per second of [`Content::fill`] as a writer of pieces of 64 KiB calls it.
    pub(crate) fn bytes_per_second(&self, files: &[FilePlan]) -> f64 {
        let mut piece = vec![0; 64 << 10];
        let (mut bytes, started) = (0, Instant::now());
        for file in files.iter().cycle().take(files.len().max(10_000)) {
            let len = piece.len().min(file.bytes as usize);
            self.fill(file, 0, &mut piece[..len]);
            bytes += len;
        }
        std::hint::black_box(&piece);
        bytes as f64 / started.elapsed().as_secs_f64()
    }
}

/// Sixteen bytes that depend on the file and the place: a comment in a text, a number in an object.
fn stamp(file: &FilePlan, at: u64) -> [u8; STAMP_BYTES] {
    let number = mix(file.id ^ at.rotate_left(32));
    let mut stamp = [0; STAMP_BYTES];
    match file.kind {
        Kind::Source => {
            stamp[..2].copy_from_slice(b"/*");
            for (n, byte) in stamp[2..14].iter_mut().enumerate() {
                *byte = b'a' + (number >> (4 * n) & 15) as u8;
            }
            stamp[14..].copy_from_slice(b"*/");
        }
        Kind::Output => stamp[..8].copy_from_slice(&number.to_le_bytes()),
    }
    stamp
}

/// Where a linker goes back to: the header, and now and then a place further up. Each with its length.
///
/// Such a place is first written with zeroes, then with what belongs there.
pub(crate) fn patches(file: &FilePlan) -> Vec<(u64, usize)> {
    const HEADER_BYTES: usize = 64;
    const PATCH_EVERY: u64 = 256 << 10;
    const PATCHES_MAX: u64 = 32;
    let mut patches = vec![(0, HEADER_BYTES.min(file.bytes as usize))];
    let mut rng = Rng::new(file.id);
    for _ in 0..(file.bytes / PATCH_EVERY).min(PATCHES_MAX) {
        let len = 8 << rng.below(4);
        patches.push((rng.below(file.bytes as usize - len) as u64, len));
    }
    patches
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::super::shape::Plan;
    use super::*;

    static CONTENT: LazyLock<Content> = LazyLock::new(|| Content::new(1));

    fn whole(file: &FilePlan) -> Vec<u8> {
        let mut bytes = vec![0; file.bytes as usize];
        CONTENT.fill(file, 0, &mut bytes);
        bytes
    }

    fn file(kind: Kind, bytes: u64) -> FilePlan {
        FilePlan { path: "f".into(), bytes, kind, id: 77, corpus_offset: corpus::CORPUS_BYTES as u64 - 5_000 }
    }

    #[test]
    fn pieces_join_to_the_whole() {
        for kind in [Kind::Source, Kind::Output] {
            let file = file(kind, 20_000);
            let wanted = whole(&file);
            for piece in [1, 7, 1000, 1024, 4096, 20_000] {
                let mut got = vec![0; wanted.len()];
                for (n, out) in got.chunks_mut(piece).enumerate() {
                    CONTENT.fill(&file, (n * piece) as u64, out);
                }
                assert!(got == wanted, "pieces of {piece}");
            }
        }
    }

    #[test]
    fn no_two_blocks_are_equal_anywhere_in_the_tree() {
        let plan = Plan::new(1, 0.05);
        let mut seen = std::collections::HashSet::new();
        for file in plan.sources.iter().chain(&plan.outputs) {
            for block in whole(file).chunks_exact(4096) {
                assert!(seen.insert(mix_all(block)), "{}", file.path.display());
            }
        }
    }

    fn mix_all(block: &[u8]) -> u64 {
        block.as_chunks::<8>().0.iter().fold(0, |hash, word| mix(hash ^ u64::from_le_bytes(*word)))
    }

    #[test]
    fn what_is_wrong_is_found() {
        let file = file(Kind::Output, 100_000);
        let right = whole(&file);
        assert_eq!(CONTENT.check(&file, 0, &right, &[]), Ok(()));
        assert_eq!(CONTENT.check(&file, 4096, &right[4096..], &[]), Ok(()));
        let mut zeroed = right.clone();
        zeroed[32 << 10..64 << 10].fill(0);
        assert!(CONTENT.check(&file, 0, &zeroed, &[]).is_err());
        let other = whole(&FilePlan { id: 78, ..file.clone() });
        assert_eq!(CONTENT.check(&file, 0, &other, &[]), Err(0));
        let mut one_byte = right.clone();
        one_byte[12_345] ^= 1;
        assert_eq!(CONTENT.check(&file, 0, &one_byte, &[12_340]), Err(12_340));
    }

    #[test]
    fn stamped_content_still_compresses() {
        let file = file(Kind::Source, 4 << 20);
        let bytes = whole(&file);
        let packed: usize = bytes.chunks(11 << 10).map(|c| zstd::bulk::compress(c, 3).unwrap().len()).sum();
        let ratio = bytes.len() as f64 / packed as f64;
        println!("sources, in pieces of 11 KiB: {ratio:.2}");
        assert!((2.5..4.5).contains(&ratio), "{ratio}");
    }

    #[test]
    fn patches_stay_within_the_file() {
        for bytes in [10, 900, 300_000, 64_000_000] {
            let patches = patches(&file(Kind::Output, bytes));
            assert!(patches.len() <= 33);
            assert!(patches.iter().all(|(at, len)| at + *len as u64 <= bytes));
        }
    }
}
