//! What is said when all have heard of what it shows.

use super::*;

/// Something that waits until others have heard of changes.
#[derive(Debug)]
pub(super) struct Waits {
    changes: Vec<Ticket>,
    session: SessionId,
    connection: u64,
    about: BTreeSet<Ino>,
    message: ToClient,
}

impl Server {
    /// Changes of which all have heard that a session was told of, since it was told so last.
    pub(crate) fn take_heard(&mut self, session: SessionId) -> Vec<u64> {
        self.live.get_mut(&session).map(|live| std::mem::take(&mut live.heard_by_all)).unwrap_or_default()
    }

    /// As [`Grants::tell_unheard`].
    pub(super) fn tell_unheard(&mut self, session: SessionId, ino: Ino) -> Vec<u64> {
        self.grants.tell_unheard(session, ino).into_iter().map(|change| change.0).collect()
    }

    /// All others have heard of a change that these were told of before.
    pub(super) fn heard_by_others(&mut self, change: Ticket, to: &BTreeSet<SessionId>) {
        for session in to {
            if let Some(live) = self.live.get_mut(session) {
                live.heard_by_all.push(change.0);
            }
        }
    }
}

impl World {
    /// Says how these are when others have heard of it.
    pub(super) fn say_when_heard(
        &mut self,
        (session, connection): (SessionId, u64),
        about: BTreeSet<Ino>,
        message: ToClient,
    ) {
        let inos: Vec<Ino> = about.iter().copied().collect();
        let changes = self.server.grants.unheard_about(session, &inos);
        self.server.hearers.push(Waits { changes, session, connection, about, message });
        self.say_heard();
    }

    /// Answers who waits until others have heard of a change.
    pub(super) fn hear(&mut self, (session, connection): (SessionId, u64), request: u64, change: u64) {
        let (changes, message) = (vec![Ticket(change)], ToClient::Heard { request });
        self.server.hearers.push(Waits { changes, session, connection, about: BTreeSet::new(), message });
        self.say_heard();
    }

    /// Who has not heard of something, while somebody waits for that.
    pub(super) fn waited_for_to_hear(&self) -> BTreeSet<SessionId> {
        let is_there = |waits: &&Waits| self.connections.contains_key(&waits.connection);
        let waits = self.server.hearers.iter().filter(is_there);
        waits
            .flat_map(|waits| waits.changes.iter().map(|change| (*change, waits.session)))
            .flat_map(|(change, session)| {
                self.server.grants.unheard_by(change).filter(move |left| *left != session)
            })
            .collect()
    }

    pub(super) fn say_heard(&mut self) {
        let grants = &self.server.grants;
        let is_heard =
            |waits: &mut Waits| !waits.changes.iter().any(|change| grants.is_unheard(*change, waits.session));
        let heard: Vec<Waits> = self.server.hearers.extract_if(.., is_heard).collect();
        for Waits { session, connection, about, message, .. } in heard {
            match self.is_stuck_about(about.iter().copied()) {
                true => self.when_durable(Then::Say(connection, message)),
                false => self.send_about(session, connection, about, message),
            }
        }
    }
}
