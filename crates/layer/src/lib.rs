//! Layers at rest: what build roots are made of, and what they leave behind.
//!
//! - [`LayersDir`] keeps layers by name, and [`resolve`] finds the folder behind a name, a path or an archive;
//! - [`create`] makes a layer from a Debian archive, RPM packages, a tar archive or a folder;
//! - [`changes`] tells what an overlay's upper folder changes, and [`publish`] puts that into a folder, atomically.

mod apt;
mod archive;
mod changes;
mod child;
mod copy;
mod create;
mod error;
mod folder;
mod mounts;
mod named;
mod publish;
mod removal;
mod stack;
mod staging;

#[cfg(test)]
mod tests;

pub use changes::{Aspects, Change, ChangeKind, changes};
pub use copy::{Lost, sync_filesystem};
pub use create::{CreateOptions, LayerSource, create};
pub use error::{LayerError, Result};
pub use folder::FileKind;
pub use mounts::{MountLine, mount_over};
pub use named::{Found, LayerInfo, LayersDir, resolve, resolve_with};
pub use publish::{Durable, Form, PublishOptions, Published, Target, mounted_below, publish};
pub use stack::{Marks, Stack};
