//! Names of split directories that the kernel keeps.
//!
//! Who holds a slot has it recalled before others change its names, so the kernel may keep them until then (`docs/sharing.md`). It
//! does not ask anew for what it keeps: the name has to be expired. That is certain only if whoever asks has the directory's
//! lock until the answer counts, for which expiring waits. The kernel looks up without it what it had a name for already: so a name
//! that is there is kept only if its inode is new to the kernel. For one that is not there it has the lock.

use std::collections::{HashMap, HashSet};

use hayloft_model::slot::Width;
use hayloft_model::{Ino, Name};
use rustc_hash::FxBuildHasher;

/// Most names that are noted.
const NOTED_MAX: usize = 1 << 16;

/// What is noted of a slot.
#[derive(Debug, Default)]
struct Slot {
    /// Absent names that were looked up once.
    seen: HashSet<Name, FxBuildHasher>,
    /// Names that the kernel may hold.
    kept: HashSet<Name, FxBuildHasher>,
}

/// Names of split directories that the kernel may hold, by directory and slot.
#[derive(Debug, Default)]
pub(crate) struct SplitNames {
    dirs: HashMap<Ino, HashMap<Ino, Slot, FxBuildHasher>, FxBuildHasher>,
    noted: usize,
    /// So many of these were looked up once only.
    seen: usize,
}

impl SplitNames {
    /// A name is not there. Returns whether the kernel may keep that: it is asked for once more.
    pub(crate) fn is_absent(&mut self, slot: Ino, name: &[u8]) -> bool {
        if self.keeps(slot, name) {
            return true;
        }
        if !self.has_room() {
            return false;
        }
        let Some(noted) = self.slot(slot) else { return false };
        match noted.seen.take(name) {
            Some(name) => {
                noted.kept.insert(name);
                self.seen -= 1;
                true
            }
            None => {
                noted.seen.insert(Name::new(name));
                (self.noted, self.seen) = (self.noted + 1, self.seen + 1);
                false
            }
        }
    }

    /// The kernel is told of a name for as long as the slot is held. `false`: there are too many.
    pub(crate) fn keep(&mut self, slot: Ino, name: &[u8]) -> bool {
        if self.keeps(slot, name) {
            return true;
        }
        if !self.has_room() {
            return false;
        }
        self.note(slot, name)
    }

    /// `false`: it is no slot.
    fn note(&mut self, slot: Ino, name: &[u8]) -> bool {
        let Some(noted) = self.slot(slot) else { return false };
        let was_seen = noted.seen.remove(name);
        noted.kept.insert(Name::new(name));
        self.noted += usize::from(!was_seen);
        self.seen -= usize::from(was_seen);
        true
    }

    /// The kernel has moved what it keeps to another name, however many there are.
    pub(crate) fn moves(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8])) {
        if self.keeps(from.0, from.1) && !self.keeps(to.0, to.1) {
            self.note(to.0, to.1);
        }
    }

    /// Whether the kernel may hold any name of a directory.
    pub(crate) fn keeps_any(&self, dir: Ino) -> bool {
        let slots = self.dirs.get(&dir).into_iter().flat_map(HashMap::values);
        slots.into_iter().any(|noted| !noted.kept.is_empty())
    }

    /// Whether the kernel may hold a name.
    fn keeps(&self, slot: Ino, name: &[u8]) -> bool {
        let slots = slot.of_slot().and_then(|dir| self.dirs.get(&dir));
        slots.and_then(|slots| slots.get(&slot)).is_some_and(|noted| noted.kept.contains(name))
    }

    /// Where a name of a directory may be noted: that may not be split any more.
    fn places(dir: Ino, name: &Name) -> [Ino; 2] {
        [Width::Few, Width::Many].map(|width| dir.slot(name.as_bytes(), width))
    }

    /// Whether the kernel may hold a name of a directory.
    pub(crate) fn has(&self, dir: Ino, name: &Name) -> bool {
        Self::places(dir, name).into_iter().any(|place| self.keeps(place, name.as_bytes()))
    }

    /// The same; it is on its way out of it.
    pub(crate) fn take(&mut self, dir: Ino, name: &Name) -> bool {
        let Some(slots) = self.dirs.get_mut(&dir) else { return false };
        let places = Self::places(dir, name);
        let takes = |place: Ino| slots.get_mut(&place).is_some_and(|noted| noted.kept.remove(name));
        let taken = places.map(takes).into_iter().filter(|taken| *taken).count();
        self.noted -= taken;
        taken > 0
    }

    /// All names that the kernel may hold of a slot, or of all slots of a directory; they are on their way out of it.
    pub(crate) fn take_of(&mut self, object: Ino) -> Vec<(Ino, Name)> {
        let dir = object.or_directory();
        let Some(slots) = self.dirs.get_mut(&dir) else { return Vec::new() };
        let taken: Vec<Slot> = match object == dir {
            true => std::mem::take(slots).into_values().collect(),
            false => slots.remove(&object).into_iter().collect(),
        };
        if slots.is_empty() {
            self.dirs.remove(&dir);
        }
        self.noted -= taken.iter().map(|noted| noted.seen.len() + noted.kept.len()).sum::<usize>();
        self.seen -= taken.iter().map(|noted| noted.seen.len()).sum::<usize>();
        taken.into_iter().flat_map(|noted| noted.kept).map(|name| (dir, name)).collect()
    }

    /// All names that the kernel may hold. They stay noted: who renames one of them just now has the lock that expiring it waits for,
    /// and the kernel takes along how long it keeps it.
    pub(crate) fn all(&self) -> Vec<(Ino, Name)> {
        let slots = self.dirs.iter().flat_map(|(dir, slots)| slots.values().map(|noted| (*dir, noted)));
        slots.flat_map(|(dir, noted)| noted.kept.iter().map(move |name| (dir, name.clone()))).collect()
    }

    /// The kernel has forgotten a directory.
    pub(crate) fn forget(&mut self, dir: Ino) {
        self.take_of(dir);
    }

    /// Forgets names that were looked up once.
    pub(crate) fn shrink(&mut self) {
        self.dirs.retain(|_, slots| {
            slots.retain(|_, noted| {
                self.noted -= noted.seen.len();
                self.seen -= noted.seen.len();
                noted.seen = HashSet::default();
                noted.kept.shrink_to_fit();
                !noted.kept.is_empty()
            });
            slots.shrink_to_fit();
            !slots.is_empty()
        });
        self.dirs.shrink_to_fit();
    }

    fn has_room(&mut self) -> bool {
        if self.noted >= NOTED_MAX && self.seen > 0 {
            self.shrink();
        }
        self.noted < NOTED_MAX
    }

    fn slot(&mut self, slot: Ino) -> Option<&mut Slot> {
        Some(self.dirs.entry(slot.of_slot()?).or_default().entry(slot).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = Ino(10);

    fn slot(name: &str) -> Ino {
        DIR.slot(name.as_bytes(), Width::Many)
    }

    fn sorted(mut names: Vec<(Ino, Name)>) -> Vec<(Ino, Name)> {
        names.sort_by(|one, other| one.1.as_bytes().cmp(other.1.as_bytes()));
        names
    }

    #[test]
    fn an_absent_name_is_kept_when_it_is_asked_for_again() {
        let mut names = SplitNames::default();
        let asked = ["a.h", "a.h", "a.h", "b.h"].map(|name| names.is_absent(slot(name), name.as_bytes()));
        assert_eq!(asked, [false, true, true, false]);
        assert!(!names.is_absent(DIR, b"c.h") && !names.keep(DIR, b"c.h"), "no slot");
        assert_eq!(names.take_of(slot("b.h")), []);
        assert_eq!(names.take_of(slot("a.h")), [(DIR, Name::new(b"a.h"))]);
        assert_eq!((names.noted, names.dirs.len()), (0, 0));
        assert!(!names.is_absent(slot("a.h"), b"a.h"), "it is as new");
    }

    #[test]
    fn all_that_is_kept_goes_with_its_slot_or_directory() {
        let mut names = SplitNames::default();
        for name in ["a.h", "a.o", "b.h"] {
            assert!(names.keep(slot(name), name.as_bytes()) && names.keeps(slot(name), name.as_bytes()));
        }
        assert!(names.take(DIR, &Name::new(b"a.o")) && !names.take(DIR, &Name::new(b"a.o")));
        assert_eq!(sorted(names.take_of(slot("a.h"))), [(DIR, Name::new(b"a.h"))]);
        assert!(names.keep(slot("c.h"), b"c.h"));
        let all = [(DIR, Name::new(b"b.h")), (DIR, Name::new(b"c.h"))];
        assert_eq!(sorted(names.take_of(DIR)), all);
        assert!(names.keep(slot("b.h"), b"b.h") && names.keep(slot("c.h"), b"c.h"));
        assert_eq!(sorted(names.all()), all);
        names.moves((slot("b.h"), b"b.h"), (slot("d.h"), b"d.h"));
        assert!(names.has(DIR, &Name::new(b"d.h")), "they stay noted");
        assert!(!names.is_absent(slot("e.h"), b"e.h"));
        names.forget(DIR);
        assert_eq!((names.noted, names.seen, names.dirs.len()), (0, 0, 0));
    }

    #[test]
    fn there_are_not_too_many() {
        let mut names = SplitNames::default();
        let name = |at: usize| format!("n{at}");
        assert!(names.keep(slot("kept"), b"kept"));
        for at in 0..2 * NOTED_MAX {
            names.is_absent(slot(&name(at)), name(at).as_bytes());
            assert!(names.noted <= NOTED_MAX);
        }
        assert!(names.keeps(slot("kept"), b"kept"), "only what was asked for once is forgotten");
        for at in 0..2 * NOTED_MAX {
            names.keep(slot(&name(at)), name(at).as_bytes());
        }
        assert_eq!(names.noted, NOTED_MAX);
        assert!(!names.is_absent(slot("more"), b"more") && !names.keep(slot("more"), b"more"));
        names.moves((slot("kept"), b"kept"), (slot("moved"), b"moved"));
        names.moves((slot("more"), b"more"), (slot("none"), b"none"));
        assert!(names.keeps(slot("moved"), b"moved") && !names.keeps(slot("none"), b"none"));
        assert!(names.keeps_any(DIR) && !names.keeps_any(Ino(11)));
        names.forget(DIR);
        assert_eq!((names.noted, names.seen), (0, 0));
    }
}
