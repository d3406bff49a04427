//! What the server has applied, and not made durable yet: the link keeps it (`hayloft_model::replay`). Who asks for
//! durability waits for the server's store; what could not be brought back is named.

use hayloft_fuse::Interrupt;
use hayloft_wire::{Entry, WrittenEntry};
use prost::Message;

use crate::core::Client;
use crate::log::committer::FlushError;
use crate::session::link::CallError;

/// Names that a message says at most.
const NAMES_MAX: usize = 16;

impl Client {
    /// Waits until everything up to now is durable, or an attempt has failed.
    pub(crate) fn flush_durably(&self, interrupt: Option<&Interrupt>) -> Result<(), FlushError> {
        let losses = self.link.losses();
        self.ledger.want_durable();
        self.ledger.flush(interrupt)?;
        match self.link.sync(interrupt) {
            Ok(()) if self.link.losses() == losses => Ok(()),
            Ok(()) => Err(FlushError::Lost(self.link.lost().unwrap_or_default())),
            Err(CallError::Interrupted) => Err(FlushError::Interrupted),
            Err(CallError::Failed(failed)) => Err(FlushError::Store(failed.message)),
            Err(CallError::Broken | CallError::Replaced) => Err(FlushError::Replaced),
            Err(CallError::Ended(reason)) => Err(FlushError::Ended(reason)),
        }
    }

    /// As [`Client::flush_durably`], for everything: changes that could not be applied, and that nobody has been told of,
    /// are told once.
    pub(crate) fn flush_all(&self) -> Result<(), FlushError> {
        self.flush_durably(None)?;
        self.ledger.take_untold().map_or(Ok(()), |kept| Err(FlushError::Lost(kept)))
    }

    /// The session was ended, and the server does not know these any more: what of them is this mount's own, and was not
    /// brought back by others, is lost.
    pub(crate) fn lose_accepted(&self, session: u64, entries: &[Entry]) -> Option<String> {
        let written = entries.iter().filter_map(|entry| WrittenEntry::decode(entry.written.clone()).ok());
        let own: Vec<WrittenEntry> = written.filter(|entry| entry.session == session).collect();
        if own.is_empty() {
            return None;
        }
        let names = own.iter().flat_map(WrittenEntry::names).take(NAMES_MAX);
        let names: Vec<String> = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        let message = format!(
            "the server was lost before it had made {} changes durable, and the session was ended before they could be \
             brought back: they are gone unless others have brought them (names: {})",
            own.len(),
            names.join(", ")
        );
        tracing::error!("{message}");
        self.ledger.tell_lost(&message);
        Some(message)
    }
}
