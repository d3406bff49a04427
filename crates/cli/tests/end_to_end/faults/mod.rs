//! Nothing is lost: crashes, and networks, stores and hosts that misbehave.

pub(crate) mod closed;
pub(crate) mod connections;
pub(crate) mod crash;
pub(crate) mod crash_points;
pub(crate) mod crash_points_local;
pub(crate) mod crash_points_versions;
pub(crate) mod crowd;
pub(crate) mod damage;
pub(crate) mod damaged_store;
pub(crate) mod faulty_store;
pub(crate) mod mangled;
pub(crate) mod rejoin;
pub(crate) mod server_loss;
pub(crate) mod torn;
pub(crate) mod unsent;
