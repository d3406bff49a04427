//! Changes that the server executes, and batches that it applies.

use super::*;
use crate::world::CLEARS_FROM;

impl World {
    /// Executes a change; with what was looked at.
    pub(super) fn run_change(&mut self, change: &Change) -> (Result<Executed, Refused>, BTreeSet<Ino>) {
        let mut execution = Execution::new(change.clone(), self.server.stored.usage, self.server.quota.most);
        let now = Timestamp::from_nanos(i128::from(self.now as i64 + self.server.skew));
        let mut seen = BTreeSet::new();
        loop {
            let rows = &self.server.stored.rows;
            match execution.run(now) {
                Ok(result) => return (result, seen),
                Err(Wants::Inode(ino)) => {
                    seen.insert(ino);
                    execution.give_inode(ino, rows.inodes.get(&ino).cloned());
                }
                Err(Wants::Names(dir, names)) => {
                    seen.insert(dir);
                    let all = rows.listing(dir);
                    execution.give_names(dir, all.into_iter().filter(|(name, _)| names.contains(name)));
                }
                Err(Wants::AnyName(dir)) => {
                    seen.insert(dir);
                    execution.give_names(dir, rows.listing(dir).into_iter().take(1));
                }
                Err(Wants::Numbers) => execution.give_numbers(self.numbers_of_births()),
            }
        }
    }

    pub(super) fn execute(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let Ask::Change { change, .. } = pending.ask.clone() else { return };
        let claimed = pending.objects.clone();
        let Some(row) = self.server.stored.sessions.get(&session) else {
            self.give_up(ticket);
            return self.pump();
        };
        let mut row = row.clone();
        let again = self.is_broken(Rule::ReplayTwice) || self.is_broken(Rule::LookBeforeClaims);
        if let Some(made) = row.outcomes.get(&request).filter(|_| !again) {
            // It was done before, and brought back.
            let answer = ToClient::Changed { request, result: Ok(*made), doing: Who::Server };
            self.give_up(ticket);
            self.when_durable(Then::Say(connection, answer));
            return self.pump();
        }
        let (result, seen) = self.run_change(&change);
        if self.server.order.doomed {
            return;
        }
        let executed = match result {
            Ok(executed) => executed,
            Err(_) if self.is_stuck_about(seen.iter().copied()) => {
                return self.when_durable(Then::Work(ticket, Turn::Execute));
            }
            // Worlds before these go on as they did: the seeds of other rules rest on their schedules.
            Err((_, Some(of)))
                if self.config.seed >= CLEARS_FROM
                    && !claimed.contains(&of)
                    && !self.is_broken(Rule::RefuseUnclaimed) =>
            {
                return self.extend(ticket, vec![of]);
            }
            Err((error, _)) => {
                self.give_up(ticket);
                let message = ToClient::Changed { request, result: Err(error), doing: Who::Server };
                self.say_when_heard((session, connection), seen, message);
                return self.pump();
            }
        };
        let mut more: Vec<Object> =
            executed.objects.iter().filter(|object| !claimed.contains(object)).copied().collect();
        if !more.is_empty() {
            more.dedup();
            return self.extend(ticket, more);
        }
        row.outcomes.insert(request, executed.made);
        self.outcome.executed += 1;
        let mut puts: Vec<Put> = executed.records.iter().cloned().map(Put::Row).collect();
        puts.push(Put::Usage(self.server.stored.usage.after(executed.usage)));
        puts.push(Put::Session(session, Some(row)));
        // What is above a directory that moves was looked at, and is not among the rows.
        let is_directory =
            |record: &Record| matches!(record, Record::PutDentry(_, _, to) if to.kind == FileKind::Directory);
        let waits = matches!(change, Change::Rename(..)) && executed.records.iter().any(is_directory);
        let doing = Doing {
            session,
            sequence: Sequence(0),
            usage: executed.usage,
            records: executed.records.clone(),
            outcome: Some((request, executed.made)),
            waits,
        };
        let place = self.write(puts, Some(doing));
        self.strike(&executed.records);
        self.judge_execution((session, request), &change, &executed, &place);
        for birth in &executed.births {
            self.server.grants.adopt(session, *birth);
            self.server.grants.told(birth.ino(), NOT_TOLD);
        }
        if let Some(pending) = self.server.tickets.get_mut(&ticket) {
            (pending.executed, pending.unnamed) = (true, executed.unnamed.clone());
        }
        // What changes nothing says how things are.
        let about = if executed.records.is_empty() { seen } else { place.about };
        match place.early {
            true => self.published(ticket, executed, about),
            false => self.when_durable(Then::Publish(ticket, Box::new(executed), about)),
        }
    }

    /// A change that was executed is durable, or can be brought back.
    pub(super) fn published(&mut self, ticket: Ticket, mut executed: Executed, about: BTreeSet<Ino>) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let session = pending.session;
        for birth in &executed.births {
            self.server.grants.adopt(session, *birth);
            self.server.grants.told(birth.ino(), NOT_TOLD);
        }
        self.publish(ticket, session, &mut executed, &about);
        if let Some(pending) = self.server.tickets.get_mut(&ticket) {
            (pending.done, pending.about) = (Some(executed.made), about);
            pending.says_how_things_are = executed.records.is_empty();
        }
        self.finish(ticket);
    }

    pub(super) fn judge_execution(
        &mut self,
        (session, request): (SessionId, u64),
        change: &Change,
        executed: &Executed,
        place: &Place,
    ) {
        let Some(op) = self.reference.requests.get(&(session, request)).copied() else {
            return self.fail(format!("a request that nobody made: {session} {request}"));
        };
        let rows = &self.server.stored.rows.inodes;
        let row = |ino: u64| rows.get(&Ino(ino)).map(Attributes::of);
        let made = executed.made.map(|ino| ino.0);
        let verdict = self.reference.change(op, change, made, row, self.now);
        self.judge(&format!("op {op} executed"), verdict);
        let verdict = self.reference.executed(op, (place.at, place.early), self.now);
        self.judge(&format!("op {op} executed"), verdict);
    }

    pub(super) fn publish(
        &mut self,
        ticket: Ticket,
        session: SessionId,
        executed: &mut Executed,
        about: &BTreeSet<Ino>,
    ) {
        let births: Vec<Ino> = executed.births.iter().map(|object| object.ino()).collect();
        for (to, event) in self.server.grants.publish(ticket, &executed.objects) {
            let asker = to == session;
            if asker {
                births.iter().for_each(|birth| self.server.grants.told(*birth, event));
            }
            let mut records = Vec::new();
            let mut forget = Vec::new();
            for record in &executed.records {
                match record {
                    Record::PutInode(ino, row) => {
                        let visible = row.nlink == 0
                            || (!births.contains(ino) || asker)
                                && self.server.grants.covers(to, Object::of(*ino, row));
                        match visible {
                            true => records.push(record.clone()),
                            false if births.contains(ino) => {}
                            false => forget.push(*ino),
                        }
                    }
                    Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _)
                        if self.server.grants.held(to, *dir).is_some() =>
                    {
                        records.push(record.clone());
                    }
                    _ => {}
                }
            }
            if !executed.unnamed.is_empty() {
                self.server.unanswered.insert((to, event), executed.unnamed.clone());
            }
            let own = if asker { executed.births.clone() } else { Vec::new() };
            let about = if self.is_broken(Rule::ApplyWithoutEntries) { &BTreeSet::new() } else { about };
            let change = self.server.grants.tell_change(ticket, to).map_or(0, |change| change.0);
            self.event(to, event, Body::Apply { records, own, forget, change }, about.iter().copied());
        }
    }

    pub(super) fn commit(&mut self, connection: u64, session: SessionId, batch: &Batch, pressing: bool) {
        let last = self.server.stored.sessions[&session].last;
        if batch.sequence <= last && !self.is_broken(Rule::ReplayTwice) {
            return self.when_durable(Then::Say(connection, ToClient::Committed(batch.sequence)));
        }
        if batch.sequence > last.next() {
            return self.fail(format!("{session} commits {:?} after {last:?}", batch.sequence));
        }
        let counts_none = self.is_broken(Rule::CountRefused);
        let (now, is_refused) = (self.now, self.is_refused(batch.usage, pressing));
        let live = self.server.live.entry(session).or_default();
        // Nobody is waited for because of batches for which there is no room, but the first: when that came its client may know.
        let was_refused = std::mem::replace(&mut live.refused, is_refused);
        if !is_refused || !was_refused && !counts_none {
            live.worked = now;
        }
        if is_refused {
            return self.send_to_client(connection, ToClient::Full(batch.sequence));
        }
        let fault = self.server.fault.take();
        match fault {
            Some(Fault::Refuse) => {
                return self.send_to_client(connection, ToClient::Refused(batch.sequence));
            }
            Some(Fault::UncertainLost) => {
                return self.send_to_client(connection, ToClient::Uncertain);
            }
            _ => {}
        }
        let moves = self.moves(batch);
        let owned = self.owned_and_deleted(session, batch);
        let checked = self.check_batch(session, batch);
        self.judge(&format!("{session} commits {}", batch.sequence.0), checked);
        let undone = self.reference.comes_again(session, batch.sequence.0);
        self.judge(&format!("{session} commits {} again", batch.sequence.0), undone);
        let place = self.apply_batch(session, batch, moves);
        self.reference.committed(session, batch.sequence.0, (place.at, place.early), self.now);
        let committed = ToClient::Committed(batch.sequence);
        match (fault, place.early) {
            (Some(_), _) => self.send_to_client(connection, ToClient::Uncertain),
            (None, true) => self.send_about(session, connection, place.about, committed),
            (None, false) => self.when_durable(Then::Say(connection, committed)),
        }
        self.server.order.forgotten.push((place.at.1, session, owned));
    }

    /// Whether a batch gives another name to a directory: what is above that was looked at.
    fn moves(&self, batch: &Batch) -> bool {
        batch.records.iter().any(|record| {
            matches!(record, Record::PutDentry(_, _, to)
                if to.kind == FileKind::Directory && self.server.grants.owner(to.ino).is_some())
        })
    }

    /// What a session owns by itself, and deletes.
    fn owned_and_deleted(&self, session: SessionId, batch: &Batch) -> Vec<Object> {
        let deleted = batch.records.iter().filter_map(|record| match record {
            Record::DeleteInode(ino) if self.server.grants.owner(*ino) == Some(session) => Some(*ino),
            _ => None,
        });
        deleted.filter_map(|ino| self.server.object(ino)).collect()
    }

    /// What a batch does to rows: inodes that are deleted stay as long as somebody uses them.
    fn apply_batch(&mut self, session: SessionId, batch: &Batch, waits: bool) -> Place {
        self.strike(&batch.records);
        let mut records = Vec::new();
        let mut deleted = Vec::new();
        for record in &batch.records {
            let server = &mut self.server;
            let Record::DeleteInode(ino) = record else {
                records.push(record.clone());
                continue;
            };
            server.grants.forget(*ino);
            // Whoever deletes it has it in use no more.
            server.live.entry(session).or_default().uses.remove(ino);
            let used = server.is_used(*ino);
            let row = server.stored.rows.inodes.get(ino).filter(|_| used).cloned();
            let Some(mut row) = row else {
                records.push(record.clone());
                continue;
            };
            (row.nlink, row.parent) = (0, if row.kind() == FileKind::Directory { row.parent } else { STRAY });
            let data = match &row.content {
                Content::Inline(data) => data.to_vec(),
                _ => Vec::new(),
            };
            deleted.push((*ino, Attributes::of(&row), data));
            records.push(Record::PutInode(*ino, Box::new(row)));
        }
        let mut puts: Vec<Put> = records.iter().cloned().map(Put::Row).collect();
        puts.extend(self.touched(&records));
        puts.push(Put::Usage(self.server.stored.usage.after(batch.usage)));
        if let Some(row) = self.server.stored.sessions.get(&session) {
            let row = StoredSession { last: batch.sequence, ..row.clone() };
            puts.push(Put::Session(session, Some(row)));
        }
        let doing =
            Doing { session, sequence: batch.sequence, usage: batch.usage, records, outcome: None, waits };
        let place = self.write(puts, Some(doing));
        for (ino, attributes, data) in deleted {
            let op = self.new_op();
            let with = (session, batch.sequence.0);
            self.reference.deleted_elsewhere(op, ino.0, attributes, data, (with, place.at, self.now));
        }
        if let Some(live) = self.server.live.get_mut(&session) {
            live.uses.extend(&batch.orphans);
        }
        place
    }

    /// Rows of directories in which names change by slots. Entries do not have them.
    fn touched(&self, records: &[Record]) -> Vec<Put> {
        let now = Timestamp::from_nanos(i128::from(self.now as i64 + self.server.skew));
        let named = records.iter().filter_map(|record| match record {
            Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => Some(*dir),
            _ => None,
        });
        let dirs: BTreeSet<Ino> = named.filter(|dir| self.server.grants.is_split(*dir)).collect();
        let rows = dirs.into_iter().filter_map(|dir| Some((dir, self.server.stored.rows.inodes.get(&dir)?)));
        rows.map(|(dir, row)| {
            let time = now.max(row.ctime.next());
            let row = InodeRow { mtime: time, ctime: time, ..row.clone() };
            Put::Row(Record::PutInode(dir, Box::new(row)))
        })
        .collect()
    }

    fn strike(&mut self, records: &[Record]) {
        if !self.is_broken(Rule::RestoreOverOthers) {
            self.server.estates.strike(records);
        }
    }

    /// A session brings what an ended one had not shipped. It owns it for that long.
    pub(super) fn restore(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.remove(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let Ask::Restore { batch, of } = pending.ask.clone() else { return };
        let unheard = self.is_broken(Rule::RestoreUnheard);
        if let Some(Object::File { .. }) = pending.objects.first().filter(|_| !unheard) {
            self.server.grants.finish(ticket);
            let objects = pending.objects[1..].to_vec();
            self.request(Pending { objects, ..pending });
            return self.pump();
        }
        let rows = &self.server.stored.rows.inodes;
        let stored = |ino| rows.get(&ino).cloned();
        let applied = self.server.estates.contradicted(of, &batch.records, stored).is_none()
            && (unheard || self.check_batch(session, &batch).is_ok())
            && !self.is_refused(batch.usage, false)
            && self.server.fault.take() != Some(Fault::Refuse);
        if applied {
            // With all that it may build on.
            if !self.flush_now() {
                return;
            }
            let place = (self.server.stored.history.opening(), self.server.order.last + 1);
            let verdict = self.reference.restored(of, place, self.now);
            self.judge(&format!("{session} restores what {of} had"), verdict);
            self.apply_batch(session, &batch, true);
            self.flush_now();
            self.server.estates.forget(of);
        }
        // Nothing was claimed, so nothing can be refused.
        drop(self.server.grants.claim(session, &[]));
        self.server.grants.finish(ticket);
        self.collect();
        self.send_to_client(connection, ToClient::Restored { request, applied });
        self.pump();
    }

    /// A session changes only what it owns; what it has made it owns from now on.
    pub(super) fn check_batch(&mut self, session: SessionId, batch: &Batch) -> Result<(), String> {
        let server = &mut self.server;
        let owns = |grants: &Grants, ino: Ino| grants.owner(ino) == Some(session);
        for record in &batch.records {
            if let Record::PutInode(ino, row) = record
                && row.kind() == FileKind::Directory
                && !owns(&server.grants, *ino)
                && (server.stored.rows.inodes.contains_key(ino)
                    || !server.grants.adopt(session, Object::Directory(*ino)))
            {
                return Err(format!("directory {ino} is not its own"));
            }
        }
        for record in &batch.records {
            let (ino, after) = match record {
                Record::PutInode(ino, row) if row.kind() != FileKind::Directory => (*ino, Some(row)),
                Record::DeleteInode(ino) => (*ino, None),
                Record::PutDentry(dir, name, _) | Record::DeleteDentry(dir, name) => {
                    if let Some(width) = server.grants.width(*dir) {
                        if !owns(&server.grants, dir.slot(name.as_bytes(), width)) {
                            return Err(format!("{name:?} of {dir} is in no slot of its own"));
                        }
                        continue;
                    }
                    if !owns(&server.grants, *dir) {
                        return Err(format!("the names of {dir} are not its own"));
                    }
                    continue;
                }
                _ => continue,
            };
            let by_itself = owns(&server.grants, ino);
            let before = server.object(ino);
            let by_home = before.and_then(Object::home).is_some_and(|home| owns(&server.grants, home));
            if before.is_some() && !by_itself && !by_home {
                return Err(format!("{ino} is not its own: {before:?}, {:?}", server.grants.owner(ino)));
            }
            let Some(row) = after else { continue };
            let object = Object::of(ino, row);
            let is_made = before.is_none() && object.home().is_some_and(|home| server.grants.is_split(home));
            let is_own = by_itself || is_made || object.home().is_none();
            if is_own && !server.grants.adopt(session, object) {
                return Err(format!("{object:?} cannot be its own"));
            }
        }
        Ok(())
    }
}
