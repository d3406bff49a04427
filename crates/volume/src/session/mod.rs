//! Sessions: clients of a volume, found again after any restart.

mod dropped;
pub(crate) mod ended;
mod living;
pub(crate) mod locks;
mod numbers;
mod replay;
pub(crate) mod shipping;
mod silent;
pub(crate) mod troubled;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use hayloft_model::grants::Object;
use hayloft_model::{Ino, InoRange, SessionId};
use hayloft_transport::Peer;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Claim, Claimed, Hello, InodeRowMessage, LostPeer, SessionInfo, Spoken, Welcome, agree};
use prost::Message;
use tokio::sync::Notify;

use crate::database::rows::Rows;
use crate::database::tables::{self, SessionRow};
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::replies::Replies;
use crate::session::ended::End;
pub(crate) use crate::session::living::{Session, SpokenHere};
use crate::session::numbers::FIRST_NUMBERS;
use crate::sharing::uses::{TOO_MANY, USES_MAX};
use crate::volume::Volume;

/// How long a hello that takes over waits for the dead client's connection to be seen as closed.
const EOF_PATIENCE: Duration = Duration::from_millis(1000);

/// A session that has begun, or goes on, on a connection.
pub(crate) struct Begun {
    pub(crate) welcome: Welcome,
    /// See [`Session::heard`].
    pub(crate) heard: Arc<AtomicU64>,
    /// See [`Session::worked`].
    pub(crate) worked: Arc<AtomicU64>,
    /// How far the history is.
    pub(crate) mark: Arc<AtomicU64>,
    /// See [`Ownership::tenure`](crate::database::ownership::Ownership::tenure).
    pub(crate) tenure: u64,
}

/// Who goes on with a session: the same peer, with its token.
struct Owner {
    peer: String,
    /// The hash of it: who reads the tables does not learn it.
    token: Bytes,
}

impl Owner {
    fn new(peer: &Peer, token: &[u8]) -> Owner {
        let token = Bytes::copy_from_slice(blake3::hash(token).as_bytes());
        Owner { peer: peer.identity.to_string(), token }
    }

    fn is(&self, peer: &str, token: &[u8]) -> bool {
        // Hashes of random numbers: how long it takes to compare them tells nothing of these.
        self.peer == peer && self.token == token
    }
}

impl Volume {
    /// Refuses who is not the owner of a session, and of the ended one that it goes on for.
    fn check_owner(&self, id: SessionId, replaced: SessionId, owner: &Owner) -> Result<(), VolumeError> {
        let state = self.state.lock();
        let found = |session: SessionId| {
            let living = state.sessions.get(&session).map(|found| (&found.row.peer, &found.row.token));
            living.or_else(|| state.ended.get(&session).map(|row| (&row.peer, &row.token)))
        };
        let foreign = [id, replaced]
            .into_iter()
            .find(|session| found(*session).is_some_and(|(peer, token)| !owner.is(peer, token)));
        foreign.map_or(Ok(()), |session| Err(VolumeError::NotYours(session)))
    }

    /// Starts or resumes a session for a connection.
    pub(crate) async fn hello(
        self: &Arc<Self>,
        hello: &Hello,
        peer: &Peer,
        connection: u64,
        hang_up: &Arc<Notify>,
    ) -> Result<Begun, VolumeError> {
        let agreed = agree(&hello.spoken(), &Spoken::ours())?;
        if hello.session == 0 {
            return Err(VolumeError::Invalid("session number 0"));
        }
        let id = SessionId(hello.session);
        // It may have been at another server since this one has looked last: nothing is refused by what was true before.
        let tenure = self.ownership.tenure();
        // Why it is not open comes before that.
        self.db()?;
        self.look().await?;
        if hello.takes_over != 0 {
            self.wait_for_eof(SessionId(hello.takes_over)).await;
        }
        let replaced = SessionId(hello.replaces);
        self.await_changes(replaced).await?;
        let turn = self.turn.lock().await;
        let db = self.db()?;
        self.check_history(hello.opening, hello.mark)?;
        let owner = Owner::new(peer, &hello.token);
        self.check_owner(id, replaced, &owner)?;
        // The new one may have been ended in its turn, before its client has heard that it had begun.
        let troubles = self.troubles(replaced)?.max(self.troubles(id)?);
        self.make_room(&db, id).await?;
        if let Some(SessionRow { last_sequence, kept, kept_id, .. }) = self.moved(id) {
            let durable = self.ended_opening(hello.opening).map_or(0, |(_, durable)| durable);
            return Err(VolumeError::OtherTree { session: id, last_sequence, durable, kept, kept_id });
        }
        let known = self.state.lock().sessions.contains_key(&id);
        if hello.resume && !known {
            let (over, place) = (self.why_over(id), self.order.last(db));
            drop(turn);
            // A server that starts anew has to know it as well, when the client comes with another session.
            self.durable(&place).await?;
            return Err(over);
        }
        if self.moved(replaced).is_some() {
            // Its client has let go of everything by now: others can be served.
            self.end_session(&db, replaced, End::Lost).await?;
        }
        let goes_on = hello.replaces != 0 && self.replace(&db, replaced, id).await?;
        let other = SessionId(hello.takes_over);
        if hello.takes_over != hello.session && self.is_proved_dead(other, &hello.host_id, &owner.peer) {
            self.end_session(&db, other, End::Lost).await?;
        }
        let (inos, place) = self.begin(&db, id, hello, owner).await?;
        let row = db.get(tables::inode(Ino::ROOT)).await?.ok_or(VolumeError::NoInode(Ino::ROOT))?;
        let root = database::decode::<InodeRowMessage>(row, "inode")?;
        self.sharing.lock().begin(id, hello.read_only, agreed.features);
        let (last_sequence, heard, worked) = {
            let mut state = self.state.lock();
            let session = state.sessions.get_mut(&id).ok_or(VolumeError::SessionEnded(id))?;
            let old = std::mem::replace(&mut session.hang_up, Arc::clone(hang_up));
            if session.connection.replace(connection).is_some() {
                old.notify_one();
            }
            session.failed = None;
            (session.connections, session.connected_ms) = (session.connections + 1, self.shared.uptime_ms());
            session.troubles = session.troubles.max(troubles);
            session.spoken = SpokenHere {
                protocol: agreed.protocol,
                features: agreed.features,
                release: hello.release.clone(),
            };
            session.heard.store(self.shared.uptime_ms(), Relaxed);
            (session.row.last_sequence, Arc::clone(&session.heard), Arc::clone(&session.worked))
        };
        let welcome = Welcome {
            last_sequence,
            server_time_nanos: self.shared.now().as_nanos() as i64,
            status: Some(self.status()),
            inos: Some(inos.into()),
            lease_ms: self.shared.config.lease.as_millis() as u64,
            root: Some(root),
            volume_id: self.id.clone(),
            lost: self.lost(id),
            opening: self.opening(),
            mark: self.mark(),
            goes_on,
            trusted: self.registered.lock().trusted,
            protocol: agreed.protocol,
            features: agreed.features,
            needs: Spoken::ours().needs,
        };
        let begun = Begun { welcome, heard, worked, mark: self.shared_mark(), tenure };
        // Sessions that begin at once become durable at once.
        drop(turn);
        self.durable(&place).await?;
        Ok(begun)
    }

    /// The session has said what it owns: from now on it is served.
    pub(crate) async fn claim(
        self: &Arc<Self>,
        id: SessionId,
        connection: u64,
        claim: &Claim,
        request: u64,
        replies: &Replies,
    ) -> Result<(), VolumeError> {
        let own: Vec<Object> = claim.own.iter().map(Object::try_from).collect::<Result<_, _>>()?;
        self.check_connection(id, connection)?;
        if claim.in_use.len() > USES_MAX {
            return Err(TOO_MANY);
        }
        if !own.is_empty() && self.state.lock().sessions.get(&id).is_some_and(|found| found.row.read_only) {
            return Err(VolumeError::Invalid("who changes nothing owns nothing"));
        }
        // Before anybody is served who waits for this claim.
        self.bring_back(id, &claim.entries).await?;
        self.check_connection(id, connection)?;
        let now_ms = self.shared.uptime_ms();
        let claimed = {
            let mut sharing = self.sharing.lock();
            // Before anything that the session has not acknowledged counts as done.
            sharing.uses.claim(id, &claim.in_use);
            let claimed = sharing.claim(id, &own, (connection, replies));
            if claimed.is_ok() {
                self.order.disconnected(id);
                let last_sequence = self.state.lock().sessions.get_mut(&id).map_or(0, |session| {
                    (session.may_bring, session.has_claimed) = (false, true);
                    session.row.last_sequence
                });
                replies.push(request, Answer::Claimed(Claimed { last_sequence }));
                sharing.drive(now_ms);
            }
            claimed
        };
        self.settle_uses();
        let Err(refused) = claimed else { return self.locks.claim(id, &claim.locks) };
        tracing::error!(volume = self.name, session = %id, ?refused, "claims what others hold: ended");
        self.evict_as(id, End::Lost).await?;
        Err(VolumeError::SessionEnded(id))
    }

    /// Sessions that somebody on the same host as this one may know to be dead: those that it may bury.
    fn lost(&self, but: SessionId) -> Vec<LostPeer> {
        let state = self.state.lock();
        let Some(asker) = state.sessions.get(&but).map(|found| &found.row) else { return Vec::new() };
        let may_be_dead = |(id, found): &(&SessionId, &Session)| {
            **id != but && found.may_be_proved_dead(&asker.host_id, &asker.peer)
        };
        let peer = |(id, found): (&SessionId, &Session)| LostPeer {
            session: id.0,
            host_id: found.row.host_id.clone(),
            pid: found.row.pid,
        };
        state.sessions.iter().filter(may_be_dead).map(peer).collect()
    }

    /// Whether somebody on that host can know that the session's process is dead.
    fn is_proved_dead(&self, session: SessionId, host_id: &str, peer: &str) -> bool {
        let state = self.state.lock();
        state.sessions.get(&session).is_some_and(|found| found.may_be_proved_dead(host_id, peer))
    }

    /// Ends a session whose process is dead, as `asker`, on the same host, has proved.
    pub(crate) async fn bury(
        self: &Arc<Self>,
        asker: SessionId,
        session: SessionId,
    ) -> Result<(), VolumeError> {
        self.wait_for_eof(session).await;
        let _turn = self.turn.lock().await;
        let db = self.db()?;
        let (host_id, peer, is_known) = {
            let state = self.state.lock();
            let asker = state.sessions.get(&asker).map(|found| found.row.clone()).unwrap_or_default();
            (asker.host_id, asker.peer, state.sessions.contains_key(&session))
        };
        match is_known {
            true if !self.is_proved_dead(session, &host_id, &peer) => {
                Err(VolumeError::Invalid("a session that is connected, or of another host, is not buried"))
            }
            _ => self.end_session(&db, session, End::Lost).await,
        }
    }

    /// Ends a session, connected or not, as an administrator wants: its mount does not go on.
    pub(crate) async fn evict(self: &Arc<Self>, session: SessionId) -> Result<(), VolumeError> {
        self.evict_as(session, End::ByHand).await
    }

    async fn evict_as(self: &Arc<Self>, session: SessionId, end: End) -> Result<(), VolumeError> {
        let _turn = self.turn.lock().await;
        let db = self.db()?;
        self.sharing.lock().counts.evictions += 1;
        self.end_session(&db, session, end).await
    }

    /// `Busy` while any session is connected or within its lease.
    pub(crate) fn refuse_when_mounted(&self) -> Result<(), VolumeError> {
        let now = self.shared.uptime_ms();
        let state = self.state.lock();
        let in_the_way = state.sessions.iter().find(|(_, session)| {
            session.connection.is_some() || !session.is_silent(now, &self.shared.config)
        });
        in_the_way.map_or(Ok(()), |(id, session)| {
            Err(VolumeError::Busy {
                session: *id,
                host_id: session.row.host_id.clone(),
                host: session.row.host_name.clone(),
                pid: session.row.pid,
                mount_point: session.row.mount_point.clone(),
            })
        })
    }

    /// All sessions, for people.
    pub(crate) fn clients(&self) -> Vec<SessionInfo> {
        let now_ms = self.shared.uptime_ms();
        let (sharing, state) = (self.sharing.lock(), self.state.lock());
        let clients = state.sessions.iter().map(|(id, session)| {
            let summary = sharing.grants.summary(*id);
            SessionInfo {
                volume: self.name.clone(),
                session: id.0,
                host_name: session.row.host_name.clone(),
                pid: session.row.pid,
                mount_point: session.row.mount_point.clone(),
                read_only: session.row.read_only,
                connected: session.connection.is_some(),
                silent_ms: now_ms.saturating_sub(session.heard.load(Relaxed)),
                own_directories: summary.own_directories,
                read_directories: summary.read_directories,
                own_files: summary.own_files,
                events_waiting: summary.events_waiting,
                lag_ms: sharing.lag_ms(*id, now_ms),
                locks: self.locks.count(*id),
                last_sequence: session.row.last_sequence,
                protocol: session.spoken.protocol,
                release: session.spoken.release.clone(),
            }
        });
        let mut clients: Vec<SessionInfo> = clients.collect();
        clients.sort_by_key(|client| client.session);
        clients
    }

    async fn wait_for_eof(&self, session: SessionId) {
        let started = tokio::time::Instant::now();
        while started.elapsed() < EOF_PATIENCE {
            let connected =
                self.state.lock().sessions.get(&session).is_some_and(|found| found.connection.is_some());
            if !connected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Writes the session's row, together with numbers for it; it counts when that is durable.
    async fn begin(
        self: &Arc<Self>,
        db: &Db,
        id: SessionId,
        hello: &Hello,
        owner: Owner,
    ) -> Result<(InoRange, Ordered), VolumeError> {
        let (session_row, volume_row, range) = {
            let mut state = self.state.lock();
            let (last_sequence, told_ms) =
                state.sessions.get(&id).map_or((0, 0), |found| (found.row.last_sequence, found.row.lease_ms));
            let range = state.numbers.take(FIRST_NUMBERS);
            state.give(range, id)?;
            let row = SessionRow {
                last_sequence,
                host_id: hello.host_id.clone(),
                host_name: hello.host_name.clone(),
                pid: hello.pid,
                mount_point: hello.mount_point.clone(),
                read_only: hello.read_only,
                peer: owner.peer,
                token: owner.token,
                lease_ms: told_ms.max(self.shared.config.lease.as_millis() as u64),
                ..SessionRow::default()
            };
            (row, state.volume_row(), range)
        };
        let mut batch = Rows::new();
        batch.put(tables::session(id), session_row.encode_to_vec());
        batch.put(tables::VOLUME, volume_row.encode_to_vec());
        let place = self.order(db, batch).await?;
        let mut state = self.state.lock();
        let now_ms = self.shared.uptime_ms();
        let session = state.sessions.entry(id).or_insert_with(|| Session::found(&session_row, now_ms));
        session.row = session_row;
        Ok((range, place))
    }

    /// The client leaves.
    pub(crate) async fn goodbye(self: &Arc<Self>, id: SessionId, connection: u64) -> Result<(), VolumeError> {
        let _turn = self.turn.lock().await;
        self.check_connection(id, connection)?;
        let db = self.db()?;
        self.end_session(&db, id, End::Goodbye).await
    }

    /// The connection is gone; the session stays for its lease.
    pub(crate) fn disconnected(&self, id: SessionId, connection: u64) {
        self.sharing.lock().disconnected(id, connection);
        // Where another server has had the volume meanwhile, none is.
        if let Some(session) = self.state.lock().sessions.get_mut(&id)
            && session.connection.is_none_or(|of| of == connection)
        {
            session.connection = None;
            // It is never silent while something of it is worked on, which the end of its connection may have interrupted.
            session.heard.fetch_min(self.shared.uptime_ms(), Relaxed);
        }
    }

    /// Refuses a connection that no longer speaks for its session.
    pub(crate) fn check_connection(&self, id: SessionId, connection: u64) -> Result<(), VolumeError> {
        match self.state.lock().sessions.get(&id) {
            Some(session) if session.connection == Some(connection) => Ok(()),
            Some(_) => Err(VolumeError::Superseded),
            None => Err(VolumeError::SessionEnded(id)),
        }
    }
}
