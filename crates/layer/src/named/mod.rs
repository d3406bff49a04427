//! Layers that have a name, their generations, and what they are made from.

mod apt;
pub(crate) mod archive;
pub(crate) mod child;
pub(crate) mod create;
pub(crate) mod dir;
pub(crate) mod find;
pub(crate) mod generations;
mod locks;
mod unpacked;
