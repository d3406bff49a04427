//! Interrupted requests.
//!
//! The kernel sends INTERRUPT, once, when the process that waits for an answer gets a signal, of whatever kind. A file
//! system on a disk is not disturbed by signals, unless they end the process or it waits for a lock; so a request is given
//! up only then. Whether its caller is being ended is looked up, since a later signal is not told, and since the message
//! gets lost when the signal comes while io_uring hands the request over.
//!
//! The message may overtake the request (another thread read it and has not handed it to the pool yet) or come after the
//! answer. It needs no answer of its own; asking the kernel to send it again would make both sides spin.
//! So numbers which match nothing are remembered, a few of them, until the request turns up; the rest
//! are forgotten oldest first, since numbers are never used twice.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::handling::caller::{self, Fate};

/// How many interrupts without a request are remembered.
const EARLY_MAX: usize = 64;
/// How often a caller that had a signal is looked at, and one that had none.
const LOOK_EACH: Duration = Duration::from_millis(50);
const LOOK_UNASKED_EACH: Duration = Duration::from_secs(1);
/// How long a caller that had a signal is waited for when nothing can be known of it (it is in another PID namespace).
const UNKNOWN_PATIENCE: Duration = Duration::from_secs(30);

/// Tells a request that waits whether it is to be given up; the right answer is then EINTR.
#[derive(Debug)]
pub struct Interrupt {
    /// The thread that made the request; 0 when it is in another PID namespace.
    caller: u32,
    /// It waits for a lock: any signal ends that.
    for_lock: bool,
    state: Mutex<Seen>,
    changed: Condvar,
}

/// What is known of a caller.
#[derive(Debug)]
struct Seen {
    /// When it had a signal.
    signalled: Option<Instant>,
    /// When it was looked at last, or the request came.
    looked: Instant,
    /// It is being ended, or the mount is gone.
    over: bool,
}

impl Interrupt {
    fn new(caller: u32, for_lock: bool) -> Interrupt {
        let seen = Seen { signalled: None, looked: Instant::now(), over: false };
        Interrupt { caller, for_lock, state: Mutex::new(seen), changed: Condvar::new() }
    }

    /// Whether the request is to be given up: its caller is being ended, or waits for a lock and had a signal, or the
    /// mount is gone.
    pub fn interrupted(&self) -> bool {
        let mut seen = self.state.lock();
        (self.for_lock && seen.signalled.is_some()) || self.look(&mut seen)
    }

    /// Whether nobody will hear the answer: the caller is being ended, or the mount is gone.
    pub fn abandoned(&self) -> bool {
        self.look(&mut self.state.lock())
    }

    /// The same, looked up now, however short ago that was done.
    pub fn abandoned_now(&self) -> bool {
        let mut seen = self.state.lock();
        seen.over |= caller::fate(self.caller) == Fate::Ends;
        seen.over
    }

    /// Waits until the request is to be given up or the time is over; returns whether it is to be given up.
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while !self.interrupted() && Instant::now() < deadline {
            let mut seen = self.state.lock();
            let each = if seen.signalled.is_some() { LOOK_EACH } else { LOOK_UNASKED_EACH };
            if !seen.over {
                self.changed.wait_until(&mut seen, deadline.min(Instant::now() + each));
            }
        }
        self.interrupted()
    }

    /// Looks at the caller, if it is time.
    fn look(&self, seen: &mut Seen) -> bool {
        let each = if seen.signalled.is_some() { LOOK_EACH } else { LOOK_UNASKED_EACH };
        if seen.over || seen.looked.elapsed() < each {
            return seen.over;
        }
        seen.over = match caller::fate(self.caller) {
            Fate::Ends => true,
            Fate::GoesOn => false,
            Fate::Unknown => seen.signalled.is_some_and(|since| since.elapsed() > UNKNOWN_PATIENCE),
        };
        seen.looked = Instant::now();
        seen.over
    }

    /// The caller had a signal, or (`over`) the mount is gone.
    fn set(&self, over: bool) {
        let mut seen = self.state.lock();
        seen.over |= over;
        let now = Instant::now();
        seen.signalled.get_or_insert(now);
        // It is looked at at once.
        seen.looked = now.checked_sub(LOOK_EACH).unwrap_or(now);
        self.changed.notify_all();
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
    /// Only a token's own state is locked under it.
    state: Mutex<State>,
}

impl Interrupts {
    /// Makes the token of a request that goes to the pool, made by the thread `caller`; `for_lock`: it waits for a lock.
    pub(crate) fn register(&self, unique: u64, caller: u32, for_lock: bool) -> Arc<Interrupt> {
        let token = Arc::new(Interrupt::new(caller, for_lock));
        let mut state = self.state.lock();
        let early = state.early.iter().position(|other| *other == unique);
        if let Some(index) = early {
            state.early.remove(index);
        }
        if early.is_some() || state.closed {
            token.set(state.closed);
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
            token.set(false);
        }
    }

    /// The connection is gone: every request on the pool, now or later, is interrupted.
    pub(crate) fn close(&self) {
        let tokens: Vec<_> = {
            let mut state = self.state.lock();
            state.closed = true;
            state.waiting.values().cloned().collect()
        };
        tokens.iter().for_each(|token| token.set(true));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_reaches_its_request_before_or_after_registration() {
        let interrupts = Interrupts::default();
        let token = interrupts.register(2, 0, true);
        assert!(!token.interrupted());
        interrupts.interrupt(2);
        assert!(token.interrupted() && token.wait_timeout(Duration::from_secs(60)));

        interrupts.interrupt(4);
        assert!(!interrupts.register(6, 0, true).interrupted());
        assert!(interrupts.register(4, 0, true).interrupted());
        assert!(interrupts.state.lock().early.is_empty());
    }

    #[test]
    fn a_signal_ends_only_what_waits_for_a_lock() {
        let interrupts = Interrupts::default();
        // Nobody ends this thread.
        let here = caller::tests::own_tid();
        let tokens = [interrupts.register(2, here, false), interrupts.register(4, here, true)];
        for unique in [2, 4] {
            interrupts.interrupt(unique);
        }
        assert_eq!(tokens.each_ref().map(|token| token.interrupted()), [false, true]);
        assert!(!tokens[0].wait_timeout(Duration::from_millis(120)));
        assert!(tokens.iter().all(|token| !token.abandoned()));
        interrupts.close();
        assert!(tokens.iter().all(|token| token.abandoned() && token.interrupted()));
    }

    #[test]
    fn unmatched_interrupts_are_bounded_and_closing_interrupts_all() {
        let interrupts = Interrupts::default();
        for unique in 0..1000 {
            interrupts.interrupt(unique * 2);
        }
        assert_eq!(interrupts.state.lock().early.len(), EARLY_MAX);
        let token = interrupts.register(5000, 0, false);
        interrupts.finish(5000);
        let other = interrupts.register(5002, 0, false);
        interrupts.close();
        assert!(!token.interrupted() && other.interrupted());
        assert!(interrupts.register(5004, 0, false).interrupted());
    }
}
