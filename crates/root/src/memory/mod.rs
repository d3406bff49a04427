//! How much memory and how many processes a root may have, and where its pages go when its memory is not enough.

pub(crate) mod budget;
pub(crate) mod cgroup;
pub(crate) mod processes;
pub(crate) mod spill;
