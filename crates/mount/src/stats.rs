//! Counters of a mount, since it began. The keys are stable and described in `docs/operations.md`.

use std::cell::Cell;
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
const REQUESTS: [&str; 19] = [
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
    "RELEASE",
    "HEAR",
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
        Body::Release(_) | Body::GiveBack(_) => 17,
        Body::Hear(_) => 18,
        _ => return None,
    })
}

/// Kinds of messages that carry the log, which is of what is owned.
const LOG: [&str; 5] = ["BEGIN_BATCH", "CONTENT", "RECORDS", "COMMIT", "LET_GO"];

/// How this host holds a directory; a file goes with the directory that it is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hold {
    /// It is changed here.
    Owned = 0,
    /// Others may change it, and it is only looked at here.
    Read = 1,
    /// It is changed here by requests to the server, since others change it too.
    Shared = 2,
}

/// Operations of the kernel, and the messages sent for them while they waited.
#[derive(Debug, Default)]
struct Work {
    operations: Counter,
    messages: Counter,
}

thread_local! {
    static SENT: Cell<u64> = const { Cell::new(0) };
}

/// How many messages this thread has sent.
pub(crate) fn sent_here() -> u64 {
    SENT.get()
}

/// One in so many times that the lock is taken is measured: to look at a clock takes a tenth of what is done under the lock.
pub(crate) const ONE_IN: u32 = 64;

/// How long the lock of the core was waited for, and held, in those times that were measured.
#[derive(Debug, Default)]
pub(crate) struct LockTimes {
    pub(crate) measured: Counter,
    pub(crate) waited_ns: Counter,
    pub(crate) held_ns: Counter,
}

impl LockTimes {
    /// How often it was taken, about, and the means in nanoseconds. A thread that loses its processor while it has the lock is in it
    /// with all the time that it is away.
    pub(crate) fn json(&self) -> Value {
        let measured = self.measured.get();
        let mean = |sum: &Counter| sum.get().checked_div(measured).unwrap_or(0);
        json!({
            "taken": measured * u64::from(ONE_IN),
            "waited_ns": mean(&self.waited_ns),
            "held_ns": mean(&self.held_ns),
        })
    }
}

/// All counters of a mount.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    requests: [Counter; REQUESTS.len()],
    work: [Work; 3],
    pub(crate) bytes_sent: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) reconnects: Counter,
    pub(crate) frames_damaged: Counter,
    /// Sessions that the server has ended, and that others have taken the place of.
    pub(crate) sessions_replaced: Counter,
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
    /// What others needed and was kept for calls here until patience ended.
    pub(crate) recalls_kept: Counter,
    /// How often the kernel was told to look all names up anew, since one of them could not be dropped.
    pub(crate) epochs: Counter,
    /// Names that the kernel had still when another host's change of them was applied here.
    pub(crate) late_names: Counter,
    /// Answers to what the server said first, and keep-alives: of no operation's account.
    pub(crate) acknowledgements: Counter,
    pub(crate) keep_alives: Counter,
    /// The lock that all operations pass.
    pub(crate) lock: LockTimes,
}

impl Stats {
    /// An operation is done, for which so many messages were sent.
    pub(crate) fn count_operation(&self, hold: Hold, messages: u64) {
        let work = &self.work[hold as usize];
        work.operations.add(1);
        work.messages.add(messages);
    }

    /// How many requests of the kernel were answered.
    pub(crate) fn operations(&self) -> u64 {
        self.work.iter().map(|work| work.operations.get()).sum()
    }

    pub(crate) fn count_request(&self, body: &Body) {
        SENT.set(SENT.get() + 1);
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
            "frames_damaged": self.frames_damaged.get(),
            "sessions_replaced": self.sessions_replaced.get(),
            "events_applied": self.events_applied.get(),
            "recalls": self.recalls.get(),
            "recalls_kept": self.recalls_kept.get(),
            "epochs": self.epochs.get(),
            "late_names": self.late_names.get(),
            "acknowledgements": self.acknowledgements.get(),
            "keep_alives": self.keep_alives.get(),
        })
    }

    /// What sharing costs. The log's messages count for what is owned.
    pub(crate) fn sharing_json(&self) -> Value {
        let by_type = REQUESTS.iter().zip(&self.requests);
        let log: u64 = by_type.filter(|(name, _)| LOG.contains(name)).map(|(_, counter)| counter.get()).sum();
        let of = |hold: Hold, more: u64| {
            let work = &self.work[hold as usize];
            let (operations, messages) = (work.operations.get(), work.messages.get() + more);
            let each = (operations > 0).then(|| (messages as f64 / operations as f64 * 1e4).round() / 1e4);
            json!({"operations": operations, "messages": messages, "messages_per_operation": each})
        };
        json!({"owned": of(Hold::Owned, log), "read": of(Hold::Read, 0), "shared": of(Hold::Shared, 0)})
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
