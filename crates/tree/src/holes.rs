//! Files that are mostly holes: what nobody has written is not read, however large it is.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs as sys;
use rustix::io::Errno;

use crate::name::PIECE;

/// Shorter holes are read as the zeros that they are, bytes.
pub const SHORTEST: u64 = 64 << 20;

/// A part of a file, in its order.
pub enum Part<'a> {
    /// What was written there, perhaps with short holes.
    Data(&'a mut dyn Read),
    /// Zeros from here to there that need not be read.
    Hole(Range<u64>),
}

/// The holes of a file from [`SHORTEST`] on. They begin and end with whole pieces, but for one at the end of the file. None where the
/// file system does not tell.
///
/// # Errors
/// The file cannot be read.
pub fn of(file: &File, size: u64) -> io::Result<Vec<Range<u64>>> {
    let mut holes = Vec::new();
    if size < SHORTEST || file.metadata()?.blocks().saturating_mul(512) >= size {
        return Ok(holes);
    }
    let mut at = 0;
    while at < size {
        let begin = match sys::seek(file, sys::SeekFrom::Hole(at)) {
            Ok(begin) if begin < size => begin,
            Ok(_) | Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => break,
            Err(error) => return Err(error.into()),
        };
        let end = match sys::seek(file, sys::SeekFrom::Data(begin)) {
            Ok(end) => end.min(size),
            Err(Errno::NXIO) => size,
            Err(error) => return Err(error.into()),
        };
        let whole = begin.next_multiple_of(PIECE)..if end == size { size } else { end - end % PIECE };
        if whole.end.saturating_sub(whole.start) >= SHORTEST {
            holes.push(whole);
        }
        // One that was filled meanwhile begins and ends in the same place.
        at = end.max(begin + 1);
    }
    Ok(holes)
}

/// Gives a file of `size` bytes, with these holes, part by part to `take`, which returns how much it has read. Returns how much that is together:
/// another number than `size` if the file has become shorter, or longer.
///
/// # Errors
/// The file cannot be read; those of `take`.
pub fn read(
    mut file: &File,
    size: u64,
    holes: &[Range<u64>],
    take: &mut dyn FnMut(Part<'_>) -> io::Result<u64>,
) -> io::Result<u64> {
    let (mut at, mut read) = (0, 0);
    for hole in holes.iter().cloned().chain(std::iter::once(size..size)) {
        if at < hole.start {
            file.seek(SeekFrom::Start(at))?;
            read += take(Part::Data(&mut file.take(hole.start - at)))?;
        }
        at = hole.end;
        if !hole.is_empty() {
            read += take(Part::Hole(hole))?;
        }
    }
    // Should it have grown.
    read += file.read_at(&mut [0], size)? as u64;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with something at these places, and its holes.
    fn holes(size: u64, written: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        for (at, len) in written {
            file.write_all_at(&vec![1; *len as usize], *at).unwrap();
        }
        let holes = of(&file, size).unwrap();
        // What is read and what is not are the whole file.
        let mut at = 0;
        let mut take = |part: Part<'_>| match part {
            Part::Data(data) => {
                let mut bytes = Vec::new();
                data.read_to_end(&mut bytes)?;
                for (begin, len) in
                    written.iter().filter(|(begin, _)| (at..at + bytes.len() as u64).contains(begin))
                {
                    let begin = (begin - at) as usize;
                    assert!(bytes[begin..begin + *len as usize].iter().all(|byte| *byte == 1));
                }
                at += bytes.len() as u64;
                Ok(bytes.len() as u64)
            }
            Part::Hole(hole) => {
                assert_eq!(hole.start, at);
                assert!(!written.iter().any(|(begin, _)| hole.contains(begin)));
                at = hole.end;
                Ok(hole.end - hole.start)
            }
        };
        assert_eq!(read(&file, size, &holes, &mut take).unwrap(), size);
        let end = file.metadata().unwrap().len();
        file.set_len(end + 1).unwrap();
        assert_eq!(read(&file, size, &holes, &mut take_all).unwrap(), size + 1);
        holes.into_iter().map(|hole| (hole.start, hole.end)).collect()
    }

    fn take_all(part: Part<'_>) -> io::Result<u64> {
        match part {
            Part::Data(data) => io::copy(data, &mut io::sink()),
            Part::Hole(hole) => Ok(hole.end - hole.start),
        }
    }

    #[test]
    fn holes_are_found_that_are_long() {
        let (all, middle) = (SHORTEST * 3 + 5, SHORTEST + PIECE * 2);
        assert_eq!(holes(all, &[]), [(0, all)]);
        assert_eq!(holes(SHORTEST - 1, &[]), []);
        assert_eq!(holes(all, &[(0, 3)]), [(PIECE, all)]);
        assert_eq!(holes(all, &[(middle + 9, 3)]), [(0, middle), (middle + PIECE, all)]);
        assert_eq!(holes(all, &[(all - 1, 1)]), [(0, all - all % PIECE)]);
        assert_eq!(holes(SHORTEST * 2, &[(SHORTEST - 1, 2)]), []);
    }
}
