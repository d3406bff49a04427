//! Sessions come: hello, and the claim with what it brings back.

use super::*;
use crate::messages::Entry;

impl World {
    pub(super) fn hello(
        &mut self,
        (connection, session): (u64, SessionId),
        resume: bool,
        heard: Heard,
        replaces: Option<SessionId>,
    ) {
        if self.is_astray(heard) {
            return self.send_to_client(connection, ToClient::OtherHistory);
        }
        let moved = |session| self.server.stored.sessions.get(&session).filter(|found| found.moved);
        if let Some(found) = moved(session) {
            let last = found.last;
            return self.send_to_client(connection, ToClient::OtherTree { last });
        }
        if let Some(replaced) = replaces.filter(|replaced| moved(*replaced).is_some()) {
            // Its host has let go of everything by now: others can be served.
            self.end_session(replaced);
        }
        let known = self.server.stored.sessions.contains_key(&session);
        if resume && !known {
            let last = self.server.stored.ended.get(&session).copied();
            return self.send_to_client(connection, ToClient::Ended { last });
        }
        if !known {
            self.write(vec![Put::Session(session, Some(StoredSession::default()))], None);
            self.server.grants.begin(session, false);
            self.server.live.insert(session, Live::default());
        }
        let knows_many = self.config.seed >= MANY_FROM && !session.0.is_multiple_of(4);
        self.server.grants.knows_many_slots(session, knows_many);
        // Requests come again; what is carried out already is answered from its outcome.
        let void: Vec<Ticket> = self
            .server
            .tickets
            .iter()
            .filter(|(_, pending)| pending.session == session && !pending.executed)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in void {
            self.server.tickets.remove(&ticket);
            self.server.grants.cancel(ticket);
        }
        let now = self.now;
        let live = self.server.live.entry(session).or_default();
        let old = live.connection.replace(connection);
        (live.claimed, live.heard, live.refused) = (false, now, false);
        (live.sent, live.late) = (BTreeSet::new(), None);
        if let Some(old) = old {
            self.connections.remove(&old);
        }
        // With them all that was written before is durable.
        let Some(numbers) = self.numbers() else { return };
        let last = self.server.stored.sessions[&session].last;
        let opening = self.server.stored.history.opening();
        self.send_to_client(connection, ToClient::Welcome { last, numbers, opening });
        self.pump();
    }

    /// Numbers that are never given again. `None`: the volume is another server's.
    pub(super) fn numbers(&mut self) -> Option<InoRange> {
        let next = self.server.stored.next_ino;
        self.write(vec![Put::NextIno(next + 20)], None);
        self.flush_now().then_some(InoRange { next, end: next + 20 })
    }

    /// Numbers for what a change makes, of a block that is durable.
    pub(super) fn numbers_of_births(&mut self) -> InoRange {
        if self.is_broken(Rule::BirthsFromRow) {
            let next = self.server.stored.next_ino;
            self.write(vec![Put::NextIno(next + 1)], None);
            return InoRange { next, end: next + 1 };
        }
        if self.server.births.next == self.server.births.end
            && let Some(range) = self.numbers()
        {
            self.server.births = range;
        }
        let next = self.server.births.next;
        self.server.births.next += 1;
        InoRange { next, end: next + 1 }
    }

    /// A session brings what it keeps of other openings. It has claimed when that is durable.
    pub(super) fn claim(
        &mut self,
        connection: u64,
        session: SessionId,
        claim: (Vec<Object>, Vec<Ino>),
        entries: &[Entry],
    ) {
        let (own, in_use) = claim;
        let may_bring = self.server.live.get(&session).is_some_and(|live| live.may_bring);
        if entries.is_empty() || !may_bring && !self.is_broken(Rule::BringAfterEnd) {
            return self.claimed_by(connection, session, &own, in_use);
        }
        let twice = self.is_broken(Rule::BringTwice);
        let mut brought = self.server.stored.brought.clone();
        let history = &self.server.stored.history;
        let mut new: Vec<(usize, Entry)> = entries
            .iter()
            .filter_map(|entry| {
                let (at, durable) = history.ended(entry.opening)?;
                let is_new = entry.mark > durable && (brought.note(entry.opening, entry.mark) || twice);
                is_new.then(|| (at, entry.clone()))
            })
            .collect();
        new.sort_by_key(|(at, entry)| (*at, entry.mark));
        let new: Vec<Entry> = new.into_iter().map(|(_, entry)| entry).collect();
        if !new.is_empty() {
            let marks: Vec<(u64, u64)> = new.iter().map(|entry| (entry.opening, entry.mark)).collect();
            trace!(self, "{session} brings back {marks:?}");
            let mut puts = self.written_again(&new);
            match self.is_broken(Rule::NoteBroughtApart) {
                true => self.server.stored.brought = brought,
                false => puts.push(Put::Brought(brought)),
            }
            let place = self.write(puts, None);
            self.outcome.brought += marks.len() as u64;
            marks.into_iter().for_each(|entry| self.reference.brought(entry, place.at));
        }
        match self.is_broken(Rule::ClaimAtOnce) {
            true => self.claimed_by(connection, session, &own, in_use),
            false => self.when_durable(Then::Claim { connection, session, own, in_use }),
        }
    }

    /// What entries say, to be written once more in this order. What rows do not say for themselves only grows.
    pub(super) fn written_again(&mut self, entries: &[Entry]) -> Vec<Put> {
        let overwrites = self.is_broken(Rule::OverwriteByEntries);
        let stored = &self.server.stored;
        let mut usage = UsageDelta::default();
        let mut sessions: BTreeMap<SessionId, StoredSession> = BTreeMap::new();
        let mut ended: BTreeMap<SessionId, Sequence> = BTreeMap::new();
        let mut puts = Vec::new();
        for entry in entries {
            puts.extend(entry.records.iter().cloned().map(Put::Row));
            usage.bytes += entry.usage.bytes;
            usage.inodes += entry.usage.inodes;
            if let Some(known) = stored.sessions.get(&entry.session) {
                let row = sessions.entry(entry.session).or_insert_with(|| known.clone());
                row.last = if overwrites { entry.sequence } else { row.last.max(entry.sequence) };
                row.outcomes.extend(entry.outcome);
            } else if let Some(known) = stored.ended.get(&entry.session) {
                let last = ended.entry(entry.session).or_insert(*known);
                *last = (*last).max(entry.sequence);
            }
        }
        let mut usage = stored.usage.after(usage);
        if let Some(entry) = entries.last().filter(|_| overwrites) {
            usage = entry.total;
        }
        puts.push(Put::Usage(usage));
        puts.extend(sessions.into_iter().map(|(session, row)| Put::Session(session, Some(row))));
        puts.extend(ended.into_iter().map(|(session, last)| Put::Ended(session, last)));
        // What ended sessions had not shipped may be contradicted by it.
        self.server.estates = Estates::default();
        puts
    }

    /// What a session has brought is durable.
    pub(super) fn claimed_by(
        &mut self,
        connection: u64,
        session: SessionId,
        own: &[Object],
        in_use: Vec<Ino>,
    ) {
        let live = self.server.live.get_mut(&session).filter(|live| live.connection == Some(connection));
        let Some(live) = live else { return };
        (live.claimed, live.awaited, live.may_bring) = (true, false, false);
        live.uses = in_use.into_iter().collect();
        self.server.unanswered.retain(|(of, _), _| *of != session);
        self.server.order.undurable.disconnected(session);
        if let Err(refused) = self.server.grants.claim(session, own) {
            self.fail(format!("{session} claims what it does not own: {refused:?}"));
        }
        self.collect();
        let last = self.server.stored.sessions[&session].last;
        self.send_to_client(connection, ToClient::Claimed { last });
    }

    /// All have claimed that could bring something back: what is not there by now is lost.
    pub(super) fn settle_lost(&mut self) {
        let stored = &self.server.stored;
        let alive = stored.sessions.iter().map(|(session, row)| (*session, row.last.0)).collect();
        let here = self.clients.iter().filter(|client| !client.is_over).map(|client| client.session);
        let goes_on = here.filter(|session| stored.sessions.contains_key(session)).collect();
        let window = if self.fate.is_put_back() { u64::MAX } else { self.window };
        let settled = self.reference.settle(stored.history.opening(), &alive, &goes_on, window);
        self.outcome.lost += settled.as_ref().copied().unwrap_or(0);
        self.judge("all have claimed", settled.map(drop));
    }
}
