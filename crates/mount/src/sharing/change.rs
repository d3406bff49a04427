//! Changes in directories that several hosts use: the server executes them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hayloft_fuse::Interrupt;
use hayloft_model::{Change, FileKind, Ino, Sequence, TreeError};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{ChangeRequest, Changed, GiveBack, error_of};

use crate::core::{Client, Core};
use crate::log::ledger::FlushError;
use crate::sharing::fault::FaultError;

/// How long to wait before a log that cannot be shipped is tried again.
const AGAIN: Duration = Duration::from_millis(200);

/// What the server made of a change.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It did it; with the inode that was made.
    Done(Option<Ino>),
    /// The directories are owned now: do it here.
    Yours,
    /// The directory is split now: do it here, by slots.
    Split,
    /// It refused.
    Refused(TreeError),
}

impl Client {
    /// Has the server execute a change. Its names are handed to the kernel for one use from now on.
    pub(crate) fn change(
        self: &Arc<Self>,
        change: &Change,
        execute: bool,
        interrupt: &Interrupt,
    ) -> Result<Outcome, FaultError> {
        let durable = self.durable();
        let known_there = {
            let mut core = self.core();
            change.directories().into_iter().for_each(|dir| core.heat(dir));
            if let Change::Rename(from, to, flags) = change {
                core.takes_along((from.0, &from.1), (to.0, &to.1), flags.exchange);
            }
            let mut named = Vec::new();
            for (dir, name) in change.places() {
                if let Some(dentry) = core.tree.leads_to(dir, name.as_bytes()) {
                    named.push(dentry.ino);
                    if dentry.kind == FileKind::Directory {
                        core.spare(dentry.ino);
                    }
                }
            }
            let mut all = change.directories().into_iter().chain(change.inode()).chain(named);
            let known_there = all.all(|ino| core.tree.is_stored(ino, durable));
            // A file without a name goes to the server only when it must.
            self.room_wanted.fetch_or(!known_there, Ordering::Relaxed);
            // What is durable is in the order in which it was done.
            known_there && !core.tree.is_dirty() && !core.in_flight
        };
        if !known_there {
            self.ship_before(interrupt)?;
        }
        // Others may change it too, and each wait until the other one has heard. And to be changed so a split directory is recalled, from
        // this host too: what the kernel keeps of its names goes then.
        let locked = change.directories().into_iter().chain(change.inode()).collect();
        let _waits = self.waits_with_locks(locked);
        self.give_back(change);
        let operation = Some(change.into());
        let ask = Ask::Change(ChangeRequest { forget_below: 0, execute, operation });
        let number = self.link.begin_change();
        let answers = self.ask_change(&ask, number, Some(interrupt));
        if let Err(FaultError::Interrupted) = answers {
            self.take_over(change.clone(), ask, number);
            return Err(FaultError::Interrupted);
        }
        self.link.end_change(number);
        let answer = answers?.into_iter().next();
        if let Some(Answer::Changed(Changed { unheard, .. })) = &answer
            && !unheard.is_empty()
        {
            self.await_all_heard(0, unheard.clone(), Some(interrupt))?;
        }
        match answer {
            Some(Answer::Changed(changed)) if changed.error != 0 => {
                Ok(Outcome::Refused(error_of(changed.error)?))
            }
            Some(Answer::Changed(changed)) if changed.yours => Ok(Outcome::Yours),
            Some(Answer::Changed(changed)) if changed.split => Ok(Outcome::Split),
            Some(Answer::Changed(changed)) => {
                // Rows of what is made by request take memory that nothing else looks at: it comes with no listing, and an
                // empty file has no data.
                self.trim();
                Ok(Outcome::Done((changed.ino != 0).then_some(Ino(changed.ino))))
            }
            _ => Err(FaultError::Broken("the server's answer is of another kind than asked for".to_string())),
        }
    }

    /// Gives back the files that a change is about and that are owned by themselves, if all of them is stored: the server
    /// would recall them.
    fn give_back(&self, change: &Change) {
        let mut core = self.core();
        let named = change
            .places()
            .into_iter()
            .filter_map(|(dir, name)| core.tree.leads_to(dir, name.as_bytes()).map(|dentry| dentry.ino));
        let files = change.inode().into_iter().chain(named).collect();
        self.give_back_files(&mut core, files, self.durable());
    }

    /// Gives back those of the files of which the server has everything, by this batch. From looking until it is said nobody here
    /// changes one, or asks for it anew. `false`: it could not be said now.
    pub(super) fn give_back_files(&self, core: &mut Core, mut files: Vec<Ino>, durable: Sequence) -> bool {
        let Some(connection) = self.link.connected() else { return true };
        files.retain(|ino| core.may_give_back(*ino, durable));
        let (of, event) = core.seen;
        if files.is_empty() || of != connection {
            return files.is_empty();
        }
        let inos = files.iter().map(|ino| ino.0).collect();
        let said = self.link.try_send_on(connection, Ask::GiveBack(GiveBack { inos, seen: event }));
        if said == Some(true) {
            files.into_iter().for_each(|ino| core.tree.disown(ino));
        }
        said.is_some()
    }

    /// Ships what was changed before a change that the server is asked for.
    fn ship_before(&self, interrupt: &Interrupt) -> Result<(), FaultError> {
        let mut pressed = false;
        loop {
            match self.ledger.flush(Some(interrupt)) {
                Ok(()) => return Ok(()),
                // Whoever changes something else, perhaps to make room, is not the one who has to wait for it.
                Err(FlushError::NoSpace) if !pressed => {
                    pressed = true;
                    self.ledger.press();
                }
                Err(FlushError::NoSpace) => return Err(FaultError::NoSpace),
                Err(FlushError::Interrupted) => return Err(FaultError::Interrupted),
                Err(FlushError::Ended(reason) | FlushError::Lost(reason)) => {
                    return Err(FaultError::Ended(reason));
                }
                Err(FlushError::Replaced) => {}
                Err(FlushError::Store(reason)) => {
                    tracing::warn!(reason, "a change waits for others that cannot be shipped yet");
                    if interrupt.wait_timeout(AGAIN) {
                        return Err(FaultError::Interrupted);
                    }
                }
            }
        }
    }
}
