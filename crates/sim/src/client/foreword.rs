//! What the kernel lets go of before the tree shows what another host has changed. Until then the stream waits, but not
//! for long: who has the lock of a directory may wait for what comes next in it.

use hayloft_model::tree::RenameFlags;

use super::*;

/// How long the stream waits for the kernel: longer than an answer takes that is on its way.
const PATIENCE: u64 = 4;
/// And where this host changes the directory by request.
const BUSY_PATIENCE: u64 = 1;

/// How long names of a directory that others change are handed out for one use.
const COOLING: u64 = 400;

/// A change that is about to be applied.
#[derive(Debug)]
pub(super) struct Foreword {
    event: u64,
    records: Vec<Record>,
    own: Vec<Object>,
    forget: Vec<Ino>,
    change: u64,
    dirs: BTreeSet<Ino>,
    /// Names that the kernel has not let go of yet.
    names: Vec<(Ino, u8)>,
    until: u64,
}

impl Client {
    /// Whether others are just changing a directory: its names are for one use.
    pub(crate) fn is_changing(&self, dir: Ino) -> bool {
        self.foreword.as_ref().is_some_and(|foreword| foreword.dirs.contains(&dir))
    }

    /// Whether names of a directory are for one use since it changes.
    pub(crate) fn is_hot(&self, dir: Ino, now: u64) -> bool {
        self.hot.contains(&dir) || self.warm.get(&dir).is_some_and(|until| now < *until)
    }

    /// Whether the kernel may keep a name. Broken: those of directories that are changed by request are not thought of.
    pub(super) fn keeps(&self, place: (Ino, u8), broken: bool) -> bool {
        self.unlimited.contains(&place) && !(broken && self.hot.contains(&place.0))
    }

    /// A name is renamed here: the kernel takes along how long it may keep it.
    pub(crate) fn renames(&mut self, change: &Change) {
        let Change::Rename((from_dir, from), (to_dir, to), RenameFlags { exchange, .. }) = change else {
            return;
        };
        if !self.kernel.follows() {
            return;
        }
        let (from, to, exchange) = ((*from_dir, from.as_bytes()[0]), (*to_dir, to.as_bytes()[0]), *exchange);
        let (moves, comes_back) = (self.unlimited.contains(&from), self.unlimited.contains(&to));
        self.unlimited.extend(moves.then_some(to));
        self.unlimited.extend((exchange && comes_back).then_some(from));
        let ops = self.processes.iter_mut().filter_map(|process| process.op.as_mut());
        ops.for_each(|op| op.moves(from, to, exchange));
    }

    /// Who waits to expire names gets the lock first.
    pub(crate) fn unlock(&mut self, dir: Ino) {
        self.kernel.unlock(dir);
        self.expire_left(dir);
    }

    /// The kernel lets go of what it has not let go of yet of a directory.
    pub(crate) fn expire_left(&mut self, dir: Ino) {
        let names = self.left.iter().filter(|(of, _)| *of == dir).copied().collect();
        self.expire(names);
    }

    /// The kernel lets go of names, but not of those in locked directories, nor of those that somebody is on the way to make last.
    /// Returns the latter.
    pub(super) fn expire(&mut self, mut names: Vec<(Ino, u8)>) -> Vec<(Ino, u8)> {
        names.retain(|(dir, name)| {
            let blocked = self.kernel.waits_for_lock(*dir, *name) || self.is_late((*dir, *name));
            if !blocked {
                self.kernel.expire_name(*dir, *name);
                self.unlimited.remove(&(*dir, *name));
                self.left.remove(&(*dir, *name));
            }
            blocked
        });
        names
    }

    /// Whether a caller may not have come to an answer by which the kernel keeps a name.
    fn is_late(&self, place: (Ino, u8)) -> bool {
        let mut ops = self.processes.iter().filter_map(|process| process.op.as_ref());
        self.awaits_callers && ops.any(|op| op.late().contains(&place))
    }
}

impl World {
    /// Has the kernel let go of what these records change, before they are applied.
    pub(super) fn announce(
        &mut self,
        at: usize,
        event: u64,
        (records, own, forget): (Vec<Record>, Vec<Object>, Vec<Ino>),
        change: u64,
    ) {
        let unlimited = self.is_broken(Rule::UnlimitedWhileChanging);
        let at_once = self.is_broken(Rule::ApplyBeforeForeword);
        let client = &mut self.clients[at];
        let names: Vec<(Ino, u8)> = records
            .iter()
            .filter_map(|record| match record {
                Record::PutDentry(dir, name, _) | Record::DeleteDentry(dir, name) => {
                    Some((*dir, name.as_bytes()[0]))
                }
                _ => None,
            })
            .filter(|_| !at_once)
            .collect();
        let dirs: BTreeSet<Ino> = names.iter().map(|(dir, _)| *dir).collect();
        let is_busy = dirs.iter().any(|dir| client.hot.contains(dir));
        let until = self.now + if is_busy { BUSY_PATIENCE } else { PATIENCE };
        if client.kernel.follows() {
            client.warm.extend(dirs.iter().map(|dir| (*dir, self.now + COOLING)));
        }
        let names = names.into_iter().filter(|place| client.keeps(*place, unlimited)).collect();
        client.foreword = Some(Foreword { event, records, own, forget, change, dirs, names, until });
        self.go_on(at);
    }

    /// Applies what was announced, if the kernel has let go of it, or takes too long.
    pub(crate) fn go_on(&mut self, at: usize) {
        let now = self.now;
        let client = &mut self.clients[at];
        let Some(mut foreword) = client.foreword.take() else { return };
        foreword.names = client.expire(foreword.names);
        if !foreword.names.is_empty() && now < foreword.until {
            client.foreword = Some(foreword);
            let life = client.life;
            return self.after(1, What::Foreword(at, life));
        }
        let Foreword { event, records, own, forget, change, names, .. } = foreword;
        if change != 0 && !self.is_broken(Rule::ShowUnheard) {
            self.clients[at].tree.unheard(change, &records);
        }
        // Attributes and listings go in the same moment.
        let mut stale = self.apply(at, &records, &own, &forget);
        self.clients[at].seen = event;
        stale.names.extend(names.iter().map(|(dir, name)| (*dir, Name::new(&[*name]))));
        self.clients[at].left.extend(names);
        self.acknowledge(at, event, stale);
        while self.clients[at].foreword.is_none()
            && let Some(message) = self.clients[at].behind.pop_front()
        {
            self.client_receives(at, message);
        }
    }
}
