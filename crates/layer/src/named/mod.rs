//! Layers that have a name, and what they are made from.

mod apt;
pub(crate) mod archive;
mod child;
pub(crate) mod create;
pub(crate) mod dir;
