//! Build roots: namespaces, an overlay whose upper layer is in memory, a memory budget, and spill.
//!
//! Receives paths and never speaks to a server: layers and binds on a Hayloft mount are folders like any other.

mod error;
pub mod state;

pub use error::{Error, Result};
pub use state::{RootInfo, RootState, Roots};
