//! Slots: what the names of a split directory are granted by.
//!
//! A directory in which several hosts make files is **split**: its names are not granted all together, but by slots. A
//! slot is an object of the grant machine like a directory, with a number of its own: that of the directory, and above it
//! what the name's **stem** hashes to. Names that belong together have one stem (`foo.Tpo`, `foo.Po`, `foo.o`), so who
//! makes a temporary file and renames it needs one slot.

use crate::Ino;

/// Names in a split directory have their places in listings behind this; other names are counted from below.
pub const FIRST_COOKIE: u64 = 1 << 52;

/// An operation that has asked for slots so often is done by the server: others want the same.
pub const ASKS_MAX: u32 = 4;

/// Inode numbers have so many bits; those of slots have more.
pub(crate) const INO_BITS: u32 = 48;
/// Slots of a directory. The highest bit of a number is left to whoever tells other numbers to the kernel.
const SLOTS: u64 = (1 << 15) - 1;

impl Ino {
    /// The number of the slot that a name of this directory is in.
    pub fn slot(self, name: &[u8]) -> Ino {
        Ino((1 + hash(stem(name)) % SLOTS) << INO_BITS | self.0)
    }

    /// The directory that this is a slot of.
    pub fn of_slot(self) -> Option<Ino> {
        (self.0 >> INO_BITS != 0).then_some(Ino(self.0 & ((1 << INO_BITS) - 1)))
    }

    /// The directory that this is a slot of; itself if it is none.
    pub fn or_directory(self) -> Ino {
        self.of_slot().unwrap_or(self)
    }
}

/// What names that belong together begin with: a name up to its first dot behind something else.
pub fn stem(name: &[u8]) -> &[u8] {
    let dots = name.iter().take_while(|byte| **byte == b'.').count();
    let end = name[dots..].iter().position(|byte| *byte == b'.');
    end.map_or(name, |end| &name[..dots + end])
}

/// FNV-1a: clients and servers have to agree.
fn hash(bytes: &[u8]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_belong_together_have_one_stem() {
        for (name, wanted) in [
            ("foo.Tpo", "foo"),
            ("foo", "foo"),
            (".foo.o.d", ".foo"),
            (".hidden", ".hidden"),
            ("...", "..."),
            ("a.b.c", "a"),
        ] {
            assert_eq!(stem(name.as_bytes()), wanted.as_bytes(), "{name}");
        }
    }

    #[test]
    fn a_slot_has_a_number_that_nothing_else_has() {
        let dir = Ino((1 << INO_BITS) - 1);
        let slot = dir.slot(b"foo.o");
        assert_eq!(slot, dir.slot(b"foo.Po"));
        assert_ne!(slot, dir.slot(b"bar.o"));
        assert_eq!((slot.of_slot(), dir.of_slot()), (Some(dir), None));
        assert_eq!(slot.0 >> 63, 0);
    }
}
