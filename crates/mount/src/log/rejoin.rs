//! A session that the server has ended while this host was cut off, since others needed what it held: another one
//! takes its place on the same mount.
//!
//! Inode numbers are never used twice, so what the kernel knows by its number is the same file still, or gone (ESTALE).
//! Everything else that is known here, in the kernel as well, is forgotten. What no batch has taken to the server is the
//! first batch of the new session. When others have changed what it is about, it is kept in a folder of this host and
//! named; whoever waits for it to be durable, or asks for it next, is told once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hayloft_model::{Ino, Sequence};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Commit, Failed, FailureCode, Welcome};

use crate::core::{Client, Core};
use crate::log::committer;
use crate::log::replaced::Kept;
use crate::log::rescue::Unsent;
use crate::session::link::{CallError, Line};

/// How long to wait for calls under way, and for the committer, which do not wait for the server.
const PAUSE: Duration = Duration::from_micros(200);

/// Changes that an ended session has not taken to the server, and that may be applied still.
#[derive(Debug)]
pub(crate) struct Restoring {
    unsent: Unsent,
    /// That session.
    of: u64,
    /// Why it was ended.
    reason: String,
}

impl Client {
    /// See [`crate::session::link::Receiver::replace`].
    pub(crate) fn leave_session(&self, failed: &Failed) -> Sequence {
        let reason = failed.message.as_str();
        {
            let mut core = self.core();
            core.giving.clear();
            // From now on nothing more is changed here.
            core.tree.disown_all();
        }
        self.await_all_writes();
        self.note_arrived();
        let (last, word) = loop {
            let mut core = self.core();
            if core.in_flight || self.ledger.is_busy() {
                drop(core);
                std::thread::sleep(PAUSE);
                continue;
            }
            // What the session before this one has left is shipped before anything else is changed.
            let mut restoring = self.restoring.lock();
            let unsent = match *restoring {
                Some(_) => None,
                None => Unsent::take(self, &mut core, self.ledger.next_sequence()),
            };
            // Together with the tree: who asks for durability from now on asks about what comes.
            let last = self.ledger.lose(unsent.is_some());
            if let Some(unsent) = unsent {
                self.budget.add_in_flight(unsent.shipment.bytes as i64);
                let (of, reason) = (self.link.replaced(), reason.to_string());
                *restoring = Some(Restoring { unsent, of, reason });
            }
            let word = self.forget_all(&mut core, |core| {
                if !failed.kept.is_empty() {
                    self.keep_files(core, failed);
                }
            });
            break (last, word);
        };
        if let Some(locks) = self.locks.get() {
            locks.lose_all();
        }
        // Before anybody is answered again.
        self.tell_kernel(word);
        self.await_heard();
        self.evictions.fetch_add(1, Ordering::Relaxed);
        last
    }

    /// See [`crate::session::link::Receiver::restore`].
    pub(crate) fn restore_unsent(&self, line: &mut Line<'_>) -> Result<(), CallError> {
        self.note_arrived();
        let Some(mut restoring) = self.restoring.lock().take() else { return Ok(()) };
        match self.ask_to_restore(&mut restoring, line) {
            Ok(()) => {
                self.restored(&restoring);
                Ok(())
            }
            Err(CallError::Failed(failed)) if is_final(failed.code()) => {
                tracing::warn!(
                    reason = failed.message,
                    "what the ended session had not shipped cannot be applied"
                );
                self.give_up_restoring(restoring);
                Ok(())
            }
            Err(error) => {
                *self.restoring.lock() = Some(restoring);
                Err(error)
            }
        }
    }

    /// They may have arrived, and the acknowledgement got lost.
    fn note_arrived(&self) {
        let last = self.link.last_sequence();
        let has_arrived = |restoring: &mut Restoring| restoring.unsent.shipment.cut.batch.sequence.0 <= last;
        let arrived = self.restoring.lock().take_if(has_arrived);
        arrived.into_iter().for_each(|restoring| self.restored(&restoring));
    }

    fn restored(&self, restoring: &Restoring) {
        let sequence = restoring.unsent.shipment.cut.batch.sequence;
        self.budget.add_in_flight(-(restoring.unsent.shipment.bytes as i64));
        self.core().shipped(sequence);
        self.ledger.restored(sequence);
        let inodes = restoring.unsent.inodes().count();
        tracing::info!(inodes, "what the ended session had not shipped is applied");
    }

    fn ask_to_restore(&self, restoring: &mut Restoring, line: &mut Line<'_>) -> Result<(), CallError> {
        let shipment = &mut restoring.unsent.shipment;
        let commit = committer::say(self, shipment, &mut |ask| line.say(ask))?;
        match line.ask(Ask::Commit(Commit { restores: restoring.of, ..commit }))? {
            Answer::Committed(committed) => {
                committed.status.into_iter().for_each(|status| self.set_usage(status));
                Ok(())
            }
            _ => Err(CallError::Broken),
        }
    }

    /// The committer keeps them.
    fn give_up_restoring(&self, Restoring { unsent, reason, .. }: Restoring) {
        self.note_failed(&mut self.core(), &unsent);
        self.unsent.lock().push((unsent, reason));
        self.ledger.kick();
    }

    /// There is no other session that could bring them.
    pub(crate) fn restore_no_more(&self) {
        let restoring = self.restoring.lock().take();
        restoring.into_iter().for_each(|restoring| self.give_up_restoring(restoring));
    }

    /// Waits until writes that were admitted are in the tree.
    fn await_all_writes(&self) {
        let is_written = |file: &Arc<crate::cache::data::File>| file.writes.load(Ordering::Acquire) > 0;
        let written: Vec<Arc<crate::cache::data::File>> =
            self.core().files.values().filter(|file| is_written(file)).cloned().collect();
        for file in written {
            while is_written(&file) {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Who asks for the durability of these is told that it is not to be had.
    fn note_failed(&self, core: &mut Core, unsent: &Unsent) {
        let known: Vec<Ino> = unsent.inodes().filter(|ino| core.tree.lookups(*ino) > 0).collect();
        for ino in &known {
            // Its first part is among what is lost.
            if let Some(append) = core.appending.get_mut(ino)
                && append.goes_on()
                && let Some(tid) = append.thread()
            {
                core.torn.insert(*ino, tid);
            }
        }
        core.failed.extend(known);
    }

    /// Forgets what is known here; returns what the kernel has to be told.
    /// `keep` is done before that is worked out, when nothing of the tree is in memory.
    fn forget_all(&self, core: &mut Core, keep: impl FnOnce(&mut Core)) -> crate::kernel::Word {
        let mut stale = core.tree.restart();
        keep(core);
        core.tree.take_ended();
        core.ways.clear();
        core.released = None;
        self.drop_data(core, &stale);
        let files: Vec<Ino> = core.files.keys().copied().collect();
        files.into_iter().for_each(|ino| self.drop_file(core, ino));
        let mut names = core.take_all_names(std::mem::take(&mut stale.names));
        if !core.names.epochs {
            // Such a kernel keeps names only of what is owned.
            names.clear();
        }
        core.word(stale, names, None)
    }

    /// The volume has another tree: files that are open are of this one until they are closed.
    fn keep_files(&self, core: &mut Core, failed: &Failed) {
        let tree = self.trees.fetch_add(1, Ordering::Relaxed);
        if core.replace_files(tree) {
            let kept = Kept { name: failed.kept.clone(), id: failed.kept_id };
            self.replaced.add(tree, kept);
        }
    }

    /// See [`crate::session::link::Receiver::begun`].
    pub(crate) fn begin_session(&self, welcome: &Welcome) {
        if let Some(status) = welcome.status {
            self.set_usage(status);
        }
    }

    /// Whether changes of an inode could not be applied, which nobody has been told of who asked for their durability.
    pub(crate) fn take_failed(&self, ino: Ino) -> bool {
        self.core().failed.remove(&ino)
    }
}

/// Whether what was refused for this would be refused again.
fn is_final(code: FailureCode) -> bool {
    !matches!(
        code,
        FailureCode::Unavailable
            | FailureCode::Uncertain
            | FailureCode::Damaged
            | FailureCode::Store
            | FailureCode::SessionEnded
    )
}
