//! A task by a command line that was seen before: its relay knows already what flags, settings and the system's tables make of it.
//!
//! The process of such a task looks nothing up. It hands over its command, environment and folder at a socket that is named after all that the
//! rest depends on, and that a relay has opened when the first one came by [`run`](super::run). It makes system calls only: see
//! [`small`].

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::AsFd;

use std::path::{Path, PathBuf};

use hayloft_process as process;

use super::key;
use super::wire::{self, Again, PASSED, Told};
use crate::small::{self, Ending, Environment};
use crate::submit::{self, IN_TASK, Outcome};

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
pub fn name(flags: &[OsString], environment: &Environment) -> io::Result<String> {
    let mut hasher = DefaultHasher::new();
    (small::BUILD, flags).hash(&mut hasher);
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let session = rustix::process::getsid(None)?.as_raw_nonzero();
    (uid.as_raw(), gid.as_raw(), session).hash(&mut hasher);
    key::namespaces()?.hash(&mut hasher);
    let mut variables: Vec<_> = environment.0.iter().filter(|variable| decides(variable)).collect();
    variables.sort();
    variables.hash(&mut hasher);
    let own = environment.get("XDG_CONFIG_HOME").map(PathBuf::from);
    let own = own.or_else(|| Some(Path::new(environment.get("HOME")?).join(".config")));
    let explicit = environment.get("HAYLOFT_CONFIG").map(PathBuf::from);
    let files = [Some(SYSTEM_FILE.into()), own.map(|own| own.join(USER_FILE)), explicit];
    for file in files.into_iter().flatten() {
        let found = rustix::fs::stat(&file).ok();
        found
            .map(|found| (found.st_dev, found.st_ino, found.st_size, found.st_mtime, found.st_mtime_nsec))
            .hash(&mut hasher);
    }
    Ok(format!("{:016x}.again", hasher.finish()))
}

/// Whether a variable has a part in what becomes of a task, other than as one that the task finds.
fn decides(variable: &[u8]) -> bool {
    let is_ours = variable.starts_with(b"HAYLOFT_") && !variable.starts_with(b"HAYLOFT_FARM_");
    is_ours || variable.starts_with(b"HOME=") || variable.starts_with(b"XDG_")
}

/// Has a task run by a relay that knows its like. None when there is none, or it cannot be done there: nothing has run then.
fn run(flags: &[OsString], command: &[OsString], environment: Environment) -> Option<Outcome> {
    if environment.get(IN_TASK).is_some() {
        return None;
    }
    small::hold_standard_descriptors();
    let folder = submit::own_folder_in(environment.get("XDG_RUNTIME_DIR"), "relay").ok()?;
    let mut stream = wire::connect(&folder.join(name(flags, &environment).ok()?)).ok()?;
    let again = Again {
        command: small::bytes(command),
        environment: environment.0,
        directory: small::current_folder().ok()?,
        umask: submit::umask(),
    };
    let standard = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    // From here on they are the task's.
    let (signals, before) = process::signals_by_descriptor(&PASSED).ok()?;
    let outcome = match wire::send_with_descriptors(&mut stream, &again, &standard) {
        Err(_) => None,
        Ok(()) => Some(match wire::receive_and_pass::<Told>(&mut stream, signals.as_fd(), true) {
            (Ok(told), _) => told.into(),
            // The relay has not taken all of what was sent: it has gone, and nothing has run.
            (Err(error), end) if error.kind() == io::ErrorKind::ConnectionReset => match end {
                Some(signal) => Outcome::Signalled(signal),
                None => Outcome::Nowhere("its relay has gone".to_owned()),
            },
            (Err(_), _) => super::client::ended(),
        }),
    };
    process::restore_signals(&before);
    outcome.filter(|outcome| !matches!(outcome, Outcome::Nowhere(_)))
}

/// The same for `hayloft task`.
pub fn serve(arguments: &[OsString], environment: Environment) -> Option<Ending> {
    let (flags, command) = split(arguments)?;
    let said = |code, reason: &str| Ending { code, signal: 0, message: format!("hayloft: {reason}\n") };
    Some(match run(flags, command, environment)? {
        Outcome::Exited(code) => Ending { code, signal: 0, message: String::new() },
        Outcome::Signalled(signal) => Ending { code: 0, signal, message: String::new() },
        Outcome::NotRun(code, reason) => said(code, &reason),
        Outcome::FarmFailed(reason) => said(125, &submit::farm_failed(&reason)),
        Outcome::Nowhere(_) => return None,
    })
}
