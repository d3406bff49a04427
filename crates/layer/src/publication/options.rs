//! What is published how, and what that did.

use std::io;
use std::path::{Path, PathBuf};

use crate::files::copy::Lost;
use crate::overlay::stack::Stack;

/// What is published as what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Form {
    /// The target gets what was added and changed, and loses what was removed; the rest of it stays as it is.
    #[default]
    Merged,
    /// The target becomes a layer: the changes alone, with whiteouts and opaque folders for what was removed.
    Layer,
}

/// A function that waits until what was written to a folder's file system is durable.
pub type Durable<'a> = dyn Fn(&Path) -> io::Result<()> + 'a;

/// How to publish.
#[derive(Default)]
pub struct PublishOptions<'a> {
    /// As what.
    pub form: Form,
    /// Only what is at or below these paths of the root; all changes when empty.
    pub only: &'a [PathBuf],
    /// Folders of the root that are no part of the overlay, each with where it is in the root: see [`mounted_below`](crate::mounted_below).
    /// What is chosen in them is published as it is.
    pub mounted: &'a [(PathBuf, Stack)],
    /// Waits until what was written to the target's file system is durable. Called with a folder in it, before and
    /// after the new version takes its place. Without it syncfs(2) is called.
    pub durable: Option<&'a Durable<'a>>,
    /// Called now and then with the number of changes applied so far.
    pub progress: Option<&'a dyn Fn(u64)>,
    /// Asked now and then whether to stop, until the new version takes its place.
    pub stop: Option<&'a dyn Fn() -> bool>,
}

/// What was published.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Published {
    /// Paths made or made anew.
    pub written: u64,
    /// Paths removed, each with everything below; as a layer: whiteouts.
    pub removed: u64,
    /// Bytes of content written.
    pub bytes: u64,
    /// What only root could have kept.
    pub lost: Lost,
}
