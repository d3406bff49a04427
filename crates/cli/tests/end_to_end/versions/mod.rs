//! Snapshots, forks, differences, names by content, sending and receiving.

pub(crate) mod combinations;
pub(crate) mod histories;
pub(crate) mod journal;
pub(crate) mod live;
pub(crate) mod merging;
pub(crate) mod names;
pub(crate) mod open_files;
pub(crate) mod transfer;
pub(crate) mod unusual;
