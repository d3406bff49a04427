//! What a caller does with roots: run one, enter it, collect what it has made, remove what is left of one.

pub(crate) mod beside;
pub(crate) mod collect;
pub(crate) mod enter;
pub(crate) mod run;
pub(crate) mod sweep;
