//! The small program, `hayloft-task`: what is started for each task, where it is installed beside `hayloft`. It starts in a fraction of the
//! time, and is copied in less.
//!
//! Where it can, it does all that a task's process does before the C library has begun (ADR 62).
//! What runs there, [`again::serve`](crate::relay::again::serve) and [`recipe::serve`](crate::make::recipe::serve), may compute, allocate, and make
//! system calls; it is given what the process was started with. It must not use what the C library sets up: the standard library's environment,
//! arguments, files by path, streams, and threads.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use hayloft_process as process;

use crate::submit;

/// Its name.
pub const NAME: &str = "hayloft-task";

/// What programs of this crate are built from: its version, and a number made of its sources. Two that say the same understand each other.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " ", env!("HAYLOFT_FARM_SOURCES"));

/// The variables of a process, `NAME=VALUE` each.
#[derive(Debug, Clone)]
pub struct Environment(pub Vec<Vec<u8>>);

impl Environment {
    /// This process's, by the standard library.
    pub fn of_process() -> Environment {
        Environment(submit::environment())
    }

    /// The value of a variable, if it is set.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.iter().find_map(|variable| value(variable, name)).map(OsStr::from_bytes)
    }

    /// Sets a variable, whatever it was before.
    pub(crate) fn set(&mut self, name: &str, to: &[u8]) {
        self.0.retain(|variable| value(variable, name).is_none());
        self.0.push([name.as_bytes(), b"=", to].concat());
    }
}

/// The value of a variable if it is of this name.
fn value<'a>(variable: &'a [u8], name: &str) -> Option<&'a [u8]> {
    variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

/// How a process ends that has stood for a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// The exit code.
    pub code: i32,
    /// The signal that has ended the task, and ends this process; 0 for none.
    pub signal: i32,
    /// What is said on standard error before that.
    pub message: String,
}

impl Ending {
    /// Says what is to be said; gives the exit code. Does not return if a signal ends this process.
    pub fn leave(self) -> u8 {
        let mut rest = self.message.as_bytes();
        if !rest.is_empty() {
            process::ignore_broken_pipes();
        }
        while !rest.is_empty() {
            match rustix::io::write(rustix::stdio::stderr(), rest) {
                Ok(0) => break,
                Ok(count) => rest = &rest[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => break,
            }
        }
        if self.signal == 0 {
            return self.code as u8;
        }
        submit::end_by(self.signal);
        128u8.wrapping_add(self.signal as u8)
    }
}

/// Standard descriptors that are closed become `/dev/null`, so that nothing else gets their numbers. What this process becomes finds them closed.
pub(crate) fn hold_standard_descriptors() {
    use rustix::fs::{Mode, OFlags};
    for standard in [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()] {
        if rustix::io::fcntl_getfd(standard).is_err()
            && let Ok(null) = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        {
            // It has the lowest number that is free: this one.
            std::mem::forget(null);
        }
    }
}

/// The current folder.
///
/// # Errors
/// When it is gone.
pub(crate) fn current_folder() -> std::io::Result<Vec<u8>> {
    Ok(rustix::process::getcwd(Vec::new())?.into_bytes())
}

/// All of a file; nothing where there is none.
pub(crate) fn content(path: &str) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(path, flags, rustix::fs::Mode::empty()) else { return all };
    while let Ok(count @ 1..) = rustix::io::read(&file, &mut buffer[..]) {
        all.extend_from_slice(&buffer[..count]);
    }
    all
}

/// Arguments, or variables, as bytes.
pub(crate) fn bytes(all: &[OsString]) -> Vec<Vec<u8>> {
    all.iter().map(|one| one.clone().into_vec()).collect()
}

/// Where it is, if it is beside this program and was built from the same sources.
pub fn beside(program: &Path) -> Option<PathBuf> {
    let small = program.with_file_name(NAME);
    let said = std::process::Command::new(&small).arg("--version").output().ok()?;
    let is_ours = said.stdout.trim_ascii() == BUILD.as_bytes();
    if !is_ours {
        tracing::warn!("{} is of another build than this program, and not used", small.display());
    }
    is_ours.then_some(small)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::write_program;

    #[test]
    fn one_of_the_same_version_and_other_sources_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (large, small) = (dir.path().join("hayloft"), dir.path().join(NAME));
        assert_eq!(beside(&large), None);
        for (says, is_used) in [(BUILD, true), (env!("CARGO_PKG_VERSION"), false)] {
            write_program(&small, &format!("#!/bin/sh\necho {says}\n"));
            assert_eq!(beside(&large), is_used.then(|| small.clone()), "{says}");
        }
    }
}
