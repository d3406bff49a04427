//! `hayloft sync`: waiting for the store, with progress on a terminal.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hayloft_mount::control::{self, ControlError, Target};

use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::mounts::args::SyncArgs;
use crate::units::show_size;

/// How long a flush may take before progress is shown, and between two updates.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);
/// How long one may take without a terminal until it is said, once, what is waited for.
const SAID_AFTER: Duration = Duration::from_secs(10);

/// Runs the command.
///
/// # Errors
/// When there is no Hayloft mount, or the store does not take the changes.
pub(crate) fn run(args: &SyncArgs) -> anyhow::Result<u8> {
    flush(&args.dir, args.timeout.map(Duration::from_secs))?;
    Ok(0)
}

/// Waits until the store has every change of the mount on `dir`, or until the limit.
///
/// # Errors
/// When there is no mount, its process is gone, or says that changes cannot be stored; when the limit is over.
pub(crate) fn flush(dir: &Path, limit: Option<Duration>) -> anyhow::Result<()> {
    let target = mountinfo::ours(dir)?.target();
    let failed = |why: &str| failure(Exit::Failed, format!("cannot flush {}: {why}", dir.display()));
    let (done, outcome) = mpsc::channel();
    let flushed = target.clone();
    std::thread::spawn(move || done.send(control::flush(&flushed)));
    let begun = Instant::now();
    let terminal = std::io::stderr().is_terminal();
    let (mut shown, mut said) = (false, false);
    let outcome = loop {
        let left = limit.map(|limit| limit.saturating_sub(begun.elapsed()));
        match outcome.recv_timeout(left.map_or(PROGRESS_EVERY, |left| left.min(PROGRESS_EVERY))) {
            Ok(outcome) => break outcome.map_err(|error| failed(&error.to_string())),
            Err(mpsc::RecvTimeoutError::Disconnected) => break Err(failed("no thread to wait with")),
            Err(mpsc::RecvTimeoutError::Timeout) if limit.is_some_and(|limit| begun.elapsed() >= limit) => {
                break Err(late(&target, begun.elapsed()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) if terminal => {
                shown = true;
                eprint!("\r\x1b[Kwaiting for the store{}", to_go(&target));
                let _ = std::io::stderr().flush();
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if !said && begun.elapsed() > SAID_AFTER {
                    said = true;
                    eprintln!("hayloft: waiting for the store{} (Ctrl-C ends the waiting)", to_go(&target));
                }
            }
        }
    };
    if shown {
        eprint!("\r\x1b[K");
    }
    outcome
}

/// What is waited for.
fn to_go(target: &Target) -> String {
    match control::stats(target) {
        Ok(stats) => {
            let number = |key| crate::server::stats::number(&stats, key).unwrap_or(0);
            let bytes = show_size(number("log.dirty_bytes") + number("log.in_flight_bytes"));
            let away =
                if stats["server"]["connected"] == true { "" } else { ", the server is not connected" };
            format!(": {bytes} to go{away}")
        }
        Err(ControlError::Silent { pid, .. }) => format!(": the mount's process {pid} does not answer"),
        Err(_) => String::new(),
    }
}

fn late(target: &Target, after: Duration) -> anyhow::Error {
    failure(
        Exit::Failed,
        format!(
            "{} is not durable after {} s{}; try again, or `hayloft umount --force` keeps in a folder what the store does not have",
            target.path.display(),
            after.as_secs(),
            to_go(target)
        ),
    )
}
