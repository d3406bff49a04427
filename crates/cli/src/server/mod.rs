//! Commands for servers and their volumes.

pub(crate) mod admin;
pub(crate) mod cert;
pub(crate) mod cert_args;
pub(crate) mod clients;
pub(crate) mod diff;
pub(crate) mod retention;
pub(crate) mod serve;
pub(crate) mod stats;
pub(crate) mod versions;
pub(crate) mod versions_args;
pub(crate) mod volume;
