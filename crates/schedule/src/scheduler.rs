//! The scheduler: what waits, what runs, and who is next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::hosts::Hosts;
use crate::order::{Order, Party};
use crate::share::max_min;
use crate::waiting::{Rank, Waiting, is_large};
use crate::{Assignment, Build, BuildId, BuildLoad, Class, Config, Host, HostId, HostLoad, Need, TaskId};

/// Of each build so many hosts are remembered that have run its tasks.
const WARM_MAX: usize = 64;
/// While no slot is free, it is looked this seldom whether a large task has waited for too long, milliseconds.
const LATE_LOOK_MS: u64 = 100;

#[derive(Debug)]
struct Task {
    build: BuildId,
    need: Need,
    /// Where it runs; None while it waits.
    host: Option<HostId>,
    since_ms: u64,
    rank: Rank,
    /// A host that is kept free for it.
    reserved: Option<HostId>,
}

/// What somebody has at the moment.
#[derive(Debug, Default, Clone, Copy)]
struct Usage {
    cores: u64,
    memory: u64,
}

#[derive(Debug)]
struct BuildState {
    build: Build,
    /// The number of its user.
    user: usize,
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
    users: Vec<UserState>,
    user_numbers: BTreeMap<String, usize>,
    builds: BTreeMap<BuildId, BuildState>,
    tasks: BTreeMap<TaskId, Task>,
    /// Builds with waiting tasks, and who is next.
    order: Order,
    /// Of these, such with tasks that need more than a slot.
    large: BTreeSet<BuildId>,
    looked_ms: u64,
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
            users: Vec::new(),
            user_numbers: BTreeMap::new(),
            builds: BTreeMap::new(),
            tasks: BTreeMap::new(),
            order: Order::default(),
            large: BTreeSet::new(),
            looked_ms: 0,
            batch: Usage::default(),
            owed: 0,
            turn: 0,
        }
    }

    /// A host is there, or has other resources than before. One without cores gets nothing new.
    pub fn put_host(&mut self, id: HostId, host: Host) {
        self.hosts.put(id, host);
        self.list_all();
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
        self.list_all();
        lost
    }

    /// How much a user gets compared with others; 1 when nothing was said.
    pub fn set_user_weight(&mut self, user: &str, weight: u32) {
        let user = self.user(user);
        self.users[user].weight = weight.max(1);
        self.list_all();
    }

    fn user(&mut self, name: &str) -> usize {
        if let Some(number) = self.user_numbers.get(name) {
            return *number;
        }
        self.users.push(UserState { weight: 1, ..UserState::default() });
        self.user_numbers.insert(name.to_owned(), self.users.len() - 1);
        self.users.len() - 1
    }

    /// A build is there. One that is known keeps what it has; its class and weight are those of the first call.
    pub fn put_build(&mut self, id: BuildId, build: Build) {
        let user = self.user(&build.user);
        self.builds.entry(id).or_insert_with(|| BuildState {
            build: Build { weight: build.weight.max(1), ..build },
            user,
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
        if let Some(state) = self.builds.remove(&id) {
            self.order.remove(id, state.user, state.build.class);
            self.large.remove(&id);
        }
    }

    /// A task waits. Nothing happens if it is known, or its build is not.
    pub fn submit(&mut self, task: TaskId, build: BuildId, need: Need, now_ms: u64) {
        self.submit_expected(task, build, need, 0, now_ms);
    }

    /// The same of one that is expected to take so long, milliseconds; 0: not known.
    pub fn submit_expected(
        &mut self,
        task: TaskId,
        build: BuildId,
        need: Need,
        expected_ms: u32,
        now_ms: u64,
    ) {
        let Some(state) = self.builds.get_mut(&build) else { return };
        if self.tasks.contains_key(&task) {
            return;
        }
        let need = Need { cores: need.cores.max(1), ..need };
        let rank = state.waiting.push(task, &need, expected_ms);
        self.tasks.insert(task, Task { build, need, host: None, since_ms: now_ms, rank, reserved: None });
        self.list(build);
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
        match task.host {
            None => build.waiting.remove(task.rank, &task.need),
            Some(host) => {
                build.running -= 1;
                build.usage.less(&task.need);
                if build.build.class == Class::Batch {
                    self.batch.less(&task.need);
                }
                self.users[build.user].usage.less(&task.need);
                self.hosts.end(host, id, &task.need);
            }
        }
        self.list(task.build);
    }

    /// All tasks that can start now, with where. They are taken as running from now on.
    pub fn schedule(&mut self, now_ms: u64) -> Vec<Assignment> {
        let mut given = Vec::new();
        // Builds whose first tasks have no room; more cannot get room in this round, since nothing ends in it.
        let mut stuck = Vec::new();
        while let Some(build) = self.next_build() {
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
                None => {
                    self.order.pass_over(build);
                    stuck.push(build);
                }
            }
        }
        stuck.into_iter().for_each(|build| self.list(build));
        given
    }

    /// Tasks that wait and that no host could run, if it had nothing else to do.
    pub fn hopeless(&self) -> Vec<TaskId> {
        let of_build = |state: &'_ BuildState| {
            state.waiting.of_need(|need| !self.hosts.could_run(need)).collect::<Vec<_>>()
        };
        self.builds.values().flat_map(of_build).collect()
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
        let wanted = |state: &BuildState| (state.usage.cores + state.waiting.cores) as f64;
        let mut by_user: BTreeMap<&str, Vec<(BuildId, f64, f64)>> = BTreeMap::new();
        for (id, state) in &self.builds {
            let party = (*id, f64::from(state.build.weight), wanted(state));
            by_user.entry(&state.build.user).or_default().push(party);
        }
        let weight = |user: &str| {
            let number = self.user_numbers.get(user);
            number.map_or(1.0, |number| f64::from(self.users[*number].weight.max(1)))
        };
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
            waiting_cores: state.waiting.cores,
            running: state.running,
            cores: state.usage.cores as u32,
            share: shares.get(id).copied().unwrap_or(0.0),
        };
        self.builds.iter().map(load).collect()
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
        build.waiting.remove(task.rank, &task.need);
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
        let user = &mut self.users[build.user];
        user.usage.more(&task.need);
        user.served = self.turn;
        let build = task.build;
        self.list(build);
    }

    /// Puts a build where it belongs in the order, and its user.
    fn list(&mut self, id: BuildId) {
        let Some(state) = self.builds.get(&id) else { return };
        let user = &self.users[state.user];
        let party = |usage: &Usage, weight, served| Party { level: self.level(usage, weight), served };
        let of_user = party(&user.usage, user.weight, user.served);
        let own = party(&state.usage, state.build.weight, state.served);
        let own = (state.waiting.count > 0).then_some(own);
        let (number, class, has_large) = (state.user, state.build.class, state.waiting.has_large());
        self.order.put(id, number, class, own);
        self.order.put_user(number, of_user);
        match has_large {
            true => self.large.insert(id),
            false => self.large.remove(&id),
        };
    }

    /// What the farm has, or a weight, has changed: all levels with it.
    fn list_all(&mut self) {
        let all: Vec<BuildId> = self.builds.keys().copied().collect();
        all.into_iter().for_each(|build| self.list(build));
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
        if !self.order.waits(Class::Batch) {
            self.owed = 0;
        } else if class == Class::Interactive {
            self.owed += self.hosts.cores * u64::from(self.config.batch_percent) % 100;
        } else if self.order.waits(Class::Interactive) && self.owed >= 100 {
            self.owed -= 100;
        }
    }

    fn next_build(&self) -> Option<BuildId> {
        if self.hosts.is_empty() { None } else { self.order.next(self.first_class()) }
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
        if self.large.is_empty() || now_ms < self.looked_ms + LATE_LOOK_MS {
            return;
        }
        self.looked_ms = now_ms;
        let large: Vec<BuildId> = self.large.iter().copied().collect();
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
