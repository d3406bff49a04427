//! When SlateDB rewrites the table files of a volume: by their sizes, as it does by itself, and whole after a sweep.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slatedb::Db;
use slatedb::compactor::{
    Compaction, CompactionScheduler, CompactionSchedulerSupplier, CompactionSpec, CompactorStateView,
    SizeTieredCompactionSchedulerSupplier, SourceId,
};
use slatedb::config::{CompactorOptions, FlushOptions, FlushType};

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
