//! What programs do, at random.

use super::*;
use crate::kernel::FOLLOWS_FROM;
use crate::reference::ROOT;
use crate::world::CLEARS_FROM;

/// Whether a world is one of those in which directories are mostly renamed where they are.
fn shuffles(seed: u64) -> bool {
    seed >= FOLLOWS_FROM && seed % 4 >= 2
}

impl World {
    pub(super) fn new_operation(&mut self, at: usize, process: usize) -> Option<Op> {
        if self.ops_left == 0 || self.draining || self.clients[at].leaving {
            return None;
        }
        self.ops_left -= 1;
        let kind = self.random_kind(at, process);
        let id = self.new_op();
        let session = self.clients[at].session;
        let now = self.now;
        self.reference.begin(id, session, now);
        let walks = match &kind {
            Kind::Make(place, _) | Kind::Remove(place, _) | Kind::List(place) => vec![place.dir()],
            Kind::Link(from, to) => vec![from.path(), to.dir()],
            Kind::Rename(from, to, _) => vec![from.dir(), to.dir()],
            Kind::Write(place, _)
            | Kind::Chmod(place, _)
            | Kind::Stat(place)
            | Kind::Read(place)
            | Kind::Open(place) => {
                vec![place.path()]
            }
            _ => Vec::new(),
        };
        trace!(self, "c{at}.{process} op {id} begins: {kind:?}");
        Some(Op {
            id,
            call: self.now,
            kind,
            walks: walks.into_iter().map(|(start, path)| (path, 0, start, FileKind::Directory)).collect(),
            pins: BTreeSet::new(),
            locked: BTreeSet::new(),
            locking: false,
            looked_up: Vec::new(),
            fuse: None,
            waits: None,
            acquired: BTreeSet::new(),
            slots: 0,
            ship: None,
            requested: None,
            was_yours: false,
            executed: None,
            end: None,
            listed: None,
            made: None,
            synced: None,
            waits_for_store: false,
        })
    }

    fn random_place(&mut self, at: usize, process: usize) -> Place {
        let dirs = self.clients[at].processes[process].dirs.clone();
        if !dirs.is_empty() && self.rng.permille(700) {
            let dir = if self.rng.permille(200) { vec![*self.rng.pick(b"aab")] } else { Vec::new() };
            return Place { start: *self.rng.pick(&dirs), dir, name: *self.rng.pick(b"abcd") };
        }
        let names = [b'a', b'b', b'c', b'd'];
        let depth = *self.rng.pick(if self.deep { &[0, 1, 1, 2, 2, 3] } else { &[0, 0, 1, 1, 1, 2] });
        // Directories are mostly those at the beginning, so that hosts meet.
        let dir = (0..depth).map(|_| *self.rng.pick(b"aab")).collect();
        Place { start: Ino::ROOT, dir, name: *self.rng.pick(&names) }
    }

    fn random_flags(&mut self) -> RenameFlags {
        let (no_replace, exchange) = (self.rng.permille(200), self.rng.permille(200));
        RenameFlags { no_replace, exchange: exchange && !no_replace, whiteout: false }
    }

    /// Something with directories, which are made and moved into each other.
    fn random_directory_kind(&mut self, at: usize, process: usize) -> Kind {
        let place = self.random_place(at, process);
        match self.rng.below(10) {
            0..=3 => Kind::Make(place, FileKind::Directory),
            4 => Kind::Open(place),
            _ => {
                let to = self.random_place(at, process);
                let there = self.reference.directories_in(place.start.0);
                let name = if there.is_empty() { place.name } else { *self.rng.pick(&there) };
                Kind::Rename(Place { name, ..place }, to, self.random_flags())
            }
        }
    }

    /// Directories get other names in one directory, which others look at and list.
    fn shuffling_kind(&mut self) -> Kind {
        let mut place = || Place { start: Ino::ROOT, dir: Vec::new(), name: *self.rng.pick(b"abcd") };
        let (place, to) = (place(), place());
        match self.rng.below(20) {
            0..=2 => Kind::Make(place, FileKind::Directory),
            3..=8 => Kind::Rename(place, to, self.random_flags()),
            9..=15 => Kind::Stat(place),
            _ => Kind::List(place),
        }
    }

    /// All make files in `/a` for a while. Then they remove what is there, and when nothing is, the directory.
    fn clearing_kind(&mut self) -> Kind {
        let root = |name| Place { start: Ino::ROOT, dir: Vec::new(), name };
        let mut file = root(*self.rng.pick(b"abcd"));
        file.dir = b"a".to_vec();
        let names = self.reference.names();
        let dir = names.get(&(ROOT, b'a')).copied();
        if dir.is_none() {
            return Kind::Make(root(b'a'), FileKind::Directory);
        }
        if self.ops_left % 40 >= 16 {
            return Kind::Make(file, FileKind::Regular);
        }
        let there: Vec<u8> = names.keys().filter(|(of, _)| Some(*of) == dir).map(|(_, name)| *name).collect();
        match there.is_empty() {
            true => Kind::Remove(root(b'a'), true),
            false => Kind::Remove(Place { name: *self.rng.pick(&there), ..file }, false),
        }
    }

    /// Two programs build `/c/b/a` and `/b/b/d`. Then one moves `/c/b` below that `d`, the other `/b/b` below that `a`.
    fn crossing_kind(&mut self, at: usize, process: usize) -> Option<Kind> {
        if !self.deep || at > 1 || process > 0 {
            return None;
        }
        let this = &self.clients[at].processes[process];
        let make = |place| Kind::Make(place, FileKind::Directory);
        let rename = |from, to| Kind::Rename(from, to, RenameFlags::default());
        let root = |name| Place { start: Ino::ROOT, dir: Vec::new(), name };
        let made = |nth: usize, name| this.dirs.get(nth).map(|dir| Place { start: *dir, ..root(name) });
        let there = |dir, name| self.reference.names().get(&(dir, name)).copied();
        let has_other = there(ROOT, b'b').and_then(|dir| there(dir, b'b')).is_some();
        let (ready, kind) = match (at, this.crossing) {
            (0, 0) => (true, make(root(b'c'))),
            (0, 1) => (true, make(made(0, b'b')?)),
            (0, 2) => (has_other, make(Place { dir: b"bb".to_vec(), ..root(b'd') })),
            (0, 3) => (true, rename(root(b'a'), made(1, b'a')?)),
            (0, 4) => (true, rename(made(0, b'b')?, made(2, b'b')?)),
            (1, 0) => (true, make(root(b'a'))),
            (1, 1) => (true, make(root(b'b'))),
            (1, 2) => (true, make(made(1, b'b')?)),
            (1, 3) => (there(ROOT, b'a').is_none(), rename(made(1, b'b')?, made(0, b'b')?)),
            _ => return None,
        };
        self.clients[at].processes[process].crossing += u8::from(ready);
        // Until the other has come that far it only looks.
        Some(if ready { kind } else { Kind::Stat(root(b'd')) })
    }

    pub(super) fn random_kind(&mut self, at: usize, process: usize) -> Kind {
        if let Some(kind) = self.crossing_kind(at, process) {
            return kind;
        }
        let clears = self.config.seed >= CLEARS_FROM && self.splits.is_some();
        if clears && self.rng.permille(850) {
            return self.clearing_kind();
        }
        if shuffles(self.config.seed) && self.rng.permille(700) {
            return self.shuffling_kind();
        }
        if self.deep && self.rng.permille(400) {
            return self.random_directory_kind(at, process);
        }
        let open = self.clients[at].processes[process].open.clone();
        let place = self.random_place(at, process);
        match self.rng.below(100) {
            0..=13 => Kind::Make(place, FileKind::Regular),
            14..=23 => Kind::Make(place, FileKind::Directory),
            24..=25 => Kind::Make(place, FileKind::Symlink),
            26..=29 => Kind::Link(place, self.random_place(at, process)),
            30..=36 => Kind::Remove(place, false),
            37..=40 => Kind::Remove(place, true),
            41..=49 => Kind::Rename(place, self.random_place(at, process), self.random_flags()),
            50..=58 => {
                let how = *self.rng.pick(&[How::Append, How::Append, How::Begin, How::Truncate]);
                Kind::Write(place, how)
            }
            59..=62 => Kind::Chmod(place, 0o700 | self.rng.below(64) as u32),
            63..=72 => Kind::Stat(place),
            73..=78 => Kind::Read(place),
            79..=83 => Kind::List(place),
            84..=87 => Kind::Open(place),
            88..=96 => match open.first().copied() {
                Some(ino) => match self.rng.below(10) {
                    0..=2 => Kind::ReadOpen(ino),
                    3..=4 => Kind::WriteOpen(ino),
                    5..=6 => Kind::StatOpen(ino),
                    _ => Kind::Close(ino),
                },
                None => Kind::Open(place),
            },
            _ => Kind::Sync,
        }
    }
}
