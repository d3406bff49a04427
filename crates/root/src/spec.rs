//! What a root shall be.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A layer at the bottom of a root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layer {
    /// A folder.
    Folder {
        /// Where it is.
        path: PathBuf,
        /// Device and inode that it must be there; else it was replaced after it was looked up.
        identity: Option<(u64, u64)>,
    },
    /// The image of a read-only file system: erofs, squashfs or ext4.
    Image(PathBuf),
}

impl Layer {
    /// Where it is on the host.
    pub fn path(&self) -> &Path {
        match self {
            Layer::Folder { path, .. } | Layer::Image(path) => path,
        }
    }
}

/// Something of the host that is seen in the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// Where it is on the host.
    pub source: PathBuf,
    /// Where it is seen in the root.
    pub target: PathBuf,
    /// Whether it can be changed there.
    pub writable: bool,
}

/// Where memory goes that is more than may stay resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spill {
    /// Nowhere: the root is full then.
    None,
    /// To so many bytes of a sparse file.
    File(u64),
    /// To so many bytes (before compression) of a compressed device in memory.
    Zram(u64),
}

impl Spill {
    /// How many bytes it takes.
    pub fn bytes(self) -> u64 {
        match self {
            Spill::None => 0,
            Spill::File(bytes) | Spill::Zram(bytes) => bytes,
        }
    }
}

/// What of the network is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// A loopback interface of its own.
    #[default]
    None,
    /// The host's.
    Host,
}

/// A build root and the command in it.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Its name; one is made up when there is none.
    pub name: Option<String>,
    /// Topmost first; none: an empty root.
    pub layers: Vec<Layer>,
    /// Held open as long as the root is there: the locks on its layers.
    pub in_use: Vec<Arc<File>>,
    /// Binds, mounted in this order.
    pub binds: Vec<Bind>,
    /// Folders without a lower layer: bare memory.
    pub scratch: Vec<PathBuf>,
    /// Folders that look empty, whatever the layers have there.
    pub masked: Vec<PathBuf>,
    /// What may stay resident, in bytes.
    pub memory: Option<u64>,
    /// What may be swapped.
    pub spill: Spill,
    /// Folder for swap files.
    pub spill_dir: PathBuf,
    /// The size of /tmp, which otherwise shares with the rest.
    pub tmp: Option<u64>,
    /// Refuse when less memory is free, after what other roots may still claim.
    pub require_free: Option<u64>,
    /// Permission bits of the top folder; the top layer's otherwise.
    pub mode: Option<u32>,
    /// Keep the root after the command.
    pub keep: bool,
    /// What of the network is there.
    pub network: Network,
    /// Processors that it may use.
    pub cpus: Option<f64>,
    /// How many processes and threads it may have; the usual number otherwise.
    pub processes: Option<u64>,
    /// Whether fsync and sync wait at all.
    pub fsync: bool,
    /// The command.
    pub task: Task,
}

/// A command in a root.
#[derive(Debug, Clone)]
pub struct Task {
    /// The command and its arguments.
    pub command: Vec<OsString>,
    /// Who runs it: a name, a number, or `USER:GROUP`.
    pub user: String,
    /// The working folder; the first of these that is there.
    pub folders: Vec<PathBuf>,
    /// Its environment, besides HOME, USER, LOGNAME, SHELL and PATH, which it also may set.
    pub env: Vec<(OsString, OsString)>,
    /// Whether programs with the setuid bit, as sudo, give rights.
    pub new_privileges: bool,
    /// File mode creation mask.
    pub umask: u32,
    /// For a command in a root that is there: what it leaves running ends with it. It has a PID namespace of its own then.
    pub ends_all: bool,
}

/// Checks that a path names a place in a root: absolute, without `..`.
///
/// # Errors
/// One sentence that names the path.
pub fn check_place(path: &Path) -> Result<()> {
    let names = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    match path.is_absolute() && names && path.file_name().is_some() {
        true => Ok(()),
        false => Err(Error::Usage(format!(
            "'{}' is no place in a root: write an absolute path without '..', as in /src",
            path.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_inside() {
        for path in ["/src", "/a/b/", "/a//b"] {
            check_place(Path::new(path)).unwrap();
        }
        for path in ["/", "", "src", "/../x", "/a/../..", "./a"] {
            assert!(check_place(Path::new(path)).is_err(), "{path}");
        }
    }
}
