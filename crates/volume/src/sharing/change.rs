//! `CHANGE`: an operation on what several sessions know is executed here, exactly once, and told to all of them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use hayloft_model::grants::{NOT_TOLD, Object, Outcome, Request};
use hayloft_model::{
    Change, Executed, Execution, FileKind, Ino, Name, Record, Refused, SessionId, TreeError, Usage, Wants,
};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Apply, ChangeRequest, Changed, DentryRow, RecordMessage, error_code, record_message};
use prost::Message;

use crate::content::reserve::COMMIT_ROOM;
use crate::database::rows::Rows;
use crate::database::tables::{self, VolumeRow};
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::order::entry::Doing;
use crate::room::Held;
use crate::sharing::objects::row_of;
use crate::sharing::pass::Pass;
use crate::sharing::{Progress, Sharing};
use crate::volume::Volume;

/// Most changes of a session that are under way, or of which it may ask the outcome again.
const CHANGES_MAX: usize = 1 << 15;

/// Most of all sessions of a volume, beyond [`CHANGES_FREE`] of each.
const CHANGES_ALL: usize = 1 << 17;

/// Changes that one session may have under way in any case.
const CHANGES_FREE: usize = 1 << 10;

/// The limit that one more change of a session would exceed. They are only counted where there may be too many.
fn too_many(all: usize, of_session: impl Fn(usize) -> usize) -> Option<usize> {
    let has = |most: usize| all >= most && of_session(most) >= most;
    let is_full = all >= CHANGES_ALL && has(CHANGES_FREE);
    is_full.then_some(CHANGES_ALL).or_else(|| has(CHANGES_MAX).then_some(CHANGES_MAX))
}

/// A request for a change.
struct Asked {
    session: SessionId,
    request: u64,
    change: Change,
    local: bool,
    /// The opening of the database in which it was asked for. When another server has had the volume since, it may have done
    /// it: the session asks again.
    opening: u64,
}

/// What came of trying to execute a change.
enum Tried {
    /// It concerns these as well.
    More(Vec<Object>),
    /// With what was looked at.
    Refused(TreeError, Vec<Ino>),
    /// With what it is about.
    Done(Executed, Vec<Ino>),
    /// It was done before, and brought back.
    Before(Changed),
}

/// What comes of a request, and which inodes the answer tells of.
struct Answered {
    changed: Changed,
    about: Vec<Ino>,
}

impl Volume {
    /// Takes a request for a change, on a task of its own that goes on when the connection breaks. The answer goes to
    /// the connection that the session has then.
    pub(crate) fn change(
        self: &Arc<Self>,
        (session, request): (SessionId, u64),
        message: &ChangeRequest,
        started: Instant,
        held: Held,
    ) -> Result<(), VolumeError> {
        let change = message.change()?;
        if self.state.lock().sessions.get(&session).is_none_or(|found| found.row.read_only) {
            return Err(VolumeError::Invalid("a change by a read-only session"));
        }
        let asked = Asked { session, request, change, local: !message.execute, opening: self.opening() };
        let mut sharing = self.sharing.lock();
        sharing.forget_below(session, message.forget_below);
        if let Some(limit) = too_many(sharing.changes.len(), |most| {
            sharing.changes.range((session, 0)..=(session, u64::MAX)).take(most).count()
        }) {
            return Err(VolumeError::Limit { what: "changes of which the outcomes are wanted", limit });
        }
        match sharing.changes.get(&(session, request)) {
            Some(Progress::UnderWay) => return Ok(()),
            Some(Progress::Done(changed)) => {
                let changed = changed.clone();
                drop(sharing);
                self.answer_again(session, request, changed);
                return Ok(());
            }
            None => drop(sharing.changes.insert((session, request), Progress::UnderWay)),
        }
        drop(sharing);
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            let _held = held;
            let answered = volume.carry_out(&asked).await.inspect_err(|error| volume.note(error));
            let (answer, about) = match answered {
                Ok(Answered { changed, about }) => (Ok(changed), about),
                Err(error) => (Err(error), Vec::new()),
            };
            let mut sharing = volume.sharing.lock();
            if volume.opening() != asked.opening {
                // What is known of it by now is of another task.
                return;
            }
            match &answer {
                // It is stored, and is found again.
                Ok(changed) if changed.error == 0 && !changed.yours && !changed.split => {
                    if let Some(progress) = sharing.changes.get_mut(&(session, request)) {
                        *progress = Progress::Done(changed.clone());
                    }
                }
                // Nothing was changed: it can be asked for once more.
                _ => drop(sharing.changes.remove(&(session, request))),
            }
            let entries = || volume.order.tell(session, about);
            sharing.answer(session, request, answer.map(Answer::Changed), entries);
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
                volume.all_durable().await?;
                Ok(Answer::Changed(changed))
            };
            let answer = all_know.await;
            volume.sharing.lock().answer(session, request, answer, Vec::new);
        });
    }

    async fn carry_out(self: &Arc<Self>, asked: &Asked) -> Result<Answered, VolumeError> {
        let Asked { session, ref change, local, .. } = *asked;
        self.all_claimed().await?;
        if let Some(changed) = self.done_before(asked) {
            self.all_durable().await?;
            return Ok(Answered { changed, about: Vec::new() });
        }
        let mut objects: Vec<Object> = change.directories().into_iter().map(Object::Directory).collect();
        if let Some(ino) = change.inode() {
            let Some((_, row)) = row_of(&*self.db()?.snapshot()?, ino).await? else {
                return self.refused(session, TreeError::Stale, vec![ino]).await;
            };
            let object = Object::of(ino, &row);
            if !objects.contains(&object) {
                objects.push(object);
            }
        }
        let by_slots = change.by_slots();
        let mut pass =
            self.request(session, Request::Change { objects: objects.clone(), local, by_slots })?;
        loop {
            let turn = pass.ready().await?;
            match (turn, &objects[..]) {
                (Outcome::Yours(own), _) => return self.give(session, pass, own).await,
                (Outcome::Shared, _) => {
                    pass.finish();
                    let changed = Changed { split: true, ..Changed::default() };
                    return Ok(Answered { changed, about: Vec::new() });
                }
                (Outcome::Split, [Object::Directory(dir), ..]) => {
                    let changed = self.split(pass, *dir).await?;
                    return Ok(Answered { changed, about: Vec::new() });
                }
                _ => {}
            }
            match self.try_change(asked, &objects).await? {
                Tried::Refused(error, about) => {
                    drop(pass);
                    return self.refused(session, error, about).await;
                }
                Tried::Before(changed) => {
                    self.all_durable().await?;
                    return Ok(Answered { changed, about: Vec::new() });
                }
                Tried::More(more) => {
                    objects.extend(&more);
                    pass.extend(more)?;
                }
                Tried::Done(executed, about) => {
                    hayloft_crash::point("change.ordered");
                    self.publish(session, pass, &executed, &about).await?;
                    hayloft_crash::point("change.heard");
                    // What changes nothing says how things are, as a refusal does.
                    let looked_at: Vec<Ino> = match executed.records.is_empty() {
                        true => executed.objects.iter().map(|object| object.ino()).collect(),
                        false => Vec::new(),
                    };
                    let unheard = self.unheard_of(session, &looked_at);
                    return Ok(Answered { changed: Changed { unheard, ..outcome(&executed) }, about });
                }
            }
        }
    }

    /// What came of it before, if somebody has brought that back since it was asked for again.
    fn done_before(&self, asked: &Asked) -> Option<Changed> {
        match self.sharing.lock().changes.get(&(asked.session, asked.request)) {
            Some(Progress::Done(changed)) => Some(changed.clone()),
            _ => None,
        }
    }

    /// It says how these are now.
    async fn refused(
        self: &Arc<Self>,
        session: SessionId,
        error: TreeError,
        about: Vec<Ino>,
    ) -> Result<Answered, VolumeError> {
        self.await_stuck(about.iter().copied()).await?;
        let unheard = self.unheard_of(session, &about);
        Ok(Answered { changed: Changed { error: error_code(error), unheard, ..Changed::default() }, about })
    }

    /// The session owns the directories now, and does the operation itself.
    async fn give(
        self: &Arc<Self>,
        session: SessionId,
        pass: Pass,
        own: Vec<Object>,
    ) -> Result<Answered, VolumeError> {
        let snapshot = self.db()?.snapshot()?;
        let mut records = Vec::with_capacity(own.len());
        for object in &own {
            let Some((row, _)) = row_of(&snapshot, object.ino()).await? else {
                self.sharing.lock().grants.forget(object.ino());
                return self.refused(session, TreeError::Stale, vec![object.ino()]).await;
            };
            records.push(RecordMessage { body: Some(record_message::Body::PutInode(row)) });
        }
        self.await_stuck(own.iter().map(|object| object.ino())).await?;
        self.tell_own(session, records, &own);
        self.sharing.lock().counts.given += 1;
        pass.finish();
        Ok(Answered { changed: Changed { yours: true, ..Changed::default() }, about: Vec::new() })
    }

    /// Tells a session what it owns, with the rows. `false`: it does not any more, since it has a new connection.
    pub(crate) fn tell_own(&self, session: SessionId, records: Vec<RecordMessage>, own: &[Object]) -> bool {
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        if own.iter().any(|object| sharing.grants.owner(object.ino()) != Some(session)) {
            return false;
        }
        if let Some(number) = sharing.grants.tell(session) {
            own.iter().for_each(|object| sharing.grants.told(object.ino(), number));
            let entries = || self.order.tell(session, own.iter().map(|object| object.ino()));
            let own = own.iter().map(|object| (*object).into()).collect();
            sharing.apply((session, number), Apply { records, own, ..Apply::default() }, now_ms, entries);
        }
        true
    }

    /// Executes the change if it concerns no more than these objects, and gives it its place in the order with its outcome.
    /// It is durable then, or can be brought back.
    async fn try_change(self: &Arc<Self>, asked: &Asked, claimed: &[Object]) -> Result<Tried, VolumeError> {
        loop {
            let turn = self.turn.lock().await;
            let db = self.db()?;
            if self.opening() != asked.opening {
                return Err(VolumeError::Superseded);
            }
            if !self.state.lock().sessions.contains_key(&asked.session) {
                return Err(VolumeError::SessionEnded(asked.session));
            }
            if let Some(changed) = self.done_before(asked) {
                return Ok(Tried::Before(changed));
            }
            let (executed, seen) = self.execute(&db, &asked.change).await?;
            let claimed: HashSet<&Object> = claimed.iter().collect();
            let executed = match executed {
                Ok(executed) => executed,
                // Whoever owns it may have removed its names.
                Err((_, Some(of))) if !claimed.contains(&of) => return Ok(Tried::More(vec![of])),
                Err((error, _)) => return Ok(Tried::Refused(error, seen)),
            };
            let more: Vec<Object> =
                executed.objects.iter().filter(|object| !claimed.contains(object)).copied().collect();
            if !more.is_empty() {
                return Ok(Tried::More(more));
            }
            // Before anybody can find them in the tables, and read them.
            self.sharing.lock().adopt_births(asked.session, &executed);
            let uncertain = match self.store(&db, asked, &executed).await {
                Ok(ordered) if ordered.early => return Ok(Tried::Done(executed, ordered.subjects)),
                Ok(ordered) => {
                    drop(turn);
                    match self.durable(&ordered).await {
                        Ok(()) => return Ok(Tried::Done(executed, ordered.subjects)),
                        Err(error) => error,
                    }
                }
                Err(error @ (VolumeError::StoreFull | VolumeError::Quota { .. })) => {
                    if error.wants_room() {
                        self.state.lock().wants_room = true;
                        self.shared.room_wanted.notify_one();
                    }
                    self.sharing.lock().forget_births(&executed);
                    return Ok(Tried::Refused(TreeError::NoSpace, seen));
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
            self.all_claimed().await?;
            let _turn = self.turn.lock().await;
            let db = self.db()?;
            if self.opening() != asked.opening {
                return Err(VolumeError::Superseded);
            }
            if db.get(tables::change(asked.session, asked.request)).await?.is_some() {
                self.stored(asked, &executed, &[]);
                return Ok(Tried::Done(executed, Vec::new()));
            }
        }
    }

    /// Executes a change; with the inodes that were looked at, or whose names were. The caller has the turn.
    async fn execute(
        self: &Arc<Self>,
        db: &Db,
        change: &Change,
    ) -> Result<(Result<Executed, Refused>, Vec<Ino>), VolumeError> {
        let snapshot = db.snapshot()?;
        let mut seen = Vec::new();
        let quota = {
            let registered = self.registered.lock();
            Usage { bytes: registered.quota_bytes, inodes: registered.quota_inodes }
        };
        let mut execution = Execution::new(change.clone(), self.state.lock().usage, quota);
        let now = self.shared.now();
        loop {
            match execution.run(now) {
                Ok(result) => return Ok((result, seen)),
                Err(Wants::Inode(ino)) => {
                    seen.push(ino);
                    let row = row_of(&snapshot, ino).await?.map(|(_, row)| row);
                    execution.give_inode(ino, row);
                }
                Err(Wants::Names(dir, names)) => {
                    seen.push(dir);
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
                    seen.push(dir);
                    let mut scan = database::scan(&snapshot, &tables::dentries(dir)).await?;
                    let mut found = None;
                    if let Some(first) = scan.next().await? {
                        let row = database::decode::<DentryRow>(first.value, "dentry")?;
                        found = Some((Name::new(&tables::rest_of(&first.key)), (&row).try_into()?));
                    }
                    execution.give_names(dir, found);
                }
                Err(Wants::Numbers) => {
                    execution.give_numbers(self.number_of_birth(db).await?);
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
        let mut batch = Rows::new();
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
            batch.put(tables::orphan(session, *ino), vec![1]);
        }
        let row = VolumeRow { bytes: usage.bytes, inodes: usage.inodes, ..self.state.lock().volume_row() };
        batch.put_unnoted(tables::VOLUME, row.encode_to_vec());
        // What is above a directory that moves was looked at, and is not among the rows.
        let is_directory =
            |record: &Record| matches!(record, Record::PutDentry(_, _, to) if to.kind == FileKind::Directory);
        let moves = matches!(&asked.change, Change::Rename(from, to, _) if from.0 != to.0)
            && executed.records.iter().any(is_directory);
        let doing = Doing { session, sequence: 0, usage: executed.usage, waits: moves };
        self.sharing.lock().estates.strike(&executed.records);
        let ordered = self
            .order_entry(db, batch, doing)
            .await
            .map_err(|error| VolumeError::Uncertain(Box::new(error)))?;
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
}

impl Sharing {
    /// What a change has made is its maker's own.
    pub(super) fn adopt_births(&mut self, session: SessionId, executed: &Executed) {
        for birth in &executed.births {
            self.grants.adopt(session, *birth);
            self.grants.told(birth.ino(), NOT_TOLD);
        }
    }

    /// It was not made after all.
    fn forget_births(&mut self, executed: &Executed) {
        executed.births.iter().for_each(|birth| self.grants.forget(birth.ino()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_bounded_for_each_session_and_for_all() {
        let more = |all: usize, own: usize| too_many(all, |most| own.min(most));
        assert_eq!(more(CHANGES_MAX, CHANGES_MAX - 1), None);
        assert_eq!(more(CHANGES_MAX, CHANGES_MAX), Some(CHANGES_MAX));
        assert_eq!(more(CHANGES_ALL, CHANGES_FREE - 1), None, "who has few goes on");
        assert_eq!(more(CHANGES_ALL, CHANGES_FREE), Some(CHANGES_ALL));
        assert_eq!(more(CHANGES_ALL - 1, CHANGES_FREE), None);
    }
}
