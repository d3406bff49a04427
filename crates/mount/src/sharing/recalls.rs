//! Giving way: what other hosts need is shipped and given back, by a thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use hayloft_model::grants::Object;
use hayloft_model::tree::Stale;
use hayloft_model::{Ino, Name};
use hayloft_wire::Shipped;
use hayloft_wire::client_message::Body as Ask;

use crate::core::Client;
use crate::kernel::Word;
use crate::log::ledger::FlushError;

/// How long to wait before a log that cannot be shipped is tried again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long to wait for writes under way to reach the tree.
const WRITES_PAUSE: Duration = Duration::from_micros(50);
/// How long what is recalled is kept for calls that have waited for it, and how often these are looked at.
pub(super) const USE_PATIENCE: Duration = Duration::from_millis(50);
const USE_PAUSE: Duration = Duration::from_micros(200);

/// What others want of this host.
#[derive(Debug)]
pub(crate) enum Wanted {
    Object(Recalled),
    /// That everything is shipped which was changed so far ([`hayloft_wire::Ship`]).
    All {
        connection: u64,
        number: u64,
    },
    /// Nothing more: the thread ends.
    End,
}

/// An object that somebody else needs.
#[derive(Debug)]
pub(crate) struct Recalled {
    pub(super) connection: u64,
    pub(super) event: u64,
    pub(super) object: Object,
    pub(super) keep_read: bool,
}

impl Client {
    /// Waits until writes that were admitted while the object was owned are in the tree.
    fn await_writes(&self, object: Object) {
        let is_written = |file: &Arc<crate::cache::data::File>| file.writes.load(Ordering::Acquire) > 0;
        let files: Vec<Arc<crate::cache::data::File>> = {
            let core = self.core();
            match object {
                Object::File { ino, .. } => {
                    core.files.get(&ino).filter(|file| is_written(file)).cloned().into_iter().collect()
                }
                Object::Directory(dir) => {
                    let at_home = |ino: &Ino| core.tree.inode(*ino).is_ok_and(|row| row.parent == dir);
                    let of_object = core.files.iter().filter(|(ino, file)| is_written(file) && at_home(ino));
                    of_object.map(|(_, file)| Arc::clone(file)).collect()
                }
            }
        };
        for file in files {
            while is_written(&file) {
                std::thread::sleep(WRITES_PAUSE);
            }
        }
    }

    /// Ships whatever was changed so far, however long that takes. `false`: the session is over.
    fn ship_all(&self) -> bool {
        {
            let core = self.core();
            if !core.tree.is_dirty() && !core.in_flight {
                return true;
            }
        }
        let mut pressed = false;
        loop {
            match self.ledger.flush(None) {
                Ok(()) => return true,
                Err(FlushError::Ended(_)) => return false,
                Err(FlushError::NoSpace) if !pressed => {
                    pressed = true;
                    self.ledger.press();
                }
                // What could not be applied is not in anybody's way.
                Err(FlushError::Lost(_) | FlushError::Replaced) => {}
                Err(error) => {
                    tracing::warn!(?error, "another host waits for changes that cannot be shipped yet");
                    pressed = false;
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// Gives back what is recalled, but that which an append has begun in meanwhile: that is returned.
    fn give_way(&self, free: Vec<(Recalled, Instant)>) -> Vec<(Recalled, Instant)> {
        self.expire_before(&free);
        let mut core = self.core();
        // Who stays a reader by a recall of a connection that is lost is told of no change: nobody knows of it.
        let still = free.into_iter().filter(|(recalled, _)| recalled.connection > core.cut_off);
        let (kept, recalled): (Vec<_>, Vec<_>) =
            still.partition(|(recalled, _)| core.is_appending(recalled.object));
        for (recalled, _) in &recalled {
            for ino in core.tree.owned_of(recalled.object, recalled.keep_read) {
                core.giving.insert(ino);
                core.tree.disown(ino);
            }
        }
        drop(core);
        recalled.iter().for_each(|(recalled, _)| self.await_writes(recalled.object));
        if !self.ship_all() {
            return kept;
        }
        for (Recalled { connection, event, object, keep_read }, _) in &recalled {
            let mut core = self.core();
            if *connection <= core.cut_off {
                // It is owned again.
                continue;
            }
            let ino = object.ino();
            core.giving.retain(|given| *given != ino && (*keep_read || given.of_slot() != Some(ino)));
            let is_held = *keep_read || core.tree.owns_itself(ino);
            let (mut stale, names) = if is_held {
                (Stale::default(), Vec::new())
            } else {
                core.note_uncovered(*object);
                if core.tree.is_split(ino) {
                    // The kernel has its names for one use.
                    core.spare(ino);
                }
                let mut stale = core.tree.uncover(*object);
                let names = std::mem::take(&mut stale.names);
                // A call that has the lock may wait until others have the directory: no name is waited for without need.
                (stale, core.take_names(ino, names))
            };
            if !stale.in_use.contains(&ino) {
                // Without a name: whether it stays is the server's business from now on.
                stale.in_use.push(ino);
            }
            self.drop_data(&mut core, &stale);
            let word = core.word(stale, names, Some((*connection, *event)));
            drop(core);
            match word {
                // Else what was said before has to be heard first: from then on others change the names without a word.
                Word::Stale { names, attributes, data, in_use, ack: Some(ack), .. }
                    if is_held && names.is_empty() && attributes.is_empty() && data.is_empty() =>
                {
                    self.acknowledge(ack, in_use);
                }
                word => self.tell_kernel(word),
            }
        }
        kept
    }

    /// Names that the kernel keeps only go with their directory's lock: as long as the directory is held nobody has that and
    /// waits for others.
    fn expire_before(&self, free: &[(Recalled, Instant)]) {
        let mut names: Vec<(Ino, Name)> = Vec::new();
        let mut core = self.core();
        for (recalled, _) in free {
            if let Object::Directory(dir) = recalled.object {
                names.extend(core.warm(dir));
            }
        }
        let names = core.nodes.each_name(names);
        drop(core);
        if !names.is_empty() {
            self.expire_now(names);
        }
    }

    /// Tells the server when everything is shipped that was changed so far. A connection that is gone takes no answer: the
    /// server asks again on the next one.
    fn ship_for(&self, connection: u64, number: u64) {
        let failed = if self.ship_all() { "" } else { "its session is over" };
        let shipped = Shipped { number, failed: failed.to_owned() };
        let _ = self.link.send_on(connection, Ask::Shipped(shipped));
    }

    /// Waits until the kernel has dropped these names.
    fn expire_now(&self, names: Vec<(Ino, Name)>) {
        let (done, wait) = std::sync::mpsc::channel();
        self.tell_kernel(Word::ExpireNow(names, done));
        // The other end is dropped then.
        let _ = wait.recv();
    }
}

/// Gives way to others, until the mount is gone.
pub(crate) fn run(client: &Client, wanted: &Receiver<Wanted>) {
    let mut waiting: Vec<(Recalled, Instant)> = Vec::new();
    loop {
        let first = if waiting.is_empty() {
            wanted.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            wanted.recv_timeout(USE_PAUSE)
        };
        let first = match first {
            Ok(first) => Some(first),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let mut ships = Vec::new();
        for wanted in first.into_iter().chain(wanted.try_iter()) {
            match wanted {
                Wanted::Object(recalled) => waiting.push((recalled, Instant::now())),
                Wanted::All { connection, number } => ships.push((connection, number)),
                Wanted::End => return,
            }
        }
        ships.into_iter().for_each(|(connection, number)| client.ship_for(connection, number));
        // Calls that have waited for it are done first: else hosts could take it from each other for ever.
        let (used, free): (Vec<_>, Vec<_>) = {
            let mut core = client.core();
            core.appending.retain(|_, append| append.goes_on());
            let wanted = client.wanted.lock();
            waiting.into_iter().partition(|(recalled, since)| {
                let is_wanted = |ino: &Ino| {
                    // Who only reads it waits behind the one who needs it.
                    let is_kept = wanted.contains_key(ino) && core.tree.owns_itself(*ino);
                    let is_over = since.elapsed() >= USE_PATIENCE;
                    client.stats.recalls_kept.add(u64::from(is_kept && is_over));
                    is_kept && !is_over
                };
                core.is_appending(recalled.object) || core.covered_by(recalled.object, |ino| is_wanted(&ino))
            })
        };
        waiting = used;
        if !free.is_empty() {
            waiting.extend(client.give_way(free));
        }
    }
}
