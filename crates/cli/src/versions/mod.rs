//! Commands for versions of a volume's tree: snapshots, forks, differences, names by content and their signatures.

pub(crate) mod args;
pub(crate) mod commands;
pub(crate) mod diff;
pub(crate) mod mounted;
pub(crate) mod retention;
pub(crate) mod signatures;
pub(crate) mod verify;
