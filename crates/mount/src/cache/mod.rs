//! What is kept of files and rows in memory, and how much of it.

pub(crate) mod budget;
pub(crate) mod data;
pub(crate) mod memory;
pub(crate) mod trim;
