//! Changes that the server executes, and batches that it applies.

use super::*;

impl World {
    pub(super) fn run_change(&mut self, change: &Change) -> Result<Executed, TreeError> {
        let mut execution = Execution::new(change.clone(), self.server.stored.usage, self.server.quota.most);
        let now = Timestamp::from_nanos(i128::from(self.now as i64 + self.server.skew));
        let server = &mut self.server;
        loop {
            match execution.run(now) {
                Ok(result) => return result,
                Err(Wants::Inode(ino)) => {
                    execution.give_inode(ino, server.stored.rows.inodes.get(&ino).cloned());
                }
                Err(Wants::Names(dir, names)) => {
                    let all = server.stored.rows.listing(dir);
                    execution.give_names(dir, all.into_iter().filter(|(name, _)| names.contains(name)));
                }
                Err(Wants::AnyName(dir)) => {
                    execution.give_names(dir, server.stored.rows.listing(dir).into_iter().take(1));
                }
                Err(Wants::Numbers) => {
                    let next = server.stored.next_ino;
                    server.stored.next_ino += 1;
                    execution.give_numbers(InoRange { next, end: next + 1 });
                }
            }
        }
    }

    pub(super) fn execute(&mut self, ticket: Ticket) {
        let Some(pending) = self.server.tickets.get(&ticket) else { return };
        let (session, connection, request) = (pending.session, pending.connection, pending.request);
        let Ask::Change { change, .. } = pending.ask.clone() else { return };
        let claimed = pending.objects.clone();
        let mut executed = match self.run_change(&change) {
            Ok(executed) => executed,
            Err(error) => {
                self.give_up(ticket);
                self.changed(connection, request, Err(error), false);
                return self.pump();
            }
        };
        let mut more: Vec<Object> =
            executed.objects.iter().filter(|object| !claimed.contains(object)).copied().collect();
        if !more.is_empty() {
            more.dedup();
            return self.extend(ticket, more);
        }
        let Some(session_row) = self.server.stored.sessions.get_mut(&session) else {
            self.give_up(ticket);
            return self.pump();
        };
        session_row.outcomes.insert(request, executed.made);
        self.outcome.executed += 1;
        let stored = &mut self.server.stored;
        executed.records.iter().for_each(|record| stored.rows.apply(record));
        stored.usage = stored.usage.after(executed.usage);
        stored.history.mark += 1;
        self.strike(&executed.records);
        self.judge_execution(session, request, &change, &executed);
        for birth in &executed.births {
            self.server.grants.adopt(session, *birth);
        }
        self.publish(ticket, session, &mut executed);
        if let Some(pending) = self.server.tickets.get_mut(&ticket) {
            (pending.done, pending.unnamed) = (Some(executed.made), executed.unnamed);
        }
        self.finish(ticket);
    }

    pub(super) fn judge_execution(
        &mut self,
        session: SessionId,
        request: u64,
        change: &Change,
        executed: &Executed,
    ) {
        let Some(op) = self.reference.requests.get(&(session, request)).copied() else {
            return self.fail(format!("a request that nobody made: {session} {request}"));
        };
        let rows = &self.server.stored.rows.inodes;
        let row = |ino: u64| rows.get(&Ino(ino)).map(Attributes::of);
        let made = executed.made.map(|ino| ino.0);
        let verdict = self.reference.change(op, change, made, row, self.now);
        self.judge(&format!("op {op} executed"), verdict);
        let verdict = self.reference.executed(op);
        self.judge(&format!("op {op} executed"), verdict);
    }

    pub(super) fn publish(&mut self, ticket: Ticket, session: SessionId, executed: &mut Executed) {
        let births: Vec<Ino> = executed.births.iter().map(|object| object.ino()).collect();
        for (to, event) in self.server.grants.publish(ticket, &executed.objects) {
            let asker = to == session;
            let mut records = Vec::new();
            let mut forget = Vec::new();
            for record in &executed.records {
                match record {
                    Record::PutInode(ino, row) => {
                        let visible = row.nlink == 0
                            || (!births.contains(ino) || asker)
                                && self.server.grants.covers(to, object_of(*ino, row));
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
            self.event(to, event, Body::Apply { records, own, forget });
        }
    }

    pub(super) fn commit(&mut self, connection: u64, session: SessionId, batch: &Batch, pressing: bool) {
        let last = self.server.stored.sessions[&session].last;
        if batch.sequence <= last && !self.is_broken(Rule::ReplayTwice) {
            return self.send_to_client(connection, ToClient::Committed(batch.sequence));
        }
        if batch.sequence > last.next() {
            return self.fail(format!("{session} commits {:?} after {last:?}", batch.sequence));
        }
        if self.is_refused(batch.usage, pressing) {
            return self.send_to_client(connection, ToClient::Full(batch.sequence));
        }
        // Nobody is waited for because of a batch for which there is no room.
        self.server.live.entry(session).or_default().worked = self.now;
        let is_written = !matches!(self.server.fault, Some(Fault::Refuse | Fault::UncertainLost));
        self.server.stored.history.mark += u64::from(is_written);
        match self.server.fault.take() {
            Some(Fault::Refuse) => {
                return self.send_to_client(connection, ToClient::Refused(batch.sequence));
            }
            Some(Fault::UncertainLost) => {
                return self.send_to_client(connection, ToClient::Uncertain);
            }
            Some(Fault::UncertainApplied) => {
                self.send_to_client(connection, ToClient::Uncertain);
            }
            None => self.send_to_client(connection, ToClient::Committed(batch.sequence)),
        }
        let checked = self.check_batch(session, batch);
        self.judge(&format!("{session} commits {}", batch.sequence.0), checked);
        self.apply_batch(session, batch);
        self.reference.committed(session, batch.sequence.0);
    }

    fn apply_batch(&mut self, session: SessionId, batch: &Batch) {
        let now = self.now;
        self.strike(&batch.records);
        for record in &batch.records {
            let server = &mut self.server;
            match record {
                Record::DeleteInode(ino) => {
                    server.grants.forget(*ino);
                    // Whoever deletes it has it in use no more.
                    server.live.entry(session).or_default().uses.remove(ino);
                    let used = server.is_used(*ino);
                    let row = server.stored.rows.inodes.get_mut(ino).filter(|_| used);
                    match row {
                        Some(row) => {
                            (row.nlink, row.parent) =
                                (0, if row.kind() == FileKind::Directory { row.parent } else { STRAY });
                            let data = match &row.content {
                                Content::Inline(data) => data.to_vec(),
                                _ => Vec::new(),
                            };
                            self.reference.deleted_elsewhere(ino.0, Attributes::of(row), data, now);
                        }
                        None => server.stored.rows.apply(record),
                    }
                }
                record => server.stored.rows.apply(record),
            }
        }
        self.server.stored.usage = self.server.stored.usage.after(batch.usage);
        if let Some(live) = self.server.live.get_mut(&session) {
            live.uses.extend(&batch.orphans);
        }
        if let Some(stored) = self.server.stored.sessions.get_mut(&session) {
            stored.last = batch.sequence;
        }
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
            self.server.stored.history.mark += 1;
            let verdict = self.reference.restored(of, self.now);
            self.judge(&format!("{session} restores what {of} had"), verdict);
            self.apply_batch(session, &batch);
            self.server.estates.forget(of);
        }
        // Nothing was claimed, so nothing can be refused.
        drop(self.server.grants.claim(session, &[]));
        self.server.grants.finish(ticket);
        self.server.collect();
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
                Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => {
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
            let object = object_of(ino, row);
            if (by_itself || object.home().is_none()) && !server.grants.adopt(session, object) {
                return Err(format!("{object:?} cannot be its own"));
            }
        }
        Ok(())
    }
}
