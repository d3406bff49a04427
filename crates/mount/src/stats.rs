//! Counters of a mount, since it began. The keys are stable and described in `docs/operations.md`.

use std::sync::atomic::{AtomicU64, Ordering};

use hayloft_wire::client_message::Body;
use serde_json::{Map, Value, json};

/// A counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The kinds of messages to the server that are counted, by their stable names.
const REQUESTS: [&str; 17] = [
    "HELLO",
    "ENTER",
    "FETCH_INODE",
    "FETCH_PAGES",
    "FETCH_CONTENT",
    "CONTENT",
    "COMMIT",
    "ALLOCATE_INOS",
    "STATUS",
    "GOODBYE",
    "BEGIN_BATCH",
    "RECORDS",
    "ACQUIRE",
    "CHANGE",
    "LET_GO",
    "CLAIM",
    "LOCK",
];

fn request_index(body: &Body) -> Option<usize> {
    Some(match body {
        Body::Hello(_) => 0,
        Body::Enter(_) => 1,
        Body::FetchInode(_) => 2,
        Body::FetchPages(_) => 3,
        Body::FetchContent(_) => 4,
        Body::Content(_) => 5,
        Body::Commit(_) => 6,
        Body::AllocateInos(_) => 7,
        Body::Status(_) => 8,
        Body::Goodbye(_) => 9,
        Body::BeginBatch(_) => 10,
        Body::Records(_) => 11,
        Body::Acquire(_) => 12,
        Body::Change(_) => 13,
        Body::LetGo(_) => 14,
        Body::Claim(_) => 15,
        Body::Lock(_) => 16,
        _ => return None,
    })
}

/// All counters of a mount.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    requests: [Counter; REQUESTS.len()],
    pub(crate) bytes_sent: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) reconnects: Counter,
    /// Blocks read that were in memory, and that were not.
    pub(crate) block_hits: Counter,
    pub(crate) block_misses: Counter,
    /// Blocks that came with a listing before anybody asked.
    pub(crate) blocks_prefetched: Counter,
    pub(crate) directories_prefetched: Counter,
    pub(crate) commits: Counter,
    pub(crate) commits_refused: Counter,
    pub(crate) records_shipped: Counter,
    pub(crate) content_bytes_shipped: Counter,
    pub(crate) writers_delayed: Counter,
    /// Events of others' changes, and objects that others needed.
    pub(crate) events_applied: Counter,
    pub(crate) recalls: Counter,
    /// Answers to what the server said first, and keep-alives: of no operation's account.
    pub(crate) acknowledgements: Counter,
    pub(crate) keep_alives: Counter,
}

impl Stats {
    pub(crate) fn count_request(&self, body: &Body) {
        match (request_index(body), body) {
            (Some(index), _) => self.requests[index].add(1),
            (None, Body::Ack(_)) => self.acknowledgements.add(1),
            (None, Body::Ping(_)) => self.keep_alives.add(1),
            (None, _) => {}
        }
    }

    pub(crate) fn server_json(&self) -> Value {
        let mut by_type = Map::new();
        for (name, counter) in REQUESTS.iter().zip(&self.requests) {
            by_type.insert((*name).to_string(), json!(counter.get()));
        }
        let total: u64 = self.requests.iter().map(Counter::get).sum();
        by_type.insert("total".to_string(), json!(total));
        json!({
            "requests": by_type,
            "bytes_sent": self.bytes_sent.get(),
            "bytes_received": self.bytes_received.get(),
            "reconnects": self.reconnects.get(),
            "events_applied": self.events_applied.get(),
            "recalls": self.recalls.get(),
            "acknowledgements": self.acknowledgements.get(),
            "keep_alives": self.keep_alives.get(),
        })
    }

    pub(crate) fn cache_json(&self) -> Value {
        json!({
            "block_hits": self.block_hits.get(),
            "block_misses": self.block_misses.get(),
            "blocks_prefetched": self.blocks_prefetched.get(),
            "directories_prefetched": self.directories_prefetched.get(),
        })
    }

    pub(crate) fn log_json(&self) -> Value {
        json!({
            "commits": self.commits.get(),
            "commits_refused": self.commits_refused.get(),
            "records_shipped": self.records_shipped.get(),
            "content_bytes_shipped": self.content_bytes_shipped.get(),
            "writers_delayed": self.writers_delayed.get(),
        })
    }
}
