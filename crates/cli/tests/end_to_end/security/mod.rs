//! Nobody gets in, and nobody reads what lies on the disk.

pub(crate) mod access;
pub(crate) mod at_rest;
