//! Slots of this host for tasks that run here: as many at a time as it has cores, whoever of a user's programs starts them.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, Mode};
use rustix::io::Errno;

/// How often whoever is next looks for a free slot.
const LOOK: Duration = Duration::from_millis(2);

/// The slots of this host, as locks on files.
#[derive(Debug)]
pub struct Slots {
    dir: PathBuf,
    count: u32,
}

/// A slot; free when dropped, or when this process ends.
#[derive(Debug)]
pub struct Slot(#[allow(dead_code)] File);

impl Slots {
    /// The slots of this user: those of root in `/run`, of others where they alone may write.
    ///
    /// # Errors
    /// When there is no such folder and it cannot be made, or it is somebody else's.
    pub fn open(count: u32) -> io::Result<Slots> {
        Ok(Slots { dir: own_folder("slots")?, count: count.max(1) })
    }

    /// Waits for a slot. Who came first looks for it, the others wait behind.
    ///
    /// # Errors
    /// When files cannot be opened.
    pub fn take(&self) -> io::Result<Slot> {
        let open =
            |name: String| File::options().create(true).truncate(false).write(true).open(self.dir.join(name));
        let next = open("next".to_owned())?;
        lock(&next, FlockOperation::LockExclusive)?;
        loop {
            for number in 0..self.count {
                let slot = open(number.to_string())?;
                if lock(&slot, FlockOperation::NonBlockingLockExclusive)? {
                    return Ok(Slot(slot));
                }
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// A folder that this user's programs on this host have in common and nobody else may enter: in `/run` for root.
///
/// # Errors
/// When it cannot be made, or is somebody else's.
pub(crate) fn own_folder(name: &str) -> io::Result<PathBuf> {
    own_folder_in(std::env::var_os("XDG_RUNTIME_DIR").as_deref(), name)
}

/// The same where that variable is this one. Makes system calls only: see [`small`](crate::small).
pub(crate) fn own_folder_in(runtime: Option<&OsStr>, name: &str) -> io::Result<PathBuf> {
    let uid = rustix::process::geteuid();
    let is_folder = |path: &Path| {
        rustix::fs::stat(path).is_ok_and(|found| FileType::from_raw_mode(found.st_mode).is_dir())
    };
    let own = runtime.map(|dir| Path::new(dir).join(format!("hayloft-{name}")));
    let dir = match own {
        _ if uid.is_root() => PathBuf::from(format!("/run/hayloft-{name}")),
        Some(dir) if dir.parent().is_some_and(is_folder) => dir,
        _ => PathBuf::from(format!("/tmp/hayloft-{name}-{}", uid.as_raw())),
    };
    make_own(&dir)?;
    Ok(dir)
}

fn make_own(dir: &Path) -> io::Result<()> {
    let found = match rustix::fs::lstat(dir) {
        Err(Errno::NOENT) => {
            match rustix::fs::mkdir(dir, Mode::RWXU) {
                Err(error) if error != Errno::EXIST => return Err(error.into()),
                _ => {}
            }
            rustix::fs::lstat(dir)
        }
        found => found,
    }?;
    let is_dir = FileType::from_raw_mode(found.st_mode).is_dir();
    if !is_dir || found.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other(format!("{} is not a folder of this user", dir.display())));
    }
    Ok(())
}

/// False when somebody else has it.
fn lock(file: &File, how: FlockOperation) -> io::Result<bool> {
    loop {
        match rustix::fs::flock(file, how) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn no_more_than_there_are_slots_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let (now, most) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    let slots = Slots { dir: dir.path().to_owned(), count: 3 };
                    let slot = slots.take().unwrap();
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(5));
                    now.fetch_sub(1, Ordering::SeqCst);
                    drop(slot);
                });
            }
        });
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
    }
}
