//! What a server is told at its start.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use hayloft_store::StoreKey;
use hayloft_transport::Security;

use crate::listen::Socket;

/// How a server runs. [`Config::new`] fills in what most farms want.
#[derive(Clone, Debug)]
pub struct Config {
    /// URL of the store, such as `file:///var/lib/hayloft`.
    pub store: String,
    /// What everything in the store is encrypted with; `None`: nothing is.
    pub key: Option<StoreKey>,
    /// Where to listen; port 0 for any free one. `None`: at the socket alone.
    pub listen: Option<SocketAddr>,
    /// A socket of this host to listen at.
    pub socket: Option<Socket>,
    /// Who may come from other hosts.
    pub security: Security,
    /// The audit log: a file; `None` for none.
    pub audit: Option<PathBuf>,
    /// How long a client may be silent before another may take its place.
    pub lease: Duration,
    /// What is answered before it is durable becomes durable within about this time, or nothing more is answered so; zero:
    /// every answer waits for the store.
    pub window: Duration,
    /// How often to look whether enough was deleted for a sweep to be worth it.
    pub sweep_interval: Duration,
    /// Memory for cached database blocks, bytes, all volumes together.
    pub cache_bytes: u64,
    /// Memory for changes of one volume that are not yet in a table file, bytes.
    pub unflushed_bytes: usize,
    /// Room on the store's disk that is never filled with new data, bytes; `None` for a default that
    /// depends on the disk's size.
    pub reserve_bytes: Option<u64>,
    /// Most bytes that the records of one batch may take before its commit.
    pub batch_records_bytes: u64,
    /// How fast what is stored is read and verified when nobody needs the server, bytes a second; `None`: not at all.
    pub scrub_bytes_per_second: Option<u64>,
    /// Most connections at a time.
    pub connections_max: usize,
    /// Most sessions of a volume.
    pub sessions_max: usize,
    /// How long a message may take from its first byte to its last; the first one may take a third of that to begin. A connection
    /// without a session may say nothing for ten times as long, one whose session has not said what it owns for twice.
    pub frame_time: Duration,
}

impl Config {
    /// The usual settings for a server of this store at this address.
    pub fn new(store: impl Into<String>, listen: SocketAddr) -> Config {
        Config { listen: Some(listen), ..Config::of(store) }
    }

    /// The same, for one that does not listen yet.
    pub fn of(store: impl Into<String>) -> Config {
        Config {
            store: store.into(),
            key: None,
            listen: None,
            socket: None,
            security: Security::Local,
            audit: None,
            lease: Duration::from_secs(10),
            window: Duration::from_millis(100),
            sweep_interval: Duration::from_secs(60),
            cache_bytes: 128 << 20,
            unflushed_bytes: 128 << 20,
            reserve_bytes: None,
            batch_records_bytes: 1 << 30,
            scrub_bytes_per_second: Some(8 << 20),
            connections_max: 2048,
            sessions_max: 4096,
            frame_time: Duration::from_secs(30),
        }
    }
}
