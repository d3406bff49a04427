//! Ending on request: SIGINT, SIGTERM and SIGHUP as a value instead of a sudden end.

use std::io::{self, Read};

use crate::sys;

/// The signals that ask for an end.
pub(crate) const ENDING: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Calls `act` with each ending signal, on a thread of its own.
///
/// # Errors
/// When signals cannot be caught.
pub(crate) fn on_ending(act: impl Fn(i32) + Send + 'static) -> io::Result<()> {
    on(&ENDING, act)
}

/// Calls `act` with each of these signals that comes, on a thread of its own.
///
/// # Errors
/// When signals cannot be caught.
pub(crate) fn on(signals: &[i32], act: impl Fn(i32) + Send + 'static) -> io::Result<()> {
    let mut signals = sys::catch_signals(signals)?;
    std::thread::spawn(move || {
        let mut number = [0];
        while signals.read_exact(&mut number).is_ok() {
            act(number[0].into());
        }
    });
    Ok(())
}
