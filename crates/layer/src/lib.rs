//! Layers at rest: what build roots are made of, and what they leave behind.
//!
//! - [`LayersDir`] keeps layers by name, and [`resolve`] finds the folder behind a name, a path or an archive;
//! - [`create`] makes a layer from a Debian archive, RPM packages, a tar archive or a folder;
//! - [`changes`] tells what an overlay's upper folder changes, and [`publish`] puts that into a folder, atomically.
//!
//! A room (folder of `src`) uses only those above it (`crates/cli/tests/layers.rs` checks that):
//!
//! | room | what is there |
//! |---|---|
//! | `files` | folders and files, reached from descriptors |
//! | `overlay` | what overlayfs shows of layers, and what its upper folder changes |
//! | `publication` | new versions of folders, which take the place of the old ones in one step |
//! | `named` | layers that have a name, and what they are made from |

mod error;
mod files;
mod named;
mod overlay;
mod publication;

#[cfg(test)]
mod tests;

pub use error::{LayerError, Result};
pub use files::copy::{Lost, sync_filesystem};
pub use files::folder::FileKind;
pub use files::mounts::{MountLine, mount_over};
pub use named::create::{CreateOptions, LayerSource, create};
pub use named::dir::{Found, LayerInfo, LayersDir, resolve, resolve_with};
pub use overlay::changes::{Aspects, Change, ChangeKind, changes};
pub use overlay::stack::{Marks, Stack};
pub use publication::publish::{Durable, Form, PublishOptions, Published, Target, mounted_below, publish};
