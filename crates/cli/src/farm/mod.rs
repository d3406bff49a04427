//! The farm: `hayloft task` and `farm agent|status|top`.

pub(crate) mod agent;
pub(crate) mod args;
pub(crate) mod here;
pub(crate) mod settings;
pub(crate) mod status;
pub(crate) mod task;
