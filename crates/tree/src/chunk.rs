//! Files are cut by content (FastCDC): an inserted byte changes the chunk that it is in and none of those behind.

use std::io::{self, Read};
use std::ops::Range;

use fastcdc::v2020::FastCDC;

/// Bytes of the shortest chunk, but for the last one of a file.
const SHORTEST: usize = 4 * 1024;
/// Bytes of a chunk on average. A change costs about one of them.
const AVERAGE: usize = 16 * 1024;
/// Bytes of the longest chunk.
pub const LONGEST: usize = 64 * 1024;

/// Bytes that are read at a time.
const READ: u64 = 1 << 20;

/// How long the first chunk of these bytes is. Fewer than [`LONGEST`] are the end of what is cut.
pub fn first(bytes: &[u8]) -> usize {
    let some = &bytes[..bytes.len().min(LONGEST)];
    FastCDC::new(some, SHORTEST, AVERAGE, LONGEST).cut(0, some.len()).1
}

/// Cuts what it reads and gives each chunk to `take`.
///
/// # Errors
/// What cannot be read.
pub fn cut(mut read: &mut dyn Read, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let (mut bytes, mut at, mut is_end) = (Vec::new(), 0, false);
    loop {
        if !is_end && bytes.len() - at < LONGEST {
            bytes.drain(..at);
            at = 0;
            is_end = (&mut read).take(READ).read_to_end(&mut bytes)? < READ as usize;
        }
        let rest = &bytes[at..];
        if rest.is_empty() {
            return Ok(());
        }
        let len = first(rest);
        take(&rest[..len]);
        at += len;
    }
}

/// A chunk of a file: its name, which is the BLAKE3 hash of its bytes, and its length.
pub type Chunk = ([u8; 32], u32);

/// A chunk whose name begins with a smaller byte is the last one of its group: one in 16.
const LAST: u8 = 16;
/// More chunks than this are not in a group.
const GROUP_MOST: usize = 128;

/// Chunks that lie together are told together: two sides who both know most of a file need few words for it. Which chunk is the
/// last one of its group follows from the chunk, so that groups are found again behind an inserted one.
pub fn groups(chunks: &[Chunk]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut begin = 0;
    std::iter::from_fn(move || {
        let rest = chunks.get(begin..).filter(|rest| !rest.is_empty())?;
        let len = rest.iter().position(is_last).map_or(rest.len(), |at| at + 1).min(GROUP_MOST);
        begin += len;
        Some(begin - len..begin)
    })
}

fn is_last((name, _): &Chunk) -> bool {
    name[0] < LAST
}

/// How many of these chunks, behind which others follow, are in groups that end here: with the others the next part of the file begins.
pub fn in_whole_groups(chunks: &[Chunk]) -> usize {
    match groups(chunks).last() {
        Some(last) if last.start > 0 && last.len() < GROUP_MOST && !is_last(&chunks[last.end - 1]) => {
            last.start
        }
        _ => chunks.len(),
    }
}

/// By what a group of chunks is called. Whoever acts on it knows the hash of the whole.
pub fn tag(group: &[Chunk]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    for (name, len) in group {
        hasher.update(name);
        hasher.update(&len.to_le_bytes());
    }
    *hasher.finalize().as_bytes().first_chunk().expect("a hash has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(bytes: &[u8]) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        cut(&mut &*bytes, |chunk| chunks.push((*blake3::hash(chunk).as_bytes(), chunk.len() as u32)))
            .unwrap();
        chunks
    }

    /// Numbers that look random, the same each time.
    fn noise(len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        blake3::Hasher::new().finalize_xof().fill(&mut out);
        out
    }

    #[test]
    fn an_inserted_byte_changes_only_the_chunks_around_it() {
        let bytes = noise(2_000_000);
        let mut changed = bytes.clone();
        changed.insert(1_000_000, 7);
        let (before, after) = (chunks(&bytes), chunks(&changed));
        assert!(before.len() > 60, "{}", before.len());
        let new = after.iter().filter(|id| !before.contains(id)).count();
        assert!((1..=2).contains(&new), "{new} of {} are new", after.len());
    }

    #[test]
    fn chunks_together_are_what_was_cut() {
        for len in [0, 1, SHORTEST, AVERAGE, 300_000] {
            let (bytes, mut together) = (noise(len), Vec::new());
            cut(&mut bytes.as_slice(), |chunk| together.extend_from_slice(chunk)).unwrap();
            assert_eq!(together, bytes);
        }
    }

    #[test]
    fn groups_are_found_again_behind_what_was_inserted() {
        let bytes = noise(8_000_000);
        let mut changed = bytes.clone();
        changed.insert(1_000_000, 7);
        let (before, after) = (chunks(&bytes), chunks(&changed));
        let tags = |chunks: &[Chunk]| groups(chunks).map(|group| tag(&chunks[group])).collect::<Vec<_>>();
        let together: usize = groups(&before).map(|group| group.len()).sum();
        assert_eq!(together, before.len());
        let (before, after) = (tags(&before), tags(&after));
        assert!(before.len() > 10, "{}", before.len());
        let new = after.iter().filter(|tag| !before.contains(tag)).count();
        assert!((1..=2).contains(&new), "{new} of {} are new", after.len());
        // Parts that end with a group have the groups of the whole.
        let all = chunks(&bytes);
        let end = in_whole_groups(&all[..all.len() / 2]);
        assert!((1..all.len() / 2).contains(&end), "{end} of {}", all.len());
        assert_eq!([tags(&all[..end]), tags(&all[end..])].concat(), tags(&all));
        // However unlikely a file is, no group is without end.
        let alike = vec![([0xff; 32], 1); 1000];
        assert!(groups(&alike).all(|group| group.len() <= GROUP_MOST));
    }

    /// A mirror is read for years: the cuts of a version must find those of older ones.
    #[test]
    fn cuts_stay_where_they_are() {
        let mut lengths = Vec::new();
        cut(&mut noise(120_000).as_slice(), |chunk| lengths.push(chunk.len())).unwrap();
        assert_eq!(lengths, LENGTHS);
    }

    const LENGTHS: &[usize] = &[25_574, 7_224, 26_313, 21_921, 38_316, 652];
}
