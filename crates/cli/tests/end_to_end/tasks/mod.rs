//! Commands on other hosts, and makes whose recipes run there.

pub(crate) mod brokers;
pub(crate) mod faults;
pub(crate) mod make;
pub(crate) mod memory;
pub(crate) mod record;
pub(crate) mod roots;
pub(crate) mod running;
