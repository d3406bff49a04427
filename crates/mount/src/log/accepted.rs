//! What the server has applied, and not made durable yet: the link keeps it (`hayloft_model::replay`). Who asks for
//! durability waits for the server's store; what could not be brought back is named.

use std::time::Duration;

use hayloft_fuse::Interrupt;
use hayloft_model::Ino;
use hayloft_wire::{Entry, FailureCode, WrittenEntry};
use prost::Message;

use crate::core::Client;
use crate::log::ledger::FlushError;
use crate::session::link::CallError;

/// How long to wait before another server is asked.
const AGAIN: Duration = Duration::from_millis(50);
/// Names that a message says at most.
const NAMES_MAX: usize = 16;

/// When durability was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpTo {
    losses: u64,
    ticket: u64,
}

impl Client {
    /// Somebody asks for the durability of everything up to now.
    pub(crate) fn ask_durable(&self) -> UpTo {
        UpTo { losses: self.link.losses(), ticket: self.ledger.ask() }
    }

    /// Waits until everything up to when that was asked is durable, or an attempt has failed.
    pub(crate) fn flush_durably(
        &self,
        UpTo { losses, ticket }: UpTo,
        interrupt: Option<&Interrupt>,
    ) -> Result<(), FlushError> {
        self.ledger.want_durable();
        self.ledger.flush_from(ticket, interrupt)?;
        loop {
            let connection = self.link.connected();
            match self.link.sync(interrupt) {
                Ok(()) if self.link.losses() == losses => return Ok(()),
                Ok(()) => return Err(FlushError::Lost(self.link.lost().unwrap_or_default())),
                Err(CallError::Interrupted) => return Err(FlushError::Interrupted),
                Err(CallError::Ended(reason)) => return Err(FlushError::Ended(reason)),
                Err(CallError::Broken | CallError::Replaced) => {}
                // Another server has taken over, or this one stops: that one is asked.
                Err(CallError::Failed(failed))
                    if matches!(failed.code(), FailureCode::Unavailable | FailureCode::SessionEnded) =>
                {
                    connection.into_iter().for_each(|connection| self.link.abandon(connection));
                }
                Err(CallError::Failed(failed)) => return Err(FlushError::Store(failed.message)),
            }
            std::thread::sleep(AGAIN);
            if interrupt.is_some_and(Interrupt::interrupted) {
                return Err(FlushError::Interrupted);
            }
        }
    }

    /// As [`Client::flush_durably`], for everything: changes that could not be applied, and that nobody has been told of,
    /// are told once.
    pub(crate) fn flush_all(&self) -> Result<(), FlushError> {
        self.flush_durably(self.ask_durable(), None)?;
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
        let inos: Vec<Ino> = own.iter().flat_map(WrittenEntry::inos).map(Ino).collect();
        // What is written to a file says its number only.
        let of_what = match names[..] {
            [] => {
                let numbers: Vec<String> = inos.iter().take(NAMES_MAX).map(|ino| ino.0.to_string()).collect();
                format!("inode numbers: {}", numbers.join(", "))
            }
            _ => format!("names: {}", names.join(", ")),
        };
        let message = format!(
            "the server was lost before it had made {} changes durable, and the session was ended before they could be \
             brought back: they are gone unless others have brought them ({of_what})",
            own.len(),
        );
        tracing::error!("{message}");
        // Who asks for the durability of one of these is told as well.
        {
            let mut core = self.core();
            let known: Vec<Ino> = inos.into_iter().filter(|ino| core.tree.lookups(*ino) > 0).collect();
            core.failed.extend(known);
        }
        self.ledger.tell_lost(&message);
        Some(message)
    }
}
