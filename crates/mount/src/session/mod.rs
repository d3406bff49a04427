//! The session with the server: its connection, and what arrives on it.

pub(crate) mod link;
pub(crate) mod reader;
pub(crate) mod writer;
