//! What the tests share: servers, mounts, roots, networks, and what is compared with.

pub(crate) mod agents;
pub(crate) mod calls;
pub(crate) mod farm;
pub(crate) mod mangler;
pub(crate) mod model;
pub(crate) mod net;
pub(crate) mod place;
pub(crate) mod root_box;
pub(crate) mod small_debian;
pub(crate) mod watchdog;
pub(crate) mod workers;
