//! The connection: hello, claim, lease, requests and their answers.

use super::*;
use crate::messages::Listed;

impl World {
    pub(crate) fn connect(&mut self, at: usize) {
        let client = &self.clients[at];
        if client.connection.is_some() || client.is_over {
            return;
        }
        let (life, session) = (client.life, client.session);
        if !self.server.up {
            return self.after(20, What::Connect(at, life));
        }
        let number = self.open(at, life, session);
        let now = self.now;
        let client = &mut self.clients[at];
        client.connection = Some(number);
        client.link = Link::Greeting;
        client.hello_sent = now;
        let (resume, heard, replaces) = (client.greeted, client.history, client.replaces);
        self.say(at, ToServer::Hello { session, resume, heard, replaces });
    }

    pub(crate) fn client_loses(&mut self, at: usize) {
        let forgets = self.is_broken(Rule::ForgetRecalled);
        let is_late = self.is_broken(Rule::RecallAfterLoss);
        let client = &mut self.clients[at];
        client.connection = None;
        client.link = Link::Down;
        (client.arrived, client.refused) = (0, false);
        client.foreword = None;
        client.seen = 0;
        client.behind.clear();
        client.ships.clear();
        // What was not given back is still its own: changes of it may be in the log.
        let recalls = std::mem::take(&mut client.recalls);
        for ino in recalls.iter().filter(|_| !forgets).flat_map(|recall| &recall.owned) {
            client.tree.own(*ino);
        }
        if is_late {
            client.late = recalls;
        }
        for expiry in std::mem::take(&mut client.expiries).into_values() {
            expiry.unknown.into_iter().for_each(|ino| client.kernel.invalidate_also_new(ino));
        }
        let life = client.life;
        let delay = self.rng.below(60);
        self.after(delay, What::Connect(at, life));
    }

    pub(super) fn say(&mut self, at: usize, message: ToServer) {
        let now = self.now;
        self.clients[at].last_sent = now;
        if let Some(connection) = self.clients[at].connection {
            self.send_to_server(connection, message);
        }
    }

    /// Something that was sent then is answered, and so has come what was shipped before it.
    pub(super) fn heard(&mut self, at: usize, sent: u64, work: u64) {
        let relies_on_pings = self.is_broken(Rule::RelyOnPings);
        let now = self.now;
        let client = &mut self.clients[at];
        client.heard = client.heard.max(sent);
        client.arrived = client.arrived.max(work);
        client.owed.retain(|_, (_, acknowledged)| acknowledged.is_none_or(|then| then > sent));
        if client.lapsed && client.link == Link::Up && client.lease_until(relies_on_pings) > now {
            client.lapsed = false;
            self.wake_all(at);
        }
        self.watch_lease(at);
    }

    pub(super) fn watch_lease(&mut self, at: usize) {
        let relies_on_pings = self.is_broken(Rule::RelyOnPings);
        let client = &self.clients[at];
        let (life, until) = (client.life, client.lease_until(relies_on_pings));
        self.after(until.saturating_sub(self.now), What::Lease(at, life));
    }

    pub(crate) fn check_lease(&mut self, at: usize) {
        let now = self.now;
        let no_lease = self.is_broken(Rule::NoLease);
        let relies_on_pings = self.is_broken(Rule::RelyOnPings);
        let client = &mut self.clients[at];
        if now >= client.lease_until(relies_on_pings) && !client.lapsed && !no_lease {
            client.lapsed = true;
            client.kernel.expire_all();
            client.drop_names(|_| true);
            trace!(self, "the lease of c{at} has run out");
        }
    }

    pub(crate) fn ping(&mut self, at: usize) {
        let life = self.clients[at].life;
        self.after(LEASE / 6, What::Ping(at, life));
        if self.clients[at].link == Link::Up && self.now - self.clients[at].last_sent >= LEASE / 6 {
            self.ask(at, Ask::Ping);
        }
    }

    /// Asks the server; an answer wakes everybody.
    pub(crate) fn ask(&mut self, at: usize, ask: Ask) -> u64 {
        let now = self.now;
        let counts_all = self.is_broken(Rule::CountRefused);
        let client = &mut self.clients[at];
        let request = client.next_request;
        client.next_request += 1;
        let work = if client.refused && !counts_all { 0 } else { client.commit_sent };
        let accepted = client.accepted;
        let outstanding = Outstanding { ask: ask.clone(), sent: now, work, accepted };
        client.outstanding.insert(request, outstanding);
        if client.link == Link::Up {
            self.send_ask(at, request, ask);
        }
        request
    }

    pub(super) fn send_ask(&mut self, at: usize, request: u64, ask: Ask) {
        let client = &self.clients[at];
        let first = client.outstanding.keys().next().copied().unwrap_or(request);
        self.say(at, ToServer::Ask { request, forget_below: first, ask });
    }

    /// Fetches what is missing, unless that is under way.
    pub(crate) fn fetch(&mut self, at: usize, missing: Missing) -> u64 {
        let under_way =
            self.clients[at].fetches.iter().find(|(_, of)| **of == missing).map(|(request, _)| *request);
        if let Some(request) = under_way {
            return request;
        }
        let ask = match missing {
            Missing::Inode(ino) => Ask::Fetch(ino),
            Missing::Directory(dir) => Ask::Enter(dir),
            Missing::Own(object) => Ask::Acquire(object),
            Missing::Listing(dir) => Ask::List(dir),
            Missing::Names(slot) => {
                let stem = self.clients[at].tree.wanted_stem(slot);
                Ask::Names(slot, stem.unwrap_or_else(|| Name::new(b"?")))
            }
            Missing::Heard(change) => Ask::Hear(change),
            Missing::Numbers | Missing::Executor => Ask::Numbers,
        };
        let request = self.ask(at, ask);
        self.clients[at].fetches.insert(request, missing);
        request
    }

    /// Waits until everything that it has heard of is durable.
    pub(crate) fn ask_to_sync(&mut self, at: usize) -> u64 {
        let client = &self.clients[at];
        let opening = client.history.opening;
        // What is of others was brought, and is durable, before anything else is answered.
        let mark = client.kept.last(opening).unwrap_or(0);
        self.ask(at, Ask::Sync { opening, mark })
    }

    /// A message comes with the mark up to which all is durable, and with what is to be kept. Before its session is known
    /// there, the mark is of another opening.
    pub(crate) fn hears(&mut self, at: usize, mark: u64, entries: Vec<Entry>, message: &ToClient) {
        let is_answer = matches!(message, ToClient::Changed { .. } | ToClient::Committed(_));
        let forgets = is_answer && self.is_broken(Rule::ForgetAtAnswer);
        let any_mark = self.is_broken(Rule::DropAtAnyMark);
        let client = &mut self.clients[at];
        for entry in entries.into_iter().filter(|_| !forgets) {
            client.kept.keep(entry.opening, entry.mark, entry);
        }
        if let ToClient::Welcome { opening, .. } = message {
            client.history = Heard { opening: *opening, mark };
        } else if client.link != Link::Greeting {
            client.history.mark = client.history.mark.max(mark);
        } else {
            return;
        }
        let Heard { opening, mark } = client.history;
        client.kept.durable(opening, mark);
        if any_mark {
            (0..opening).for_each(|opening| client.kept.durable(opening, mark));
        }
    }

    pub(super) fn answered(&mut self, at: usize, request: u64) -> Option<Outstanding> {
        let client = &mut self.clients[at];
        client.fetches.remove(&request);
        let outstanding = client.outstanding.remove(&request)?;
        self.heard(at, outstanding.sent, outstanding.work);
        self.wake_all(at);
        Some(outstanding)
    }

    pub(crate) fn client_receives(&mut self, at: usize, message: ToClient) {
        if self.clients[at].foreword.is_some() {
            return self.clients[at].behind.push_back(message);
        }
        match message {
            ToClient::Welcome { last, numbers, .. } => self.welcome(at, last, numbers),
            ToClient::OtherHistory => self.end_mount(at),
            ToClient::Ended { last } => {
                trace!(self, "c{at} was evicted");
                if let Some(connection) = self.clients[at].connection.take() {
                    self.connections.remove(&connection);
                }
                self.come_back(at, last);
            }
            ToClient::OtherTree { last } => self.leave_tree(at, last),
            ToClient::Ship(number) => self.ship_for(at, number),
            ToClient::Restored { request, applied } => {
                trace!(self, "what c{at} had not shipped is applied: {applied}");
                let client = &mut self.clients[at];
                client.unsent = None;
                if applied {
                    client.accepted = Sequence(1);
                    client.last_cut = Sequence(1);
                }
                client.outstanding.remove(&request);
                self.up(at);
            }
            ToClient::Claimed { last } => self.claimed(at, last),
            ToClient::Synced { request } => drop(self.answered(at, request)),
            ToClient::Heard { request } => {
                if let Some(Outstanding { ask: Ask::Hear(change), .. }) = self.answered(at, request) {
                    self.clients[at].tree.heard(&[change]);
                }
            }
            ToClient::AllHeard(changes) => self.clients[at].tree.heard(&changes),
            ToClient::Listings { request, listings } => {
                if self.answered(at, request).is_some() {
                    listings.into_iter().for_each(|listing| self.add_listing(at, listing));
                }
            }
            ToClient::Row { request, ino, row, own, split, unheard } => {
                if self.answered(at, request).is_some()
                    && let Some(row) = row
                {
                    let tree = &mut self.clients[at].tree;
                    tree.unheard_of(ino, &unheard);
                    match split {
                        true => tree.add_split(ino, *row),
                        false => tree.add_inode(ino, *row),
                    }
                    if own {
                        tree.own(ino);
                    }
                }
            }
            ToClient::Acquired { request, owned } => {
                trace!(self, "c{at} acquires: {owned}");
                self.answered(at, request);
            }
            ToClient::Changed { request, result, doing } => {
                if self.answered(at, request).is_some() {
                    self.clients[at].answers.insert(request, (result, doing));
                }
            }
            ToClient::Numbers { request, range } => {
                if self.answered(at, request).is_some() {
                    self.clients[at].tree.add_numbers(range);
                }
            }
            ToClient::Pong { request } => drop(self.answered(at, request)),
            ToClient::Committed(sequence) => {
                let sent = self.clients[at].commit_sent;
                if self.clients[at].in_flight.as_ref().is_some_and(|(_, batch)| batch.sequence == sequence) {
                    self.heard(at, sent, sent);
                    self.shipped(at);
                }
            }
            ToClient::Refused(sequence) => self.refused(at, sequence, false),
            ToClient::Full(sequence) => self.refused(at, sequence, true),
            ToClient::Uncertain => {
                // The batch stays as it is, and goes out again.
                if let Some((_, batch)) = &self.clients[at].in_flight {
                    let (batch, pressing) = (batch.clone(), self.clients[at].pressing);
                    self.say(at, ToServer::Commit(batch, pressing));
                }
            }
            ToClient::Event { number, body } => self.event_at_client(at, number, body),
        }
    }

    pub(super) fn welcome(&mut self, at: usize, last: Sequence, numbers: hayloft_model::InoRange) {
        // Its session was ended while the greeting was under way, and the volume has another tree since: what it was asked before
        // was asked of that one, and is judged by it.
        if !self.clients[at].greeted && self.clients[at].tree_number != self.trees.now {
            return self.restart_client(at);
        }
        let now = self.now;
        let client = &mut self.clients[at];
        client.greeted = true;
        client.link = Link::Claiming;
        client.claim_sent = now;
        let stale = client.tree.uncover_all();
        client.tree.add_numbers(numbers);
        stale.attributes.iter().chain(&stale.data).for_each(|ino| client.kernel.invalidate_also_new(*ino));
        client.drop_names(|_| true);
        let in_use = if self.is_broken(Rule::ForgetInUse) {
            Vec::new()
        } else {
            self.clients[at].tree.in_use().collect()
        };
        if self.clients[at].in_flight.as_ref().is_some_and(|(_, batch)| batch.sequence <= last) {
            self.shipped(at);
        }
        let client = &mut self.clients[at];
        let accepted = client.accepted;
        let late = std::mem::take(&mut client.late).into_iter();
        let given = late.filter(|recall| recall.keep_read && recall.until <= accepted);
        given.flat_map(|recall| recall.owned).for_each(|ino| client.tree.disown(ino));
        let (own, entries) = (client.tree.owned(), client.kept.to_bring(client.history.opening));
        self.say(at, ToServer::Claim { own, in_use, entries });
    }

    /// What was brought is durable. Others may have brought a batch that was not acknowledged.
    pub(super) fn claimed(&mut self, at: usize, last: Sequence) {
        let client = &mut self.clients[at];
        client.kept.brought(client.history.opening);
        if last < client.accepted {
            let accepted = client.accepted;
            return self.fail(format!("c{at} is told that {last:?} is its last batch, after {accepted:?}"));
        }
        if self.clients[at].in_flight.as_ref().is_some_and(|(_, batch)| batch.sequence <= last) {
            self.shipped(at);
        }
        let client = &mut self.clients[at];
        if client.unsent.take_if(|(batch, _)| batch.sequence <= last).is_some() {
            (client.accepted, client.last_cut) = (last, last);
        }
        let Some((batch, of)) = self.clients[at].unsent.clone() else { return self.up(at) };
        self.clients[at].link = Link::Restoring;
        self.clients[at].owed.clear();
        let ask = Ask::Restore { batch: Box::new(batch), of };
        let request = self.ask(at, ask.clone());
        self.send_ask(at, request, ask);
    }

    fn up(&mut self, at: usize) {
        self.clients[at].link = Link::Up;
        let sent = self.clients[at].claim_sent;
        // What was not acknowledged on the last connection counts as acknowledged.
        self.clients[at].owed.clear();
        self.heard(at, sent, 0);
        self.check_lease(at);
        let now = self.now;
        if let Some((_, batch)) = &self.clients[at].in_flight {
            let (batch, pressing) = (batch.clone(), self.clients[at].pressing);
            self.clients[at].commit_sent = now;
            self.say(at, ToServer::Commit(batch, pressing));
        }
        self.clients[at].outstanding.retain(|_, of| !matches!(of.ask, Ask::Restore { .. }));
        let again: Vec<(u64, Ask)> = self.clients[at]
            .outstanding
            .iter_mut()
            .map(|(request, outstanding)| {
                (outstanding.sent, outstanding.work) = (now, 0);
                (*request, outstanding.ask.clone())
            })
            .collect();
        again.into_iter().for_each(|(request, ask)| self.send_ask(at, request, ask));
        self.let_go(at);
        self.wake_all(at);
    }

    pub(super) fn add_listing(&mut self, at: usize, listing: Listing) {
        let adds_ended = self.is_broken(Rule::AddEnded);
        let client = &mut self.clients[at];
        client.tree.unheard_of(listing.dir, &listing.unheard);
        if adds_ended {
            for (_, dentry, row) in &listing.entries {
                row.iter().for_each(|row| client.tree.add_inode(dentry.ino, row.clone()));
            }
        }
        match listing.what {
            Listed::Directory => client.tree.add_listing(listing.dir, listing.entries),
            Listed::Stem(stem) => client.tree.add_names(listing.dir, stem.as_bytes(), listing.entries),
            Listed::Split(row) => client.tree.add_split(listing.dir, *row),
            Listed::Whole => client.tree.forget_split(listing.dir),
        }
        for dir in listing.own {
            if client.tree.has_inode(dir.or_directory()) {
                client.tree.own(dir);
                client.hot.remove(&dir);
            }
        }
    }
}
