//! Requests whose turn has come: what is read and granted.

use super::*;
use crate::messages::{Doing as Who, Listed};

impl World {
    /// The turn of a request has come.
    pub(crate) fn work(&mut self, ticket: Ticket, turn: Turn) {
        let Some(pending) = self.server.tickets.get(&ticket) else {
            // Its session is over, or has a new connection.
            self.server.grants.cancel(ticket);
            return self.pump();
        };
        if !self.server.live.contains_key(&pending.session) {
            self.give_up(ticket);
            return self.pump();
        }
        match (&pending.ask, turn) {
            (Ask::Enter(dir), _) if self.server.grants.is_split(*dir) => {
                let dir = *dir;
                let row = self.server.stored.rows.inodes.get(&dir).cloned().map(Box::new);
                let what = row.map(Listed::Split);
                let listing = what.map(|what| Listing {
                    dir,
                    entries: Vec::new(),
                    own: Vec::new(),
                    unheard: Vec::new(),
                    what,
                });
                self.read_done(ticket, Send::Listings(listing.into_iter().collect()));
            }
            (Ask::Names(slot, _), Turn::Shared) => {
                let dir = slot.or_directory();
                let listing = Listing {
                    dir,
                    entries: Vec::new(),
                    own: Vec::new(),
                    unheard: Vec::new(),
                    what: Listed::Whole,
                };
                self.read_done(ticket, Send::Listings(vec![listing]));
            }
            (Ask::Names(slot, stem), _) => {
                let (slot, stem) = (*slot, stem.clone());
                let listing = self.read_names(ticket, slot, stem);
                self.read_done(ticket, Send::Listings(vec![listing]));
            }
            (Ask::Enter(dir) | Ask::List(dir), _) => {
                let dir = *dir;
                let send = Send::Listings(self.read_directories(ticket, dir));
                self.read_done(ticket, send);
            }
            (Ask::Fetch(ino), _) => {
                let ino = *ino;
                match self.server.object(ino).filter(|object| !pending.objects.contains(object)) {
                    Some(object) => self.extend(ticket, vec![object]),
                    None => {
                        let row = self.server.stored.rows.inodes.get(&ino).cloned().map(Box::new);
                        self.read_done(ticket, Send::Row(row));
                    }
                }
            }
            (Ask::Acquire(_), Turn::Granted) => self.acquired(ticket),
            (Ask::Acquire(_), _) => {
                let (connection, request) = (pending.connection, pending.request);
                self.send_to_client(connection, ToClient::Acquired { request, owned: false });
                self.finish(ticket);
            }
            (Ask::Change { .. }, Turn::Split) => self.split(ticket),
            (Ask::Change { .. }, Turn::Shared) => self.by_slots(ticket),
            (Ask::Change { .. }, Turn::Yours(own)) => self.yours(ticket, &own),
            (Ask::Change { .. }, _) => self.execute(ticket),
            (Ask::Restore { .. }, _) => self.restore(ticket),
            (Ask::Numbers | Ask::Ping | Ask::Sync { .. } | Ask::Hear(_), _) => {}
        }
    }

    pub(super) fn extend(&mut self, ticket: Ticket, more: Vec<Object>) {
        trace!(self, "{ticket:?} also needs {more:?}");
        if let Some(pending) = self.server.tickets.get_mut(&ticket) {
            pending.objects.extend(more.iter().copied());
        }
        self.server.grants.extend(ticket, more);
        self.pump();
    }

    pub(super) fn read_done(&mut self, ticket: Ticket, send: Send) {
        // Reading a store may take long.
        let most = if self.rng.permille(200) { 60 } else { 4 };
        let (life, delay) = (self.server.life, self.rng.below(most));
        self.after(delay, What::Send(life, ticket, send));
    }

    pub(crate) fn send_read(&mut self, ticket: Ticket, send: Send) {
        let Some(pending) = self.server.tickets.get(&ticket) else {
            self.server.grants.cancel(ticket);
            return self.pump();
        };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let told = inos_of(&send, &pending.ask);
        if self.is_stuck_about(told.iter().copied()) {
            return self.when_durable(Then::Send(ticket, send));
        }
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let message = match send {
            Send::Listings(mut listings) => {
                // A recall may have gone into the stream since they were read.
                let (grants, session) = (&self.server.grants, pending.session);
                let early = self.is_broken(Rule::OwnFlagEarly);
                for listing in listings.iter_mut().filter(|_| !early) {
                    listing.own.retain(|dir| grants.held(session, *dir) == Some(Grant::Own));
                }
                for listing in &mut listings {
                    listing.unheard = self.server.tell_unheard(session, listing.dir);
                }
                ToClient::Listings { request, listings }
            }
            Send::Row(row) => {
                let Ask::Fetch(ino) = pending.ask else { return };
                // Of a file this may cross with its being given back, which no event tells from it.
                let is_dir = row.as_ref().is_some_and(|row| row.kind() == FileKind::Directory);
                let own = is_dir && self.server.grants.held(pending.session, ino) == Some(Grant::Own);
                let split = self.server.grants.is_split(ino);
                let unheard = self.server.tell_unheard(session, ino);
                ToClient::Row { request, ino, row, own, split, unheard }
            }
        };
        match self.is_broken(Rule::ListWithoutEntries) {
            true => self.send_to_client(connection, message),
            false => self.send_about(session, connection, told, message),
        }
        self.finish(ticket);
    }

    /// A directory, and some below it and beside it.
    pub(super) fn read_directories(&mut self, ticket: Ticket, dir: Ino) -> Vec<Listing> {
        let mut listings = Vec::new();
        if !self.server.stored.rows.inodes.contains_key(&dir) {
            return listings;
        }
        let Some(session) = self.server.tickets.get(&ticket).map(|pending| pending.session) else {
            return listings;
        };
        let mut todo = self.beside(ticket, dir);
        todo.push(dir);
        while let Some(dir) = todo.pop() {
            let listing = self.read_directory(ticket, session, dir);
            for (_, dentry, row) in &listing.entries {
                if row.is_some() && dentry.kind == FileKind::Directory && self.rng.permille(300) {
                    todo.push(dentry.ino);
                }
            }
            listings.push(listing);
        }
        listings
    }

    /// Some directories beside this one: they are likely to be read next.
    fn beside(&mut self, ticket: Ticket, dir: Ino) -> Vec<Ino> {
        let rows = &self.server.stored.rows;
        let parent = rows.inodes.get(&dir).map_or(dir, |row| row.parent);
        if parent == dir || self.rng.permille(700) {
            return Vec::new();
        }
        let siblings = self.server.stored.rows.listing(parent).into_iter().map(|(_, dentry)| dentry);
        let siblings = siblings.filter(|dentry| dentry.kind == FileKind::Directory && dentry.ino != dir);
        let grants = &mut self.server.grants;
        siblings.map(|dentry| dentry.ino).filter(|ino| grants.read_along(ticket, *ino).is_some()).collect()
    }

    pub(super) fn read_directory(&mut self, ticket: Ticket, session: SessionId, dir: Ino) -> Listing {
        let uncovered = self.is_broken(Rule::ListUncovered);
        let own_files = self.is_broken(Rule::ListOwnFiles);
        let strays = self.is_broken(Rule::ListStrays);
        let server = &mut self.server;
        let mut entries = Vec::new();
        let mut own = Vec::new();
        // Of a slot, the names that are in it.
        let of = dir.or_directory();
        if server.grants.held(session, dir) == Some(Grant::Own) {
            own.push(dir);
        }
        for (name, dentry) in server.stored.rows.listing(of) {
            if of != dir && of.slot(name.as_bytes(), dir.width()) != dir {
                continue;
            }
            let Some(row) = server.stored.rows.inodes.get(&dentry.ino) else {
                entries.push((name, dentry, None));
                continue;
            };
            let visible = match Object::of(dentry.ino, row) {
                Object::Directory(child) => match server.grants.read_along(ticket, child) {
                    Some(Grant::Own) => {
                        own.push(child);
                        true
                    }
                    held => held.is_some(),
                },
                // Nobody has claimed a stray for this: it may change while the answer is made. What the session owns by
                // itself it has, and may be told to give back meanwhile.
                // A slot's names are read while files are given to owners.
                object if of != dir && !server.grants.read_file_along(ticket, object.ino()) => false,
                object => {
                    (object.home().is_some() && server.grants.covers(session, object)
                        || object.home().is_none() && strays)
                        && (server.grants.owner(object.ino()).is_none() || own_files)
                }
            };
            entries.push((name, dentry, (visible || uncovered).then(|| row.clone())));
        }
        Listing { dir, entries, own, unheard: Vec::new(), what: Listed::Directory }
    }

    /// The names of a stem: here, a slot has no others.
    fn read_names(&mut self, ticket: Ticket, slot: Ino, stem: Name) -> Listing {
        let session = self.server.tickets[&ticket].session;
        let names = self.read_directory(ticket, session, slot);
        Listing { what: Listed::Stem(stem), ..names }
    }

    /// A directory is split: all that was done in it is durable, and it does not look empty from now on.
    fn split(&mut self, ticket: Ticket) {
        let Some(Object::Directory(dir)) = self.server.tickets[&ticket].objects.first().copied() else {
            return;
        };
        trace!(self, "{dir} is split");
        self.outcome.splits += 1;
        if let Some(row) = self.server.stored.rows.inodes.get(&dir) {
            let row = InodeRow { next_cookie: row.next_cookie + 1, ..row.clone() };
            self.write(vec![Put::Row(Record::PutInode(dir, Box::new(row)))], None);
        }
        if self.flush_now() {
            self.by_slots(ticket);
        }
    }

    /// The client does the change by slots.
    fn by_slots(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (connection, request) = (pending.connection, pending.request);
        let message = ToClient::Changed { request, result: Ok(None), doing: Who::BySlots };
        self.send_to_client(connection, message);
        self.finish(ticket);
    }

    pub(super) fn acquired(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let granted = pending.objects[0];
        if granted.ino().of_slot().is_some() {
            return self.slot_acquired(ticket, granted);
        }
        let object = self.server.object(granted.ino());
        if object != Some(granted) {
            // It is something else by now: another home, or nothing at all.
            self.server.grants.forget(granted.ino());
            let pending = self.give_up(ticket);
            match (object, pending) {
                (Some(object), Some(pending)) => self.request(Pending { objects: vec![object], ..pending }),
                _ => {
                    let message = ToClient::Acquired { request, owned: false };
                    self.send_about(session, connection, [granted.ino()], message);
                }
            }
            return self.pump();
        }
        if self.is_stuck_about([granted.ino()]) {
            return self.when_durable(Then::Work(ticket, Turn::Granted));
        }
        let row = self.server.stored.rows.inodes[&granted.ino()].clone();
        let records = vec![Record::PutInode(granted.ino(), Box::new(row))];
        if let Some(event) = self.server.grants.tell(session) {
            self.server.grants.told(granted.ino(), event);
            let body = Body::Apply { records, own: vec![granted], forget: Vec::new(), change: 0 };
            self.event(session, event, body, [granted.ino()]);
        }
        self.send_to_client(connection, ToClient::Acquired { request, owned: true });
        self.finish(ticket);
    }

    /// A session owns a slot.
    fn slot_acquired(&mut self, ticket: Ticket, slot: Object) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        if self.is_stuck_about([slot.ino()]) {
            return self.when_durable(Then::Work(ticket, Turn::Granted));
        }
        if let Some(event) = self.server.grants.tell(session) {
            self.server.grants.told(slot.ino(), event);
            let body = Body::Apply { records: Vec::new(), own: vec![slot], forget: Vec::new(), change: 0 };
            self.event(session, event, body, [slot.ino()]);
        }
        self.send_to_client(connection, ToClient::Acquired { request, owned: true });
        self.finish(ticket);
    }

    pub(super) fn yours(&mut self, ticket: Ticket, own: &[Object]) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let rows = &self.server.stored.rows.inodes;
        if own.iter().any(|object| !rows.contains_key(&object.ino())) {
            own.iter()
                .filter(|object| !rows.contains_key(&object.ino()))
                .for_each(|object| self.server.grants.forget(object.ino()));
            self.give_up(ticket);
            let about = own.iter().map(|object| object.ino());
            self.changed((session, connection, request), Err(TreeError::Stale), Who::Server, about);
            return self.pump();
        }
        if self.is_stuck_about(own.iter().map(|object| object.ino())) {
            return self.when_durable(Then::Work(ticket, Turn::Yours(own.to_vec())));
        }
        let rows = &self.server.stored.rows.inodes;
        let records = own
            .iter()
            .map(|object| Record::PutInode(object.ino(), Box::new(rows[&object.ino()].clone())))
            .collect();
        if let Some(event) = self.server.grants.tell(session) {
            let body = Body::Apply { records, own: own.to_vec(), forget: Vec::new(), change: 0 };
            self.event(session, event, body, own.iter().map(|object| object.ino()));
        }
        self.changed((session, connection, request), Ok(None), Who::Yours, []);
        self.finish(ticket);
    }
}

/// What is told of.
fn inos_of(send: &Send, ask: &Ask) -> Vec<Ino> {
    match (send, ask) {
        (Send::Listings(listings), _) => {
            let entries = |listing: &Listing| {
                let rows = listing.entries.iter().filter(|(.., row)| row.is_some());
                rows.map(|(_, dentry, _)| dentry.ino).collect::<Vec<_>>()
            };
            listings.iter().flat_map(|listing| [vec![listing.dir], entries(listing)].concat()).collect()
        }
        (Send::Row(_), Ask::Fetch(ino)) => vec![*ino],
        _ => Vec::new(),
    }
}
