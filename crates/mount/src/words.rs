//! What the kernel is told of inodes, and that it was heard.
//!
//! Dropping an inode from the kernel's cache may have to wait: for pages that a call has locked, or for an inode that is
//! on its way out. Others have nothing to do with that: what does not come through at once is said by a thread of its
//! own, which acknowledges the event in the end, and the words that follow go on.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use hayloft_fuse::Control;
use hayloft_model::Ino;
use parking_lot::Mutex;

use crate::core::Client;
use crate::kernel::Speaker;
use crate::pages::Pages;

/// How long the words that follow wait for one.
const AT_ONCE: Duration = Duration::from_millis(10);
/// How long others are kept waiting for a word at most: something is wrong then.
const LIMIT: Duration = Duration::from_secs(30);
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
    pub(crate) fn say(&mut self, speaker: &mut Speaker, inodes: Inodes) {
        let is_empty = inodes.attributes.is_empty() && inodes.data.is_empty();
        if is_empty || self.try_say(speaker, &inodes, AT_ONCE) {
            return inodes.acknowledge(self.client);
        }
        if let Err(inodes) = self.say_apart(inodes) {
            self.insist(speaker, &inodes);
            inodes.acknowledge(self.client);
        }
    }

    /// Drops all of these when everything that was said before was heard.
    pub(crate) fn when_heard(&self, done: &Sender<()>) {
        self.unheard.lock().waiting.values_mut().for_each(|waiting| waiting.push(done.clone()));
    }

    fn try_say(&mut self, speaker: &mut Speaker, inodes: &Inodes, patience: Duration) -> bool {
        self.pages.drop_all(
            &self.client.calls,
            self.control,
            speaker,
            (&inodes.attributes, &inodes.data),
            patience,
        )
    }

    fn insist(&mut self, speaker: &mut Speaker, inodes: &Inodes) {
        if !self.try_say(speaker, inodes, LIMIT) {
            tracing::error!(?inodes, "the kernel does not let go of what has changed");
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
                words.insist(&mut Speaker::new(control.notifier()), &inodes);
                inodes.acknowledge(&client);
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
    fn acknowledge(self, client: &Client) {
        if let Some(ack) = self.ack {
            client.acknowledge(ack, self.in_use);
        }
    }
}
