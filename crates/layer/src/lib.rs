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
//! | `modules` | modules, their streams and profiles, and the recipe of a layer that is made of them |
//! | `named` | layers that have a name, their generations, and what they are made from |

mod error;
mod files;
mod modules;
mod named;
mod overlay;
mod publication;

#[cfg(test)]
mod tests;

pub use error::{LayerError, Result};
pub use files::copy::{Lost, sync_filesystem};
pub use files::folder::FileKind;
pub use files::mounts::{MountLine, mount_over};
pub use modules::catalogue::{Catalogue, HookFile, Module, Play, Profile, Stream};
pub use modules::recipe::{Hook, HookKind, Input, Installed, PackageDifference, Recipe, package_differences};
pub use modules::script::{HOOKS, Manager, READ_LISTS, Told, script};
pub use modules::select::{Enabled, Selection, select};
pub use modules::words::{Choice, Package, Word};
pub use named::child::ends_with_us;
pub use named::create::{CreateOptions, LayerSource, create, make_first};
pub use named::dir::{LayerInfo, LayersDir};
pub use named::find::{Found, input, inputs, is_name, resolve, resolve_all, resolve_generation};
pub use named::generations::{Draft, Pruned};
pub use overlay::changes::{Aspects, Change, ChangeKind, changes};
pub use overlay::stack::{Marks, Stack};
pub use publication::live::{Applied, Live, View, plan_live};
pub use publication::options::{Durable, Form, PublishOptions, Published};
pub use publication::publish::{Target, mounted_below, publish};
