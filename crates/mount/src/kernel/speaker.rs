//! Threads that tell the kernel what may have to wait for a lock of its.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use hayloft_fuse::{Control, Notifier};
use hayloft_model::{Ino, Name};

use crate::cache::data::PAGE;
use crate::core::Client;
use crate::kernel::bases::Former;
use crate::kernel::nodes::NodeId;

/// How long a name's lock is waited for before the epoch is raised; and so much more for each name, which takes a
/// microsecond or two.
const PATIENCE: Duration = Duration::from_millis(100);
const PATIENCE_EACH: Duration = Duration::from_micros(20);
/// How long a lock is waited for that a call has which waits for the one that needs it.
pub(super) const SHORT_PATIENCE: Duration = Duration::from_millis(2);
/// How soon it is looked whether who has the lock waits for others, who may wait for this one.
const LOOK_PAUSE: Duration = Duration::from_millis(5);
/// How long somebody is waited for who may make an expired name last. Who computes cannot be told from who gets no processor.
const CALLER_PATIENCE: Duration = Duration::from_millis(10);
/// And where an epoch breaks overlays.
const LATEST: Duration = Duration::from_secs(2);
/// How long who has read a listing is waited for before the epoch is raised: if he has the directory's lock, that is as long as he
/// gets no processor.
const LISTING_PATIENCE: Duration = Duration::from_secs(2);
/// How long a directory's lock is waited for before others speak.
const LOCK_AT_ONCE: Duration = Duration::from_millis(1);

/// What may have to wait for a lock, and where to say that it is done.
struct Slow {
    names: Vec<(Ino, Name)>,
    /// Inodes of which the attributes go.
    attributes: Vec<Ino>,
    /// Inodes with offsets and lengths of data, bytes; length 0 is up to the end.
    ranges: Vec<(Ino, u64, u64)>,
    /// What the pages are like until then.
    base: Option<Arc<Former>>,
    /// Is told which of the inodes the kernel does not have, and directories that do not have a name.
    done: Sender<Vec<Ino>>,
}

/// What came of taking the lock of a directory.
pub(crate) enum Lock {
    Taken,
    /// The name is not there, or nobody could ask.
    Unknown,
    Awaited(Receiver<Vec<Ino>>),
}

impl Lock {
    /// Whether somebody who had it before has let go of it.
    pub(crate) fn is_taken(&self) -> bool {
        match self {
            Lock::Taken => true,
            Lock::Unknown => false,
            Lock::Awaited(wait) => wait.try_recv().is_ok_and(|missing| missing.is_empty()),
        }
    }
}

/// Has threads say what may have to wait for a lock.
pub(crate) struct Speaker {
    notifier: Notifier,
    thread: Option<Sender<Slow>>,
}

impl Speaker {
    pub(crate) fn new(notifier: Notifier) -> Speaker {
        Speaker { notifier, thread: None }
    }

    fn raise_epoch(&self, client: &Client) -> std::io::Result<()> {
        // Names that are handed out afterwards are not among them.
        let mut core = client.core();
        self.notifier.inc_epoch()?;
        core.names.dropped();
        client.stats.epochs.add(1);
        Ok(())
    }

    /// Expires names. When that does not come through, or who has the lock waits until others have heard of something, or somebody may
    /// be on the way who would make one of them last, the epoch is raised instead; the rest is said by the thread that waits.
    pub(super) fn expire(&mut self, client: &Client, names: Vec<(Ino, Name)>) {
        let dirs: HashSet<Ino> = names.iter().map(|(dir, _)| NodeId(dir.0).ino()).collect();
        let patience = PATIENCE + PATIENCE_EACH * names.len() as u32;
        // First, since expired names are not to be made to last afterwards.
        let caller_patience = if client.options.read_only { LATEST } else { CALLER_PATIENCE };
        let have_come = client.await_callers(&names, caller_patience);
        // A call that has asked the server has its answer after that, if it does not wait for this.
        let look = LOOK_PAUSE + PATIENCE_EACH * names.len() as u32 + client.link.round_trip() * 2;
        let wait = self.entrust(names, Vec::new(), Vec::new()).ok();
        let is_done = wait.as_ref().is_some_and(|wait| comes_through(client, wait, &dirs, (look, patience)));
        if is_done && have_come {
            return;
        }
        if !is_done {
            // It ends by itself when the lock is free; until then another thread speaks.
            self.thread = None;
            client.core().names.could_not_expire(&dirs);
        }
        client.await_listings(&dirs, LISTING_PATIENCE);
        if self.raise_epoch(client).is_err()
            && let Some(wait) = wait
        {
            let _ = wait.recv();
        }
    }

    /// Expires names if that comes through in time. Returns whether it has.
    pub(crate) fn try_expire(&mut self, names: Vec<(Ino, Name)>, patience: Duration) -> bool {
        self.try_expire_while(names, patience, || true)
    }

    /// The same; as soon as this is not worth it any more only [`SHORT_PATIENCE`] is waited.
    pub(crate) fn try_expire_while(
        &mut self,
        names: Vec<(Ino, Name)>,
        patience: Duration,
        is_worth_it: impl Fn() -> bool,
    ) -> bool {
        let each = PATIENCE_EACH * names.len() as u32;
        let Ok(wait) = self.entrust(names, Vec::new(), Vec::new()) else { return false };
        let begun = Instant::now();
        let is_done = loop {
            let left = (patience + each).saturating_sub(begun.elapsed());
            match wait.recv_timeout(left.min(SHORT_PATIENCE + each)) {
                Ok(_) => break true,
                Err(RecvTimeoutError::Timeout) if begun.elapsed() < patience + each && is_worth_it() => {}
                Err(_) => break false,
            }
        };
        if !is_done {
            self.thread = None;
        }
        is_done
    }

    /// Has a thread expire a name, for which the kernel takes the lock of its directory if it has the name. Returns what tells
    /// that it is done, with nothing in it if so; waits a moment for that itself.
    pub(crate) fn take_lock(&mut self, place: (Ino, Name)) -> Lock {
        let Ok(wait) = self.entrust(vec![place], Vec::new(), Vec::new()) else { return Lock::Unknown };
        match wait.recv_timeout(LOCK_AT_ONCE) {
            Ok(missing) if missing.is_empty() => Lock::Taken,
            Ok(_) => Lock::Unknown,
            Err(_) => {
                self.thread = None;
                Lock::Awaited(wait)
            }
        }
    }

    /// Expires all these, as far as nobody has the lock of their directory: then that is in use by a call that waits for the server, and
    /// others do not wait for it. What somebody may be on the way to make last is expired once more when that is over.
    pub(super) fn expire_in_time(
        &mut self,
        client: &Arc<Client>,
        control: &Control,
        names: Vec<(Ino, Name)>,
    ) {
        let have_come = client.await_callers(&names, CALLER_PATIENCE);
        let mut of_dir: HashMap<Ino, Vec<(Ino, Name)>> = HashMap::new();
        names.iter().for_each(|(dir, name)| of_dir.entry(*dir).or_default().push((*dir, name.clone())));
        for names in of_dir.into_values() {
            self.try_expire(names, PATIENCE);
        }
        if have_come {
            return;
        }
        let (late, control) = (Arc::clone(client), control.clone());
        let spawned = std::thread::Builder::new().name("hayloft-late".to_string()).spawn(move || {
            let mut speaker = Speaker::new(control.notifier());
            if late.await_callers(&names, LATEST) {
                speaker.try_expire(names, PATIENCE);
            } else {
                let _ = speaker.raise_epoch(&late);
            }
        });
        if spawned.is_err() {
            let _ = self.raise_epoch(client);
        }
    }

    /// Has a thread drop attributes, and data, from the kernel's cache; returns what tells that it is done.
    pub(crate) fn drop_inodes(
        &mut self,
        attributes: Vec<Ino>,
        ranges: Vec<(Ino, u64, u64)>,
    ) -> Receiver<Vec<Ino>> {
        self.entrust(Vec::new(), attributes, ranges).unwrap_or_else(|slow| {
            // Nobody else can say it.
            let (done, wait) = channel();
            say(&self.notifier, Slow { done, ..slow });
            wait
        })
    }

    /// What was entrusted last takes long: another thread speaks from now on.
    pub(crate) fn go_on(&mut self) {
        self.thread = None;
    }

    /// The same, on a thread that nobody else speaks through afterwards.
    pub(crate) fn drop_apart(&mut self, ranges: Vec<(Ino, u64, u64)>) -> Option<Receiver<Vec<Ino>>> {
        let mut apart = Speaker::new(self.notifier.clone());
        apart.entrust(Vec::new(), Vec::new(), ranges).ok()
    }

    /// Has a thread drop pages that are like this until then. Nobody waits for that.
    pub(crate) fn drop_unlike(&self, base: Arc<Former>) {
        let Some((node, pages)) = base.pages() else { return };
        let ranges = vec![(Ino(node.0), pages.start * PAGE, (pages.end - pages.start) * PAGE)];
        let (done, _) = channel();
        let slow = Slow { names: Vec::new(), attributes: Vec::new(), ranges, base: Some(base), done };
        let _ = Speaker::new(self.notifier.clone()).hand_over(slow);
    }

    /// Has a thread say it; returns what tells that it is done, or what there is to say when no thread can be had.
    fn entrust(
        &mut self,
        names: Vec<(Ino, Name)>,
        attributes: Vec<Ino>,
        ranges: Vec<(Ino, u64, u64)>,
    ) -> Result<Receiver<Vec<Ino>>, Slow> {
        let (done, wait) = channel();
        let slow = Slow { names, attributes, ranges, base: None, done };
        self.hand_over(slow)?;
        Ok(wait)
    }

    fn hand_over(&mut self, slow: Slow) -> Result<(), Slow> {
        let slow = match &self.thread {
            Some(to) => to.send(slow).err().map(|error| error.0),
            None => Some(slow),
        };
        if let Some(slow) = slow {
            let (to, from) = channel::<Slow>();
            let notifier = self.notifier.clone();
            let spawned = std::thread::Builder::new()
                .name("hayloft-kernel".to_string())
                .spawn(move || from.iter().for_each(|slow| say(&notifier, slow)));
            match spawned {
                Ok(_) => {
                    let _ = to.send(slow);
                    self.thread = Some(to);
                }
                Err(error) => {
                    tracing::warn!(%error, "no thread to speak to the kernel with");
                    return Err(slow);
                }
            }
        }
        Ok(())
    }
}

/// Drops entries of directories that have been moved away. Nobody waits for that.
pub(super) struct Leaving {
    notifier: Notifier,
    thread: Option<Sender<(NodeId, Name)>>,
}

impl Leaving {
    pub(super) fn new(notifier: Notifier) -> Leaving {
        Leaving { notifier, thread: None }
    }

    pub(super) fn drop_entry(&mut self, parent: NodeId, name: Name) {
        let thread = self.thread.get_or_insert_with(|| {
            let (to, from) = channel::<(NodeId, Name)>();
            let notifier = self.notifier.clone();
            let each = move |(parent, name): (NodeId, Name)| {
                let _ = notifier.inval_entry(parent.0, name.as_bytes());
            };
            // Without a thread they go when they are looked for, or when memory is short.
            let spawned = std::thread::Builder::new()
                .name("hayloft-leave".to_string())
                .spawn(move || from.iter().for_each(each));
            drop(spawned);
            to
        });
        let _ = thread.send((parent, name));
    }
}

/// Whether names are expired within `patience`, before somebody has a lock who waits until others have heard of something.
fn comes_through(
    client: &Client,
    wait: &Receiver<Vec<Ino>>,
    dirs: &HashSet<Ino>,
    (look, patience): (Duration, Duration),
) -> bool {
    let begun = Instant::now();
    let mut was_waited_with = false;
    while begun.elapsed() < patience {
        match wait.recv_timeout(look.min(patience)) {
            Ok(_) => return true,
            Err(RecvTimeoutError::Timeout) => {
                // One that has just begun may be over soon.
                let is_waited_with = client.core().names.is_waited_with(dirs);
                if is_waited_with && was_waited_with {
                    break;
                }
                was_waited_with = is_waited_with;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    false
}

fn say(notifier: &Notifier, slow: Slow) {
    let attributes = slow.attributes.into_iter().map(|ino| (ino, -1, 0));
    let ranges = slow.ranges.into_iter().map(|(ino, offset, length)| (ino, offset as i64, length as i64));
    let mut unknown = Vec::new();
    for (dir, name) in slow.names {
        if matches!(notifier.expire_entry(dir.0, name.as_bytes()), Ok(false)) {
            unknown.push(dir);
        }
    }
    for (ino, offset, length) in attributes.chain(ranges) {
        if matches!(notifier.inval_inode(ino.0, offset, length), Ok(false)) {
            unknown.push(ino);
        }
    }
    drop(slow.base);
    let _ = slow.done.send(unknown);
}
