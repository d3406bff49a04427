//! Locks of flock(2) and fcntl(2): `hayloft_model::locks` with its requests and answers.
//!
//! Requests take effect in the order in which they come in, before the next message of their connection is looked
//! at; those that wait are answered when their turn comes. Locks are not stored: after a restart the sessions claim
//! what they hold, and until all have done so, or have ended, nobody gets a lock.

use std::collections::{HashMap, HashSet};

use hayloft_model::SessionId;
use hayloft_model::locks::{Answer as Outcome, Lock, Locks as Table, Wait};
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{LockAnswer, LockKind, LockMessage, LockRequest};
use parking_lot::Mutex;

use crate::error::VolumeError;
use crate::replies::Replies;
use crate::volume::Volume;

/// Most requests of all sessions that wait, beyond [`WAITS_FREE`] of each: one more costs the more, the more there are.
const WAITS_MAX: usize = 1 << 13;

/// Requests of one session that may wait in any case.
const WAITS_FREE: usize = 64;

/// Most requests of one session that wait: the client bounds its own below that.
const SESSION_WAITS_MAX: usize = 1024;

/// Most locks that one session holds: parts of a file that are locked apart count each.
const SESSION_LOCKS_MAX: usize = 1 << 16;

/// Most locks that all sessions hold, beyond [`LOCKS_FREE`] of each. One takes some 200 bytes.
const LOCKS_MAX: usize = 1 << 18;

/// Locks that each session may hold in any case.
const LOCKS_FREE: usize = 1024;

/// Who asked, and where the answer goes.
#[derive(Clone)]
struct Asker {
    session: SessionId,
    request: u64,
    replies: Replies,
}

/// A request that came before all sessions had claimed.
struct Early {
    asker: Asker,
    ask: LockRequest,
}

#[derive(Default)]
struct State {
    table: Table,
    waiting: HashMap<Wait, Asker>,
    /// How many of these each session has.
    counts: HashMap<SessionId, usize>,
    /// Sessions that may hold locks from before the restart.
    unclaimed: HashSet<SessionId>,
    /// Sessions whose locks were in somebody's way since [`Locks::take_needed`].
    in_the_way: HashSet<SessionId>,
    early: Vec<Early>,
}

/// The locks of a volume.
#[derive(Default)]
pub(crate) struct Locks {
    /// A leaf: nothing is taken under it, and it is not held across an await.
    state: Mutex<State>,
}

/// Answers that are ready; they go out after the lock is released, each to its own connection.
#[must_use]
pub(crate) struct Ready(Vec<(Asker, Result<LockAnswer, VolumeError>)>);

impl Ready {
    /// Queues them. A client that does not read holds up nobody else.
    pub(crate) fn send(self) {
        let mut by_session: HashMap<SessionId, Vec<_>> = HashMap::new();
        for (asker, answer) in self.0 {
            by_session.entry(asker.session).or_default().push((asker, answer));
        }
        for answers in by_session.into_values() {
            tokio::spawn(async move {
                for (asker, answer) in answers {
                    asker.replies.answer(asker.request, answer.map(Answer::Locked)).await;
                }
            });
        }
    }
}

impl Volume {
    /// The other sessions of the same host, as far as numbers of processes mean the same there.
    fn neighbours(&self, session: SessionId) -> HashSet<SessionId> {
        let state = self.state.lock();
        let Some(own) = state.sessions.get(&session) else { return HashSet::new() };
        let is_near = |host: &str| !host.is_empty() && host == own.row.host_id;
        let near = state.sessions.iter().filter(|(_, other)| is_near(&other.row.host_id));
        near.map(|(id, _)| *id).collect()
    }

    /// Handles a message about locks. It does not wait for anything but room in the queue of answers.
    pub(crate) async fn handle_lock(
        &self,
        session: SessionId,
        connection: u64,
        request: u64,
        body: Body,
        replies: &Replies,
    ) {
        let done = self.check_connection(session, connection).and_then(|()| match body {
            Body::Lock(ask) => {
                let neighbours = if ask.test { self.neighbours(session) } else { HashSet::new() };
                self.locks.request(session, request, ask, replies, &neighbours)
            }
            Body::CancelLock(cancel) => {
                self.locks.cancel(session, cancel.request);
                Ok(None)
            }
            _ => Err(VolumeError::Invalid("a message that is not about locks")),
        });
        match done {
            Ok(None) => {}
            Ok(Some(answer)) => replies.send(request, Answer::Locked(answer)).await,
            Err(error) => replies.answer(request, Err(error)).await,
        }
    }
}

impl Locks {
    /// These sessions may hold locks that only they know of: nobody gets one before they have claimed or ended.
    pub(crate) fn await_claims(&self, sessions: impl IntoIterator<Item = SessionId>) {
        self.state.lock().unclaimed.extend(sessions);
    }

    /// Handles a request; `None` when it is answered later.
    pub(crate) fn request(
        &self,
        session: SessionId,
        request: u64,
        ask: LockRequest,
        replies: &Replies,
        neighbours: &HashSet<SessionId>,
    ) -> Result<Option<LockAnswer>, VolumeError> {
        let asker = Asker { session, request, replies: replies.clone() };
        let mut state = self.state.lock();
        let waits = state.early.len() + state.waiting.len();
        let of_session = state.waits_of(session);
        if waits >= WAITS_MAX && of_session >= WAITS_FREE {
            return Err(VolumeError::Limit { what: "requests that wait for locks", limit: WAITS_MAX });
        }
        if of_session >= SESSION_WAITS_MAX {
            return Err(VolumeError::Limit {
                what: "requests of one session that wait for locks",
                limit: SESSION_WAITS_MAX,
            });
        }
        let answer = if state.unclaimed.is_empty() {
            state.handle(asker, ask, neighbours)?
        } else {
            let (lock, set) = valid(&ask, session)?;
            if set {
                state.early.push(Early { asker, ask });
                None
            } else {
                if state.table.splits(&lock) {
                    state.has_place(&lock)?;
                }
                state.table.unset(&lock);
                Some(LockAnswer::default())
            }
        };
        let ready = state.take_ready();
        drop(state);
        ready.send();
        Ok(answer)
    }

    /// A session gives up a request that waits; it is answered all the same.
    pub(crate) fn cancel(&self, session: SessionId, request: u64) {
        let mut state = self.state.lock();
        let is_it = |asker: &Asker| asker.session == session && asker.request == request;
        let wait = state.waiting.iter().find(|(_, asker)| is_it(asker)).map(|(wait, _)| *wait);
        let asker = if let Some(wait) = wait {
            state.table.cancel(wait);
            state.take(wait)
        } else {
            let early = state.early.iter().position(|early| is_it(&early.asker));
            early.map(|at| state.early.remove(at).asker)
        };
        drop(state);
        // Of no file: given up, and not in anybody's way.
        let given_up = LockAnswer { conflict: Some(LockMessage::default()), deadlock: false };
        Ready(asker.into_iter().map(|asker| (asker, Ok(given_up))).collect()).send();
    }

    /// A session says, on a new connection, what it holds. It will send again what it still waits for.
    pub(crate) fn claim(&self, session: SessionId, locks: &[LockMessage]) -> Result<(), VolumeError> {
        // What waited was not counted when it was granted.
        if locks.len() > SESSION_LOCKS_MAX + 2 * SESSION_WAITS_MAX {
            return Err(TOO_MANY);
        }
        let locks: Vec<Lock> = locks
            .iter()
            .map(|message| message.lock(session).map(|(lock, _)| lock))
            .collect::<Result<_, _>>()?;
        let mut state = self.state.lock();
        state.forget(session);
        state.early.retain(|early| early.asker.session != session);
        let refused = state.table.claim(session, locks);
        let ready = state.settle(session);
        drop(state);
        for lock in refused {
            tracing::error!(%session, ino = %lock.ino, "a lock that a session claims is held by another one");
        }
        ready.send();
        Ok(())
    }

    /// A session has ended: what it held is free.
    pub(crate) fn end_session(&self, session: SessionId) {
        let mut state = self.state.lock();
        state.forget(session);
        state.early.retain(|early| early.asker.session != session);
        state.table.end_session(session);
        let ready = state.settle(session);
        drop(state);
        ready.send();
    }

    /// The sessions whose locks somebody wants, or may want, and those that stand before others in line for one: whoever of them is silent
    /// for its lease is to be ended.
    pub(crate) fn take_needed(&self) -> HashSet<SessionId> {
        let mut state = self.state.lock();
        let mut needed = std::mem::take(&mut state.in_the_way);
        let in_the_way = state.table.waiting().filter_map(|(_, lock)| state.table.test(lock));
        needed.extend(in_the_way.map(|lock| lock.owner.session));
        needed.extend(state.table.waiting_before_others());
        if !state.early.is_empty() {
            needed.extend(&state.unclaimed);
        }
        needed
    }

    /// How many locks a session holds.
    pub(crate) fn count(&self, session: SessionId) -> u64 {
        self.state.lock().table.count(session) as u64
    }
}

const TOO_MANY: VolumeError =
    VolumeError::Limit { what: "locks that one session holds", limit: SESSION_LOCKS_MAX };

const TOO_MANY_OF_ALL: VolumeError =
    VolumeError::Limit { what: "locks that all hosts hold of a volume", limit: LOCKS_MAX };

impl State {
    /// Refuses a session that holds as many locks as it may. To set one, or to free a part, makes two more at most.
    fn has_place(&self, lock: &Lock) -> Result<(), VolumeError> {
        let held = self.table.count(lock.owner.session);
        if held + 2 > SESSION_LOCKS_MAX {
            return Err(TOO_MANY);
        }
        if held + 2 > LOCKS_FREE && self.table.total() + 2 > LOCKS_MAX {
            return Err(TOO_MANY_OF_ALL);
        }
        Ok(())
    }

    /// Requests of a session that wait.
    fn waits_of(&self, session: SessionId) -> usize {
        let early = self.early.iter().filter(|early| early.asker.session == session).count();
        early + self.counts.get(&session).copied().unwrap_or_default()
    }

    /// One waits no more.
    fn take(&mut self, wait: Wait) -> Option<Asker> {
        let asker = self.waiting.remove(&wait)?;
        if let Some(count) = self.counts.get_mut(&asker.session) {
            *count -= 1;
        }
        Some(asker)
    }

    /// None of a session waits any more.
    fn forget(&mut self, session: SessionId) {
        for wait in self.table.waits_of(session) {
            self.waiting.remove(&wait);
        }
        self.counts.remove(&session);
    }

    /// `neighbours`: sessions whose numbers of processes mean something to the asker.
    fn handle(
        &mut self,
        asker: Asker,
        ask: LockRequest,
        neighbours: &HashSet<SessionId>,
    ) -> Result<Option<LockAnswer>, VolumeError> {
        let (lock, set) = valid(&ask, asker.session)?;
        let blocked = |by: Lock| {
            // A process of another host has no number here.
            let is_known = by.owner.session == asker.session || neighbours.contains(&by.owner.session);
            let pid = if is_known { by.pid } else { 0 };
            let conflict = LockMessage::new(&Lock { pid, ..by }, LockKind::of(by.mode));
            Some(LockAnswer { conflict: Some(conflict), deadlock: false })
        };
        if ask.test {
            return Ok(self.table.test(&lock).map_or(Some(LockAnswer::default()), blocked));
        }
        // What is freed makes a lock more only where something is left on both sides.
        if set || self.table.splits(&lock) {
            self.has_place(&lock)?;
        }
        if !set {
            self.table.unset(&lock);
            return Ok(Some(LockAnswer::default()));
        }
        Ok(match self.table.set(lock, ask.wait) {
            Outcome::Set => Some(LockAnswer::default()),
            Outcome::Blocked(by) => {
                self.in_the_way.insert(by.owner.session);
                blocked(by)
            }
            Outcome::Deadlock => Some(LockAnswer { conflict: None, deadlock: true }),
            Outcome::Waits(wait) => {
                *self.counts.entry(asker.session).or_default() += 1;
                self.waiting.insert(wait, asker);
                None
            }
        })
    }

    fn take_ready(&mut self) -> Ready {
        let granted = self.table.take_granted();
        let askers = granted.into_iter().filter_map(|wait| self.take(wait));
        Ready(askers.map(|asker| (asker, Ok(LockAnswer::default()))).collect())
    }

    /// A session has claimed or ended: when it was the last one, early requests are handled.
    fn settle(&mut self, session: SessionId) -> Ready {
        let mut ready = Ready(Vec::new());
        if self.unclaimed.remove(&session) && self.unclaimed.is_empty() {
            for Early { asker, ask } in std::mem::take(&mut self.early) {
                if let Some(answer) = self.handle(asker.clone(), ask, &HashSet::new()).transpose() {
                    ready.0.push((asker, answer));
                }
            }
        }
        ready.0.extend(self.take_ready().0);
        ready
    }
}

fn valid(ask: &LockRequest, session: SessionId) -> Result<(Lock, bool), VolumeError> {
    let message = ask.lock.as_ref().ok_or(VolumeError::Invalid("a request without its lock"))?;
    Ok(message.lock(session)?)
}

#[cfg(test)]
#[path = "locks_tests.rs"]
mod tests;
