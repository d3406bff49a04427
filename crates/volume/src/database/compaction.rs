//! When SlateDB rewrites the table files of a volume: by their sizes, as it does by itself, and whole after a sweep. What another server
//! has begun is taken over at once.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use slatedb::Db;
use slatedb::admin::Admin;
use slatedb::compactor::{
    Compaction, CompactionScheduler, CompactionSchedulerSupplier, CompactionSpec, CompactorStateView,
    SizeTieredCompactionSchedulerSupplier, SourceId,
};
use slatedb::config::{CompactorOptions, FlushOptions, FlushType};
use slatedb_common::clock::{DefaultSystemClock, SystemClock, SystemClockTicker};

/// How long an opening waits to hear what was begun. Without it what was begun waits for its time.
const ASK_PATIENCE: Duration = Duration::from_secs(2);

/// Whether all of a database is to be rewritten. Its compactor looks here; nothing is handed to it through the store,
/// where a wish that it has begun to act upon already, or that lists files which are gone meanwhile, ends as an error in
/// the log (`InvalidCompaction`).
#[derive(Clone, Debug, Default)]
pub(crate) struct Wish(Arc<AtomicBool>);

impl Wish {
    /// Lets SlateDB rewrite the whole database without the rows that were deleted: by itself it would wait
    /// for more new table files, and the room of deleted rows would not come back for long. Needs room for
    /// a copy while it runs, and is left out when there are not `free` bytes for it.
    pub(crate) async fn make(&self, db: &Db, free: Option<u64>) -> Result<(), slatedb::Error> {
        db.flush_with_options(FlushOptions { flush_type: FlushType::MemTable }).await?;
        let manifest = db.manifest();
        let (fresh, runs) = (manifest.l0(), manifest.compacted());
        let size = fresh.iter().map(|file| file.estimate_size()).sum::<u64>()
            + runs.iter().map(|run| run.estimate_size()).sum::<u64>();
        if !fresh.is_empty() && free.is_none_or(|free| free >= size) {
            self.0.store(true, Ordering::Release);
        }
        Ok(())
    }
}

impl CompactionSchedulerSupplier for Wish {
    fn compaction_scheduler(&self, options: &CompactorOptions) -> Box<dyn CompactionScheduler + Send + Sync> {
        let by_size = SizeTieredCompactionSchedulerSupplier::new().compaction_scheduler(options);
        Box::new(Scheduler { wish: self.clone(), by_size })
    }
}

struct Scheduler {
    wish: Wish,
    by_size: Box<dyn CompactionScheduler + Send + Sync>,
}

impl CompactionScheduler for Scheduler {
    fn propose(&self, state: &CompactorStateView) -> Vec<CompactionSpec> {
        // One at a time, from the proposal to the end: of two that take new files SlateDB refuses the second, as an error.
        if state.compactions().is_some_and(|all| all.recent_compactions().any(Compaction::active)) {
            return Vec::new();
        }
        if self.wish.0.swap(false, Ordering::AcqRel)
            && let Some(all) = whole(state)
        {
            return vec![all];
        }
        let mut proposed = self.by_size.propose(state);
        proposed.truncate(1);
        proposed
    }

    fn validate(&self, state: &CompactorStateView, spec: &CompactionSpec) -> Result<(), slatedb::Error> {
        self.by_size.validate(state, spec)
    }
}

/// Everything that the database consists of, into one sorted run; unless that is what it is.
fn whole(state: &CompactorStateView) -> Option<CompactionSpec> {
    let (fresh, runs) = (state.manifest().l0(), state.manifest().compacted());
    let sources = fresh
        .iter()
        .map(|file| SourceId::SstView(file.id))
        .chain(runs.iter().map(|run| SourceId::SortedRun(run.id)))
        .collect();
    let into = runs.iter().map(|run| run.id).min().unwrap_or(0);
    (!fresh.is_empty()).then(|| CompactionSpec::new(sources, into))
}

/// The clock of a database and its compactor, which takes over. SlateDB has who compacts say each 10 s that it is there, and leaves a
/// compaction to it until it has been silent for so long, by the system's clock: 30 s in which there may be no room for new table files,
/// and years if the clock was that much ahead. But whoever opens a database has fenced all before it, so that none of these goes on. So
/// this clock begins where their claims are over, and stands there until the system's has come to it.
#[derive(Debug)]
pub(crate) struct AfterClaims {
    system: DefaultSystemClock,
    first: DateTime<Utc>,
}

impl AfterClaims {
    /// Of a database that is to be opened, where a claim is over after so long.
    pub(crate) async fn of(admin: &Admin, options: &CompactorOptions) -> AfterClaims {
        let begun = match tokio::time::timeout(ASK_PATIENCE, admin.read_compactions(None)).await {
            Ok(Ok(begun)) => begun,
            // What is wrong with the database its opening tells.
            _ => None,
        };
        let active = begun.iter().flat_map(|begun| begun.recent_compactions()).filter(|one| one.active());
        let claims = active.filter_map(Compaction::worker);
        let heard = claims.map(|worker| worker.last_heartbeat_ms).max().unwrap_or_default();
        let over = heard.saturating_add(options.worker_heartbeat_timeout.as_millis() as u64 + 1);
        let first = i64::try_from(over).ok().and_then(DateTime::from_timestamp_millis);
        AfterClaims { system: DefaultSystemClock::new(), first: first.unwrap_or(DateTime::UNIX_EPOCH) }
    }
}

impl SystemClock for AfterClaims {
    fn now(&self) -> DateTime<Utc> {
        self.system.now().max(self.first)
    }

    fn sleep<'a>(&'a self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.system.sleep(duration)
    }

    fn ticker<'a>(&'a self, duration: Duration) -> SystemClockTicker<'a> {
        SystemClockTicker::new(self, duration)
    }
}

#[cfg(test)]
#[path = "compaction_tests.rs"]
mod tests;
