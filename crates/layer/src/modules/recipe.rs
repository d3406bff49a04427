//! What a generation of a layer is made from, by names and by content: enough to make it again.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::modules::select::Enabled;
use crate::modules::words::{Choice, Package, Word};

/// A layer that another one is made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// A layer's name, or the path of a folder or an archive.
    pub name: String,
    /// Which generation of a layer that has a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Its name by content, of the generation's own tree alone.
    pub tree: String,
}

/// How a hook is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HookKind {
    /// It is a program.
    Script,
    /// By ansible-playbook, inside.
    Ansible,
}

/// A hook whose file is kept with the layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// The module that it is of.
    pub module: Word,
    /// How it is run.
    pub kind: HookKind,
    /// Its path in the catalogue.
    pub file: PathBuf,
    /// The hash of its content, BLAKE3.
    pub hash: String,
}

impl Hook {
    /// The hash of what is in a hook's file.
    pub fn hash_of(content: &[u8]) -> String {
        blake3::hash(content).to_hex().to_string()
    }
}

/// The recipe of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Recipe {
    /// The layer below all; none: the first generation of the same layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<Input>,
    /// Layers between that one and what is installed, the first one on top.
    #[serde(default)]
    pub layers: Vec<Input>,
    /// Where the catalogue was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub catalogue: Option<PathBuf>,
    /// Streams and profiles, as they were asked for.
    #[serde(default)]
    pub asked: Vec<Choice>,
    /// Streams that were taken.
    #[serde(default)]
    pub modules: Vec<Enabled>,
    /// Packages of those.
    #[serde(default)]
    pub packages: Vec<Package>,
    /// Packages that were asked for by name.
    #[serde(default)]
    pub install: Vec<Package>,
    /// Packages of the layer below that are removed.
    #[serde(default)]
    pub remove: Vec<Package>,
    /// Folders of the host that are seen in it while it is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<PathBuf>,
    /// Hooks, in their order.
    #[serde(default)]
    pub hooks: Vec<Hook>,
    /// The time that programs are told (SOURCE_DATE_EPOCH), seconds since 1970.
    pub epoch: i64,
}

impl Recipe {
    /// All packages that are to be installed.
    pub fn all_packages(&self) -> Vec<Package> {
        let mut all: Vec<Package> = self.packages.iter().chain(&self.install).cloned().collect();
        all.sort();
        all.dedup();
        all
    }

    /// Whether nothing has to be run to make it.
    pub fn is_plain(&self) -> bool {
        self.all_packages().is_empty() && self.remove.is_empty() && self.hooks.is_empty()
    }
}

/// What is put upon the layer below, in a few words.
impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let asked = self.asked.iter().map(Choice::to_string);
        let install = self.install.iter().map(Package::to_string);
        let remove = self.remove.iter().map(|package| format!("without {package}"));
        f.write_str(&asked.chain(install).chain(remove).collect::<Vec<_>>().join(", "))
    }
}

/// A package that is there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Installed {
    /// Its name.
    pub name: String,
    /// Its version, as its package manager writes it.
    pub version: String,
    /// Its architecture.
    pub arch: String,
}

/// How a package differs between two layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackageDifference {
    /// The package.
    pub name: String,
    /// Its architecture.
    pub arch: String,
    /// Its version in the first one.
    pub old: Option<String>,
    /// Its version in the second one.
    pub new: Option<String>,
}

impl fmt::Display for PackageDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.old, &self.new) {
            (Some(old), Some(new)) => write!(f, "{}: {old} -> {new}", self.name),
            (None, Some(new)) => write!(f, "{}: added, {new}", self.name),
            (Some(old), None) => write!(f, "{}: gone, {old}", self.name),
            (None, None) => f.write_str(&self.name),
        }
    }
}

/// The packages that are not the same in two lists.
pub fn package_differences(old: &[Installed], new: &[Installed]) -> Vec<PackageDifference> {
    let mut all: BTreeMap<(&str, &str), [Vec<&str>; 2]> = BTreeMap::new();
    for (which, list) in [old, new].into_iter().enumerate() {
        for package in list {
            all.entry((&package.name, &package.arch)).or_default()[which].push(&package.version);
        }
    }
    // Of some, such as kernels, several versions are there at a time.
    let version = |all: &[&str]| (!all.is_empty()).then(|| all.join(" and "));
    all.into_iter()
        .filter(|(_, [old, new])| old != new)
        .map(|((name, arch), [old, new])| PackageDifference {
            name: name.to_owned(),
            arch: arch.to_owned(),
            old: version(&old),
            new: version(&new),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_that_differ_are_named() {
        let package = |name: &str, version: &str| Installed {
            name: name.to_owned(),
            version: version.to_owned(),
            arch: "all".to_owned(),
        };
        let old = [package("gone", "1"), package("same", "1"), package("up", "1")];
        let new = [package("new", "1"), package("same", "1"), package("up", "2")];
        let said: Vec<String> = package_differences(&old, &new).iter().map(ToString::to_string).collect();
        assert_eq!(said, ["gone: gone, 1", "new: added, 1", "up: 1 -> 2"]);
        assert!(package_differences(&old, &old).is_empty());
    }
}
