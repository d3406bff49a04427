//! GNU make, unchanged, whose recipes run on the farm.
//!
//! `make` is told by a file of `MAKEFILES` (`hook`) to run each recipe by way of [`recipe`], which asks the `session`, the process that
//! has started make, where it is to run: here, in a slot of this host, or on the farm. Recipes that make gives its job server (those with `+`,
//! and sub-makes), and `$(shell)`, are left alone.

pub mod arguments;
mod direct;
mod history;
mod hook;
pub mod recipe;
pub mod record;
mod session;
mod wire;

pub use hook::Hook;
pub use session::{Explained, How, InRoot, Session, Tally};
