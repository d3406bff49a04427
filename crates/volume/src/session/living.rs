//! What is known of a session that has not ended.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use hayloft_model::Ino;
use hayloft_wire::{FailureCode, LETS_GO};
use tokio::sync::Notify;

use crate::config::Config;
use crate::database::tables::SessionRow;
use crate::session::silent::Owed;

/// What is spoken on the last connection of a session.
#[derive(Default)]
pub(crate) struct SpokenHere {
    pub(super) protocol: u32,
    /// What both sides can do beyond that.
    pub(crate) features: u64,
    /// The client's.
    pub(super) release: String,
}

/// How many inodes without a name a session is told of at a time, and how soon again of the first, milliseconds.
const TOLD_AT_ONCE: usize = 8192;
const TOLD_AGAIN_MS: u64 = 10_000;

/// How far a session was told which inodes that it uses have no name any more.
#[derive(Default)]
pub(super) struct ToldNameless {
    /// From here on, as a number.
    next: u64,
    not_before_ms: u64,
}

impl ToldNameless {
    /// What is told now.
    fn take(&mut self, orphans: &BTreeSet<Ino>, now_ms: u64) -> Vec<u64> {
        if now_ms < self.not_before_ms {
            return Vec::new();
        }
        let told: Vec<u64> = orphans.range(Ino(self.next)..).take(TOLD_AT_ONCE).map(|ino| ino.0).collect();
        match told.last() {
            Some(last) if told.len() == TOLD_AT_ONCE => self.next = last + 1,
            None if self.next == 0 => {}
            _ => *self = ToldNameless { next: 0, not_before_ms: now_ms + TOLD_AGAIN_MS },
        }
        told
    }
}

/// A session that has not ended.
pub(crate) struct Session {
    pub(crate) row: SessionRow,
    pub(crate) orphans: BTreeSet<Ino>,
    pub(super) told_nameless: ToldNameless,
    /// The connection that speaks for it.
    pub(crate) connection: Option<u64>,
    /// When it was last heard of, milliseconds after the server's start.
    pub(crate) heard: Arc<AtomicU64>,
    /// When it last brought something of a batch, or such was worked on.
    pub(crate) worked: Arc<AtomicU64>,
    /// Why the batch after the last one failed, if it did.
    pub(crate) failed: Option<FailureCode>,
    /// Whether the batch after the last one was applied is not known; until the database is open again.
    pub(crate) uncertain: bool,
    /// It was there when the volume was opened, and has not claimed since: it may bring back what was lost then.
    pub(crate) may_bring: bool,
    /// It has said what it owns, on whatever connection.
    pub(crate) has_claimed: bool,
    pub(crate) spoken: SpokenHere,
    /// How many connections have spoken for it.
    pub(super) connections: u64,
    /// When the last one began to, milliseconds after the server's start.
    pub(super) connected_ms: u64,
    /// What others wait for, see [`Owed`].
    pub(super) owed: Option<Owed>,
    /// How often this mount's sessions before this one were ended one soon after the other, see [`troubled`].
    pub(super) troubles: u32,
    /// When it began, or the volume was opened, milliseconds after the server's start.
    pub(super) begun_ms: u64,
    /// Ends the connection that speaks for it.
    pub(super) hang_up: Arc<Notify>,
}

impl Session {
    /// A session found in the tables: as if heard of just now.
    pub(crate) fn found(row: &SessionRow, now_ms: u64) -> Session {
        Session {
            row: row.clone(),
            orphans: BTreeSet::new(),
            told_nameless: ToldNameless::default(),
            connection: None,
            heard: Arc::new(AtomicU64::new(now_ms)),
            worked: Arc::new(AtomicU64::new(0)),
            failed: None,
            uncertain: false,
            may_bring: false,
            has_claimed: false,
            spoken: Default::default(),
            connections: 0,
            connected_ms: now_ms,
            owed: None,
            troubles: 0,
            begun_ms: now_ms,
            hang_up: Arc::default(),
        }
    }

    /// How long its client may go on without hearing from a server, milliseconds: the longest time that it was told of. A client keeps
    /// what it was told first.
    pub(crate) fn lease_ms(&self, config: &Config) -> u64 {
        self.row.lease_ms.max(config.lease.as_millis() as u64)
    }

    /// Whether it was not heard of for its lease. One that was there when the volume was opened has half as long more: a server that
    /// had the volume before may go on for a moment before it finds out, and its answers keep a host's lease as well.
    pub(crate) fn is_silent(&self, now_ms: u64, config: &Config) -> bool {
        let lease = self.lease_ms(config);
        let grace = if self.may_bring { lease / 2 } else { 0 };
        now_ms.saturating_sub(self.heard.load(Relaxed)) > lease + grace
    }

    /// Whether somebody on that host, of that peer, can know that its process is dead.
    pub(super) fn may_be_proved_dead(&self, host_id: &str, peer: &str) -> bool {
        let of = &self.row;
        self.connection.is_none() && !host_id.is_empty() && of.host_id == host_id && of.peer == peer
    }

    /// One that was there when the volume was opened.
    pub(crate) fn may_bring(row: &SessionRow, now_ms: u64) -> Session {
        Session { may_bring: true, ..Session::found(row, now_ms) }
    }

    /// Inodes that its kernel knows and that have no name, as far as it is time to tell it of them.
    pub(crate) fn nameless(&mut self, now_ms: u64) -> Vec<u64> {
        if self.spoken.features & LETS_GO == 0 {
            return Vec::new();
        }
        self.told_nameless.take(&self.orphans, now_ms)
    }

    /// Ends its connection, after what has arrived there is answered.
    pub(crate) fn hang_up(&self) {
        self.hang_up.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_told_of_all_that_has_no_name_in_parts_and_again_after_a_while() {
        let (mut told, all) = (ToldNameless::default(), (5..5 + 2 * TOLD_AT_ONCE as u64).collect::<Vec<_>>());
        let mut orphans: BTreeSet<Ino> = BTreeSet::new();
        assert!(told.take(&orphans, 0).is_empty());
        orphans.extend(all.iter().map(|ino| Ino(*ino)));
        let parts = [told.take(&orphans, 0), told.take(&orphans, 1)];
        assert_eq!(parts.concat(), all);
        assert!(told.take(&orphans, 2).is_empty(), "that was all");
        assert!(told.take(&orphans, 3).is_empty(), "it is not time yet");
        orphans.retain(|ino| ino.0 == 7);
        assert_eq!(told.take(&orphans, 2 + TOLD_AGAIN_MS), [7]);
        assert!(told.take(&orphans, 3 + TOLD_AGAIN_MS).is_empty());
    }
}
