//! What overlayfs shows of layers, and what its upper folder changes.

pub(crate) mod changes;
pub(crate) mod stack;
