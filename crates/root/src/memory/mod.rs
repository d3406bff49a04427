//! How much memory a root may have, and where its pages go when that is not enough.

pub(crate) mod budget;
pub(crate) mod cgroup;
pub(crate) mod spill;
