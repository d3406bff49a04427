//! What a task is to find at its host: read off the process that submits it.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use crate::execution::sys;
use crate::place::Place;
use crate::protocol::Spec;

/// Variables that are about this process, not about what it runs.
const LEFT_OUT: [&[u8]; 2] = [b"HAYLOFT_FARM_SOCKET", b"HAYLOFT_CONFIG"];

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
    environment.push(b"HAYLOFT_IN_TASK=1".to_vec());
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
    }
}

/// This process's environment, `NAME=VALUE` each.
pub fn environment() -> Vec<Vec<u8>> {
    let variable = |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    std::env::vars_os().map(variable).collect()
}

/// This process's file mode creation mask.
///
/// # Errors
/// When /proc is not there.
pub fn umask() -> io::Result<u32> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok())
        .ok_or_else(|| io::Error::other("/proc/self/status tells no umask"))
}

/// The name of a user; empty when there is none.
pub fn user_name(uid: u32) -> String {
    sys::user_name(uid).unwrap_or_default()
}

/// What tasks of one session of a terminal or a service have in common, unless they say otherwise.
pub fn build_name(user: &str, host: &str) -> String {
    let session = rustix::process::getsid(None).map_or(0, |session| session.as_raw_nonzero().get());
    format!("{user}@{host}:{session}")
}
