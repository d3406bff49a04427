//! The line of requests: whose turn it is, and what has to be recalled for that.

use std::collections::{BTreeSet, HashSet};

use crate::grants::{
    Aside, Awaited, BySlots, Grants, Mode, Object, Order, Outcome, Output, Request, STRAY, STREAK_MAX,
    STREAK_MIN, Stage, Ticket, Waiting, object::home_first,
};
use crate::{Ino, SessionId};

impl Grants {
    /// Goes through the requests whose turn has not come, in their order; whatever can go on does.
    pub(super) fn advance(&mut self) {
        self.freed.clone_from(&self.line);
        self.advance_freed();
    }

    /// Those that are to be looked at go on if they can.
    pub(super) fn advance_freed(&mut self) {
        if !self.unclaimed.is_empty() {
            // All are gone through when everybody has claimed.
            self.freed.clear();
        }
        while let Some(ticket) = self.freed.pop_first() {
            self.advance_one(ticket);
        }
    }

    /// A request is over, and nothing of it is left to be carried out: those behind it are to be looked at.
    pub(super) fn end_in_line(&mut self, ticket: Ticket) {
        self.free_behind(ticket);
        self.remove(ticket);
    }

    /// Those in line that a request may keep from going on, and nobody else does for sure, are to be looked at when it claims nothing any more.
    pub(super) fn free_behind(&mut self, ticket: Ticket) {
        let is_served =
            |other: Ticket| self.requests.get(&other).is_some_and(|of| !self.begun.contains(&of.session));
        let of_claim = |(ino, mode)| {
            let claims = self.claims.get(&ino);
            // All others come after this one, and have to wait for it.
            let keeps = |other: &Ticket| *other != ticket && is_served(*other) && !self.is_aside(*other, ino);
            let first = claims.and_then(|claims| claims.exclusive().find(keeps)).unwrap_or(Ticket(u64::MAX));
            let others = claims.into_iter().flat_map(move |claims| claims.against(ticket, mode));
            others.filter(move |other| *other <= first)
        };
        let claims = self.requests.get(&ticket).into_iter().flat_map(Waiting::claims);
        let behind: Vec<Ticket> =
            claims.flat_map(of_claim).filter(|other| self.line.contains(other)).collect();
        self.freed.extend(behind);
    }

    /// One of these goes on if it can.
    fn advance_one(&mut self, ticket: Ticket) {
        self.want_whole(ticket);
        let Some(waiting) = self.requests.get(&ticket) else { return };
        let is_free = match waiting.stage {
            Stage::Dropping(_) => true,
            Stage::Waiting if waiting.awaits > 0 || self.begun.contains(&waiting.session) => false,
            Stage::Waiting => !waiting.claims().any(|(ino, mode)| self.is_taken(ticket, ino, mode)),
            Stage::Ready | Stage::Settling(_) => false,
        };
        if is_free {
            self.try_ready(ticket);
        }
    }

    /// Who reads a directory that is split in more slots than it knows of wants it whole.
    fn want_whole(&mut self, ticket: Ticket) {
        let Some(waiting) = self.requests.get(&ticket) else { return };
        if let Request::Read(objects) = &waiting.request
            && let [object @ Object::Directory(dir)] = objects[..]
            && waiting.stage == Stage::Waiting
            && self.is_beyond(waiting.session, dir)
        {
            self.unclaim(ticket);
            let Some(waiting) = self.requests.get_mut(&ticket) else { return };
            waiting.request = Request::List(object);
            let claims: Vec<_> = waiting.claims().collect();
            self.claim_for(ticket, claims);
        }
    }

    /// Whether somebody who comes first claims an object in a way that conflicts. What is being carried out comes first, wherever
    /// it stands in line: a request that was extended stands before others that have begun since.
    fn is_taken(&self, ticket: Ticket, ino: Ino, mode: Mode) -> bool {
        let Some(claims) = self.claims.get(&ino) else { return false };
        let mut others = claims.against(ticket, mode);
        others.any(|other| !self.is_aside(other, ino) && self.comes_before(other, ticket))
    }

    /// Whether a request waits until others have given files back. That may take as long as contents are on the way, so others may have
    /// a directory meanwhile that it claims.
    fn is_aside(&self, ticket: Ticket, dir: Ino) -> bool {
        let keeps = |object: &Object| match object {
            Object::File { ino, .. } => *ino == dir,
            Object::Directory(ino) => ino.of_slot().is_some(),
        };
        let Some(waiting) = self.requests.get(&ticket) else { return false };
        waiting.aside == Aside::Now
            && waiting.stage == Stage::Waiting
            && waiting.awaits > 0
            && !self.recalls.contains_key(&dir)
            && !waiting.request.objects().iter().any(keeps)
    }

    fn comes_before(&self, other: Ticket, ticket: Ticket) -> bool {
        let Some(waiting) = self.requests.get(&other) else { return other < ticket };
        match waiting.stage {
            Stage::Ready | Stage::Dropping(_) => true,
            // Who has not claimed is not served, and is in nobody's way.
            _ => other < ticket && !self.begun.contains(&waiting.session),
        }
    }

    /// Says who has heard of what a request has published, and forgets it when all have.
    pub(super) fn settle(&mut self, ticket: Ticket) {
        let Some(waiting) = self.requests.get_mut(&ticket) else { return };
        let Stage::Settling(left) = &waiting.stage else { return };
        let (is_heard, asker) = (left.is_empty(), waiting.session);
        if !waiting.settled && left.iter().all(|session| *session == asker) {
            waiting.settled = true;
            if waiting.told.remove(&asker) {
                self.outputs.push(Output::Heard { change: ticket, to: BTreeSet::from([asker]) });
            }
            self.outputs.push(Output::Settled(ticket));
        }
        if is_heard {
            let to = std::mem::take(&mut waiting.told);
            self.outputs.push(Output::Heard { change: ticket, to });
            self.requests.remove(&ticket);
        }
    }

    /// The same for all requests.
    pub(super) fn settle_all(&mut self) {
        let tickets: Vec<Ticket> = self.requests.keys().copied().collect();
        tickets.into_iter().for_each(|ticket| self.settle(ticket));
    }

    /// A request is over, and nobody is waited for because of it.
    pub(super) fn remove(&mut self, ticket: Ticket) {
        if let Some(Stage::Dropping(left)) = self.requests.get(&ticket).map(|waiting| &waiting.stage) {
            let is_its = |awaited: &Awaited| matches!(awaited, Awaited::Drop(of) if *of == ticket);
            for session in left {
                if let Some(peer) = self.peers.get_mut(session) {
                    peer.awaited.retain(|_, awaited| !is_its(awaited));
                }
            }
        }
        self.unclaim(ticket);
        self.line.remove(&ticket);
        self.requests.remove(&ticket);
    }

    pub(super) fn claim_for(&mut self, ticket: Ticket, claims: impl IntoIterator<Item = (Ino, Mode)>) {
        for (ino, mode) in claims {
            self.claims.entry(ino).or_default().insert(ticket, mode);
        }
    }

    /// A request claims nothing any more.
    pub(super) fn unclaim(&mut self, ticket: Ticket) {
        let Some(waiting) = self.requests.get(&ticket) else { return };
        for (ino, _) in waiting.claims() {
            if let Some(claims) = self.claims.get_mut(&ino) {
                claims.remove(ticket);
                if claims.is_empty() {
                    self.claims.remove(&ino);
                }
            }
        }
    }

    /// A session need not give an object back any more, as this event had told it.
    pub(super) fn recall_is_over(&mut self, session: SessionId, ino: Ino, event: u64) {
        for ticket in self.awaiting.remove(&(session, event)).unwrap_or_default() {
            if let Some(waiting) = self.requests.get_mut(&ticket) {
                waiting.awaits -= 1;
            }
        }
        if let Some(count) = self.recalls.get_mut(&ino) {
            *count -= 1;
            if *count == 0 {
                self.recalls.remove(&ino);
            }
        }
    }

    /// The request is the first in line for all its objects: recalls what it needs, or is ready.
    pub(super) fn try_ready(&mut self, ticket: Ticket) {
        let waiting = &self.requests[&ticket];
        let session = waiting.session;
        let reads = matches!(waiting.request, Request::Read(_) | Request::Release(_));
        let recalled = |ino| match reads {
            true => self.is_recalled(session, ino),
            false => self.recalls.contains_key(&ino),
        };
        let is_recalled = |object: &Object| {
            let itself = match *object {
                // Of a file nobody is told who does not own it: that others give it back is waited for below.
                Object::File { ino, .. } => self.is_recalled(session, ino),
                Object::Directory(ino) => recalled(ino),
            };
            itself || [object.home(), object.ino().of_slot()].into_iter().flatten().any(recalled)
        };
        if waiting.request.objects().iter().any(is_recalled) {
            // Its acknowledgement is on its way, and would take what the session is about to be given; nor may a
            // reader that is letting go be told of a change behind that, and keep it.
            return;
        }
        if let Request::Change { objects, local: true, by_slots } = &waiting.request
            && *by_slots != BySlots::Cannot
            && let [Object::Directory(dir)] = objects[..]
            && self.is_split(dir)
            && !self.is_beyond(session, dir)
        {
            // It was split after this had been asked for.
            return self.ready(ticket, Outcome::Shared);
        }
        // By who wants it whole. Own requests are answered that they are shared.
        let request = &waiting.request;
        if matches!(
            request,
            Request::List(_) | Request::Rest(_) | Request::Reclaim(_) | Request::Change { .. }
        ) {
            let objects = waiting.request.objects().to_vec();
            if self.make_whole(ticket, &objects) {
                return;
            }
        }
        match self.requests[&ticket].request.clone() {
            Request::Names(object) => self.try_names(ticket, session, object),
            Request::Own(object) if object.ino().of_slot().is_some() => {
                self.try_slot(ticket, session, object);
            }
            Request::List(object) => {
                if !self.recall(ticket, self.owners_of(session, &[object])) {
                    self.register_reader(session, object.ino());
                    self.ready(ticket, Outcome::Granted);
                }
            }
            Request::Rest(_) => self.end_in_line(ticket),
            Request::Release(files) => self.try_release(ticket, session, &files),
            Request::Read(objects) => {
                if self.recall(ticket, self.owners_of(session, &objects)) {
                    return;
                }
                for object in objects {
                    match object {
                        Object::Directory(dir) => drop(self.register_reader(session, dir)),
                        Object::File { home, .. } if home != STRAY => {
                            let holding = self.objects.entry(home).or_default();
                            if holding.owner != Some(session) {
                                holding.readers.insert(session);
                            }
                        }
                        Object::File { .. } => {}
                    }
                }
                self.ready(ticket, Outcome::Granted);
            }
            Request::Own(object @ Object::Directory(dir)) => {
                if self.is_split(dir) || !self.may_own(session, dir) || self.asks_files_back(session, dir) {
                    self.ready(ticket, Outcome::Shared);
                } else if !self.recall(ticket, self.holders_of(session, dir)) {
                    self.give(session, object);
                    self.ready(ticket, Outcome::Granted);
                }
            }
            Request::Own(object @ Object::File { ino, .. }) => {
                if self.recall(ticket, self.owners_of(session, &[object])) {
                    return;
                }
                match &self.requests[&ticket].stage {
                    Stage::Dropping(left) if !left.is_empty() => {}
                    Stage::Dropping(_) => {
                        self.give(session, object);
                        self.ready(ticket, Outcome::Granted);
                    }
                    _ => self.drop_rows(ticket, session, object, ino),
                }
            }
            Request::Reclaim(objects) => {
                let holders = objects.iter().flat_map(|object| match object {
                    Object::Directory(dir) => self.holders_of(session, *dir),
                    Object::File { .. } => self.owners_of(session, &[*object]),
                });
                if !self.recall(ticket, holders.collect()) {
                    objects.into_iter().for_each(|object| self.give(session, object));
                    self.ready(ticket, Outcome::Granted);
                }
            }
            Request::Change { objects, local, by_slots } => {
                let dirs: Vec<Ino> = objects
                    .iter()
                    .filter_map(|object| matches!(object, Object::Directory(_)).then_some(object.ino()))
                    .collect();
                if let [dir] = dirs[..]
                    && by_slots == BySlots::Makes
                    && local
                    && self.should_split(dir)
                {
                    return self.split(ticket, dir);
                }
                let foreign = objects.iter().any(|object| {
                    matches!(object, Object::File { .. })
                        && self.owner(object.ino()).is_some_and(|owner| owner != session)
                });
                let strays = objects.iter().any(|object| object.is_stray());
                let may_own = |dir: &Ino| self.may_own(session, *dir);
                if local
                    && !foreign
                    && !strays
                    && dirs.iter().all(may_own)
                    && !dirs.iter().any(|dir| self.asks_files_back(session, *dir))
                {
                    let holders: Vec<_> =
                        dirs.iter().flat_map(|dir| self.holders_of(session, *dir)).collect();
                    if !self.recall(ticket, holders) {
                        let own: Vec<Object> = dirs.into_iter().map(Object::Directory).collect();
                        own.iter().for_each(|object| self.give(session, *object));
                        self.ready(ticket, Outcome::Yours(own));
                    }
                    return;
                }
                let owners: Vec<_> = objects
                    .iter()
                    .flat_map(home_first)
                    .filter_map(|object| {
                        let owner = self.owner(object.ino())?;
                        Some((owner, object, self.may_keep(owner, object)))
                    })
                    .collect();
                if !self.recall(ticket, owners) {
                    self.ready(ticket, Outcome::Execute);
                }
            }
        }
    }

    /// Recalls what the session owns of these files, and is over when all of it has been given back.
    pub(super) fn try_release(&mut self, ticket: Ticket, session: SessionId, files: &[Object]) {
        let mut is_over = true;
        for file in files {
            // Its owner could make it its own again while it has the home, by moving it elsewhere.
            let at_home = file.home().and_then(|home| self.owner(home)) == Some(session);
            if self.owner(file.ino()) != Some(session) || at_home {
                continue;
            }
            is_over = false;
            self.order_recall(session, *file, self.may_keep(session, *file), false);
        }
        if is_over {
            self.end_in_line(ticket);
        }
    }

    pub(super) fn ready(&mut self, ticket: Ticket, outcome: Outcome) {
        if let Some(waiting) = self.requests.get_mut(&ticket) {
            waiting.stage = Stage::Ready;
        }
        self.line.remove(&ticket);
        self.outputs.push(Output::Ready { ticket, outcome });
    }

    /// Other owners of these objects and of their homes; they keep what they know.
    pub(super) fn owners_of(&self, session: SessionId, objects: &[Object]) -> Vec<(SessionId, Object, bool)> {
        objects
            .iter()
            .flat_map(home_first)
            .filter_map(|object| {
                let owner = self.owner(object.ino())?;
                (owner != session).then(|| (owner, object, self.may_keep(owner, object)))
            })
            .collect()
    }

    /// Whether an owner stays a reader: of a file it is told by being a reader of its home, which it may not be after a
    /// reconnection.
    pub(super) fn may_keep(&self, owner: SessionId, object: Object) -> bool {
        object.home().is_none_or(|home| self.held(owner, home).is_some())
    }

    /// Everybody else who holds the directory, or a file in it; they have to let go.
    pub(super) fn holders_of(&self, session: SessionId, dir: Ino) -> Vec<(SessionId, Object, bool)> {
        self.holders(session, dir).collect()
    }

    /// The same, first those who hold the directory: of files there may be very many.
    fn holders(&self, session: SessionId, dir: Ino) -> impl Iterator<Item = (SessionId, Object, bool)> + '_ {
        let holding = self.objects.get(&dir);
        let files = self.owned_files(dir).filter(move |(owner, _)| *owner != session);
        let files = files.map(move |(owner, ino)| (owner, Object::File { ino, home: dir }, false));
        holding
            .into_iter()
            .flat_map(|holding| holding.owner.iter().chain(&holding.readers))
            .filter(move |holder| **holder != session)
            .map(move |holder| (*holder, Object::Directory(dir), false))
            .chain(files)
    }

    /// Whether a session should own a directory: nobody else uses it, or nobody else has changed it for long.
    pub(super) fn may_own(&self, session: SessionId, dir: Ino) -> bool {
        let Some(holding) = self.objects.get(&dir) else { return true };
        let patience = holding.patience.unwrap_or(STREAK_MIN);
        self.holders(session, dir).next().is_none()
            || (holding.owner.is_none()
                && holding.streak.is_some_and(|(last, count)| last == session && count >= patience))
    }

    /// Whether others own files of a directory that a session should own. They are told to give them back, and nobody waits for that,
    /// as it may take as long as their contents are on the way: it should own the directory when it has been alone for twice as long.
    fn asks_files_back(&mut self, session: SessionId, dir: Ino) -> bool {
        // What it is giving back itself it would change again.
        let is_wanted =
            |(owner, file): &(SessionId, Ino)| *owner != session || self.is_recalled(session, *file);
        let wanted: Vec<(SessionId, Ino)> = self.owned_files(dir).filter(is_wanted).collect();
        let mut is_new = false;
        for (owner, ino) in &wanted {
            if !self.is_recalled(*owner, *ino) {
                is_new = true;
                let file = Object::File { ino: *ino, home: dir };
                self.order_recall(*owner, file, self.may_keep(*owner, file), true);
            }
        }
        if let Some(holding) = self.objects.get_mut(&dir).filter(|_| !wanted.is_empty()) {
            holding.streak = None;
            if is_new {
                holding.patience = Some((2 * holding.patience.unwrap_or(STREAK_MIN)).min(STREAK_MAX));
            }
        }
        !wanted.is_empty()
    }

    /// Recalls for a request what is not being recalled yet. Returns whether there is anything to wait for.
    pub(super) fn recall(&mut self, ticket: Ticket, wanted: Vec<(SessionId, Object, bool)>) -> bool {
        let mut seen = HashSet::new();
        for (holder, object, keep_read) in &wanted {
            // Holders are peers.
            let Some(peer) = self.peers.get(holder).filter(|_| seen.insert((*holder, object.ino()))) else {
                continue;
            };
            if !peer.is_recalled(object.ino()) {
                if !keep_read && let Some(holding) = self.objects.get_mut(&object.ino()) {
                    holding.patience.get_or_insert(STREAK_MIN);
                }
                self.order_recall(*holder, *object, *keep_read, true);
            }
            let event = self.peers.get(holder).and_then(|peer| peer.recalls.get(&object.ino()));
            if let (Some(event), Some(waiting)) = (event, self.requests.get_mut(&ticket)) {
                waiting.awaits += 1;
                self.awaiting.entry((*holder, *event)).or_default().push(ticket);
            }
        }
        if let Some(waiting) = self.requests.get_mut(&ticket).filter(|waiting| waiting.awaits > 0) {
            // Not who claims back what it had: that is not to have changed since.
            let lets_others = wanted.iter().all(|(_, object, _)| matches!(object, Object::File { .. }))
                && !matches!(waiting.request, Request::Reclaim(_));
            // Once: what others do to its directories meanwhile could have it wait again and again.
            waiting.aside = match waiting.aside {
                Aside::NotYet if !lets_others => Aside::NotYet,
                Aside::NotYet => Aside::Now,
                Aside::Now | Aside::Over => Aside::Over,
            };
            if waiting.aside == Aside::Now {
                self.free_behind(ticket);
            }
        }
        !wanted.is_empty()
    }

    pub(super) fn order_recall(&mut self, holder: SessionId, object: Object, keep_read: bool, wanted: bool) {
        let event = self.number(holder, Awaited::Recall { object, keep_read, wanted });
        self.outputs.push(Output::Order { to: holder, event, order: Order::Recall { object, keep_read } });
    }

    /// Has all other readers of a file drop its row.
    pub(super) fn drop_rows(&mut self, ticket: Ticket, session: SessionId, object: Object, ino: Ino) {
        let readers: BTreeSet<SessionId> = match object.home() {
            Some(home) => self.objects.get(&home).map(|of| of.readers.clone()).unwrap_or_default(),
            None => self.peers.keys().copied().collect(),
        };
        let readers: BTreeSet<SessionId> = readers
            .into_iter()
            .filter(|reader| *reader != session && self.peers.contains_key(reader))
            .collect();
        for reader in &readers {
            let event = self.number(*reader, Awaited::Drop(ticket));
            self.outputs.push(Output::Order { to: *reader, event, order: Order::Drop(ino) });
        }
        if readers.is_empty() {
            self.give(session, object);
            self.ready(ticket, Outcome::Granted);
        } else if let Some(waiting) = self.requests.get_mut(&ticket) {
            waiting.stage = Stage::Dropping(readers);
        }
    }
}
