//! The state folder: what roots there are, and where another process finds what is in them.
//!
//! Each root has a folder `NAME/` in the folder of all roots. It holds `root.json` ([`RootInfo`]), the file `lock`
//! and the empty folder `stage`. The processes that keep the root alive hold a lock (flock(2)) on `lock`
//! from before `root.json` exists until they end, however they end: a root whose lock can be taken is dead,
//! and whoever takes the lock may remove what it left.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, Trying};
use crate::spec::Network;

/// Longest name of a root.
const NAME_BYTES_MAX: usize = 64;

/// How far a root is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RootState {
    /// Its command has not ended.
    Running,
    /// Its command has ended; it stays until it is removed.
    Kept,
    /// Nothing holds it any more: its memory is gone, and its folder goes next.
    Ended,
}

/// Swap space that a root brought along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpillInfo {
    /// The block device in the list of swaps: `/dev/loopN` or `/dev/zramN`.
    pub device: PathBuf,
    /// The sparse file behind a loop device.
    pub file: Option<PathBuf>,
    /// Its size in bytes.
    pub size: u64,
    /// What stands in the device's header, so that no other device is taken for it.
    #[serde(default)]
    pub mark: String,
    /// Whether the device has not been made yet, and its number is what the kernel is expected to give.
    #[serde(default)]
    pub is_expected: bool,
}

/// One root: `root.json` in its state folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootInfo {
    /// Its name, which is also its folder's.
    pub name: String,
    /// When it was made, in seconds since 1970.
    pub created: i64,
    /// What runs or ran in it.
    pub command: Vec<String>,
    /// The absolute path of each layer, topmost first, as it was when the root was made.
    pub layers: Vec<PathBuf>,
    /// Where each of them is mounted, whatever has come to its path since: paths through `/proc/PID/root`, as `upper`.
    pub lower: Vec<PathBuf>,
    /// The overlay's upper folder: what differs from the layers. Lives in memory that only the root's
    /// processes have mounted, hence a path through `/proc/PID/root`; good as long as the root is alive.
    pub upper: PathBuf,
    /// The tree that the command sees, in the same way, binds and /proc and the like included.
    pub merged: PathBuf,
    /// Whether overlayfs keeps its marks in `user.overlay.*` (made by an ordinary user) instead of
    /// `trusted.overlay.*`.
    pub userxattr: bool,
    /// How far it is.
    pub state: RootState,
    /// The process that holds it, its namespaces' first; 0 before there is one.
    pub pid: i32,
    /// When that was started, in the kernel's ticks (proc_pid_stat(5)): numbers of processes are given anew.
    #[serde(default)]
    pub pid_started: u64,
    /// The command's exit code, 128+N after signal N, once it has ended.
    pub exit_code: Option<i32>,
    /// What it may keep resident, in bytes.
    pub memory: Option<u64>,
    /// How many processes and threads it may have; none where nothing bounds them.
    #[serde(default)]
    pub processes: Option<u64>,
    /// Whether each of its users may have so many, since no control group bounds them together.
    #[serde(default)]
    pub processes_per_user: bool,
    /// What its files may take together, in bytes.
    #[serde(default)]
    pub files_bytes_max: u64,
    /// Its control groups, each an absolute path.
    pub cgroups: Vec<PathBuf>,
    /// Its swap space.
    pub spill: Option<SpillInfo>,
    /// What of the network it has.
    #[serde(default)]
    pub network: Network,
}

impl RootInfo {
    /// Reads `root.json` in a root's state folder.
    ///
    /// # Errors
    /// When it is not there, or not written by this program.
    pub fn load(folder: &Path) -> Result<RootInfo> {
        let path = folder.join("root.json");
        let text = fs::read(&path).trying(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&text)
            .map_err(io::Error::from)
            .trying(|| format!("make sense of {}", path.display()))
    }

    /// Writes `root.json` in a root's state folder; a reader sees the old or the new one.
    ///
    /// # Errors
    /// When the folder is gone or full.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let (path, fresh) = (folder.join("root.json"), folder.join("root.json.new"));
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::from);
        text.and_then(|text| fs::write(&fresh, text))
            .and_then(|()| fs::rename(&fresh, &path))
            .trying(|| format!("write {}", path.display()))
    }
}

/// The folder of all roots of a user.
#[derive(Debug, Clone)]
pub struct Roots {
    folder: PathBuf,
}

impl Roots {
    /// Where this user's roots are: `/run/hayloft/roots` for root, `$XDG_RUNTIME_DIR/hayloft/roots`
    /// otherwise.
    ///
    /// # Errors
    /// When an ordinary user has no XDG_RUNTIME_DIR.
    pub fn of_this_user() -> Result<Roots> {
        if rustix::process::geteuid().is_root() {
            return Ok(Roots::new(PathBuf::from("/run/hayloft/roots")));
        }
        match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
            Some(folder) if folder.is_absolute() => Ok(Roots::new(folder.join("hayloft/roots"))),
            _ => Err(Error::Usage(
                "XDG_RUNTIME_DIR is not set: set it to a folder in memory that is yours alone, or give --state-dir"
                    .to_owned(),
            )),
        }
    }

    /// Roots in this folder.
    pub fn new(folder: PathBuf) -> Roots {
        Roots { folder }
    }

    /// The folder of all.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A root's state folder.
    pub fn of(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The root of this name, if it is alive.
    ///
    /// # Errors
    /// When there is none.
    pub fn load(&self, name: &str) -> Result<RootInfo> {
        check_name(name)?;
        let folder = self.of(name);
        if is_dead(&folder)? {
            return Err(Error::NotFound(format!(
                "there is no root '{name}': hayloft root list shows those there are"
            )));
        }
        RootInfo::load(&folder)
    }

    /// All roots that are alive, oldest first.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn list(&self) -> Result<Vec<RootInfo>> {
        let mut roots = Vec::new();
        for name in self.names()? {
            let folder = self.of(&name);
            // One that is just being made or removed is not there.
            if let (Ok(false), Ok(info)) = (is_dead(&folder), RootInfo::load(&folder)) {
                roots.push(info);
            }
        }
        roots.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
        Ok(roots)
    }

    /// The names of all state folders, of dead roots as well.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).trying(|| format!("read {}", self.folder.display())),
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter(|name| check_name(name).is_ok()).collect())
    }

    /// Makes the folder of all, for this user alone.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn create(&self) -> Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.folder)
            .trying(|| format!("make the folder {} for the state of roots", self.folder.display()))
    }
}

/// Whether nothing holds the root of this state folder any more. Roots are made and swept under one lock, so that a
/// folder without a lock file is what a maker left that was killed between two steps.
pub(crate) fn is_dead(folder: &Path) -> Result<bool> {
    let path = folder.join("lock");
    let lock = match File::open(&path) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error).trying(|| format!("open {}", path.display())),
    };
    match lock.try_lock_shared() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error).trying(|| format!("lock {}", path.display())),
    }
}

/// Whether a text can name a root: it becomes a folder's name, a control group's and a host name.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
    if fits && name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(known) {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "'{name}' cannot name a root: use up to {NAME_BYTES_MAX} letters, digits, '-', '_' and '.', the first a letter or digit"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, created: i64) -> RootInfo {
        RootInfo {
            name: name.to_owned(),
            created,
            command: vec!["true".to_owned()],
            layers: vec!["/".into()],
            lower: vec!["/proc/5/root/lower/0".into()],
            upper: "/proc/1/root/upper".into(),
            merged: "/proc/1/root/root".into(),
            userxattr: false,
            state: RootState::Running,
            pid: 1,
            pid_started: 1,
            exit_code: None,
            memory: Some(1 << 30),
            processes: None,
            processes_per_user: false,
            files_bytes_max: 0,
            cgroups: Vec::new(),
            spill: None,
            network: Network::None,
        }
    }

    #[test]
    fn only_what_is_locked_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots::new(dir.path().join("roots"));
        assert!(roots.list().unwrap().is_empty());
        roots.create().unwrap();
        let mut locks = Vec::new();
        for (name, created) in [("b", 2), ("a", 1), ("dead", 0)] {
            fs::create_dir(roots.of(name)).unwrap();
            let lock = File::create(roots.of(name).join("lock")).unwrap();
            info(name, created).save(&roots.of(name)).unwrap();
            if name != "dead" {
                lock.lock().unwrap();
                locks.push(lock);
            }
        }
        let names: Vec<String> = roots.list().unwrap().into_iter().map(|root| root.name).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(roots.load("a").unwrap(), info("a", 1));
        assert!(matches!(roots.load("dead"), Err(Error::NotFound(_))));
        assert!(matches!(roots.load("none"), Err(Error::NotFound(_))));
    }

    #[test]
    fn names_stay_in_their_folder() {
        for name in ["a", "build-1.2_x", "0"] {
            check_name(name).unwrap();
        }
        for name in ["", ".", "..", "a/b", "-a", "a b", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
