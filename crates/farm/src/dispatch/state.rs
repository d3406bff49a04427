//! The state, and the rules by which it changes.

use std::collections::{BTreeMap, BTreeSet};

use hayloft_schedule::{Build, BuildId, Class, Config, Host, HostId, Need, Scheduler, TaskId};

use super::status::{BuildStatus, HostStatus, Status};
use crate::protocol::{AgentBeat, BuildMessage, ClientBeat, Granted, NeedMessage, SILENCE, TaskKey};

/// A submitter that was not heard for so long is gone, milliseconds.
const CLIENT_SILENCE_MS: u64 = 5_000;
/// A slot that was given and that its submitter does not know of after so long is told again, milliseconds.
const TELL_AGAIN_MS: u64 = 1_000;
/// How long agents have to be heard before a task is told that none could run it, milliseconds.
const HOPELESS_MS: u64 = 2_000;

/// What is to be said to a submitter.
#[derive(Debug, Clone, PartialEq)]
pub enum Say {
    /// This task has a slot at this agent.
    Granted(TaskKey, String, Granted),
    /// No agent could run this task, for this reason.
    Hopeless(TaskKey, String),
}

#[derive(Debug)]
struct Agent {
    id: HostId,
    last: AgentBeat,
    heard_ms: u64,
}

#[derive(Debug)]
struct Client {
    build: BuildId,
    heard_ms: u64,
}

#[derive(Debug)]
struct Task {
    id: TaskId,
    /// The agent that it was given to, and when it was told so.
    placed: Option<(String, u64)>,
    /// Its agent has said that it runs.
    is_running: bool,
}

/// See the room's documentation.
#[derive(Debug)]
pub struct Dispatch {
    scheduler: Scheduler,
    agents: BTreeMap<String, Agent>,
    names: BTreeMap<HostId, String>,
    clients: BTreeMap<String, Client>,
    builds: BTreeMap<(String, String, bool), BuildId>,
    tasks: BTreeMap<TaskKey, Task>,
    /// Those that have a slot, by its agent.
    placed: BTreeMap<String, BTreeSet<TaskKey>>,
    keys: BTreeMap<TaskId, TaskKey>,
    last_id: u64,
    begun_ms: u64,
}

impl Dispatch {
    /// Knows nobody yet.
    pub fn new(config: Config, now_ms: u64) -> Dispatch {
        Dispatch {
            scheduler: Scheduler::new(config),
            agents: BTreeMap::new(),
            names: BTreeMap::new(),
            clients: BTreeMap::new(),
            builds: BTreeMap::new(),
            tasks: BTreeMap::new(),
            placed: BTreeMap::new(),
            keys: BTreeMap::new(),
            last_id: 0,
            begun_ms: now_ms,
        }
    }

    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// An agent has said what it has and what runs there.
    pub fn agent(&mut self, beat: AgentBeat, now_ms: u64) {
        if beat.goes {
            self.lose(&beat.agent);
            return;
        }
        let known = self.agents.get(&beat.agent);
        if known.is_some_and(|agent| agent.last.beat >= beat.beat) {
            return;
        }
        let host = Host {
            cores: if beat.draining { 0 } else { beat.slots },
            memory: beat.memory,
            labels: beat.labels.iter().cloned().collect(),
        };
        let is_same = known.is_some_and(|agent| {
            let last = &agent.last;
            (last.slots, last.memory, &last.labels, last.draining)
                == (beat.slots, beat.memory, &beat.labels, beat.draining)
        });
        let id = match known {
            Some(agent) => agent.id,
            None => HostId(self.new_id()),
        };
        if !is_same {
            self.scheduler.put_host(id, host);
        }
        self.names.insert(id, beat.agent.clone());
        let running: BTreeSet<TaskKey> = beat.running.iter().filter_map(|task| task.key.clone()).collect();
        let is_over =
            |key: &TaskKey| !running.contains(key) && self.tasks.get(key).is_some_and(|task| task.is_running);
        let there = self.placed.get(&beat.agent).into_iter().flatten();
        let over: Vec<TaskKey> = there.filter(|key| is_over(key)).cloned().collect();
        over.iter().for_each(|key| self.over(key));
        for task in &beat.running {
            if let (Some(key), Some(build)) = (&task.key, &task.build) {
                self.adopt(key, build, task.need.as_ref(), &beat.agent, id, now_ms);
                if let Some(task) = self.tasks.get_mut(key) {
                    task.is_running = true;
                }
            }
        }
        self.agents.insert(beat.agent.clone(), Agent { id, last: beat, heard_ms: now_ms });
    }

    /// A submitter has said what it wants: all of it, or with `is_whole` false something more.
    pub fn client(&mut self, beat: ClientBeat, is_whole: bool, now_ms: u64) -> Vec<Say> {
        if beat.goes {
            self.forget(&beat.client);
            return Vec::new();
        }
        let Some(build) = &beat.build else { return Vec::new() };
        let build = self.build(build);
        self.clients.insert(beat.client.clone(), Client { build, heard_ms: now_ms });
        let key_of = |task: u64| TaskKey { client: beat.client.clone(), task };
        let mut say = Vec::new();
        for wanted in &beat.tasks {
            let key = key_of(wanted.task);
            if !wanted.agent.is_empty() {
                if let (Some(message), Some(agent)) = (&beat.build, self.agents.get(&wanted.agent)) {
                    let (id, message) = (agent.id, message.clone());
                    self.adopt(&key, &message, wanted.need.as_ref(), &wanted.agent, id, now_ms);
                }
                continue;
            }
            match self.tasks.get_mut(&key) {
                None => {
                    let need = self.need(wanted.need.as_ref());
                    let id = self.insert(&key, None);
                    self.scheduler.submit_expected(id, build, need, wanted.expected_ms, now_ms);
                }
                Some(Task { placed: Some((agent, told_ms)), is_running: false, .. })
                    if now_ms.saturating_sub(*told_ms) >= TELL_AGAIN_MS =>
                {
                    *told_ms = now_ms;
                    let agent = agent.clone();
                    say.extend(self.granted(&key, &agent));
                }
                Some(_) => {}
            }
        }
        if is_whole {
            let wanted: BTreeSet<u64> = beat.tasks.iter().map(|task| task.task).collect();
            let mine = self.tasks.range(key_of(0)..=key_of(u64::MAX));
            let over: Vec<TaskKey> = mine
                .filter(|(key, task)| !task.is_running && !wanted.contains(&key.task))
                .map(|(key, _)| key.clone())
                .collect();
            over.iter().for_each(|key| self.over(key));
        }
        say
    }

    /// A try is over or not wanted any more.
    pub fn over(&mut self, key: &TaskKey) {
        if let Some(task) = self.tasks.remove(key) {
            self.keys.remove(&task.id);
            self.scheduler.end(task.id);
            if let Some(there) = task.placed.and_then(|(agent, _)| self.placed.get_mut(&agent)) {
                there.remove(key);
            }
        }
    }

    /// Gives free slots away.
    pub fn schedule(&mut self, now_ms: u64) -> Vec<Say> {
        let mut say = Vec::new();
        for assignment in self.scheduler.schedule(now_ms) {
            let (Some(key), Some(agent)) =
                (self.keys.get(&assignment.task), self.names.get(&assignment.host))
            else {
                continue;
            };
            let (key, agent) = (key.clone(), agent.clone());
            if let Some(task) = self.tasks.get_mut(&key) {
                task.placed = Some((agent.clone(), now_ms));
                self.placed.entry(agent.clone()).or_default().insert(key.clone());
            }
            say.extend(self.granted(&key, &agent));
        }
        say
    }

    /// Time has passed: who was silent for too long is gone, and what cannot be run is told so.
    pub fn tick(&mut self, now_ms: u64) -> Vec<Say> {
        let silence = SILENCE.as_millis() as u64;
        let silent = |heard_ms: u64, limit: u64| now_ms.saturating_sub(heard_ms) > limit;
        let agents: Vec<String> = self
            .agents
            .iter()
            .filter(|(_, agent)| silent(agent.heard_ms, silence))
            .map(|(id, _)| id.clone())
            .collect();
        agents.iter().for_each(|agent| self.lose(agent));
        let clients: Vec<String> = self
            .clients
            .iter()
            .filter(|(_, client)| silent(client.heard_ms, CLIENT_SILENCE_MS))
            .map(|(id, _)| id.clone())
            .collect();
        clients.iter().for_each(|client| self.forget(client));
        if now_ms.saturating_sub(self.begun_ms) < HOPELESS_MS {
            return Vec::new();
        }
        let hopeless = self.scheduler.hopeless();
        let keys: Vec<TaskKey> = hopeless.iter().filter_map(|id| self.keys.get(id).cloned()).collect();
        keys.into_iter()
            .map(|key| {
                self.over(&key);
                let reason =
                    "no host of the farm has the volume, the labels, the slots and the memory for it, \
                              and takes tasks of this user"
                        .to_owned();
                Say::Hopeless(key, reason)
            })
            .collect()
    }

    /// For `hayloft farm status`.
    pub fn status(&self, now_ms: u64) -> Status {
        let loads = self.scheduler.hosts();
        let load = |id: HostId| loads.iter().find(|load| load.id == id);
        let hosts = self.agents.values().map(|agent| HostStatus {
            host: agent.last.host.clone(),
            agent: agent.last.agent.clone(),
            slots: agent.last.slots,
            busy: load(agent.id).map_or(0, |load| load.busy),
            tasks: load(agent.id).map_or(0, |load| load.tasks),
            memory_bytes: agent.last.memory,
            labels: agent.last.labels.clone(),
            dispatches: agent.last.dispatches,
            draining: agent.last.draining,
            silent_ms: now_ms.saturating_sub(agent.heard_ms),
        });
        let name = |id: BuildId| self.builds.iter().find(|(_, build)| **build == id).map(|(key, _)| &key.1);
        let builds = self.scheduler.builds().into_iter().map(|load| BuildStatus {
            build: name(load.id).cloned().unwrap_or_default(),
            user: load.build.user,
            batch: load.build.class == Class::Batch,
            weight: load.build.weight,
            running: load.running,
            waiting: load.waiting,
            waiting_slots: load.waiting_cores,
            slots: load.cores,
            share: load.share,
        });
        let (hosts, builds) = (hosts.collect(), builds.collect());
        Status { hosts, builds, dispatches_since_ms: now_ms.saturating_sub(self.begun_ms) }
    }

    fn granted(&self, key: &TaskKey, agent: &str) -> Option<Say> {
        let last = &self.agents.get(agent)?.last;
        let granted = Granted { host: last.host.clone(), beat: last.beat, lease: last.lease };
        Some(Say::Granted(key.clone(), agent.to_owned(), granted))
    }

    fn insert(&mut self, key: &TaskKey, placed: Option<(String, u64)>) -> TaskId {
        let id = TaskId(self.new_id());
        if let Some((agent, _)) = &placed {
            self.placed.entry(agent.clone()).or_default().insert(key.clone());
        }
        self.tasks.insert(key.clone(), Task { id, placed, is_running: false });
        self.keys.insert(id, key.clone());
        id
    }

    /// A task has a slot that this dispatcher has not given.
    fn adopt(
        &mut self,
        key: &TaskKey,
        build: &BuildMessage,
        need: Option<&NeedMessage>,
        agent: &str,
        host: HostId,
        now_ms: u64,
    ) {
        if let Some(task) = self.tasks.get(key) {
            if task.placed.as_ref().is_some_and(|(at, _)| at == agent) {
                return;
            }
            self.over(key);
        }
        let build = self.build(build);
        let need = self.need(need);
        let id = self.insert(key, Some((agent.to_owned(), now_ms)));
        self.scheduler.adopt(id, build, need, host, now_ms);
    }

    fn build(&mut self, message: &BuildMessage) -> BuildId {
        let key = (message.user.clone(), message.name.clone(), message.batch);
        let id = match self.builds.get(&key) {
            Some(id) => *id,
            None => {
                let id = BuildId(self.new_id());
                self.builds.insert(key, id);
                id
            }
        };
        let class = if message.batch { Class::Batch } else { Class::Interactive };
        self.scheduler
            .put_build(id, Build { user: message.user.clone(), class, weight: message.weight.max(1) });
        id
    }

    fn need(&self, need: Option<&NeedMessage>) -> Need {
        let Some(need) = need else { return Need::default() };
        Need {
            cores: need.cores.max(1),
            memory: need.memory,
            labels: need.labels.iter().cloned().collect(),
            not: need.not.iter().filter_map(|agent| self.agents.get(agent)).map(|agent| agent.id).collect(),
        }
    }

    fn lose(&mut self, agent: &str) {
        let Some(gone) = self.agents.remove(agent) else { return };
        self.names.remove(&gone.id);
        self.placed.remove(agent);
        for task in self.scheduler.remove_host(gone.id) {
            if let Some(key) = self.keys.remove(&task) {
                self.tasks.remove(&key);
            }
        }
    }

    /// A submitter is gone. What runs of it ends at its agent, which says so.
    fn forget(&mut self, client: &str) {
        let Some(gone) = self.clients.remove(client) else { return };
        let key = |task| TaskKey { client: client.to_owned(), task };
        let mine = self.tasks.range(key(0)..=key(u64::MAX));
        let over: Vec<TaskKey> =
            mine.filter(|(_, task)| !task.is_running).map(|(key, _)| key.clone()).collect();
        over.iter().for_each(|key| self.over(key));
        let is_used = self.clients.values().any(|client| client.build == gone.build);
        let load = self.scheduler.builds().into_iter().find(|load| load.id == gone.build);
        if !is_used && load.is_none_or(|load| load.running == 0) {
            self.scheduler.remove_build(gone.build);
            self.builds.retain(|_, build| *build != gone.build);
        }
    }
}
