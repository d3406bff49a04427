//! The session: it says where recipes run, and has those of the farm run there.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::history::History;
use super::wire::{self, Answer, Ask, Done, Hand};
use crate::place::Place;
use crate::protocol::{NeedMessage, Spec};
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

/// Serves the recipes of one make.
#[derive(Debug)]
pub struct Session {
    farm: Option<(Submitter, Handle)>,
    need: NeedMessage,
    user: (u32, u32),
    root: InRoot,
    history: Mutex<History>,
    /// Free slots of this host.
    free: Mutex<u32>,
    freed: Condvar,
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
        farm: Option<(Submitter, Handle)>,
        need: NeedMessage,
        user: (u32, u32),
        root: InRoot,
    ) -> Session {
        Session {
            farm,
            need,
            user,
            root,
            history: Mutex::new(History::open(directory)),
            free: Mutex::new(slots.max(1)),
            freed: Condvar::new(),
            told: Mutex::default(),
            tally: Tally::default(),
        }
    }

    /// Answers recipes on a socket, each on a thread of its own, until the program ends.
    pub fn serve(self: &Arc<Self>, listener: UnixListener) {
        let session = Arc::clone(self);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let session = Arc::clone(&session);
                std::thread::spawn(move || {
                    if let Err(error) = session.attend(stream) {
                        tracing::debug!("a recipe: {error}");
                    }
                });
            }
        });
    }

    /// What the recipes take that are still to come, as far as that is known.
    pub fn left(&self) -> Option<Duration> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).left()
    }

    /// Writes down what was learnt.
    pub fn finish(&self) {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).save();
    }

    fn attend(&self, mut stream: UnixStream) -> io::Result<()> {
        let ask: Ask = wire::receive(&mut stream)?;
        let directory = PathBuf::from(std::ffi::OsString::from_vec(ask.directory.clone()));
        let place = self.place(&ask.text, &directory);
        let (Some((submitter, runtime)), Some(place)) = (&self.farm, place) else {
            return self.here(stream, &ask, |stream| wire::send(stream, &Answer { here: true }));
        };
        wire::send(&mut stream, &Answer { here: false })?;
        let hand: Hand = wire::receive(&mut stream)?;
        let [output, error] = wire::receive_descriptors(&stream)?.map(File::from);
        let is_merged = submit::is_one_stream(&output, &error);
        let command = hand.command.into_iter().map(std::ffi::OsString::from_vec).collect();
        let spec = submit::spec(command, hand.environment, &place, hand.umask, self.user);
        let spec = Spec { layers: self.root.layers.clone(), isolated: self.root.isolated, ..spec };
        let error = if is_merged { None } else { Some(error) };
        let may_run_here = self.root.layers.is_empty();
        let task = Task { spec, need: self.need.clone(), input: None, output, error, may_run_here };
        let (orders, mut obeys) = mpsc::unbounded_channel();
        let mut signals = stream.try_clone()?;
        std::thread::spawn(move || {
            let mut number = [0];
            while signals.read_exact(&mut number).is_ok() {
                let _ = orders.send(Order::Signal(number[0].into()));
            }
            // The recipe's process is gone, or does not need it any more.
            let _ = orders.send(Order::End);
        });
        self.tally.now.fetch_add(1, Ordering::Relaxed);
        let (outcome, times) = runtime.block_on(submitter.run(task, &mut obeys));
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
                let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
                let is_new = told.insert(reason.clone());
                drop(told);
                let message = if is_new { format!("hayloft: runs here: {reason}\n") } else { String::new() };
                return self.here(stream, &ask, |stream| {
                    wire::send(stream, &Done { here: true, message, ..Done::default() })
                });
            }
        };
        self.tally.there.fetch_add(1, Ordering::Relaxed);
        if done.signal == 0 && done.code == 0 {
            self.history.lock().unwrap_or_else(PoisonError::into_inner).learn(&ask.text, times.ran);
        }
        self.tally.add(&ask.text, times);
        let sent = wire::send(&mut stream, &done);
        // Ends the thread that reads signals.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        sent
    }

    /// Where on a volume it is, if it is to run on the farm.
    fn place(&self, recipe: &[u8], directory: &Path) -> Option<Place> {
        let (submitter, _) = self.farm.as_ref()?;
        let only_there = !self.root.layers.is_empty();
        let is_away = || submitter.away().is_some();
        if !only_there
            && (is_away() || self.history.lock().unwrap_or_else(PoisonError::into_inner).is_cheap(recipe))
        {
            return None;
        }
        Place::of(directory).ok().flatten()
    }

    /// Lets a recipe run in a slot of this host, and waits for its end.
    fn here(
        &self,
        mut stream: UnixStream,
        ask: &Ask,
        tell: impl FnOnce(&mut UnixStream) -> io::Result<()>,
    ) -> io::Result<()> {
        let pid = Pid::from_raw(ask.pid).ok_or_else(|| io::Error::other("no process"))?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let asked = Instant::now();
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self.freed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        drop(free);
        let begun = Instant::now();
        let told = tell(&mut stream);
        drop(stream);
        if told.is_ok() {
            while poll(&mut [PollFd::new(&process, PollFlags::IN)], None).is_err() {}
        }
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.freed.notify_one();
        self.tally.here.fetch_add(1, Ordering::Relaxed);
        self.history.lock().unwrap_or_else(PoisonError::into_inner).learn(&ask.text, begun.elapsed());
        let (whole, slot, ran) = (asked.elapsed(), begun - asked, begun.elapsed());
        self.tally.add(&ask.text, Times { whole, slot, ran, ..Times::default() });
        told
    }
}
