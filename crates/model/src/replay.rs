//! What is answered before it is durable, and how it comes back when a server loses it: the rules of ADR 0017.
//!
//! Whatever a server writes has a number, its **mark**; what is durable is always a prefix of the marks. An **entry** is
//! all that one mark has written, so that it can be written once more without being executed again. The server holds the
//! entries that are not durable yet ([`Undurable`]) and gives each, with those that it builds on, to every client that
//! hears of it; clients keep them until they are durable ([`Kept`]), and bring them to a server that has opened the volume
//! anew, which writes each once ([`BroughtBack`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::{Ino, SessionId};

/// What has its place in the order, and is not durable yet. `E` is an entry, cheap to clone.
#[derive(Clone, Debug)]
pub struct Undurable<E> {
    marks: BTreeMap<u64, Pending<E>>,
    /// The last mark that is about an inode.
    last: HashMap<Ino, u64>,
}

#[derive(Clone, Debug)]
struct Pending<E> {
    subjects: Vec<Ino>,
    /// Marks before it that are about the same inodes.
    builds_on: Vec<u64>,
    /// `None`: it cannot come back.
    entry: Option<E>,
    /// Sessions that keep it, and all that it builds on.
    kept_by: HashSet<SessionId>,
}

impl<E> Default for Undurable<E> {
    fn default() -> Undurable<E> {
        Undurable { marks: BTreeMap::new(), last: HashMap::new() }
    }
}

impl<E: Clone> Undurable<E> {
    /// Something was written about these inodes: rows of them, or names in them. `entry`: what can bring it back, if
    /// anything can. Returns whether it can come back, which it cannot if it builds on something that cannot.
    pub fn add(&mut self, mark: u64, subjects: impl IntoIterator<Item = Ino>, entry: Option<E>) -> bool {
        let subjects: BTreeSet<Ino> = subjects.into_iter().collect();
        let builds_on: BTreeSet<u64> =
            subjects.iter().filter_map(|ino| self.last.get(ino)).copied().collect();
        let all_come_back = builds_on.iter().all(|before| self.comes_back(*before));
        let entry = entry.filter(|_| all_come_back);
        let comes_back = entry.is_some();
        self.last.extend(subjects.iter().map(|ino| (*ino, mark)));
        let (subjects, builds_on) = (subjects.into_iter().collect(), builds_on.into_iter().collect());
        self.marks.insert(mark, Pending { subjects, builds_on, entry, kept_by: HashSet::new() });
        comes_back
    }

    fn comes_back(&self, mark: u64) -> bool {
        self.marks.get(&mark).is_none_or(|pending| pending.entry.is_some())
    }

    /// Everything up to this mark is durable.
    pub fn durable(&mut self, mark: u64) {
        while let Some(first) = self.marks.first_entry()
            && *first.key() <= mark
        {
            let (mark, pending) = first.remove_entry();
            for ino in pending.subjects {
                if self.last.get(&ino) == Some(&mark) {
                    self.last.remove(&ino);
                }
            }
        }
    }

    /// What a session has to keep that is told of these inodes as they are now: entries in the order of their marks,
    /// without those that it keeps already.
    pub fn tell(&mut self, to: SessionId, inos: impl IntoIterator<Item = Ino>) -> Vec<E> {
        if self.marks.is_empty() {
            return Vec::new();
        }
        let mut unseen: Vec<u64> = inos.into_iter().filter_map(|ino| self.last.get(&ino)).copied().collect();
        let mut told = BTreeMap::new();
        while let Some(mark) = unseen.pop() {
            // What is durable is not here any more; who keeps a mark keeps all that it builds on.
            let Some(pending) = self.marks.get_mut(&mark) else { continue };
            if pending.kept_by.insert(to) {
                unseen.extend(&pending.builds_on);
                told.extend(pending.entry.clone().map(|entry| (mark, entry)));
            }
        }
        told.into_values().collect()
    }

    /// The last mark that is about one of these and cannot come back: who hears of them waits until it is durable.
    pub fn stuck(&self, inos: impl IntoIterator<Item = Ino>) -> Option<u64> {
        let marks = inos.into_iter().filter_map(|ino| self.last.get(&ino)).copied();
        marks.filter(|mark| !self.comes_back(*mark)).max()
    }

    /// The session has a new connection, or none: what it was told last may not have arrived.
    pub fn disconnected(&mut self, session: SessionId) {
        for pending in self.marks.values_mut() {
            pending.kept_by.remove(&session);
        }
    }

    /// Nothing waits to become durable.
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }

    /// The first mark that is not durable.
    pub fn first(&self) -> Option<u64> {
        self.marks.keys().next().copied()
    }

    /// All entries, in order; nothing is left. To bring them back here, or because others will.
    pub fn take(&mut self) -> Vec<E> {
        self.last.clear();
        std::mem::take(&mut self.marks).into_values().filter_map(|pending| pending.entry).collect()
    }
}

/// What a client keeps: entries of what it has done, or heard of, that are not known to be durable.
#[derive(Clone, Debug)]
pub struct Kept<E> {
    entries: BTreeMap<(u64, u64), E>,
}

impl<E> Default for Kept<E> {
    fn default() -> Kept<E> {
        Kept { entries: BTreeMap::new() }
    }
}

impl<E: Clone> Kept<E> {
    /// The server has sent an entry, of an opening of the volume, with its mark.
    pub fn keep(&mut self, opening: u64, mark: u64, entry: E) {
        self.entries.insert((opening, mark), entry);
    }

    /// Everything up to a mark of the opening is durable.
    pub fn durable(&mut self, opening: u64, mark: u64) {
        if self.entries.range((opening, 0)..=(opening, mark)).next().is_some() {
            self.entries.retain(|(of, number), _| *of != opening || *number > mark);
        }
    }

    /// What is to be brought to a server that has this opening: all that is of others.
    pub fn to_bring(&self, opening: u64) -> Vec<E> {
        self.entries.iter().filter(|((of, _), _)| *of != opening).map(|(_, entry)| entry.clone()).collect()
    }

    /// A server with this opening has made durable all that was brought, or refused it for good.
    pub fn brought(&mut self, opening: u64) {
        self.entries.retain(|(of, _), _| *of == opening);
    }

    /// The last mark of an opening that is kept; `None`: everything that was heard of is durable.
    pub fn last(&self, opening: u64) -> Option<u64> {
        self.entries.range((opening, 0)..=(opening, u64::MAX)).next_back().map(|((_, mark), _)| *mark)
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Which entries of earlier openings were written once more. Several clients bring the same one, at any time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BroughtBack {
    openings: Vec<(u64, BTreeSet<u64>)>,
}

impl BroughtBack {
    /// As [`BroughtBack::openings`] gave it.
    pub fn from_openings(openings: impl IntoIterator<Item = (u64, Vec<u64>)>) -> BroughtBack {
        let openings = openings.into_iter().map(|(opening, marks)| (opening, marks.into_iter().collect()));
        BroughtBack { openings: openings.collect() }
    }

    /// Openings and the marks of each that were brought back.
    pub fn openings(&self) -> impl Iterator<Item = (u64, Vec<u64>)> + '_ {
        self.openings.iter().map(|(opening, marks)| (*opening, marks.iter().copied().collect()))
    }

    /// Notes that an entry comes. `false`: it has come before.
    pub fn note(&mut self, opening: u64, mark: u64) -> bool {
        if let Some((_, marks)) = self.openings.iter_mut().find(|(of, _)| *of == opening) {
            return marks.insert(mark);
        }
        self.openings.push((opening, BTreeSet::from([mark])));
        true
    }

    /// Forgets openings of which nothing is taken any more.
    pub fn retain(&mut self, is_taken: impl Fn(u64) -> bool) {
        self.openings.retain(|(opening, _)| is_taken(*opening));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = Ino(2);
    const FILE: Ino = Ino(3);
    const OTHER: Ino = Ino(4);
    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);

    #[test]
    fn who_hears_of_a_change_keeps_all_that_it_builds_on_and_each_once() {
        let mut undurable = Undurable::default();
        assert!(undurable.add(1, [DIR, FILE], Some("create")));
        assert!(undurable.add(2, [OTHER], Some("elsewhere")));
        assert!(undurable.add(3, [FILE], Some("write")));
        assert_eq!(undurable.tell(A, [FILE]), ["create", "write"]);
        assert!(undurable.add(4, [DIR, FILE], Some("rename")));
        assert_eq!(undurable.tell(A, [DIR]), ["rename"]);
        assert_eq!(undurable.tell(B, [DIR]), ["create", "write", "rename"]);
        assert!(undurable.tell(B, [DIR, FILE]).is_empty());
        undurable.disconnected(B);
        undurable.durable(3);
        assert_eq!(undurable.tell(B, [DIR, OTHER]), ["rename"]);
        undurable.durable(4);
        assert!(undurable.is_empty() && undurable.tell(B, [DIR]).is_empty());
    }

    #[test]
    fn what_builds_on_something_that_cannot_come_back_cannot_either() {
        let mut undurable = Undurable::default();
        assert!(!undurable.add(1, [DIR], None));
        assert!(!undurable.add(2, [DIR, FILE], Some("in it")));
        assert!(undurable.add(3, [OTHER], Some("elsewhere")));
        assert_eq!((undurable.stuck([FILE, OTHER]), undurable.stuck([OTHER])), (Some(2), None));
        undurable.durable(2);
        assert!(undurable.add(4, [FILE], Some("after it")));
        assert_eq!(undurable.take(), ["elsewhere", "after it"]);
    }

    #[test]
    fn entries_are_kept_until_they_are_durable_or_brought() {
        let mut kept = Kept::default();
        kept.keep(7, 10, 'a');
        kept.keep(7, 12, 'b');
        kept.durable(8, 100);
        kept.durable(7, 10);
        assert_eq!((kept.last(7), kept.to_bring(7), kept.to_bring(8)), (Some(12), vec![], vec!['b']));
        kept.keep(8, 3, 'c');
        kept.brought(8);
        assert_eq!((kept.to_bring(9), kept.last(7)), (vec!['c'], None));
    }

    #[test]
    fn an_entry_is_brought_back_once() {
        let mut brought = BroughtBack::default();
        assert!(brought.note(7, 3) && brought.note(7, 2) && !brought.note(7, 3) && brought.note(8, 3));
        assert_eq!(BroughtBack::from_openings(brought.openings()), brought);
        brought.retain(|opening| opening == 8);
        assert_eq!(brought.openings().collect::<Vec<_>>(), [(8, vec![3])]);
    }
}
