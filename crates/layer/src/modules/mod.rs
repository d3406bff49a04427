//! Modules, their streams and profiles, and the recipe of a layer that is made of them. Nothing here touches a layer.

pub(crate) mod catalogue;
pub(crate) mod recipe;
pub(crate) mod script;
pub(crate) mod select;
pub(crate) mod words;
