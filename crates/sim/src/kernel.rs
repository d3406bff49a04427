//! A client's kernel: it answers names, attributes, listings and data from its caches without asking, as long as
//! nobody tells it that they are stale. Expiring a name takes the lock of its directory; raising the epoch does not.
//!
//! In worlds whose seeds are from [`FOLLOWS_FROM`] on it **follows names** as Linux does: it learns them from listings, and what it has of one
//! goes along when that is renamed here, or when a directory is told under another name of its parent. In half of these worlds it
//! is Linux 6.19 to 7.1, which takes no lock to expire a name that it does not have, and does not expire what it knows not to be there;
//! in some only the first of these is so.

use std::collections::{BTreeMap, BTreeSet};

use hayloft_model::{FileKind, Ino};

use crate::reference::Attributes;

/// From this seed on, kernels follow names.
pub(crate) const FOLLOWS_FROM: u64 = 1 << 34;

/// Where a name leads.
pub(crate) type Target = Option<(Ino, FileKind)>;

#[derive(Clone, Copy, Debug)]
struct Dentry {
    /// No other one has it.
    number: u64,
    target: Target,
    /// Without a time limit; else it is looked up each time.
    unlimited: bool,
    epoch: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Lock {
    shared: u32,
    exclusive: bool,
}

/// When a request began: what has been invalidated since then is not cached.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moment {
    pub(crate) epoch: u64,
    version: u64,
}

/// What a listing tells of a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    pub(crate) name: u8,
    pub(crate) to: (Ino, FileKind),
    pub(crate) attributes: Attributes,
    /// The name may be kept without a limit.
    pub(crate) unlimited: bool,
}

#[derive(Default)]
pub(crate) struct Kernel {
    follows: bool,
    /// It takes the lock of its directory also to expire a name that it does not have.
    locks_for_any: bool,
    /// It expires what it knows not to be there.
    expires_absent: bool,
    epoch: u64,
    version: u64,
    /// How many names it has had.
    dentries: u64,
    names: BTreeMap<(Ino, u8), Dentry>,
    attributes: BTreeMap<Ino, Attributes>,
    data: BTreeMap<Ino, Vec<u8>>,
    listings: BTreeMap<Ino, Vec<(u8, Ino)>>,
    /// When an inode was invalidated last.
    invalidated: BTreeMap<Ino, u64>,
    all_invalidated: u64,
    /// How often it was told of each inode, answers on their way included.
    pub(crate) known: BTreeMap<Ino, u64>,
    /// Inodes that it has: the answer that brought each has arrived.
    pub(crate) inodes: BTreeSet<Ino>,
    /// Inodes whose first answer is on its way, and not to be relied upon.
    owed: BTreeSet<Ino>,
    /// Files made where the client is the owner, whose answers are on their way; whether these do not count any more.
    births: BTreeMap<Ino, bool>,
    locks: BTreeMap<Ino, Lock>,
}

impl Kernel {
    /// That of a world with this seed.
    pub(crate) fn new(seed: u64) -> Kernel {
        let follows = seed >= FOLLOWS_FROM;
        let expires_absent = !follows || seed.is_multiple_of(2);
        Kernel {
            follows,
            locks_for_any: !follows || (expires_absent && seed % 8 != 2),
            expires_absent,
            ..Kernel::default()
        }
    }

    pub(crate) fn follows(&self) -> bool {
        self.follows
    }

    pub(crate) fn locks_for_any(&self) -> bool {
        self.locks_for_any
    }

    pub(crate) fn expires_absent(&self) -> bool {
        self.expires_absent
    }

    pub(crate) fn moment(&self) -> Moment {
        Moment { epoch: self.epoch, version: self.version }
    }

    /// The name as it is cached; `None`: it has to be looked up.
    pub(crate) fn name(&self, dir: Ino, name: u8) -> Option<Target> {
        let dentry = self.names.get(&(dir, name))?;
        (dentry.unlimited && dentry.epoch == self.epoch).then_some(dentry.target)
    }

    pub(crate) fn attributes(&self, ino: Ino) -> Option<Attributes> {
        self.attributes.get(&ino).copied()
    }

    pub(crate) fn data(&self, ino: Ino) -> Option<&Vec<u8>> {
        self.data.get(&ino)
    }

    pub(crate) fn listing(&self, dir: Ino) -> Option<&Vec<(u8, Ino)>> {
        self.listings.get(&dir)
    }

    pub(crate) fn put_name(&mut self, dir: Ino, name: u8, target: Target, unlimited: bool, since: Moment) {
        let number = self.take_dentry((dir, name), target).unwrap_or_else(|| {
            self.dentries += 1;
            self.dentries
        });
        self.names.insert((dir, name), Dentry { number, target, unlimited, epoch: since.epoch });
    }

    /// What it has of a name that leads there, which stays; or of a directory under another name of the same parent, which moves.
    fn take_dentry(&mut self, (dir, name): (Ino, u8), target: Target) -> Option<u64> {
        let (ino, kind) = target.filter(|_| self.follows)?;
        let leads_there = |dentry: &Dentry| dentry.target.is_some_and(|(to, _)| to == ino);
        if let Some(dentry) = self.names.get(&(dir, name)).filter(|dentry| leads_there(dentry)) {
            return Some(dentry.number);
        }
        let mut places = self.names.iter().filter(|(place, dentry)| place.0 == dir && leads_there(dentry));
        let place = *places.next().filter(|_| kind == FileKind::Directory)?.0;
        self.names.remove(&place).map(|dentry| dentry.number)
    }

    /// A listing tells of a name: that counts from when it has come, whatever the epoch was when it was asked for.
    pub(crate) fn put_listed(&mut self, dir: Ino, listed: &Told, since: Moment) {
        let (ino, _) = listed.to;
        self.put_name(dir, listed.name, Some(listed.to), listed.unlimited, self.moment());
        if self.inodes.contains(&ino) {
            self.put_attributes(ino, listed.attributes, since);
        } else {
            // Of what is new to it, attributes are for one use.
            self.put_changed(ino, listed.attributes, false);
        }
    }

    /// A name was renamed here.
    pub(crate) fn move_name(&mut self, from: (Ino, u8), to: (Ino, u8), exchange: bool) {
        let (moved, other) = (self.names.remove(&from), self.names.remove(&to));
        if self.follows {
            self.names.extend(moved.map(|dentry| (to, dentry)));
            self.names.extend(other.filter(|_| exchange).map(|dentry| (from, dentry)));
        }
    }

    /// What it has of a name and looks up anew, without the directory's lock.
    pub(crate) fn revalidated(&self, dir: Ino, name: u8) -> Option<u64> {
        let dentry = self.names.get(&(dir, name))?;
        (dentry.target.is_some() && dentry.epoch == self.epoch).then_some(dentry.number)
    }

    /// It has looked up anew what it has of a name, which may be gone meanwhile. `false`: the name leads elsewhere.
    pub(crate) fn revalidate(
        &mut self,
        dir: Ino,
        name: u8,
        number: u64,
        target: Target,
        unlimited: bool,
    ) -> bool {
        let place = match self.follows {
            true => self.names.iter().find(|(_, dentry)| dentry.number == number).map(|(place, _)| *place),
            false => Some((dir, name)),
        };
        let Some(place) = place else { return true };
        let Some(dentry) = self.names.get_mut(&place).filter(|dentry| dentry.number == number) else {
            return true;
        };
        let is_same = dentry.target == target;
        if is_same {
            dentry.unlimited = unlimited;
        } else {
            self.names.remove(&place);
        }
        is_same
    }

    /// Whether to expire a name waits for who has the lock of its directory.
    pub(crate) fn waits_for_lock(&self, dir: Ino, name: u8) -> bool {
        self.is_locked(dir) && (self.locks_for_any || self.names.contains_key(&(dir, name)))
    }

    /// A name is to be looked up anew.
    pub(crate) fn expire_name(&mut self, dir: Ino, name: u8) {
        let any = self.expires_absent;
        self.names
            .entry((dir, name))
            .and_modify(|dentry| dentry.unlimited &= !(any || dentry.target.is_some()));
    }

    fn current(&self, ino: Ino, since: Moment) -> bool {
        self.all_invalidated <= since.version
            && self.invalidated.get(&ino).is_none_or(|version| *version <= since.version)
    }

    pub(crate) fn put_attributes(&mut self, ino: Ino, attributes: Attributes, since: Moment) {
        // Of an inode that is new to it, it does not know whether the answer is outdated.
        let is_new = self.inodes.insert(ino);
        if !self.settle(ino) && (is_new || self.current(ino, since)) {
            self.attributes.insert(ino, attributes);
        }
    }

    /// The first answer that brings an inode has come: what was to be said of that is said, which is of all answers on their way.
    fn settle(&mut self, ino: Ino) -> bool {
        self.owed.remove(&ino) && self.invalidate(ino)
    }

    /// The answer that makes a file goes out, and counts however late it arrives.
    pub(crate) fn begin_birth(&mut self, ino: Ino) {
        self.births.insert(ino, false);
    }

    pub(crate) fn is_arriving(&self, ino: Ino) -> bool {
        self.births.contains_key(&ino)
    }

    /// An inode was made, or its attributes set: what the answer says counts, however late that is; or it does not count
    /// at all.
    pub(crate) fn put_changed(&mut self, ino: Ino, attributes: Attributes, keep: bool) {
        self.inodes.insert(ino);
        let keep = keep || self.births.remove(&ino) == Some(false);
        if !self.settle(ino) && keep {
            self.attributes.insert(ino, attributes);
        } else {
            self.attributes.remove(&ino);
        }
    }

    pub(crate) fn put_data(&mut self, ino: Ino, data: Vec<u8>, since: Moment) {
        if self.current(ino, since) {
            self.data.insert(ino, data);
        }
    }

    pub(crate) fn put_listing(&mut self, dir: Ino, listing: Vec<(u8, Ino)>, since: Moment) {
        if self.current(dir, since) {
            self.listings.insert(dir, listing);
        }
    }

    /// Drops what is cached of an inode; nothing happens when it does not have it (yet).
    pub(crate) fn invalidate(&mut self, ino: Ino) -> bool {
        if !self.inodes.contains(&ino) {
            return false;
        }
        self.version += 1;
        self.invalidated.insert(ino, self.version);
        self.attributes.remove(&ino);
        self.data.remove(&ino);
        self.listings.remove(&ino);
        true
    }

    /// The same before anybody can rely on it: answers on their way do not count either.
    pub(crate) fn invalidate_also_new(&mut self, ino: Ino) {
        if !self.invalidate(ino) && self.known.contains_key(&ino) {
            self.owed.insert(ino);
        }
        self.births.entry(ino).and_modify(|is_over| *is_over = true);
    }

    pub(crate) fn drop_name(&mut self, dir: Ino, name: u8) {
        self.names.remove(&(dir, name));
    }

    /// All names are looked up anew.
    pub(crate) fn raise_epoch(&mut self) {
        self.epoch += 1;
    }

    /// Nothing that is cached counts any more.
    pub(crate) fn expire_all(&mut self) {
        self.raise_epoch();
        self.version += 1;
        self.all_invalidated = self.version;
        self.owed.extend(self.known.keys().filter(|ino| !self.inodes.contains(ino)));
        self.births.values_mut().for_each(|is_over| *is_over = true);
        self.attributes.clear();
        self.data.clear();
        self.listings.clear();
    }

    pub(crate) fn is_locked(&self, dir: Ino) -> bool {
        self.locks.contains_key(&dir)
    }

    /// Whether somebody is changing names of a directory.
    pub(crate) fn is_locked_alone(&self, dir: Ino) -> bool {
        self.locks.get(&dir).is_some_and(|lock| lock.exclusive)
    }

    pub(crate) fn lock_shared(&mut self, dir: Ino) -> bool {
        let lock = self.locks.entry(dir).or_default();
        if lock.exclusive {
            return false;
        }
        lock.shared += 1;
        true
    }

    pub(crate) fn lock_all(&mut self, dirs: &BTreeSet<Ino>) -> bool {
        if dirs.iter().any(|dir| self.is_locked(*dir)) {
            return false;
        }
        for dir in dirs {
            self.locks.insert(*dir, Lock { shared: 0, exclusive: true });
        }
        true
    }

    pub(crate) fn unlock(&mut self, dir: Ino) {
        let Some(lock) = self.locks.get_mut(&dir) else { return };
        lock.shared = lock.shared.saturating_sub(1);
        lock.exclusive = false;
        if lock.shared == 0 {
            self.locks.remove(&dir);
        }
    }

    /// The inode leaves the kernel: how often it was known.
    pub(crate) fn forget(&mut self, ino: Ino) -> u64 {
        self.names.retain(|(dir, _), dentry| *dir != ino && dentry.target.is_none_or(|(to, _)| to != ino));
        self.invalidate(ino);
        self.inodes.remove(&ino);
        self.owed.remove(&ino);
        self.births.remove(&ino);
        self.known.remove(&ino).unwrap_or(0)
    }

    /// What is cached without a limit, for the check at the end.
    pub(crate) fn cached_names(&self) -> impl Iterator<Item = ((Ino, u8), Option<Ino>)> + '_ {
        self.names
            .iter()
            .filter(|(_, dentry)| dentry.unlimited && dentry.epoch == self.epoch)
            .map(|(place, dentry)| (*place, dentry.target.map(|(ino, _)| ino)))
    }

    pub(crate) fn cached_attributes(&self) -> impl Iterator<Item = (Ino, Attributes)> + '_ {
        self.attributes.iter().map(|(ino, attributes)| (*ino, *attributes))
    }
}
