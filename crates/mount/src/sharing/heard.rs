//! Waiting until all hosts have heard of what others have changed, before anybody here is shown it (`docs/sharing.md`).

use hayloft_fuse::Interrupt;
use hayloft_model::Ino;
use hayloft_wire::Hear;
use hayloft_wire::client_message::Body as Ask;

use crate::core::Client;
use crate::sharing::fault::FaultError;

/// A call that has the locks of directories in the kernel, and waits.
pub(crate) struct Waits<'a> {
    client: &'a Client,
    dirs: Vec<Ino>,
    for_others: bool,
}

impl Client {
    /// Waits until all others have heard of a change (0: of none), and of what has changed up to now of these inodes.
    pub(crate) fn await_all_heard(
        &self,
        change: u64,
        inos: Vec<u64>,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), FaultError> {
        self.ask(Ask::Hear(Hear { change, inos }), interrupt)?;
        self.core().tree.heard(&[change]);
        Ok(())
    }

    /// As long as this lasts a call has the locks of these directories and waits for others to hear of something. They may wait
    /// for the same here: who needs such a lock for that does not wait for it.
    pub(crate) fn waits_with_locks(&self, dirs: Vec<Ino>) -> Waits<'_> {
        self.core().names.wait(&dirs, true);
        Waits { client: self, dirs, for_others: true }
    }

    /// As long as this lasts a call has the locks of these directories and waits for what comes in the stream: the thread that
    /// reads it does not wait for such a lock.
    pub(crate) fn asks_with_locks(&self, dirs: Vec<Ino>) -> Waits<'_> {
        self.core().names.wait(&dirs, false);
        Waits { client: self, dirs, for_others: false }
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.client.core().names.end_wait(&self.dirs, self.for_others);
    }
}
