//! A task by a command line that was seen before: its relay knows already what flags, settings and the system's tables make of it.
//!
//! The process of such a task looks nothing up. It hands over its command, environment and folder at a socket that is named after all that the
//! rest depends on, and that a relay has opened when the first one came by [`run`](super::run).

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use hayloft_process as process;

use super::key;
use super::wire::{self, Again, PASSED, Told};
use crate::small;
use crate::submit::{self, IN_TASK, Outcome, own_folder};

/// Settings of the machine; of the user's there is one below his home.
const SYSTEM_FILE: &str = "/etc/hayloft/hayloft.toml";
const USER_FILE: &str = "hayloft/hayloft.toml";

/// What `hayloft task` was given: its flags, and the command. None where there is no command.
pub fn split(arguments: &[OsString]) -> Option<(&[OsString], &[OsString])> {
    let at = arguments.iter().position(|argument| argument == "--")?;
    let command = &arguments[at + 1..];
    (!command.is_empty()).then_some((&arguments[..at], command))
}

/// Names all that a task depends on beside command, environment and folder: flags, variables, settings, user, session and namespaces.
///
/// # Errors
/// When /proc is not there.
pub fn name(flags: &[OsString]) -> io::Result<String> {
    let mut hasher = DefaultHasher::new();
    (small::BUILD, flags).hash(&mut hasher);
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let session = rustix::process::getsid(None)?.as_raw_nonzero();
    (uid.as_raw(), gid.as_raw(), session).hash(&mut hasher);
    key::namespaces()?.hash(&mut hasher);
    let mut variables: Vec<_> = std::env::vars_os().filter(|(name, _)| decides(name.as_bytes())).collect();
    variables.sort();
    variables.hash(&mut hasher);
    let own = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let own = own.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".config")));
    let explicit = std::env::var_os("HAYLOFT_CONFIG").map(PathBuf::from);
    let files = [Some(SYSTEM_FILE.into()), own.map(|own| own.join(USER_FILE)), explicit];
    for file in files.into_iter().flatten() {
        let found = std::fs::metadata(file).ok();
        found
            .map(|meta| (meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
            .hash(&mut hasher);
    }
    Ok(format!("{:016x}.again", hasher.finish()))
}

/// Whether a variable has a part in what becomes of a task, other than as one that the task finds.
fn decides(name: &[u8]) -> bool {
    let is_ours = name.starts_with(b"HAYLOFT_") && !name.starts_with(b"HAYLOFT_FARM_");
    is_ours || name == b"HOME" || name.starts_with(b"XDG_")
}

/// Has a task run by a relay that knows its like. None when there is none, or it cannot be done there: nothing has run then.
pub fn run(flags: &[OsString], command: &[OsString]) -> Option<Outcome> {
    if std::env::var_os(IN_TASK).is_some() {
        return None;
    }
    let mut stream = UnixStream::connect(own_folder("relay").ok()?.join(name(flags).ok()?)).ok()?;
    let again = Again {
        command: command.iter().map(|argument| argument.as_bytes().to_vec()).collect(),
        environment: submit::environment(),
        directory: std::env::current_dir().ok()?.into_os_string().into_vec(),
        umask: submit::umask(),
    };
    let standard = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    // From here on they are the task's.
    let (signals, before) = process::signals_by_descriptor(&PASSED).ok()?;
    let handed = wire::send_with_descriptors(&mut stream, &again, &standard);
    let taken = handed.and_then(|()| wire::receive::<Told>(&mut stream));
    if !taken.is_ok_and(|told| told.is_taken) {
        process::restore_signals(&before);
        return None;
    }
    let outcome = match wire::receive_and_pass::<Told>(&mut stream, signals.as_fd(), true) {
        Ok(told) => told.into(),
        Err(_) => super::client::ended(),
    };
    process::restore_signals(&before);
    match outcome {
        Outcome::Nowhere(_) => None,
        outcome => Some(outcome),
    }
}

/// The same for `hayloft task`: its exit code. Does not return when a signal has ended the task: it ends this process as well.
pub fn serve(arguments: &[OsString]) -> Option<u8> {
    let (flags, command) = split(arguments)?;
    match run(flags, command)? {
        Outcome::Exited(code) => Some(code as u8),
        Outcome::Signalled(signal) => {
            submit::end_by(signal);
            Some(128u8.wrapping_add(signal as u8))
        }
        Outcome::NotRun(code, reason) => {
            eprintln!("hayloft: {reason}");
            Some(code as u8)
        }
        Outcome::FarmFailed(reason) => {
            eprintln!("hayloft: {}", submit::farm_failed(&reason));
            Some(125)
        }
        Outcome::Nowhere(_) => None,
    }
}
