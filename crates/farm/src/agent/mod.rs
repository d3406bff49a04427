//! An agent: offers the slots of a host, runs tasks, and dispatches when it is the oldest one.

mod ending;
mod farm;
mod host;
mod leases;
mod mounts;
pub mod policy;
mod roots;
mod shortage;
mod task;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

pub use farm::run;
pub use policy::Policy;

use crate::broker::{BrokerError, BrokerOptions};

/// What an agent offers, and to whom.
#[derive(Debug)]
pub struct AgentConfig {
    /// Where the broker is.
    pub broker: BrokerOptions,
    /// The host's name in the farm.
    pub host: String,
    /// Slots: a task takes one, or as many as it says.
    pub slots: u32,
    /// Memory that tasks may ask for in sum, bytes.
    pub memory: u64,
    /// What tasks may ask for by name.
    pub labels: Vec<String>,
    /// The mounts whose volumes tasks may use; all of this host when empty.
    pub mounts: Vec<PathBuf>,
    /// As whom tasks run.
    pub policy: Policy,
    /// How long tasks run on without word of who has submitted them.
    pub lease: Duration,
    /// So long what runs may run on after the first signal to end.
    pub grace: Duration,
    /// Runs this program as the process that starts tasks: with [`crate::execution::SPAWNER_ARGUMENT`].
    pub spawner: Command,
    /// Arguments of this program that stand before a verb, for build roots.
    pub arguments: Vec<OsString>,
}

/// Why an agent has ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// See [`BrokerError`].
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// Tasks cannot be started on this host.
    #[error("tasks cannot be started: {0}")]
    Spawner(#[source] std::io::Error),
    /// The process that starts tasks has ended, and all tasks with it: start the agent again.
    #[error("the process that starts tasks has ended: start the agent again")]
    SpawnerEnded,
}
