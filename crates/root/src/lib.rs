//! Build roots: namespaces, an overlay whose upper layer is in memory, a memory budget, and spill.
//!
//! Receives paths and never speaks to a server: layers and binds on a Hayloft mount are folders like any other.
//!
//! Three processes: the caller ([`start`]), the root's first process (`inside::holder`), and the command
//! (`inside::task`). `state` is what other processes see of a root. A room uses only those above it
//! (`crates/cli/tests/layers.rs` checks that):
//!
//! | room | what is there |
//! |---|---|
//! | `memory` | how much memory and how many processes a root may have, and where its pages go when memory is not enough |
//! | `tree` | what the root looks like inside |
//! | `identity` | users and groups, and what they are on the host |
//! | `terminal` | terminals and standard streams, signals, waiting for the end |
//! | `inside` | the processes inside |
//! | `command` | what a caller does with roots |

mod command;
mod error;
mod identity;
mod inside;
mod kernel;
mod loops;
mod memory;
mod report;
mod spec;
pub mod state;
mod sys;
mod terminal;
mod tree;

pub use command::beside::beside;
pub use command::collect::collect;
pub use command::enter::{enter, remove, sweep_dead};
pub use command::run::{Outcome, Running, start};
pub use error::{Error, Result};
pub use identity::userns::with_subordinate_users;
pub use inside::program;
pub use report::TaskEnd;
pub use spec::{Bind, Layer, Network, Spec, Spill, Task, check_place};
pub use state::{RootInfo, RootState, Roots, SpillInfo};
