//! Exit codes, and the error that carries one.

use std::fmt;
use std::process::ExitCode;

/// What the process's exit code says. Documented in `hayloft --help` and `docs/operations.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// Something failed that has no code of its own.
    Failed = 1,
    /// The command line, the environment or a configuration file is wrong.
    Usage = 2,
    /// Nobody answers at the server's address.
    Unreachable = 3,
    /// There is no such volume, root or layer.
    NoVolume = 4,
    /// The volume, the folder or the mount is in use.
    Busy = 5,
    /// Not permitted.
    Denied = 6,
    /// This machine lacks something: FUSE, a program.
    Missing = 7,
    /// The store is full or the quota is used up; a root finds too little memory.
    NoSpace = 8,
    /// What would be replaced is there already: a name, or changes of others.
    Exists = 9,
    /// A check found damage.
    Damaged = 10,
    /// `run` or `try -- COMMAND` itself failed, not the command.
    Run = 125,
}

impl Exit {
    /// The code as a number.
    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    /// The exit with this number; [`Exit::Failed`] for any other.
    pub(crate) fn from_code(code: u8) -> Exit {
        use Exit::*;
        [Usage, Unreachable, NoVolume, Busy, Denied, Missing, NoSpace, Exists, Damaged, Run]
            .into_iter()
            .find(|exit| exit.code() == code)
            .unwrap_or(Failed)
    }
}

/// An error that decides the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The code.
    pub exit: Exit,
    /// One clear sentence.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// An error with a code.
pub(crate) fn failure(exit: Exit, message: impl Into<String>) -> anyhow::Error {
    Failure { exit, message: message.into() }.into()
}

/// The code that an error asks for.
pub(crate) fn exit_of(error: &anyhow::Error) -> Exit {
    error.downcast_ref::<Failure>().map_or(Exit::Failed, |failure| failure.exit)
}

/// Ends a command: prints the error, if there is one, and gives the code.
pub(crate) fn finish(outcome: anyhow::Result<u8>) -> ExitCode {
    ExitCode::from(code_of(outcome))
}

/// The same, as a number.
pub(crate) fn code_of(outcome: anyhow::Result<u8>) -> u8 {
    outcome.unwrap_or_else(|error| {
        eprintln!("hayloft: {error:#}");
        exit_of(&error).code()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_code_survives_context() {
        let error = Err::<(), _>(failure(Exit::Busy, "in use")).context("cannot unmount").unwrap_err();
        assert_eq!(exit_of(&error), Exit::Busy);
        assert_eq!(format!("{error:#}"), "cannot unmount: in use");
    }

    #[test]
    fn codes_are_read_back() {
        for code in 2..=10 {
            assert_eq!(Exit::from_code(code).code(), code);
        }
        assert_eq!(Exit::from_code(77), Exit::Failed);
    }
}
