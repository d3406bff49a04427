//! Generations of a layer. Each change is a new one, with a number of its own; the one with the highest number is the layer.
//!
//! A generation is made beside the layer and comes to be by one rename(2), so there is no half of one. One that goes back to another has
//! no tree of its own: its `layer.json` says whose it has.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, RenameFlags};

use crate::error::{Context, LayerError, Result};
use crate::files::copy::sync_filesystem;
use crate::named::dir::{INFO, LayerInfo, LayersDir, OLD, TREE, check_name, close, now};
use crate::named::locks::{Use, use_of, use_of_all};
use crate::publication::staging::Staging;

/// Where the generations are, in a layer's folder.
pub(super) const GENERATIONS: &str = "generations";

/// What [`LayersDir::prune`] has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Pruned {
    /// Generations that are gone.
    pub removed: Vec<u64>,
    /// Old ones that a root uses, or a layer is made from.
    pub in_use: Vec<u64>,
}

impl LayersDir {
    /// The numbers of a layer's generations, the newest last.
    ///
    /// # Errors
    /// When there is no such layer.
    pub fn generations(&self, name: &str) -> Result<Vec<u64>> {
        check_name(name)?;
        let folder = self.base().join(name);
        let mut numbers = Vec::new();
        if folder.join(TREE).is_dir() {
            numbers.push(1);
        }
        for entry in fs::read_dir(folder.join(GENERATIONS)).into_iter().flatten().flatten() {
            numbers.extend(entry.file_name().to_str().and_then(|text| text.parse::<u64>().ok()));
        }
        numbers.sort_unstable();
        if numbers.is_empty() {
            return Err(LayerError::NoLayer { name: name.to_owned(), base: self.base().to_owned() });
        }
        Ok(numbers)
    }

    /// The number of its newest generation, which is what the layer is.
    ///
    /// # Errors
    /// When there is no such layer.
    pub fn current(&self, name: &str) -> Result<u64> {
        Ok(self.generations(name)?.into_iter().next_back().unwrap_or(1))
    }

    /// The folder of a generation.
    pub(super) fn folder_of(&self, name: &str, number: u64) -> PathBuf {
        let layer = self.base().join(name);
        let own = layer.join(GENERATIONS).join(number.to_string());
        if number == 1 && !own.is_dir() { layer } else { own }
    }

    /// What is known of a generation.
    ///
    /// # Errors
    /// When there is none of that number, or its `layer.json` is not ours.
    pub fn generation(&self, name: &str, number: u64) -> Result<LayerInfo> {
        let all = self.generations(name)?;
        if !all.contains(&number) {
            let all: Vec<String> = all.iter().map(u64::to_string).collect();
            return Err(LayerError::Generation(format!(
                "the layer '{name}' has no generation {number}: there are {}",
                all.join(", ")
            )));
        }
        LayerInfo::read(&self.folder_of(name, number))
    }

    /// The tree of a generation: what it adds to the layers below it.
    ///
    /// # Errors
    /// When there is none.
    pub fn generation_tree(&self, name: &str, number: u64) -> Result<PathBuf> {
        check_name(name)?;
        let folder = self.folder_of(name, number);
        let tree = folder.join(TREE);
        if tree.is_dir() {
            return Ok(tree);
        }
        let same_as = LayerInfo::read(&folder).ok().and_then(|info| info.same_as);
        let tree = same_as.map(|same_as| self.folder_of(name, same_as).join(TREE));
        tree.filter(|tree| tree.is_dir())
            .ok_or_else(|| LayerError::NoLayer { name: name.to_owned(), base: self.base().to_owned() })
    }

    /// Where files are that a generation was made with and that belong to no tree.
    pub fn generation_files(&self, name: &str, number: u64) -> PathBuf {
        let folder = self.folder_of(name, number);
        let same_as = LayerInfo::read(&folder).ok().and_then(|info| info.same_as);
        same_as.map_or(folder, |same_as| self.folder_of(name, same_as))
    }

    /// All generations of a layer, the newest last.
    ///
    /// # Errors
    /// When there is no such layer.
    pub fn history(&self, name: &str) -> Result<Vec<(u64, LayerInfo)>> {
        let numbers = self.generations(name)?;
        // One that is just being pruned is not there.
        let read = |number| Some((number, LayerInfo::read(&self.folder_of(name, number)).ok()?));
        Ok(numbers.into_iter().filter_map(read).collect())
    }

    /// The layers, other than itself, that have a generation that was made from one of `name`: which layer, and of which generation.
    fn made_from(&self, name: &str) -> Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for (other, _) in self.list()? {
            for (_, info) in self.history(&other)? {
                let Some(recipe) = info.recipe else { continue };
                let inputs = recipe.on.iter().chain(&recipe.layers);
                let ours = inputs.filter(|input| input.name == name).filter_map(|input| input.generation);
                found.extend(ours.map(|generation| (other.clone(), generation)));
            }
        }
        Ok(found)
    }

    /// Fails when a layer is made upon this one.
    ///
    /// # Errors
    /// Which.
    pub fn refuse_if_below(&self, name: &str) -> Result<()> {
        let made = self.made_from(name)?;
        match made.iter().find(|(other, _)| other != name) {
            Some((other, _)) => Err(LayerError::Below { name: name.to_owned(), above: other.clone() }),
            None => Ok(()),
        }
    }

    /// Begins a layer, or a generation of one, when nobody else makes one of that name.
    ///
    /// # Errors
    /// When it cannot be made there.
    pub fn draft(&self, name: &str) -> Result<Draft<'_>> {
        check_name(name)?;
        fs::create_dir_all(self.base()).context("make", self.base())?;
        let staging = Staging::begin(self.base(), name.as_ref())?;
        let top = staging.path();
        fs::create_dir(&top).context("make", &top)?;
        close(&top)?;
        Ok(Draft { layers: self, name: name.to_owned(), top, staging })
    }

    /// Makes a generation that has the tree of an older one. Gives its number.
    ///
    /// # Errors
    /// When there is no such generation.
    pub fn rollback(&self, name: &str, to: Option<u64>) -> Result<u64> {
        let draft = self.draft(name)?;
        let all = self.generations(name)?;
        let current = self.current(name)?;
        let before = all.iter().rev().nth(1).copied();
        let Some(to) = to.or(before) else {
            return Err(LayerError::Generation(format!(
                "the layer '{name}' has one generation, and none to go back to"
            )));
        };
        let target = self.generation(name, to)?;
        let source = target.same_as.unwrap_or(to);
        if self.generation(name, current)?.same_as.unwrap_or(current) == source {
            return Err(LayerError::Generation(format!("the layer '{name}' is what generation {to} is")));
        }
        let info = LayerInfo {
            same_as: Some(source),
            why: Some(format!("rollback to {to}")),
            created: now(),
            ..target
        };
        let (number, folder) = draft.next_generation()?;
        info.write(&folder)?;
        draft.commit(number)
    }

    /// Removes all but the newest `keep` generations, and those that are in use, or that a generation that stays is made from.
    ///
    /// # Errors
    /// When there is no such layer, or something cannot be removed.
    pub fn prune(&self, name: &str, keep: usize) -> Result<Pruned> {
        let draft = self.draft(name)?;
        let history = self.history(name)?;
        let mut pruned = Pruned::default();
        let first_kept = history.len().saturating_sub(keep.max(1));
        let (old, kept) = history.split_at(first_kept);
        let made_from = self.made_from(name)?;
        let mut needed: Vec<u64> = kept.iter().filter_map(|(_, info)| info.same_as).collect();
        // The newest first: one that stays for a root may need an older one.
        for (number, info) in old.iter().rev() {
            let is_ground = *number == 1 && self.base().join(name).join(TREE).is_dir();
            let folder = self.folder_of(name, *number);
            let is_below = made_from.iter().any(|(_, generation)| generation == number);
            let held = use_of(&folder.join(INFO)).context("lock", &folder)?;
            match held {
                Use::None(_locks) if !is_ground && !is_below && !needed.contains(number) => {
                    let aside = draft.top().join(number.to_string());
                    fs::rename(&folder, &aside).context("remove", &folder)?;
                    pruned.removed.push(*number);
                }
                held => {
                    needed.extend(info.same_as);
                    if is_below || matches!(held, Use::Root) {
                        pruned.in_use.push(*number);
                    }
                }
            }
        }
        draft.staging.finish()?;
        Ok(pruned)
    }
}

/// A layer or a generation in the making. Dropped, it leaves nothing.
#[derive(Debug)]
pub struct Draft<'l> {
    layers: &'l LayersDir,
    name: String,
    /// The folder of the layer that is made.
    top: PathBuf,
    staging: Staging,
}

impl Draft<'_> {
    /// The folder of the new layer, of which the first generation's tree is `tree`.
    pub fn top(&self) -> &Path {
        &self.top
    }

    /// Whether there is a layer of this name.
    pub fn exists(&self) -> bool {
        self.staging.target().exists()
    }

    /// The number of the next generation, and a folder for it.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn next_generation(&self) -> Result<(u64, PathBuf)> {
        let number = match self.layers.generations(&self.name) {
            Ok(all) => all.last().map_or(1, |last| last + 1),
            Err(_) => 1,
        };
        Ok((number, self.folder(number)?))
    }

    /// The folder of a generation.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn folder(&self, number: u64) -> Result<PathBuf> {
        let folder = self.top.join(GENERATIONS).join(number.to_string());
        fs::create_dir_all(&folder).context("make", &folder)?;
        close(&folder)?;
        Ok(folder)
    }

    /// Puts all that was made in the place of the layer, or makes it one.
    ///
    /// # Errors
    /// When there is one and it may not be replaced: one that others are made upon may not.
    pub fn put(mut self, replace: bool) -> Result<()> {
        let there = self.exists();
        if there && !replace {
            return Err(LayerError::Exists(self.name));
        }
        if there {
            self.layers.refuse_if_below(&self.name)?;
        }
        let (new, base) = (&self.top, self.layers.base());
        sync_filesystem(new).context("make durable", new)?;
        hayloft_crash::point("layer.made");
        self.staging.commit()?;
        hayloft_crash::point("layer.exchanged");
        if let Err(source) = sync_filesystem(base) {
            let path = self.staging.target();
            self.staging.leave();
            return Err(LayerError::NotDurable { path, source });
        }
        // What was there before is in the place of the new one. Who looks the layer up right now waits for the lock, and
        // looks it up again.
        let locks = match use_of_all(new).context("lock", new)? {
            Use::None(locks) => locks,
            Use::Root => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
                fs::rename(new, base.join(format!(".{}.{since:x}{OLD}", self.name)))
                    .context("put aside", new)?;
                Vec::new()
            }
        };
        self.staging.end();
        drop(locks);
        Ok(())
    }

    /// Makes the generation in [`Draft::folder`] the newest one of the layer, which there may be or not. Gives its number.
    ///
    /// # Errors
    /// When it cannot be made durable or renamed; the layer is as it was, unless the error is [`LayerError::NotDurable`].
    pub fn commit(self, number: u64) -> Result<u64> {
        if !self.exists() {
            self.put(false)?;
            return Ok(number);
        }
        let made = self.top.join(GENERATIONS).join(number.to_string());
        sync_filesystem(&made).context("make durable", &made)?;
        let generations = self.staging.target().join(GENERATIONS);
        match fs::create_dir(&generations) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).context("make", &generations);
            }
            _ => {}
        }
        let there = generations.join(number.to_string());
        hayloft_crash::point("generation.made");
        rustix::fs::renameat_with(CWD, &made, CWD, &there, RenameFlags::NOREPLACE)
            .context("rename to", &there)?;
        hayloft_crash::point("generation.there");
        if let Err(source) = sync_filesystem(self.layers.base()) {
            return Err(LayerError::NotDurable { path: there, source });
        }
        self.staging.end();
        Ok(number)
    }
}
