//! What a task is to find at its host: read off the process that submits it.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::{Mutex, PoisonError};

use crate::execution::sys;
use crate::place::Place;
use crate::protocol::Spec;

/// Set for what runs as a task: what is submitted from within runs there and then, in the slot that the task has.
pub const IN_TASK: &str = "HAYLOFT_IN_TASK";

/// Variables that are about this process, not about what it runs.
const LEFT_OUT: [&[u8]; 3] = [b"HAYLOFT_FARM_SOCKET", b"HAYLOFT_FARM_RULES", b"HAYLOFT_CONFIG"];

/// Variables in which programs are told of a job server.
const JOB_SERVERS: [&[u8]; 3] = [b"MAKEFLAGS=", b"MFLAGS=", b"CARGO_MAKEFLAGS="];

/// A task: a command in a folder of a volume, in this environment.
pub fn spec(
    command: Vec<OsString>,
    environment: Vec<Vec<u8>>,
    place: &Place,
    umask: u32,
    user: (u32, u32),
) -> Spec {
    let bytes = |path: &std::path::Path| path.as_os_str().as_bytes().to_vec();
    let left_out = |variable: &[u8]| {
        LEFT_OUT.iter().any(|name| variable.strip_prefix(*name).is_some_and(|rest| rest.starts_with(b"=")))
    };
    let mut environment: Vec<Vec<u8>> =
        environment.into_iter().filter(|variable| !left_out(variable)).collect();
    environment.push([IN_TASK.as_bytes(), b"=1"].concat());
    Spec {
        command: command.into_iter().map(OsString::into_vec).collect(),
        environment,
        volume: place.mount.volume.clone(),
        point: bytes(&place.mount.point),
        inner: bytes(&place.mount.inner),
        directory: bytes(&place.directory),
        umask,
        user: user_name(user.0),
        uid: user.0,
        gid: user.1,
        has_input: false,
        merged: false,
        layers: Vec::new(),
        isolated: false,
        records: false,
    }
}

/// This process's environment, `NAME=VALUE` each.
pub fn environment() -> Vec<Vec<u8>> {
    let variable = |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    std::env::vars_os().map(variable).collect()
}

/// An environment without the job server of make and cargo that it names: its descriptors, or its named pipe, are of this host. What
/// finds none runs one job, as fits the slot that it has.
pub fn without_job_server(environment: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let is_of_server = |word: &[u8]| word.starts_with(b"--jobserver-") || is_number_of_jobs(word);
    let without = |variable: Vec<u8>| {
        let name = JOB_SERVERS.iter().find(|name| variable.starts_with(name));
        let Some(name) = name.filter(|_| variable.windows(12).any(|part| part == b"--jobserver-")) else {
            return variable;
        };
        let words = variable[name.len()..].split(|byte| *byte == b' ').filter(|word| !is_of_server(word));
        [*name, &words.collect::<Vec<_>>().join(&b' ')].concat()
    };
    environment.into_iter().map(without).collect()
}

fn is_number_of_jobs(word: &[u8]) -> bool {
    word.strip_prefix(b"-j").is_some_and(|number| number.iter().all(u8::is_ascii_digit))
}

/// This process's file mode creation mask. No other thread may make files meanwhile: for a moment nobody else may do anything with them.
pub fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::from_bits_truncate(0o077));
    rustix::process::umask(mask);
    mask.bits()
}

/// The name of a user; empty when there is none. It is looked up once: a process submits for one user.
pub fn user_name(uid: u32) -> String {
    static LAST: Mutex<Option<(u32, String)>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*last {
        Some((known, name)) if *known == uid => name.clone(),
        _ => last.insert((uid, sys::user_name(uid).unwrap_or_default())).1.clone(),
    }
}

/// What tasks of one session of a terminal or a service have in common, unless they say otherwise.
pub fn build_name(user: &str, host: &str) -> String {
    let session = rustix::process::getsid(None).map_or(0, |session| session.as_raw_nonzero().get());
    format!("{user}@{host}:{session}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_server_of_this_host_is_not_named_elsewhere() {
        let without = |text: &str| {
            let environment = without_job_server(vec![text.as_bytes().to_vec()]);
            String::from_utf8(environment[0].clone()).unwrap()
        };
        assert_eq!(
            without("CARGO_MAKEFLAGS=-j --jobserver-fds=7,8 --jobserver-auth=7,8"),
            "CARGO_MAKEFLAGS="
        );
        assert_eq!(without("MAKEFLAGS=k -j4 --jobserver-auth=3,4 -- X=-jolly"), "MAKEFLAGS=k -- X=-jolly");
        assert_eq!(without("MAKEFLAGS=k -j4"), "MAKEFLAGS=k -j4");
        assert_eq!(without("OTHER=--jobserver-auth=3,4"), "OTHER=--jobserver-auth=3,4");
    }
}
