//! Split directories ([`crate::slot`]): who holds which slot of their names, and when a directory is split, or whole again.
//!
//! A directory is split when sessions take turns in making files in it and nobody lists it. Who comes to look for a name of it does
//! not matter: on a farm each host comes once, for the source that it compiles. From then on to read it is to
//! know its row, and the rows of files at home in it, but none of its names; these are held by slots. Whoever wants its
//! listing, or changes it in another way than by making, renaming and removing files, has all slots given back first. So has the
//! server when nothing is done there for a while.

use std::collections::{BTreeSet, HashMap};

use crate::grants::{Grants, Object, Outcome, Output, Request, Ticket};
use crate::slot::Width;
use crate::{Ino, SessionId};

/// How often sessions have to take turns in making files in a directory before it is split, unless said otherwise.
const TURNS_MIN: u32 = 16;
/// Where it was whole again soon, that doubles, up to here.
const TURNS_MAX: u32 = 4096;
/// A split directory was worth it if so many slots were given for each turn that was waited for.
const WORTH: u32 = 4;
/// Directories of which turns are counted.
const COUNTED_MAX: usize = 4096;

#[derive(Clone, Debug)]
pub(super) struct Splits {
    /// How often sessions have to take turns.
    turns_min: u32,
    slots_stay: bool,
    dirs: HashMap<Ino, Split>,
    /// Who has made a file in a directory last, and how often somebody else had before.
    turns: HashMap<Ino, (SessionId, u32)>,
    /// How many turns are waited for, where it is not `turns_min`.
    patience: HashMap<Ino, u32>,
}

#[derive(Clone, Debug, Default)]
struct Split {
    width: Width,
    /// Slots that somebody may hold.
    slots: BTreeSet<Ino>,
    /// How many were given.
    given: u32,
    /// Something was done by slots since [`Grants::rest`].
    works: bool,
    /// It was at rest, and is to be whole.
    rests: bool,
}

impl Default for Splits {
    fn default() -> Splits {
        let (dirs, turns, patience) = Default::default();
        Splits { turns_min: TURNS_MIN, slots_stay: false, dirs, turns, patience }
    }
}

impl Splits {
    /// A session makes a file in a directory by request.
    pub(super) fn count(&mut self, dir: Ino, session: SessionId) {
        if self.turns.len() >= COUNTED_MAX {
            self.turns.clear();
        }
        let (last, turns) = self.turns.entry(dir).or_insert((session, 0));
        *turns = turns.saturating_add(u32::from(*last != session));
        *last = session;
    }

    /// Somebody wants all names of a directory, as of one that is split.
    pub(super) fn is_listed(&mut self, dir: Ino) {
        self.turns.remove(&dir);
    }

    fn patience(&self, dir: Ino) -> u32 {
        self.patience.get(&dir).copied().unwrap_or(self.turns_min)
    }

    pub(super) fn holds(&mut self, slot: Ino) {
        if let Some(split) = slot.of_slot().and_then(|dir| self.dirs.get_mut(&dir)) {
            split.slots.insert(slot);
            split.given = split.given.saturating_add(1);
            split.works = true;
        }
    }

    /// A slot that a session says to hold: its directory was split.
    pub(super) fn restore(&mut self, slot: Ino) {
        if let Some(dir) = slot.of_slot() {
            self.dirs.entry(dir).or_insert_with(|| Split { width: slot.width(), ..Split::default() });
            self.holds(slot);
        }
    }

    pub(super) fn dirs(&self) -> Vec<Ino> {
        self.dirs.keys().copied().collect()
    }
}

impl Grants {
    /// From now on directories are whole although slots are held: only for the simulator, which shows that it notices.
    pub fn let_slots_be(&mut self) {
        self.splits.slots_stay = true;
    }

    /// From now on directories are split when sessions have taken so many turns in making files: only for the simulator, whose
    /// worlds are small.
    pub fn split_after(&mut self, turns: u32) {
        self.splits.turns_min = turns;
    }

    /// Whether a directory is split.
    pub fn is_split(&self, dir: Ino) -> bool {
        self.splits.dirs.contains_key(&dir)
    }

    /// A session knows of directories with many slots. Before, a directory that is split in many is made whole for it.
    pub fn knows_many_slots(&mut self, session: SessionId, knows: bool) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.knows_many = knows;
        }
    }

    /// Whether it does.
    pub fn knows_many(&self, session: SessionId) -> bool {
        self.peers.get(&session).is_some_and(|peer| peer.knows_many)
    }

    /// In how many slots a directory is split, if it is.
    pub fn width(&self, dir: Ino) -> Option<Width> {
        self.splits.dirs.get(&dir).map(|split| split.width)
    }

    /// Whether a session cannot be told of this directory as it is: split in more slots than it knows of.
    pub(super) fn is_beyond(&self, session: SessionId, dir: Ino) -> bool {
        self.peers.get(&session).is_some_and(|peer| !peer.knows_many) && self.width(dir) == Some(Width::Many)
    }

    /// Something is done by slots in a split directory.
    pub fn works_by_slots(&mut self, dir: Ino) {
        if let Some(split) = self.splits.dirs.get_mut(&dir) {
            split.works = true;
        }
    }

    /// Makes those split directories whole in which nothing was done since this was called last: so their times stand still.
    pub fn rest(&mut self) {
        let mut resting = Vec::new();
        for (dir, split) in &mut self.splits.dirs {
            let works = std::mem::take(&mut split.works);
            split.rests = !works;
            let held = split.slots.iter().chain([dir]).filter_map(|ino| self.objects.get(ino));
            let holder = held.flat_map(|holding| holding.owner.iter().chain(&holding.readers)).next();
            resting.extend(holder.filter(|_| !works).map(|holder| (*dir, *holder)));
        }
        resting.sort_unstable();
        for (dir, holder) in resting {
            let request = Request::Rest(Object::Directory(dir));
            if !self.requests.values().any(|waiting| waiting.request == request) {
                self.request(holder, request);
            }
        }
    }

    /// Whether a directory should be split: sessions take turns in making files in it, and nobody owns it.
    pub(super) fn should_split(&self, dir: Ino) -> bool {
        let turns = self.splits.turns.get(&dir).map_or(0, |(_, turns)| *turns);
        turns >= self.splits.patience(dir) && !self.is_split(dir) && self.owner(dir).is_none()
    }

    /// Splits a directory as soon as nobody reads it as a whole.
    pub(super) fn split(&mut self, ticket: Ticket, dir: Ino) {
        if !self.recall(ticket, self.readers_of(dir)) {
            let width =
                if self.peers.values().all(|peer| peer.knows_many) { Width::Many } else { Width::Few };
            self.splits.dirs.insert(dir, Split { width, ..Split::default() });
            self.splits.turns.remove(&dir);
            self.ready(ticket, Outcome::Split);
        }
    }

    fn readers_of(&self, dir: Ino) -> Vec<(SessionId, Object, bool)> {
        let readers = self.objects.get(&dir).into_iter().flat_map(|holding| &holding.readers);
        readers.map(|reader| (*reader, Object::Directory(dir), false)).collect()
    }

    /// Makes the split ones among these directories whole. Returns whether that has to be waited for: who is told to let go of a
    /// split directory lets go of its slots as well, all at once.
    pub(super) fn make_whole(&mut self, ticket: Ticket, objects: &[Object]) -> bool {
        let mut waits = false;
        for object in objects {
            let Some(split) = self.splits.dirs.get(&object.ino()) else { continue };
            let all = split.slots.iter().copied().chain([object.ino()]);
            let held = all.filter_map(|ino| self.objects.get(&ino));
            let holders: BTreeSet<SessionId> =
                held.flat_map(|holding| holding.owner.iter().chain(&holding.readers).copied()).collect();
            let holders: BTreeSet<SessionId> =
                holders.into_iter().filter(|_| !self.splits.slots_stay).collect();
            match self.recall(ticket, holders.into_iter().map(|holder| (holder, *object, false)).collect()) {
                true => waits = true,
                false => self.whole(object.ino()),
            }
        }
        waits
    }

    /// A session has let go of a split directory.
    pub(super) fn let_go_of_slots(&mut self, session: SessionId, dir: Ino) {
        let Some(split) = self.splits.dirs.get(&dir) else { return };
        for slot in &split.slots {
            let Some(holding) = self.objects.get_mut(slot) else { continue };
            holding.readers.remove(&session);
            holding.owner = holding.owner.filter(|owner| *owner != session);
            if holding.is_idle() {
                self.objects.remove(slot);
            }
        }
    }

    fn whole(&mut self, dir: Ino) {
        let Some(split) = self.splits.dirs.remove(&dir) else { return };
        let patience = self.splits.patience(dir);
        if split.given >= patience.saturating_mul(WORTH) {
            self.splits.patience.remove(&dir);
        } else if !split.rests {
            if self.splits.patience.len() >= COUNTED_MAX {
                self.splits.patience.clear();
            }
            self.splits.patience.insert(dir, patience.saturating_mul(2).min(TURNS_MAX.max(patience)));
        }
        self.outputs.push(Output::Whole(dir));
    }

    /// A directory of which nobody holds anything any more is whole.
    pub(super) fn leave_split(&mut self, dir: Ino) {
        let is_held = |split: &Split| split.slots.iter().any(|slot| self.objects.contains_key(slot));
        let is_left = self.splits.dirs.get(&dir).is_some_and(|split| !is_held(split));
        if is_left && !self.objects.contains_key(&dir) {
            self.whole(dir);
        }
    }

    /// The turn of who wants the names of a slot: it owns it if nobody else holds it.
    pub(super) fn try_names(&mut self, ticket: Ticket, session: SessionId, object: Object) {
        let slot = object.ino();
        let reads = |dir| self.objects.get(&dir).is_some_and(|holding| holding.readers.contains(&session));
        if !slot.of_slot().is_some_and(|dir| self.width(dir) == Some(slot.width()) && reads(dir)) {
            return self.ready(ticket, Outcome::Shared);
        }
        if self.recall(ticket, self.owners_of(session, &[object])) {
            return;
        }
        let may_change = self.peers.get(&session).is_some_and(|peer| !peer.read_only);
        if may_change && self.holders_of(session, slot).is_empty() {
            self.give(session, object);
        } else {
            self.objects.entry(slot).or_default().readers.insert(session);
            self.splits.holds(slot);
        }
        self.ready(ticket, Outcome::Granted);
    }

    /// The turn of who wants to change the names of a slot: others who hold it let go.
    pub(super) fn try_slot(&mut self, ticket: Ticket, session: SessionId, object: Object) {
        let slot = object.ino();
        if !slot.of_slot().is_some_and(|dir| self.width(dir) == Some(slot.width())) {
            self.ready(ticket, Outcome::Shared);
        } else if !self.recall(ticket, self.holders_of(session, slot)) {
            self.give(session, object);
            self.ready(ticket, Outcome::Granted);
        }
    }
}
