//! On a terminal, how far something has come.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Does something of which it is not known how far it has come; meanwhile a line says what is waited for, and for how long.
pub(crate) fn waited<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    shown(|| format!("{what}: {} s", begun.elapsed().as_secs()), work)
}

/// Does something; meanwhile a line says how far that has come, if standard error is a terminal.
pub(crate) fn shown<T>(text: impl Fn() -> String + Sync, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let telling = io::stderr().is_terminal().then(|| {
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    eprint!("\r\x1b[K{}", text());
                    std::thread::park_timeout(Duration::from_millis(200));
                }
                eprint!("\r\x1b[K");
            })
        });
        let done = work();
        over.store(true, Relaxed);
        // Nobody waits for the next line.
        telling.inspect(|telling| telling.thread().unpark());
        done
    })
}
