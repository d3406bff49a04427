//! Where POSIX tests run.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::setup::farm::{Farm, Mount, run};

/// An empty folder to test in: on a fresh mount, or with `HAYLOFT_E2E_PLAIN` in a plain folder.
pub(crate) struct Place {
    // Dropped in this order.
    mount: Option<Mount>,
    farm: Option<Farm>,
    plain: Option<TempDir>,
}

impl Place {
    pub(crate) fn new() -> Place {
        match std::env::var_os("HAYLOFT_E2E_PLAIN") {
            Some(dir) => Place { mount: None, farm: None, plain: Some(tempfile::tempdir_in(dir).unwrap()) },
            None => {
                // Device and setuid files count, as on a local disk.
                let farm = Farm::new();
                run(&mut farm.volume(["create", "v", "--owner", "0:0", "--trusted"]));
                let mount = farm.mount("v", "");
                Place { mount: Some(mount), farm: Some(farm), plain: None }
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.plain.as_ref().map_or_else(|| self.mount.as_ref().unwrap().path(), TempDir::path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Leaves the mount and mounts again: what is seen afterwards comes from the server.
    pub(crate) fn remount(&mut self) {
        if let (Some(mount), Some(farm)) = (self.mount.take(), &self.farm) {
            mount.unmount();
            self.mount = Some(farm.mount("v", ""));
        }
    }
}
