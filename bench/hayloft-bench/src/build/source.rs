//! Where the package to build comes from.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Part of the program, so that it works wherever the binary is.
const FETCH_SCRIPT: &str = include_str!("../../../fetch-source.sh");
const DEFAULT_PACKAGE: &str = "hello";

/// What is unpacked or copied into each target.
pub(crate) enum Source {
    Tarball(PathBuf),
    Directory(PathBuf),
}

impl Source {
    /// What was given, or Debian's source of GNU hello, fetched once.
    pub(crate) fn find(given: Option<&Path>) -> Result<Self> {
        let path = match given {
            Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
            None => fetch(DEFAULT_PACKAGE)?,
        };
        if !path.is_dir() {
            return Ok(Source::Tarball(path));
        }
        ensure!(path.join("configure").is_file(), "{} has no configure", path.display());
        Ok(Source::Directory(path))
    }

    /// Without the folder it is in: results are shown to others.
    pub(crate) fn name(&self) -> String {
        let (Source::Tarball(path) | Source::Directory(path)) = self;
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// A command that puts the source into its current directory.
    pub(crate) fn unpack(&self) -> Command {
        match self {
            Source::Tarball(path) => {
                let mut command = Command::new("tar");
                command.args(["--strip-components=1", "-xf"]).arg(path);
                command
            }
            Source::Directory(path) => {
                let mut command = Command::new("cp");
                command.arg("-a").arg(path.join(".")).arg(".");
                command
            }
        }
    }
}

/// The tarball of a Debian source package, from the cache of this user if it is there.
fn fetch(package: &str) -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("hayloft-bench");
    let output = Command::new("bash")
        .args(["-c", FETCH_SCRIPT, "fetch-source.sh", package])
        .arg(&cache)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("bash")?;
    if !output.status.success() {
        bail!("cannot fetch the source of {package}; give one with --source");
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    let tarball = printed.lines().nth(1).context("the fetching script printed no tarball")?;
    Ok(PathBuf::from(tarball))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::WorkDir;

    #[test]
    fn a_tarball_and_a_directory_unpack_to_the_same() {
        let work = WorkDir::create(&std::env::temp_dir(), "source").unwrap();
        let package = work.path().join("p-1.0");
        std::fs::create_dir(&package).unwrap();
        std::fs::write(package.join("configure"), "").unwrap();
        let tarball = work.path().join("p.tar.gz");
        let tar = |c: &mut Command| assert!(c.status().unwrap().success());
        tar(Command::new("tar").arg("-czf").arg(&tarball).arg("-C").arg(work.path()).arg("p-1.0"));
        for (source, name) in [(&tarball, "p.tar.gz"), (&package, "p-1.0")] {
            let source = Source::find(Some(source)).unwrap();
            assert_eq!(source.name(), name);
            let to = work.path().join(format!("to-{name}"));
            std::fs::create_dir(&to).unwrap();
            tar(source.unpack().current_dir(&to));
            assert!(to.join("configure").is_file());
        }
    }

    #[test]
    fn what_cannot_be_built_is_refused() {
        assert!(Source::find(Some(Path::new("/no/such/tarball"))).is_err());
        let work = WorkDir::create(&std::env::temp_dir(), "unbuildable").unwrap();
        assert!(Source::find(Some(work.path())).is_err());
    }
}
