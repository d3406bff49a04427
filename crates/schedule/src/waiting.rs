//! What waits of a build, and in which order it goes.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::{Need, TaskId};

/// Where a task stands in its build: those first that are expected to take longest, of which nothing is known before all; then as they came.
pub(crate) type Rank = (Reverse<u32>, u64);

/// Waiting tasks of a build that need the same: the first has room, or none has.
#[derive(Debug)]
struct Queue {
    need: Need,
    tasks: BTreeMap<Rank, TaskId>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// None of them is empty.
    queues: Vec<Queue>,
    pub count: usize,
    pub cores: u64,
    /// Queues of tasks that need more than a slot.
    large: usize,
    arrived: u64,
}

impl Waiting {
    /// A task comes, which is expected to take so long, milliseconds; 0: not known.
    pub(crate) fn push(&mut self, task: TaskId, need: &Need, expected_ms: u32) -> Rank {
        self.arrived += 1;
        self.count += 1;
        self.cores += u64::from(need.cores);
        let rank = (Reverse(if expected_ms == 0 { u32::MAX } else { expected_ms }), self.arrived);
        match self.queues.iter_mut().find(|queue| queue.need == *need) {
            Some(queue) => {
                queue.tasks.insert(rank, task);
            }
            None => {
                self.large += usize::from(is_large(need));
                self.queues.push(Queue { need: need.clone(), tasks: BTreeMap::from([(rank, task)]) });
            }
        }
        rank
    }

    pub(crate) fn remove(&mut self, rank: Rank, need: &Need) {
        let Some(at) = self.queues.iter().position(|queue| queue.need == *need) else { return };
        if self.queues[at].tasks.remove(&rank).is_none() {
            return;
        }
        self.count -= 1;
        self.cores -= u64::from(need.cores);
        if self.queues[at].tasks.is_empty() {
            self.large -= usize::from(is_large(need));
            self.queues.swap_remove(at);
        }
    }

    /// The first task of each need, in their order.
    pub(crate) fn firsts(&self) -> Vec<(TaskId, &Need)> {
        let first = |queue: &'_ Queue| queue.tasks.first_key_value().map(|(rank, task)| (*rank, *task));
        let mut firsts: Vec<_> =
            self.queues.iter().filter_map(|queue| first(queue).map(|head| (head, &queue.need))).collect();
        firsts.sort_unstable_by_key(|(head, _)| head.0);
        firsts.into_iter().map(|(head, need)| (head.1, need)).collect()
    }

    /// Whether any needs more than a slot.
    pub(crate) fn has_large(&self) -> bool {
        self.large > 0
    }

    /// All that need what `is_wanted` says.
    pub(crate) fn of_need(&self, is_wanted: impl Fn(&Need) -> bool) -> impl Iterator<Item = TaskId> {
        let queues = self.queues.iter().filter(move |queue| is_wanted(&queue.need));
        queues.flat_map(|queue| queue.tasks.values().copied())
    }
}

/// Whether others may take its room bit by bit for ever.
pub(crate) fn is_large(need: &Need) -> bool {
    need.cores > 1 || need.memory > 0
}
