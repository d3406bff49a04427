//! Ending on request: SIGINT, SIGTERM and SIGHUP as a value instead of a sudden end.

use crate::sys;

/// The signals that ask for an end.
pub(crate) const ENDING: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Calls `act` with each ending signal, on a thread of its own. Call it before any other thread is
/// started.
pub(crate) fn on_ending(act: impl Fn(i32) + Send + 'static) {
    sys::block_signals(&ENDING);
    std::thread::spawn(move || {
        loop {
            act(sys::wait_signal(&ENDING));
        }
    });
}
