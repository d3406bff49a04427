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
/// Slots of a directory that is split in few.
const FEW: u64 = (1 << 15) - 1;
/// This bit a number has that is one of many slots. (Whoever tells other numbers to the kernel has it as well, and never those of slots.)
const MANY_BIT: u64 = 1 << 63;
/// Only directories of so many bits have many slots: the rest of a number says which.
const MANY_INO_BITS: u32 = 40;
/// Slots of a directory that is split in many.
const MANY: u64 = 1 << (63 - MANY_INO_BITS);

/// In how many slots a directory is split. Unrelated names that meet in one slot are recalled from each other's owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Width {
    /// 32,767: what every client knows.
    #[default]
    Few,
    /// 8,388,608.
    Many,
}

impl Ino {
    /// The number of the slot that a name of this directory is in.
    pub fn slot(self, name: &[u8], width: Width) -> Ino {
        let hash = hash(stem(name));
        match width {
            Width::Many if self.0 >> MANY_INO_BITS == 0 => {
                Ino(MANY_BIT | (hash % MANY) << MANY_INO_BITS | self.0)
            }
            _ => Ino((1 + hash % FEW) << INO_BITS | self.0),
        }
    }

    /// The directory that this is a slot of.
    pub fn of_slot(self) -> Option<Ino> {
        let bits = if self.is_of_many() { MANY_INO_BITS } else { INO_BITS };
        (self.0 >> bits != 0).then_some(Ino(self.0 & ((1 << bits) - 1)))
    }

    /// In how many slots the directory of this one is split.
    pub fn width(self) -> Width {
        if self.is_of_many() { Width::Many } else { Width::Few }
    }

    fn is_of_many(self) -> bool {
        self.0 & MANY_BIT != 0
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
        for (dir, many) in
            [(1 << 40) - 1, (1 << 40), (1 << INO_BITS) - 1].into_iter().zip([true, false, false])
        {
            let dir = Ino(dir);
            for width in [Width::Few, Width::Many] {
                let slot = dir.slot(b"foo.o", width);
                assert_eq!(slot, dir.slot(b"foo.Po", width));
                assert_ne!(slot, dir.slot(b"bar.o", width));
                assert_eq!((slot.of_slot(), dir.of_slot()), (Some(dir), None));
                assert_eq!(slot.width() == Width::Many, many && width == Width::Many);
            }
        }
    }

    #[test]
    fn names_seldom_meet_in_one_of_many_slots() {
        for (width, most) in [(Width::Few, 6000), (Width::Many, 40)] {
            let slots: std::collections::HashSet<Ino> =
                (0..20_000).map(|n| Ino(77).slot(format!("w{}-{n}.Po", n % 8).as_bytes(), width)).collect();
            assert!(20_000 - slots.len() <= most, "{width:?}: {}", slots.len());
        }
    }
}
