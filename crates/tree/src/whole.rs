//! The content of files, read from their begin to their end.

use std::fs::File;
use std::io::{self, Read};

use crate::holes::{self, Part};
use crate::name::{self, PIECE, Pieces};
use crate::walk::{Contents, Found};

/// Reads each file from its begin to its end.
#[derive(Debug)]
pub(crate) struct Whole;

impl Contents for Whole {
    fn of(&self, found: &Found<'_>, file: &File) -> io::Result<(u64, [u8; 32])> {
        let mut pieces = Pieces::default();
        let mut piece = Vec::with_capacity(found.size.min(PIECE) as usize);
        let mut take = |part: Part<'_>| match part {
            Part::Hole(hole) => {
                pieces.push_zeros(hole.end - hole.start);
                Ok(hole.end - hole.start)
            }
            Part::Data(data) => {
                let mut read = 0;
                loop {
                    piece.clear();
                    let some = Read::take(&mut *data, PIECE).read_to_end(&mut piece)? as u64;
                    if some == 0 {
                        return Ok(read);
                    }
                    pieces.push(&name::hash(&piece));
                    read += some;
                }
            }
        };
        let read = holes::read(file, found.size, &holes::of(file, found.size)?, &mut take)?;
        Ok((read, pieces.finish()))
    }
}
