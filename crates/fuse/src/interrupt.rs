//! Interrupted requests.
//!
//! The kernel sends INTERRUPT when the process that waits for an answer gets a signal. The message may
//! overtake the request (another thread read it and has not handed it to the pool yet) or come after the
//! answer. It needs no answer of its own; asking the kernel to send it again would make both sides spin.
//! So numbers which match nothing are remembered, a few of them, until the request turns up; the rest
//! are forgotten oldest first, since numbers are never used twice.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// How many interrupts without a request are remembered.
const EARLY_MAX: usize = 64;

type Callback = Box<dyn FnOnce() + Send>;

/// Tells a blocked request that its caller gave up; the right answer is then EINTR.
#[derive(Default)]
pub struct Interrupt {
    set: AtomicBool,
    callbacks: Mutex<Vec<Callback>>,
    changed: Condvar,
}

impl Interrupt {
    /// Whether the caller gave up, or the mount is gone.
    pub fn interrupted(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// Waits until the caller gives up or the time is over; returns whether it gave up.
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let mut callbacks = self.callbacks.lock();
        self.changed.wait_while_for(&mut callbacks, |_| !self.interrupted(), timeout);
        self.interrupted()
    }

    /// Calls `callback` once when the caller gives up: at once if it already has, never if it doesn't.
    /// It runs on a transport thread and must not block.
    pub fn on_interrupt(&self, callback: impl FnOnce() + Send + 'static) {
        let mut callbacks = self.callbacks.lock();
        if self.interrupted() {
            drop(callbacks);
            callback();
        } else {
            callbacks.push(Box::new(callback));
        }
    }

    fn set(&self) {
        let callbacks = {
            let mut callbacks = self.callbacks.lock();
            self.set.store(true, Ordering::Release);
            self.changed.notify_all();
            std::mem::take(&mut *callbacks)
        };
        for callback in callbacks {
            callback();
        }
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interrupt").field("interrupted", &self.interrupted()).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    waiting: HashMap<u64, Arc<Interrupt>>,
    early: VecDeque<u64>,
    closed: bool,
}

/// Requests on the pool, by their number.
#[derive(Default)]
pub(crate) struct Interrupts {
    /// A leaf: no other lock is taken under it, callbacks run without it.
    state: Mutex<State>,
}

impl Interrupts {
    /// Makes the token of a request that goes to the pool.
    pub(crate) fn register(&self, unique: u64) -> Arc<Interrupt> {
        let token = Arc::new(Interrupt::default());
        let mut state = self.state.lock();
        let early = state.early.iter().position(|other| *other == unique);
        if let Some(index) = early {
            state.early.remove(index);
        }
        if early.is_some() || state.closed {
            token.set();
        }
        state.waiting.insert(unique, Arc::clone(&token));
        token
    }

    /// The request is answered.
    pub(crate) fn finish(&self, unique: u64) {
        self.state.lock().waiting.remove(&unique);
    }

    /// The kernel interrupts a request.
    pub(crate) fn interrupt(&self, unique: u64) {
        let token = {
            let mut state = self.state.lock();
            let token = state.waiting.get(&unique).cloned();
            if token.is_none() {
                if state.early.len() == EARLY_MAX {
                    state.early.pop_front();
                }
                state.early.push_back(unique);
            }
            token
        };
        if let Some(token) = token {
            token.set();
        }
    }

    /// The connection is gone: every request on the pool, now or later, is interrupted.
    pub(crate) fn close(&self) {
        let tokens: Vec<_> = {
            let mut state = self.state.lock();
            state.closed = true;
            state.waiting.values().cloned().collect()
        };
        for token in tokens {
            token.set();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn an_interrupt_reaches_its_request_before_or_after_registration() {
        let interrupts = Interrupts::default();
        let token = interrupts.register(2);
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        token.on_interrupt(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        assert!(!token.interrupted());
        interrupts.interrupt(2);
        assert!(token.interrupted() && token.wait_timeout(Duration::from_secs(60)));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        let counted = Arc::clone(&calls);
        token.on_interrupt(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.load(Ordering::Relaxed), 2);

        interrupts.interrupt(4);
        assert!(!interrupts.register(6).interrupted());
        assert!(interrupts.register(4).interrupted());
        assert!(interrupts.state.lock().early.is_empty());
    }

    #[test]
    fn unmatched_interrupts_are_bounded_and_closing_interrupts_all() {
        let interrupts = Interrupts::default();
        for unique in 0..1000 {
            interrupts.interrupt(unique * 2);
        }
        assert_eq!(interrupts.state.lock().early.len(), EARLY_MAX);
        let token = interrupts.register(5000);
        interrupts.finish(5000);
        let other = interrupts.register(5002);
        interrupts.close();
        assert!(!token.interrupted() && other.interrupted() && interrupts.register(5004).interrupted());
    }
}
