//! `hayloft umount`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hayloft_mount::control::{self, ControlError, UnmountOptions};

use crate::args::UmountArgs;
use crate::exit::{Exit, failure};
use crate::{mountinfo, stats, sync, sys};

/// How often the end of the mount's process is looked for.
const POLL: Duration = Duration::from_millis(10);
/// How many users of a busy mount are named.
const USERS_MAX: usize = 5;

/// Runs the command.
///
/// # Errors
/// When there is no Hayloft mount, when it is in use, when the store does not take its changes.
pub(crate) fn run(args: &UmountArgs) -> anyhow::Result<u8> {
    let dir = mountinfo::ours(&args.dir)?.mount_point;
    if args.force {
        give_up(&dir)?;
    } else if args.lazy {
        detach(&dir, libc::MNT_DETACH)?;
    } else {
        leave(&dir)?;
    }
    Ok(0)
}

/// Waits for the store, unmounts, and waits for the mount's process to end.
///
/// # Errors
/// When it is in use, or the store does not take its changes.
pub(crate) fn leave(dir: &Path) -> anyhow::Result<()> {
    let Ok(before) = control::stats(dir) else {
        eprintln!(
            "hayloft: the process that served {} is gone; removing what is left of the mount",
            dir.display()
        );
        return detach(dir, libc::MNT_DETACH);
    };
    sync::flush(dir)?;
    control::unmount(dir, UnmountOptions::default()).map_err(|error| match error {
        ControlError::Busy(_) => in_use(dir),
        error => failure(Exit::Failed, error.to_string()),
    })?;
    if let Some(pid) = stats::number(&before, "mount.pid") {
        while runs(pid) {
            std::thread::sleep(POLL);
        }
    }
    Ok(())
}

/// Whether a process is there and has not ended; one that only its parent has yet to notice has.
fn runs(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the name, which may hold anything: proc_pid_stat(5).
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

/// Takes the mount away and ends its process, whatever it still has to say.
fn give_up(dir: &Path) -> anyhow::Result<()> {
    let pid = control::stats(dir).ok().and_then(|stats| stats::number(&stats, "mount.pid"));
    detach(dir, libc::MNT_FORCE | libc::MNT_DETACH)?;
    if let Some(pid) = pid.and_then(|pid| i32::try_from(pid).ok()) {
        // Gone by itself is just as well.
        let _ = sys::kill(pid, libc::SIGKILL);
    }
    Ok(())
}

/// What a signal to a mount in the foreground does: unmount, or if it is in use take it out of the tree
/// so that it ends with its last user.
pub(crate) fn on_signal(dir: &Path) {
    if detach(dir, 0).is_err()
        && let Err(error) = detach(dir, libc::MNT_DETACH)
    {
        tracing::warn!("cannot unmount {}: {error:#}", dir.display());
    }
}

pub(crate) fn detach(dir: &Path, flags: i32) -> anyhow::Result<()> {
    let outcome = match sys::is_root() {
        true => sys::unmount(dir, flags),
        false => by_fusermount(dir, flags),
    };
    outcome.map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => in_use(dir),
        Some(libc::EPERM) => failure(Exit::Denied, format!("not permitted to unmount {}", dir.display())),
        _ => failure(Exit::Failed, format!("cannot unmount {}: {error}", dir.display())),
    })
}

/// The error for a mount that somebody uses; it says who.
pub(crate) fn in_use(dir: &Path) -> anyhow::Error {
    failure(Exit::Busy, format!("{} is in use{}", dir.display(), named(&users(dir))))
}

/// Users other than root unmount through fusermount3(1), which is set-user-id.
fn by_fusermount(dir: &Path, flags: i32) -> io::Result<()> {
    let mut command = std::process::Command::new("fusermount3");
    command.arg("-u");
    if flags & libc::MNT_DETACH != 0 {
        command.arg("-z");
    }
    let output = command.arg("--").arg(dir).output()?;
    let message = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false if message.contains("busy") => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        false => Err(io::Error::other(message.trim().to_owned())),
    }
}

/// Processes with their working folder, root or an open file below `dir`.
fn users(dir: &Path) -> Vec<String> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbered = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut found = Vec::new();
    for pid in numbered {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let open =
            std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
        let held = ["cwd", "root"].map(|link| process.join(link));
        let uses =
            held.into_iter().chain(open).any(|link| link.read_link().is_ok_and(|to| to.starts_with(dir)));
        if uses {
            let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
            found.push(format!("{} ({pid})", name.trim_end()));
        }
    }
    found
}

fn named(users: &[String]) -> String {
    match users.len() {
        0 => String::new(),
        count if count > USERS_MAX => {
            format!(" by {} and {} more", users[..USERS_MAX].join(", "), count - USERS_MAX)
        }
        _ => format!(" by {}", users.join(", ")),
    }
}
