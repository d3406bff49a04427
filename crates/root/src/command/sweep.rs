//! What a root leaves when its processes were killed, and how it goes.
//!
//! Of a root that died the kernel has removed processes, namespaces, mounts and memory. What is left has a name: the
//! control groups, the swap space and the state folder. Each was written down before it was made.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Trying};
use crate::memory::cgroup;
use crate::memory::spill;
use crate::state::{RootInfo, RootState, Roots, check_name, is_dead};
use crate::terminal::watch::Watch;

/// How long a root's processes may take to end after they were killed.
const END_WITHIN: Duration = Duration::from_secs(30);
/// What the name of a dead root begins with whose swap space others still need.
const ASIDE: &str = "ended-";
/// What a state folder holds, beside the empty folder `stage`.
const FILES: [&str; 5] = ["root.json", "root.json.new", "live.json", "live.json.new", "lock"];

/// The lock under which roots are made and swept: one at a time.
///
/// # Errors
/// When the folder cannot be made or written.
pub(crate) fn lock(roots: &Roots) -> Result<File> {
    let (file, path) = open_lock(roots)?;
    file.lock().trying(|| format!("lock {}", path.display()))?;
    Ok(file)
}

/// The same for a process that holds signals back: one that asks for the end is the end of the wait.
///
/// # Errors
/// As [`lock`], and [`Error::Failed`] then.
pub(crate) fn lock_watched(roots: &Roots, watch: &Watch) -> Result<File> {
    let (file, path) = open_lock(roots)?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => watch.check_not_ended()?,
            Err(TryLockError::Error(error)) => {
                return Err(error).trying(|| format!("lock {}", path.display()));
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn open_lock(roots: &Roots) -> Result<(File, PathBuf)> {
    roots.create()?;
    // No root has this name: names do not begin with a dot.
    let path = roots.folder().join(".lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    Ok((file.trying(|| format!("open {}", path.display()))?, path))
}

/// Removes what dead roots have left. `_held` is the lock of [`lock`].
///
/// # Errors
/// When the state folders cannot be listed. What cannot be removed now is left for the next time, with a warning.
pub(crate) fn sweep(roots: &Roots, _held: &File) -> Result<()> {
    for name in roots.names()? {
        let folder = roots.of(&name);
        if !matches!(is_dead(&folder), Ok(true)) {
            continue;
        }
        if let Err(error) = remove(roots, &folder) {
            tracing::warn!(root = name, %error, "what a dead root has left stays for now");
        }
    }
    Ok(())
}

/// Removes a dead root.
fn remove(roots: &Roots, folder: &Path) -> Result<()> {
    // Held until the end, so that nobody else takes it for theirs meanwhile.
    let lock = match File::open(folder.join("lock")) {
        Ok(lock) => Some(lock),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error).trying(|| format!("open the lock of {}", folder.display())),
    };
    match lock.as_ref().map(File::try_lock) {
        None | Some(Ok(())) => (),
        Some(Err(TryLockError::WouldBlock)) => return Ok(()),
        Some(Err(TryLockError::Error(error))) => {
            return Err(error).trying(|| format!("lock {}", folder.display()));
        }
    }
    // Without one it was killed before it made anything else.
    if folder.join("root.json").exists() {
        let info = RootInfo::load(folder)?;
        cgroup::remove(&info.cgroups)?;
        if let Some(space) = &info.spill {
            // This one's lock is held right now, by us: it looks alive.
            let others = roots.list()?.iter().any(|root| root.spill.is_some() && root.spill != info.spill);
            let removed = spill::remove(space, others);
            if !matches!(removed, Ok(true)) {
                set_aside(roots, folder, &info)?;
                return removed.map(drop);
            }
        }
    }
    remove_folder(folder).trying(|| format!("remove {}", folder.display()))
}

/// Gives what stays of a dead root a name that nobody asks for, so that its own is free.
fn set_aside(roots: &Roots, folder: &Path, info: &RootInfo) -> Result<()> {
    let Some(space) = &info.spill else { return Ok(()) };
    // No two have the same mark.
    let name = format!("{ASIDE}{}", space.mark);
    let aside = roots.of(&name);
    if folder == aside {
        return Ok(());
    }
    check_name(&name)?;
    fs::rename(folder, &aside).trying(|| format!("rename {}", folder.display()))?;
    RootInfo { name, state: RootState::Ended, ..info.clone() }.save(&aside)
}

/// Removes a state folder: what belongs there, and nothing that somebody else has put there.
fn remove_folder(folder: &Path) -> io::Result<()> {
    let gone = |outcome: io::Result<()>| match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    gone(fs::remove_dir(folder.join("stage")))?;
    for name in FILES {
        gone(fs::remove_file(folder.join(name)))?;
    }
    fs::remove_dir(folder)
}

/// Waits until nothing holds a root any more, and removes what is left of it.
///
/// # Errors
/// When a process of it does not end.
pub(crate) fn finish(roots: &Roots, name: &str) -> Result<()> {
    let deadline = Instant::now() + END_WITHIN;
    while !is_dead(&roots.of(name))? {
        if Instant::now() > deadline {
            return Err(Error::Busy(format!(
                "a process of the root '{name}' does not end: is it waiting for a dead mount?"
            )));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let held = lock(roots)?;
    sweep(roots, &held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_dead_and_ours_goes() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots::new(dir.path().join("roots"));
        let held = lock(&roots).unwrap();
        for name in ["alive", "dead", "young", "strange"] {
            fs::create_dir_all(roots.of(name).join("stage")).unwrap();
        }
        let alive = File::create(roots.of("alive").join("lock")).unwrap();
        alive.lock().unwrap();
        for name in ["dead", "strange"] {
            File::create(roots.of(name).join("lock")).unwrap();
        }
        fs::write(roots.of("strange").join("stage/file"), "not ours").unwrap();
        sweep(&roots, &held).unwrap();
        assert!(roots.of("alive").exists());
        assert!(!roots.of("dead").exists() && !roots.of("young").exists());
        assert!(roots.of("strange").join("stage/file").exists());
    }
}
