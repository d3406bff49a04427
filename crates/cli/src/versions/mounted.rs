//! A version that is mounted to be read.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context;
use hayloft_wire::Version;

use crate::exit::{Exit, failure};
use crate::mounts::umount;
use crate::versions::commands;

/// A version that is mounted while this lives.
pub(super) struct Mounted {
    dir: tempfile::TempDir,
    label: String,
}

impl Mounted {
    /// Mounts it, read-only, in a folder of its own.
    ///
    /// # Errors
    /// It cannot be mounted, which the mount has said.
    pub(super) fn new(server: &str, version: &Version) -> anyhow::Result<Mounted> {
        let dir = tempfile::Builder::new().prefix("hayloft-version-").tempdir()?;
        let label = commands::shown(version);
        let own = std::env::current_exe().context("cannot find the hayloft program")?;
        let mounted = Command::new(own)
            .args(["mount", "-o", "ro"])
            .arg(format!("{server}/{label}"))
            .arg(dir.path())
            .stdout(Stdio::null())
            .status()
            .context("cannot start hayloft mount")?;
        if !mounted.success() {
            return Err(failure(
                Exit::Failed,
                format!("{label} cannot be mounted, so its files cannot be read"),
            ));
        }
        Ok(Mounted { dir, label })
    }
}

impl Mounted {
    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// As people write it.
    pub(super) fn label(&self) -> &str {
        &self.label
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = umount::leave(self.dir.path(), None) {
            eprintln!("hayloft: {error:#}");
        }
    }
}
