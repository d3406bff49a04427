//! `hayloft sync`: waiting for the store, with progress on a terminal.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use hayloft_mount::control;

use crate::args::SyncArgs;
use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::units::show_size;

/// How long a flush may take before progress is shown, and between two updates.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// Runs the command.
///
/// # Errors
/// When there is no Hayloft mount, or the store does not take the changes.
pub(crate) fn run(args: &SyncArgs) -> anyhow::Result<u8> {
    let entry = mountinfo::ours(&args.dir)?;
    flush(&entry.mount_point)?;
    Ok(0)
}

/// Waits until the store has every change of the mount on `dir`.
///
/// # Errors
/// When the mount's process is gone, or says that changes cannot be stored.
pub(crate) fn flush(dir: &Path) -> anyhow::Result<()> {
    let (done, outcome) = mpsc::channel();
    let flushed = dir.to_owned();
    std::thread::spawn(move || done.send(control::flush(&flushed)));
    let terminal = std::io::stderr().is_terminal();
    let mut shown = false;
    let outcome = loop {
        match outcome.recv_timeout(PROGRESS_EVERY) {
            Ok(outcome) => break Some(outcome),
            Err(mpsc::RecvTimeoutError::Disconnected) => break None,
            Err(mpsc::RecvTimeoutError::Timeout) if terminal => {
                shown = true;
                let left = control::stats(dir)
                    .ok()
                    .and_then(|stats| crate::stats::number(&stats, "log.dirty_bytes"));
                let left = left.map_or(String::new(), |bytes| format!(": {} to go", show_size(bytes)));
                eprint!("\r\x1b[Kwaiting for the store{left}");
                let _ = std::io::stderr().flush();
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
    };
    if shown {
        eprint!("\r\x1b[K");
    }
    match outcome {
        Some(Ok(_)) => Ok(()),
        Some(Err(error)) => Err(failure(Exit::Failed, format!("cannot flush {}: {error}", dir.display()))),
        None => Err(failure(Exit::Failed, format!("cannot flush {}", dir.display()))),
    }
}
