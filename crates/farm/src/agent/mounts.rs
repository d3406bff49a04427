//! The volumes that this host has mounted. A mount whose server is away does not say which volume it is of until that is back, so each is
//! asked on a thread of its own, by one at a time; meanwhile what it has said last holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::place::{self, Mounted, VolumeMount};

/// How long an agent that begins waits for what its mounts say.
const FIRST: Duration = Duration::from_secs(2);

/// What a mount has said; None if it has failed.
pub(super) type Answer = (Mounted, Option<VolumeMount>);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Mounts {
    only: Vec<PathBuf>,
    /// Those of the last look.
    there: BTreeSet<Mounted>,
    /// Those that are being asked.
    asked: BTreeSet<Mounted>,
    known: BTreeMap<Mounted, VolumeMount>,
    to_answers: mpsc::UnboundedSender<Answer>,
}

impl Mounts {
    /// Of these points, or of all without any; the answers are to be given to [`Mounts::hear`].
    pub(super) fn new(only: Vec<PathBuf>) -> (Mounts, mpsc::UnboundedReceiver<Answer>) {
        let (to_answers, answers) = mpsc::unbounded_channel();
        let (there, asked, known) = Default::default();
        (Mounts { only, there, asked, known, to_answers }, answers)
    }

    /// Looks at what is mounted, and waits a while for what that says.
    pub(super) async fn first(&mut self, answers: &mut mpsc::UnboundedReceiver<Answer>) {
        self.look();
        let until = Instant::now() + FIRST;
        while !self.asked.is_empty()
            && let Ok(Some(answer)) = timeout_at(until, answers.recv()).await
        {
            self.hear(answer);
        }
    }

    /// Looks at what is mounted, and asks those that are not being asked.
    pub(super) fn look(&mut self) {
        match place::mounted(&self.only) {
            Ok(there) => self.there = there.into_iter().collect(),
            Err(error) => return tracing::warn!("the host's mounts cannot be read: {error}"),
        }
        self.known.retain(|mount, _| self.there.contains(mount));
        for mount in &self.there {
            let (asks, answers) = (mount.clone(), self.to_answers.clone());
            let ask = move || {
                let volume = asks.volume();
                let _ = answers.send((asks, volume));
            };
            if self.asked.contains(mount) {
                tracing::debug!("{} says nothing", mount.point.display());
            } else if let Err(error) = std::thread::Builder::new().name("mounts".into()).spawn(ask) {
                tracing::warn!("{} cannot be asked: {error}", mount.point.display());
            } else {
                self.asked.insert(mount.clone());
            }
        }
    }

    /// A mount has answered.
    pub(super) fn hear(&mut self, (mount, volume): Answer) {
        self.asked.remove(&mount);
        match volume {
            Some(volume) if self.there.contains(&mount) => drop(self.known.insert(mount, volume)),
            _ => drop(self.known.remove(&mount)),
        }
    }

    /// The volumes' mounts, as far as they are known.
    pub(super) fn known(&self) -> impl Iterator<Item = &VolumeMount> {
        self.known.values()
    }
}
