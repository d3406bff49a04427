//! A version that is mounted for as long as a command needs it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::Context;
use hayloft_mount::control;
use hayloft_transfer::leftovers;
use hayloft_wire::Version;

use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::mounts::{sync, umount};
use crate::server::snapshots;
use crate::sys;

/// A version that is mounted while this lives.
pub(crate) struct Mounted {
    dir: tempfile::TempDir,
    label: String,
    client: Child,
    is_left: bool,
    /// Says that the folder is in use.
    _held: OwnedFd,
}

/// How soon what was made goes to the store while more is made.
const SHIP_EVERY: Duration = Duration::from_millis(50);

/// The names of such folders begin so; the number of the process that has made them follows.
const NAMES: &str = "hayloft-version-";

/// Takes away what killed commands have left: mounts whose client has ended in the same moment, and folders.
fn sweep() {
    let folder = std::env::temp_dir();
    let is_such = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        path.parent() == Some(&folder) && name.starts_with(NAMES)
    };
    let mut mounted = Vec::new();
    // None is looked into: who serves it may wait for a server.
    for path in mountinfo::all().unwrap_or_default().into_iter().map(|entry| entry.mount_point) {
        if is_such(&path) && (!is_of_dead(&path) || umount::detach(&path, libc::MNT_DETACH).is_err()) {
            mounted.push(path);
        }
    }
    leftovers::sweep(&folder, NAMES, |path| !mounted.iter().any(|mounted| mounted == path), true);
}

/// Whether the command has ended that has mounted something there.
fn is_of_dead(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let pid = name.strip_prefix(NAMES).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
    pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

impl Mounted {
    /// Mounts it, read-only, in a folder of its own.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub(crate) fn new(server: &str, version: &Version) -> anyhow::Result<Mounted> {
        Mounting::begin(server, version, "ro")?.done()
    }

    /// As [`Mounted::new`], of several at the same time, with options of mount(8).
    ///
    /// # Errors
    /// One of them cannot be mounted.
    pub(crate) fn all<'v>(
        server: &str,
        versions: impl IntoIterator<Item = &'v Version>,
        options: &str,
    ) -> anyhow::Result<Vec<Mounted>> {
        let mounts: anyhow::Result<Vec<_>> =
            versions.into_iter().map(|of| Mounting::begin(server, of, options)).collect();
        mounts?.into_iter().map(Mounting::done).collect()
    }

    /// As [`Mounted::new`], to be written; device and setuid files are made as they are.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn writable(server: &str, version: &Version) -> anyhow::Result<Mounted> {
        Mounting::begin(server, version, "rw")?.done()
    }

    /// Has something made in it, and meanwhile sees to it that the store gets what is there already.
    ///
    /// # Errors
    /// What `make` says.
    pub(crate) fn fill<T>(&self, make: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let target = mountinfo::ours(self.path())?.target();
        // It ends when the sender goes, however `make` does.
        let (making, is_made) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let goes_on = || is_made.recv_timeout(SHIP_EVERY) == Err(RecvTimeoutError::Timeout);
                // What fails here is told by the flush at the end.
                while goes_on() && control::flush(&target).is_ok() {}
            });
            let _making = making;
            make(self.path())
        })
    }

    /// Waits until everything is in the store.
    ///
    /// # Errors
    /// It does not get there.
    pub(crate) fn flush(&self) -> anyhow::Result<()> {
        sync::flush(self.path(), None)
    }

    /// Leaves it: everything is in the store then.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn leave(mut self) -> anyhow::Result<()> {
        self.is_left = true;
        if let Err(error) = umount::leave(self.dir.path(), None) {
            // What is below must not be removed.
            self.dir.disable_cleanup(true);
            return Err(error);
        }
        self.client.wait()?;
        Ok(())
    }
}

/// A mount that begins. The thread that begins it has to live on: a mount ends with who has begun it.
pub(crate) struct Mounting {
    mounted: Option<Mounted>,
    log: File,
}

impl Mounting {
    /// Begins to mount a version, with options of mount(8).
    ///
    /// # Errors
    /// No process can be started, or there is no room for a folder.
    pub(crate) fn begin(server: &str, version: &Version, options: &str) -> anyhow::Result<Mounting> {
        sweep();
        let names = format!("{NAMES}{}-", std::process::id());
        let dir = tempfile::Builder::new().prefix(&names).tempdir()?;
        let held = leftovers::hold_folder(dir.path())?;
        let label = snapshots::shown(version);
        let own = std::env::current_exe().context("cannot find the hayloft program")?;
        let log = tempfile::tempfile()?;
        let mut command = Command::new(own);
        command
            .args(["mount", "--foreground", "--die-with-parent", "-o", options])
            .arg(format!("{server}/{label}"))
            .arg(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.try_clone()?);
        // Ctrl-C is for this command; when that ends, the mount is left in order.
        let client = sys::in_own_session(&mut command).spawn().context("cannot start hayloft mount")?;
        let mounted = Mounted { dir, label, client, is_left: false, _held: held };
        Ok(Mounting { mounted: Some(mounted), log })
    }

    /// Where it will be.
    pub(crate) fn path(&self) -> &Path {
        self.mounted.as_ref().map_or(Path::new(""), Mounted::path)
    }

    /// Waits until it is mounted.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub(crate) fn done(mut self) -> anyhow::Result<Mounted> {
        let over = || failure(Exit::Failed, "it was waited for already");
        wait(self.mounted.take().ok_or_else(over)?, &mut self.log)
    }
}

impl Drop for Mounting {
    fn drop(&mut self) {
        // What is being mounted cannot be left before it is there.
        if let Some(mounted) = self.mounted.take() {
            let _ = wait(mounted, &mut self.log);
        }
    }
}

fn wait(mut mounted: Mounted, log: &mut File) -> anyhow::Result<Mounted> {
    let mut line = String::new();
    if let Some(stdout) = mounted.client.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    if !line.is_empty() {
        return Ok(mounted);
    }
    mounted.client.wait()?;
    // There is nothing to leave.
    mounted.is_left = true;
    let mut said = String::new();
    log.rewind()?;
    log.read_to_string(&mut said)?;
    let why = said.lines().rev().find_map(|line| line.strip_prefix("hayloft: ")).unwrap_or(&said);
    Err(failure(Exit::Failed, format!("{} cannot be mounted: {why}", mounted.label)))
}

impl Mounted {
    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// As people write it.
    pub(super) fn label(&self) -> &str {
        &self.label
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        if let Err(error) = umount::leave(self.dir.path(), None) {
            eprintln!("hayloft: {error:#}");
            self.dir.disable_cleanup(true);
            return;
        }
        let _ = self.client.wait();
    }
}
