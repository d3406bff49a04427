//! On a terminal, how far something has come.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Does something; meanwhile a line says how far that has come, if standard error is a terminal.
pub(crate) fn shown<T>(text: impl Fn() -> String + Sync, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if io::stderr().is_terminal() {
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    eprint!("\r\x1b[K{}", text());
                    std::thread::sleep(Duration::from_millis(200));
                }
                eprint!("\r\x1b[K");
            });
        }
        let done = work();
        over.store(true, Relaxed);
        done
    })
}
