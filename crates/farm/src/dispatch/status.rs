//! What the farm looks like, for `hayloft farm status`. Keys of the JSON are stable; new ones may come.

use serde::{Deserialize, Serialize};

/// The farm.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Hosts, by agent.
    pub hosts: Vec<HostStatus>,
    /// Builds that have tasks, or whose submitter is there.
    pub builds: Vec<BuildStatus>,
    /// How long the agent that has answered dispatches already, milliseconds.
    pub dispatches_since_ms: u64,
}

/// A host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Its name.
    pub host: String,
    /// Its agent's id.
    pub agent: String,
    /// Slots that it has.
    pub slots: u32,
    /// Slots that are taken.
    pub busy: u32,
    /// Tasks that run there or are about to.
    pub tasks: usize,
    /// Memory that tasks may ask for in sum.
    pub memory_bytes: u64,
    /// Labels, its volumes among them (`volume=ID`).
    pub labels: Vec<String>,
    /// This agent gives slots to tasks.
    pub dispatches: bool,
    /// It takes nothing new.
    pub draining: bool,
    /// When it was heard last.
    pub silent_ms: u64,
}

/// A build.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BuildStatus {
    /// Its name.
    pub build: String,
    /// Whose.
    pub user: String,
    /// Nobody waits in front of it.
    pub batch: bool,
    /// Its weight among the user's builds.
    pub weight: u32,
    /// Tasks that run.
    pub running: usize,
    /// Tasks that wait.
    pub waiting: usize,
    /// Slots that these want.
    #[serde(default)]
    pub waiting_slots: u64,
    /// Slots that it has.
    pub slots: u32,
    /// Slots that it may have at the moment.
    pub share: f64,
}
