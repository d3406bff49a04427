//! Build roots, and the layers they are made of.

pub(crate) mod crash;
pub(crate) mod isolation;
pub(crate) mod layers;
pub(crate) mod memory;
pub(crate) mod modules;
pub(crate) mod publishing;
pub(crate) mod rebuilding;
pub(crate) mod running;
pub(crate) mod terminal;
pub(crate) mod user;
pub(crate) mod views;
