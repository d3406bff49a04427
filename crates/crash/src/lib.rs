//! Crash points: names for the moments at which it matters what is durable already and what is not yet (ADR 0032).
//!
//! A program says [`point`] where it passes such a moment. With the feature `armed`, which only the tests of the built program
//! turn on, `HAYLOFT_CRASH_AT=NAME:N` kills the process as kill -9 does when it passes that point for the Nth time. Without
//! the feature nothing is left of it: no branch, no name in the binary. `docs/crash-points.md` lists all points, and
//! `crates/cli/tests/end_to_end/crash_points.rs` kills each of them.

#![forbid(unsafe_code)]

/// The variable that chooses a point, as in `commit.ordered:3`; without a number the first passing counts.
pub const VARIABLE: &str = "HAYLOFT_CRASH_AT";

/// Passes the point of this name, or ends the process there.
#[cfg(not(feature = "armed"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

/// Passes the point of this name, or ends the process there.
#[cfg(feature = "armed")]
pub fn point(name: &'static str) {
    armed::pass(name);
}

#[cfg(feature = "armed")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::process::{Signal, getpid, kill_process};

    /// The chosen point.
    pub(super) struct Chosen {
        name: String,
        /// How often it is to be passed still.
        left: AtomicU64,
    }

    impl Chosen {
        pub(super) fn parse(text: &str) -> Chosen {
            let (name, times) = match text.rsplit_once(':') {
                Some((name, times)) => (name, times.parse().expect("HAYLOFT_CRASH_AT is NAME or NAME:N")),
                None => (text, 1),
            };
            Chosen { name: name.to_owned(), left: AtomicU64::new(times) }
        }

        /// Whether this passing is the one that kills.
        pub(super) fn is_fatal(&self, name: &str) -> bool {
            name == self.name && self.left.fetch_sub(1, Ordering::SeqCst) == 1
        }
    }

    pub(super) fn pass(name: &'static str) {
        static CHOSEN: OnceLock<Option<Chosen>> = OnceLock::new();
        let chosen =
            CHOSEN.get_or_init(|| std::env::var(super::VARIABLE).ok().map(|text| Chosen::parse(&text)));
        if chosen.as_ref().is_some_and(|chosen| chosen.is_fatal(name)) {
            // Nothing runs in this process from here on, other threads neither.
            let killed = kill_process(getpid(), Signal::KILL);
            unreachable!("{killed:?}: a process can kill itself");
        }
    }
}

#[cfg(all(test, feature = "armed"))]
mod tests {
    use super::armed::Chosen;

    #[test]
    fn the_chosen_passing_of_the_chosen_point_kills_and_no_other() {
        let chosen = Chosen::parse("commit.ordered:3");
        let passed =
            ["commit.durable", "commit.ordered", "commit.ordered", "commit.ordered", "commit.ordered"];
        assert_eq!(passed.map(|name| chosen.is_fatal(name)), [false, false, false, true, false]);
        assert!(Chosen::parse("log.cut").is_fatal("log.cut"));
    }
}
