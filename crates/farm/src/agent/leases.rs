//! Until when the tasks of each submitter may run without further word of it.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Beats that are remembered: more than fit into the longest lease.
const BEATS: usize = 512;
/// A submitter that the broker has missed for so long has gone: it connects anew sooner than that, if it does.
const ABSENT: Duration = Duration::from_secs(3);

/// See the module's documentation.
pub(super) struct Leases {
    length: Duration,
    until: BTreeMap<String, Instant>,
    /// Since when the broker says of submitters that they are not there.
    absent: BTreeMap<String, Instant>,
    /// When which beat was sent.
    beats: VecDeque<(u64, Instant)>,
}

impl Leases {
    pub(super) fn new(length: Duration) -> Leases {
        Leases { length, until: BTreeMap::new(), absent: BTreeMap::new(), beats: VecDeque::new() }
    }

    /// How long one is.
    pub(super) fn length(&self) -> Duration {
        self.length
    }

    /// A beat is about to be sent.
    pub(super) fn beats(&mut self, beat: u64) {
        self.beats.push_back((beat, Instant::now()));
        if self.beats.len() > BEATS {
            self.beats.pop_front();
        }
    }

    /// A submitter has heard this beat: its tasks may run for a lease from when that was sent. False when that is too long ago.
    pub(super) fn extend(&mut self, client: &str, beat: u64) -> bool {
        let sent = self.beats.iter().rev().find(|(number, _)| *number == beat).map(|(_, at)| *at);
        let Some(until) = sent.map(|at| at + self.length) else { return false };
        if until <= Instant::now() {
            return false;
        }
        let lease = self.until.entry(client.to_owned()).or_insert(until);
        *lease = (*lease).max(until);
        self.absent.remove(client);
        true
    }

    /// The broker says that a submitter is not there.
    pub(super) fn unheard(&mut self, client: &str) {
        if self.until.contains_key(client) {
            self.absent.entry(client.to_owned()).or_insert_with(Instant::now);
        }
    }

    /// Submitters that were silent, or not there, for too long; they are forgotten.
    pub(super) fn over(&mut self) -> Vec<String> {
        let now = Instant::now();
        let patience = ABSENT.min(self.length / 2);
        let has_gone =
            |client: &String| self.absent.get(client).is_some_and(|since| *since + patience <= now);
        let is_over = |(client, until): &(&String, &Instant)| **until <= now || has_gone(client);
        let over: Vec<String> = self.until.iter().filter(is_over).map(|(client, _)| client.clone()).collect();
        for client in &over {
            self.until.remove(client);
            self.absent.remove(client);
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_silent_or_missed_is_over_and_who_comes_back_is_not() {
        let mut leases = Leases::new(Duration::from_millis(60));
        leases.beats(1);
        assert!(leases.extend("missed", 1) && leases.extend("back", 1) && !leases.extend("other", 2));
        ["missed", "back", "other"].iter().for_each(|client| leases.unheard(client));
        leases.beats(2);
        assert!(leases.extend("back", 2) && leases.over().is_empty());
        std::thread::sleep(Duration::from_millis(35));
        leases.beats(3);
        // A machine that stood still meanwhile has heard of its end already.
        if leases.extend("back", 3) {
            assert_eq!(leases.over(), ["missed"]);
        }
        std::thread::sleep(Duration::from_millis(70));
        assert_eq!(leases.over(), ["back"]);
        assert!(leases.over().is_empty() && !leases.extend("back", 3));
    }
}
