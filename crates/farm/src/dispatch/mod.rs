//! Who gets a slot where: the state of the agent that dispatches, around the scheduler.
//!
//! Pure: what was said comes in with the time, what is to be said goes out. Everything here is known to others as well: agents
//! tell what they have and what runs there, submitters what they want. So a new dispatcher needs nothing of the one before
//! it, and one that has heard something late is put right by the next beat. It decides where a task may start, never
//! whether it runs: an agent does not start more than it has slots, and a submitter never has one task started twice.

mod state;
mod status;
#[cfg(test)]
mod tests;

pub use state::{Dispatch, Say};
pub use status::{BuildStatus, HostStatus, Status};
