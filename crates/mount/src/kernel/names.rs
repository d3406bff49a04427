//! Which names the kernel may keep without a time limit, and which it does.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use hayloft_fuse::Validity;
use hayloft_model::tree::Tree;
use hayloft_model::{Dentry, FileKind, Ino, Name, Timestamp};
use rustc_hash::FxBuildHasher;

use crate::core::Core;
use crate::kernel::foreword::Changing;
use crate::kernel::late::{Caller, Late};
use crate::kernel::nodes::NodeId;
use crate::kernel::split_names::SplitNames;

/// How long after the last change by request the names of a directory may be kept again.
const COOLING: Duration = Duration::from_secs(1);
/// How long names of a directory are for one use after the epoch had to be raised for some of them.
const TROUBLED: Duration = Duration::from_secs(30);
/// Directories of which that is noted.
const TROUBLED_MAX: usize = 1024;
/// So many names of a directory are expired together at most; in larger ones each goes by itself.
const WARM_MAX: usize = 4096;
/// Most absent names of one directory that the kernel is told without a time limit.
const ABSENT_MAX: usize = 1 << 16;

/// Names that the kernel holds without a time limit, as far as the tree does not say it.
#[derive(Debug, Default)]
pub(crate) struct KernelNames {
    /// Names that do not exist, by directory.
    absent: HashMap<Ino, HashSet<Name, FxBuildHasher>, FxBuildHasher>,
    /// Names of split directories.
    pub(crate) split: SplitNames,
    /// Answers that the kernel may come to late.
    pub(crate) late: Late,
    /// The kernel takes a directory's lock to expire a name also if it does not have that (until Linux 6.18).
    pub(crate) locks_for_any: bool,
    /// It expires what it knows not to be there like other names.
    pub(crate) expires_absent: bool,
    /// Directories that are changed by request, here or elsewhere: their names are handed out for one use.
    hot: HashMap<Ino, Hot, FxBuildHasher>,
    /// So many of these are there that no more are handed out without a limit.
    absent_full: bool,
    /// The kernel can be told to look up everything anew (Linux 6.16).
    pub(crate) epochs: bool,
    /// Nothing is changed here: nobody holds a directory's lock and waits for others.
    pub(crate) read_only: bool,
    /// What others are just changing.
    pub(crate) changing: Changing,
    /// Directories of which names could not be expired in time, and when: others want what a call with the lock waits for.
    troubled: HashMap<Ino, Instant, FxBuildHasher>,
    /// Directories of which calls have the locks that wait for what comes in the stream.
    asks: Waiting,
    /// And of which calls have the locks that may wait until others have heard of something.
    waits: Waiting,
}

/// Directories of which calls that wait have the locks, and how many.
#[derive(Debug, Default)]
struct Waiting(HashMap<Ino, u32, FxBuildHasher>);

impl Waiting {
    fn begin(&mut self, dirs: &[Ino]) {
        dirs.iter().for_each(|dir| *self.0.entry(*dir).or_default() += 1);
    }

    fn end(&mut self, dirs: &[Ino]) {
        for dir in dirs {
            if let Some(count) = self.0.get_mut(dir) {
                *count -= 1;
                if *count == 0 {
                    self.0.remove(dir);
                }
            }
        }
    }

    fn is_any_of(&self, dirs: &HashSet<Ino>) -> bool {
        self.0.keys().any(|dir| dirs.contains(dir))
    }
}

/// A directory that is changed by request.
#[derive(Debug)]
struct Hot {
    /// When it was changed last.
    changed: Instant,
    /// This host has changed it.
    here: bool,
    /// Names that were handed out before, and that the kernel may still hold.
    held: HashSet<Name, FxBuildHasher>,
}

impl KernelNames {
    /// Whether names of a directory may be kept by the kernel.
    fn lasting(&mut self, tree: &Tree, dir: Ino, caller: Caller) -> bool {
        let is_still = self.is_still(dir) && !tree.is_split(dir);
        // An answer of a pool thread may be late: after the word that a name has changed.
        is_still && (tree.owns(dir) || (caller.in_time && self.epochs))
    }

    fn is_still(&mut self, dir: Ino) -> bool {
        let is_troubled = self.troubled.get(&dir).is_some_and(|since| since.elapsed() < TROUBLED);
        !self.changing.contains(dir) && !self.is_hot(dir) && !is_troubled
    }

    /// Names of these directories could not be expired in time: the kernel is to keep none of them for a while.
    pub(crate) fn could_not_expire(&mut self, dirs: &HashSet<Ino>) {
        self.troubled.retain(|_, since| since.elapsed() < TROUBLED);
        let room = TROUBLED_MAX.saturating_sub(self.troubled.len());
        self.troubled.extend(dirs.iter().take(room).map(|dir| (*dir, Instant::now())));
    }

    /// Whether names of a split directory may be kept by the kernel as long as their slots are held.
    fn lasting_by_slot(&mut self, dir: Ino, caller: Caller) -> bool {
        let is_still = self.is_still(dir);
        // Who changes nothing raises no epoch, which may be wanted here.
        caller.in_time && is_still && self.epochs && self.locks_for_any && !self.read_only
    }

    /// Whether expiring a name makes sure that it does not last, however late the answer counts; notes that, if it takes more than that.
    /// `is_known`: the kernel may have the name, and look it up without the directory's lock. `directory`: which it leads to, if to one.
    fn goes_for_certain(
        &mut self,
        place: (NodeId, &[u8]),
        (is_known, directory): (bool, Option<Ino>),
        caller: Caller,
    ) -> bool {
        if !is_known && self.locks_for_any {
            return true;
        }
        // Where nothing is changed an epoch would break overlays: what is known is looked up each time.
        let may_raise = self.epochs && !(is_known && self.read_only);
        may_raise && self.late.begin(caller, place, directory)
    }

    /// A call has the locks of these directories, and waits for what comes in the stream; or, `for_others`, until others have heard
    /// of something.
    pub(crate) fn wait(&mut self, dirs: &[Ino], for_others: bool) {
        self.asks.begin(dirs);
        if for_others {
            self.waits.begin(dirs);
        }
    }

    /// It waits no longer.
    pub(crate) fn end_wait(&mut self, dirs: &[Ino], for_others: bool) {
        self.asks.end(dirs);
        if for_others {
            self.waits.end(dirs);
        }
    }

    /// Whether a call that waits for what comes in the stream has the lock of one of these.
    pub(crate) fn is_asked_with(&self, dirs: &HashSet<Ino>) -> bool {
        self.asks.is_any_of(dirs)
    }

    /// Whether a call that may wait until others have heard of something has the lock of one of these.
    pub(crate) fn is_waited_with(&self, dirs: &HashSet<Ino>) -> bool {
        self.waits.is_any_of(dirs)
    }

    /// The directory is owned: the kernel may keep its names again.
    pub(crate) fn cool(&mut self, dir: Ino) {
        if let Some(Hot { held, .. }) = self.hot.remove(&dir)
            && !held.is_empty()
        {
            self.absent.entry(dir).or_default().extend(held);
        }
    }

    /// Whether this host changes the directory by request.
    pub(crate) fn is_changed_here(&mut self, dir: Ino) -> bool {
        self.is_hot(dir) && self.hot.get(&dir).is_some_and(|hot| hot.here)
    }

    /// Whether the directory is being changed by request.
    fn is_hot(&mut self, dir: Ino) -> bool {
        let is_over = self.hot.get(&dir).is_some_and(|hot| hot.changed.elapsed() > COOLING);
        if is_over {
            self.cool(dir);
        }
        self.hot.contains_key(&dir)
    }

    /// Whether there are directories of which names are handed out for one use, and those are counted that the kernel may hold.
    pub(crate) fn counts_any(&self) -> bool {
        !self.hot.is_empty()
    }

    /// The kernel may hold a name of a directory that is changed by request.
    pub(super) fn holds(&mut self, (dir, name): (Ino, &Name)) {
        if let Some(hot) = self.hot.get_mut(&dir) {
            hot.held.insert(name.clone());
        }
    }

    /// The kernel looks up everything anew: what was handed out without a limit in directories that are changed by
    /// request is gone from it.
    pub(crate) fn dropped(&mut self) {
        // But what is listed, and counts from when that has come.
        let listed = self.late.listed();
        self.hot.iter_mut().filter(|(dir, _)| !listed.contains(dir)).for_each(|(_, hot)| hot.held.clear());
        self.late.dropped();
        // Elsewhere all that is known counts as held.
        let is_counted = |dir: Ino| self.hot.contains_key(&dir) || self.split.keeps_any(dir);
        self.late.bound_unsure(is_counted);
    }

    /// Notes whether there are more absent names than `most`.
    pub(crate) fn bound_absent(&mut self, most: usize) {
        self.absent_full = self.absent.values().map(HashSet::len).sum::<usize>() >= most;
    }

    /// Gives back what tables keep for more entries than they have.
    pub(crate) fn shrink(&mut self) {
        self.absent.retain(|_, names| {
            names.shrink_to_fit();
            !names.is_empty()
        });
        self.absent.shrink_to_fit();
        self.split.shrink();
        self.hot.shrink_to_fit();
        self.changing.shrink();
        self.late.shrink();
    }

    /// The name exists now.
    pub(crate) fn exists(&mut self, dir: Ino, name: &[u8]) {
        if let Some(absent) = self.absent.get_mut(&dir) {
            absent.remove(name);
        }
    }
}

impl Core {
    /// A directory's listing has come. One that has just changed is likely to change: its names are for one use for a while.
    pub(crate) fn listed(&mut self, dir: Ino, own: bool, now: Timestamp) {
        if own {
            return self.names.cool(dir);
        }
        let changed = self.tree.inode(dir).map(|row| row.mtime.as_nanos());
        if changed.is_ok_and(|changed| now.as_nanos() - changed < COOLING.as_nanos() as i128) {
            self.hold_back(dir);
        }
    }

    /// The kernel has forgotten an inode, and with it all names below it.
    pub(crate) fn forgotten(&mut self, ino: Ino) {
        self.names.absent.remove(&ino);
        self.names.split.forget(ino);
        self.names.hot.remove(&ino);
        self.names.changing.forget(ino);
        self.births.arrived(NodeId::of_file(ino));
        self.appending.remove(&ino);
        self.failed.remove(&ino);
        self.torn.remove(&ino);
    }

    /// How long the kernel may keep a name that it has the directory's lock for: one that was just made.
    pub(crate) fn validity(&mut self, place: (NodeId, &[u8]), caller: Caller) -> Validity {
        let lasts = self.names.lasting(&self.tree, place.0.ino(), caller)
            && self.names.goes_for_certain(place, (false, None), caller);
        if lasts { Validity::FOREVER } else { Validity::ZERO }
    }

    /// How long the kernel may keep the names of a listing, if it is told their inodes with them.
    pub(crate) fn validity_listed(&mut self, dir: NodeId, caller: Caller) -> Validity {
        // Who lists has the lock, for which expiring what the kernel does not have yet has to wait.
        let lasts = self.names.locks_for_any && self.names.lasting(&self.tree, dir.ino(), caller);
        if lasts && self.names.late.begin_listing(caller, dir) { Validity::FOREVER } else { Validity::ZERO }
    }

    /// How long the kernel may keep a name that it has looked up, of an inode that it is not told of yet.
    pub(crate) fn presence(&mut self, at: NodeId, name: &[u8], to: &Dentry, caller: Caller) -> Validity {
        let dir = at.ino();
        let directory = (to.kind == FileKind::Directory).then_some(to.ino);
        let is_known = self.tree.lookups(to.ino) > 0;
        if let Some(directory) = directory {
            self.names.late.told(directory, at, name);
        }
        let by_slot = self.tree.is_split(dir);
        let lasts = match by_slot {
            true => self.names.lasting_by_slot(dir, caller),
            false => self.names.lasting(&self.tree, dir, caller),
        };
        let lasts = lasts
            && self.names.goes_for_certain((at, name), (is_known, directory), caller)
            && (!by_slot || self.names.split.keep(self.tree.place(dir, name), name));
        if lasts { Validity::FOREVER } else { Validity::ZERO }
    }

    /// How long the kernel may keep it that a name does not exist. It never looks that up without the directory's lock.
    pub(crate) fn absence(&mut self, at: NodeId, name: &[u8], caller: Caller) -> Validity {
        if !self.names.expires_absent {
            return Validity::ZERO;
        }
        let dir = at.ino();
        let lasts = match self.tree.is_split(dir) {
            true => {
                let lasts = self.names.lasting_by_slot(dir, caller);
                lasts && self.names.split.is_absent(self.tree.place(dir, name), name)
            }
            false => {
                let is_full = self.names.absent_full;
                let lasts = self.names.lasting(&self.tree, dir, caller);
                lasts && {
                    let absent = self.names.absent.entry(dir).or_default();
                    (!is_full && absent.len() < ABSENT_MAX) || absent.contains(name)
                }
            }
        };
        if !lasts || !self.names.goes_for_certain((at, name), (false, None), caller) {
            return Validity::ZERO;
        }
        if !self.tree.is_split(dir) {
            self.names.absent.entry(dir).or_default().insert(Name::new(name));
        }
        Validity::FOREVER
    }

    /// This host has renamed what the kernel had: it takes along where it has a directory, and how long it may keep names.
    pub(crate) fn renamed(&mut self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        self.nodes.renamed(from, to, exchange);
        self.names.late.moves(from, to, exchange);
    }

    /// This host has renamed a file: in a directory that is split the kernel takes along how long it may keep the name.
    pub(crate) fn moves_by_slot<'a>(&mut self, from: (Ino, &'a [u8]), to: (Ino, &'a [u8])) {
        let place = |(dir, name): (Ino, &'a [u8])| (self.tree.place(dir, name), name);
        self.names.split.moves(place(from), place(to));
    }

    /// This host is going to change the directory by request: its names are handed out for one use from now on. What
    /// the kernel holds of it is expired when that has changed: the call that is going to change it has its lock.
    pub(crate) fn heat(&mut self, dir: Ino) {
        self.hold_back(dir).here = true;
    }

    /// A call that asks the server has the lock of a directory that it does not change: the one that is moved or removed.
    /// Its names are not expired as long as that lasts.
    pub(crate) fn spare(&mut self, dir: Ino) {
        self.hold_back(dir);
    }

    fn hold_back(&mut self, dir: Ino) -> &mut Hot {
        let held = if self.names.is_hot(dir) { HashSet::default() } else { self.take_held(dir) };
        let changed = Instant::now();
        let hot = self.names.hot.entry(dir).or_insert(Hot { changed, here: false, held });
        hot.changed = changed;
        hot
    }

    /// Others change the directory, or are going to, and this host does not do so by request: its names are handed out
    /// for one use from now on. Returns what the kernel holds of it, which has to be expired. So when this host changes
    /// it as well, nobody waits for the lock that the call holds.
    pub(crate) fn warm(&mut self, dir: Ino) -> Vec<(Ino, Name)> {
        if self.tree.is_split(dir) || dir.of_slot().is_some() {
            // They go with their slots.
            return Vec::new();
        }
        if self.names.is_hot(dir) {
            if let Some(hot) = self.names.hot.get_mut(&dir) {
                hot.changed = Instant::now();
            }
            return Vec::new();
        }
        if self.names.epochs && (self.names.read_only || self.tree.names_in_memory(dir) > WARM_MAX) {
            return Vec::new();
        }
        let held = self.take_held(dir);
        self.names.hot.insert(dir, Hot { changed: Instant::now(), here: false, held: HashSet::default() });
        held.into_iter().map(|name| (dir, name)).collect()
    }

    /// What the kernel may hold of a directory without a limit. Absent names are accounted for elsewhere from now on.
    fn take_held(&mut self, dir: Ino) -> HashSet<Name, FxBuildHasher> {
        let absent = self.names.absent.remove(&dir).unwrap_or_default();
        let known = if self.tree.is_split(dir) { Vec::new() } else { self.tree.known_names(dir) };
        known.into_iter().chain(absent).collect()
    }

    /// Whether the kernel may hold a name.
    pub(crate) fn may_hold(&self, dir: Ino, name: &Name) -> bool {
        let is_held = match self.names.hot.get(&dir) {
            Some(hot) => hot.held.contains(name),
            // What was counted before it had cooled is among the absent ones.
            None if self.tree.is_split(dir) => {
                self.names.absent.get(&dir).is_some_and(|absent| absent.contains(name))
            }
            None => true,
        };
        is_held || self.names.split.has(dir, name) || self.names.late.has(dir, name)
    }

    /// A name is moved from one directory to another: the kernel takes along how long it may keep it. Whether the name that was there has
    /// to go, or comes back in an exchange, is not known yet.
    pub(crate) fn takes_along(&mut self, from: (Ino, &Name), to: (Ino, &Name), exchange: bool) {
        let (moves, comes_back) = (self.may_hold(from.0, from.1), exchange && self.may_hold(to.0, to.1));
        if moves {
            self.names.holds(to);
        }
        if comes_back {
            self.names.holds(from);
        }
    }

    /// Which of these names the kernel may hold; they are on their way out of it.
    fn held(&mut self, names: Vec<(Ino, Name)>) -> Vec<(Ino, Name)> {
        let held: Vec<_> = names
            .into_iter()
            .filter(|(dir, name)| {
                let is_kept = self.names.split.take(*dir, name);
                let is_held = match self.names.hot.get_mut(dir) {
                    Some(hot) => hot.held.remove(name),
                    None if self.tree.is_split(*dir) => {
                        self.names.absent.get_mut(dir).is_some_and(|absent| absent.remove(name))
                    }
                    None => {
                        if let Some(absent) = self.names.absent.get_mut(dir) {
                            absent.remove(name);
                        }
                        true
                    }
                };
                is_kept || is_held || self.names.late.has(*dir, name)
            })
            .collect();
        held.iter().for_each(|(dir, name)| self.names.late.take_unsure(*dir, name));
        held
    }

    /// What the kernel may hold of names that others change, in these directories of which it knows.
    pub(crate) fn expire(&mut self, names: Vec<(Ino, Name)>, dirs: &[Ino]) -> Vec<(Ino, Name)> {
        let mut names = self.held(names);
        names.extend(dirs.iter().flat_map(|dir| self.warm(*dir)));
        names
    }

    /// All absent names that the kernel was told of a directory; they are on their way out of it.
    fn take_absent(&mut self, dir: Ino) -> Vec<(Ino, Name)> {
        let absent = self.names.absent.remove(&dir).unwrap_or_default();
        let hot = self.names.hot.remove(&dir).map(|hot| hot.held).unwrap_or_default();
        absent.into_iter().chain(hot).map(|name| (dir, name)).collect()
    }

    /// The directory, or slot, is not held any more: what the kernel may keep of these names, and of absent ones.
    pub(crate) fn take_names(&mut self, dir: Ino, names: Vec<(Ino, Name)>) -> Vec<(Ino, Name)> {
        let mut names = self.held(names);
        let was_hot = self.names.is_hot(dir);
        names.extend(self.take_absent(dir));
        names.extend(self.names.split.take_of(dir));
        if was_hot {
            // What else the kernel knows of it was handed out for one use.
            let hot = Hot { changed: Instant::now(), here: false, held: HashSet::default() };
            self.names.hot.insert(dir, hot);
        }
        names
    }

    /// Nothing is held any more: the same of all directories.
    pub(crate) fn take_all_names(&mut self, names: Vec<(Ino, Name)>) -> Vec<(Ino, Name)> {
        let mut names = self.held(names);
        names.extend(self.take_all_absent());
        names
    }

    /// All absent names, of all directories.
    pub(crate) fn take_all_absent(&mut self) -> Vec<(Ino, Name)> {
        let dirs: Vec<Ino> = self.names.absent.keys().chain(self.names.hot.keys()).copied().collect();
        let by_slot = self.names.split.all();
        dirs.into_iter().flat_map(|dir| self.take_absent(dir)).chain(by_slot).collect()
    }

    /// Whether the kernel was told of an inode, or is by an answer on its way. What was made for it and is in no answer
    /// yet is not: the answer will say how things are then.
    pub(crate) fn is_handed_out(&self, ino: Ino) -> bool {
        ino == Ino::ROOT || self.tree.lookups(ino) > u64::from(self.made.contains(&ino))
    }

    /// The same of a number.
    pub(crate) fn has_number(&self, number: NodeId) -> bool {
        let ino = number.ino();
        self.is_handed_out(ino) && self.nodes.numbers(ino).any(|known| known == number)
    }

    /// Takes the directories among these inodes, by the numbers of the kernel: none of which an answer may be on its way that
    /// counts however late it is.
    pub(crate) fn take_directories(&self, inos: &mut Vec<Ino>) -> Vec<Ino> {
        let is_dir = |ino: &Ino| self.tree.inode(*ino).is_ok_and(|row| row.kind() == FileKind::Directory);
        let (dirs, others) = std::mem::take(inos).into_iter().partition(is_dir);
        *inos = others;
        let dirs = Vec::into_iter(dirs).filter(|ino| self.is_handed_out(*ino)).collect();
        self.nodes.each(dirs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Word;

    const FROM: Ino = Ino(10);
    const TO: Ino = Ino(11);

    #[test]
    fn the_kernel_takes_a_name_along_into_a_directory_of_which_nothing_else_is_kept() {
        let (mut core, old, new) = (Core::default(), Name::new(b"old"), Name::new(b"new"));
        [FROM, TO].into_iter().for_each(|dir| core.tree.remember(dir));
        core.spare(TO);
        assert!(
            core.may_hold(FROM, &old) && !core.may_hold(TO, &new),
            "all that is known of the one, nothing of the other"
        );
        core.takes_along((FROM, &old), (TO, &new), true);
        assert!(core.may_hold(TO, &new));
        let word = core.expire(vec![(TO, new.clone())], &[]);
        assert_eq!(word, [(TO, new.clone())]);
        assert!(!core.may_hold(TO, &new), "it is on its way out");
    }

    #[test]
    fn what_this_host_has_renamed_is_held_by_the_number_that_it_has_used() {
        let (mut core, old, new) = (Core::default(), Name::new(b"old"), Name::new(b"new"));
        [FROM, TO].into_iter().for_each(|dir| core.tree.remember(dir));
        core.heat(TO);
        core.takes_along((FROM, &old), (TO, &new), false);
        // Others have the directory by another number.
        let used = [NodeId::of_file(FROM), NodeId::of_file(TO)];
        let names = vec![(FROM, old), (TO, new.clone())];
        assert!(
            matches!(core.word_for_others(Vec::new(), names, &used), Word::Stale { names, .. } if names.is_empty())
        );
        assert!(core.may_hold(TO, &new), "nobody has told the kernel of it");
    }

    #[test]
    fn calls_that_wait_for_others_are_told_from_those_that_only_ask() {
        let (mut names, dirs) = (KernelNames::default(), |dir: u64| HashSet::from([Ino(dir)]));
        names.wait(&[Ino(1), Ino(2)], false);
        names.wait(&[Ino(2)], true);
        assert!(names.is_asked_with(&dirs(1)) && !names.is_waited_with(&dirs(1)));
        assert!(names.is_asked_with(&dirs(2)) && names.is_waited_with(&dirs(2)));
        names.end_wait(&[Ino(1), Ino(2)], false);
        assert!(!names.is_asked_with(&dirs(1)) && names.is_asked_with(&dirs(2)));
        names.end_wait(&[Ino(2)], true);
        assert!(!names.is_asked_with(&dirs(2)) && !names.is_waited_with(&dirs(2)));
    }
}
