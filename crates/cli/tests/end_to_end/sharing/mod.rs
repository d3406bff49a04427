//! Several hosts in one tree: what each sees of the others, and what it costs.

pub(crate) mod appends;
pub(crate) mod caching;
pub(crate) mod claims;
pub(crate) mod clients;
pub(crate) mod clocks;
pub(crate) mod coherence;
pub(crate) mod contention;
pub(crate) mod costs;
pub(crate) mod emptied;
pub(crate) mod exchanges;
pub(crate) mod hosts;
pub(crate) mod kinds;
pub(crate) mod late;
pub(crate) mod maps;
pub(crate) mod moves;
pub(crate) mod owners;
pub(crate) mod shared_files;
pub(crate) mod shared_locks;
pub(crate) mod split;
pub(crate) mod split_names;
pub(crate) mod views;
pub(crate) mod words;
