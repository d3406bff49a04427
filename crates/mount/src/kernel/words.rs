//! What the kernel is told of inodes, and that it was heard.
//!
//! Dropping an inode from the kernel's cache may have to wait: for pages that a call has locked, or for an inode that is
//! on its way out. Others have nothing to do with that: what does not come through at once is said by a thread of its
//! own, which acknowledges the event in the end, and the words that follow go on.
//!
//! An answer may reach its caller after the word that what it says is no longer so. Of an inode that the kernel has, it
//! notices that by itself. One that is new to it is told again until it is there, or forgotten. Answers about what was
//! made or changed count however late they are: their attributes are for one use (`fs`), unless it is known when they
//! have arrived (`births`), which is waited for first.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use hayloft_fuse::Control;
use hayloft_model::Ino;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;

use crate::core::Client;
use crate::kernel::bases::Former;
use crate::kernel::nodes::NodeId;
use crate::kernel::pages::Pages;
use crate::kernel::speaker::{Lock, Speaker};

/// How long the words that follow wait for one.
const AT_ONCE: Duration = Duration::from_millis(10);
/// How long others are kept waiting for a word at most: something is wrong then.
const LIMIT: Duration = Duration::from_secs(30);
/// How long an inode is waited for that is on its way to the kernel: by the words that follow, and by others. Its caller
/// may have to wait for a call that waits for these. It is told again afterwards, too.
const ARRIVAL_AT_ONCE: Duration = Duration::from_millis(1);
const ARRIVAL_PATIENCE: Duration = Duration::from_millis(200);
/// How soon it is told again.
const ARRIVAL_PAUSE: Duration = Duration::from_micros(100);
/// So many inodes are said at a time: what does not come through is said again, and no more than that.
const PART: usize = 1000;
/// How long each part is waited for at least, however long the ones before it took.
const PART_AT_LEAST: Duration = Duration::from_millis(100);
/// Words that are said beside the others at most. Further ones are waited for.
const APART_MAX: usize = 128;

/// What the kernel is told of inodes, and the event that is acknowledged then.
#[derive(Debug, Default)]
pub(crate) struct Inodes {
    /// Their attributes have changed.
    pub(crate) attributes: Vec<Ino>,
    /// Their data, or listings, have changed.
    pub(crate) data: Vec<Ino>,
    /// For the acknowledgement.
    pub(crate) in_use: Vec<Ino>,
    /// Connection and event.
    pub(crate) ack: Option<(u64, u64)>,
    /// What the data was: until the kernel has let go of it.
    #[allow(dead_code)] // lives as long as the word
    pub(crate) bases: Vec<Arc<Former>>,
}

/// What came of a word.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    All,
    /// Inodes are on their way to the kernel.
    Arriving,
    /// Pages are locked.
    Stuck,
}

/// Words that have not been heard yet, with those who wait until they are.
#[derive(Debug, Default)]
struct Unheard {
    next: u64,
    waiting: HashMap<u64, Vec<Sender<()>>>,
}

/// Tells the kernel of inodes.
pub(crate) struct Words<'a> {
    client: &'a Arc<Client>,
    control: &'a Control,
    pages: Pages,
    unheard: Arc<Mutex<Unheard>>,
}

impl Words<'_> {
    pub(crate) fn new<'a>(client: &'a Arc<Client>, control: &'a Control) -> Words<'a> {
        Words { client, control, pages: Pages::default(), unheard: Arc::default() }
    }

    /// Says it, here or beside the words that follow, and acknowledges the event when it was heard.
    pub(crate) fn say(&mut self, speaker: &mut Speaker, mut inodes: Inodes) {
        // Of what takes long by itself others need not wait for the end.
        let is_short = inodes.attributes.len() + inodes.data.len() <= PART;
        if is_short && self.try_say(speaker, &mut inodes, AT_ONCE, ARRIVAL_AT_ONCE) == Heard::All {
            return inodes.acknowledge(self.client);
        }
        if let Err(inodes) = self.say_apart(inodes) {
            self.insist(speaker, inodes);
        }
    }

    /// Drops all of these when everything that was said before was heard.
    pub(crate) fn when_heard(&self, done: &Sender<()>) {
        self.unheard.lock().waiting.values_mut().for_each(|waiting| waiting.push(done.clone()));
    }

    /// Says it; what is left of it then has not been heard. Pages are waited for for `patience`, and inodes that the kernel does not
    /// have yet for `arrival`.
    fn try_say(
        &mut self,
        speaker: &mut Speaker,
        inodes: &mut Inodes,
        patience: Duration,
        arrival: Duration,
    ) -> Heard {
        let begun = Instant::now();
        let late = self.await_births(speaker, inodes, arrival);
        inodes.say_once();
        loop {
            let (mut arriving, mut stuck) = (Inodes::default(), Inodes::default());
            while let Some(mut part) = inodes.take_part() {
                let (attributes, data) = (&part.attributes, &part.data);
                let calls = &self.client.calls;
                // Whatever one part has to wait for, the others are said.
                let patience = patience.saturating_sub(begun.elapsed()).max(patience.min(PART_AT_LEAST));
                match self.pages.drop_all(calls, self.control, speaker, (attributes, data), patience) {
                    Some(unknown) => {
                        part.keep_arriving(self.client, &unknown);
                        arriving.put_back(part);
                    }
                    None => stuck.put_back(part),
                }
            }
            inodes.put_back(arriving);
            if !stuck.is_empty() {
                inodes.put_back(stuck);
                inodes.say_again(&late);
                return Heard::Stuck;
            }
            if inodes.is_empty() {
                break;
            }
            if begun.elapsed() > arrival {
                inodes.say_again(&late);
                return Heard::Arriving;
            }
            std::thread::sleep(ARRIVAL_PAUSE);
        }
        inodes.say_again(&late);
        if late.is_empty() { Heard::All } else { Heard::Arriving }
    }

    /// Waits until answers about files that were just made have arrived. Returns those of which that is not certain.
    fn await_births(&self, speaker: &mut Speaker, inodes: &Inodes, patience: Duration) -> Vec<NodeId> {
        let births = self.client.core().births.among(inodes.attributes.iter().chain(&inodes.data));
        let begun = Instant::now();
        let take = |(file, place)| (file, speaker.take_lock(place));
        let mut late: Vec<(NodeId, Lock)> = births.into_iter().map(take).collect();
        while !late.is_empty() {
            let mut core = self.client.core();
            late.retain(|(file, lock)| {
                if lock.is_taken() {
                    core.births.arrived(*file);
                }
                core.births.is_arriving(*file)
            });
            drop(core);
            if late.is_empty() || begun.elapsed() > patience {
                break;
            }
            std::thread::sleep(ARRIVAL_PAUSE);
        }
        late.into_iter().map(|(file, _)| file).collect()
    }

    fn insist(&mut self, speaker: &mut Speaker, mut inodes: Inodes) {
        match self.try_say(speaker, &mut inodes, LIMIT, ARRIVAL_PATIENCE) {
            Heard::All => inodes.acknowledge(self.client),
            Heard::Arriving => {
                inodes.acknowledge(self.client);
                self.try_say(speaker, &mut inodes, LIMIT, LIMIT);
                let mut core = self.client.core();
                inodes.attributes.iter().for_each(|ino| core.births.arrived(NodeId(ino.0)));
            }
            Heard::Stuck => {
                tracing::error!(?inodes, "the kernel does not let go of what has changed");
                inodes.acknowledge(self.client);
            }
        }
    }

    /// Says it on a thread of its own, if one can be had.
    fn say_apart(&self, inodes: Inodes) -> Result<(), Inodes> {
        let number = {
            let mut unheard = self.unheard.lock();
            if unheard.waiting.len() >= APART_MAX {
                return Err(inodes);
            }
            unheard.next += 1;
            let number = unheard.next;
            unheard.waiting.insert(number, Vec::new());
            number
        };
        let (client, control) = (Arc::clone(self.client), self.control.clone());
        let unheard = Arc::clone(&self.unheard);
        // What cannot be moved to a thread that does not come to be comes back.
        let said = Arc::new(Mutex::new(Some(inodes)));
        let to_say = Arc::clone(&said);
        let spawned = std::thread::Builder::new().name("hayloft-word".to_string()).spawn(move || {
            if let Some(inodes) = to_say.lock().take() {
                let mut words = Words::new(&client, &control);
                words.insist(&mut Speaker::new(control.notifier()), inodes);
            }
            unheard.lock().waiting.remove(&number);
        });
        match spawned {
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::warn!(%error, "no thread to speak to the kernel with");
                self.unheard.lock().waiting.remove(&number);
                Err(said.lock().take().unwrap_or_default())
            }
        }
    }
}

impl Inodes {
    fn is_empty(&self) -> bool {
        self.attributes.is_empty() && self.data.is_empty()
    }

    /// Of an inode whose data go, the attributes go with them.
    fn say_once(&mut self) {
        let data: HashSet<Ino, FxBuildHasher> = self.data.iter().copied().collect();
        self.attributes.retain(|ino| !data.contains(ino));
    }

    /// What is said next; attributes first, for which nobody has to be waited for.
    fn take_part(&mut self) -> Option<Inodes> {
        let of = |inodes: &mut Vec<Ino>, most: usize| inodes.split_off(inodes.len() - most.min(inodes.len()));
        let attributes = of(&mut self.attributes, PART);
        let data = of(&mut self.data, PART - attributes.len());
        let part = Inodes { attributes, data, ..Inodes::default() };
        (!part.is_empty()).then_some(part)
    }

    fn put_back(&mut self, mut part: Inodes) {
        self.attributes.append(&mut part.attributes);
        self.data.append(&mut part.data);
    }

    /// Keeps those that the kernel does not have, and that are on their way to it.
    fn keep_arriving(&mut self, client: &Client, unknown: &[Ino]) {
        let mut arriving = HashSet::new();
        if !unknown.is_empty() {
            let core = client.core();
            arriving.extend(unknown.iter().copied().filter(|number| core.has_number(NodeId(number.0))));
        }
        self.attributes.retain(|ino| arriving.contains(ino));
        self.data.retain(|ino| arriving.contains(ino));
    }

    /// What was said of these may be said too early.
    fn say_again(&mut self, late: &[NodeId]) {
        self.attributes.extend(late.iter().map(|file| Ino(file.0)));
    }

    fn acknowledge(&mut self, client: &Client) {
        if let Some(ack) = self.ack.take() {
            client.acknowledge(ack, std::mem::take(&mut self.in_use));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_inode_is_said_once_and_in_parts() {
        let numbers = |range: std::ops::Range<u64>| range.map(Ino).collect::<Vec<_>>();
        let most = PART as u64;
        let mut inodes =
            Inodes { attributes: numbers(0..3 * most), data: numbers(most..4 * most), ..Inodes::default() };
        inodes.say_once();
        assert_eq!(inodes.attributes, numbers(0..most), "the others go with their data");
        let (mut attributes, mut data) = (Vec::new(), Vec::new());
        while let Some(part) = inodes.take_part() {
            assert!(part.attributes.len() + part.data.len() <= PART);
            assert!(
                part.data.is_empty() || inodes.attributes.is_empty(),
                "for attributes nobody is waited for"
            );
            attributes.extend(part.attributes);
            data.extend(part.data);
        }
        attributes.sort_unstable();
        data.sort_unstable();
        assert_eq!((attributes, data), (numbers(0..most), numbers(most..4 * most)));
    }
}
