//! Publishing what a build root has changed.

use std::path::{Component, Path, PathBuf};

use rustix::fs;

use crate::error::{Context, LayerError, Result};
use crate::files::folder::Folder;
use crate::overlay::changes::Walk;
use crate::overlay::stack::Stack;
use crate::publication::options::{Form, PublishOptions, Published};
use crate::publication::staging::Staging;
use crate::publication::tree::Tree;

/// Publishes the changes of a root: the target is, for everybody who looks, what it was or what it becomes.
///
/// The new version is made beside the target, in the same file system, from hard links to what stays and copies of
/// what is new; then one rename(2) puts it in its place, and the old one is removed. Files are replaced, never written
/// in place.
///
/// # Errors
/// When the target cannot be published to, or something cannot be read or written; the target is as it was then. With
/// [`LayerError::NotDurable`] alone the new version is there, and the old one beside it until the next one publishes there.
pub fn publish(stack: &Stack, target: Target, options: &PublishOptions<'_>) -> Result<Published> {
    let (mut staging, published) = stage(stack, target, options)?;
    let path = staging.target();
    let parent = staging.parent().again().context("open the folder of", &path)?;
    let durable = |of: &Path| match options.durable {
        Some(durable) => durable(of),
        None => Ok(fs::syncfs(&parent)?),
    };
    hayloft_crash::point("publish.staged");
    durable(&staging.path()).context("make durable", &path)?;
    hayloft_crash::point("publish.staged-durable");
    staging.commit()?;
    hayloft_crash::point("publish.exchanged");
    if let Err(source) = durable(&path) {
        staging.leave();
        return Err(LayerError::NotDurable { path, source });
    }
    hayloft_crash::point("publish.durable");
    staging.end();
    Ok(published)
}

/// A folder that is published to, there or not. As long as this is there nobody else publishes to it, nor to a folder above
/// or below it in the same volume.
#[derive(Debug)]
pub struct Target {
    staging: Staging,
}

impl Target {
    /// Waits for the folder at `path` in `volume`; links are followed to `volume` only. What is missing above the folder is
    /// made.
    ///
    /// # Errors
    /// When the path leads out of the volume, or something above it is no folder or cannot be opened.
    pub fn open(volume: &Path, path: &Path) -> Result<Target> {
        Ok(Target { staging: Staging::begin_below(volume, path)? })
    }

    /// Says before a long build what would fail after it: looks whether [`Target::open`] would find something there that cannot
    /// be replaced, or a file system that cannot be written. Nothing is changed.
    ///
    /// # Errors
    /// What [`Target::open`] would fail with; a folder that this user may not write to.
    pub fn check(volume: &Path, path: &Path) -> Result<()> {
        Staging::check_below(volume, path)
    }

    /// Where the folder that it is in is on the host, links resolved.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn parent(&self) -> Result<PathBuf> {
        self.staging.parent().host_path().context("find the folder of", self.staging.target())
    }
}

/// Makes the new version.
pub(crate) fn stage(
    stack: &Stack,
    target: Target,
    options: &PublishOptions<'_>,
) -> Result<(Staging, Published)> {
    let staging = target.staging;
    let target = staging.target();
    let there = staging.there()?;
    if there.is_some_and(|there| !there.is_folder()) {
        return Err(LayerError::Target { path: target, why: "it is no folder".to_owned() });
    }
    let old = staging.old()?;
    let mut tree = Tree::make(stack, &staging, options)?;
    if let Some(old) = old.filter(|_| options.form == Form::Merged) {
        tree.link_all(&old).context("link what stays of", target)?;
    }
    let only: Vec<PathBuf> = options.only.iter().map(|path| below_top(path)).collect();
    let mut used = vec![false; only.len()];
    let mut applied = 0;
    let as_layer = options.form == Form::Layer;
    let main = (Path::new(""), stack);
    let mounted = options.mounted.iter().map(|(at, stack)| (at.as_path(), stack));
    for (at, stack) in std::iter::once(main).chain(mounted) {
        for change in Walk::new(stack, as_layer).below(at, &only) {
            let change = change?;
            tree.check_stop()?;
            let mut chosen = only.is_empty();
            for (path, used) in only.iter().zip(&mut used) {
                if change.path.starts_with(path) {
                    (chosen, *used) = (true, true);
                }
            }
            if !chosen {
                continue;
            }
            tree.apply(&change, stack)?;
            applied += 1;
            if let Some(progress) = options.progress.filter(|_| applied % 256 == 0) {
                progress(applied);
            }
        }
    }
    if let Some(unused) = used.iter().position(|used| !used) {
        return Err(LayerError::NotChanged(Path::new("/").join(&only[unused])));
    }
    tree.check_stop()?;
    let published = tree.finish()?;
    Ok((staging, published))
}

/// Folders that are mounted in a root's tree and that chosen paths lead into: memory of their own, or binds. Overlayfs
/// knows nothing of what is in them.
///
/// # Errors
/// When the tree cannot be opened.
pub fn mounted_below(merged: &Path, only: &[PathBuf]) -> Result<Vec<(PathBuf, Stack)>> {
    let top = Folder::open(merged).context("open", merged)?;
    let mut found: Vec<(PathBuf, Stack)> = Vec::new();
    for path in only {
        let (mut at, mut mounted) = (PathBuf::new(), None);
        let mut device = top.own_meta().context("look at", merged)?.inode.0;
        for name in &below_top(path) {
            at.push(name);
            // A file, or nothing: told later when it has not changed.
            let Ok(folder) = top.sub(&at) else { break };
            let meta = folder.own_meta().context("look at", merged.join(&at))?;
            if meta.inode.0 != device {
                device = meta.inode.0;
                mounted = Some((at.clone(), folder));
            }
        }
        if let Some((at, folder)) = mounted
            && found.iter().all(|(other, _)| *other != at)
        {
            let stack = Stack::of_folder(folder, merged.join(&at));
            found.push((at, stack));
        }
    }
    Ok(found)
}

/// Copies everything in a stack's view into an empty folder.
pub(crate) fn copy_tree(stack: &Stack, into: &Path, progress: &dyn Fn(u64)) -> Result<()> {
    let options = PublishOptions { durable: Some(&|_| Ok(())), ..Default::default() };
    let mut tree = Tree::new(stack, Folder::open(into).context("open", into)?, &options)?;
    for (at, change) in Walk::new(stack, false).enumerate() {
        tree.apply(&change?, stack)?;
        if at % 256 == 0 {
            progress(at as u64);
        }
    }
    tree.finish().map(drop)
}

/// A path of the root without what makes it absolute.
fn below_top(path: &Path) -> PathBuf {
    path.components().filter(|step| matches!(step, Component::Normal(_))).collect()
}
