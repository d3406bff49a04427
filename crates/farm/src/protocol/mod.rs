//! What agents, the dispatcher and submitters say to each other by way of the broker: subjects, messages, and streams of bytes.
//!
//! A broker may lose what is under way when it ends. So nothing is said once: who needs an answer says it again until there is
//! one, and everything is numbered such that a second time changes nothing.

mod messages;
mod record;
mod reminder;
mod stream;

use std::time::Duration;

pub use messages::*;
pub use record::{Accessed, Files, Record};
pub(crate) use reminder::Reminder;
pub use stream::{CHUNK, Incoming, Outgoing, Part, WINDOW};

/// How often agents and submitters say what they have.
pub const BEAT: Duration = Duration::from_millis(500);
/// An agent that was not heard for so long does not dispatch any more, and gets no tasks.
pub const SILENCE: Duration = Duration::from_millis(2_000);

/// What agents say of themselves, every [`BEAT`]; heard by the agent that dispatches.
pub const AGENTS: &str = "hayloft.1.agents";
/// That an agent is there: said while it dispatches, and while nobody does; heard by all agents.
pub const SEEN: &str = "hayloft.1.seen";
/// For the agent that dispatches: only that one listens.
pub const DISPATCH: &str = "hayloft.1.dispatch";
/// A dispatcher has begun: agents and submitters say at once what they have.
pub const BEGUN: &str = "hayloft.1.begun";
/// Requests for the state of the farm, answered by the dispatcher.
pub const STATUS: &str = "hayloft.1.status";

/// What is for one agent.
pub fn agent_subject(id: &str) -> String {
    format!("hayloft.1.agent.{id}")
}

/// Where the broker tells an agent that nobody has heard what it said to a submitter; of all submitters with `*`.
pub fn unheard_subject(id: &str, client: &str) -> String {
    format!("hayloft.1.agent.{id}.{client}")
}

/// What is for one submitter. `about` is a word: the broker says itself there that nobody has heard a message.
pub fn client_subject(id: &str, about: &str) -> String {
    format!("hayloft.1.client.{id}.{about}")
}

/// An id that nobody else has: of a host's name, a process and a moment.
pub fn new_id(host: &str) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let host: String = host.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    format!("{host}-{}-{:x}", std::process::id(), now.as_nanos())
}
