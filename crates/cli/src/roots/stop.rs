//! Ending what comes after a root's command, copying and publishing, when a signal asks for it: the first one lets it
//! stop where it can and be removed in order, a second one ends it at once.

use std::io;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use crate::exit::{Exit, failure};
use crate::roots::publish;
use crate::signals;

/// How long the first signal may take, as for a command that is asked to end.
const GRACE: Duration = Duration::from_secs(10);
/// What asks for the end.
const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
/// What was for the command, and is too late for it.
const FOR_THE_COMMAND: [i32; 2] = [libc::SIGUSR1, libc::SIGUSR2];

/// The first signal that came; 0 before.
static ASKED: AtomicI32 = AtomicI32::new(0);
/// A mount that would outlive this program.
static MOUNT: Mutex<Option<PathBuf>> = Mutex::new(None);

/// From now on signals that ask for the end are told by [`signal`].
///
/// # Errors
/// When signals cannot be caught.
pub(crate) fn on_signals() -> io::Result<()> {
    let all: Vec<i32> = ENDING.iter().chain(&FOR_THE_COMMAND).copied().collect();
    signals::on(&all, |signal| {
        if FOR_THE_COMMAND.contains(&signal) {
            return;
        }
        if ASKED.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            end_at_once(signal);
        }
        std::thread::spawn(move || {
            std::thread::sleep(GRACE);
            end_at_once(signal);
        });
    })
}

/// The root goes with this program; a mount has to be taken away.
fn end_at_once(signal: i32) -> ! {
    let mount = MOUNT.lock().map(|mut mount| mount.take()).unwrap_or_default();
    if let Some(mount) = mount {
        publish::leave_behind(&mount);
    }
    std::process::exit(128 + signal);
}

/// The signal that asked for the end.
pub(crate) fn signal() -> Option<i32> {
    Some(ASKED.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
}

/// Whether one has.
pub(crate) fn is_asked() -> bool {
    signal().is_some()
}

/// Says which mount has to be taken away; none any more.
pub(crate) fn set_mount(folder: Option<PathBuf>) {
    if let Ok(mut mount) = MOUNT.lock() {
        *mount = folder;
    }
}

/// What is said when something was left because of that.
pub(crate) fn stopped(what: &str) -> anyhow::Error {
    failure(Exit::Failed, format!("ended by signal {} {what}", signal().unwrap_or(0)))
}
