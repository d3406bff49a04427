//! What has changed here, and its way to the server; what becomes of it when the session ends before.

pub(crate) mod accepted;
pub(crate) mod aside;
pub(crate) mod committer;
pub(crate) mod ledger;
pub(crate) mod rejoin;
pub(crate) mod replaced;
pub(crate) mod rescue;
