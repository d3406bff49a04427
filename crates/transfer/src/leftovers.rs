//! What commands make for the time being, and leave when they are killed. Each holds a lock of what it has made; whoever gets that
//! lock finds that its command has gone.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags, flock};

/// What is younger may have no lock yet.
const AGE: Duration = Duration::from_secs(60);

/// Says that a file or folder is in use, until it is closed.
pub fn hold(fd: impl AsFd) {
    // Where there are no locks nothing is taken for left.
    let _ = flock(fd, FlockOperation::NonBlockingLockExclusive);
}

/// The same of a folder, for as long as what is returned lives.
///
/// # Errors
/// It cannot be opened.
pub fn hold_folder(folder: &Path) -> std::io::Result<OwnedFd> {
    let file = File::open(folder)?;
    hold(&file);
    Ok(file.into())
}

/// Deletes what killed commands of this user have left in a folder under names that begin so, where `may` agrees: files, and
/// folders with what is in them, or empty ones only.
pub fn sweep(folder: &Path, begin: &str, may: impl Fn(&Path) -> bool, only_empty: bool) {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    for found in found.filter(|found| found.file_name().to_string_lossy().starts_with(begin)) {
        if may(&found.path()) {
            // One that cannot be deleted is somebody's who can.
            let _ = delete(&found.path(), only_empty);
        }
    }
}

fn delete(path: &Path, only_empty: bool) -> std::io::Result<()> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let stat = file.metadata()?;
    let is_own = stat.uid() == rustix::process::geteuid().as_raw();
    let is_old = stat.modified()?.elapsed().is_ok_and(|age| age > AGE);
    if !is_own || !is_old || flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(());
    }
    match (stat.is_dir(), only_empty) {
        (true, true) => fs::remove_dir(path),
        (true, false) => fs::remove_dir_all(path),
        (false, _) => fs::remove_file(path),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn is_old(path: &Path) {
        let long_ago = SystemTime::now() - 2 * AGE;
        File::open(path).unwrap().set_modified(long_ago).unwrap();
    }

    #[test]
    fn what_killed_commands_have_left_goes_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["mine-left", "mine-held", "mine-young", "other"] {
            fs::write(at(name), "something").unwrap();
        }
        fs::create_dir(at("mine-folder")).unwrap();
        fs::write(at("mine-folder/inside"), "something").unwrap();
        let held = File::open(at("mine-held")).unwrap();
        hold(&held);
        for name in ["mine-left", "mine-held", "mine-folder", "other"] {
            is_old(&at(name));
        }
        sweep(dir.path(), "mine-", |_| true, true);
        let is_there = |names: [&str; 5]| names.map(|name| at(name).exists());
        let all = ["mine-left", "mine-held", "mine-young", "mine-folder", "other"];
        assert_eq!(is_there(all), [false, true, true, true, true]);
        let held_folder = hold_folder(&at("mine-folder")).unwrap();
        sweep(dir.path(), "mine-", |_| true, false);
        assert_eq!(is_there(all), [false, true, true, true, true]);
        drop((held, held_folder));
        sweep(dir.path(), "mine-", |_| true, false);
        assert_eq!(is_there(all), [false, false, true, false, true]);
    }
}
