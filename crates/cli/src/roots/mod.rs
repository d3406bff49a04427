//! Commands for build roots and layers.

pub(crate) mod compose;
mod counts;
pub(crate) mod generations;
pub(crate) mod layer_args;
pub(crate) mod layers;
pub(crate) mod live;
pub(crate) mod module_args;
pub(crate) mod modules;
pub(crate) mod publish;
pub(crate) mod root;
pub(crate) mod root_args;
pub(crate) mod run;
pub(crate) mod spec;
pub(crate) mod stop;
