//! The tasks of this host: what is taken, who may, and until when.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::BytesMut;
use prost::Message;
use tokio::sync::mpsc;

use super::leases::Leases;
use super::policy::{Policy, RunAs};
use super::roots::{InRoot, InUse, Plan, Roots};
use super::shortage::Shortage;
use super::task::{self, Told};
use crate::broker::Broker;
use crate::execution::{Event, Execution, Report, Spawner, message_in};
use crate::place::{self, Place, VolumeMount};
use crate::protocol::{
    BuildMessage, End, Ended, NeedMessage, Record, RunningTask, Spec, Start, StartPart, TaskKey, ToAgent,
    ToClient, agent, client, client_subject,
};

/// Starts of which not all parts have come; beyond it the oldest is forgotten.
const PARTIAL: usize = 256;

struct Running {
    key: TaskKey,
    build: BuildMessage,
    need: NeedMessage,
    told: mpsc::UnboundedSender<Told>,
    /// Its processes have ended: it takes no slot.
    is_over: bool,
    /// Its submitter has asked it to end: it has not failed for want of anything.
    was_asked: bool,
    /// Its root is being made; what becomes of it then.
    start: Arc<Mutex<Starting>>,
    begun: Instant,
    /// What its record is read from, and which folder of this host is another one at the submitter's.
    record: Option<(File, Option<(PathBuf, PathBuf)>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Starting {
    Waits,
    IsStarted,
    /// It is not to be started any more.
    IsEnded,
}

/// See the module's documentation.
pub(super) struct HostTasks {
    pub id: String,
    pub slots: u32,
    pub memory: u64,
    pub policy: Policy,
    pub mounts: Vec<VolumeMount>,
    broker: Broker,
    spawner: Arc<Spawner>,
    roots: Roots,
    /// For tasks whose roots could not be made.
    failed: mpsc::UnboundedSender<Option<Event>>,
    tasks: BTreeMap<u64, Running>,
    numbers: BTreeMap<TaskKey, u64>,
    leases: Leases,
    partial: VecDeque<(TaskKey, Vec<Option<StartPart>>)>,
    last: u64,
    shortage: Shortage,
    /// The agent ends.
    is_ending: bool,
}

impl HostTasks {
    pub(super) fn new(
        id: String,
        config: &super::AgentConfig,
        broker: Broker,
        spawner: Spawner,
        failed: mpsc::UnboundedSender<Option<Event>>,
    ) -> HostTasks {
        HostTasks {
            id,
            slots: config.slots,
            memory: config.memory,
            policy: config.policy.clone(),
            mounts: Vec::new(),
            broker,
            spawner: Arc::new(spawner),
            roots: Roots::new(config.arguments.clone()),
            failed,
            tasks: BTreeMap::new(),
            numbers: BTreeMap::new(),
            leases: Leases::new(config.lease),
            partial: VecDeque::new(),
            last: 0,
            shortage: Shortage::default(),
            is_ending: false,
        }
    }

    /// What runs, for a beat.
    pub(super) fn running(&self) -> Vec<RunningTask> {
        let live = self.tasks.values().filter(|task| !task.is_over);
        live.map(|task| RunningTask {
            key: Some(task.key.clone()),
            build: Some(task.build.clone()),
            need: Some(task.need.clone()),
        })
        .collect()
    }

    /// Submitters of what is known here or runs still, with the numbers of their tries.
    pub(super) fn submitters(&self) -> BTreeMap<&str, Vec<u64>> {
        let mut all: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        let live = self.tasks.values().filter(|task| !task.is_over).map(|task| &task.key);
        for key in self.numbers.keys().chain(live) {
            let its = all.entry(&key.client).or_default();
            if !its.contains(&key.task) {
                its.push(key.task);
            }
        }
        all
    }

    /// A beat is about to be sent; the process that starts tasks lives on.
    pub(super) fn beats(&mut self, beat: u64) -> io::Result<()> {
        self.leases.beats(beat);
        self.roots.tidy();
        self.shortage.look();
        // It ends all tasks before anybody may take them for lost, should this process hang.
        self.spawner.live(self.leases.length().mul_f64(0.75))
    }

    /// The broker says that a submitter is not there.
    pub(super) fn unheard(&mut self, client: &str) {
        self.leases.unheard(client);
    }

    /// Ends tasks whose submitters were silent for too long, or have gone.
    pub(super) fn enforce(&mut self) {
        for client in self.leases.over() {
            let its: Vec<TaskKey> = self.numbers.keys().filter(|key| key.client == client).cloned().collect();
            if !its.is_empty() {
                tracing::warn!("no word of {client}: its tasks end ({})", its.len());
            }
            its.iter().for_each(|key| self.forget(key));
        }
    }

    /// Takes no more tasks.
    pub(super) fn refuse(&mut self) {
        self.is_ending = true;
    }

    /// Whether nothing runs here, and all ends were heard.
    pub(super) fn is_done(&self) -> bool {
        self.is_idle() && self.numbers.is_empty()
    }

    /// Ends all tasks; they may run elsewhere.
    pub(super) fn end_all(&mut self) {
        let all: Vec<u64> = self.tasks.keys().copied().collect();
        all.iter().for_each(|number| self.end(*number, None));
    }

    pub(super) fn is_idle(&self) -> bool {
        self.tasks.values().all(|task| task.is_over)
    }

    /// A message of a submitter.
    pub(super) fn receive(&mut self, message: ToAgent) {
        for task in message.heard {
            self.forget(&TaskKey { client: message.client.clone(), task });
        }
        let key = TaskKey { client: message.client, task: message.task };
        let number = self.numbers.get(&key).copied();
        let tell = |told: Told| {
            if let Some(task) = number.and_then(|number| self.tasks.get(&number)) {
                let _ = task.told.send(told);
            }
        };
        match message.body {
            Some(agent::Body::Start(part)) if number.is_none() => self.start_part(key, part),
            Some(agent::Body::Start(_)) => tell(Told::StartedAgain),
            Some(agent::Body::Data(data)) => tell(Told::Data(data)),
            Some(agent::Body::Taken(taken)) => tell(Told::Taken(taken)),
            Some(agent::Body::Signal(signal)) => {
                if let Some(number) = number {
                    self.signal(number, signal);
                }
            }
            Some(agent::Body::End(_)) => match number {
                Some(number) => self.end(number, None),
                // A start that was on its way is not to be heard any more.
                None => self.partial.retain(|(partial, _)| *partial != key),
            },
            Some(agent::Body::Echo(beat)) => drop(self.leases.extend(&key.client, beat)),
            Some(agent::Body::Drain(_)) | None => {}
        }
    }

    fn start_part(&mut self, key: TaskKey, part: StartPart) {
        let count = part.count.clamp(1, 1 << 16) as usize;
        let at = part.at as usize;
        if count == 1 {
            return self.start(key, part.bytes);
        }
        if !self.partial.iter().any(|(partial, _)| *partial == key) {
            if self.partial.len() == PARTIAL {
                self.partial.pop_front();
            }
            self.partial.push_back((key.clone(), vec![None; count]));
        }
        let Some(index) = self.partial.iter().position(|(partial, _)| *partial == key) else { return };
        let parts = &mut self.partial[index].1;
        if at >= parts.len() || count != parts.len() {
            return;
        }
        parts[at] = Some(part);
        if parts.iter().all(Option::is_some) {
            let Some((_, parts)) = self.partial.remove(index) else { return };
            let mut bytes = BytesMut::new();
            parts.into_iter().flatten().for_each(|part| bytes.extend_from_slice(&part.bytes));
            self.start(key, bytes.freeze());
        }
    }

    fn start(&mut self, key: TaskKey, bytes: bytes::Bytes) {
        let Ok(start) = Start::decode(bytes) else { return };
        if let Err((end, reason)) = self.try_start(&key, start) {
            tracing::info!("a task of {} does not run here: {reason}", key.client);
            let ended = Ended { end: end as i32, reason, ..Ended::default() };
            let body = Some(client::Body::Ended(ended));
            let message = ToClient { task: key.task, agent: self.id.clone(), body };
            self.broker.say(client_subject(&key.client, "m"), &message);
        }
    }

    fn try_start(&mut self, key: &TaskKey, start: Start) -> Result<(), (End, String)> {
        let lost = |what: &str, error: io::Error| (End::Lost, format!("{what}: {error}"));
        let refused = |reason: String| (End::Refused, reason);
        let (Some(spec), Some(build), Some(need)) = (start.spec, start.build, start.need) else {
            return Err(refused(
                "the task is not whole: submitter and agent are of different versions".into(),
            ));
        };
        if self.is_ending {
            return Err(refused("its agent ends".to_owned()));
        }
        if !self.leases.extend(&key.client, start.beat) {
            return Err((End::Busy, "the slot was given too long ago".to_owned()));
        }
        let live = || self.tasks.values().filter(|task| !task.is_over);
        if live().any(|task| task.key == *key) {
            return Err((End::Busy, "it is just being ended here".to_owned()));
        }
        let used =
            live().map(|task| &task.need).fold((0, 0), |sum, need| (sum.0 + need.cores, sum.1 + need.memory));
        if used.0 + need.cores > self.slots || used.1 + need.memory > self.memory {
            return Err((End::Busy, "all slots are taken".to_owned()));
        }
        let as_whom = self.policy.run_as(&spec.user, spec.uid).map_err(refused)?;
        let mount =
            VolumeMount { volume: spec.volume.clone(), point: path(&spec.point), inner: path(&spec.inner) };
        let theirs = Place { mount, directory: path(&spec.directory) };
        let found = place::find(&self.mounts, &theirs)
            .ok_or_else(|| refused("the volume of its folder is not mounted on this host".to_owned()))?;
        let mut execution = Execution {
            command: spec.command.clone(),
            environment: spec.environment.clone(),
            directory: bytes(&found.directory),
            umask: spec.umask,
            ..Execution::default()
        };
        let in_root = self.in_root(&spec, &build, need.memory, &theirs, &found, &as_whom)?;
        if in_root.is_some() {
            execution.directory = spec.directory.clone();
        }
        // Its paths are as they are at the submitter's where that can be: there is such a folder, and it may be covered. That is for
        // the task's own process to find out: the folder may be on a mount that does not answer.
        let shown = found.bind.clone();
        if let Some((from, to)) = found.bind
            && in_root.is_none()
            && self.spawner.namespaces
        {
            (execution.bind_from, execution.bind_to) = (bytes(&from), bytes(&to));
            execution.bound_directory = spec.directory.clone();
        }
        if spec.records && (in_root.is_some() || !self.spawner.namespaces) {
            return Err(refused(
                "it cannot be recorded here: the agent does not run as root, or the task in a build root"
                    .into(),
            ));
        }
        execution.records = spec.records;
        if let RunAs::User(user) = as_whom {
            execution.switches = true;
            (execution.uid, execution.gid, execution.groups) = (user.uid, user.gid, user.groups);
        } else {
            execution.gid = spec.gid;
        }
        let (standard, pipes) =
            task::pipes(spec.has_input, spec.merged).map_err(|error| lost("make pipes", error))?;
        self.last += 1;
        let number = self.last;
        let is_at_once = in_root.is_none();
        let state = if is_at_once { Starting::IsStarted } else { Starting::Waits };
        let start = Arc::new(Mutex::new(state));
        let (told, hears) = mpsc::unbounded_channel();
        let mut record = None;
        let attend = task::attend(key.clone(), self.id.clone(), self.broker.clone(), pipes, hears);
        if let Some(how) = in_root {
            let (spawner, failed) = (Arc::clone(&self.spawner), self.failed.clone());
            let begin =
                move |execution: &Execution| spawner.start(number, execution, standard, true).map(drop);
            let starts = start_in_root(self.roots.clone(), how, execution, begin, Arc::clone(&start));
            tokio::spawn(async move {
                let in_use = starts.await.unwrap_or_else(|failure| {
                    let report = Report { failure, errno: libc::EIO, is_whole: true, ..Report::default() };
                    let _ =
                        failed.send(Some(Event { task: number, report: Some(report), namespaces: false }));
                    None
                });
                attend.await;
                drop(in_use);
            });
        } else {
            let memory = self
                .spawner
                .start(number, &execution, standard, false)
                .map_err(|error| lost("start a process", error))?;
            record = memory.map(|memory| (memory, shown));
            tokio::spawn(attend);
        }
        let begun = Instant::now();
        let task = Running {
            key: key.clone(),
            build,
            need,
            told,
            is_over: false,
            was_asked: false,
            start,
            begun,
            record,
        };
        self.tasks.insert(number, task);
        self.numbers.insert(key.clone(), number);
        Ok(())
    }

    /// How it runs in a build root, if it is to: with the submitter's mount at its place there, layers as this host has them.
    fn in_root(
        &self,
        spec: &Spec,
        build: &BuildMessage,
        memory: u64,
        theirs: &Place,
        found: &place::Found,
        as_whom: &RunAs,
    ) -> Result<Option<InRoot>, (End, String)> {
        if spec.layers.is_empty() {
            return Ok(None);
        }
        let layer = |layer: &Vec<u8>| {
            let given = path(layer);
            let (Some(folder), Some(name)) =
                (given.parent().filter(|_| given.is_absolute()), given.file_name())
            else {
                return Ok(layer.clone());
            };
            let theirs = Place { mount: theirs.mount.clone(), directory: folder.to_owned() };
            let found = place::find(&self.mounts, &theirs);
            found.map(|found| bytes(&found.directory.join(name))).ok_or_else(|| {
                (End::Refused, format!("the layer {} is on no volume of this host", given.display()))
            })
        };
        let layers = spec.layers.iter().map(layer).collect::<Result<Vec<_>, _>>()?;
        let same = (theirs.mount.point.clone(), theirs.mount.point.clone());
        let (from, to) = found.bind.clone().unwrap_or(same);
        Ok(Some(InRoot {
            plan: Plan {
                build: (build.user.clone(), build.name.clone()),
                layers,
                bind: (bytes(&from), bytes(&to)),
            },
            isolated: spec.isolated,
            user: match as_whom {
                RunAs::User(user) => format!("{}:{}", user.uid, user.gid),
                RunAs::Agent => "root".to_owned(),
            },
            memory,
        }))
    }

    /// A task's processes have ended; the key, as its slot is free.
    pub(super) fn ended(&mut self, number: u64, report: Option<Report>) -> Option<TaskKey> {
        let task = self.tasks.get_mut(&number)?;
        task.is_over = true;
        let record = task.record.take().filter(|_| report.is_some());
        let record = record
            .and_then(|(memory, shown)| Some(message_in::<Record>(&memory).ok()?.shown(shown.as_ref())));
        let failed = !task.was_asked && report.as_ref().is_some_and(Report::has_failed);
        let short = if failed { self.shortage.since(task.begun) } else { None };
        let _ = task.told.send(match (report, short) {
            (Some(report), Some(short)) => Told::Short(report, short),
            (report, _) => Told::Over(report, record),
        });
        let key = task.key.clone();
        if !self.numbers.contains_key(&key) {
            self.tasks.remove(&number);
        }
        Some(key)
    }

    /// Nobody wants to hear of a task any more. What still runs ends.
    fn forget(&mut self, key: &TaskKey) {
        let Some(number) = self.numbers.remove(key) else { return };
        let Some(task) = self.tasks.get(&number) else { return };
        let _ = task.told.send(Told::Forget);
        if task.is_over {
            self.tasks.remove(&number);
        } else {
            self.end(number, None);
        }
    }

    /// Ends a task; one whose root is still being made as if by this signal.
    fn end(&self, number: u64, signal: Option<i32>) {
        let Some(task) = self.tasks.get(&number) else { return };
        let mut start = task.start.lock().unwrap_or_else(PoisonError::into_inner);
        match *start {
            Starting::IsStarted => drop(self.spawner.end(number)),
            Starting::IsEnded => {}
            Starting::Waits => {
                *start = Starting::IsEnded;
                let report = signal.map(|signal| Report { signal, is_whole: true, ..Report::default() });
                let _ = self.failed.send(Some(Event { task: number, report, namespaces: false }));
            }
        }
    }

    fn signal(&mut self, number: u64, signal: i32) {
        let is_end = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT].contains(&signal);
        let Some(task) = self.tasks.get_mut(&number) else { return };
        task.was_asked |= is_end;
        let waits = *task.start.lock().unwrap_or_else(PoisonError::into_inner) == Starting::Waits;
        if !waits {
            let _ = self.spawner.signal(number, signal);
        } else if is_end {
            self.end(number, Some(signal));
        }
    }
}

/// Starts a task once its root is there, unless it was ended meanwhile; the root, as long as the task is there.
async fn start_in_root(
    roots: Roots,
    how: InRoot,
    execution: Execution,
    start: impl FnOnce(&Execution) -> io::Result<()>,
    state: Arc<Mutex<Starting>>,
) -> Result<Option<InUse>, String> {
    let entered = roots.enter(&execution, &how).await;
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    if *state == Starting::IsEnded {
        return Ok(None);
    }
    *state = Starting::IsStarted;
    let (execution, in_use) = entered?;
    start(&execution).map_err(|error| format!("start a process: {error}"))?;
    Ok(in_use)
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}
