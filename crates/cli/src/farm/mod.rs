//! The farm: `hayloft task`, `make` and `farm agent|status|top|slurm`.

mod again;
pub(crate) mod agent;
pub(crate) mod args;
pub(crate) mod here;
pub(crate) mod make;
mod progress;
mod recorded;
pub(crate) mod settings;
pub(crate) mod slurm;
pub(crate) mod status;
pub(crate) mod task;
