//! What a build has left, to be compared with another's.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Every path below a folder, with a hash of what is there: kind, permissions and content.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Products(BTreeMap<PathBuf, u64>);

impl Products {
    pub(super) fn of(top: &Path) -> Result<Self> {
        let mut found = BTreeMap::new();
        collect(top, Path::new(""), &mut found)?;
        Ok(Products(found))
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// An error that names the first difference.
    pub(super) fn compare(&self, expected: &Products) -> Result<()> {
        for (path, hash) in &expected.0 {
            match self.0.get(path) {
                None => bail!("{} is missing", path.display()),
                Some(other) if other != hash => bail!("{} is different", path.display()),
                Some(_) => {}
            }
        }
        match self.0.keys().find(|path| !expected.0.contains_key(*path)) {
            Some(path) => bail!("{} is there only here", path.display()),
            None => Ok(()),
        }
    }
}

fn collect(top: &Path, below: &Path, found: &mut BTreeMap<PathBuf, u64>) -> Result<()> {
    let here = top.join(below);
    for entry in fs::read_dir(&here).with_context(|| here.display().to_string())? {
        let below = below.join(entry?.file_name());
        let path = top.join(&below);
        let is_folder = hashed(&path, &below, found).with_context(|| path.display().to_string())?;
        if is_folder {
            collect(top, &below, found)?;
        }
    }
    Ok(())
}

fn hashed(path: &Path, below: &Path, found: &mut BTreeMap<PathBuf, u64>) -> Result<bool> {
    let metadata = fs::symlink_metadata(path)?;
    let mut hasher = DefaultHasher::new();
    metadata.permissions().mode().hash(&mut hasher);
    if metadata.is_symlink() {
        fs::read_link(path)?.hash(&mut hasher);
    } else if metadata.is_file() {
        fs::read(path)?.hash(&mut hasher);
    }
    found.insert(below.to_owned(), hasher.finish());
    Ok(metadata.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::WorkDir;

    #[test]
    fn each_kind_of_difference_is_named() {
        let work = WorkDir::create(&std::env::temp_dir(), "products").unwrap();
        let [one, other] = ["one", "other"].map(|name| work.path().join(name));
        for top in [&one, &other] {
            fs::create_dir_all(top.join("d")).unwrap();
            fs::write(top.join("d/f"), "same").unwrap();
            std::os::unix::fs::symlink("d/f", top.join("link")).unwrap();
        }
        let expected = Products::of(&one).unwrap();
        assert_eq!(expected.count(), 3);
        let told = || Products::of(&other).unwrap().compare(&expected).unwrap_err().to_string();
        Products::of(&other).unwrap().compare(&expected).unwrap();
        fs::write(other.join("d/f"), "else").unwrap();
        assert_eq!(told(), "d/f is different");
        fs::remove_file(other.join("d/f")).unwrap();
        assert_eq!(told(), "d/f is missing");
        fs::write(other.join("d/f"), "same").unwrap();
        fs::write(other.join("more"), "").unwrap();
        assert_eq!(told(), "more is there only here");
    }
}
