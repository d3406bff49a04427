//! Who gets which slot: weighted max-min fairness between builds, and users above them.
//!
//! Pure: no clock, no randomness, no I/O. The time is an argument, in milliseconds since any moment; the same calls give
//! the same answers. A dispatcher of many hosts and a program that has its own cores only use the same code.
//!
//! The rules, in their order:
//! 1. Interactive builds come before batch builds, but for a part of the farm that batch builds have at any moment when
//!    they want it ([`Config::batch_percent`]).
//! 2. Of the users with waiting tasks the one goes first who has least for his weight, counted by what is scarcest of what he
//!    has (dominant resource fairness, Ghodsi et al., NSDI 2011); of his builds the one that has least for its weight; of equal
//!    ones the one that was served longest ago. So whatever is free goes to whoever has work, and who has less
//!    than his share gets the next slot that is given back.
//! 3. Of a build's tasks those go first of which nothing is known, then those that are expected to take longest (Graham, 1969), of equal ones
//!    the one that came first; one that has no room goes behind those that have.
//! 4. A task that has waited for room for [`Config::patience_ms`], since it needs more than is free on any host, gets a host
//!    reserved: nothing else starts there until it has room.
//! 5. A host that has run tasks of the same build is preferred to one that has not, unless it has less than half as much free.

mod hosts;
mod order;
mod scheduler;
pub mod share;
#[cfg(test)]
mod tests;
mod waiting;

use std::collections::BTreeSet;

pub use scheduler::Scheduler;

/// A host of the farm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u64);

/// A build: tasks that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BuildId(pub u64);

/// A task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u64);

/// How the farm is divided.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// The part of all cores that batch builds get before interactive ones.
    pub batch_percent: u8,
    /// How long a large task waits before a host is kept free for it.
    pub patience_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config { batch_percent: 20, patience_ms: 2_000 }
    }
}

/// What a host has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    /// Slots: a task of one core takes one.
    pub cores: u32,
    /// Bytes that tasks may use in sum.
    pub memory: u64,
    /// What tasks may ask for by name.
    pub labels: BTreeSet<String>,
}

/// What a task needs of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Slots, at least one.
    pub cores: u32,
    /// Bytes of memory; 0: not said.
    pub memory: u64,
    /// Labels that the host must have.
    pub labels: BTreeSet<String>,
    /// Hosts that it must not go to, such as one where it was lost.
    pub not: BTreeSet<HostId>,
}

impl Default for Need {
    fn default() -> Self {
        Need { cores: 1, memory: 0, labels: BTreeSet::new(), not: BTreeSet::new() }
    }
}

impl Need {
    /// Whether a host could run it when nothing else runs there.
    pub fn fits(&self, id: HostId, host: &Host) -> bool {
        self.cores <= host.cores
            && self.memory <= host.memory
            && self.labels.is_subset(&host.labels)
            && !self.not.contains(&id)
    }
}

/// Whether somebody looks at a build while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Class {
    /// Goes first.
    #[default]
    Interactive,
    /// Goes when there is room, and in its guaranteed part.
    Batch,
}

/// Whose build, and how much of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Build {
    /// Builds of one user share what the user gets.
    pub user: String,
    /// Whether somebody looks at it.
    pub class: Class,
    /// Its part among the user's builds; at least 1.
    pub weight: u32,
}

/// A task that may start now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assignment {
    /// Which.
    pub task: TaskId,
    /// Whose.
    pub build: BuildId,
    /// Where.
    pub host: HostId,
}

/// A host as [`Scheduler::hosts`] tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLoad {
    /// Which.
    pub id: HostId,
    /// Slots that it has.
    pub cores: u32,
    /// Slots that are taken.
    pub busy: u32,
    /// Tasks that run there.
    pub tasks: usize,
    /// Kept free for a large task.
    pub reserved: bool,
}

/// A build as [`Scheduler::builds`] tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct BuildLoad {
    /// Which.
    pub id: BuildId,
    /// Whose, and how.
    pub build: Build,
    /// Tasks that wait.
    pub waiting: usize,
    /// Slots that these want.
    pub waiting_cores: u64,
    /// Tasks that run.
    pub running: usize,
    /// Slots that these take.
    pub cores: u32,
    /// Slots that it may have at the moment, by its weight and by what others want.
    pub share: f64,
}
