//! What programs do, at random.

use super::*;

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
            Kind::Make(place, _) | Kind::Remove(place, _) => vec![place.dir.clone()],
            Kind::Link(from, to) => vec![from.path(), to.dir.clone()],
            Kind::Rename(from, to, _) => vec![from.dir.clone(), to.dir.clone()],
            Kind::Write(place, _)
            | Kind::Chmod(place, _)
            | Kind::Stat(place)
            | Kind::Read(place)
            | Kind::Open(place) => {
                vec![place.path()]
            }
            Kind::List(dir) => vec![dir.clone()],
            _ => Vec::new(),
        };
        trace!(self, "c{at}.{process} op {id} begins: {kind:?}");
        Some(Op {
            id,
            call: self.now,
            kind,
            walks: walks.into_iter().map(|path| (path, 0, Ino::ROOT, FileKind::Directory)).collect(),
            pins: BTreeSet::new(),
            locked: BTreeSet::new(),
            locking: false,
            looked_up: Vec::new(),
            fuse: None,
            waits: None,
            acquired: BTreeSet::new(),
            ship: None,
            requested: None,
            was_yours: false,
            executed: None,
            synced: None,
        })
    }

    pub(super) fn random_place(&mut self) -> Place {
        let names = [b'a', b'b', b'c', b'd'];
        let depth = *self.rng.pick(&[0, 0, 1, 1, 1, 2]);
        // Directories are mostly those at the beginning, so that hosts meet.
        let dir = (0..depth).map(|_| *self.rng.pick(b"aab")).collect();
        Place { dir, name: *self.rng.pick(&names) }
    }

    pub(super) fn random_kind(&mut self, at: usize, process: usize) -> Kind {
        let open = self.clients[at].processes[process].open.clone();
        let place = self.random_place();
        match self.rng.below(100) {
            0..=13 => Kind::Make(place, FileKind::Regular),
            14..=23 => Kind::Make(place, FileKind::Directory),
            24..=25 => Kind::Make(place, FileKind::Symlink),
            26..=29 => Kind::Link(place, self.random_place()),
            30..=36 => Kind::Remove(place, false),
            37..=40 => Kind::Remove(place, true),
            41..=49 => {
                let flags = RenameFlags {
                    no_replace: self.rng.permille(200),
                    exchange: self.rng.permille(200),
                    whiteout: false,
                };
                let flags = RenameFlags { exchange: flags.exchange && !flags.no_replace, ..flags };
                Kind::Rename(place, self.random_place(), flags)
            }
            50..=58 => {
                let how = *self.rng.pick(&[How::Append, How::Append, How::Begin, How::Truncate]);
                Kind::Write(place, how)
            }
            59..=62 => Kind::Chmod(place, 0o700 | self.rng.below(64) as u32),
            63..=72 => Kind::Stat(place),
            73..=78 => Kind::Read(place),
            79..=83 => Kind::List(place.dir),
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
