//! What clients ask for, on its way into the line of requests.

use super::*;

impl World {
    pub(super) fn asked(&mut self, connection: u64, session: SessionId, request: u64, ask: Ask) {
        let looks = !matches!(ask, Ask::Ping | Ask::Numbers | Ask::Sync { .. } | Ask::Hear(_));
        if looks && !self.server.all_claimed() && !self.is_broken(Rule::LookBeforeClaims) {
            return self.server.early.push((connection, session, request, ask));
        }
        let ask = match ask {
            // The client says a stem; in which slot that is the server knows.
            Ask::Names(slot, stem) => {
                let dir = slot.or_directory();
                let width = self.server.grants.width(dir).unwrap_or_default();
                Ask::Names(dir.slot(stem.as_bytes(), width), stem)
            }
            ask => ask,
        };
        let objects = match &ask {
            Ask::Ping => return self.send_to_client(connection, ToClient::Pong { request }),
            Ask::Numbers => {
                let Some(range) = self.numbers() else { return };
                return self.send_to_client(connection, ToClient::Numbers { request, range });
            }
            Ask::Hear(change) => return self.hear((session, connection), request, *change),
            Ask::Sync { opening, mark } => return self.sync_to(connection, request, (*opening, *mark)),
            Ask::Names(slot, _) => match slot.of_slot().and_then(|dir| self.server.object(dir)) {
                Some(Object::Directory(_)) => vec![Object::Directory(*slot)],
                _ => {
                    let message = ToClient::Listings { request, listings: Vec::new() };
                    return self.send_about(session, connection, [*slot], message);
                }
            },
            Ask::Enter(dir) | Ask::List(dir) => match self.server.object(*dir) {
                Some(Object::Directory(dir)) => vec![Object::Directory(dir)],
                _ => {
                    let message = ToClient::Listings { request, listings: Vec::new() };
                    return self.say_when_heard((session, connection), [*dir].into(), message);
                }
            },
            Ask::Fetch(ino) => match self.server.object(*ino) {
                Some(object) => vec![object],
                None => {
                    let message = ToClient::Row {
                        request,
                        ino: *ino,
                        row: None,
                        own: false,
                        split: false,
                        unheard: Vec::new(),
                    };
                    return self.say_when_heard((session, connection), [*ino].into(), message);
                }
            },
            Ask::Acquire(slot) if slot.ino().of_slot().is_some() => vec![*slot],
            Ask::Acquire(object) => match self.server.object(object.ino()) {
                Some(object) => vec![object],
                None => {
                    let message = ToClient::Acquired { request, owned: false };
                    return self.send_about(session, connection, [object.ino()], message);
                }
            },
            Ask::Change { change, .. } => {
                let outcome = self.server.stored.sessions[&session].outcomes.get(&request).copied();
                if let Some(made) = outcome.filter(|_| !self.is_broken(Rule::ReplayTwice)) {
                    return self.again(connection, session, request, made);
                }
                let mut objects: Vec<Object> =
                    change.directories().into_iter().map(Object::Directory).collect();
                if let Some(ino) = change.inode() {
                    match self.server.object(ino) {
                        Some(object) => objects.push(object),
                        None => {
                            let result = Err(TreeError::Stale);
                            let message = ToClient::Changed { request, result, doing: Who::Server };
                            return self.say_when_heard((session, connection), [ino].into(), message);
                        }
                    }
                }
                objects.dedup();
                objects
            }
            Ask::Restore { batch, .. } => {
                let rows = &self.server.stored.rows.inodes;
                let (directories, strays) = estates::objects(&batch.records, |ino| rows.get(&ino).cloned());
                // The strays one after the other, then all directories at once.
                strays.into_iter().chain(directories).collect()
            }
        };
        let (unnamed, about) = (Vec::new(), BTreeSet::new());
        self.request(Pending {
            session,
            connection,
            request,
            ask,
            objects,
            executed: false,
            says_how_things_are: false,
            done: None,
            unnamed,
            about,
        });
    }

    pub(super) fn request(&mut self, pending: Pending) {
        let objects = pending.objects.clone();
        let request = match &pending.ask {
            Ask::Acquire(_) => Request::Own(objects[0]),
            Ask::List(_) => Request::List(objects[0]),
            Ask::Names(..) => Request::Names(objects[0]),
            Ask::Change { execute, change } => {
                Request::Change { objects, local: !execute, by_slots: change.by_slots() }
            }
            Ask::Restore { .. } if self.is_broken(Rule::RestoreUnheard) => Request::Read(Vec::new()),
            Ask::Restore { .. } => match objects.first() {
                Some(stray @ Object::File { .. }) => Request::Own(*stray),
                _ => Request::Reclaim(objects),
            },
            _ => Request::Read(objects),
        };
        let ticket = self.server.grants.request(pending.session, request);
        self.server.tickets.insert(ticket, pending);
    }

    /// A change that was carried out before is answered when everybody has seen it.
    pub(super) fn again(&mut self, connection: u64, session: SessionId, request: u64, made: Option<Ino>) {
        let settling = self
            .server
            .tickets
            .values_mut()
            .find(|pending| pending.session == session && pending.request == request);
        if let Some(pending) = settling {
            pending.connection = connection;
            return;
        }
        match self.server.all_claimed() {
            true => {
                let answer = ToClient::Changed { request, result: Ok(made), doing: Who::Server };
                self.when_durable(Then::Say(connection, answer));
            }
            false => self.server.replays.push((connection, request, made)),
        }
    }

    /// A client waits until all that it has heard of is durable.
    pub(super) fn sync_to(&mut self, connection: u64, request: u64, (opening, mark): (u64, u64)) {
        let durable = &self.server.durable.history;
        let is_durable = opening != durable.opening() || mark <= durable.mark;
        match is_durable || self.is_broken(Rule::SyncAtOnce) {
            true => self.send_to_client(connection, ToClient::Synced { request }),
            false => self.when_durable(Then::Say(connection, ToClient::Synced { request })),
        }
    }
}
