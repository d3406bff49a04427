//! The server: its listener, its volumes, and the end.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::FutureExt;
use futures::future::BoxFuture;
use hayloft_model::Timestamp;
use hayloft_model::clock::{GrowingTime, SteadyClock};
use hayloft_store::Store;
use hayloft_transport::{Acceptor, Caller, Security};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::admin::stats::ServerStats;
use crate::audit::Audit;
use crate::config::Config;
use crate::connection;
use crate::connection::silent::Silent;
use crate::content::reserve::Reserve;
use crate::database::TableCache;
use crate::database::family::Remembered;
use crate::database::format;
use crate::database::named;
use crate::database::registry::{self, Registered};
use crate::error::{ServerError, VolumeError, chain};
use crate::listen::Listener;
use crate::lost::LostNames;
use crate::peers::Peers;
use crate::room::Room;
use crate::versions;
use crate::versions::cutting::Cutting;
use crate::versions::leftovers::Leftovers;
use crate::versions::naming::LatelyNamed;
use crate::volume::Volume;

/// How long a shutdown waits for connections to finish what they have begun.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(20);

/// How often to look for sessions that are silent.
const LEASE_CHECK: Duration = Duration::from_millis(200);
/// So many of these checks, and it is looked whether all who are connected may stay.
const PEER_CHECKS: u64 = 5;
/// So many of these checks without a change in a split directory, and it is made whole.
const REST_CHECKS: u64 = 5;

/// A volume that is open, or is being opened by whoever holds the lock.
type Place = Arc<tokio::sync::Mutex<Option<Arc<Volume>>>>;

/// What all parts of a server share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) cache: TableCache,
    pub(crate) reserve: Reserve,
    pub(crate) stats: ServerStats,
    pub(crate) acceptor: Acceptor,
    pub(crate) audit: Audit,
    /// The user that the server runs as.
    pub(crate) own_uid: u32,
    pub(crate) peers: Peers,
    pub(crate) silent: Silent,
    pub(crate) room: Arc<Room>,
    /// Told when a batch was refused because the store is full.
    pub(crate) room_wanted: Notify,
    /// What snapshots have.
    pub(crate) remembered: Remembered,
    pub(crate) lately_named: LatelyNamed,
    /// Members of families are made and deleted one at a time.
    pub(crate) structure: tokio::sync::Mutex<()>,
    /// How files of snapshots are cut.
    pub(crate) cutting: Cutting,
    /// Families of which something may be left that nobody needs.
    pub(crate) leftovers: Leftovers,
    started: Instant,
    /// A leaf: nothing is taken under it.
    clock: Mutex<(SteadyClock, GrowingTime)>,
    /// Open volumes by name. The outer lock is only held to find a place.
    volumes: tokio::sync::Mutex<HashMap<String, Place>>,
    pub(crate) lost: LostNames,
    stopping: watch::Sender<bool>,
}

impl Shared {
    /// Milliseconds since the server's start.
    pub(crate) fn uptime_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// The server's clock: no time is told twice.
    pub(crate) fn now(&self) -> Timestamp {
        let (clock, told) = &mut *self.clock.lock();
        // The system's first: what comes between the two looks makes the time late, and never ahead of it.
        let system = system_nanos();
        let now = clock.now(self.started.elapsed().as_nanos() as i64, system);
        Timestamp::from_nanos(i128::from(told.next(now)))
    }

    async fn place(&self, name: &str) -> Place {
        Arc::clone(self.volumes.lock().await.entry(name.to_owned()).or_default())
    }

    /// The volume of that name, opened if it is not.
    pub(crate) async fn volume(self: &Arc<Self>, name: &str) -> Result<Arc<Volume>, VolumeError> {
        let opened = self.open_volume(name).await.map_err(|error| error.of(name));
        opened.inspect_err(|error| {
            if error.is_at_rest() {
                tracing::error!(volume = name, error = chain(error), "the volume cannot be opened");
            }
        })
    }

    async fn open_volume(self: &Arc<Self>, name: &str) -> Result<Arc<Volume>, VolumeError> {
        if !versions::is_version(name) {
            registry::check_name(name)?;
        }
        let place = self.place(name).await;
        let mut place = place.lock().await;
        if let Some(volume) = &*place
            && volume.is_usable()
        {
            return Ok(Arc::clone(volume));
        }
        if self.is_stopping() {
            return Err(VolumeError::ShuttingDown);
        }
        *place = None;
        if versions::is_version(name) {
            let volume = versions::view::open(self, name).await?;
            *place = Some(Arc::clone(&volume));
            return Ok(volume);
        }
        let registered = registry::read(&self.store, name).await?;
        if registered.deleting || versions::replace::has_left(self, name, &registered).await? {
            return Err(VolumeError::NoVolume(name.to_owned()));
        }
        if let Some(other) = named::is_of_another(&self.store, name, &registered.id).await? {
            return Err(named::told_of_copy(name, &other));
        }
        let registered = Registered { promoted_to: None, ..registered };
        let registered = format::raise(&self.store, name, registered).await?;
        let volume = Volume::open(Arc::clone(self), name, registered.clone(), false).await?;
        versions::snapshot::forget_begun(self, &volume).await?;
        if let Err(error) = named::keep(&self.store, name, &registered).await {
            tracing::warn!(volume = name, %error, "the name in a volume's folder is put there when it is opened next");
        }
        *place = Some(Arc::clone(&volume));
        Ok(volume)
    }

    /// Makes a volume. It counts as one that is being deleted until its database is there: without one it would be damaged.
    pub(crate) async fn make_volume(
        self: &Arc<Self>,
        name: &str,
        registered: Registered,
    ) -> Result<(), VolumeError> {
        let mut place = self.hold(name).await;
        let begun = Registered { deleting: true, ..registered.clone() };
        self.is_not_lost(name).await?;
        match registry::create(&self.store, name, &begun).await {
            Err(exists @ VolumeError::VolumeExists(_)) => {
                // A server was killed while it made or deleted one of that name: nobody works on it now.
                let left = registry::read(&self.store, name).await?;
                if !left.deleting {
                    return Err(exists);
                }
                registry::erase(&self.store, name, &left).await?;
                registry::create(&self.store, name, &begun).await?;
            }
            created => created?,
        }
        let made = async {
            let volume = Volume::open(Arc::clone(self), name, registered.clone(), true).await?;
            if let Err(error) = registry::update(&self.store, name, &registered).await {
                if let Err(error) = volume.close().await {
                    tracing::warn!(volume = name, %error, "the database of a volume that is not made does not close");
                }
                return Err(error);
            }
            Ok(volume)
        };
        match made.await {
            Ok(volume) => {
                *place = Some(volume);
                Ok(())
            }
            Err(error) => {
                // Marked as one that is being deleted, so that what does not go now goes when one of that name is made or deleted.
                let undone = async {
                    registry::update(&self.store, name, &begun).await?;
                    registry::erase(&self.store, name, &begun).await
                };
                if let Err(error) = undone.await {
                    tracing::warn!(volume = name, %error, "what was begun of a volume stays, until one of that name is made or deleted");
                }
                Err(error)
            }
        }
    }

    /// Lets nobody open the volume of that name while the guard lives, and gives it if it is open.
    pub(crate) async fn hold(&self, name: &str) -> tokio::sync::OwnedMutexGuard<Option<Arc<Volume>>> {
        self.place(name).await.lock_owned().await
    }

    /// Changes what the registry says of a volume, which gets no other tree meanwhile: else the entry would lead back to the old one.
    ///
    /// # Errors
    /// [`VolumeError::ShuttingDown`]: it has got another one already, or was closed. The entry cannot be written.
    pub(crate) async fn change_entry(
        &self,
        volume: &Arc<Volume>,
        change: impl FnOnce(&mut Registered),
    ) -> Result<Registered, VolumeError> {
        let place = self.hold(&volume.name).await;
        if !place.as_ref().is_some_and(|open| Arc::ptr_eq(open, volume) && open.is_usable()) {
            return Err(VolumeError::ShuttingDown);
        }
        let mut entry = volume.registered.lock().clone();
        change(&mut entry);
        registry::update(&self.store, &volume.name, &entry).await?;
        *volume.registered.lock() = entry.clone();
        Ok(entry)
    }

    /// The volume, or the snapshot, of that name if it is open.
    pub(crate) async fn opened(&self, name: &str) -> Option<Arc<Volume>> {
        let place = self.volumes.lock().await.get(name).cloned()?;
        let open = place.lock().await;
        open.clone().filter(|volume| volume.is_usable())
    }

    /// The places of volumes. Those that nobody works on and where none is open are forgotten: names come and go.
    async fn places_in_use(&self) -> Vec<Place> {
        let mut volumes = self.volumes.lock().await;
        let is_used = |place: &Place| {
            Arc::strong_count(place) > 1 || place.try_lock().map_or(true, |volume| volume.is_some())
        };
        volumes.retain(|_, place| is_used(place));
        volumes.values().cloned().collect()
    }

    /// All volumes that are open.
    pub(crate) async fn open_volumes(&self) -> Vec<Arc<Volume>> {
        let places: Vec<Place> = self.volumes.lock().await.values().cloned().collect();
        let mut volumes = Vec::new();
        for place in places {
            volumes.extend(place.lock().await.clone());
        }
        volumes
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Turns true when the server stops.
    pub(crate) fn stopping(&self) -> watch::Receiver<bool> {
        self.stopping.subscribe()
    }
}

/// A running server.
pub struct Server {
    shared: Arc<Shared>,
    address: Option<SocketAddr>,
    listener: JoinHandle<()>,
    sweeper: JoinHandle<()>,
    leases: JoinHandle<()>,
    scrubber: JoinHandle<()>,
    leftovers: JoinHandle<()>,
}

impl Server {
    /// Opens the store, listens, and serves on tasks of the current Tokio runtime.
    ///
    /// # Errors
    /// When the store cannot be used or the address cannot be listened at.
    pub fn start(config: Config) -> BoxFuture<'static, Result<Server, ServerError>> {
        // Boxed, as all that is public here: else whoever awaits it compiles the whole server once more.
        async move { listen(hayloft_store::open(&config.store, config.key.as_ref()).await?, config).await }
            .boxed()
    }

    /// Like [`Server::start`], on a store that is open already; for tests that put faults into it.
    ///
    /// # Errors
    /// When the address cannot be listened at.
    pub fn start_on(store: Store, config: Config) -> BoxFuture<'static, Result<Server, ServerError>> {
        listen(store, config).boxed()
    }

    /// Where it listens for connections of TCP.
    ///
    /// # Panics
    /// When it was told to listen at a socket alone.
    pub fn address(&self) -> SocketAddr {
        self.address.expect("a server that listens at an address")
    }

    /// The statistics, as `StatsRequest` answers them.
    pub fn stats_json(&self) -> BoxFuture<'_, String> {
        self.shared.stats_json(None).boxed()
    }

    /// Stops: no more connections; batches that have arrived are made durable and answered; databases
    /// are closed. Clients find their sessions again at the next server.
    ///
    /// # Errors
    /// When a database could not be closed; what was acknowledged is safe all the same.
    pub fn shutdown(self) -> BoxFuture<'static, Result<(), ServerError>> {
        self.stop().boxed()
    }

    async fn stop(self) -> Result<(), ServerError> {
        self.shared.stopping.send_replace(true);
        self.sweeper.abort();
        self.leases.abort();
        self.scrubber.abort();
        self.leftovers.abort();
        if tokio::time::timeout(SHUTDOWN_PATIENCE, self.listener).await.is_err() {
            tracing::warn!("some connections did not finish in time");
        }
        for volume in self.shared.open_volumes().await {
            let closed = tokio::time::timeout(SHUTDOWN_PATIENCE, volume.close()).await;
            let source: Box<dyn std::error::Error + Send + Sync> = match closed {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.into(),
                Err(late) => late.into(),
            };
            return Err(ServerError::Close { volume: volume.name.clone(), source });
        }
        Ok(())
    }
}

/// What the system's clock says.
fn system_nanos() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

/// A connection is a descriptor, and a shell allows few: as many as may be.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the number of connections is bounded by the process's limit of open files");
    }
}

/// Binds the address and begins to serve on it.
async fn listen(store: Store, config: Config) -> Result<Server, ServerError> {
    let is_open = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
    if let Some(address) = config.listen.filter(is_open)
        && config.security == Security::Local
    {
        return Err(ServerError::Open { address });
    }
    let acceptor = Acceptor::new(config.security.clone())?;
    let audit = Audit::open(config.audit.as_deref())
        .map_err(|source| ServerError::Audit { path: config.audit.clone().unwrap_or_default(), source })?;
    raise_descriptors();
    let listener = Listener::bind(config.listen, config.socket.as_ref()).await?;
    let address = listener.address();
    let shared = Arc::new(Shared {
        cache: TableCache::new(config.cache_bytes),
        reserve: Reserve::new(store.clone(), config.reserve_bytes),
        stats: ServerStats::default(),
        acceptor,
        audit,
        own_uid: rustix::process::geteuid().as_raw(),
        peers: Peers::default(),
        silent: Silent::default(),
        room: Arc::default(),
        room_wanted: Notify::new(),
        remembered: Remembered::default(),
        lately_named: LatelyNamed::default(),
        structure: tokio::sync::Mutex::default(),
        cutting: Cutting::default(),
        leftovers: Leftovers::default(),
        started: Instant::now(),
        clock: Mutex::new((SteadyClock::new(0, system_nanos()), GrowingTime::default())),
        volumes: tokio::sync::Mutex::default(),
        lost: LostNames::default(),
        stopping: watch::Sender::new(false),
        store,
        config,
    });
    tracing::info!(?address, socket = ?shared.config.socket, store = shared.store.url(), "serving");
    let accepting = tokio::spawn(accept(Arc::clone(&shared), listener));
    let sweeper = tokio::spawn(crate::content::sweep::in_background(Arc::clone(&shared)));
    let leases = tokio::spawn(watch_leases(Arc::clone(&shared)));
    let (memory, runtime) = (Arc::downgrade(&shared), tokio::runtime::Handle::current());
    // Without it memory stays here for longer.
    let _ = std::thread::Builder::new()
        .name("hayloft-memory".to_owned())
        .spawn(move || crate::admin::memory::in_background(memory, &runtime));
    let scrubber = tokio::spawn(crate::admin::scrub::in_background(Arc::clone(&shared)));
    let leftovers = tokio::spawn(versions::leftovers::in_background(Arc::clone(&shared)));
    Ok(Server { shared, address, listener: accepting, sweeper, leases, scrubber, leftovers })
}

/// Ends sessions that are silent and that others wait for.
async fn watch_leases(shared: Arc<Shared>) {
    for check in 1_u64.. {
        tokio::time::sleep(LEASE_CHECK).await;
        // The clock has to see when the system's is set.
        shared.now();
        if check.is_multiple_of(PEER_CHECKS) {
            shared.peers.check(&shared.acceptor);
        }
        let places: Vec<Place> = shared.places_in_use().await;
        for place in places {
            // One that is being opened or deleted has its turn later.
            let volume = place.try_lock().ok().and_then(|place| place.clone());
            if let Some(volume) = volume {
                volume.end_silent().await;
                if check.is_multiple_of(REST_CHECKS) {
                    volume.end_dropped().await;
                    volume.rest();
                }
            }
        }
    }
}

/// Takes connections until the server stops, then waits for them to end.
async fn accept(shared: Arc<Shared>, listener: Listener) {
    let mut stopping = shared.stopping();
    let mut connections = JoinSet::new();
    let mut number = 0;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopping.wait_for(|stop| *stop) => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
        };
        match accepted {
            Ok((socket, peer)) if connections.len() < shared.config.connections_max => {
                number += 1;
                tracing::debug!(%peer, connection = number, "connected");
                connections.spawn(counted(Arc::clone(&shared), (socket, peer), number));
            }
            Ok((_, peer)) => tracing::warn!(%peer, "too many connections; this one is closed"),
            Err(error) => {
                // Out of descriptors, most likely: it passes.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn counted(shared: Arc<Shared>, caller: (Caller, String), number: u64) {
    shared.stats.connections.fetch_add(1, Relaxed);
    connection::serve(Arc::clone(&shared), caller, number).await;
    shared.stats.connections.fetch_sub(1, Relaxed);
}
