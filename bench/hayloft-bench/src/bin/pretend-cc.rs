//! A compiler that reads, waits and writes, for `bench/headline.sh`: a source and what it includes, for as long as the source
//! says, an object and a dependency file beside it.
//!
//! `pretend-cc OBJECT SOURCE`. What the object has follows from every byte that was read. With `PRETEND_AT_ONCE` set it does not wait.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// Least and most bytes of an object.
const SIZES: std::ops::Range<u64> = 4_000..36_000;

fn main() -> io::Result<()> {
    let begun = Instant::now();
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "usage: pretend-cc OBJECT SOURCE");
    let mut args = std::env::args().skip(1);
    let (object, source) = args.next().zip(args.next()).ok_or_else(wrong)?;
    let text = fs::read_to_string(&source)?;
    let (mut state, mut rule) =
        (mixed(0xcbf2_9ce4_8422_2325, text.as_bytes()), format!("{object}: {source}"));
    let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
    for header in included {
        state = mixed(state, &fs::read(header)?);
        rule.push_str(" \\\n ");
        rule.push_str(header);
    }
    let waits = text.strip_prefix("// takes ").and_then(|rest| rest.split(' ').next()?.parse().ok());
    if std::env::var_os("PRETEND_AT_ONCE").is_none() {
        std::thread::sleep(Duration::from_millis(waits.unwrap_or(0)).saturating_sub(begun.elapsed()));
    }
    let size = SIZES.start + state % (SIZES.end - SIZES.start);
    let mut bytes = Vec::with_capacity(size as usize + 8);
    while (bytes.len() as u64) < size {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        bytes.extend_from_slice(&(state >> 16).to_le_bytes());
    }
    fs::write(&object, bytes)?;
    fs::write(format!("{}.d", object.trim_end_matches(".o")), rule + "\n")
}

/// FNV-1a over words of eight bytes.
fn mixed(state: u64, bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(state, |state, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (state ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}
