//! Commands for build roots and layers.

pub(crate) mod layer_args;
pub(crate) mod layers;
pub(crate) mod publish;
pub(crate) mod root;
pub(crate) mod root_args;
pub(crate) mod run;
pub(crate) mod stop;
