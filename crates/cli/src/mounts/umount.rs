//! `hayloft umount`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hayloft_mount::control::{ControlError, Leave, Visit};

use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::mountinfo::MountEntry;
use crate::mounts::args::UmountArgs;
use crate::mounts::sync;
use crate::sys;

/// How often the end of the mount's process is looked for.
const POLL: Duration = Duration::from_millis(10);
/// How long a client that has given up may take to keep what it did not send.
const KEEP_PATIENCE: Duration = Duration::from_secs(5);
/// How many users of a busy mount are named.
const USERS_MAX: usize = 5;

/// Runs the command.
///
/// # Errors
/// When there is no Hayloft mount, when it is in use, when the store does not take its changes.
pub(crate) fn run(args: &UmountArgs) -> anyhow::Result<u8> {
    if args.force {
        give_up(&args.dir)?;
    } else if args.lazy {
        detach(&mountinfo::ours(&args.dir)?.mount_point, libc::MNT_DETACH)?;
    } else {
        leave(&args.dir, args.timeout.map(Duration::from_secs))?;
    }
    Ok(0)
}

/// Waits for the store, unmounts, and waits for the mount's process to end, if nothing else keeps it.
///
/// # Errors
/// When it is in use, or the store does not take its changes, or not within the limit.
pub(crate) fn leave(dir: &Path, limit: Option<Duration>) -> anyhow::Result<()> {
    let entry = mountinfo::ours(dir)?;
    let dir = &*entry.mount_point;
    let failed = |error: ControlError| failure(Exit::Failed, error.to_string());
    let visit = match Visit::begin(&entry.target()) {
        Ok(visit) if !visit.is_over() => visit,
        Err(ControlError::Silent { .. }) => {
            return Err(failed(ControlError::Silent { path: dir.into(), pid: 0 }));
        }
        Err(error @ ControlError::Io { .. }) => return Err(failed(error)),
        Err(ControlError::NotAMount(_)) => {
            eprintln!("hayloft: no client of this user's serves {}; unmounting it only", dir.display());
            return detach(dir, libc::MNT_DETACH);
        }
        Ok(_) | Err(_) => {
            eprintln!(
                "hayloft: the process that served {} is gone; removing what is left of the mount",
                dir.display()
            );
            return take_away(&entry);
        }
    };
    sync::flush(dir, limit)?;
    let pid = u64::from(visit.pid());
    detach(dir, 0)?;
    match visit.leave().map_err(failed)? {
        Leave::Ended => {
            while pid != 0 && runs(pid) {
                std::thread::sleep(POLL);
            }
        }
        Leave::GoesOn => say_that_it_goes_on(&entry),
    }
    Ok(())
}

/// One line about what keeps a mount whose mount point was taken away.
fn say_that_it_goes_on(entry: &MountEntry) {
    let elsewhere = match entry.others().unwrap_or_default().first() {
        Some(other) => format!("it is mounted on {} as well", other.display()),
        None => "another mount namespace, or users of a mount point that was taken away, keep it".to_owned(),
    };
    eprintln!("hayloft: {} is unmounted; its client goes on, since {elsewhere}", entry.mount_point.display());
}

/// Whether a process is there and has not ended; one that only its parent has yet to notice has.
fn runs(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the name, which may hold anything: proc_pid_stat(5).
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

/// Takes the mount away and ends its client, whatever that still has to say: it keeps what was not sent.
fn give_up(dir: &Path) -> anyhow::Result<()> {
    let entry = mountinfo::ours(dir)?;
    if !entry.others()?.is_empty() {
        // Only this mount point was named.
        return detach(&entry.mount_point, libc::MNT_DETACH);
    }
    let visit = Visit::begin(&entry.target()).and_then(|mut visit| {
        let begun = visit.give_up();
        begun.map(|()| visit)
    });
    let silent = match &visit {
        Err(ControlError::Silent { pid, .. }) => *pid,
        _ => 0,
    };
    take_away(&entry)?;
    if let Ok(mut visit) = visit {
        match visit.end(KEEP_PATIENCE) {
            Ok(problem) => {
                problem.into_iter().for_each(|problem| eprintln!("hayloft: {problem}"));
                let begun = Instant::now();
                while runs(visit.pid().into()) && begun.elapsed() < KEEP_PATIENCE {
                    std::thread::sleep(POLL);
                }
            }
            Err(_) => eprintln!(
                "hayloft: its client (process {}) still keeps what was not sent, and ends by itself",
                visit.pid()
            ),
        }
    } else if let Some(pid) = i32::try_from(silent).ok().filter(|pid| *pid > 0) {
        eprintln!("hayloft: its client (process {pid}) did not answer; what it had not sent is lost");
        // Gone by itself is just as well.
        let _ = sys::kill(pid, libc::SIGKILL);
    }
    Ok(())
}

/// Takes a mount point out of the tree whose client is gone or gives up, and ends all calls that wait for that.
///
/// # Errors
/// When it is not permitted.
pub(crate) fn take_away(entry: &MountEntry) -> anyhow::Result<()> {
    // A killed client may have a thread that waits in the kernel for a call that waits for the client: for ever.
    if let Err(error) = hayloft_fuse::abort(entry.target().device) {
        tracing::debug!(%error, "cannot abort the connection by its number");
    }
    detach(&entry.mount_point, libc::MNT_FORCE | libc::MNT_DETACH)
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
