//! Users and groups of a root, and what they are on the host.

pub(crate) mod mapping;
pub(crate) mod userns;
pub(crate) mod users;
