//! Rows that are kept for calls that have fetched them.
//!
//! A host that writes a file without pause takes it from its readers as soon as it can. A reader needs the row and then what lies in
//! it, which are two answers of the server: it would never have both. So a row that goes because somebody else is to own the file stays until
//! calls that have waited for it, or for what it leads to, are done, but for no longer than what is recalled is kept for them.

use std::collections::HashMap;
use std::time::Instant;

use hayloft_model::Ino;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxBuildHasher;

use crate::core::Client;
use crate::sharing::recalls::USE_PATIENCE;

/// Rows that have to go.
#[derive(Debug)]
struct Leaving {
    /// Connection and event.
    ack: (u64, u64),
    inos: Vec<Ino>,
    since: Instant,
    /// Calls that have begun later do not count.
    below: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Calls that need a row, by their numbers.
    needed: HashMap<Ino, Vec<u64>, FxBuildHasher>,
    next: u64,
    leaving: Vec<Leaving>,
    is_ended: bool,
}

impl State {
    fn needs_any(&self, inos: &[Ino], below: u64) -> bool {
        let of = |ino: &Ino| self.needed.get(ino).into_iter().flatten();
        inos.iter().any(|ino| of(ino).any(|number| *number < below))
    }
}

/// Rows that calls need.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    state: Mutex<State>,
    changed: Condvar,
}

/// As long as this lives a call needs a row.
pub(crate) struct Need<'a> {
    kept: &'a Kept,
    ino: Ino,
    number: u64,
}

impl Need<'_> {
    pub(crate) fn is_of(&self, ino: Ino) -> bool {
        self.ino == ino
    }
}

impl Kept {
    /// A call is going to wait for the row, or for what it leads to.
    pub(crate) fn need(&self, ino: Ino) -> Need<'_> {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.needed.entry(ino).or_default().push(number);
        Need { kept: self, ino, number }
    }

    /// These rows, which are here, have to go. `false`: no call needs them, and nothing was noted.
    pub(crate) fn keeps(&self, ack: (u64, u64), inos: &[Ino]) -> bool {
        let mut state = self.state.lock();
        let below = state.next;
        let is_needed = !state.is_ended && state.needs_any(inos, below);
        if is_needed {
            state.leaving.push(Leaving { ack, inos: inos.to_vec(), since: Instant::now(), below });
            self.changed.notify_all();
        }
        is_needed
    }

    /// Waits for rows that nobody needs any more, or that were kept for long enough, with whether they were; `None` at the end.
    fn next(&self) -> Option<(Leaving, bool)> {
        let mut state = self.state.lock();
        loop {
            if state.is_ended {
                return None;
            }
            let is_due = |leaving: &Leaving| {
                leaving.since.elapsed() >= USE_PATIENCE || !state.needs_any(&leaving.inos, leaving.below)
            };
            if let Some(at) = state.leaving.iter().position(is_due) {
                let leaving = state.leaving.swap_remove(at);
                let is_over = state.needs_any(&leaving.inos, leaving.below);
                return Some((leaving, is_over));
            }
            match state.leaving.iter().map(|leaving| leaving.since + USE_PATIENCE).min() {
                Some(due) => {
                    self.changed.wait_until(&mut state, due);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// The mount is gone.
    pub(crate) fn end(&self) {
        self.state.lock().is_ended = true;
        self.changed.notify_all();
    }
}

impl Drop for Need<'_> {
    fn drop(&mut self) {
        let mut state = self.kept.state.lock();
        if let Some(numbers) = state.needed.get_mut(&self.ino) {
            numbers.retain(|number| *number != self.number);
            if numbers.is_empty() {
                state.needed.remove(&self.ino);
            }
        }
        if !state.leaving.is_empty() {
            self.kept.changed.notify_all();
        }
    }
}

/// Drops rows that calls have needed, until the mount is gone.
pub(crate) fn run(client: &Client) {
    while let Some((Leaving { ack, inos, .. }, is_over)) = client.kept.next() {
        client.stats.recalls_kept.add(u64::from(is_over));
        client.drop_rows(client.core(), ack, &inos);
        // Nobody may be reading the stream, who acknowledges otherwise what the kernel need not be told.
        client.acknowledge_one(ack);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_stays_until_the_last_call_is_done_that_needs_it() {
        let kept = Kept::default();
        let (one, other) = (Ino(1), Ino(2));
        assert!(!kept.keeps((1, 1), &[one]), "nobody needs it");
        let (first, second) = (kept.need(one), kept.need(one));
        assert!(kept.keeps((1, 2), &[other, one]) && !kept.keeps((1, 3), &[other]));
        let _later = kept.need(one);
        drop(first);
        let begun = Instant::now();
        let last = std::thread::scope(|scope| {
            let next = scope.spawn(|| kept.next());
            drop(second);
            next.join().unwrap()
        });
        let (leaving, is_over) = last.unwrap();
        assert_eq!((leaving.ack, leaving.inos), ((1, 2), vec![other, one]));
        // On a machine that stands still for that long it was kept to the end.
        assert!(!is_over || begun.elapsed() >= USE_PATIENCE);
        kept.end();
        assert!(kept.next().is_none());
    }

    #[test]
    fn a_row_goes_in_the_end_though_a_call_needs_it() {
        let kept = Kept::default();
        let _need = kept.need(Ino(1));
        assert!(kept.keeps((1, 1), &[Ino(1)]));
        let (leaving, is_over) = kept.next().unwrap();
        assert!(is_over && leaving.since.elapsed() >= USE_PATIENCE);
    }
}
