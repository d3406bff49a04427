//! New versions of folders, which take the place of the old ones in one step.

pub(crate) mod live;
pub(crate) mod options;
pub(crate) mod publish;
pub(crate) mod staging;
pub(crate) mod tree;
