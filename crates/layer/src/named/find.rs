//! The folders behind whatever names a layer.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Context, LayerError, Result};
use crate::modules::recipe::{Input, Recipe};
use crate::named::archive::{Sort, sort_of};
use crate::named::dir::{LayerInfo, LayersDir, check_name};
use crate::named::locks::lock_tree;

/// How often a generation that has gone meanwhile is looked up again.
const GONE_MAX: u32 = 10;

/// What a layer is given as.
#[derive(Debug)]
pub struct Found {
    /// A folder, or an image of a file system.
    pub path: PathBuf,
    /// Locked: as long as they are open somewhere, in whatever process, nobody removes the layer.
    pub in_use: Vec<File>,
    /// Device and inode of the folder that is locked: another one may have come to `path` since.
    pub identity: Option<(u64, u64)>,
}

/// Told of an archive that is unpacked: bytes done, and bytes in all.
type Unpacking<'a> = &'a dyn Fn(u64, u64);

/// The path of what a layer is given as: the tree of a named layer, a folder, the folder with an archive's content
/// (unpacked once for each version of the archive), or an image of a file system as it is.
///
/// Whatever has a `/` in it, or is `.` or `..`, is a path; anything else is a name.
///
/// # Errors
/// When there is no such layer, or it is no layer.
pub fn resolve(spec: &str, layers: &LayersDir) -> Result<PathBuf> {
    Ok(resolve_all(spec, layers, &|_, _| {})?.remove(0).path)
}

/// As [`resolve`], for one who uses it, with all layers that it is made upon: the topmost first, and at least one. `progress` is
/// told how many bytes of an archive are unpacked, and how many there are.
///
/// # Errors
/// See there.
pub fn resolve_all(spec: &str, layers: &LayersDir, progress: Unpacking<'_>) -> Result<Vec<Found>> {
    if is_name(spec) {
        check_name(spec)?;
        return stack_of(layers, spec, None, progress);
    }
    Ok(vec![resolve_path(Path::new(spec), layers, progress)?])
}

/// The layers of one generation of a layer, topmost first.
///
/// # Errors
/// When it is gone, or something below it is.
pub fn resolve_generation(layers: &LayersDir, name: &str, generation: u64) -> Result<Vec<Found>> {
    stack_of(layers, name, Some(generation), &|_, _| {})
}

/// Whether a text names a layer, and no folder or archive.
pub fn is_name(spec: &str) -> bool {
    !spec.contains('/') && spec != "." && spec != ".."
}

fn resolve_path(path: &Path, layers: &LayersDir, progress: Unpacking<'_>) -> Result<Found> {
    let path = fs::canonicalize(path).context("find the layer", path)?;
    let plain = |path| Found { path, in_use: Vec::new(), identity: None };
    if path.is_dir() {
        return Ok(plain(path));
    }
    match sort_of(&path).context("read the layer", &path)? {
        Sort::Image => Ok(plain(path)),
        Sort::Unknown => Err(LayerError::NotALayer {
            path,
            why: "it is no folder, no tar archive (plain, gzip, zstd, xz or bzip2) and no image (erofs, squashfs, ext4)"
                .to_owned(),
        }),
        _ => layers.unpacked(&path, progress),
    }
}

/// The layers of a generation, topmost first.
fn stack_of(
    layers: &LayersDir,
    name: &str,
    generation: Option<u64>,
    progress: Unpacking<'_>,
) -> Result<Vec<Found>> {
    let mut gone = 0;
    loop {
        let number = generation.map_or_else(|| layers.current(name), Ok)?;
        let (own, info) = match lock_generation(layers, name, number) {
            Err(error) if is_gone(&error) && generation.is_none() && gone < GONE_MAX => {
                gone += 1;
                continue;
            }
            other => other?,
        };
        let mut all = vec![own];
        if let Some(info) = info
            && let Some(recipe) = &info.recipe
        {
            all.extend(inputs(layers, name, recipe, None, progress)?);
        }
        return Ok(without_repeats(all));
    }
}

/// The layers that a recipe for a generation of the layer `name` is upon, topmost first. `own` is the tree of its first generation
/// as long as that is not there.
///
/// # Errors
/// When one of them is gone.
pub fn inputs(
    layers: &LayersDir,
    name: &str,
    recipe: &Recipe,
    own: Option<&Path>,
    progress: Unpacking<'_>,
) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    for input in &recipe.layers {
        all.extend(of_input(layers, input, progress)?);
    }
    all.extend(match (&recipe.on, own) {
        (Some(input), _) => of_input(layers, input, progress)?,
        (None, Some(own)) => vec![Found { path: own.to_owned(), in_use: Vec::new(), identity: None }],
        (None, None) => vec![lock_generation(layers, name, 1)?.0],
    });
    Ok(without_repeats(all))
}

/// A layer that is below twice is there once, as low as it is.
fn without_repeats(mut all: Vec<Found>) -> Vec<Found> {
    let paths: Vec<PathBuf> = all.iter().map(|found| found.path.clone()).collect();
    let mut at = 0;
    all.retain(|found| {
        at += 1;
        !paths[at..].contains(&found.path)
    });
    all
}

fn of_input(layers: &LayersDir, input: &Input, progress: Unpacking<'_>) -> Result<Vec<Found>> {
    match input.generation {
        Some(generation) => {
            stack_of(layers, &input.name, Some(generation), progress).map_err(|error| match is_gone(&error) {
                true => LayerError::Generation(format!(
                    "generation {generation} of the layer '{}', which is below, is gone",
                    input.name
                )),
                false => error,
            })
        }
        None => Ok(vec![resolve_path(Path::new(&input.name), layers, progress)?]),
    }
}

fn is_gone(error: &LayerError) -> bool {
    match error {
        LayerError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
        LayerError::NoLayer { .. } => true,
        _ => false,
    }
}

/// Locks a generation, and the one whose tree it has.
fn lock_generation(layers: &LayersDir, name: &str, number: u64) -> Result<(Found, Option<LayerInfo>)> {
    let folder = layers.folder_of(name, number);
    let (lock, identity) = match lock_tree(&folder) {
        // Then there is no layer, or one that nobody made by name.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            let path = layers.generation_tree(name, number)?;
            return Ok((Found { path, in_use: Vec::new(), identity: None }, None));
        }
        other => other.context("lock the layer", Path::new(name))?,
    };
    let info = LayerInfo::read(&folder).ok();
    if let Some(same_as) = info.as_ref().and_then(|info| info.same_as) {
        let of = layers.folder_of(name, same_as);
        let (own, identity) = lock_tree(&of).context("lock the layer", &of)?;
        let path = layers.generation_tree(name, same_as)?;
        return Ok((Found { path, in_use: vec![lock, own], identity }, info));
    }
    let path = layers.generation_tree(name, number)?;
    Ok((Found { path, in_use: vec![lock], identity }, info))
}

/// What a new layer is made from: the layers, and how a recipe names the one.
///
/// # Errors
/// When there is no such layer, or it cannot be named by content.
pub fn input(spec: &str, layers: &LayersDir, progress: Unpacking<'_>) -> Result<Input> {
    let named = |path: &Path| {
        hayloft_tree::walk(path, &hayloft_tree::Progress::default())
            .map(|walked| walked.name.to_string())
            .map_err(|error| LayerError::NotALayer { path: path.to_owned(), why: error.to_string() })
    };
    if is_name(spec) {
        let generation = layers.current(spec)?;
        let info = layers.generation(spec, generation)?;
        let tree = info.tree.map_or_else(|| named(&layers.tree(spec)?), Ok)?;
        return Ok(Input { name: spec.to_owned(), generation: Some(generation), tree });
    }
    let found = resolve_path(Path::new(spec), layers, progress)?;
    if !found.path.is_dir() {
        let why = "an image has no name by content: mount it, and name the folder".to_owned();
        return Err(LayerError::NotALayer { path: found.path, why });
    }
    let name = fs::canonicalize(spec).context("find the layer", Path::new(spec))?;
    Ok(Input { name: name.to_string_lossy().into_owned(), generation: None, tree: named(&found.path)? })
}
