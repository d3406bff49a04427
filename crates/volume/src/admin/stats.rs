//! Counters of a server, and the JSON document that shows them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hayloft_store::{Histogram, Operation};
use hayloft_transport::Peer;
use hayloft_wire::client_message::Body;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::rights::Right;
use crate::server::Shared;

/// Counts of one type of request.
#[derive(Default)]
struct Request {
    count: AtomicU64,
    latency: Histogram,
}

/// What a server has done since its start.
#[derive(Default)]
pub(crate) struct ServerStats {
    /// Connections that stand now.
    pub(crate) connections: AtomicU64,
    /// Frames that were changed on their way here: each has ended its connection.
    pub(crate) frames_damaged: AtomicU64,
    requests: Mutex<BTreeMap<&'static str, Arc<Request>>>,
}

/// The name of a request's type.
pub(crate) fn type_of(body: &Body) -> &'static str {
    match body {
        Body::SetRights(_) => "SET_RIGHTS",
        Body::Hello(_) => "HELLO",
        Body::Enter(_) => "ENTER",
        Body::FetchInode(_) => "FETCH_INODE",
        Body::FetchPages(_) => "FETCH_PAGES",
        Body::FetchContent(_) => "FETCH_CONTENT",
        Body::Content(_) => "CONTENT",
        Body::Records(_) => "RECORDS",
        Body::BeginBatch(_) => "BEGIN_BATCH",
        Body::Commit(_) => "COMMIT",
        Body::AllocateInos(_) => "ALLOCATE_INOS",
        Body::Status(_) => "STATUS",
        Body::Goodbye(_) => "GOODBYE",
        Body::CreateVolume(_) => "CREATE_VOLUME",
        Body::ListVolumes(_) => "LIST_VOLUMES",
        Body::ShowVolume(_) => "SHOW_VOLUME",
        Body::DeleteVolume(_) => "DELETE_VOLUME",
        Body::SweepVolume(_) => "SWEEP_VOLUME",
        Body::Stats(_) => "STATS",
        Body::SetQuota(_) => "SET_QUOTA",
        Body::CheckVolume(_) => "CHECK_VOLUME",
        Body::Acquire(_) => "ACQUIRE",
        Body::Change(_) => "CHANGE",
        Body::Ack(_) => "ACK",
        Body::LetGo(_) => "LET_GO",
        Body::Release(_) => "RELEASE",
        Body::GiveBack(_) => "GIVE_BACK",
        Body::Claim(_) => "CLAIM",
        Body::Ping(_) => "PING",
        Body::Lock(_) => "LOCK",
        Body::CancelLock(_) => "CANCEL_LOCK",
        Body::Bury(_) => "BURY",
        Body::ListClients(_) => "LIST_CLIENTS",
        Body::EvictClient(_) => "EVICT_CLIENT",
        Body::Sync(_) => "SYNC",
        Body::Hear(_) => "HEAR",
        Body::Shipped(_) => "SHIPPED",
        Body::CreateSnapshot(_) => "CREATE_SNAPSHOT",
        Body::ListSnapshots(_) => "LIST_SNAPSHOTS",
        Body::DeleteSnapshot(_) => "DELETE_SNAPSHOT",
        Body::Fork(_) => "FORK",
        Body::Rollback(_) => "ROLLBACK",
        Body::Promote(_) => "PROMOTE",
        Body::Diff(_) => "DIFF",
        Body::NameTree(_) => "NAME_TREE",
        Body::SignSnapshot(_) => "SIGN_SNAPSHOT",
        Body::CutFile(_) => "CUT_FILE",
        Body::ReadParts(_) => "READ_PARTS",
    }
}

impl ServerStats {
    /// Counts a request that took this long from its arrival to its answer.
    pub(crate) fn count(&self, kind: &'static str, took: Duration) {
        let request = Arc::clone(self.requests.lock().entry(kind).or_default());
        request.count.fetch_add(1, Relaxed);
        request.latency.record(took);
    }

    /// How many there were.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.lock().values().map(|request| request.count.load(Relaxed)).sum()
    }
}

fn latency(histogram: &Histogram) -> Value {
    let ([p50, p90, p99], max) = histogram.quantiles([0.5, 0.9, 0.99]);
    json!({ "p50": p50, "p90": p90, "p99": p99, "max": max })
}

impl Shared {
    /// The statistics as a JSON document, without the volumes that the peer may not know of.
    pub(crate) async fn stats_json(&self, peer: Option<&Peer>) -> String {
        let requests: Vec<(&str, Arc<Request>)> =
            self.stats.requests.lock().iter().map(|(kind, request)| (*kind, Arc::clone(request))).collect();
        let mut counts: Map<String, Value> = requests
            .iter()
            .map(|(kind, request)| ((*kind).to_owned(), request.count.load(Relaxed).into()))
            .collect();
        let latencies: Map<String, Value> =
            requests.iter().map(|(kind, request)| ((*kind).to_owned(), latency(&request.latency))).collect();
        let total = self.stats.requests();
        let resident = hayloft_memory::resident();
        let mut volumes = Map::new();
        for volume in self.open_volumes().await {
            let of = volume.registered.lock().clone();
            if peer.is_some_and(|peer| self.right_of(peer, &of) < Right::Read) {
                continue;
            }
            let status = volume.status();
            let held = volume.sharing.held();
            let (sharing, state) = (volume.sharing.lock(), volume.state.lock());
            let (totals, done) = (sharing.grants.totals(), &sharing.counts);
            let undurable = volume.order.undurable();
            let connected = state.sessions.values().filter(|session| session.connection.is_some()).count();
            volumes.insert(
                volume.name.clone(),
                json!({
                    "clients": connected,
                    "sessions": state.sessions.len(),
                    "grants": totals.own_directories + totals.read_directories + totals.own_files,
                    "own_directories": totals.own_directories,
                    "read_directories": totals.read_directories,
                    "own_files": totals.own_files,
                    "requests_waiting": sharing.grants.requests_waiting(),
                    "events": { "apply": done.applies, "drop": done.drops, "recall": done.recalls },
                    "events_waiting": totals.events_waiting,
                    "changes_executed": done.executed,
                    "changes_given": done.given,
                    "directories_split": done.splits,
                    "evictions": done.evictions,
                    "used_bytes": status.used_bytes,
                    "used_inodes": status.used_inodes,
                    "quota_bytes": status.quota_bytes,
                    "quota_inodes": status.quota_inodes,
                    "commits": state.commits,
                    "packs": state.packs,
                    "pack_bytes": state.pack_bytes,
                    "sweeps": state.sweeps,
                    "damage_met": volume.damage_met.load(Relaxed),
                    "scrub": {
                        "objects": volume.scrubbed.objects.load(Relaxed),
                        "bytes": volume.scrubbed.bytes.load(Relaxed),
                        "rounds": volume.scrubbed.rounds.load(Relaxed),
                        "finished_secs": volume.scrubbed.finished_secs.load(Relaxed),
                        "damaged": volume.scrubbed.damaged(),
                    },
                    "listings": {
                        "packed": volume.packed.written.load(Relaxed),
                        "found": volume.packed.found.load(Relaxed),
                        "missed": volume.packed.missed.load(Relaxed),
                    },
                    "sharing_lock": { "taken": held.taken, "held_ns": held.all_ns, "held_max_ns": held.max_ns },
                    "undurable": { "entries": undurable.0, "bytes": undurable.1 },
                }),
            );
        }
        let stats = self.store.stats();
        let operations =
            [("put", &stats.put), ("get", &stats.get), ("delete", &stats.delete), ("list", &stats.list)];
        let shown = |show: fn(&Operation) -> Value| -> Map<String, Value> {
            operations.iter().map(|(name, operation)| ((*name).to_owned(), show(operation))).collect()
        };
        counts.insert("total".to_owned(), json!(total));
        let document = json!({
            "server": {
                "uptime_seconds": self.uptime_ms() / 1000,
                "connections": self.stats.connections.load(Relaxed),
                "connections_silent": self.silent.count(),
                "frames_damaged": self.stats.frames_damaged.load(Relaxed),
                "requests": counts,
                "latency_us": latencies,
                "memory": {
                    "resident_bytes": resident.all,
                    "own_bytes": resident.own,
                    "allocated_bytes": hayloft_memory::in_use(),
                },
            },
            "volumes": volumes,
            "store": {
                "operations": shown(|operation| json!({
                    "count": operation.count.load(Relaxed),
                    "bytes": operation.bytes.load(Relaxed),
                    "errors": operation.errors.load(Relaxed),
                })),
                "latency_us": shown(|operation| latency(&operation.latency)),
            },
        });
        document.to_string()
    }
}
