//! The scheduler: what waits, what runs, and who is next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::hosts::Hosts;
use crate::share::max_min;
use crate::{Assignment, Build, BuildId, BuildLoad, Class, Config, Host, HostId, HostLoad, Need, TaskId};

/// Of each build so many hosts are remembered that have run its tasks.
const WARM_MAX: usize = 64;

#[derive(Debug)]
struct Task {
    build: BuildId,
    need: Need,
    /// Where it runs; None while it waits.
    host: Option<HostId>,
    since_ms: u64,
    /// A host that is kept free for it.
    reserved: Option<HostId>,
}

/// What somebody has at the moment.
#[derive(Debug, Default, Clone, Copy)]
struct Usage {
    cores: u64,
    memory: u64,
}

/// Waiting tasks of a build that need the same: the first has room, or none has.
#[derive(Debug)]
struct Queue {
    need: Need,
    /// Each with the number of its arrival.
    tasks: VecDeque<(u64, TaskId)>,
}

/// What waits of a build.
#[derive(Debug, Default)]
struct Waiting {
    /// None of them is empty.
    queues: Vec<Queue>,
    count: usize,
    arrived: u64,
}

impl Waiting {
    fn push(&mut self, task: TaskId, need: &Need) {
        self.arrived += 1;
        self.count += 1;
        let entry = (self.arrived, task);
        match self.queues.iter_mut().find(|queue| queue.need == *need) {
            Some(queue) => queue.tasks.push_back(entry),
            None => self.queues.push(Queue { need: need.clone(), tasks: VecDeque::from([entry]) }),
        }
    }

    fn remove(&mut self, task: TaskId, need: &Need) {
        let Some(at) = self.queues.iter().position(|queue| queue.need == *need) else { return };
        let tasks = &mut self.queues[at].tasks;
        if tasks.front().is_some_and(|first| first.1 == task) {
            tasks.pop_front();
            self.count -= 1;
        } else if let Some(index) = tasks.iter().position(|other| other.1 == task) {
            tasks.remove(index);
            self.count -= 1;
        }
        if self.queues[at].tasks.is_empty() {
            self.queues.swap_remove(at);
        }
    }

    /// The first task of each need, in the order in which they came.
    fn firsts(&self) -> Vec<(TaskId, &Need)> {
        let first = |queue: &'_ Queue| queue.tasks.front().copied();
        let mut firsts: Vec<_> =
            self.queues.iter().filter_map(|queue| first(queue).map(|head| (head, &queue.need))).collect();
        firsts.sort_unstable_by_key(|(head, _)| head.0);
        firsts.into_iter().map(|(head, need)| (head.1, need)).collect()
    }

    fn cores(&self) -> u64 {
        self.queues.iter().map(|queue| u64::from(queue.need.cores) * queue.tasks.len() as u64).sum()
    }
}

#[derive(Debug)]
struct BuildState {
    build: Build,
    waiting: Waiting,
    running: usize,
    usage: Usage,
    /// When it was served last, as a number that grows.
    served: u64,
    warm: BTreeSet<HostId>,
    warm_order: VecDeque<HostId>,
}

#[derive(Debug, Default)]
struct UserState {
    weight: u32,
    usage: Usage,
    served: u64,
}

/// Gives slots to tasks. See the crate's documentation for the rules.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    hosts: Hosts,
    users: BTreeMap<String, UserState>,
    builds: BTreeMap<BuildId, BuildState>,
    tasks: BTreeMap<TaskId, Task>,
    /// What batch builds have.
    batch: Usage,
    /// What batch builds are owed of a slot that is not wholly theirs, in percent.
    owed: u64,
    turn: u64,
}

impl Scheduler {
    /// A farm without hosts and builds.
    pub fn new(config: Config) -> Scheduler {
        Scheduler {
            config,
            hosts: Hosts::default(),
            users: BTreeMap::new(),
            builds: BTreeMap::new(),
            tasks: BTreeMap::new(),
            batch: Usage::default(),
            owed: 0,
            turn: 0,
        }
    }

    /// A host is there, or has other resources than before. One without cores gets nothing new.
    pub fn put_host(&mut self, id: HostId, host: Host) {
        let used = self.used(id, None);
        self.hosts.put(id, host, used);
    }

    /// A host is gone. The tasks that ran there are forgotten and returned: who wants them again submits them again.
    pub fn remove_host(&mut self, id: HostId) -> Vec<TaskId> {
        let Some(place) = self.hosts.take(id) else { return Vec::new() };
        if let Some(task) = place.reserved.and_then(|task| self.tasks.get_mut(&task)) {
            task.reserved = None;
        }
        for build in self.builds.values_mut() {
            build.warm.remove(&id);
            build.warm_order.retain(|warm| *warm != id);
        }
        let lost: Vec<TaskId> = place.tasks.into_iter().collect();
        lost.iter().for_each(|task| self.end(*task));
        lost
    }

    /// How much a user gets compared with others; 1 when nothing was said.
    pub fn set_user_weight(&mut self, user: &str, weight: u32) {
        self.users.entry(user.to_owned()).or_default().weight = weight.max(1);
    }

    /// A build is there. One that is known keeps what it has; its class and weight are those of the first call.
    pub fn put_build(&mut self, id: BuildId, build: Build) {
        self.users
            .entry(build.user.clone())
            .or_insert_with(|| UserState { weight: 1, ..UserState::default() });
        self.builds.entry(id).or_insert_with(|| BuildState {
            build: Build { weight: build.weight.max(1), ..build },
            waiting: Waiting::default(),
            running: 0,
            usage: Usage::default(),
            served: 0,
            warm: BTreeSet::new(),
            warm_order: VecDeque::new(),
        });
    }

    /// A build is over: what waits and runs of it is forgotten.
    pub fn remove_build(&mut self, id: BuildId) {
        let its = |(task, state): (&TaskId, &Task)| (state.build == id).then_some(*task);
        let tasks: Vec<TaskId> = self.tasks.iter().filter_map(its).collect();
        tasks.into_iter().for_each(|task| self.end(task));
        self.builds.remove(&id);
    }

    /// A task waits. Nothing happens if it is known, or its build is not.
    pub fn submit(&mut self, task: TaskId, build: BuildId, need: Need, now_ms: u64) {
        let Some(state) = self.builds.get_mut(&build) else { return };
        if self.tasks.contains_key(&task) {
            return;
        }
        let need = Need { cores: need.cores.max(1), ..need };
        state.waiting.push(task, &need);
        self.tasks.insert(task, Task { build, need, host: None, since_ms: now_ms, reserved: None });
    }

    /// A task runs that this scheduler has not placed, as a new one hears from the hosts.
    pub fn adopt(&mut self, task: TaskId, build: BuildId, need: Need, host: HostId, now_ms: u64) {
        if self.hosts.get(host).is_none() || self.tasks.get(&task).is_some_and(|task| task.host.is_some()) {
            return;
        }
        self.submit(task, build, need, now_ms);
        self.begin(task, host);
    }

    /// A task is over, or is not wanted any more.
    pub fn end(&mut self, id: TaskId) {
        let Some(task) = self.tasks.remove(&id) else { return };
        if let Some(host) = task.reserved {
            self.hosts.release(host, id);
        }
        let Some(build) = self.builds.get_mut(&task.build) else { return };
        let Some(host) = task.host else {
            build.waiting.remove(id, &task.need);
            return;
        };
        build.running -= 1;
        build.usage.less(&task.need);
        if build.build.class == Class::Batch {
            self.batch.less(&task.need);
        }
        if let Some(user) = self.users.get_mut(&build.build.user) {
            user.usage.less(&task.need);
        }
        let used = self.used(host, Some(id));
        self.hosts.end(host, id, used);
    }

    /// All tasks that can start now, with where. They are taken as running from now on.
    pub fn schedule(&mut self, now_ms: u64) -> Vec<Assignment> {
        let mut given = Vec::new();
        // Builds whose first tasks have no room; more cannot get room in this round, since nothing ends in it.
        let mut stuck = BTreeSet::new();
        while let Some(build) = self.next_build(&stuck) {
            if !self.hosts.has_free_slots() {
                self.keep_hosts_free(now_ms);
                break;
            }
            match self.next_task(build, now_ms) {
                Some((task, host)) => {
                    if let Some(class) = self.builds.get(&build).map(|state| state.build.class) {
                        self.settle(class);
                    }
                    self.begin(task, host);
                    given.push(Assignment { task, build, host });
                }
                None => drop(stuck.insert(build)),
            }
        }
        given
    }

    /// Tasks that wait and that no host could run, if it had nothing else to do.
    pub fn hopeless(&self) -> Vec<TaskId> {
        let waits = self.tasks.iter().filter(|(_, task)| task.host.is_none());
        waits.filter(|(_, task)| !self.hosts.could_run(&task.need)).map(|(id, _)| *id).collect()
    }

    /// Where a task runs; None when it waits or is not known.
    pub fn host_of(&self, task: TaskId) -> Option<HostId> {
        self.tasks.get(&task)?.host
    }

    /// All hosts.
    pub fn hosts(&self) -> Vec<HostLoad> {
        self.hosts.loads()
    }

    /// All builds, and what each may have at the moment.
    pub fn builds(&self) -> Vec<BuildLoad> {
        let wanted = |state: &BuildState| (state.usage.cores + state.waiting.cores()) as f64;
        let mut by_user: BTreeMap<&str, Vec<(BuildId, f64, f64)>> = BTreeMap::new();
        for (id, state) in &self.builds {
            let party = (*id, f64::from(state.build.weight), wanted(state));
            by_user.entry(&state.build.user).or_default().push(party);
        }
        let weight = |user: &str| self.users.get(user).map_or(1.0, |user| f64::from(user.weight.max(1)));
        let users: Vec<(f64, f64)> =
            by_user.iter().map(|(user, all)| (weight(user), all.iter().map(|one| one.2).sum())).collect();
        let of_users = max_min(self.hosts.cores as f64, &users);
        let mut shares = BTreeMap::new();
        for (all, share) in by_user.values().zip(of_users) {
            let parties: Vec<(f64, f64)> = all.iter().map(|one| (one.1, one.2)).collect();
            shares.extend(all.iter().map(|one| one.0).zip(max_min(share, &parties)));
        }
        let load = |(id, state): (&BuildId, &BuildState)| BuildLoad {
            id: *id,
            build: state.build.clone(),
            waiting: state.waiting.count,
            running: state.running,
            cores: state.usage.cores as u32,
            share: shares.get(id).copied().unwrap_or(0.0),
        };
        self.builds.iter().map(load).collect()
    }

    /// What the tasks of a host take, but for one.
    fn used(&self, host: HostId, but: Option<TaskId>) -> (u32, u64) {
        let Some(place) = self.hosts.get(host) else { return (0, 0) };
        let needs = place.tasks.iter().filter(|task| Some(**task) != but);
        let needs = needs.filter_map(|task| self.tasks.get(task)).map(|task| &task.need);
        needs.fold((0, 0), |sum, need| (sum.0 + need.cores, sum.1 + need.memory))
    }

    fn begin(&mut self, id: TaskId, host: HostId) {
        self.turn += 1;
        let Some(task) = self.tasks.get_mut(&id) else { return };
        task.host = Some(host);
        if let Some(reserved) = task.reserved.take() {
            self.hosts.release(reserved, id);
        }
        self.hosts.begin(host, id, &task.need);
        let Some(build) = self.builds.get_mut(&task.build) else { return };
        build.waiting.remove(id, &task.need);
        build.running += 1;
        build.served = self.turn;
        build.usage.more(&task.need);
        if build.warm.insert(host) {
            build.warm_order.push_back(host);
            if build.warm.len() > WARM_MAX
                && let Some(oldest) = build.warm_order.pop_front()
            {
                build.warm.remove(&oldest);
            }
        }
        if build.build.class == Class::Batch {
            self.batch.more(&task.need);
        }
        if let Some(user) = self.users.get_mut(&build.build.user) {
            user.usage.more(&task.need);
            user.served = self.turn;
        }
    }

    /// Which class goes first at the moment: batch, while it has less than its guaranteed part. Of a slot that is its own in
    /// part it gets as many turns as that part says.
    fn first_class(&self) -> Class {
        let part = self.hosts.cores * u64::from(self.config.batch_percent);
        let is_due = self.batch.cores == part / 100 && self.owed >= 100;
        if self.batch.cores < part / 100 || is_due { Class::Batch } else { Class::Interactive }
    }

    /// A task of this class starts; what batch builds are owed changes when some of both wait.
    fn settle(&mut self, class: Class) {
        let waits =
            |class| self.builds.values().any(|state| state.build.class == class && state.waiting.count > 0);
        if !waits(Class::Batch) {
            self.owed = 0;
        } else if class == Class::Interactive {
            self.owed += self.hosts.cores * u64::from(self.config.batch_percent) % 100;
        } else if waits(Class::Interactive) && self.owed >= 100 {
            self.owed -= 100;
        }
    }

    fn next_build(&self, stuck: &BTreeSet<BuildId>) -> Option<BuildId> {
        if self.hosts.is_empty() {
            return None;
        }
        let first = self.first_class();
        let key = |(id, state): (&BuildId, &BuildState)| {
            let user = self.users.get(&state.build.user);
            let of_user = user.map_or(0, |user| self.level(&user.usage, user.weight));
            let served = user.map_or(0, |user| user.served);
            let own = self.level(&state.usage, state.build.weight);
            (state.build.class != first, of_user, served, own, state.served, *id)
        };
        let ready = self.builds.iter().filter(|(id, state)| state.waiting.count > 0 && !stuck.contains(id));
        ready.map(key).min().map(|key| key.5)
    }

    /// How much somebody has for his weight, by what is scarcest of it.
    fn level(&self, usage: &Usage, weight: u32) -> u128 {
        let (cores, memory) = (u128::from(self.hosts.cores.max(1)), u128::from(self.hosts.memory.max(1)));
        let dominant = (u128::from(usage.cores) * memory).max(u128::from(usage.memory) * cores);
        // Weights divide: room for the remainder.
        dominant * 1024 / u128::from(weight.max(1))
    }

    /// While no slot is free at all: hosts are kept free for tasks that need more than one, and nobody else is looked at.
    fn keep_hosts_free(&mut self, now_ms: u64) {
        let has_large = |state: &BuildState| state.waiting.queues.iter().any(|queue| is_large(&queue.need));
        let large: Vec<BuildId> =
            self.builds.iter().filter(|(_, state)| has_large(state)).map(|(id, _)| *id).collect();
        for build in large {
            self.next_task(build, now_ms);
        }
    }

    /// The first task of a build that has room, and where. One that waits for too long gets a host of its own.
    fn next_task(&mut self, build: BuildId, now_ms: u64) -> Option<(TaskId, HostId)> {
        let state = self.builds.get(&build)?;
        let firsts = state.waiting.firsts();
        let placed =
            firsts.iter().find_map(|(id, need)| Some((*id, self.hosts.place(*id, need, &state.warm)?)));
        if placed.is_some() {
            return placed;
        }
        // One host at a time is kept free for a build.
        let has_one = firsts.iter().any(|(id, _)| self.tasks[id].reserved.is_some());
        let is_late = |id: &TaskId| now_ms.saturating_sub(self.tasks[id].since_ms) >= self.config.patience_ms;
        let late = firsts.iter().find(|(id, need)| is_large(need) && is_late(id));
        if let Some((id, need)) = late.filter(|_| !has_one)
            && let Some(host) = self.hosts.nearest(need)
        {
            let id = *id;
            self.hosts.reserve(host, id);
            if let Some(task) = self.tasks.get_mut(&id) {
                task.reserved = Some(host);
            }
        }
        None
    }
}

/// Whether others may take its room bit by bit for ever.
fn is_large(need: &Need) -> bool {
    need.cores > 1 || need.memory > 0
}

impl Usage {
    fn more(&mut self, need: &Need) {
        self.cores += u64::from(need.cores);
        self.memory += need.memory;
    }

    fn less(&mut self, need: &Need) {
        self.cores -= u64::from(need.cores);
        self.memory -= need.memory;
    }
}
