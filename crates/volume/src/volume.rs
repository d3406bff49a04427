//! An open volume: its database, its state in memory, and how it recovers from a store that fails.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hayloft_model::replay::BroughtBack;
use hayloft_model::tree::FIRST_COOKIE;
use hayloft_model::{ContentHash, FileKind, Ino, InoRange, SessionId, Timestamp, Usage};
use hayloft_wire::{Changed, InodeRowMessage, VolumeStatus};
use parking_lot::{Mutex, RwLock};
use prost::Message;
use slatedb::{CloseReason, ErrorKind};
use tokio::task::JoinSet;

use crate::admin::scrub::Scrubbed;
use crate::database::compaction::Wish;
use crate::database::family;
use crate::database::homes::Homes;
use crate::database::journal::Journal;
use crate::database::numbers::Numbers;
use crate::database::ownership::{self, Ownership};
use crate::database::packed::PackedListings;
use crate::database::registry::Registered;
use crate::database::rows::Rows;
use crate::database::tables::{self, BroughtRow, EndedRow, PackId, SessionRow, VolumeRow};
use crate::database::{self, Db};
use crate::error::{VolumeError, chain};
use crate::order::Order;
use crate::order::history::History;
use crate::server::Shared;
use crate::session::Session;
use crate::session::ended::Ended;
use crate::session::shipping::Shipping;
use crate::session::troubled::Troubles;
use crate::sharing::Progress;
use crate::sharing::lock::SharingLock;
use crate::versions::{clone, is_version};

/// Most names of content that are remembered as stored: 8 MiB of memory.
const KNOWN_MAX: usize = 1 << 18;

/// The database, or why there is none at the moment.
pub(crate) enum Slot {
    Open(Db),
    Reopening(String),
    /// What it holds is damaged: it is tried again, and nobody waits for it.
    Broken(String),
    Fenced,
    Closed,
}

/// What is known of a volume besides its rows.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) usage: Usage,
    pub(crate) numbers: Numbers,
    pub(crate) sessions: HashMap<SessionId, Session>,
    /// Sessions that were ended, and whose clients may not know it yet.
    pub(crate) ended: Ended,
    /// Of these, those that others had waited for.
    pub(crate) troubles: Troubles,
    /// Content that certainly has a row: no need to look.
    pub(crate) known: HashSet<ContentHash>,
    /// During a sweep: content that commits have named since it began.
    pub(crate) touched: Option<HashSet<ContentHash>>,
    /// About how many bytes of content are dead: uploaded or freed since the last sweep.
    pub(crate) dead_bytes: i64,
    /// How many inodes were deleted since the database was rewritten without them.
    pub(crate) dead_rows: u64,
    pub(crate) commits: u64,
    pub(crate) packs: u64,
    pub(crate) pack_bytes: u64,
    pub(crate) sweeps: u64,
    /// A batch was refused because the store is full, and no sweep has begun since.
    pub(crate) wants_room: bool,
    /// Inode numbers for what is made by changes: that they were given is durable.
    pub(crate) births: InoRange,
    /// Inode numbers that were given to sessions since the volume was opened: from which, to before which, to whom.
    pub(crate) given: BTreeMap<u64, (u64, SessionId)>,
    /// How many of these there were when those of ended sessions were taken out last.
    pub(crate) given_looked: usize,
    /// What sessions have brought back that earlier openings had lost.
    pub(crate) brought: BroughtBack,
}

impl State {
    pub(crate) fn volume_row(&self) -> VolumeRow {
        VolumeRow {
            bytes: self.usage.bytes,
            inodes: self.usage.inodes,
            next_ino: self.numbers.next,
            end_ino: self.numbers.end,
            then_ino: self.numbers.then,
            heir: None,
            version: tables::VERSION,
        }
    }

    pub(crate) fn remember(&mut self, hash: ContentHash) {
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        self.known.insert(hash);
    }
}

/// An open volume. Locks, in the order in which they are taken: `sweeping`, `settling`, `turn`, `sharing`, `state`, then one of
/// the others; only the first three are held across an await.
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) shared: Arc<Shared>,
    pub(crate) registered: Mutex<Registered>,
    /// Where its packs are.
    pub(crate) homes: Arc<Homes>,
    /// How many snapshots were begun since it was opened: what is deleted from then on may be in them.
    pub(crate) points: AtomicU64,
    /// When its newest snapshot was made: none is older than one before it, whatever the clock says.
    pub(crate) newest_point: AtomicI64,
    /// Sessions that are asked to ship what they have changed.
    pub(crate) shipping: Shipping,
    /// What was written since histories may have parted.
    pub(crate) journal: Journal,
    cache_id: u64,
    /// That the whole database be rewritten.
    pub(crate) compaction: Wish,
    pub(crate) ownership: Arc<Ownership>,
    slot: RwLock<Slot>,
    /// One sweep or check at a time.
    pub(crate) sweeping: tokio::sync::Mutex<()>,
    /// One gives directories that are whole again their times.
    pub(crate) settling: tokio::sync::Mutex<()>,
    /// Whoever changes rows holds it from reading what the change builds on until it has its place in the order.
    pub(crate) turn: tokio::sync::Mutex<()>,
    pub(crate) order: Order,
    pub(crate) packed: PackedListings,
    /// Who holds and uses what; the streams to the sessions.
    pub(crate) sharing: SharingLock,
    pub(crate) state: Mutex<State>,
    pub(crate) locks: crate::session::locks::Locks,
    pub(crate) history: Mutex<History>,
    /// How far the history is, for connections of the present opening.
    pub(crate) mark: Mutex<Arc<AtomicU64>>,
    /// How often something that is stored turned out to be damaged or gone.
    pub(crate) damage_met: AtomicU64,
    pub(crate) scrubbed: Scrubbed,
    /// Packs that are put but not yet named by a durable row.
    pub(crate) flying: Mutex<HashSet<PackId>>,
}

static NEXT_CACHE_ID: AtomicU64 = AtomicU64::new(1);

impl Volume {
    /// Opens a registered volume; its rows are made when it is new.
    pub(crate) async fn open(
        shared: Arc<Shared>,
        name: &str,
        registered: Registered,
        is_new: bool,
    ) -> Result<Arc<Volume>, VolumeError> {
        let volume = Arc::new(Volume {
            name: name.to_owned(),
            id: registered.id.clone(),
            homes: Arc::new(Homes::new(&registered.id, registered.family())),
            points: AtomicU64::new(0),
            newest_point: AtomicI64::new(0),
            shipping: Shipping::default(),
            cache_id: NEXT_CACHE_ID.fetch_add(1, Relaxed),
            compaction: Wish::default(),
            ownership: Arc::new(Ownership::new(
                &shared.store,
                &registered.id,
                (!is_version(name)).then_some(shared.config.lease / 2),
            )),
            registered: Mutex::new(registered),
            slot: RwLock::new(Slot::Closed),
            sweeping: tokio::sync::Mutex::default(),
            settling: tokio::sync::Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            order: Order::default(),
            packed: PackedListings::default(),
            journal: Journal::default(),
            sharing: SharingLock::default(),
            state: Mutex::default(),
            locks: crate::session::locks::Locks::default(),
            history: Mutex::default(),
            mark: Mutex::default(),
            damage_met: AtomicU64::new(0),
            scrubbed: Scrubbed::default(),
            flying: Mutex::default(),
            shared,
        });
        volume.open_database(is_new).await?;
        tokio::spawn(watch_ownership(Arc::downgrade(&volume), volume.shared.config.lease / 10));
        Ok(volume)
    }

    /// Looks whether another server has taken over the volume.
    ///
    /// # Errors
    /// It has ([`VolumeError::Fenced`]), or nobody can tell now.
    pub(crate) async fn look(self: &Arc<Self>) -> Result<(), VolumeError> {
        // SlateDB asks for ever, if nobody stops it.
        let look = tokio::time::timeout(self.shared.config.lease, self.ownership.look()).await;
        let look = look.map_err(|_| "it does not answer".to_owned());
        match look.and_then(|look| look.map_err(|error| chain(&error))) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(why) => return Err(VolumeError::Unseen(why)),
        }
        // The database says so itself, unless what was found is a newer opening of this server's.
        let db = self.db()?;
        let refreshed = db.refresh_manifest().await.map_err(VolumeError::from);
        let refreshed = refreshed.inspect_err(|error| self.note(error));
        self.db()?;
        refreshed
    }

    async fn open_database(self: &Arc<Self>, is_new: bool) -> Result<(), VolumeError> {
        let config = &self.shared.config;
        let cache = self.shared.cache.for_databases();
        let (unflushed, wish, began_ms) = (config.unflushed_bytes, &self.compaction, ownership::now_ms());
        let db =
            database::open(&self.ownership, (cache, self.cache_id), unflushed, wish, &self.homes, is_new)
                .await?;
        let loaded = async {
            if self.homes.is_clone() {
                let registered = self.registered.lock().clone();
                clone::fit(&db, &self.id, &registered).await?;
            }
            let changes = self.load(&db).await?;
            self.end_heirs(&db).await?;
            let was_taken = self.open_history(&db).await?;
            self.note_changes(changes, was_taken);
            self.redo_own(&db, was_taken).await?;
            Ok(was_taken)
        };
        match loaded.await {
            Ok(was_taken) => {
                if was_taken {
                    // They hear of the new opening when they are back, and bring what it has lost. Until then nobody
                    // is served.
                    let (mut sharing, mut state) = (self.sharing.lock(), self.state.lock());
                    for (id, session) in &mut state.sessions {
                        sharing.join(*id, session.row.read_only);
                        session.may_bring = true;
                        session.heard.store(self.shared.uptime_ms(), Relaxed);
                        session.hang_up();
                        session.connection = None;
                    }
                }
                self.ownership.opened(&db.manifest(), began_ms, was_taken);
                *self.slot.write() = Slot::Open(db);
                Ok(())
            }
            Err(error) => {
                close_quickly(db).await;
                Err(error)
            }
        }
    }

    /// Notes which changes were carried out, as the tables say. What is not in them is brought back, or written again; one
    /// that is under way looks for itself, unless another server has had the volume.
    fn note_changes(&self, changes: Vec<((SessionId, u64), Changed)>, was_taken: bool) {
        let mut sharing = self.sharing.lock();
        let is_kept = |progress: &Progress| !was_taken && matches!(progress, Progress::UnderWay);
        sharing.changes.retain(|_, progress| is_kept(progress));
        for (key, outcome) in changes {
            sharing.changes.entry(key).or_insert(Progress::Done(outcome));
        }
    }

    /// Reads what the state begins with; keeps what it knows of connections. Returns the outcomes of changes.
    async fn load(&self, db: &Db) -> Result<Vec<((SessionId, u64), Changed)>, VolumeError> {
        let row = match db.get(tables::VOLUME).await? {
            Some(row) => database::decode::<VolumeRow>(row, "volume")?,
            None => self.create_rows(db).await?,
        };
        if !(1..=tables::VERSION).contains(&row.version) {
            return Err(VolumeError::Damaged("volume row of another version of Hayloft"));
        }
        let snapshot = db.snapshot()?;
        let mut rows = Vec::new();
        let mut scan = database::scan(&snapshot, &[tables::SESSIONS]).await?;
        while let Some(found) = scan.next().await? {
            let id = tables::number_in(&found.key).ok_or(VolumeError::Damaged("session's key"))?;
            rows.push((SessionId(id), database::decode::<SessionRow>(found.value, "session")?));
        }
        let mut changes = Vec::new();
        let mut scan = database::scan(&snapshot, &[tables::CHANGES]).await?;
        while let Some(found) = scan.next().await? {
            let numbers = tables::number_in(&found.key).zip(tables::second_number_in(&found.key));
            let (id, request) = numbers.ok_or(VolumeError::Damaged("key of a change"))?;
            let outcome = database::decode::<Changed>(found.value, "outcome of a change")?;
            changes.push(((SessionId(id), request), outcome));
        }
        let mut ended = Ended::new();
        let mut scan = database::scan(&snapshot, &[tables::ENDED]).await?;
        while let Some(found) = scan.next().await? {
            let id = tables::number_in(&found.key).ok_or(VolumeError::Damaged("key of an ended session"))?;
            ended.insert(SessionId(id), database::decode::<EndedRow>(found.value, "ended session")?);
        }
        let mut orphans = HashMap::<SessionId, BTreeSet<Ino>>::new();
        let mut scan = database::scan(&snapshot, &[tables::ORPHANS]).await?;
        while let Some(found) = scan.next().await? {
            if let (Some(id), Some(ino)) =
                (tables::number_in(&found.key), tables::second_number_in(&found.key))
            {
                orphans.entry(SessionId(id)).or_default().insert(Ino(ino));
            }
        }
        let packs = family::packs(database::scan(&snapshot, &[tables::PACKS]).await?).await?;
        let (pack_count, pack_bytes) = (packs.len() as u64, packs.values().map(|row| row.size).sum());
        self.homes.learn(packs.iter().map(|(pack, row)| (*pack, row)));
        let brought = match db.get(tables::BROUGHT).await? {
            Some(row) => database::decode::<BroughtRow>(row, "what was brought back")?,
            None => BroughtRow::default(),
        };
        let now_ms = self.shared.uptime_ms();
        let window = self.registered.lock().numbers_from;
        let (mut sharing, mut state) = (self.sharing.lock(), self.state.lock());
        let mut old = std::mem::take(&mut state.sessions);
        for (id, row) in rows {
            // The store has failed before its end was durable. It had nothing: nobody waits for what it says, and it ends once more.
            let is_over = state.ended.contains_key(&id);
            let mut session = old.remove(&id).unwrap_or_else(|| {
                if is_over {
                    sharing.begin(id, row.read_only, 0);
                    return Session::found(&row, now_ms);
                }
                sharing.join(id, row.read_only);
                self.locks.await_claims([id]);
                Session::may_bring(&row, now_ms)
            });
            session.row = row;
            session.orphans = orphans.remove(&id).unwrap_or_default();
            session.uncertain = false;
            state.sessions.insert(id, session);
        }
        // Sessions whose beginning did not become durable.
        for (id, session) in old {
            sharing.end(id, now_ms);
            session.hang_up();
        }
        state.ended = ended;
        state.brought = brought.into();
        state.usage = Usage { bytes: row.bytes, inodes: row.inodes };
        state.numbers = row.numbers_of(window).later(state.numbers);
        (state.packs, state.pack_bytes) = (pack_count, pack_bytes);
        state.known.clear();
        Ok(changes)
    }

    /// What a database was to give in another one's place it gives by now, or never will.
    async fn end_heirs(&self, db: &Db) -> Result<(), VolumeError> {
        let row = database::row::<VolumeRow>(db, tables::VOLUME, "volume").await?;
        if row.is_none_or(|row| row.heir.is_none()) {
            return Ok(());
        }
        let row = self.state.lock().volume_row();
        let mut batch = Rows::new();
        batch.put(tables::VOLUME, row.encode_to_vec());
        if let Err(error) = database::write_durably(db, batch).await {
            // A full store can be opened, so that something can be deleted. It goes with the next change.
            tracing::warn!(volume = self.name, %error, "what it was to give in another one's place stays noted");
        }
        Ok(())
    }

    async fn create_rows(&self, db: &Db) -> Result<VolumeRow, VolumeError> {
        let (mode, uid, gid) = self.registered.lock().root;
        let now = self.shared.now();
        let root = InodeRowMessage {
            ino: Ino::ROOT.0,
            mode: FileKind::Directory.bits() | (mode & 0o7777),
            uid,
            gid,
            nlink: 2,
            times: [now; 4].iter().flat_map(|time: &Timestamp| [time.secs, i64::from(time.nanos)]).collect(),
            parent: Ino::ROOT.0,
            next_cookie: FIRST_COOKIE,
            ..InodeRowMessage::default()
        };
        let row = VolumeRow { next_ino: Ino::FIRST.0, version: tables::VERSION, ..VolumeRow::default() };
        let mut batch = Rows::new();
        batch.put(tables::inode(Ino::ROOT), root.encode_to_vec());
        batch.put(tables::VOLUME, row.encode_to_vec());
        database::write_durably(db, batch).await?;
        Ok(row)
    }

    /// The database.
    pub(crate) fn db(&self) -> Result<Db, VolumeError> {
        match &*self.slot.read() {
            Slot::Open(db) => Ok(db.clone()),
            Slot::Reopening(why) => Err(VolumeError::Reopening(why.clone())),
            Slot::Broken(why) => Err(VolumeError::Broken(why.clone())),
            Slot::Fenced => Err(VolumeError::Fenced),
            Slot::Closed => Err(VolumeError::ShuttingDown),
        }
    }

    /// Whether this server can still speak for the volume.
    pub(crate) fn is_usable(&self) -> bool {
        matches!(&*self.slot.read(), Slot::Open(_) | Slot::Reopening(_) | Slot::Broken(_))
    }

    /// Whether it is a snapshot, mounted: nothing in it changes.
    pub(crate) fn is_view(&self) -> bool {
        is_version(&self.name)
    }

    /// Whether another server owns the volume now.
    pub(crate) fn is_fenced(&self) -> bool {
        matches!(&*self.slot.read(), Slot::Fenced)
    }

    /// To be told of errors of reads, too: a database that has closed itself has to be opened again.
    pub(crate) fn note(self: &Arc<Self>, error: &VolumeError) {
        if error.is_at_rest() {
            self.damage_met.fetch_add(1, Relaxed);
            tracing::error!(volume = self.name, error = chain(error), "what the store holds is damaged");
        }
        if let VolumeError::Database(error) = error
            && matches!(error.kind(), ErrorKind::Closed(_))
        {
            self.database_failed(error);
        }
    }

    pub(crate) fn database_failed(self: &Arc<Self>, error: &slatedb::Error) {
        let mut slot = self.slot.write();
        let Slot::Open(db) = &*slot else { return };
        let db = db.clone();
        if matches!(error.kind(), ErrorKind::Closed(CloseReason::Fenced)) {
            tracing::warn!(volume = self.name, "another server has taken over the volume");
            *slot = Slot::Fenced;
            drop(slot);
            self.ownership.lose();
            self.sharing.lock().close();
            self.state.lock().sessions.values().for_each(Session::hang_up);
            tokio::spawn(close_quickly(db));
            return;
        }
        let why = chain(error);
        tracing::error!(volume = self.name, error = why, "the database failed; it is opened again");
        *slot = Slot::Reopening(why);
        let volume = Arc::clone(self);
        tokio::spawn(async move { volume.reopen(db).await });
    }

    async fn reopen(self: Arc<Self>, old: Db) {
        let _turn = self.turn.lock().await;
        close_quickly(old).await;
        let mut pause = Duration::from_millis(100);
        while matches!(&*self.slot.read(), Slot::Reopening(_) | Slot::Broken(_)) {
            match self.open_database(false).await {
                Ok(()) => {
                    tracing::info!(volume = self.name, "the database is open again");
                    return;
                }
                Err(error) => {
                    let why = chain(&error);
                    tracing::warn!(volume = self.name, error = why, "the database cannot be opened yet");
                    if let slot @ (Slot::Reopening(_) | Slot::Broken(_)) = &mut *self.slot.write() {
                        *slot = match error.is_at_rest() {
                            true => Slot::Broken(why),
                            false => Slot::Reopening(why),
                        };
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    /// Waits for the change in progress and closes the database.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<(), slatedb::Error> {
        let slot = self.stand_still();
        self.sharing.lock().close();
        let _turn = self.turn.lock().await;
        self.end(slot).await
    }

    /// Closes the database of a volume that stands still. The caller has the turn.
    pub(crate) async fn end(self: &Arc<Self>, slot: Slot) -> Result<(), slatedb::Error> {
        match slot {
            Slot::Open(db) => {
                let place = self.order.last(db.clone());
                if let Err(error) = self.durable(&place).await {
                    tracing::warn!(volume = self.name, %error, "what was answered is left to those who keep it");
                }
                db.close().await
            }
            _ => Ok(()),
        }
    }

    /// Nothing can be done with it any more, until [`Volume::go_on`]. The caller has the turn.
    pub(crate) fn stand_still(&self) -> Slot {
        std::mem::replace(&mut *self.slot.write(), Slot::Closed)
    }

    /// The reverse of [`Volume::stand_still`].
    pub(crate) fn go_on(&self, slot: Slot) {
        *self.slot.write() = slot;
    }

    /// Another database is the volume's: clients find it when they come again.
    pub(crate) async fn retire(&self, slot: Slot) -> Result<(), slatedb::Error> {
        self.sharing.lock().close();
        self.state.lock().sessions.values().for_each(Session::hang_up);
        match slot {
            Slot::Open(db) => db.close().await,
            _ => Ok(()),
        }
    }

    /// How full the volume is.
    pub(crate) fn status(&self) -> VolumeStatus {
        let usage = self.state.lock().usage;
        let registered = self.registered.lock();
        let space = self.shared.reserve.usable();
        VolumeStatus {
            used_bytes: usage.bytes,
            used_inodes: usage.inodes,
            quota_bytes: registered.quota_bytes,
            quota_inodes: registered.quota_inodes,
            store_free_bytes: space.map_or(u64::MAX, |space| space.free),
            store_total_bytes: space.map_or(u64::MAX, |space| space.total),
        }
    }
}

/// Looks that may be under way at a time: what hangs may leave a thread behind each time.
const LOOKS_MAX: usize = 5;

/// Looks every so often whether the volume is another server's by now, while there are sessions for which that matters. A slow store gets
/// the next question before it has answered the last one.
async fn watch_ownership(volume: Weak<Volume>, every: Duration) {
    let mut looks = JoinSet::new();
    loop {
        tokio::time::sleep(every).await;
        let Some(volume) = volume.upgrade() else { return };
        while looks.try_join_next().is_some() {}
        let has_sessions = !volume.state.lock().sessions.is_empty();
        if has_sessions && volume.is_usable() && looks.len() < LOOKS_MAX {
            looks.spawn(async move {
                if let Err(error) = volume.look().await {
                    tracing::debug!(volume = volume.name, %error, "not seen whose the volume is");
                }
            });
        }
    }
}

async fn close_quickly(db: Db) {
    if tokio::time::timeout(Duration::from_secs(5), db.close()).await.is_err() {
        tracing::warn!("a failed database took too long to close");
    }
}
