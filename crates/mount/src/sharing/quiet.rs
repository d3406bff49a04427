//! Giving back what nobody here has changed for a while (ADR 0031): others look at it next, and would have each file recalled.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hayloft_model::grants::STRAY;
use hayloft_model::{FileKind, Ino, Record, Sequence};
use hayloft_wire::Release;
use hayloft_wire::client_message::Body as Ask;
use parking_lot::Mutex;

use crate::core::{Client, Core};

/// How long a file stays here after its last change was shipped. Who works on it most likely changes it again before.
const QUIET: Duration = Duration::from_millis(500);
/// Files that are given back with one message, and one hold of the lock.
const AT_ONCE: usize = 1024;

/// Files that were owned by themselves when a batch with them was shipped, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Shipped(Mutex<VecDeque<(Instant, Sequence, Vec<Ino>)>>);

impl Shipped {
    /// The oldest, if they have been quiet for long enough.
    fn due(&self) -> Option<(Sequence, Vec<Ino>)> {
        let mut shipped = self.0.lock();
        shipped.front().filter(|(at, ..)| at.elapsed() >= QUIET)?;
        shipped.pop_front().map(|(_, sequence, files)| (sequence, files))
    }
}

impl Client {
    /// The server has a batch.
    pub(crate) fn note_shipped(&self, sequence: Sequence, records: &[Record]) {
        let files: Vec<Ino> = {
            let core = self.core();
            let owned = records.iter().filter_map(|record| match record {
                Record::PutInode(ino, row) if row.kind() != FileKind::Directory && row.parent != STRAY => {
                    core.tree.owns_itself(*ino).then_some(*ino)
                }
                _ => None,
            });
            owned.collect()
        };
        if !files.is_empty() {
            self.shipped.0.lock().push_back((Instant::now(), sequence, files));
        }
        self.give_back_quiet();
    }

    /// Gives back what is due. What has changed since is among the files of a later batch.
    pub(crate) fn give_back_quiet(&self) {
        while let Some((sequence, files)) = self.shipped.due() {
            // Batches of a session that has followed another are counted anew.
            let sequence = sequence.min(self.durable());
            for files in files.chunks(AT_ONCE) {
                let mut core = self.core();
                // Without its home nothing would cover the row.
                let has_home =
                    |ino: &Ino| core.tree.inode(*ino).is_ok_and(|row| core.tree.has_inode(row.parent));
                let (covered, lone): (Vec<Ino>, Vec<Ino>) = files.iter().copied().partition(has_home);
                let is_said = self.give_back_files(&mut core, covered, sequence)
                    && self.have_recalled(&core, lone, sequence);
                if !is_said {
                    // At the next time.
                    self.shipped.0.lock().push_back((Instant::now(), sequence, files.to_vec()));
                }
            }
        }
    }

    /// What is here of these has to go, as with a recall: the server is asked for that.
    /// `false`: it could not be said now.
    fn have_recalled(&self, core: &Core, mut files: Vec<Ino>, durable: Sequence) -> bool {
        files.retain(|ino| core.may_give_back(*ino, durable));
        if let Some(connection) = self.link.connected().filter(|_| !files.is_empty()) {
            let inos = files.into_iter().map(|ino| ino.0).collect();
            // The thread waits for no writer.
            return self.link.try_send_on(connection, Ask::Release(Release { inos })).is_some();
        }
        true
    }
}
