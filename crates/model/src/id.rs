//! Identifiers.

use std::fmt;

/// An inode number: unique in its volume, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ino(pub u64);

impl Ino {
    /// The root directory of every volume (FUSE fixes the number).
    pub const ROOT: Ino = Ino(1);
    /// The first number that a volume hands out.
    pub const FIRST: Ino = Ino(16);
}

impl fmt::Display for Ino {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A run of inode numbers handed to one session in advance: `next` is the first one free, `end` is
/// the first one beyond.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InoRange {
    /// First number not used yet.
    pub next: u64,
    /// First number that does not belong to the range.
    pub end: u64,
}

impl InoRange {
    /// Takes the next number; `None` when the range is used up.
    pub fn take(&mut self) -> Option<Ino> {
        (self.next < self.end).then(|| {
            self.next += 1;
            Ino(self.next - 1)
        })
    }

    /// How many numbers are left.
    pub fn left(&self) -> u64 {
        self.end - self.next
    }
}

/// A client's session on one volume; random, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Position of a batch in its session's log: 1, 2, 3, ... without gaps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Sequence(pub u64);

impl Sequence {
    /// The position after this one.
    pub fn next(self) -> Sequence {
        Sequence(self.0 + 1)
    }
}

/// The name of a piece of content: the BLAKE3 hash of its bytes, uncompressed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentHash(pub [u8; 32]);

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
