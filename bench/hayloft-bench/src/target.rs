//! A directory to measure.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use crate::{machine, sys};

/// A named directory, as given on the command line.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    #[serde(skip)]
    pub(crate) dir: PathBuf,
    /// What the kernel calls the file system there, such as `ext4` or `fuse.bindfs`.
    pub(crate) file_system: String,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, dir)) if !name.is_empty() && !dir.is_empty() => {
                Ok(Target { name: name.into(), dir: dir.into(), file_system: String::new() })
            }
            _ => Err("expected NAME=DIR".into()),
        }
    }
}

/// One directory, seen through each of the mounts of a file system.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Mounts {
    #[serde(flatten)]
    pub(crate) first: Target,
    #[serde(rename = "mounts", serialize_with = "count")]
    pub(crate) dirs: Vec<PathBuf>,
}

impl Mounts {
    pub(crate) fn name(&self) -> &str {
        &self.first.name
    }
}

fn count<S: serde::Serializer>(dirs: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(dirs.len() as u64)
}

impl FromStr for Mounts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected NAME=DIR[,DIR...]".to_owned();
        let (name, dirs) = text.split_once('=').ok_or_else(wrong)?;
        let dirs: Vec<&str> = dirs.split(',').collect();
        if dirs.contains(&"") {
            return Err(wrong());
        }
        let first = format!("{name}={}", dirs[0]).parse().map_err(|_| wrong())?;
        Ok(Mounts { first, dirs: dirs.into_iter().map(PathBuf::from).collect() })
    }
}

/// As [`check`], and each further mount has to be there.
pub(crate) fn check_mounts(targets: &[Mounts], bytes: u64, inodes: u64) -> Result<Vec<Mounts>> {
    let firsts: Vec<Target> = targets.iter().map(|target| target.first.clone()).collect();
    let checked = check(&firsts, bytes, inodes)?.into_iter().zip(targets);
    let with_all = checked.map(|(first, target)| {
        let whole = |dir: &PathBuf| {
            dir.canonicalize().with_context(|| format!("{}={}", target.name(), dir.display()))
        };
        Ok(Mounts { first, dirs: target.dirs.iter().map(whole).collect::<Result<_>>()? })
    });
    with_all.collect()
}

/// Finds what would fail later: a missing or read-only directory, a name used twice, too little room.
pub(crate) fn check(targets: &[Target], bytes_needed: u64, inodes_needed: u64) -> Result<Vec<Target>> {
    let mut checked: Vec<Target> = Vec::new();
    for target in targets {
        ensure!(checked.iter().all(|t| t.name != target.name), "the name {} is used twice", target.name);
        let shown = format!("{}={}", target.name, target.dir.display());
        let dir = target.dir.canonicalize().with_context(|| shown.clone())?;
        ensure!(dir.is_dir(), "{shown}: not a directory");
        let work = WorkDir::create(&dir, "probe").with_context(|| shown.clone())?;
        drop(work);
        let (bytes, inodes) = sys::free_space(&dir).with_context(|| shown.clone())?;
        if let Some(free) = bytes.filter(|free| *free < bytes_needed) {
            bail!("{shown}: {} MB free, {} MB needed", free / 1_000_000, bytes_needed / 1_000_000);
        }
        if let Some(free) = inodes.filter(|free| *free < inodes_needed) {
            bail!("{shown}: {free} inodes free, {inodes_needed} needed");
        }
        let file_system = machine::file_system_of(&dir)?;
        checked.push(Target { name: target.name.clone(), dir, file_system });
    }
    Ok(checked)
}

/// Lets no target pay for what another one has still to write.
pub(crate) fn settle(target: &Target) -> Result<()> {
    settle_below(&target.dir)
}

/// The same for each mount.
pub(crate) fn settle_mounts(target: &Mounts) -> Result<()> {
    target.dirs.iter().try_for_each(|dir| settle_below(dir))
}

fn settle_below(dir: &Path) -> Result<()> {
    let directory = File::open(dir).context("open")?;
    sys::syncfs(&directory).context("syncfs")?;
    // The kernel does not pass syncfs on to every FUSE file system; fsync it does.
    directory.sync_all().context("fsync")
}

/// A directory of this process in a target, deleted with everything in it when dropped.
pub(crate) struct WorkDir {
    path: PathBuf,
    keep: Cell<bool>,
}

impl WorkDir {
    pub(crate) fn create(parent: &Path, workload: &str) -> Result<Self> {
        let path = parent.join(format!("hayloft-bench-{workload}-{}", std::process::id()));
        std::fs::create_dir(&path).context("cannot write there")?;
        Ok(WorkDir { path, keep: Cell::new(false) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves everything for somebody to look at, and says where.
    pub(crate) fn keep(&self) {
        self.keep.set(true);
        eprintln!("hayloft-bench: left for inspection: {}", self.path.display());
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if self.keep.get() || !self.path.exists() {
            return;
        }
        // Some file systems show deleted entries for a moment (silly renames): worth a second try.
        for _ in 0..3 {
            if std::fs::remove_dir_all(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        eprintln!("hayloft-bench: could not delete {}", self.path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_needs_a_name_and_a_directory() {
        assert!("tmpfs=/dev/shm".parse::<Target>().is_ok());
        for wrong in ["/dev/shm", "=/dev/shm", "tmpfs="] {
            assert!(wrong.parse::<Target>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_target_may_have_several_mounts() {
        let mounts: Mounts = "hayloft=/mnt/a,/mnt/b".parse().unwrap();
        assert_eq!((mounts.name(), mounts.dirs.len()), ("hayloft", 2));
        assert_eq!(mounts.first.dir, mounts.dirs[0]);
        for wrong in ["/mnt/a", "=/mnt/a", "hayloft=", "hayloft=/mnt/a,", "hayloft=,/mnt/a"] {
            assert!(wrong.parse::<Mounts>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_missing_directory_is_named() {
        let target = "gone=/no/such/directory".parse().unwrap();
        let error = format!("{:#}", check(&[target], 0, 0).unwrap_err());
        assert!(error.contains("gone=/no/such/directory") && error.contains("No such file"), "{error}");
    }

    #[test]
    fn too_little_room_is_found_before_the_run() {
        let target: Target = format!("tmp={}", std::env::temp_dir().display()).parse().unwrap();
        let error = check(std::slice::from_ref(&target), u64::MAX, 0).unwrap_err();
        assert!(error.to_string().contains("MB needed"), "{error}");
        assert!(check(&[target], 0, 0).is_ok());
    }
}
