//! Commands for servers and their volumes.

pub(crate) mod admin;
pub(crate) mod args;
pub(crate) mod cert;
pub(crate) mod cert_args;
pub(crate) mod clients;
pub(crate) mod serve;
pub(crate) mod signers;
pub(crate) mod snapshots;
pub(crate) mod stats;
pub(crate) mod volume;
