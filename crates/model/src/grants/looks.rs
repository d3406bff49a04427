//! What others may want to know of grants.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::grants::{Awaited, Grant, Grants, Holding, Mode, Object, Request, STRAY, Stage, Waiting};
use crate::{Ino, SessionId};

impl Grants {
    /// Whether the session has joined and not ended.
    pub fn knows(&self, session: SessionId) -> bool {
        self.peers.contains_key(&session)
    }

    /// Whether there is no other session.
    pub fn is_alone(&self, session: SessionId) -> bool {
        self.peers.keys().all(|peer| *peer == session)
    }

    /// Sessions of which it is not known yet what they own and use.
    pub fn unclaimed(&self) -> Vec<SessionId> {
        self.unclaimed.iter().copied().collect()
    }

    /// Whether all sessions have said what they own.
    pub fn all_claimed(&self) -> bool {
        self.unclaimed.is_empty()
    }

    /// Who owns an object.
    pub fn owner(&self, ino: Ino) -> Option<SessionId> {
        self.objects.get(&ino)?.owner
    }

    /// Everything that a session owns.
    pub fn owned_by(&self, session: SessionId) -> Vec<Ino> {
        let owned = self.objects.iter().filter(|(_, holding)| holding.owner == Some(session));
        owned.map(|(ino, _)| *ino).collect()
    }

    /// All who own anything.
    pub fn owners(&self) -> HashSet<SessionId> {
        self.objects.values().filter_map(|holding| holding.owner).collect()
    }

    /// All who know a directory that they do not own.
    pub fn readers(&self) -> HashSet<SessionId> {
        self.objects.values().flat_map(|holding| holding.readers.iter().copied()).collect()
    }

    /// How a session holds a directory (or owns a file). What it has been told to give back it owns no more, though
    /// nobody else does yet: to say so behind the recall in its stream would give it back.
    pub fn held(&self, session: SessionId, ino: Ino) -> Option<Grant> {
        let holding = self.objects.get(&ino)?;
        match holding.owner {
            Some(owner) if owner != session => None,
            Some(_) if self.is_recalled(session, ino) => Some(Grant::Read),
            Some(_) => Some(Grant::Own),
            None => holding.readers.contains(&session).then_some(Grant::Read),
        }
    }

    pub(super) fn is_recalled(&self, session: SessionId, ino: Ino) -> bool {
        self.peers.get(&session).is_some_and(|peer| peer.is_recalled(ino))
    }

    /// Whether a session may know the row of an object: somebody else's own row it may not.
    pub fn covers(&self, session: SessionId, object: Object) -> bool {
        match (self.owner(object.ino()), object) {
            (Some(owner), _) => owner == session,
            (None, Object::File { home: STRAY, .. }) => true,
            (None, Object::File { home, .. }) => self.held(session, home).is_some(),
            (None, Object::Directory(dir)) => self.held(session, dir).is_some(),
        }
    }

    /// Who has to acknowledge something before the request can go on, or has been sent what it published: those
    /// that somebody waits for.
    pub fn waited_for(&self) -> BTreeSet<SessionId> {
        let unclaimed = self.unclaimed.iter().copied().filter(|_| !self.requests.is_empty());
        let late = self.peers.iter().filter(|(session, peer)| {
            let is_wanted = |awaited: &Awaited| match awaited {
                Awaited::Recall { wanted, .. } => *wanted,
                // What it has asked for itself is answered without; see `Grants::unheard_by` for who wants to show it.
                Awaited::Published(ticket) => {
                    self.requests.get(ticket).is_none_or(|waiting| waiting.session != **session)
                }
                Awaited::Drop(_) => true,
            };
            peer.awaited.values().any(is_wanted)
                || !peer.awaited.is_empty() && self.is_release_in_the_way(**session)
        });
        unclaimed.chain(late.map(|(session, _)| *session)).collect()
    }

    /// What a session was told first to give back, of what it has not given back and others need.
    pub fn first_recalled(&self, session: SessionId) -> Option<Ino> {
        self.peers.get(&session)?.awaited.values().find_map(|awaited| match awaited {
            Awaited::Recall { object, wanted: true, .. } => Some(object.ino()),
            _ => None,
        })
    }

    /// Whether requests of others wait until a session has given back what it would rather not own: for that, or behind
    /// requests of the session itself that wait for it.
    pub(super) fn is_release_in_the_way(&self, session: SessionId) -> bool {
        let mut claimed: HashMap<Ino, Vec<Mode>> = HashMap::new();
        for (ino, _) in self.releases_of(session).flat_map(Waiting::claims) {
            claimed.entry(ino).or_default().push(Mode::Exclusive);
        }
        let waits = |waiting: &&Waiting| waiting.stage == Stage::Waiting;
        let is_behind = |waiting: &Waiting, claimed: &HashMap<Ino, Vec<Mode>>| {
            waiting.claims().any(|(ino, mode)| {
                claimed.get(&ino).into_iter().flatten().any(|theirs| theirs.conflicts(mode))
            })
        };
        let (mut own, others): (Vec<&Waiting>, Vec<&Waiting>) =
            self.requests.values().filter(waits).partition(|waiting| waiting.session == session);
        while let Some(at) = own.iter().position(|waiting| is_behind(waiting, &claimed)) {
            for (ino, mode) in own.swap_remove(at).claims() {
                claimed.entry(ino).or_default().push(mode);
            }
        }
        others.into_iter().any(|waiting| is_behind(waiting, &claimed))
    }

    /// What a session has said that it would rather not own, and has not given back.
    pub(super) fn releases_of(&self, session: SessionId) -> impl Iterator<Item = &Waiting> {
        self.requests.values().filter(move |waiting| {
            waiting.session == session && matches!(waiting.request, Request::Release(_))
        })
    }

    /// All objects but slots.
    fn whole_objects(&self) -> impl Iterator<Item = &Holding> {
        self.objects.iter().filter(|(ino, _)| ino.of_slot().is_none()).map(|(_, holding)| holding)
    }

    /// Directories owned and read, files owned, and events not acknowledged, of a session.
    pub fn summary(&self, session: SessionId) -> Summary {
        let mut summary = Summary::default();
        for holding in self.whole_objects() {
            match (holding.owner == Some(session), holding.home) {
                (true, None) => summary.own_directories += 1,
                (true, Some(_)) => summary.own_files += 1,
                (false, _) => summary.read_directories += u64::from(holding.readers.contains(&session)),
            }
        }
        summary.events_waiting = self.peers.get(&session).map_or(0, |peer| peer.awaited.len() as u64);
        summary
    }

    /// The same of all sessions together.
    pub fn totals(&self) -> Summary {
        let mut totals = Summary::default();
        for holding in self.whole_objects() {
            match (holding.owner, holding.home) {
                (Some(_), None) => totals.own_directories += 1,
                (Some(_), Some(_)) => totals.own_files += 1,
                (None, _) => totals.read_directories += holding.readers.len() as u64,
            }
        }
        totals.events_waiting = self.peers.values().map(|peer| peer.awaited.len() as u64).sum();
        totals
    }

    /// How many requests wait for their turn.
    pub fn requests_waiting(&self) -> usize {
        let waits = |waiting: &&Waiting| matches!(waiting.stage, Stage::Waiting | Stage::Dropping(_));
        self.requests.values().filter(waits).count()
    }
}

/// What a session holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Directories that it owns.
    pub own_directories: u64,
    /// Directories that it reads.
    pub read_directories: u64,
    /// Files that it owns by themselves.
    pub own_files: u64,
    /// Events that it has not acknowledged.
    pub events_waiting: u64,
}
