//! What the kernel learns by a call of this host at the mount: asked by a process of its own.
//!
//! A process that is killed while it waits for an answer of its own file system ends only when it is answered, and nobody
//! answers any more: with io_uring not even ending the connection helps (Linux 6.18).

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{ARGUMENT, look};

/// What comes before the mount point: whether a file is opened, or the file system is synchronized.
const OPEN: &str = "open";
const SYNC: &str = "sync";

/// Has a file without a name opened once: the kernel hears that OPEN and FLUSH are not needed here. Until it has
/// heard it sends a RELEASE for each file that is created and closed, which makes creation several times
/// slower.
pub(crate) fn teach(point: &Path) {
    if let Err(error) = ask(OPEN, point) {
        tracing::warn!(%error, "the kernel will send more messages than needed until a file is opened");
    }
}

/// Has the file system synchronized.
///
/// # Errors
/// What syncfs(2) says.
pub(crate) fn sync(point: &Path) -> io::Result<()> {
    ask(SYNC, point)
}

fn ask(word: &str, point: &Path) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(ARGUMENT).arg(word).arg(point).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
    let output = command.stderr(Stdio::piped()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// Does what a process was started for with these arguments. `None`: something else.
pub(super) fn answer(arguments: &[OsString]) -> Option<io::Result<()>> {
    if let [word, point, device] = arguments
        && word == look::LOOK
    {
        return Some(look::answer(point, device));
    }
    let [word, point] = arguments else { return None };
    match word.to_str() {
        Some(OPEN) => Some(open_unnamed(Path::new(point))),
        Some(SYNC) => Some(File::open(point).and_then(|top| Ok(rustix::fs::syncfs(top)?))),
        _ => None,
    }
}

fn open_unnamed(point: &Path) -> io::Result<()> {
    let open =
        |path: &Path, flags: i32| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    let file = open(point, libc::O_TMPFILE)?;
    open(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), 0).map(drop)
}
