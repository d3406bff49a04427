//! The server stops, starts, or another one takes its place.

use super::*;

/// How long a server goes on that another one has taken the place of, at most: for so long it counts that it has seen the volume to be
/// its own.
pub(super) const REPLACED_FOR: u64 = LEASE / 2;

impl Stored {
    /// What is written down of another tree in this one's place: who knew this one, and its history.
    pub(crate) fn with_tree(&self, (rows, usage, next_ino): (Rows, Usage, u64), are_moved: bool) -> Stored {
        let moved = |session: &StoredSession| StoredSession { moved: are_moved, ..session.clone() };
        let sessions = self.sessions.iter().map(|(id, session)| (*id, moved(session))).collect();
        Stored { rows, usage, next_ino, sessions, ..self.clone() }
    }
}

impl World {
    pub(crate) fn server_loses(&mut self, connection: u64, session: SessionId) {
        let servers = [Some(&mut self.server), self.replaced.as_deref_mut()];
        for server in servers.into_iter().flatten() {
            if let Some(live) = server.live.get_mut(&session)
                && live.connection == Some(connection)
            {
                (live.connection, live.claimed) = (None, false);
            }
        }
    }

    /// The server that a client is connected to.
    pub(crate) fn server_of(&self, at: usize) -> Option<&Server> {
        let life = self.connections.get(&self.clients[at].connection?)?.server;
        let servers = [Some(&self.server), self.replaced.as_deref()];
        servers.into_iter().flatten().find(|server| server.life == life && server.up)
    }

    /// Lets one of the servers do something, if it is there still.
    pub(crate) fn on_server(&mut self, life: u64, act: impl FnOnce(&mut World)) -> bool {
        if self.server.life == life {
            if self.server.up {
                act(self);
            }
            return self.server.up;
        }
        let Some(replaced) = self.replaced.as_deref_mut().filter(|server| server.life == life) else {
            return false;
        };
        std::mem::swap(&mut self.server, replaced);
        act(self);
        if let Some(replaced) = self.replaced.as_deref_mut() {
            std::mem::swap(&mut self.server, replaced);
            if replaced.order.doomed {
                self.end_replaced();
            }
        }
        true
    }

    fn cut_connections(&mut self, life: u64) {
        let of = self.connections.iter().filter(|(_, connection)| connection.server == life);
        let connections: Vec<u64> = of.map(|(number, _)| *number).collect();
        connections.into_iter().for_each(|connection| self.cut_connection(connection));
    }

    /// The server that another one has taken the place of knows.
    pub(crate) fn end_replaced(&mut self) {
        if let Some(replaced) = self.replaced.take() {
            trace!(self, "the server that was replaced ends");
            self.has_fault();
            self.cut_connections(replaced.life);
        }
    }

    pub(crate) fn stop_server(&mut self) {
        if !self.server.up {
            return;
        }
        self.end_replaced();
        let lost = self.lose_suffix();
        trace!(self, "the server stops, and loses {lost:?}");
        self.server.up = false;
        self.cut_connections(self.server.life);
        self.server.life += 1;
        let pause = self.rng.between(5, LEASE / 2);
        self.after(pause, What::ServerStart);
    }

    pub(crate) fn start_server(&mut self) {
        if !self.server.up {
            trace!(self, "the server starts");
            let life = self.server.life;
            let store = self.store_as_found();
            let store = self.found_at_rest(store);
            drop(self.next_server(life, store));
        }
    }

    /// Another server opens the volume, and the present one does not know yet. That it asks its store for something, or
    /// looks whether the volume is its own, tells it.
    pub(crate) fn take_over(&mut self) {
        if !self.server.up || self.replaced.is_some() || self.draining {
            return;
        }
        trace!(self, "another server takes over");
        let life = self.server.life;
        let store = self.store_as_found();
        let mut replaced = self.next_server(life + 1, store);
        replaced.order.fenced = true;
        self.replaced = Some(Box::new(replaced));
        let most = if self.is_broken(Rule::ReplacedGoesOn) { 4 * LEASE } else { REPLACED_FOR };
        let wait = self.rng.between(2, most);
        self.after(wait, What::EndReplaced(life));
    }

    /// The volume has another database from now on, which a server opens.
    pub(crate) fn exchange_store(&mut self, store: Stored) {
        let life = self.server.life;
        drop(self.next_server(life + 1, store));
        self.cut_connections(life);
    }

    /// A server opens what it has found of the store of the present one. Returns the latter.
    pub(super) fn next_server(&mut self, life: u64, store: Stored) -> Server {
        let old = &self.server;
        let next = Server {
            fault: old.fault,
            skew: old.skew,
            drain_until: old.drain_until,
            quota: old.quota.clone(),
            ..Server::opened(store, life)
        };
        let old = std::mem::replace(&mut self.server, next);
        self.set_splits();
        self.open_store();
        let sessions: Vec<SessionId> = self.server.stored.sessions.keys().copied().collect();
        for session in sessions {
            self.server.grants.join(session, false);
            let mut live = Live { heard: self.now, awaited: true, may_bring: true, ..Live::default() };
            let is_moved = self.server.stored.sessions[&session].moved;
            if self.is_broken(Rule::NoClaimGrace) || is_moved && self.is_broken(Rule::ServeBeforeMoved) {
                drop(self.server.grants.claim(session, &[]));
                live.awaited = false;
            }
            self.server.live.insert(session, live);
        }
        self.collect();
        self.pump();
        old
    }
}
