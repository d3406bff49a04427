//! Build roots: namespaces, an overlay whose upper layer is in memory, a memory budget, and spill.
//!
//! Receives paths and never speaks to a server: layers and binds on a Hayloft mount are folders like any other.
//!
//! Three processes: the caller ([`start`], `watch`), the root's first process (`holder`), and the command
//! (`task`). `tree` says what the root looks like inside, `state` what other processes see of it.

mod budget;
mod cgroup;
mod collect;
mod enter;
mod error;
mod holder;
mod loops;
mod mapping;
mod mounts;
mod overlay;
pub mod program;
mod report;
mod run;
mod seccomp;
mod spec;
mod spill;
mod standard;
pub mod state;
mod sweep;
mod sys;
mod task;
mod terminal;
mod tree;
mod userns;
mod users;
mod watch;

pub use collect::collect;
pub use enter::{enter, remove, sweep_dead};
pub use error::{Error, Result};
pub use report::TaskEnd;
pub use run::{Outcome, Running, start};
pub use spec::{Bind, Layer, Network, Spec, Spill, Task, check_place};
pub use state::{RootInfo, RootState, Roots, SpillInfo};
pub use userns::with_subordinate_users;
