//! Requests: from their place in the line to what they publish.

use std::collections::{BTreeSet, HashSet};

use crate::grants::{Aside, Awaited, BySlots, Grant, Grants, Mode, Object, Request, Stage, Ticket, Waiting};
use crate::{Ino, SessionId};

impl Grants {
    /// A session wants something. [`crate::grants::Output::Ready`] follows, at once or later.
    pub fn request(&mut self, session: SessionId, request: Request) -> Ticket {
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        match &request {
            Request::Change { objects, by_slots, .. } => self.count_streaks(session, objects, *by_slots),
            Request::Read(objects) => self.end_streaks(session, objects),
            Request::List(object) => {
                self.splits.is_listed(object.ino());
                self.end_streaks(session, std::slice::from_ref(object));
            }
            _ => {}
        }
        let waiting = Waiting {
            session,
            request,
            stage: Stage::Waiting,
            published: BTreeSet::new(),
            settled: false,
            told: BTreeSet::new(),
            along: Vec::new(),
            aside: Aside::NotYet,
            awaits: 0,
        };
        self.claim_for(ticket, waiting.claims().collect::<Vec<_>>());
        self.requests.insert(ticket, waiting);
        self.line.insert(ticket);
        // It stands behind all others: nothing has changed for them.
        self.freed.insert(ticket);
        self.advance_freed();
        ticket
    }

    /// A session would rather not own these files by themselves. What it has said so of before, and has not given back,
    /// is left out: it may say so again and again meanwhile.
    pub fn release(&mut self, session: SessionId, files: &[Ino]) {
        let said: HashSet<Ino> = self
            .releases_of(session)
            .flat_map(|release| release.request.objects())
            .map(|of| of.ino())
            .collect();
        let owned = |ino: &Ino| {
            let holding = self.objects.get(ino).filter(|holding| holding.owner == Some(session))?;
            let file = Object::File { ino: *ino, home: holding.home? };
            (!said.contains(ino)).then_some(file)
        };
        let files: Vec<Object> = files.iter().filter_map(owned).collect();
        if !files.is_empty() {
            self.request(session, Request::Release(files));
        }
    }

    fn count_streaks(&mut self, session: SessionId, objects: &[Object], by_slots: BySlots) {
        for object in objects {
            if let Object::Directory(dir) = object
                && let Some(holding) = self.objects.get_mut(dir)
            {
                holding.streak = match holding.streak {
                    Some((last, count)) if last == session => Some((last, count.saturating_add(1))),
                    _ => Some((session, 1)),
                };
                if by_slots == BySlots::Makes {
                    self.splits.count(*dir, session);
                }
            }
        }
    }

    /// Who looks into a directory that another one changes would look again at once if it were recalled.
    fn end_streaks(&mut self, session: SessionId, objects: &[Object]) {
        for object in objects {
            let dir = object.home().unwrap_or(object.ino());
            if let Some(holding) = self.objects.get_mut(&dir) {
                holding.streak = holding.streak.filter(|(last, _)| *last == session);
            }
        }
    }

    /// A request that is ready turns out to concern more objects: it waits again, for all of them, at its old
    /// place in line. The request of a session that has ended is void.
    pub fn extend(&mut self, ticket: Ticket, more: impl IntoIterator<Item = Object>) {
        if self.requests.get(&ticket).is_some_and(|waiting| !self.peers.contains_key(&waiting.session)) {
            self.cancel(ticket);
        } else if let Some(waiting) = self.requests.get_mut(&ticket) {
            if let Request::Read(objects) | Request::Change { objects, .. } = &mut waiting.request {
                for object in more {
                    if !objects.contains(&object) {
                        objects.push(object);
                    }
                }
            }
            waiting.stage = Stage::Waiting;
            let claims: Vec<_> = waiting.claims().collect();
            self.unclaim(ticket);
            self.claim_for(ticket, claims);
            self.line.insert(ticket);
        }
        self.advance();
    }

    /// A request that is ready takes along one more directory, if nobody owns it or is about to. Returns how the
    /// session holds it now.
    pub fn read_along(&mut self, ticket: Ticket, dir: Ino) -> Option<Grant> {
        if self.is_split(dir) {
            return None;
        }
        let session = self.take_along(ticket, dir)?;
        Some(self.register_reader(session, dir))
    }

    /// The same for a file of which the request claims no home: nobody owns it, and nobody will while the request is under way.
    pub fn read_file_along(&mut self, ticket: Ticket, file: Ino) -> bool {
        self.take_along(ticket, file).is_some()
    }

    pub(super) fn take_along(&mut self, ticket: Ticket, ino: Ino) -> Option<SessionId> {
        let session = self.requests.get(&ticket)?.session;
        let foreign = self.owner(ino).is_some_and(|owner| owner != session);
        let given_back = self.is_recalled(session, ino);
        if foreign || given_back || !self.peers.contains_key(&session) || self.is_wanted(ticket, ino) {
            return None;
        }
        if !self.unheard_about(session, &[ino]).is_empty() {
            return None;
        }
        self.requests.get_mut(&ticket)?.along.push(ino);
        self.claim_for(ticket, [(ino, Mode::Read)]);
        Some(session)
    }

    /// Whether another request claims the object in a way that conflicts with reading it.
    pub(super) fn is_wanted(&self, ticket: Ticket, wanted: Ino) -> bool {
        self.claims.get(&wanted).is_some_and(|claims| claims.against(ticket, Mode::Read).next().is_some())
    }

    /// What of a ready request was put into streams that others have to acknowledge: everybody who is concerned
    /// gets an event number. Directories: their readers; files: readers of their home; strays: everybody. The
    /// asker is among them; its answer does not wait for that, since it comes after the event.
    pub fn publish(&mut self, ticket: Ticket, objects: &[Object]) -> Vec<(SessionId, u64)> {
        let Some(asker) = self.requests.get(&ticket).map(|waiting| waiting.session) else {
            return Vec::new();
        };
        let mut to = BTreeSet::from([asker]);
        for object in objects {
            if object.is_stray() {
                to.extend(self.peers.keys());
            } else {
                let dir = object.home().unwrap_or(object.ino());
                to.extend(self.objects.get(&dir).iter().flat_map(|holding| &holding.readers));
            }
        }
        to.retain(|session| self.peers.contains_key(session));
        let mut events = Vec::with_capacity(to.len());
        for session in to {
            events.push((session, self.number(session, Awaited::Published(ticket))));
            if let Some(waiting) = self.requests.get_mut(&ticket) {
                waiting.published.insert(session);
            }
        }
        events
    }

    /// The number of an event for one session that no request waits for: what it asked for is in its stream before
    /// the answer.
    pub fn tell(&mut self, session: SessionId) -> Option<u64> {
        self.peers.get_mut(&session).map(|peer| {
            peer.last_event += 1;
            peer.last_event
        })
    }

    pub(super) fn number(&mut self, session: SessionId, awaited: Awaited) -> u64 {
        let Some(peer) = self.peers.get_mut(&session) else { return 0 };
        peer.last_event += 1;
        peer.awaited.insert(peer.last_event, awaited);
        let number = peer.last_event;
        if let Awaited::Recall { object, .. } = awaited
            && peer.recalls.insert(object.ino(), number).is_none()
        {
            *self.recalls.entry(object.ino()).or_default() += 1;
        }
        number
    }

    /// A request is carried out: others may have its objects. [`crate::grants::Output::Settled`] and
    /// [`crate::grants::Output::Heard`] follow when what it published is acknowledged.
    pub fn finish(&mut self, ticket: Ticket) {
        self.free_behind(ticket);
        self.unclaim(ticket);
        self.line.remove(&ticket);
        if let Some(waiting) = self.requests.get_mut(&ticket) {
            waiting.stage = Stage::Settling(std::mem::take(&mut waiting.published));
        }
        self.settle(ticket);
        self.advance_freed();
    }

    /// A request is given up, or has failed; nothing of it was published.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.end_in_line(ticket);
        self.advance_freed();
    }
}
