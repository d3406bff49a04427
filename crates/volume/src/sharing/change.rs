//! `CHANGE`: an operation on what several sessions know is executed here, exactly once, and told to all of them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hayloft_model::grants::{Object, Outcome, Request};
use hayloft_model::{
    Change, Executed, Execution, Ino, InoRange, InodeRow, Name, Record, SessionId, TreeError, Usage, Wants,
};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Apply, ChangeRequest, Changed, DentryRow, InodeRowMessage, RecordMessage, error_code, record_message,
};
use prost::Message;
use slatedb::{Db, DbSnapshot, WriteBatch};

use crate::content::reserve::COMMIT_ROOM;
use crate::database;
use crate::database::tables::{self, VolumeRow};
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::sharing::{Pass, Progress, Sharing};
use crate::volume::Volume;

/// How often to look whether a database is open again.
const REOPENED: Duration = Duration::from_millis(50);

/// A request for a change.
struct Asked {
    session: SessionId,
    request: u64,
    change: Change,
    local: bool,
}

/// What came of trying to execute a change.
enum Tried {
    /// It concerns these as well.
    More(Vec<Object>),
    Refused(TreeError),
    Durable(Executed),
}

impl Volume {
    /// Takes a request for a change, on a task of its own that goes on when the connection breaks. The answer goes to
    /// the connection that the session has then.
    pub(crate) fn change(
        self: &Arc<Self>,
        session: SessionId,
        request: u64,
        message: &ChangeRequest,
        started: Instant,
    ) -> Result<(), VolumeError> {
        let change = message.change()?;
        if self.state.lock().sessions.get(&session).is_none_or(|found| found.row.read_only) {
            return Err(VolumeError::Invalid("a change by a read-only session"));
        }
        let asked = Asked { session, request, change, local: !message.execute };
        let mut sharing = self.sharing.lock();
        sharing.forget_below(session, message.forget_below);
        match sharing.changes.get(&(session, request)) {
            Some(Progress::UnderWay) => return Ok(()),
            Some(Progress::Done(changed)) => {
                let changed = *changed;
                drop(sharing);
                self.answer_again(session, request, changed);
                return Ok(());
            }
            None => drop(sharing.changes.insert((session, request), Progress::UnderWay)),
        }
        drop(sharing);
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            let answer = volume.carry_out(&asked).await.inspect_err(|error| volume.note(error));
            let mut sharing = volume.sharing.lock();
            match &answer {
                // It is stored, and is found again.
                Ok(changed) if changed.error == 0 && !changed.yours => {
                    if let Some(progress) = sharing.changes.get_mut(&(session, request)) {
                        *progress = Progress::Done(*changed);
                    }
                }
                // Nothing was changed: it can be asked for once more.
                _ => drop(sharing.changes.remove(&(session, request))),
            }
            sharing.answer(session, request, answer.map(Answer::Changed));
            drop(sharing);
            volume.shared.stats.count("CHANGE", started.elapsed());
        });
        Ok(())
    }

    /// Answers a request that was carried out before. After a restart others may not know of it yet: they do when they
    /// have claimed, or are ended.
    fn answer_again(self: &Arc<Self>, session: SessionId, request: u64, changed: Changed) {
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            let all_know = async {
                let mut pass = volume.request(session, Request::Read(Vec::new()))?;
                pass.ready().await?;
                pass.finish();
                Ok(Answer::Changed(changed))
            };
            let answer = all_know.await;
            volume.sharing.lock().answer(session, request, answer);
        });
    }

    async fn carry_out(self: &Arc<Self>, asked: &Asked) -> Result<Changed, VolumeError> {
        let Asked { session, ref change, local, .. } = *asked;
        let refused = |error| Changed { error: error_code(error), ..Changed::default() };
        let mut objects: Vec<Object> = change.directories().into_iter().map(Object::Directory).collect();
        if let Some(ino) = change.inode() {
            let Some((_, row)) = row_of(&*self.db()?.snapshot()?, ino).await? else {
                return Ok(refused(TreeError::Stale));
            };
            let object = Object::of(ino, &row);
            if !objects.contains(&object) {
                objects.push(object);
            }
        }
        let mut pass = self.request(session, Request::Change { objects: objects.clone(), local })?;
        loop {
            if let Outcome::Yours(own) = pass.ready().await? {
                return self.give(session, pass, own).await;
            }
            match self.try_change(asked, &objects).await? {
                Tried::Refused(error) => return Ok(refused(error)),
                Tried::More(more) => {
                    objects.extend(&more);
                    pass.extend(more)?;
                }
                Tried::Durable(executed) => return self.publish(asked, pass, executed).await,
            }
        }
    }

    /// The session owns the directories now, and does the operation itself.
    async fn give(
        self: &Arc<Self>,
        session: SessionId,
        pass: Pass,
        own: Vec<Object>,
    ) -> Result<Changed, VolumeError> {
        let snapshot = self.db()?.snapshot()?;
        let mut records = Vec::with_capacity(own.len());
        for object in &own {
            let Some((row, _)) = row_of(&snapshot, object.ino()).await? else {
                self.sharing.lock().grants.forget(object.ino());
                return Ok(Changed { error: error_code(TreeError::Stale), ..Changed::default() });
            };
            records.push(RecordMessage { body: Some(record_message::Body::PutInode(row)) });
        }
        self.tell_own(session, records, &own);
        self.sharing.lock().counts.given += 1;
        pass.finish();
        Ok(Changed { yours: true, ..Changed::default() })
    }

    /// Tells a session what it owns, with the rows. `false`: it does not any more, since it has a new connection.
    pub(crate) fn tell_own(&self, session: SessionId, records: Vec<RecordMessage>, own: &[Object]) -> bool {
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        if own.iter().any(|object| sharing.grants.owner(object.ino()) != Some(session)) {
            return false;
        }
        if let Some(number) = sharing.grants.tell(session) {
            let own = own.iter().map(|object| (*object).into()).collect();
            sharing.apply(session, number, Apply { records, own, ..Apply::default() }, now_ms);
        }
        true
    }

    /// Executes the change if it concerns no more than these objects, and makes it durable with its outcome.
    async fn try_change(self: &Arc<Self>, asked: &Asked, claimed: &[Object]) -> Result<Tried, VolumeError> {
        loop {
            let turn = self.turn.lock().await;
            let db = self.db()?;
            if !self.state.lock().sessions.contains_key(&asked.session) {
                return Err(VolumeError::SessionEnded(asked.session));
            }
            let executed = match self.execute(&db, &asked.change).await? {
                Ok(executed) => executed,
                Err(error) => return Ok(Tried::Refused(error)),
            };
            let claimed: HashSet<&Object> = claimed.iter().collect();
            let more: Vec<Object> =
                executed.objects.iter().filter(|object| !claimed.contains(object)).copied().collect();
            if !more.is_empty() {
                return Ok(Tried::More(more));
            }
            // Before anybody can find them in the tables, and read them.
            self.sharing.lock().adopt_births(asked.session, &executed);
            let uncertain = match self.store(&db, asked, &executed).await {
                Ok(ordered) => {
                    drop(turn);
                    match self.durable(&ordered).await {
                        Ok(()) => return Ok(Tried::Durable(executed)),
                        Err(error) => error,
                    }
                }
                Err(error @ (VolumeError::StoreFull | VolumeError::Quota { .. })) => {
                    if error.wants_room() {
                        self.state.lock().wants_room = true;
                        self.shared.room_wanted.notify_one();
                    }
                    self.sharing.lock().forget_births(&executed);
                    return Ok(Tried::Refused(TreeError::NoSpace));
                }
                Err(VolumeError::Uncertain(error)) => {
                    drop(turn);
                    *error
                }
                Err(error) => {
                    self.sharing.lock().forget_births(&executed);
                    return Err(error);
                }
            };
            // Whether it is stored is known when the database is open again; until then nobody may see more.
            tracing::warn!(volume = self.name, error = %uncertain, "a change is looked for when the database is open");
            self.reopened().await?;
            let _turn = self.turn.lock().await;
            let db = self.db()?;
            if db.get(tables::change(asked.session, asked.request)).await?.is_some() {
                self.stored(asked, &executed, &[]);
                return Ok(Tried::Durable(executed));
            }
        }
    }

    async fn reopened(&self) -> Result<(), VolumeError> {
        loop {
            match self.db() {
                Err(VolumeError::Reopening(_)) => tokio::time::sleep(REOPENED).await,
                other => return other.map(drop),
            }
        }
    }

    async fn execute(&self, db: &Db, change: &Change) -> Result<Result<Executed, TreeError>, VolumeError> {
        let snapshot = db.snapshot()?;
        let quota = {
            let registered = self.registered.lock();
            Usage { bytes: registered.quota_bytes, inodes: registered.quota_inodes }
        };
        let mut execution = Execution::new(change.clone(), self.state.lock().usage, quota);
        let now = self.shared.now();
        loop {
            match execution.run(now) {
                Ok(result) => return Ok(result),
                Err(Wants::Inode(ino)) => {
                    let row = row_of(&snapshot, ino).await?.map(|(_, row)| row);
                    execution.give_inode(ino, row);
                }
                Err(Wants::Names(dir, names)) => {
                    let mut found = Vec::new();
                    for name in names {
                        if let Some(row) = snapshot.get(tables::dentry(dir, name.as_bytes())).await? {
                            let row = database::decode::<DentryRow>(row, "dentry")?;
                            found.push((name, (&row).try_into()?));
                        }
                    }
                    execution.give_names(dir, found);
                }
                Err(Wants::AnyName(dir)) => {
                    let mut scan = database::scan(&snapshot, &tables::dentries(dir)).await?;
                    let mut found = None;
                    if let Some(first) = scan.next().await? {
                        let row = database::decode::<DentryRow>(first.value, "dentry")?;
                        found = Some((Name::new(&tables::rest_of(&first.key)), (&row).try_into()?));
                    }
                    execution.give_names(dir, found);
                }
                Err(Wants::Numbers) => {
                    let mut state = self.state.lock();
                    let next = state.next_ino;
                    state.next_ino += 1;
                    execution.give_numbers(InoRange { next, end: next + 1 });
                }
            }
        }
    }

    /// Gives a change its place in the order, together with its outcome. The caller has the turn.
    async fn store(
        self: &Arc<Self>,
        db: &Db,
        asked: &Asked,
        executed: &Executed,
    ) -> Result<Ordered, VolumeError> {
        let Asked { session, request, .. } = *asked;
        let mut batch = WriteBatch::new();
        let messages: Vec<RecordMessage> = executed.records.iter().map(RecordMessage::from).collect();
        let subjects = self.put_records(db, &mut batch, session, &messages).await?;
        let usage = self.check_usage(executed.usage)?;
        if executed.usage.bytes > 0 || executed.usage.inodes > 0 {
            self.shared.reserve.admit(2 * subjects.row_bytes + COMMIT_ROOM)?;
        }
        let outcome = outcome(executed);
        batch.put(tables::change(session, request), outcome.encode_to_vec());
        let forgotten = self.sharing.lock().forgotten.get(&session).cloned().unwrap_or_default();
        forgotten.iter().for_each(|request| batch.delete(tables::change(session, *request)));
        for ino in &executed.unnamed {
            batch.put(tables::orphan(session, *ino), [1]);
        }
        let row = VolumeRow { bytes: usage.bytes, inodes: usage.inodes, ..self.state.lock().volume_row() };
        batch.put(tables::VOLUME, row.encode_to_vec());
        self.sharing.lock().estates.strike(&executed.records);
        let ordered = self.order(db, batch).await.map_err(|error| VolumeError::Uncertain(Box::new(error)))?;
        self.state.lock().usage = usage;
        self.stored(asked, executed, &forgotten);
        Ok(ordered)
    }

    /// Notes that a change is in the tables.
    fn stored(&self, asked: &Asked, executed: &Executed, forgotten: &[u64]) {
        let session = asked.session;
        let mut sharing = self.sharing.lock();
        sharing.forgot(session, forgotten);
        sharing.counts.executed += 1;
        let mut state = self.state.lock();
        if let Some(session) = state.sessions.get_mut(&session) {
            session.orphans.extend(&executed.unnamed);
        }
    }

    /// Tells everybody who knows what was changed, and waits until they have heard.
    async fn publish(
        self: &Arc<Self>,
        asked: &Asked,
        mut pass: Pass,
        executed: Executed,
    ) -> Result<Changed, VolumeError> {
        let now_ms = self.shared.uptime_ms();
        {
            let mut sharing = self.sharing.lock();
            // Once more: the session may have a new connection, and claims them on the next one only if it is told.
            sharing.adopt_births(asked.session, &executed);
            let events = sharing.grants.publish(pass.ticket, &executed.objects);
            let own_event = events.iter().find(|(to, _)| *to == asked.session).map(|(_, number)| *number);
            for (to, number) in events {
                let apply = sharing.seen_by(to, &executed, to == asked.session);
                sharing.apply(to, number, apply, now_ms);
            }
            for record in &executed.records {
                if let Record::PutInode(ino, row) = record
                    && row.nlink == 0
                {
                    sharing.grants.forget(*ino);
                }
            }
            sharing.uses.unnamed(asked.session, &executed.unnamed, own_event);
            if !sharing.grants.knows(asked.session) {
                sharing.uses.told_all(asked.session);
            }
            pass.finished(&mut sharing, now_ms);
        }
        let settled = pass.settled().await;
        if !executed.unnamed.is_empty() {
            self.sharing.lock().uses.settled(&executed.unnamed);
            self.settle_uses();
        }
        settled?;
        Ok(outcome(&executed))
    }
}

impl Sharing {
    /// What a change has made is its maker's own.
    fn adopt_births(&mut self, session: SessionId, executed: &Executed) {
        for birth in &executed.births {
            self.grants.adopt(session, *birth);
        }
    }

    /// It was not made after all.
    fn forget_births(&mut self, executed: &Executed) {
        executed.births.iter().for_each(|birth| self.grants.forget(birth.ino()));
    }

    /// What a session is told of a change: rows that it may know, names of directories that it holds.
    fn seen_by(&self, session: SessionId, executed: &Executed, is_asker: bool) -> Apply {
        let mut apply = Apply::default();
        if is_asker {
            apply.asked = true;
            let is_own = |birth: &&Object| self.grants.owner(birth.ino()) == Some(session);
            apply.own = executed.births.iter().filter(is_own).map(|object| (*object).into()).collect();
        }
        let is_born = |ino: Ino| executed.births.iter().any(|object| object.ino() == ino);
        for record in &executed.records {
            let is_seen = match record {
                Record::PutInode(ino, row) => {
                    row.nlink == 0 || self.grants.covers(session, Object::of(*ino, row))
                }
                Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => {
                    self.grants.held(session, *dir).is_some()
                }
                _ => false,
            };
            match record {
                _ if is_seen => apply.records.push(record.into()),
                Record::PutInode(ino, _) if !is_born(*ino) => apply.forget.push(ino.0),
                _ => {}
            }
        }
        apply
    }

    /// These outcomes are deleted.
    pub(crate) fn forgot(&mut self, session: SessionId, requests: &[u64]) {
        if let Some(forgotten) = self.forgotten.get_mut(&session) {
            forgotten.retain(|request| !requests.contains(request));
        }
    }

    /// The session will not ask for these outcomes again.
    fn forget_below(&mut self, session: SessionId, below: u64) {
        let old: Vec<(SessionId, u64)> = self
            .changes
            .range((session, 0)..(session, below))
            .filter(|(_, progress)| matches!(progress, Progress::Done(_)))
            .map(|(key, _)| *key)
            .collect();
        for key in old {
            self.changes.remove(&key);
            self.forgotten.entry(session).or_default().push(key.1);
        }
    }
}

fn outcome(executed: &Executed) -> Changed {
    Changed { ino: executed.made.map_or(0, |ino| ino.0), ..Changed::default() }
}

/// A row as it is stored, and as a value.
pub(crate) async fn row_of(
    snapshot: &DbSnapshot,
    ino: Ino,
) -> Result<Option<(InodeRowMessage, InodeRow)>, VolumeError> {
    let Some(row) = snapshot.get(tables::inode(ino)).await? else { return Ok(None) };
    let message = database::decode::<InodeRowMessage>(row, "inode")?;
    let row = InodeRow::try_from(&message)?;
    Ok(Some((message, row)))
}
