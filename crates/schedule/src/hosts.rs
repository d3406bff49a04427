//! The hosts, what is free on them, and which one a task goes to.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::{Host, HostId, HostLoad, Need, TaskId};

/// So many hosts are looked at for one that is warm, before it is the warm ones that are looked at.
const NEAR_MAX: usize = 16;

/// A host and what runs there.
#[derive(Debug)]
pub(crate) struct Place {
    pub host: Host,
    /// What its tasks take: more than there is, when a new dispatcher hears of what runs, or the host has less than before.
    cores_used: u32,
    memory_used: u64,
    pub tasks: BTreeSet<TaskId>,
    /// For whom it is kept free.
    pub reserved: Option<TaskId>,
}

impl Place {
    fn cores_free(&self) -> u32 {
        self.host.cores.saturating_sub(self.cores_used)
    }

    fn memory_free(&self) -> u64 {
        self.host.memory.saturating_sub(self.memory_used)
    }
}

/// All hosts. Those with most free slots are found without looking at the others.
#[derive(Debug, Default)]
pub(crate) struct Hosts {
    places: BTreeMap<HostId, Place>,
    by_room: BTreeSet<(Reverse<u32>, HostId)>,
    pub cores: u64,
    pub memory: u64,
}

impl Hosts {
    pub(crate) fn get(&self, id: HostId) -> Option<&Place> {
        self.places.get(&id)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether any host has a free slot.
    pub(crate) fn has_free_slots(&self) -> bool {
        self.by_room.first().is_some_and(|(room, _)| room.0 > 0)
    }

    /// Adds a host, or changes what one has. What runs there goes on.
    pub(crate) fn put(&mut self, id: HostId, host: Host) {
        self.cores += u64::from(host.cores);
        self.memory += host.memory;
        let place = match self.take(id) {
            Some(before) => Place { host, ..before },
            None => Place { host, cores_used: 0, memory_used: 0, tasks: BTreeSet::new(), reserved: None },
        };
        self.by_room.insert((Reverse(place.cores_free()), id));
        self.places.insert(id, place);
    }

    pub(crate) fn take(&mut self, id: HostId) -> Option<Place> {
        let place = self.places.remove(&id)?;
        self.by_room.remove(&(Reverse(place.cores_free()), id));
        self.cores -= u64::from(place.host.cores);
        self.memory -= place.host.memory;
        Some(place)
    }

    fn change(&mut self, id: HostId, change: impl FnOnce(&mut Place)) {
        let Some(place) = self.places.get_mut(&id) else { return };
        let before = place.cores_free();
        change(place);
        let after = place.cores_free();
        if before != after {
            self.by_room.remove(&(Reverse(before), id));
            self.by_room.insert((Reverse(after), id));
        }
    }

    /// A task starts there.
    pub(crate) fn begin(&mut self, id: HostId, task: TaskId, need: &Need) {
        self.change(id, |place| {
            place.tasks.insert(task);
            place.cores_used += need.cores;
            place.memory_used += need.memory;
            if place.reserved == Some(task) {
                place.reserved = None;
            }
        });
    }

    /// A task has ended.
    pub(crate) fn end(&mut self, id: HostId, task: TaskId, need: &Need) {
        self.change(id, |place| {
            if place.tasks.remove(&task) {
                place.cores_used -= need.cores;
                place.memory_used -= need.memory;
            }
        });
    }

    pub(crate) fn reserve(&mut self, id: HostId, task: TaskId) {
        self.change(id, |place| place.reserved = Some(task));
    }

    /// Nothing is kept free for this task any more.
    pub(crate) fn release(&mut self, id: HostId, task: TaskId) {
        self.change(id, |place| {
            if place.reserved == Some(task) {
                place.reserved = None;
            }
        });
    }

    fn has_room(&self, id: HostId, task: TaskId, need: &Need) -> bool {
        self.places.get(&id).is_some_and(|place| {
            need.cores <= place.cores_free()
                && need.memory <= place.memory_free()
                && place.reserved.is_none_or(|reserved| reserved == task)
                && need.fits(id, &place.host)
        })
    }

    /// Where a task can start now. `warm` are hosts that its build knows.
    pub(crate) fn place(&self, task: TaskId, need: &Need, warm: &BTreeSet<HostId>) -> Option<HostId> {
        let enough = self.by_room.iter().take_while(|(room, _)| room.0 >= need.cores);
        let mut rooms = enough.filter(|(_, id)| self.has_room(*id, task, need));
        let &(Reverse(most), coldest) = rooms.next()?;
        if warm.is_empty() || warm.contains(&coldest) {
            return Some(coldest);
        }
        // Those that have enough are in the order of their room: mostly few while the farm works, else the warm ones are looked at.
        let near = |room: &Reverse<u32>| room.0 * 2 >= most;
        for (room, id) in rooms.by_ref().take(NEAR_MAX) {
            if !near(room) {
                return Some(coldest);
            }
            if warm.contains(id) {
                return Some(*id);
            }
        }
        if rooms.next().is_none() {
            return Some(coldest);
        }
        let free = |id: HostId| self.places.get(&id).map_or(0, Place::cores_free);
        let known = warm.iter().copied().filter(|id| self.has_room(*id, task, need));
        let warmest = known.max_by_key(|id| (free(*id), Reverse(*id)));
        Some(warmest.filter(|id| near(&Reverse(free(*id)))).unwrap_or(coldest))
    }

    /// The host that is closest to having room for a task, of those that nothing is reserved on.
    pub(crate) fn nearest(&self, need: &Need) -> Option<HostId> {
        let fit = |(_, id): &&(Reverse<u32>, HostId)| {
            let place = &self.places[id];
            place.reserved.is_none() && need.fits(*id, &place.host)
        };
        self.by_room.iter().find(fit).map(|(_, id)| *id)
    }

    /// Whether any host could ever run it.
    pub(crate) fn could_run(&self, need: &Need) -> bool {
        self.places.iter().any(|(id, place)| need.fits(*id, &place.host))
    }

    pub(crate) fn loads(&self) -> Vec<HostLoad> {
        let load = |(id, place): (&HostId, &Place)| HostLoad {
            id: *id,
            cores: place.host.cores,
            busy: place.host.cores - place.cores_free(),
            tasks: place.tasks.len(),
            reserved: place.reserved.is_some(),
        };
        self.places.iter().map(load).collect()
    }
}
