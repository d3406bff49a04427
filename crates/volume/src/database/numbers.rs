//! Which inode numbers a volume may give.
//!
//! No two members of a family give the same number, so a fork can take its origin's place under mounts that know the origin's
//! files. Each member has a **window** of 2^35 numbers for itself. Programs of 32 bits that were not built for large files
//! fail at numbers from 2^32 on, so a fork begins with a **run** of its origin's own numbers, and goes on in its window when
//! it has given all of these.

use hayloft_model::InoRange;

use crate::database::tables::{NumbersRow, VolumeRow};
use crate::error::VolumeError;

/// Numbers of a window.
const WINDOW: u64 = 1 << 35;

/// Numbers that a fork gets of its origin's.
const RUN: u64 = 1 << 17;

/// A shorter run is not worth being one.
const RUN_LEAST: u64 = 1 << 12;

/// Of numbers above this forks get none: the rest of those below 2^32 is for the volume itself.
const RUNS_END: u64 = 1 << 31;

/// What a volume may still give.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Numbers {
    /// The first one.
    pub(crate) next: u64,
    /// Where the run ends that this one is of; 0: it is of no run, but of the volume's window.
    pub(crate) end: u64,
    /// Where it goes on behind the run. Higher than the run.
    pub(crate) then: u64,
}

impl Numbers {
    /// Of no run.
    pub(crate) fn from(next: u64) -> Numbers {
        Numbers { next, ..Numbers::default() }
    }

    /// What a fork begins with: its run, if there is one, and the beginning of its window.
    pub(crate) fn of_fork(run: Option<(u64, u64)>, window: u64) -> Numbers {
        match run {
            Some((next, end)) => Numbers { next, end, then: window },
            None => Numbers::from(window),
        }
    }

    /// Up to `count` numbers, and one at least.
    pub(crate) fn take(&mut self, count: u64) -> InoRange {
        if self.end != 0 && self.next >= self.end {
            *self = Numbers::from(self.then);
        }
        let most = if self.end == 0 { u64::MAX } else { self.end };
        let range = InoRange { next: self.next, end: (self.next + count).min(most) };
        self.next = range.end;
        range
    }

    /// A run for a fork, if there is still room for one among the low numbers.
    pub(crate) fn take_run(&mut self) -> Option<(u64, u64)> {
        let left = self.present_end().saturating_sub(self.next);
        let count = RUN.min(left / 2);
        let has_room = count >= RUN_LEAST && self.next + count <= RUNS_END;
        has_room.then(|| self.take(count)).map(|run| (run.next, run.end))
    }

    /// What a fork has not given of its run, when the run is the last that was taken here.
    pub(crate) fn take_back(&mut self, fork: Numbers) {
        if fork.end != 0 && fork.end == self.next {
            self.next = fork.next;
        }
    }

    /// Whether this number was not given yet, and may be.
    pub(crate) fn may_give(&self, ino: u64) -> bool {
        let is_behind = self.end != 0 && (self.then..window_end(self.then)).contains(&ino);
        is_behind || (self.next..self.present_end()).contains(&ino)
    }

    /// The later of two states of one volume's numbers.
    pub(crate) fn later(self, other: Numbers) -> Numbers {
        if other.next > self.next { other } else { self }
    }

    fn present_end(&self) -> u64 {
        if self.end == 0 { window_end(self.next) } else { self.end }
    }
}

fn window_end(number: u64) -> u64 {
    (number / WINDOW + 1) * WINDOW
}

/// The window of a new member of a family: behind all that have been used.
///
/// # Errors
/// There were too many members.
pub(crate) fn window_after(used: impl IntoIterator<Item = u64>) -> Result<u64, VolumeError> {
    let next = window_end(used.into_iter().max().unwrap_or(0));
    match next + WINDOW <= hayloft_model::sound::NUMBERS {
        true => Ok(next),
        false => Err(VolumeError::Invalid("the family of the volume has used up its inode numbers")),
    }
}

impl VolumeRow {
    pub(crate) fn numbers(&self) -> Numbers {
        Numbers { next: self.next_ino, end: self.end_ino, then: self.then_ino }
    }

    /// What the volume gives whose window begins at `window`. If the database was made ready to take another one's place, that
    /// counts once the registry says so.
    pub(crate) fn numbers_of(&self, window: u64) -> Numbers {
        match &self.heir {
            Some(heir) if heir.window == window => {
                Numbers { next: heir.next_ino, end: heir.end_ino, then: heir.then_ino }
            }
            _ => self.numbers(),
        }
    }
}

impl NumbersRow {
    pub(crate) fn new(numbers: Numbers, window: u64) -> NumbersRow {
        NumbersRow { window, next_ino: numbers.next, end_ino: numbers.end, then_ino: numbers.then }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_members_are_beside_each_other() {
        assert_eq!(window_after([]).unwrap(), WINDOW);
        assert_eq!(window_after([0]).unwrap(), WINDOW);
        assert_eq!(window_after([0, WINDOW, 3 * WINDOW]).unwrap(), 4 * WINDOW);
        window_after([hayloft_model::sound::NUMBERS - WINDOW]).unwrap_err();
    }

    #[test]
    fn what_a_fork_gives_its_origin_does_not() {
        let mut origin = Numbers::from(5000);
        let run = origin.take_run().unwrap();
        assert_eq!(run, (5000, 5000 + RUN));
        let mut fork = Numbers::of_fork(Some(run), WINDOW);
        // A fork of the fork gets a part of its run, as long as that is worth it.
        let inner = fork.take_run().unwrap();
        assert_eq!((inner, fork.next), ((5000, 5000 + RUN / 2), 5000 + RUN / 2));
        while fork.take_run().is_some() {}
        assert!(fork.end - fork.next < 2 * RUN_LEAST);
        let mut given = Vec::new();
        while fork.next < 2 * WINDOW - 7_000_000_000 {
            let (before, range) = (fork, fork.take(3_000_000_000));
            assert!(range.left() > 0 && !origin.may_give(range.next) && !origin.may_give(range.end - 1));
            let next = { fork }.take(1).next;
            assert!(before.may_give(range.next) && !fork.may_give(range.next) && fork.may_give(next));
            given.push(range.next);
        }
        assert!(given[0] < 5000 + RUN && given[1] == WINDOW && given.len() > 5, "{given:?}");
        assert!(!fork.may_give(2 * WINDOW));
        // The origin keeps the rest of the low numbers for itself.
        let mut count = 0;
        while origin.take_run().is_some() {
            count += 1;
        }
        assert!(count > 16_000 && origin.next <= RUNS_END, "{count}");
        assert_eq!(origin.take(10).left(), 10);
    }

    #[test]
    fn what_the_last_fork_has_left_comes_back() {
        let mut origin = Numbers::from(5000);
        let mut fork = Numbers::of_fork(origin.take_run(), WINDOW);
        fork.take(70);
        let (with, mut without) = (
            {
                let mut it = origin;
                it.take_back(fork);
                it
            },
            origin,
        );
        assert_eq!(with, Numbers::from(5070));
        without.take(1);
        let before = without;
        without.take_back(fork);
        assert_eq!(without, before, "another run, or a number, was taken since");
        let mut spent = fork;
        spent.take(RUN);
        spent.take(1);
        assert_eq!(spent.next, WINDOW + 1);
        origin.take_back(spent);
        assert_eq!(origin, Numbers::from(5000 + RUN));
    }
}
