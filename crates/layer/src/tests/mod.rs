//! Changes and publishing, on real files and real overlay mounts. These tests need root.

mod live;
mod naming;
mod overlay;
mod publishing;
mod publishing_ends_early;
mod tree;

use std::path::Path;

use crate::{PublishOptions, Published, Result, Stack, Target};

/// A target in the folder that it is in.
fn target(path: &Path) -> Result<Target> {
    Target::open(path.parent().unwrap(), Path::new(path.file_name().unwrap()))
}

fn publish(stack: &Stack, path: &Path, options: &PublishOptions<'_>) -> Result<Published> {
    crate::publish(stack, target(path)?, options)
}
