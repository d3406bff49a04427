//! A store that is put back to an older copy while volumes are mounted (`docs/adr/0015`): who has seen more than the copy
//! holds must not go on.

use std::collections::BTreeSet;

use hayloft_model::{Ino, Name, Record, SessionId};

use crate::Rule;
use crate::operation::Process;
use crate::reference::Kept;
use crate::rng::Rng;
use crate::server::{Order, Stored};
use crate::trees::replaces_trees;
use crate::world::{LEASE, What, World, trace};

/// Where the choice of worlds begins in which that happens.
const COPIES: u64 = 0x0c0b_1e5a;

/// What a client has heard of last: an opening of the store, and how far that was.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heard {
    pub(crate) opening: u64,
    pub(crate) mark: u64,
}

/// Each opening of the store, with the mark that it found; and the mark now. Everything that is written counts it up.
#[derive(Clone, Debug)]
pub(crate) struct History {
    openings: Vec<(u64, u64)>,
    pub(crate) mark: u64,
}

impl Default for History {
    fn default() -> History {
        History { openings: vec![(1, 0)], mark: 0 }
    }
}

impl History {
    pub(crate) fn opening(&self) -> u64 {
        self.openings.last().map_or(0, |(id, _)| *id)
    }

    /// Where an opening stands that is over, and up to which mark of it all was durable.
    pub(crate) fn ended(&self, opening: u64) -> Option<(usize, u64)> {
        let at = self.openings.iter().position(|(id, _)| *id == opening)?;
        self.openings.get(at + 1).map(|(_, from)| (at, *from))
    }

    /// Whether a client that has heard of this may go on.
    fn holds(&self, heard: Heard) -> bool {
        if heard.opening == 0 {
            return true;
        }
        let at = self.openings.iter().position(|(id, _)| *id == heard.opening);
        at.is_some_and(|at| heard.mark <= self.openings.get(at + 1).map_or(self.mark, |(_, from)| *from))
    }
}

/// An older state of everything that is durable.
pub(crate) struct Older {
    stored: Stored,
    reference: Kept,
}

/// What becomes of the store, beside what the server does.
#[derive(Default)]
pub(crate) struct Fate {
    older: Option<Older>,
    is_put_back: bool,
    away_until: u64,
    openings: u64,
    /// Names that clients have changed and not shipped, which cannot go on.
    unsent: BTreeSet<(SessionId, (u64, u8))>,
}

impl Fate {
    /// Whether the store was put back once.
    pub(crate) fn is_put_back(&self) -> bool {
        self.is_put_back
    }
}

impl World {
    /// In one world of thirty-two the store is put back once, unless the volume gets other trees there.
    pub(crate) fn plan_copy(&mut self) {
        self.fate.openings = 1;
        let mut other = Rng::new(self.config.seed ^ COPIES);
        if other.permille(31) && !replaces_trees(self.config.seed) {
            let when = other.between(20, 3 * LEASE);
            self.after(when, What::Copy);
            self.after(when + other.between(10, 3 * LEASE), What::PutBack);
        }
    }

    pub(crate) fn copy_store(&mut self) {
        trace!(self, "the store is copied");
        let reference = self.reference.keep();
        let stored = self.server.durable.clone();
        self.fate.older = Some(Older { stored, reference });
    }

    /// The store is going to be put back. That takes longer than a lease: nobody answers any more then.
    pub(crate) fn take_away(&mut self) {
        if !self.draining {
            self.stop_server();
            self.fate.away_until = self.now + LEASE + 20;
            self.has_fault();
        }
    }

    fn put_back(&mut self, older: Older) {
        trace!(self, "the store is put back");
        self.server.stored = older.stored;
        self.fate.is_put_back = true;
        let history = &self.server.stored.history;
        let clients = self.clients.iter();
        let (on, astray): (Vec<_>, Vec<_>) = clients.partition(|client| history.holds(client.history));
        // Those of them that the copy does not have were ended before.
        let sessions = &self.server.stored.sessions;
        let on: Vec<_> = on.into_iter().filter(|client| sessions.contains_key(&client.session)).collect();
        // What only those keep that do not go on nobody brings.
        let entries = on.iter().flat_map(|client| client.kept.to_bring(self.fate.openings + 1));
        let keeps = entries.map(|entry| (entry.opening, entry.mark)).collect();
        let on: BTreeSet<SessionId> = on.into_iter().map(|client| client.session).collect();
        for (session, from) in astray.into_iter().map(|client| (client.session, client.on_its_way())) {
            let unsent = self.reference.unsent_names(session, from);
            self.fate.unsent.extend(unsent.into_iter().map(|place| (session, place)));
        }
        let verdict = self.reference.put_back(&older.reference, (&on, &keeps), self.now);
        self.judge("the store is put back", verdict);
        self.has_fault();
    }

    /// Whether the server cannot be started yet: then it is a little later.
    pub(crate) fn is_away(&mut self) -> bool {
        let wait = self.fate.away_until.saturating_sub(self.now);
        if wait > 0 {
            self.after(wait, What::ServerStart);
        }
        wait > 0
    }

    /// The store is opened.
    pub(crate) fn open_store(&mut self) {
        if self.fate.away_until > 0
            && let Some(older) = self.fate.older.take()
        {
            self.put_back(older);
        }
        self.fate.openings += 1;
        let history = &mut self.server.stored.history;
        history.openings.push((self.fate.openings, history.mark));
        let mark = history.mark;
        self.server.durable = self.server.stored.clone();
        self.server.order = Order::new(mark);
        self.begin_notes(mark);
    }

    /// Whether a client may not go on with what the store holds.
    pub(crate) fn is_astray(&self, heard: Heard) -> bool {
        !self.is_broken(Rule::TrustOlderStore) && !self.server.stored.history.holds(heard)
    }

    /// The store is not the one that the client knows: all calls fail from now on, and what was not shipped is kept.
    pub(crate) fn end_mount(&mut self, at: usize) {
        trace!(self, "c{at} finds an older store");
        self.has_fault();
        if let Some(connection) = self.clients[at].connection.take() {
            self.connections.remove(&connection);
        }
        let client = &mut self.clients[at];
        client.end();
        let (life, session) = (client.life, client.session);
        let records = client.take_unsent().records;
        let has = |(dir, name): (u64, u8)| {
            records.iter().any(|record| match record {
                Record::PutDentry(of, at, _) | Record::DeleteDentry(of, at) => {
                    (*of, at) == (Ino(dir), &Name::new(&[name]))
                }
                _ => false,
            })
        };
        let lost = self.fate.unsent.iter().find(|(of, place)| *of == session && !has(*place)).copied();
        if let Some((_, place)) = lost {
            self.fail(format!("c{at} has not kept what it has done to {place:?}"));
        }
        self.clients[at].processes.iter_mut().for_each(Process::close_all);
        self.wake_all(at);
        let wait = self.rng.between(20, 200);
        self.after(wait, What::Remount(at, life));
    }
}
