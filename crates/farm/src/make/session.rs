//! The session: it says where recipes run, and has those of the farm run there.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};

use super::history::History;
use super::record::{Graph, Recording, Report};
use super::wire::{self, Answer, Ask, Done, Hand};
use crate::place::{Place, Places};
use crate::protocol::{NeedMessage, Record, Spec};
use crate::submit::{self, Order, Outcome, Submitter, Task, Times};

/// So many of the slowest recipes are remembered.
const SLOWEST: usize = 10;

/// What was done so far.
#[derive(Debug, Default)]
pub struct Tally {
    /// Recipes that ran here.
    pub here: AtomicU64,
    /// Recipes that ran on the farm.
    pub there: AtomicU64,
    /// Recipes that run, or wait to, on the farm.
    pub now: AtomicU64,
    /// Hosts that have run some.
    hosts: Mutex<BTreeSet<String>>,
    /// Those that took longest, the slowest first.
    slowest: Mutex<Vec<Explained>>,
}

/// Where the time of a recipe went.
#[derive(Debug, Clone)]
pub struct Explained {
    /// Its text, as make has it.
    pub recipe: String,
    /// Its times. Without a host it ran here.
    pub times: Times,
}

impl Tally {
    /// How many hosts have run recipes.
    pub fn hosts(&self) -> usize {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The recipes that took longest, the slowest first.
    pub fn slowest(&self) -> Vec<Explained> {
        self.slowest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, recipe: &[u8], times: Times) {
        if !times.host.is_empty() {
            self.hosts.lock().unwrap_or_else(PoisonError::into_inner).insert(times.host.clone());
        }
        let mut slowest = self.slowest.lock().unwrap_or_else(PoisonError::into_inner);
        let at = slowest.partition_point(|other| other.times.whole >= times.whole);
        if at < SLOWEST {
            let recipe = String::from_utf8_lossy(recipe).into_owned();
            slowest.insert(at, Explained { recipe, times });
            slowest.truncate(SLOWEST);
        }
    }
}

/// The build root in which recipes run elsewhere; without layers in none, and here as well.
#[derive(Debug, Clone, Default)]
pub struct InRoot {
    /// As [`Spec::layers`] has them.
    pub layers: Vec<Vec<u8>>,
    /// Each recipe has one of its own.
    pub isolated: bool,
}

/// How recipes run elsewhere.
#[derive(Debug, Clone, Default)]
pub struct How {
    /// In which root.
    pub root: InRoot,
    /// What they open is recorded.
    pub records: bool,
}

impl How {
    /// Whether recipes run on the farm only.
    pub fn is_only_there(&self) -> bool {
        self.records || !self.root.layers.is_empty()
    }
}

/// Serves the recipes of one make.
#[derive(Debug)]
pub struct Session {
    farm: Option<Submitter>,
    runtime: Handle,
    need: NeedMessage,
    user: (u32, u32),
    how: How,
    recording: Recording,
    history: Mutex<History>,
    /// Slots of this host.
    slots: Semaphore,
    /// Where folders are, of those that were asked for.
    places: Places,
    /// Why recipes run here, each reason once.
    told: Mutex<BTreeSet<String>>,
    /// What was done.
    pub tally: Tally,
}

impl Session {
    /// For the make of a project, with so many slots of this host, and what its tasks need of other hosts.
    pub fn new(
        directory: &Path,
        slots: u32,
        farm: Option<Submitter>,
        runtime: Handle,
        need: NeedMessage,
        user: (u32, u32),
        how: How,
    ) -> Session {
        Session {
            farm,
            runtime,
            need,
            user,
            how,
            recording: Recording::default(),
            history: Mutex::new(History::open(directory)),
            slots: Semaphore::new(slots.max(1) as usize),
            places: Places::default(),
            told: Mutex::default(),
            tally: Tally::default(),
        }
    }

    /// Answers recipes on a socket until the program ends.
    ///
    /// # Errors
    /// When the socket cannot be waited for.
    pub fn serve(self: &Arc<Self>, listener: std::os::unix::net::UnixListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let session = Arc::clone(self);
        let _within = self.runtime.enter();
        let listener = UnixListener::from_std(listener)?;
        self.runtime.spawn(async move {
            loop {
                let stream = match listener.accept().await {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // Too many open files: some will be closed.
                        tracing::debug!("a recipe: {error}");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        continue;
                    }
                };
                let session = Arc::clone(&session);
                tokio::spawn(async move {
                    if let Err(error) = session.attend(stream).await {
                        tracing::debug!("a recipe: {error}");
                    }
                });
            }
        });
        Ok(())
    }

    /// What the recipes take that are still to come, as far as that is known.
    pub fn left(&self) -> Option<Duration> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).left()
    }

    /// Writes down what was learnt.
    pub fn finish(&self) {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).save();
    }

    /// What recipes have opened, beside what rules say, on the volume that is mounted there.
    pub fn report(&self, graph: &Graph, volume: &Path) -> Report {
        self.recording.report(graph, volume)
    }

    async fn attend(&self, mut stream: UnixStream) -> io::Result<()> {
        let ask: Ask = wire::heard(&mut stream).await?;
        let place = self.place(&ask).await;
        let (Some(submitter), Some(place)) = (&self.farm, place) else {
            return self.here(stream, &ask, &Answer { here: true }).await;
        };
        stream.write_all(&wire::frame(&Answer { here: false })).await?;
        let hand: Hand = wire::heard(&mut stream).await?;
        let [output, error] = wire::descriptors_heard(&stream).await?.map(File::from);
        let is_merged = submit::is_one_stream(&output, &error);
        let command = hand.command.into_iter().map(std::ffi::OsString::from_vec).collect();
        let spec = submit::spec(command, hand.environment, &place, hand.umask, self.user);
        let How { root, records } = &self.how;
        let spec = Spec { layers: root.layers.clone(), isolated: root.isolated, records: *records, ..spec };
        let error = if is_merged { None } else { Some(error) };
        let may_run_here = !self.how.is_only_there();
        let (need, may_do_with_less, expected) = self.need(&ask.text);
        let task = Task { spec, need, input: None, output, error, may_run_here, may_do_with_less, expected };
        let (orders, mut obeys) = mpsc::unbounded_channel();
        let (mut signals, mut writer) = stream.into_split();
        let signals = tokio::spawn(async move {
            while let Ok(number) = signals.read_u8().await {
                let _ = orders.send(Order::Signal(number.into()));
            }
            // The recipe's process is gone.
            let _ = orders.send(Order::End);
        });
        self.tally.now.fetch_add(1, Ordering::Relaxed);
        let (outcome, mut times) = submitter.run(task, &mut obeys).await;
        signals.abort();
        self.tally.now.fetch_sub(1, Ordering::Relaxed);
        let done = match outcome {
            Outcome::Exited(code) => Done { code, ..Done::default() },
            Outcome::Signalled(signal) => Done { signal, ..Done::default() },
            Outcome::NotRun(code, reason) => {
                Done { code, message: format!("hayloft: {reason}\n"), ..Done::default() }
            }
            Outcome::FarmFailed(reason) => {
                let message = format!("hayloft: the farm has failed, not the recipe: {reason}\n");
                Done { code: 125, message, ..Done::default() }
            }
            Outcome::Nowhere(reason) => {
                let is_new = self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(reason.clone());
                let message = if is_new { format!("hayloft: runs here: {reason}\n") } else { String::new() };
                return self.here(writer, &ask, &Done { here: true, message, ..Done::default() }).await;
            }
        };
        self.tally.there.fetch_add(1, Ordering::Relaxed);
        if *records {
            // Its host may have been told to end it, or be of a version that records nothing.
            let nothing = || Record { lost: 1, ..Record::default() };
            self.recording.add(&ask.rules, times.record.take().unwrap_or_else(nothing));
        }
        if done.signal == 0 && done.code == 0 {
            self.history.lock().unwrap_or_else(PoisonError::into_inner).learn(
                &ask.text,
                times.ran,
                Some(times.peak),
            );
        }
        self.tally.add(&ask.text, times);
        writer.write_all(&wire::frame(&done)).await
    }

    /// What a recipe needs, whether its memory was learnt, and how long it is expected to take.
    fn need(&self, recipe: &[u8]) -> (NeedMessage, bool, Duration) {
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let learns = self.need.memory == 0;
        let memory = if learns { history.memory(recipe) } else { self.need.memory };
        (NeedMessage { memory, ..self.need.clone() }, learns, history.expected(recipe))
    }

    /// Where on a volume it is, if it is to run on the farm.
    async fn place(&self, ask: &Ask) -> Option<Place> {
        let submitter = self.farm.as_ref()?;
        let only_there = self.how.is_only_there();
        let is_cheap = || self.history.lock().unwrap_or_else(PoisonError::into_inner).is_cheap(&ask.text);
        if !only_there && (submitter.away().is_some() || is_cheap()) {
            return None;
        }
        let directory = PathBuf::from(std::ffi::OsString::from_vec(ask.directory.clone()));
        self.places.of(directory).await.ok()?
    }

    /// Lets a recipe run in a slot of this host when it is told so, and waits for its end.
    async fn here(
        &self,
        mut stream: impl AsyncWrite + Unpin,
        ask: &Ask,
        tells: &impl prost::Message,
    ) -> io::Result<()> {
        let pid = Pid::from_raw(ask.pid).ok_or_else(|| io::Error::other("no process"))?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let asked = Instant::now();
        let slot = self.slots.acquire().await.map_err(io::Error::other)?;
        let begun = Instant::now();
        let told = stream.write_all(&wire::frame(tells)).await;
        drop(stream);
        if told.is_ok() {
            let ends = move || while poll(&mut [PollFd::new(&process, PollFlags::IN)], None).is_err() {};
            let _ = tokio::task::spawn_blocking(ends).await;
        }
        drop(slot);
        self.tally.here.fetch_add(1, Ordering::Relaxed);
        self.history.lock().unwrap_or_else(PoisonError::into_inner).learn(&ask.text, begun.elapsed(), None);
        let (whole, slot, ran) = (asked.elapsed(), begun - asked, begun.elapsed());
        self.tally.add(&ask.text, Times { whole, slot, ran, ..Times::default() });
        told
    }
}
